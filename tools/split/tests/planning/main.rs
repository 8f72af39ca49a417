//! `hpp-split` asked to plan: with costs from files, for targets, over a range, and with settings that make no sense.

mod costs;
mod machine;
mod outputs;
mod refusals;
mod streaming;
mod support;
