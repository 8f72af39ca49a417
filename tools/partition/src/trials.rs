//! Random problems, and what must hold for all of them.

mod exact;
mod instances;
mod laws;
mod programs;
mod sizes;
mod tables;
mod worked;
