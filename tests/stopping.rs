//! Runs that are stopped, by the program or by what goes wrong in it, end all ranks after one step
//! and lose nothing.

mod common;

use std::ops::ControlFlow;
use std::panic::AssertUnwindSafe;
use std::path::Path;
use std::time::{Duration, Instant};

use common::{Run, assert_same_bits, run, tiny};
use zeropp::config::Resume;
use zeropp::{Config, Error, Trainer};

fn small() -> Config {
    Config { layers: 4, pp: 2, zero3: 2, ..tiny() }
}

/// Threads of this process that run rank 7 of a run: other tests have fewer ranks.
fn ranks_alive() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let names =
        tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
    names.filter(|name| name.trim() == "rank 7").count()
}

fn saved(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten();
    let names = entries.map(|e| e.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = names.filter(|name| name.starts_with("step-")).collect();
    names.sort();
    names
}

#[test]
fn a_break_ends_the_run_after_that_step_and_the_rest_has_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    let config = Config { save: Some(dir.path().join("ckpt")), ..small() };
    let trainer = Trainer::new(config.clone()).unwrap();
    let mut seen = Vec::new();
    let summary = trainer
        .train(|s| {
            seen.push(s.step);
            if s.step == 7 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })
        .unwrap();
    assert_eq!(seen, (1..=7).collect::<Vec<_>>());
    let stopped = summary.stopped.expect("stopped");
    assert_eq!((stopped.step, stopped.signal, summary.steps), (7, None, 7));
    assert_eq!(saved(&dir.path().join("ckpt")), ["step-000007"]);
    assert!(summary.checkpoint.unwrap().ends_with("step-000007"));

    let rest = run(Config { resume: Resume::Newest, ..config });
    let whole = run(small());
    let Run { summary, weights, .. } = whole;
    let half = Run { steps: whole.steps[7..].to_vec(), summary, weights };
    assert_same_bits(&half, &rest, "stopped and resumed");
}

#[test]
fn steps_are_an_iterator_and_ranks_end_with_it_or_with_a_panic() {
    let config = Config { steps: 1_000_000, zero3: 4, ..small() };
    let trainer = Trainer::new(config.clone()).unwrap();
    let mut steps = trainer.steps().unwrap();
    let first: Vec<u64> = steps.by_ref().take(3).map(|step| step.unwrap().step).collect();
    assert_eq!(first, [1, 2, 3]);
    assert_eq!(ranks_alive(), 1);
    // The ranks wait to be asked for more: none runs ahead.
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(steps.next().unwrap().unwrap().step, 4);
    let summary = steps.finish().unwrap();
    assert_eq!((summary.steps, summary.stopped.unwrap().step), (4, 4));

    let begin = Instant::now();
    drop(trainer.steps().unwrap().next());
    let panicked = std::panic::catch_unwind(AssertUnwindSafe(|| {
        trainer.train(|s| assert!(s.step < 3, "the program's own fault"))
    }));
    assert!(panicked.is_err());
    assert!(begin.elapsed() < Duration::from_secs(30), "{:?}", begin.elapsed());
    // The threads have reported their end; they may take a moment to be gone.
    let gone = || {
        (0..200).any(|_| {
            ranks_alive() == 0 || {
                std::thread::sleep(Duration::from_millis(10));
                false
            }
        })
    };
    assert!(gone(), "{} ranks live on", ranks_alive());

    // A trainer that was stopped can train again, and another thread may stop it, too.
    let stopper = trainer.stopper();
    let summary = trainer
        .train(|s| {
            if s.step == 5 {
                stopper.stop()
            }
        })
        .unwrap();
    let stopped = summary.stopped.unwrap();
    assert_eq!(stopped.step, 5);
}

#[test]
fn a_failure_is_an_error_of_the_iterator() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("ckpt");
    let config = Config { save: Some(folder.clone()), save_every: 1, ..small() };
    let trainer = Trainer::new(config).unwrap();
    let mut steps = trainer.steps().unwrap();
    assert_eq!(steps.next().unwrap().unwrap().step, 1);
    std::fs::remove_dir_all(&folder).unwrap();
    let errors: Vec<Error> = steps.by_ref().filter_map(Result::err).collect();
    assert_eq!(errors.len(), 1);
    assert!(errors[0].to_string().contains("ckpt"), "{}", errors[0]);
    assert!(steps.next().is_none() && steps.finish().is_err());
}

