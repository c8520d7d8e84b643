//! A file that records are written to. While it cannot take them, because its disk is full for a
//! while, they wait in memory, and none is lost.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Write};
use std::sync::Arc;

use parking_lot::Mutex;

/// Bytes of records that wait at most.
pub(super) const WAITING_MAX: usize = 64 << 20;

/// A place for bytes.
trait ByteSink: Send {
    /// Takes some of `bytes`, and says how many.
    fn take(&mut self, bytes: &[u8]) -> io::Result<usize>;

    /// Gives up the last `bytes` that it took.
    fn take_back(&mut self, bytes: u64) -> io::Result<()>;
}

/// Of a file that is written at its end.
impl ByteSink for File {
    fn take(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write(bytes)
    }

    fn take_back(&mut self, bytes: u64) -> io::Result<()> {
        let found = self.metadata()?;
        match found.is_file() {
            true => self.set_len(found.len().saturating_sub(bytes)),
            // What a pipe has, its reader has.
            false => Err(io::ErrorKind::Unsupported.into()),
        }
    }
}

/// News of a file.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum FileEvent {
    /// Records wait, since this error.
    Waits(String),
    /// None waits any more.
    Written,
    /// Too many waited, since this error; they are lost, and so are those that follow.
    Lost(String),
}

/// The last news.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LastReported {
    Written,
    Waits,
    Lost,
}

/// The file. What is written up to a flush is a record; neither of them fails. Clones are of the
/// same one.
#[derive(Clone)]
pub(super) struct Out(Arc<Mutex<WriterState>>);

struct WriterState {
    sink: Box<dyn ByteSink>,
    /// The bytes since the last flush.
    record: Vec<u8>,
    waiting: VecDeque<Vec<u8>>,
    waiting_bytes: usize,
    waiting_max: usize,
    /// Bytes of the first record that waits which the file has.
    begun: usize,
    /// Why records wait.
    failed: Option<io::Error>,
    /// Records are lost, and no more are taken.
    lost: bool,
    reported: LastReported,
}

impl Out {
    /// Writes to `file`, which was opened for appending: a part of a record is cut off again.
    pub(super) fn new(file: File) -> Out {
        Out::to(Box::new(file), WAITING_MAX)
    }

    fn to(sink: Box<dyn ByteSink>, waiting_max: usize) -> Out {
        Out(Arc::new(Mutex::new(WriterState {
            sink,
            record: Vec::new(),
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            waiting_max,
            begun: 0,
            failed: None,
            lost: false,
            reported: LastReported::Written,
        })))
    }

    /// The news that was not taken yet.
    pub(super) fn news(&self) -> Option<FileEvent> {
        let mut state = self.0.lock();
        let (now, news) = match state.failed.as_ref().map(ToString::to_string) {
            Some(error) if state.lost => (LastReported::Lost, FileEvent::Lost(error)),
            Some(error) => (LastReported::Waits, FileEvent::Waits(error)),
            None => (LastReported::Written, FileEvent::Written),
        };
        (std::mem::replace(&mut state.reported, now) != now).then_some(news)
    }

    /// Tries once more to write what waits.
    ///
    /// # Errors
    /// Why something is missing in the file.
    pub(super) fn end(&self) -> io::Result<()> {
        let mut state = self.0.lock();
        state.settle();
        state.failed.take().map_or(Ok(()), Err)
    }
}

impl WriterState {
    /// Writes what waits, as far as it can be.
    fn settle(&mut self) {
        if self.lost {
            return;
        }
        self.failed = self.write_waiting().err();
        if self.failed.is_none() {
            return;
        }
        // A reader finds whole records, meanwhile and after an end by force.
        if self.begun > 0 && self.sink.take_back(self.begun as u64).is_ok() {
            self.begun = 0;
        }
        if self.waiting_bytes > self.waiting_max {
            self.lost = true;
            self.waiting = VecDeque::new();
        }
    }

