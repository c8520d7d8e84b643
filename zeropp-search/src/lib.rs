#![doc = include_str!("../README.md")]

pub mod bound;
pub mod budgeted;
pub mod judge;
mod kinds;

pub use kinds::{generate, generate_with_costs};
