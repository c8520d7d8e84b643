//! What the flight recorder costs: an action, a message; the throughput benchmark's run on two
//! pipeline ranks with and without it, in turns; and a run of tiny layers, where a step is little
//! else than bookkeeping.
//!
//! `cargo bench --bench flight [ROUNDS]`. On a busy machine the first figures say more: a step of
//! the throughput benchmark has about a hundred actions and as many operations a rank.

use std::hint::black_box;
use std::sync::Arc;

use burn::tensor::{DType, Tensor};
use rustix::time::{ClockId, clock_gettime};
use zeropp::pipeline::executor::StatusBoard;
use zeropp::pipeline::ir::{Action, Compute};
use zeropp::{Config, Trainer};
use zeropp_comm::Communicator;
use zeropp_comm::recorded::RecordedCommunicator;
use zeropp_comm::threads::{ThreadsOptions, ThreadsWorld};
use zeropp_core::cpu_tensor::from_vec;

/// Times that a small thing is done.
const TIMES: u32 = 300_000;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn throughput() -> Config {
    Config {
        pp: 2,
        layers: 8,
        hidden: 256,
        heads: 4,
        seq: 128,
        micro_batch_size: 2,
        micro_batches: Some(8),
        unit: Some(8),
        virtual_stages: Some(2),
        steps: 6,
        ..Config::default()
    }
}

fn tiny() -> Config {
    Config { hidden: 16, heads: 2, seq: 8, micro_batch_size: 1, steps: 300, ..throughput() }
}

/// CPU seconds of this process so far.
fn cpu_s() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// CPU seconds and tokens per second of a run.
fn run(config: Config) -> (f64, f64) {
    let trainer = Trainer::new(config).expect("a good configuration");
    let before = cpu_s();
    let summary = trainer.train(|_| ()).expect("a run that ends well");
    (cpu_s() - before, summary.tokens_per_s)
}

/// CPU nanoseconds of one call.
fn each_ns(mut call: impl FnMut()) -> f64 {
    let before = cpu_s();
    for _ in 0..TIMES {
        call();
    }
    1e9 * (cpu_s() - before) / f64::from(TIMES)
}

/// Nanoseconds of a message from a rank to itself, sent, received and waited for.
fn message_ns(world: &dyn Communicator) -> f64 {
    let tensor: Tensor<1> = from_vec(vec![0.0; 8], [8]);
    each_ns(|| {
        let received = world.recv(0, 7, 8, DType::F32);
        world.send(0, 7, tensor.clone()).wait().expect("healthy");
        drop(black_box(received.wait().expect("healthy")));
    })
}

fn small_things() {
    let board = StatusBoard::new(1);
    let action = each_ns(|| {
        board.set(0, 1, black_box(Action::compute(Compute::F, 0, 0)));
        board.set_computing(0, true);
        board.set_computing(0, false);
    });
    let options = ThreadsOptions { workers: Some(0), ..ThreadsOptions::default() };
    let world = || ThreadsWorld::new(1, options.clone()).communicators().remove(0);
    let bare = message_ns(&*world());
    let recorded = message_ns(&RecordedCommunicator::new(world(), Arc::default()));
    println!("an action {action:.0} ns; an operation {:.0} ns", (recorded - bare) / 2.0);
}

/// What a run with the recorder takes more than one without it, in percent: the median over rounds
/// with its quartiles, and the best run beside the best, which other programs disturb least.
fn shown(mut rounds: Vec<(f64, f64)>, best: fn(f64, f64) -> f64) -> String {
    let more = |(on, off): (f64, f64)| 100.0 * (on / off - 1.0);
    let best_more = more(
        rounds.iter().copied().reduce(|a, b| (best(a.0, b.0), best(a.1, b.1))).expect("a round"),
    );
    rounds.sort_by(|a, b| more(*a).total_cmp(&more(*b)));
    let at = |share: f64| more(rounds[(share * (rounds.len() - 1) as f64).round() as usize]);
    let (low, middle, high) = (at(0.25), at(0.5), at(0.75));
    format!("{middle:+.1} % ({low:+.1} to {high:+.1}), best {best_more:+.1} %")
}

fn main() {
    small_things();
    let rounds = std::env::args().filter_map(|a| a.parse().ok()).next().unwrap_or(7);
    for (name, config) in [("throughput", throughput()), ("tiny layers", tiny())] {
        let without = config.clone();
        let config = Config { flight_dir: Some("zeropp-failed".into()), ..config };
        let (mut cpu, mut speed) = (Vec::new(), Vec::new());
        for round in 0..rounds {
            // Whoever comes second finds a warmer machine.
            let (on, off) = match round % 2 {
                0 => (run(config.clone()), run(without.clone())),
                _ => {
                    let off = run(without.clone());
                    (run(config.clone()), off)
                }
            };
            cpu.push((on.0, off.0));
            speed.push((on.1, off.1));
        }
        println!("{name} with the recorder, medians and quartiles of {rounds}:");
        println!("    CPU time {}; tokens/s {}", shown(cpu, f64::min), shown(speed, f64::max));
    }
}
