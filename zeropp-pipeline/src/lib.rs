//! Pipeline schedules as data, and the executor that runs them.

pub mod ascii;
pub mod draw;
pub mod exchange;
pub mod executor;
pub mod flight;
pub mod ir;
pub mod judge;
pub mod links;
pub mod lower;
pub mod memory;
pub mod partition;
pub mod report;
pub mod schedules;
pub mod simulate;
pub mod timeline;
pub mod verify;
