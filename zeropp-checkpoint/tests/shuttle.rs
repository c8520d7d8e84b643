//! A save under way between the ranks' writers and rank 0, in every order of their threads that a
//! random scheduler, and one that prefers few changes, come to. `ZEROPP_SCHEDULES` is how many of
//! each are tried.

use std::sync::Arc;
use std::time::Duration;

use orders::every_order;
use shuttle::thread;
use under_way::{Completing, Save, SaveOutcome, UnderWay, WriterReport};

#[path = "../../zeropp-comm/tests/shuttle/orders.rs"]
mod orders;
#[path = "../../zeropp-comm/src/sync.rs"]
#[allow(dead_code, unused_imports)]
mod sync;
#[path = "../src/under_way.rs"]
#[allow(dead_code, unreachable_pub)]
mod under_way;

// What the source names by its crate.
mod error {
    pub(crate) use zeropp_checkpoint::CheckpointError;
}
mod manifest {
    pub(crate) use zeropp_checkpoint::Plateau;
}
mod written {
    pub(crate) use zeropp_checkpoint::WrittenState;
}

const RANKS: usize = 3;

fn save(step: u64) -> Save {
    Save { step, updates: step, rotates: true, loss: None, best: None, plateau: None }
}

/// A rank's writer has written its part; whether it was the one to complete the save of `step`.
fn write(under_way: &UnderWay, rank: usize, step: u64) -> bool {
    let report = WriterReport { rank, written: Ok(None), cpu_s: 0.0 };
    let Some((save, reports)) = under_way.note(report, RANKS) else { return false };
    let ranks: Vec<_> = reports.iter().map(|report| report.rank).collect();
    assert_eq!((save.step, ranks), (step, vec![0, 1, 2]), "all reports of this save");
    under_way.end(SaveOutcome { step, result: Ok(()), left: Vec::new() });
    true
}

/// Two saves, one after the other: one writer completes each, rank 0 gets the outcome once, whether
/// it looks or waits, and a thread that waits for the completion goes on.
#[test]
fn a_save_is_completed_once_and_ends_once_in_every_order() {
    every_order(|| {
        let under_way = Arc::new(UnderWay::default());
        for step in 1..=2 {
            under_way.begin(save(step));
            let writers: Vec<_> = (0..RANKS)
                .map(|rank| {
                    let under_way = under_way.clone();
                    thread::spawn(move || write(&under_way, rank, step))
                })
                .collect();
            let waiting = under_way.clone();
            let waiting = thread::spawn(move || waiting.await_completion(Completing::InRecovery));
            let ended = under_way.take().or_else(|| under_way.wait(Duration::from_secs(3600)));
            assert_eq!(ended.map(|outcome| outcome.step), Some(step));
            assert!(under_way.take().is_none() && under_way.step().is_none(), "told once");
            let completed = writers.into_iter().map(|writer| writer.join().expect("no panic"));
            assert_eq!(completed.filter(|completed| *completed).count(), 1);
            waiting.join().expect("no panic");
        }
    });
}
