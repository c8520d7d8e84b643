//! Pipeline schedules as data, and the executor that runs them.

pub mod executor;
pub mod ir;
pub mod partition;
pub mod timeline;
