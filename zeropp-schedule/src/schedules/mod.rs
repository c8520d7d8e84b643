//! Generators: pure functions from a shape to the compute actions of every rank.
//!
//! One file per schedule, each an ordered list of phases named as in its paper, and one row of
//! [`KINDS`], from which help, defaults, checks, tables and tests follow. A generator writes
//! compute actions only; [`lower`](crate::lower::lower) adds what the weights and the links need.
//! Only `auto` also writes gathers and frees, which are part of its order and stay where they are;
//! it is searched for by the crate `zeropp-search`.
//! The W of one stage always run in micro-batch order, because the bits of a gradient depend on
//! the order of its sum.

mod breadth_first;
mod costs;
mod dualpipe_v;
mod forms;
mod forward;
mod hanayo;
mod interleaved;
mod kind;
mod kinds;
mod one_f_one_b;
mod shape;
mod sliced;
mod timing;
mod unit;
mod v_blocks;
mod v_reorder;
mod vee;
mod zb_auto;
mod zb_h;
mod zb_v;
mod zb_v_auto;
mod zeropp;
mod zeropp_auto;
mod zeropp_bound;
mod zeropp_place;
mod zeropp_spine;

pub use costs::{Limits, Objective, OrderCosts};
pub use forms::{FewestHeld, Forms, MeanTimes, Planning};
pub use forward::{FORWARD, forwards_of};
pub use interleaved::interleaved_as_printed;
pub use kind::{Ahead, InSlices, Kind, Rate, StagesPerRank, StepForm, WithUnit};
pub use kinds::{
    DEFAULT, KINDS, generate, generate_cut, generate_sliced, generate_split, generate_with_costs,
};
pub use shape::{ACTIONS_MAX, ScheduleError, Shape};
pub use timing::{NoProgress, Timing, own_span, time};
pub use unit::{default_unit, idle_slots, unit_note};
pub use v_blocks::{v_half, v_min};
pub use zb_auto::zb;
pub use zb_v::zb_v;
pub use zeropp_auto::zeropp_auto;
pub use zeropp_bound::zeropp_bound;

#[cfg(test)]
mod auto_tests;
#[cfg(test)]
mod closed_forms;
#[cfg(test)]
mod in_slices_tests;
#[cfg(test)]
mod never_slower;
#[cfg(test)]
mod shortest_slices_tests;
#[cfg(test)]
mod tests;
