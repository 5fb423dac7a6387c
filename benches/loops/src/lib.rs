//! What the Rust programs that are measured have in common.
//!
//! A program is both the caller and, started again by itself, the callee. It brings a [`Client`]; [`run`]
//! times it and prints one line of JSON per figure, named as in `python/benches/workloads.py`.

mod callee;
mod cpu;
mod figure;
mod settings;
mod work;

pub use callee::Callee;
pub use settings::{Role, Settings, Way};
pub use work::{Client, LARGEST, run};
