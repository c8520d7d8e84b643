//! Pipeline schedules as data, and the executor that runs them.

pub mod ir;
pub mod judge;
pub mod schedules;
pub mod timeline;
