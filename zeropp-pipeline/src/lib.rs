//! Pipeline schedules as data, and the executor that runs them.

pub mod draw;
pub mod exchange;
pub mod ir;
pub mod timeline;
