//! The MPI engine against naive references: `mpirun -np 4 mpi_check [bench | idle | FAILURE]`.
//!
//! With `ZEROPP_RANKS_EACH=2` every process has two ranks, and the hybrid engine is checked.
//! Without an argument every operation runs on the world and on sub-groups, many at once, with
//! lengths from nothing to several MiB, and is compared bit by bit with what a plain loop gives.
//! `bench` prints times, `idle` what waiting for a second costs. The other arguments make one rank
//! misbehave, to see how the job ends.

#[path = "../tests/common/passed.rs"]
mod passed;
#[path = "../../zeropp-core/tests/common/random.rs"]
mod random;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::tensor::{DType, Tensor};
use passed::{bits, input, tensor};
use zeropp_comm::hybrid::HybridWorld;
use zeropp_comm::mpi::{MpiOptions, MpiWorld};
use zeropp_comm::threads::ThreadsOptions;
use zeropp_comm::{CommError, Communicator};
use zeropp_core::cpu_tensor::from_vec;

type Group = Arc<dyn Communicator>;

fn main() -> ExitCode {
    let mode = std::env::args().nth(1).unwrap_or_default();
    let timeout = if ["", "bench", "idle"].contains(&&*mode) { 60.0 } else { 2.0 };
    let options = MpiOptions { timeout: Duration::from_secs_f64(timeout), ..Default::default() };
    let doing: zeropp_comm::mpi::Describe = Arc::new(|| (1, "at the example's work".into()));
    let mut world = match MpiWorld::start(options, Some(doing)) {
        Ok(world) => world,
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::FAILURE;
        }
    };
    let each = std::env::var("ZEROPP_RANKS_EACH").ok().and_then(|each| each.parse().ok());
    let all = world.communicator();
    let ranks = match each {
        None => vec![(world.rank(), all)],
        Some(each) => {
            let timeout = Duration::from_secs_f64(timeout);
            let threads = ThreadsOptions { timeout, ..Default::default() };
            HybridWorld::new(all, each, threads).expect("a thread").communicators()
        }
    };
    let threads: Vec<_> = ranks
        .into_iter()
        .map(|(rank, all)| {
            let mode = mode.clone();
            std::thread::spawn(move || {
                let result = match mode.as_str() {
                    "" => check(&all),
                    "bench" => bench(&all),
                    "idle" => idle(&all),
                    failure => misbehave(&all, failure),
                };
                match &result {
                    Err(error) => eprintln!("rank {rank}: {error}"),
                    Ok(()) if rank == 0 => println!("mpi_check: {} ranks agree", all.size()),
                    Ok(()) => {}
                }
                result.is_err()
            })
        })
        .collect();
    // A panic ends the job before it gets here.
    let failed = threads.into_iter().any(|thread| thread.join().unwrap_or(true));
    world.finish();
    ExitCode::from(failed as u8)
}

fn expect(what: &str, got: Tensor<1>, want: Tensor<1>, kind: DType) {
    assert_eq!(got.dtype(), kind, "{what}");
    assert_eq!(bits(got), bits(want), "{what}");
}

fn check(all: &Group) -> Result<(), CommError> {
    let (rank, size) = (all.rank(), all.size());
    let halves = all.split(&format!("half[{}]", rank % 2), rank % 2, size - rank)?;
    assert_eq!(halves.size(), (size + 1 - rank % 2) / 2);
    assert_eq!(halves.rank(), (size - 1 - rank) / 2, "ordered by key, which runs backwards");
    let alone = all.split(&format!("alone[{rank}]"), rank, 0)?;
    let kinds = [DType::F32, DType::BF16];
    let lens = [0, 1, 5, 4096, 4099, 70_000, 1_000_003];
    let mut round = 0;
    for len in lens {
        for kind in kinds {
            for group in [all, &halves, &alone] {
                round += 1;
                collectives(group, round, len, kind)?;
                messages(group, round, len, kind)?;
            }
        }
        small(all, round as usize)?;
        small(&halves, round as usize)?;
    }
    signs(all)?;
    all.barrier()
}

