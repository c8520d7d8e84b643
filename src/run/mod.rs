//! The ranks of this process at work: what each does in a step, what they exchange, how they end.

pub(crate) mod agreement;
pub(crate) mod behind;
pub(crate) mod collect;
pub(crate) mod context;
pub(crate) mod diagnose;
pub(crate) mod evaluated;
pub(crate) mod evaluation;
pub(crate) mod failed;
pub(crate) mod figures;
pub(crate) mod layers;
pub(crate) mod measured;
pub(crate) mod processes;
pub(crate) mod rank;
pub(crate) mod ranks;
pub(crate) mod request;
pub(crate) mod reschedule;
pub(crate) mod results;
pub(crate) mod saving;
pub(crate) mod shared;
pub(crate) mod spawn;
pub(crate) mod stop;
pub(crate) mod tokens;
pub(crate) mod totals;
pub(crate) mod trace;
pub(crate) mod training;
