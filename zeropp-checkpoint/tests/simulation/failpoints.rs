//! Every call of saving fails once, fails from then on, is the last one of its process, and is the
//! last one before the power goes: the older checkpoint stays whole, or the newer one is.

use std::io::ErrorKind;
use std::sync::Arc;

use zeropp_checkpoint::Store;
use zeropp_checkpoint::complete::{About, Completion};
use zeropp_checkpoint::under_way::{SaveOutcome, UnderWay};

use crate::disk::{Fuse, Planted, SimDisk};
use crate::files::{self, Part, save_of};
use crate::rng::Rng;

const RANKS: usize = 2;

fn parts(step: u64, rank: usize) -> Vec<Part> {
    let values = (0..3).map(|i| (100 * step as usize + 10 * rank + i) as f32).collect();
    vec![Part { name: "w".into(), whole: 3 * RANKS, offset: 3 * rank, values }]
}

fn whole(step: u64) -> Vec<(String, Vec<f32>)> {
    let all = (0..RANKS).flat_map(|rank| parts(step, rank).remove(0).values).collect();
    vec![("w".into(), all)]
}

fn save(store: &Store, step: u64) -> SaveOutcome {
    let reports =
        (0..RANKS).map(|rank| files::write(store, step, "a", rank, &parts(step, rank), |_| true));
    let reports = reports.collect();
    let completion = Completion { store, run: "a", keep: 1, save: save_of(step) };
    completion.finish(&About::default(), reports, &UnderWay::default())
}

/// A disk with the checkpoint of step 1, and what a save of step 2 meets there.
fn after_one() -> (SimDisk, Store, Fuse) {
    let disk = SimDisk::new(Planted::default());
    let handle = disk.handle();
    let fuse = handle.fuse.clone();
    let store = Store::on(Arc::new(handle), "/runs/ckpt");
    drop(store.lock().unwrap());
    assert!(save(&store, 1).result.is_ok());
    (disk, store, fuse)
}

/// The newest checkpoint of a disk is whole and as it was saved; its step.
fn newest_is_whole(disk: &SimDisk, what: &str) -> u64 {
    let store = Store::on(Arc::new(disk.handle()), "/runs/ckpt");
    let steps = store.steps().unwrap();
    for step in &steps {
        let read = files::read(&store, *step).unwrap_or_else(|e| panic!("{what}: {e}"));
        assert_eq!(read, whole(*step), "{what}");
    }
    *steps.last().unwrap_or_else(|| panic!("{what}: no checkpoint is left"))
}

fn calls_of_a_save() -> u64 {
    let (_disk, store, fuse) = after_one();
    let before = fuse.calls();
    assert!(save(&store, 2).result.is_ok());
    fuse.calls() - before
}

#[test]
fn whichever_call_of_saving_fails_a_whole_checkpoint_stays_and_the_message_says_why() {
    let calls = calls_of_a_save();
    assert!(calls > 20, "{calls} calls");
    let mut failed = 0;
    for kind in [ErrorKind::StorageFull, ErrorKind::PermissionDenied] {
        for n in 0..calls {
            let (disk, store, fuse) = after_one();
            fuse.fail_after(n, kind);
            let outcome = save(&store, 2);
            let what = format!("call {n} of {calls} fails with {kind:?}");
            let newest = newest_is_whole(&disk, &what);
            match outcome.result {
                Ok(()) => assert_eq!(newest, 2, "{what}"),
                Err(error) => {
                    failed += 1;
                    let (error, cause) = (error.to_string(), std::io::Error::from(kind));
                    assert!(error.contains(&cause.to_string()), "{what}: {error}");
                    assert!(error.contains("/runs/ckpt"), "{what}: {error}");
                }
            }
            // The folder is as good as before: the next run saves there.
            let (_lock, left) = store.lock().unwrap();
            assert!(left.is_empty(), "{what}: {left:?}");
            assert!(save(&store, 3).result.is_ok(), "{what}");
            assert_eq!(newest_is_whole(&disk, &what), 3);
        }
    }
    assert!(failed > 10, "{failed} failed: what is tried again is not all of it");
}

#[test]
fn a_full_disk_from_any_call_on_leaves_the_older_checkpoint() {
    for n in 0..calls_of_a_save() {
        let (disk, store, fuse) = after_one();
        fuse.blow_after(n);
        let outcome = save(&store, 2);
        let newest = newest_is_whole(&disk, &format!("all calls after {n} fail"));
        assert!(newest == 2 || outcome.result.is_err(), "call {n}: what is told is there");
    }
}

#[test]
fn whichever_call_of_saving_is_the_last_before_the_power_goes_a_whole_checkpoint_stays() {
    let calls = calls_of_a_save();
    let mut seen = [0; 2];
    for n in 0..=calls {
        for seed in 0..40 {
            let (disk, store, fuse) = after_one();
            fuse.blow_after(n);
            let outcome = save(&store, 2);
            disk.crash(&mut Rng(seed));
            let what = format!("power goes after call {n} of {calls}, seed {seed}");
            let newest = newest_is_whole(&disk, &what);
            assert!(newest == 2 || outcome.result.is_err(), "{what}: what is told is there");
            seen[newest as usize - 1] += 1;
        }
    }
    assert!(seen.iter().all(|n| *n > 100), "{seen:?}");
}

/// A crash keeps little enough that a test sees each flush and the rename that is left out.
#[test]
fn each_flush_and_the_rename_are_needed() {
    let planted = |no_file_flush, no_folder_flush, no_rename| Planted {
        no_file_flush,
        no_folder_flush,
        no_rename,
    };
    for planted in
        [planted(true, false, false), planted(false, true, false), planted(false, false, true)]
    {
        let caught = (0..500).any(|seed| {
            let disk = SimDisk::new(planted);
            let handle = disk.handle();
            let fuse = handle.fuse.clone();
            let store = Store::on(Arc::new(handle), "/runs/ckpt");
            let locked = store.lock().is_ok();
            let first = save(&store, 1).result.is_ok();
            let mut rng = Rng(seed);
            fuse.blow_after(rng.below(60));
            let second = save(&store, 2).result.is_ok();
            disk.crash(&mut rng);
            let store = Store::on(Arc::new(disk.handle()), "/runs/ckpt");
            let steps = store.steps().unwrap_or_default();
            let damaged = |step: &u64| files::read(&store, *step).is_err();
            let newest = steps.last().copied().unwrap_or(0);
            let reported = if second { 2 } else { u64::from(first) };
            !locked || steps.iter().any(damaged) || newest < reported
        });
        assert!(caught, "{planted:?} is not seen");
    }
}
