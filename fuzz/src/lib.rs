//! What the fuzz targets do, apart from fuzzing.

pub mod bodies;
pub mod operations;
pub mod passes;
