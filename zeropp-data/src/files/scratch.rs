//! A file without a name for blocks of bytes that are out of memory for a while.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError, channel};
use std::time::Duration;

use crate::threads::BackgroundThread;

use order::AnyOrder;

mod order;

pub use order::copies_in_any_order;

/// Between two questions whether a copy is done: a thread that has died is seen by then.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
/// Files of this process so far: ranks have one each.
static OPENED: AtomicU64 = AtomicU64::new(0);

/// The file, and the one thread that writes and reads it: copies are done in the order in which
/// they were started. It is written and read, not mapped, so that what is in it counts as no
/// memory; it has lost its name before the first copy, so that nothing of it outlives the process.
#[derive(Debug)]
pub struct ScratchFile {
    file: Arc<File>,
    thread: BackgroundThread,
    /// Where a test asks for another order.
    any_order: Option<Arc<AnyOrder>>,
    /// Places that are free, by their length.
    free: HashMap<u64, Vec<u64>>,
    end: u64,
}

/// Where a block lies in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScratchPlace {
    offset: u64,
    len: u64,
}

/// A copy that is under way.
#[derive(Debug)]
pub struct ScratchCopy<T> {
    result: Receiver<io::Result<T>>,
    done: Option<io::Result<T>>,
}

/// A new file in `folder`, which is made where it is missing, that has lost its name: nothing of it
/// outlives the process.
///
/// # Errors
/// A folder where no file can be made.
pub fn nameless(folder: &Path) -> io::Result<File> {
    fs::create_dir_all(folder)?;
    loop {
        let number = OPENED.fetch_add(1, Ordering::Relaxed);
        let path = folder.join(format!(".zeropp-{}-{number}", std::process::id()));
        match File::options().read(true).write(true).create_new(true).open(&path) {
            // A process of the same number, on another machine or ended before it was unlinked.
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            opened => {
                let file = opened?;
                fs::remove_file(&path)?;
                return Ok(file);
            }
        }
    }
}

impl ScratchFile {
    /// Makes a file in `folder`, and that if it is missing.
    ///
    /// # Errors
    /// A folder where no file can be made, or a thread that is refused.
    pub fn open(folder: &Path) -> io::Result<ScratchFile> {
        let file = nameless(folder)?;
        let thread = BackgroundThread::start("zeropp-copies")?;
        let any_order = AnyOrder::of_test(OPENED.load(Ordering::Relaxed)).map(Arc::new);
        let (file, free) = (Arc::new(file), HashMap::new());
        Ok(ScratchFile { file, thread, any_order, free, end: 0 })
    }

    /// Starts writing these blocks; they are dropped before the copy is done.
    pub fn write<B: AsRef<[u8]> + Send + 'static>(
        &mut self,
        blocks: Vec<B>,
    ) -> (Vec<ScratchPlace>, ScratchCopy<()>) {
        let places: Vec<ScratchPlace> =
            blocks.iter().map(|block| self.place(block.as_ref().len() as u64)).collect();
        let copy = self.write_to(&places, blocks);
        (places, copy)
    }

    /// Starts writing these blocks to `places` of as many bytes, over what lies there.
    pub fn write_to<B: AsRef<[u8]> + Send + 'static>(
        &self,
        places: &[ScratchPlace],
        blocks: Vec<B>,
    ) -> ScratchCopy<()> {
        let offsets: Vec<u64> = places.iter().map(|place| place.offset).collect();
        self.copy(places, true, move |file| {
            let mut all = blocks.into_iter().zip(offsets);
            all.try_for_each(|(block, offset)| file.write_all_at(block.as_ref(), offset))
        })
    }

    /// A place of `len` zeros, of which a file system that knows holes writes none.
    ///
    /// # Errors
    /// A file that may not become so long.
    pub fn zeros(&mut self, len: u64) -> io::Result<ScratchPlace> {
        // One that is free has what was there before.
        let place = ScratchPlace { offset: self.end, len };
        self.file.set_len(self.end + len)?;
        self.end += len;
        Ok(place)
    }

    /// Starts reading what lies at `places` into blocks of as many bytes.
    pub fn read<B: AsMut<[u8]> + Send + 'static>(
        &self,
        places: &[ScratchPlace],
        mut blocks: Vec<B>,
    ) -> ScratchCopy<Vec<B>> {
        let offsets: Vec<u64> = places.iter().map(|place| place.offset).collect();
        self.copy(places, false, move |file| {
            for (block, offset) in blocks.iter_mut().zip(offsets) {
                file.read_exact_at(block.as_mut(), offset)?;
            }
            Ok(blocks)
        })
    }

    /// What lies there, at whole places, is not wanted any more.
    pub fn release(&mut self, places: Vec<ScratchPlace>) {
        for ScratchPlace { offset, len } in places {
            self.free.entry(len).or_default().push(offset);
        }
    }

    /// Bytes that the file has had at most.
    pub fn size(&self) -> u64 {
        self.end
    }

    /// A place of `len` bytes, to be written before it is read.
    pub fn place(&mut self, len: u64) -> ScratchPlace {
        let free = self.free.get_mut(&len).and_then(Vec::pop);
        let offset = free.unwrap_or(self.end);
        self.end = self.end.max(offset + len);
        ScratchPlace { offset, len }
    }

    fn copy<T: Send + 'static>(
        &self,
        places: &[ScratchPlace],
        writes: bool,
        body: impl FnOnce(&File) -> io::Result<T> + Send + 'static,
    ) -> ScratchCopy<T> {
        let (done, result) = channel();
        let file = self.file.clone();
        // Nobody may wait for it, where a run ends early.
        let copy = move |file: &File| _ = done.send(body(file));
        match self.any_order.clone() {
            None => self.thread.give(move || copy(&file)),
            Some(order) => {
                let at = places.iter().map(|at| at.offset..at.offset + at.len).collect();
                order.start(at, writes, Box::new(copy));
                self.thread.give(move || order.do_one(&file));
            }
        }
        ScratchCopy { result, done: None }
    }
}

