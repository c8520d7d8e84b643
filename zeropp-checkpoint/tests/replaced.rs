//! A folder of checkpoints that is removed or replaced while a run saves there.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use zeropp_checkpoint::complete::{About, Completion};
use zeropp_checkpoint::under_way::{Save, SaveOutcome, UnderWay};
use zeropp_checkpoint::{CheckpointError, Manifest, Store};

fn publish(store: &Store, step: u64) -> Result<(), CheckpointError> {
    let staging = store.begin(step, "run")?;
    store.prepare(&staging, &Manifest::new(step, step, 256, BTreeMap::new()))?;
    store.publish(&staging, step).map(drop)
}

fn completed(store: &Store, step: u64) -> SaveOutcome {
    let save = Save { step, updates: step, rotates: true, loss: None, best: None, plateau: None };
    let completion = Completion { store, run: "run", keep: 1, save };
    completion.finish(&About::default(), Vec::new(), &UnderWay::default())
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<_> = entries.map(|name| name.into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_run_whose_folder_was_replaced_ends_and_touches_nothing_of_the_run_that_is_there_now() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("checkpoints");
    let first = Store::new(&folder);
    let (_lock, _) = first.lock().unwrap();
    publish(&first, 1).unwrap();
    fs::rename(&folder, dir.path().join("moved")).unwrap();

    let second = Store::new(&folder);
    let (_other, _) = second.lock().unwrap();
    publish(&second, 5).unwrap();
    publish(&second, 6).unwrap();
    second.begin(7, "other").unwrap();
    let before = names(&folder);

    let outcome = completed(&first, 2);
    let error = outcome.result.as_ref().unwrap_err().to_string();
    assert!(error.contains("was removed or replaced while this run saves there"), "{error}");
    assert!(outcome.is_fatal(false, || true), "whatever checkpoints are there");
    assert!(first.clean().is_empty() && first.set_aside(1).is_err() && first.discard(5).is_err());
    assert_eq!(first.retain(1, None).len(), 1, "refused");
    assert_eq!(names(&folder), before);
    assert!(completed(&second, 7).result.is_ok(), "the other one goes on");
}

#[test]
fn a_run_whose_folder_is_gone_ends() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::new(dir.path().join("checkpoints"));
    let (_lock, _) = store.lock().unwrap();
    assert!(completed(&store, 1).result.is_ok());
    fs::remove_dir_all(store.folder()).unwrap();
    let outcome = completed(&store, 2);
    assert!(matches!(outcome.result, Err(CheckpointError::Replaced { .. })));
    assert!(!store.folder().exists());
}

#[test]
#[cfg(unix)]
fn a_pipe_in_the_place_of_the_lock_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let made = std::process::Command::new("mkfifo").arg(dir.path().join(".lock")).status();
    assert!(made.unwrap().success());
    let store = Store::new(dir.path());
    store.check_free().unwrap();
    let error = store.lock().map(drop).unwrap_err().to_string();
    assert!(error.contains(".lock in it cannot be locked (it is a pipe (FIFO)"), "{error}");
}
