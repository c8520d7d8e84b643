//! Copies of activations and of states in orders that events permit: delayed, and swapped where
//! none writes what another one reads or writes. Bits are those of a run that copies nothing,
//! although what is freed is overwritten with numbers that are none.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::PathBuf;

use common::{Run, assert_same_bits, llama, run, tiny};
use zeropp::Config;
use zeropp::config::{OptimizerSync, OutStates, Precision, Recompute};
use zeropp_core::files::copies_in_any_order;

/// Fills large blocks that are freed with ones: a NaN in fp32 and in bf16.
struct Overwritten;

/// Bytes from which a block may be a tensor.
const LARGE: usize = 128;

fn overwrite(at: *mut u8, bytes: usize) {
    if bytes >= LARGE {
        // SAFETY: the block is the caller's until it is freed.
        unsafe { at.write_bytes(0xFF, bytes) }
    }
}

// SAFETY: all is handed on to the system's allocator.
unsafe impl GlobalAlloc for Overwritten {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promises.
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promises.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        overwrite(at, layout.size());
        // SAFETY: the caller's promises.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Overwritten = Overwritten;

fn base() -> Config {
    let recompute = Recompute::None;
    Config { layers: 8, micro_batches: Some(8), unit: Some(8), steps: 2, recompute, ..tiny() }
}

fn of(pp: usize, v: usize, config: Config) -> Config {
    Config { pp, virtual_stages: Some(v), ..config }
}

/// Runs whose copies meet in different ways, each without any.
fn kept() -> Vec<Config> {
    let late = Config { optimizer_sync: OptimizerSync::Late, clip: 1e-3, steps: 4, ..base() };
    let bf16 = Config { precision: Precision::Bf16, zero3: 2, ..base() };
    vec![
        of(1, 4, base()),
        of(2, 2, Config { unit: Some(4), ..base() }),
        of(1, 4, Config { recompute: Recompute::Full, ..base() }),
        of(2, 2, late),
        of(1, 4, llama(bf16)),
        Config { schedule: "zb-v".into(), ..of(2, 2, base()) },
    ]
}

/// `ZEROPP_ORDERS` says how many orders there are.
#[test]
fn copies_in_any_order_change_no_bit() {
    let orders = std::env::var("ZEROPP_ORDERS").map_or(12, |n| n.parse().expect("a number"));
    let folder = std::env::temp_dir().join("zeropp-orders");
    let references: Vec<(Config, Run)> = kept().into_iter().map(|c| (c.clone(), run(c))).collect();
    let mut copied = 0;
    for seed in 1..=orders {
        let (config, reference) = &references[seed as usize % references.len()];
        let mut config = Config { recompute_out: Some(folder.clone()), ..config.clone() };
        // Every second time states are out, too, where they may be.
        let may = config.optimizer_sync == OptimizerSync::Barrier;
        let out: Option<PathBuf> = Some(folder.clone()).filter(|_| may);
        let round = seed as usize / references.len();
        config.optimizer_out = out.filter(|_| round.is_multiple_of(2));
        if config.optimizer_out.is_some() {
            let states = [OutStates::All, OutStates::Moments];
            config.optimizer_out_states = states[(seed as usize / 2 + round / 2) % 2];
        }
        copies_in_any_order(seed);
        let run = run(config);
        assert_same_bits(reference, &run, &format!("order {seed}"));
        copied += u64::from(run.summary.peak_bytes.host_activation > 0);
    }
    copies_in_any_order(0);
    assert_eq!(copied, orders, "runs that copied something");
}