#[test]
fn a_slow_program_and_slow_ranks_are_no_timeout() {
    let config = Config { steps: 3, timeout_s: 0.5, ..small() };
    let slow = |_: &zeropp::StepMetrics| std::thread::sleep(Duration::from_millis(1200));
    assert_eq!(Trainer::new(config).unwrap().train(slow).unwrap().steps, 3);
}

#[test]
fn a_library_run_leaves_no_folder_and_sets_no_hook() {
    assert_eq!(Config::default().flight_dir, None);
    let here = std::env::current_dir().unwrap();
    let config = Config { steps: 1_000, save: Some("/proc/none".into()), ..small() };
    assert!(Trainer::new(config).unwrap().train(|_| ()).is_err());
    assert!(!here.join("zeropp-failed").exists());
}

/// A run whose second and later steps are not finite.
fn diverging() -> Config {
    Config { lr: 1e30, warmup: Some(0), weight_decay: 0.0, clip: 0.0, steps: 100, ..small() }
}

#[test]
fn a_run_that_stays_not_finite_ends_and_names_step_rank_and_layer() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("ckpt");
    // Good steps first, saved, so that there is something to lose.
    let good =
        Config { lr: 1e-3, steps: 4, save: Some(folder.clone()), save_every: 1, ..diverging() };
    run(good);
    let config = Config {
        save: Some(folder.clone()),
        save_every: 1,
        resume: Resume::Newest,
        max_skipped: 4,
        flight_dir: Some(dir.path().join("failed")),
        ..diverging()
    };
    let mut seen = Vec::new();
    let error = Trainer::new(config).unwrap().train(|s| seen.push(s.skipped)).unwrap_err();
    assert_eq!(seen, [false, true, true, true, true], "step 5 blows the weights up");
    assert!(!error.is_bad_input());
    let text = error.to_string();
    let Error::NotFinite { step, rank, layer, .. } = error else { panic!("{text}") };
    assert_eq!((step, layer.as_deref()), (6, Some("lm_head")), "{text}");
    assert!(matches!(rank, Some(2 | 3)), "the last stage's: {text}");
    for part in ["step 6", "rank 2", "lm_head", "max-skipped = 4", "step-000005 is from before it"]
    {
        assert!(text.contains(part), "{part} is not in: {text}");
    }
    assert_eq!(saved(&folder), ["step-000004", "step-000005"], "skipped steps remove nothing");
    assert!(!dir.path().join("failed").exists(), "no rank has failed");
}

#[test]
fn the_last_step_is_saved_even_in_a_row_of_skipped_ones_and_removes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let config = Config {
        save: Some(dir.path().join("ckpt")),
        save_every: 1,
        keep: 1,
        steps: 5,
        ..diverging()
    };
    let summary = Trainer::new(config).unwrap().train(|_| ()).unwrap();
    assert_eq!(summary.stopped, None);
    assert_eq!(saved(&dir.path().join("ckpt")), ["step-000001", "step-000005"]);
}

/// Trains the same run in two halves that share a world, as two processes would: `act` gets the
/// trainer of ranks 2 and 3 once rank 0 has reported step 3. Returns both summaries.
fn in_two_processes(act: impl Fn(&Trainer) + Sync) -> [zeropp::Summary; 2] {
    use zeropp_comm::threads::{ThreadsOptions, ThreadsWorld};
    let config = Config { steps: 1_000_000, ..small() };
    let mut ranks = ThreadsWorld::new(4, ThreadsOptions::default()).communicators();
    let others = ranks.split_off(2);
    let [first, second] = [(); 2].map(|()| Trainer::new(config.clone()).unwrap());
    std::thread::scope(|scope| {
        let following = scope.spawn(|| second.train_over(others, |_| -> () { unreachable!() }));
        let summary = first
            .train_over(ranks, |s| {
                if s.step == 3 {
                    act(&second)
                }
            })
            .unwrap();
        [summary, following.join().unwrap().unwrap()]
    })
}

#[test]
fn a_stop_request_in_any_process_stops_all_after_the_same_step() {
    let [first, second] = in_two_processes(|follower| follower.stopper().stop());
    // Reported with the records of the next step.
    assert_eq!((first.stopped.unwrap().step, first.steps), (4, 4));
    assert_eq!(second.stopped, first.stopped);
    assert_eq!(second.last_loss, first.last_loss);
}
