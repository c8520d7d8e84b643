#![doc = include_str!("../README.md")]

mod activation;
mod cost;
pub mod decoder;
pub mod gpt;
pub mod head;
pub mod hf_config;
pub mod hf_written;
pub mod layer;
pub mod optimizer;
pub mod params;
pub mod parts;
pub mod presets;
mod recompute;
mod rotary;
pub mod shared_rows;
pub mod slots;
pub mod tensors;
pub mod tuning;

pub use activation::Activation;
pub use recompute::Recompute;
