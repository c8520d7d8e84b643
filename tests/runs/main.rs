//! Whole runs on threads: losses, gradients, bits, counts and memory of every layout and schedule.
//!
//! One program, for each of them takes as long to link as its tests take to run. What counts a
//! process's allocations, takes its signals or installs hooks has a program of its own.

mod adapters;
mod all_schedules;
mod bf16;
mod by_layer;
mod checkpoint;
#[path = "../common/mod.rs"]
mod common;
mod costs;
mod counts;
mod dropout;
mod emulation;
mod evaluation;
mod examples;
mod experts;
mod families;
mod frozen;
mod generate;
mod inputs;
mod late;
mod layers;
mod masks;
mod memory;
mod offload;
mod optimizers;
mod oracle;
mod own_layers;
mod own_parts;
mod recompute;
mod resume;
mod same_bits;
mod slices;
mod split_head;
mod states;
mod torch_training;
mod uneven;
