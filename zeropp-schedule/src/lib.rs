#![doc = include_str!("../README.md")]

pub mod action;
pub mod ascii;
pub mod check;
pub mod costs;
pub mod draw;
pub mod exchange;
pub mod ir;
pub mod links;
pub mod lower;
pub mod memory;
pub mod metrics;
pub mod report;
pub mod schedules;
pub mod simulate;
pub mod timeline;
pub mod verify;
