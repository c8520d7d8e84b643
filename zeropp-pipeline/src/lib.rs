//! The executor that runs a schedule on one rank. The schedules themselves are `zeropp-schedule`'s,
//! re-exported here.

pub mod executor;

pub use zeropp_schedule::{
    ascii, check, costs, draw, exchange, head, ir, links, lower, memory, metrics, report,
    schedules, simulate, timeline, verify,
};
