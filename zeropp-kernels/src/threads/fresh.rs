//! A vector that several threads write, a part each.

use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A vector of elements that are not written yet.
pub(crate) struct Fresh<T> {
    data: Vec<T>,
    len: usize,
    written: AtomicUsize,
}

impl<T: Copy> Fresh<T> {
    /// For `len` elements.
    pub(crate) fn new(len: usize) -> Self {
        Self { data: Vec::with_capacity(len), len, written: AtomicUsize::new(0) }
    }

    /// Its parts of `piece` elements, the last one shorter. To be asked for once.
    pub(crate) fn parts(&mut self, piece: usize) -> impl Iterator<Item = FreshPart<'_, T>> {
        self.written = AtomicUsize::new(0);
        let (slots, written) = (&mut self.data.spare_capacity_mut()[..self.len], &self.written);
        slots.chunks_mut(piece.max(1)).map(move |slots| FreshPart { slots, next: 0, written })
    }

    /// Its parts of these lengths, which are all of it. To be asked for once.
    pub(crate) fn split(
        &mut self,
        lengths: impl Iterator<Item = usize>,
    ) -> impl Iterator<Item = FreshPart<'_, T>> {
        self.written = AtomicUsize::new(0);
        let (mut slots, written) = (&mut self.data.spare_capacity_mut()[..self.len], &self.written);
        lengths.map(move |length| {
            let (part, rest) = std::mem::take(&mut slots).split_at_mut(length);
            slots = rest;
            FreshPart { slots: part, next: 0, written }
        })
    }

    /// The vector.
    ///
    /// # Panics
    /// Panics if a part was not written to its end.
    pub(crate) fn done(mut self) -> Vec<T> {
        assert_eq!(*self.written.get_mut(), self.len, "elements that were written");
        // SAFETY: the parts are all there is, each counted once, when all of it was written.
        unsafe { self.data.set_len(self.len) };
        self.data
    }
}

/// A part of a [`Fresh`] vector, written from its beginning to its end.
pub(crate) struct FreshPart<'a, T> {
    slots: &'a mut [MaybeUninit<T>],
    next: usize,
    written: &'a AtomicUsize,
}

impl<T: Copy> FreshPart<'_, T> {
    /// Elements of the part, written or not.
    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }

    /// The next `count` elements of each part, which `make` writes and returns.
    pub(crate) fn made<const N: usize>(
        mut parts: [&mut Self; N],
        count: usize,
        make: impl for<'c> FnOnce([&'c mut [MaybeUninit<T>]; N]) -> [&'c mut [T]; N],
    ) {
        let mut slots = parts.each_mut().map(|part| &mut part.slots[part.next..][..count]);
        let starts = slots.each_ref().map(|slots| (slots.as_ptr().cast(), count));
        let made = make(slots.each_mut().map(|slots| &mut **slots));
        let made = made.map(|made| (made.as_ptr(), made.len()));
        assert!(made == starts, "the elements that were given");
        parts.into_iter().for_each(|part| part.next += count);
    }

    /// What was written.
    pub(crate) fn written(&self) -> &[T] {
        // SAFETY: as its name says.
        unsafe { self.slots[..self.next].assume_init_ref() }
    }

    /// Writes one more element.
    #[inline(always)]
    pub(crate) fn push(&mut self, x: T) {
        self.slots[self.next].write(x);
        self.next += 1;
    }

    /// Writes more elements.
    #[inline(always)]
    pub(crate) fn extend_from_slice(&mut self, x: &[T]) {
        self.slots[self.next..self.next + x.len()].write_copy_of_slice(x);
        self.next += x.len();
    }

    /// Writes as many elements as `x` has, or there is room for.
    #[inline(always)]
    pub(crate) fn extend(&mut self, x: impl Iterator<Item = T>) {
        let mut count = 0;
        for (slot, x) in self.slots[self.next..].iter_mut().zip(x) {
            slot.write(x);
            count += 1;
        }
        self.next += count;
    }
}

impl<T> Drop for FreshPart<'_, T> {
    fn drop(&mut self) {
        if self.next == self.slots.len() {
            self.written.fetch_add(self.next, Ordering::Relaxed);
        }
    }
}

/// Writes `x` everywhere.
pub(crate) fn filled<T: Copy>(slots: &mut [MaybeUninit<T>], x: T) -> &mut [T] {
    slots.fill(MaybeUninit::new(x));
    // SAFETY: just written.
    unsafe { slots.assume_init_mut() }
}
