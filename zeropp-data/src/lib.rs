//! The data of a run: files, the tokens in them, and which tokens a sample is.
//!
//! Nothing here knows Burn, a model or another rank; a sample is a function of seed, step and its
//! index alone.

pub mod choices;
pub mod files;
pub mod rng;
pub mod threads;
pub mod tokens;
