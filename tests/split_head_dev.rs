#[path = "common/mod.rs"]
mod common;
#[path = "runs/split_head.rs"]
mod split_head;
