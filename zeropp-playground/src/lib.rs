#![doc = include_str!("../README.md")]

mod answer;
#[cfg(target_arch = "wasm32")]
pub mod exports;
#[cfg(not(target_arch = "wasm32"))]
mod page;

pub use answer::answer;
#[cfg(not(target_arch = "wasm32"))]
pub use page::page;