    fn write_waiting(&mut self) -> io::Result<()> {
        while let Some(record) = self.waiting.front() {
            while self.begun < record.len() {
                match self.sink.take(&record[self.begun..]) {
                    Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                    Ok(bytes) => self.begun += bytes,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(error),
                }
            }
            self.waiting_bytes -= record.len();
            self.waiting.pop_front();
            self.begun = 0;
        }
        Ok(())
    }
}

impl Write for Out {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().record.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        let mut state = self.0.lock();
        let record = std::mem::take(&mut state.record);
        if !state.lost && !record.is_empty() {
            state.waiting_bytes += record.len();
            state.waiting.push_back(record);
        }
        state.settle();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A disk with so much room, and what is on it.
    #[derive(Clone, Default)]
    struct Disk(Arc<Mutex<(usize, Vec<u8>)>>, bool);

    impl Disk {
        fn has_room(&self, bytes: usize) {
            self.0.lock().0 = bytes;
        }

        fn text(&self) -> String {
            String::from_utf8(self.0.lock().1.clone()).unwrap()
        }
    }

    impl ByteSink for Disk {
        fn take(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let (room, text) = &mut *self.0.lock();
            let taken = bytes.len().min(*room);
            if taken == 0 {
                return Err(io::ErrorKind::StorageFull.into());
            }
            *room -= taken;
            text.extend_from_slice(&bytes[..taken]);
            Ok(taken)
        }

        fn take_back(&mut self, bytes: u64) -> io::Result<()> {
            if self.1 {
                return Err(io::ErrorKind::Unsupported.into());
            }
            let (room, text) = &mut *self.0.lock();
            text.truncate(text.len() - bytes as usize);
            *room += bytes as usize;
            Ok(())
        }
    }

    fn full() -> String {
        io::Error::from(io::ErrorKind::StorageFull).to_string()
    }

    fn write(out: &mut Out, line: &str) -> Option<FileEvent> {
        writeln!(out, "{line}").unwrap();
        out.flush().unwrap();
        out.news()
    }

    #[test]
    fn lines_wait_for_a_full_disk_and_are_never_cut() {
        for is_pipe in [false, true] {
            let disk = Disk(Arc::default(), is_pipe);
            let mut out = Out::to(Box::new(disk.clone()), 100);
            disk.has_room(5);
            assert_eq!(write(&mut out, "one"), None);
            assert_eq!(write(&mut out, "two"), Some(FileEvent::Waits(full())), "at once");
            assert_eq!(disk.text(), if is_pipe { "one\nt" } else { "one\n" });
            assert_eq!(write(&mut out, "three"), None, "it is told once");
            disk.has_room(6);
            assert_eq!(write(&mut out, "four"), None, "some still wait");
            disk.has_room(100);
            assert_eq!(write(&mut out, "five"), Some(FileEvent::Written));
            assert_eq!(disk.text(), "one\ntwo\nthree\nfour\nfive\n");
            disk.has_room(0);
            assert_eq!(write(&mut out, "six"), Some(FileEvent::Waits(full())), "another time");
            assert!(out.end().is_err());
            disk.has_room(100);
            out.end().unwrap();
            assert!(disk.text().ends_with("five\nsix\n"));
        }
    }

    #[test]
    fn no_more_waits_than_there_is_memory_for() {
        let disk = Disk::default();
        let mut out = Out::to(Box::new(disk.clone()), 8);
        disk.has_room(4);
        assert_eq!(write(&mut out, "one"), None);
        assert_eq!(write(&mut out, "two"), Some(FileEvent::Waits(full())));
        assert_eq!(write(&mut out, "six"), None);
        assert_eq!(write(&mut out, "ten"), Some(FileEvent::Lost(full())));
        disk.has_room(100);
        assert_eq!(write(&mut out, "eleven"), None, "lines after a gap would mislead");
        assert_eq!((disk.text().as_str(), out.end().is_err()), ("one\n", true));
    }
}
