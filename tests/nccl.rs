//! Training over the NCCL engine, in host memory, on a library that stands in for NCCL: every
//! schedule's messages, gathers and reductions go through it as they would on GPUs.

mod common;
#[path = "../zeropp-comm/tests/nccl/host.rs"]
mod host;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use common::captured::capture;
use common::{run, tiny};
use host::{Host, Pretend};
use zeropp::config::{OptimizerSync, Reschedule};
use zeropp::{Config, StepMetrics, Trainer};
use zeropp_comm::nccl::{NcclOptions, NcclWorld};
use zeropp_comm::rendezvous::Local;
use zeropp_core::device::LibrarySearch;

/// The steps of a run over NCCL, whose devices need `late_us` microseconds for each buffer.
fn over_nccl(config: Config, late_us: u64) -> Vec<StepMetrics> {
    let size = config.mesh().world();
    let only = Some(Pretend::get().file.clone().into_os_string());
    let options = NcclOptions {
        timeout: Duration::from_secs(60),
        search: LibrarySearch { only, ..LibrarySearch::default() },
        ..NcclOptions::default()
    };
    let met = Local::default();
    let start = |rank: usize| {
        let device = Host::new();
        device.late_us.store(late_us, Ordering::Relaxed);
        // As strict about the order between communicators as NCCL may be.
        device.one_order.store(true, Ordering::Relaxed);
        NcclWorld::start(options.clone(), rank, size, Arc::new(device), &met).unwrap()
    };
    let start = &start;
    let mut worlds: Vec<NcclWorld> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..size).map(|rank| scope.spawn(move || start(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let communicators = worlds.iter_mut().map(NcclWorld::communicator).collect();
    let mut steps = Vec::new();
    let trainer = Trainer::new(config).expect("a good configuration");
    trainer.train_over(communicators, |step| steps.push(step.clone())).expect("it ends well");
    // Together: each waits for the others' communicators to end.
    std::thread::scope(|scope| worlds.drain(..).for_each(|w| drop(scope.spawn(|| w.finish()))));
    steps
}

/// NCCL's order of sums differs, so the bits do, by rounding.
fn compare(config: Config, late_us: u64) -> Vec<StepMetrics> {
    // As a run whose engine is NCCL has it; here that setting would ask for GPUs.
    let config = Config { one_order_always: true, ..config };
    let expected = run(config.clone()).steps;
    let found = over_nccl(config, late_us);
    assert_eq!(found.len(), expected.len());
    for (x, y) in found.iter().zip(&expected) {
        let loss = (x.loss - y.loss).abs() / y.loss;
        let norm = (x.grad_norm - y.grad_norm).abs() / y.grad_norm;
        assert!(loss <= 1e-5 && norm <= 1e-4, "step {}: off by {loss:e}, {norm:e}", x.step);
        let counts = |s: &StepMetrics| (s.all_gathers, s.reduce_scatters, s.all_reduces);
        assert_eq!((counts(x), x.comm_bytes), (counts(y), y.comm_bytes), "step {}", x.step);
    }
    found
}

#[test]
fn pipelines_and_shards_train_as_over_threads() {
    let config = Config { pp: 2, zero3: 2, virtual_stages: Some(2), steps: 10, ..tiny() };
    compare(config, 0);
}

#[test]
fn replicas_train_as_over_threads() {
    let config = Config { pp: 2, dp: 2, steps: 10, ..tiny() };
    compare(config.clone(), 0);
    compare(Config { zero1: true, ..config }, 0);
}

#[test]
fn slow_devices_change_nothing() {
    // Buffers hold nonsense until their device has come to them.
    let config = Config { pp: 4, virtual_stages: Some(2), steps: 3, ..tiny() };
    compare(config, 200);
}

#[test]
fn other_schedules_train_as_over_threads() {
    for schedule in ["1f1b", "interleaved", "zb-h1", "zb-v"] {
        let virtual_stages = matches!(schedule, "interleaved" | "zb-v").then_some(2).or(Some(1));
        let schedule = schedule.to_owned();
        compare(Config { pp: 2, zero3: 2, virtual_stages, schedule, steps: 4, ..tiny() }, 0);
    }
}

/// What is taken back and done again keeps the one order, too.
#[test]
fn updates_that_are_validated_late_train_as_over_threads() {
    for (schedule, virtual_stages, zero3) in [("zb-v", 2, 2), ("zeropp", 2, 1), ("1f1b", 1, 1)] {
        let config = Config { pp: 2, zero3, schedule: schedule.into(), steps: 8, ..tiny() };
        let clipped = Config { virtual_stages: Some(virtual_stages), clip: 0.9, ..config };
        let late = Config { optimizer_sync: OptimizerSync::Late, ..clipped };
        let steps = compare(late, 200);
        let back = steps.iter().filter(|step| step.rolled_back).count();
        assert!(back > 1, "{schedule}: {back} updates were taken back");
    }
}

/// Every program that is taken, and the messages that move blocks, keep the one order that the
/// library insists on; and no sum depends on them.
#[test]
fn exchanged_orders_and_moved_blocks_change_no_bit() {
    let small = Config { pp: 2, layers: 4, schedule: "gpipe".into(), unit: None, ..tiny() };
    let vee = Config { virtual_stages: Some(2), schedule: "zb-v".into(), ..small.clone() };
    let deep = Config { pp: 4, layers: 12, ..vee };
    // Both ranks of it send blocks to each other at the same time.
    let crossing = Config { layers: 8, stages: Some("3,1,1,3".into()), ..small.clone() };
    let crossing = Config { virtual_stages: Some(2), schedule: "interleaved".into(), ..crossing };
    // What a search finds follows from times: a loaded machine may leave some runs as they are.
    let (mut exchanged, mut moved) = (0, 0);
    for config in [small.clone(), Config { zero3: 2, ..small }, deep, crossing] {
        let config = Config { steps: 16, one_order_always: true, ..config };
        let plain = over_nccl(config.clone(), 0);
        for how in [Reschedule::Auto, Reschedule::Recut] {
            let reschedule = Some(how);
            let exchanges = Config { reschedule, exchanges_always: true, ..config.clone() };
            let (with, told) = capture(|| over_nccl(exchanges, 0));
            let what = format!("{how}, {} x {}", config.pp, config.zero3);
            let moves = told.iter().filter(|event| event.message().contains("moved in")).count();
            println!("{what}: {moves} moves");
            exchanged += usize::from(with.iter().any(|step| step.program > 0));
            moved += moves;
            let bits = |steps: &[StepMetrics]| {
                let of = |s: &StepMetrics| (s.loss.to_bits(), s.grad_norm.to_bits());
                steps.iter().map(of).collect::<Vec<_>>()
            };
            assert_eq!(bits(&with), bits(&plain), "{what}");
        }
    }
    assert!(exchanged > 3 && moved > 1, "{exchanged} of 8 runs had other programs, {moved} moves");
}

/// Ranks pass its messages on in the one order: what they pass on has come before.
#[test]
fn slices_of_a_head_train_as_over_threads() {
    let base = Config { vocab: Some(1000), steps: 4, ..tiny() };
    for (blocks, virtual_stages, zero3, tied) in
        [("3,5", 2, 1, false), ("2,0,3,3", 1, 1, true), ("5,3", 1, 2, true), ("2,3,3", 1, 2, false)]
    {
        let config = Config {
            pp: blocks.split(',').count(),
            zero3,
            tied,
            virtual_stages: Some(virtual_stages),
            head_split: Some(blocks.into()),
            ..base.clone()
        };
        // A slow device would garble what a rank sends and goes on to read.
        compare(config, 0);
    }
}
