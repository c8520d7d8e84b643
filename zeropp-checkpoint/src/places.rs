//! Where a run's state is: checkpoints in its folder, and copies of a newer state in memory, which
//! outlive a process but not the machine.
//!
//! Both are folders of checkpoints, written and read by the same code. At most two copies are there
//! at a time, of which one is being written or about to go: whatever ends a process, one is whole.

use serde::{Deserialize, Serialize};

use crate::error::Checked;
use crate::store::Store;

/// Complete copies that stay beside the one that is being written.
pub const COPIES: usize = 1;

/// Where a state is. The order is that of going on: a later step is better, and of the same step
/// the copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct StateLocation {
    /// Steps behind it.
    pub step: u64,
    /// Whether it is a copy in memory.
    pub in_memory: bool,
}

impl StateLocation {
    /// On disk.
    pub fn on_disk(step: u64) -> StateLocation {
        StateLocation { step, in_memory: false }
    }
}

/// A run's checkpoints, and its copies where it makes any.
#[derive(Clone, Debug)]
pub struct StateStores {
    /// The checkpoints.
    pub checkpoints: Store,
    /// The copies.
    pub copies: Option<Store>,
}

impl StateStores {
    /// The store of a place.
    pub fn store(&self, place: StateLocation) -> &Store {
        self.copies.as_ref().filter(|_| place.in_memory).unwrap_or(&self.checkpoints)
    }

    /// Copies cannot be less than none: where they cannot be looked at, there are none.
    fn copies(&self) -> impl Iterator<Item = StateLocation> {
        let steps = self.copies.as_ref().and_then(|store| store.steps().ok()).unwrap_or_default();
        steps.into_iter().map(|step| StateLocation { step, in_memory: true })
    }

    /// The best copy.
    pub fn newest_copy(&self) -> Option<StateLocation> {
        self.copies().max()
    }

    /// All complete states, in order.
    fn all(&self) -> Checked<Vec<StateLocation>> {
        let mut all: Vec<_> =
            self.checkpoints.steps()?.into_iter().map(StateLocation::on_disk).collect();
        all.extend(self.copies());
        all.sort_unstable();
        Ok(all)
    }

    /// The best of both.
    ///
    /// # Errors
    /// The folder of checkpoints cannot be read.
    pub fn newest(&self) -> Checked<Option<StateLocation>> {
        Ok(self.all()?.last().copied())
    }

    /// The best that comes after this one.
    ///
    /// # Errors
    /// The folder of checkpoints cannot be read.
    pub fn before(&self, place: StateLocation) -> Checked<Option<StateLocation>> {
        Ok(self.all()?.into_iter().rfind(|other| *other < place))
    }

    /// Removes the copies that are newer than where the run goes on, or all where it begins: what
    /// comes is not theirs.
    pub fn drop_copies_after(&self, place: Option<StateLocation>) {
        let Some(store) = &self.copies else { return };
        let gone = self.copies().filter(|copy| place.is_none_or(|place| *copy > place));
        // One that stays would be held against the run's steps when it is read.
        gone.for_each(|copy| drop(store.discard(copy.step)));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::manifest::Manifest;

    fn save(store: &Store, step: u64) {
        let staging = store.begin(step, "a").unwrap();
        store.prepare(&staging, &Manifest::new(step, step, 256, BTreeMap::new())).unwrap();
        store.publish(&staging, step).unwrap();
    }

    fn copy(step: u64) -> Option<StateLocation> {
        Some(StateLocation { step, in_memory: true })
    }

    #[test]
    fn the_newest_state_is_taken_and_a_copy_before_a_checkpoint() {
        let dir = tempfile::tempdir().unwrap();
        let checkpoints = Store::new(dir.path().join("disk"));
        let copies = Store::new(dir.path().join("memory"));
        let _locks = [&checkpoints, &copies].map(|store| store.lock().unwrap());
        let places = StateStores { checkpoints, copies: Some(copies) };
        assert_eq!((places.newest().unwrap(), places.newest_copy()), (None, None));
        [10, 20].iter().for_each(|step| save(&places.checkpoints, *step));
        [19, 20, 21].iter().for_each(|step| save(places.copies.as_ref().unwrap(), *step));
        // A copy during which the process was killed.
        places.copies.as_ref().unwrap().begin(22, "a").unwrap();
        let mut order = Vec::new();
        let mut next = places.newest().unwrap();
        while let Some(place) = next {
            assert!(places.store(place).steps().unwrap().contains(&place.step));
            order.push((place.step, place.in_memory));
            next = places.before(place).unwrap();
        }
        assert_eq!(order, [(21, true), (20, true), (20, false), (19, true), (10, false)]);

        places.drop_copies_after(Some(StateLocation::on_disk(20)));
        assert_eq!(places.newest_copy(), copy(19), "one of the step that is read, too");
        places.drop_copies_after(None);
        assert_eq!(places.newest_copy(), None);
        assert_eq!(places.newest().unwrap(), Some(StateLocation::on_disk(20)));
    }

    #[test]
    fn without_copies_there_are_only_checkpoints() {
        let dir = tempfile::tempdir().unwrap();
        let places = StateStores { checkpoints: Store::new(dir.path()), copies: None };
        save(&places.checkpoints, 3);
        places.drop_copies_after(None);
        assert_eq!(places.newest().unwrap(), Some(StateLocation::on_disk(3)));
        let lost = StateStores { copies: Some(Store::new(dir.path().join("gone"))), ..places };
        assert_eq!(lost.newest().unwrap(), Some(StateLocation::on_disk(3)));
    }
}
