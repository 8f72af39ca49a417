//! Tests of the planner: random problems with the properties that must hold for all of them, and worked examples.

mod brute_force_tables;
mod exact;
mod few_choices;
mod instances;
mod laws;
mod programs;
mod sizes;
mod worked;
