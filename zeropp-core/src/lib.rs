//! What every part of zeropp shares: the mesh, the communicator and its engines, layers with a
//! split backward, the built-in models, data, configuration and measurements.
//!
//! Nothing here knows a schedule or a shard: `zeropp-zero3` and `zeropp-pipeline` build on it.

pub mod comm;
pub mod config;
#[cfg(feature = "cube")]
mod cube;
pub mod data;
pub mod device;
pub mod files;
pub mod flight;
pub mod groups;
pub mod host;
pub mod kernels;
pub mod launch;
pub mod layer;
pub mod mesh;
pub mod meter;
pub mod metrics;
pub mod model;
pub mod params;
pub mod placement;
pub mod rendezvous;
pub mod rng;
pub mod split;
pub mod stock;