/// All collectives at once, waited for backwards.
fn collectives(group: &Group, round: u64, part: usize, kind: DType) -> Result<(), CommError> {
    let (me, size) = (group.rank(), group.size());
    let whole = part * size;
    let inputs: Vec<Tensor<1>> = (0..size).map(|r| tensor(&input(round, r, whole), kind)).collect();
    let shard = |r: usize| inputs[r].clone().slice(r * part..(r + 1) * part);
    let root = round as usize % size;
    let uneven: Vec<Tensor<1>> =
        inputs.iter().map(|t| t.clone().slice(0..whole - whole.min(1))).collect();
    let gathered = group.all_gather(shard(me));
    let scattered = group.reduce_scatter(inputs[me].clone());
    let reduced = group.all_reduce(inputs[me].clone());
    let uneven_sum = group.all_reduce(uneven[me].clone());
    let cast = group.broadcast(root, inputs[me].clone());
    let bytes = group.exchange(vec![me as u8 + 1; me * (part % 5000) + 1]);
    let brought = group.gather(root, vec![me as u8 + 1; me * (part % 5000) + 1]);
    let again = group.all_gather(shard(me));
    let sum = |inputs: &[Tensor<1>]| {
        let wide = |t: &Tensor<1>| t.clone().cast(DType::F32);
        let first = wide(&inputs[0]);
        inputs[1..].iter().fold(first, |sum, t| sum + wide(t)).cast(kind)
    };
    let concatenated = Tensor::cat((0..size).map(shard).collect(), 0);
    expect("all_gather after the others", again.wait()?, concatenated.clone(), kind);
    for (r, got) in bytes.wait()?.iter().enumerate() {
        assert_eq!(*got, vec![r as u8 + 1; r * (part % 5000) + 1], "exchange");
    }
    let brought = brought.wait()?;
    assert_eq!(brought.len(), if me == root { size } else { 0 }, "gather");
    for (r, got) in brought.iter().enumerate() {
        assert_eq!(*got, vec![r as u8 + 1; r * (part % 5000) + 1], "gather");
    }
    expect("broadcast", cast.wait()?, inputs[root].clone(), kind);
    expect("all_reduce of uneven parts", uneven_sum.wait()?, sum(&uneven), kind);
    let total = sum(&inputs);
    expect("all_reduce", reduced.wait()?, total.clone(), kind);
    let mine = total.slice(me * part..(me + 1) * part);
    expect("reduce_scatter", scattered.wait()?, mine, kind);
    expect("all_gather", gathered.wait()?, concatenated, kind);
    Ok(())
}

/// Messages round the ring and to oneself, with two tags crossing, some received before they are
/// sent and some after.
fn messages(group: &Group, round: u64, len: usize, kind: DType) -> Result<(), CommError> {
    let (me, size) = (group.rank(), group.size());
    let (next, last) = ((me + 1) % size, (me + size - 1) % size);
    let of = |r: usize, i: u64| tensor(&input(round * 8 + i, r, len), kind);
    let early = group.recv(last, u64::MAX, len, kind);
    for (i, tag) in [(0, 7), (1, u64::MAX), (2, 7), (3, u64::MAX)] {
        group.send(next, tag, of(me, i)).wait()?;
    }
    let late = group.recv(last, u64::MAX, len, kind);
    let sevens = [group.recv(last, 7, len, kind), group.recv(last, 7, len, kind)];
    expect("second message of a tag", late.wait()?, of(last, 3), kind);
    for (i, seven) in sevens.into_iter().enumerate() {
        expect("messages of a tag in order", seven.wait()?, of(last, 2 * i as u64), kind);
    }
    expect("first message of a tag", early.wait()?, of(last, 1), kind);
    Ok(())
}

fn small(group: &Group, round: usize) -> Result<(), CommError> {
    for i in 0..20 {
        let mine = vec![group.rank() as u8, (round + i) as u8];
        for (r, got) in group.exchange(mine).wait()?.iter().enumerate() {
            assert_eq!(*got, [r as u8, (round + i) as u8]);
        }
    }
    group.barrier()
}

/// Sums start from rank 0's value: a sum of negative zeros is one.
fn signs(group: &Group) -> Result<(), CommError> {
    let zeros = || from_vec(vec![-0.0; 4 * group.size()], [4 * group.size()]);
    let scattered = group.reduce_scatter(zeros()).wait()?;
    assert_eq!(bits(scattered), [(-0.0f32).to_bits(); 4]);
    let reduced = group.all_reduce(zeros()).wait()?;
    assert_eq!(bits(reduced), vec![(-0.0f32).to_bits(); 4 * group.size()]);
    Ok(())
}