impl ScratchPlace {
    /// Bytes of the block.
    pub fn bytes(&self) -> u64 {
        self.len
    }

    /// Its bytes `range`, to be written or read alone.
    ///
    /// # Panics
    /// Panics if it is shorter.
    pub fn part(&self, range: Range<u64>) -> ScratchPlace {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {self:?}");
        ScratchPlace { offset: self.offset + range.start, len: range.end - range.start }
    }
}

impl<T> ScratchCopy<T> {
    /// Whether it would be waited for no longer.
    pub fn is_done(&mut self) -> bool {
        if self.done.is_none() {
            self.done = match self.result.try_recv() {
                Ok(result) => Some(result),
                Err(TryRecvError::Empty) => None,
                Err(TryRecvError::Disconnected) => Some(Err(gone())),
            };
        }
        self.done.is_some()
    }

    /// Waits for it.
    ///
    /// # Errors
    /// What the system says, such as that the disk is full.
    pub fn wait(mut self) -> io::Result<T> {
        if let Some(done) = self.done.take() {
            return done;
        }
        loop {
            match self.result.recv_timeout(LOOK_AGAIN) {
                Ok(result) => return result,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Err(gone()),
            }
        }
    }
}

fn gone() -> io::Error {
    io::Error::other("the thread that copies is gone")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All that are independent are swapped in some order; a read of what is written before it
    /// never sees what was there, nor one before a write what comes.
    #[test]
    fn in_any_order_copies_that_meet_keep_theirs() {
        let mut orders = std::collections::HashSet::new();
        for seed in 1..40 {
            copies_in_any_order(seed);
            let mut file = ScratchFile::open(&std::env::temp_dir()).unwrap();
            copies_in_any_order(0);
            let places: Vec<ScratchPlace> = (0..3).map(|_| file.place(100)).collect();
            let (done, order) = channel();
            let mut copies = Vec::new();
            for round in 0..3u8 {
                for (i, place) in places.iter().enumerate() {
                    let at = std::slice::from_ref(place);
                    drop(file.write_to(at, vec![vec![round; 100]]));
                    let (done, offset) = (done.clone(), place.offset);
                    copies.push(file.copy(at, false, move |file| {
                        let mut byte = [9];
                        file.read_exact_at(&mut byte, offset + 50)?;
                        _ = done.send((byte[0], i));
                        Ok(())
                    }));
                }
            }
            copies.into_iter().for_each(|copy| copy.wait().unwrap());
            drop(done);
            let order: Vec<_> = order.iter().collect();
            for i in 0..3 {
                let rounds = order.iter().filter(|(_, of)| *of == i).map(|(round, _)| *round);
                assert_eq!(rounds.collect::<Vec<_>>(), [0, 1, 2], "seed {seed}: {order:?}");
            }
            orders.insert(order);
        }
        assert!(orders.len() > 30, "{} orders", orders.len());
    }

    #[test]
    fn blocks_come_back_and_places_are_used_again() {
        let folder = std::env::temp_dir().join(format!("zeropp-scratch-{}", std::process::id()));
        let mut file = ScratchFile::open(&folder).unwrap();
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 0, "it has no name");
        let blocks = [vec![1u8; 5000], vec![2; 300], vec![3; 5000]];
        let (places, mut copy) = file.write(blocks.to_vec());
        while !copy.is_done() {
            std::thread::yield_now();
        }
        copy.wait().unwrap();
        let empty = blocks.iter().map(|block| vec![0u8; block.len()]).collect();
        let back = file.read(&places, empty).wait().unwrap();
        assert_eq!(back, blocks);
        let size = file.size();
        assert_eq!(size, 10_300);
        // Of the same lengths: no more of the file.
        file.release(places[..2].to_vec());
        let (others, copy) = file.write(vec![vec![7u8; 300], vec![8; 5000]]);
        copy.wait().unwrap();
        assert_eq!(file.size(), size);
        // What was not released is still there; a copy in after one out sees what that wrote.
        let all = [places[2], others[0], others[1]];
        let empty = all.iter().map(|place| vec![0u8; place.bytes() as usize]).collect();
        let back = file.read(&all, empty).wait().unwrap();
        assert_eq!(back, [vec![3u8; 5000], vec![7; 300], vec![8; 5000]]);
        // A part of a block is written and read alone; zeros are new ones.
        let part = others[1].part(1000..1300);
        file.write_to(&[part], vec![vec![9u8; 300]]).wait().unwrap();
        file.release(vec![places[2]]);
        let zeros = file.zeros(5000).unwrap();
        let sides = [others[1].part(999..1001), others[1].part(1299..1301), zeros.part(0..2)];
        let back = file.read(&sides, vec![vec![0u8; 2], vec![0; 2], vec![1; 2]]).wait().unwrap();
        assert_eq!(back, [[8u8, 9], [9, 8], [0, 0]]);
        let size = file.size();
        // Beyond the end: an error.
        let beyond = ScratchPlace { offset: size, len: 9 };
        assert!(file.read(&[beyond], vec![vec![0u8; 9]]).wait().is_err());
        fs::remove_dir(&folder).unwrap();
        fs::write(&folder, "a file").unwrap();
        assert!(ScratchFile::open(&folder).is_err(), "no folder");
        fs::remove_file(&folder).unwrap();
    }
}
