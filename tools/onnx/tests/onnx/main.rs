//! Real models by real exporters, hostile files, and every kind of tensor, through the public interface.

mod models;
mod read;