/// Makes rank 1 (of at least 2) misbehave.
fn misbehave(all: &Group, how: &str) -> Result<(), CommError> {
    let bad = all.rank() == 1;
    all.barrier()?;
    match how {
        "mismatch" => {
            let len = if bad { 8 } else { 16 };
            all.all_gather(from_vec(vec![1.0; len], [len])).wait().map(drop)?;
        }
        "operation" if bad => {
            all.all_reduce(from_vec(vec![1.0; 100_000], [100_000])).wait().map(drop)?;
        }
        "operation" => all.all_gather(from_vec(vec![1.0; 100], [100])).wait().map(drop)?,
        "message" => {
            if bad {
                all.send(0, 3, from_vec(vec![1.0; 8], [8])).wait()?;
            } else if all.rank() == 0 {
                all.recv(1, 3, 9, DType::F32).wait().map(drop)?;
            }
        }
        "late" if bad => std::thread::sleep(Duration::from_secs(60)),
        "recv" if all.rank() == 0 => {
            all.recv(1, 5, 10, DType::F32).wait().map(drop)?;
        }
        "abort" if bad => all.abort("the example wants it"),
        "panic" if bad => panic!("the example wants it"),
        "leave" if bad => return Ok(()),
        "wait" => {
            println!("rank {} is process {}", all.rank(), std::process::id());
            all.barrier()?;
            if bad {
                std::thread::sleep(Duration::from_secs(60));
            }
        }
        "late" | "recv" | "abort" | "panic" | "leave" => {}
        other => panic!("unknown failure {other}"),
    }
    all.barrier()
}

fn bench(all: &Group) -> Result<(), CommError> {
    let size = all.size();
    let whole = 16 << 20 >> 2;
    let full = from_vec(vec![1.0; whole], [whole]);
    let shard = from_vec(vec![1.0; whole / size], [whole / size]);
    let tiny = from_vec(vec![1.0; 256 / size], [256 / size]);
    row(all, "all_gather 16 MiB", 20, || all.all_gather(shard.clone()).wait().map(drop))?;
    row(all, "reduce_scatter 16 MiB", 20, || all.reduce_scatter(full.clone()).wait().map(drop))?;
    row(all, "all_reduce 16 MiB", 20, || all.all_reduce(full.clone()).wait().map(drop))?;
    row(all, "all_gather 1 KiB", 300, || all.all_gather(tiny.clone()).wait().map(drop))?;
    row(all, "exchange 8 B", 300, || all.exchange(vec![0; 8]).wait().map(drop))?;
    row(all, "barrier", 300, || all.barrier())?;
    for len in [64, 1 << 20] {
        let message = from_vec(vec![1.0; len], [len]);
        let peer = all.rank() ^ 1;
        let rounds = if len == 64 { 300 } else { 20 };
        row(all, &format!("there and back, {} KiB", len * 4 / 1024), rounds, || {
            if peer >= size {
                return Ok(());
            }
            let receive = || all.recv(peer, 0, len, DType::F32).wait().map(drop);
            if all.rank() < peer {
                all.send(peer, 0, message.clone()).wait()?;
                receive()
            } else {
                receive()?;
                all.send(peer, 0, message.clone()).wait()
            }
        })?;
    }
    all.barrier()
}

/// All wait a second for the last rank, again and again: what that costs of a core.
fn idle(all: &Group) -> Result<(), CommError> {
    // Ticks of 10 ms in user and system mode, behind the program's name in brackets.
    let cpu_s = || {
        let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
        let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
        fields.skip(11).take(2).filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() / 100.0
    };
    let rounds = 10;
    all.barrier()?;
    let begin = (cpu_s(), Instant::now());
    for _ in 0..rounds {
        if all.rank() + 1 == all.size() {
            std::thread::sleep(Duration::from_secs(1));
        }
        all.barrier()?;
    }
    let each = |total: f64| total / f64::from(rounds);
    let (cpu, wall) = (each(cpu_s() - begin.0), each(begin.1.elapsed().as_secs_f64()));
    println!("rank {}: {cpu:.4} CPU seconds in a wait of {wall:.3} s", all.rank());
    Ok(())
}

fn row(
    all: &Group,
    name: &str,
    rounds: usize,
    step: impl Fn() -> Result<(), CommError>,
) -> Result<(), CommError> {
    for _ in 0..3 {
        step()?;
    }
    all.barrier()?;
    let mut times = Vec::new();
    for _ in 0..rounds {
        let start = Instant::now();
        step()?;
        times.push(start.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    if all.rank() == 0 {
        println!("{name:<28}{:>10.3} ms (median)", 1e3 * times[rounds / 2]);
    }
    all.barrier()
}
