//! Numbers and models: layers with a split backward and the kernels under them, the built-in
//! models, parameters, devices and the bytes that are counted. Data and files are `zeropp-data`'s.
//!
//! Nothing here knows another rank or a shard, and of schedules only by which kinds memory is
//! predicted.

pub mod adamw;
#[cfg(feature = "cuda")]
mod blas;
pub mod check;
pub mod choice;
pub mod cpu_tensor;
#[cfg(feature = "cube")]
mod cube;
pub mod device;
pub mod field_error;
pub mod layer;
pub mod meter;
pub mod metrics;
pub mod model;
pub mod past;
pub mod rng;
pub mod sampling;
pub mod split;
pub mod squares;
pub mod stock;

pub use zeropp_data::{choice, files, threads, tokens as data};
pub use zeropp_kernels as kernels;
pub use zeropp_model::{head, optimizer, params, shared_rows};
