//! Observing and comparing models through the real runtime, against numbers worked out in another way.

mod child;
mod recorded;
mod rounded;
mod toy;
