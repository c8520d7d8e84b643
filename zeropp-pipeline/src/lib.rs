//! Pipeline schedules as data, and the executor that runs them.

pub mod ascii;
pub mod ir;
pub mod judge;
pub mod links;
pub mod lower;
pub mod memory;
pub mod schedules;
pub mod simulate;
pub mod timeline;
pub mod verify;
