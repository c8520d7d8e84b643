//! `pin` binds the threads of a run to cores, each to its own, and changes nothing else.
//!
//! A program of its own: it looks at all threads of its process.
#![cfg(target_os = "linux")]

mod common;

use std::path::Path;

use common::{Run, assert_same_bits, tiny};
use zeropp::{Config, NamedWeights, Trainer};

/// Name and cores of a thread, as the system lists them.
fn reported(task: &Path) -> Option<(String, String)> {
    let name = std::fs::read_to_string(task.join("comm")).ok()?;
    let status = std::fs::read_to_string(task.join("status")).ok()?;
    let cores = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    Some((name.trim().to_owned(), cores.trim().to_owned()))
}

/// All threads of this process.
fn threads() -> Vec<(String, String)> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    tasks.filter_map(|task| reported(&task.unwrap().path())).collect()
}

/// The cores of the calling thread.
fn own() -> String {
    reported(Path::new("/proc/thread-self")).unwrap().1
}

fn numbers(list: &str) -> Vec<usize> {
    let ends = |run: &str| {
        let (first, last) = run.split_once('-').unwrap_or((run, run));
        first.parse::<usize>().unwrap()..=last.parse().unwrap()
    };
    list.split(',').flat_map(ends).collect()
}

/// What came of a run, and its threads after the second step.
fn run(config: Config) -> (Run, Vec<(String, String)>) {
    let trainer = Trainer::new(config).unwrap();
    let (mut steps, mut seen) = (Vec::new(), Vec::new());
    let (summary, weights): (_, NamedWeights) = trainer
        .train_to_weights(|step| {
            steps.push(step.clone());
            if step.step == 2 {
                seen = threads();
            }
        })
        .unwrap();
    (Run { steps, summary, weights }, seen)
}

/// The cores of the threads whose names begin so.
fn cores_of(threads: &[(String, String)], name: &str) -> Vec<Vec<usize>> {
    let of = threads.iter().filter(|(thread, _)| thread.starts_with(name));
    of.map(|(_, cores)| numbers(cores)).collect()
}

#[test]
fn each_thread_has_a_core_of_its_own_and_no_bit_is_another() {
    let before = own();
    let there = numbers(&before).len();
    let base = Config { steps: 3, threads: Some(1), hidden: 128, seq: 64, ..tiny() };
    let (reference, free) = run(base.clone());
    assert_eq!(cores_of(&free, "rank "), [numbers(&before)], "nothing is bound that is not asked");
    let layouts = [(1, 1), (1, 2), (2, 1), (2, 2)];
    let fitting = layouts.into_iter().filter(|(pp, threads)| pp * threads <= there);
    for (pp, threads) in fitting {
        let what = format!("pp {pp}, {threads} threads, of {there} cores");
        let config = Config { pp, threads: Some(threads), pin: true, ..base.clone() };
        let (pinned, seen) = run(config);
        assert_same_bits(&reference, &pinned, &what);
        let (ranks, helpers) = (cores_of(&seen, "rank "), cores_of(&seen, "kernels"));
        assert_eq!((ranks.len(), helpers.len()), (pp, pp * (threads - 1)), "{what}: {seen:?}");
        let mut taken: Vec<usize> = ranks.iter().chain(&helpers).flatten().copied().collect();
        taken.sort_unstable();
        let apart: std::collections::BTreeSet<_> = taken.iter().copied().collect();
        // One core a thread, none twice.
        assert_eq!((taken.len(), apart.len()), (pp * threads, pp * threads), "{what}: {seen:?}");
        let engine = cores_of(&seen, "comm");
        assert!(!engine.is_empty() && engine.iter().all(|cores| *cores == taken), "{seen:?}");
        assert_eq!(own(), before, "{what}: the thread that has started the run is not bound");
    }
}

#[test]
fn too_few_cores_are_reported_before_a_rank_starts() {
    let there = numbers(&own()).len();
    let cases = [(1, there + 1, 0), (there + 1, 1, there)];
    for (pp, threads, rank) in cases {
        let config = Config { pp, threads: Some(threads), pin: true, layers: pp.max(2), ..tiny() };
        let trainer = Trainer::new(config).unwrap();
        let begins =
            format!("threads:pin = true: rank {rank} needs {threads} of the cores {}", own());
        let refused =
            |note: &String| note.starts_with(&begins) && note.ends_with("; a run would be refused");
        assert!(trainer.plan().notes.iter().any(refused), "{:?}", trainer.plan().notes);
        let error = trainer.train(|_| ()).unwrap_err();
        assert!(error.is_bad_input() && error.to_string().starts_with(&begins), "{error}");
    }
}
