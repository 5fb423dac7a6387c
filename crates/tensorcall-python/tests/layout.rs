//! Runs the unit tests of `tensor/layout.rs`, which needs no interpreter. (The extension itself has
//! no Rust tests: its symbols are those of a running Python.)

#[path = "../src/tensor/layout.rs"]
mod layout;
