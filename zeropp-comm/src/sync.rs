//! Locks that the threads of an engine and of a rendezvous wait with: parking_lot's, and with the
//! feature `shuttle` ones that a test runs in every order (`zeropp-comm/tests/shuttle`).

#[cfg(not(feature = "shuttle"))]
mod chosen {
    pub(crate) use std::sync::atomic::AtomicBool;
    pub(crate) use std::thread;

    pub(crate) use parking_lot::{Condvar, Mutex};

    pub(crate) use crate::patience::wait;
}

#[cfg(feature = "shuttle")]
mod chosen {
    use std::ops::{Deref, DerefMut};
    use std::time::Duration;

    use crate::patience::Deadline;

    pub(crate) use shuttle::sync::atomic::AtomicBool;
    pub(crate) use shuttle::thread;

    /// As parking_lot's: a panic does not poison it.
    #[derive(Default)]
    pub(crate) struct Mutex<T>(shuttle::sync::Mutex<T>);

    /// None only while its thread waits for a bell.
    pub(crate) struct MutexGuard<'a, T>(Option<shuttle::sync::MutexGuard<'a, T>>);

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(shuttle::sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            MutexGuard(Some(self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())))
        }

        pub(crate) fn into_inner(self) -> T {
            self.0.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner())
        }
    }

    impl<T> Deref for MutexGuard<'_, T> {
        type Target = T;

        fn deref(&self) -> &T {
            self.0.as_deref().expect("it does not wait")
        }
    }

    impl<T> DerefMut for MutexGuard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            self.0.as_deref_mut().expect("it does not wait")
        }
    }

    #[derive(Default)]
    pub(crate) struct Condvar(shuttle::sync::Condvar);

    impl Condvar {
        pub(crate) fn new() -> Self {
            Self::default()
        }

        pub(crate) fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
            let held = guard.0.take().expect("it does not wait");
            let again = self.0.wait(held).unwrap_or_else(|poisoned| poisoned.into_inner());
            guard.0 = Some(again);
        }

        /// As [`wait`], for a thread that waits for something; the save under way does.
        #[allow(dead_code)]
        pub(crate) fn wait_while_for<T>(
            &self,
            guard: &mut MutexGuard<'_, T>,
            mut waits: impl FnMut(&mut T) -> bool,
            _: Duration,
        ) {
            while waits(guard) {
                self.wait(guard);
            }
        }

        pub(crate) fn notify_all(&self) {
            self.0.notify_all();
        }

        pub(crate) fn notify_one(&self) {
            self.0.notify_one();
        }
    }

    /// No time passes, so that a thread which only a deadline would wake waits for ever: a test
    /// sees that as a deadlock.
    pub(crate) fn wait<T>(bell: &Condvar, guard: &mut MutexGuard<'_, T>, _: Deadline) -> bool {
        bell.wait(guard);
        false
    }
}

pub(crate) use chosen::*;
