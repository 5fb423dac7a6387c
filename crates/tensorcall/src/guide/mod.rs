//! A guide: how to build distributed programs with this crate, from the first call to many hosts.
//!
//! 1. [`start`]: two workers and a call
//! 2. [`functions`]: what others can call: types, state, `async`, who calls
//! 3. [`tensors`]: memory that travels without being copied
//! 4. [`rrefs`]: values that stay where they are
//! 5. [`gradients`]: backward passes over several workers
//! 6. [`errors`]: what can go wrong, how to tell, and what never happens
//! 7. [`deployment`]: several processes and hosts, Python workers, security

#[doc = include_str!("start.md")]
pub mod start {}

#[doc = include_str!("functions.md")]
pub mod functions {}

#[doc = include_str!("tensors.md")]
#[cfg_attr(feature = "ndarray", doc = include_str!("ndarray.md"))]
pub mod tensors {}

#[doc = include_str!("rrefs.md")]
pub mod rrefs {}

#[cfg_attr(feature = "candle", doc = include_str!("gradients.md"))]
#[cfg_attr(not(feature = "candle"), doc = "Backward passes over several workers need the feature `candle`.")]
pub mod gradients {}

#[doc = include_str!("errors.md")]
pub mod errors {}

#[doc = include_str!("deployment.md")]
pub mod deployment {}
