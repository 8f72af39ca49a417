//! The `hpp-exec` command.

fn main() {}
