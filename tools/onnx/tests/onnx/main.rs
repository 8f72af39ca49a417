//! Tests of the public interface: models by real exporters, hostile files, and every kind of tensor.

mod build;
mod conditional;
mod damage;
mod descriptor;
mod early_router;
mod extract;
mod flatten;
mod generated;
mod head;
mod hostile;
mod lift;
mod models;
mod quantize;
mod read;
mod round;
mod row_weights;
mod rows;
mod samples;
mod state_shape;
mod store;
mod structure;
mod tensors;
