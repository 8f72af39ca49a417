//! One test for each rule: a good plan, one thing changed, one finding.
