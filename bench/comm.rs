//! How long the threads engine's operations take beside a memcpy of the same bytes.
//!
//! `cargo bench --bench comm [MIB]` prints medians in milliseconds (µs for the small operations).
//! Every rank waits for each operation before the next one: nothing is overlapped, so this is
//! the time that overlap has to hide. Sizes are those of the whole (gathered, unreduced) buffer.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use burn::tensor::{DType, Tensor};
use zeropp_comm::Communicator;
use zeropp_comm::threads::{ThreadsOptions, ThreadsWorld};
use zeropp_core::cpu_tensor::from_vec;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const SIZES: [usize; 3] = [2, 4, 8];

type Rank = Arc<dyn Communicator>;

fn main() {
    let mib = std::env::args().skip(1).find_map(|arg| arg.parse().ok()).unwrap_or(16);
    let len = mib * (1 << 20) / 4;
    println!("{:<34}{}", format!("{mib} MiB f32, ms (median)"), header());
    println!("{:<34}{:>10.3}", "memcpy, one thread", 1e3 * memcpy(len));
    row("all_gather", 1e3, 40, |rank| gather(rank, len));
    row("reduce_scatter", 1e3, 40, |rank| scatter(rank, len));
    row("all_reduce", 1e3, 40, |rank| reduce(rank, len));
    println!("\n{:<34}{}", "small, µs (median)", header());
    row("all_gather of 1 KiB", 1e6, 2000, |rank| gather(rank, 256));
    row("reduce_scatter of 1 KiB", 1e6, 2000, |rank| scatter(rank, 256));
    row("exchange of 8 bytes", 1e6, 2000, |rank| {
        Box::new(move || drop(rank.exchange(vec![0; 8]).wait().expect("healthy")))
    });
    row("message there and back", 1e6, 2000, |rank| Box::new(move || pass(&rank)));
}

fn header() -> String {
    SIZES.map(|size| format!("{:>10}", format!("{size} ranks"))).concat()
}

/// One operation of one rank, waited for.
type Step = Box<dyn FnMut()>;

fn gather(rank: Rank, len: usize) -> Step {
    let shard = tensor(len / rank.size());
    Box::new(move || drop(black_box(rank.all_gather(shard.clone()).wait().expect("healthy"))))
}

fn scatter(rank: Rank, len: usize) -> Step {
    let full = tensor(len);
    Box::new(move || drop(black_box(rank.reduce_scatter(full.clone()).wait().expect("healthy"))))
}

fn reduce(rank: Rank, len: usize) -> Step {
    let buffer = tensor(len);
    Box::new(move || drop(black_box(rank.all_reduce(buffer.clone()).wait().expect("healthy"))))
}

/// Even ranks send a small tensor to their neighbour and get one back.
fn pass(rank: &Rank) {
    let me = rank.rank();
    let send = || rank.send(me ^ 1, 0, tensor(64)).wait().expect("healthy");
    let first = me.is_multiple_of(2);
    if first {
        send();
    }
    drop(rank.recv(me ^ 1, 0, 64, DType::F32).wait().expect("healthy"));
    if !first {
        send();
    }
}

fn tensor(len: usize) -> Tensor<1> {
    from_vec(vec![1.0; len], [len])
}

/// Prints the median time of a step for each number of ranks, in `1 / scale` seconds.
fn row(name: &str, scale: f64, rounds: usize, step: impl Fn(Rank) -> Step + Sync) {
    print!("{name:<34}");
    for size in SIZES {
        let ranks = ThreadsWorld::new(size, ThreadsOptions::default()).communicators();
        let step = &step;
        let median = std::thread::scope(|scope| {
            let timed = |rank: Rank| scope.spawn(move || time(step(rank), rounds));
            let threads: Vec<_> = ranks.into_iter().map(timed).collect();
            let times = threads.into_iter().map(|thread| thread.join().expect("no panic"));
            times.fold(0.0, f64::max)
        });
        print!("{:>10.3}", scale * median);
    }
    println!();
}

/// Median seconds of a step, after a few that are not counted.
fn time(mut step: impl FnMut(), rounds: usize) -> f64 {
    (0..rounds / 10 + 2).for_each(|_| step());
    let mut times: Vec<f64> = (0..rounds)
        .map(|_| {
            let start = Instant::now();
            step();
            start.elapsed().as_secs_f64()
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[rounds / 2]
}

fn memcpy(len: usize) -> f64 {
    let (from, mut to) = (vec![1.0f32; len], vec![0.0f32; len]);
    time(
        || {
            to.copy_from_slice(black_box(&from));
            black_box(&to);
        },
        40,
    )
}
