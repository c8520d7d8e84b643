//! The executor that runs a schedule on one rank, and what explains a run that failed. The
//! schedules themselves are `zeropp-schedule`'s, re-exported here.

pub mod executor;
pub mod flight;

pub use zeropp_schedule::{
    ascii, check, costs, draw, exchange, ir, links, lower, memory, metrics, report, schedules,
    simulate, timeline, verify,
};
