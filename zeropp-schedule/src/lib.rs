//! Pipeline schedules as data: generated, lowered, verified, simulated, drawn and exchanged.
//!
//! Nothing here computes a tensor, starts a thread, reads a clock or opens a file.

pub mod ascii;
pub mod budgeted;
pub mod draw;
pub mod exchange;
pub mod ir;
pub mod judge;
pub mod links;
pub mod lower;
pub mod memory;
pub mod report;
pub mod schedules;
pub mod simulate;
pub mod timeline;
pub mod verify;
