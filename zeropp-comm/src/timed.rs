//! Reads and writes that end by one deadline, however slowly the other side goes about it.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use crate::patience::Deadline;

/// A stream whose every read and write ends by one deadline.
pub(crate) struct Timed<'a> {
    stream: &'a TcpStream,
    deadline: Deadline,
}

impl<'a> Timed<'a> {
    /// All that is read and written has `patience` together.
    pub(crate) fn new(stream: &'a TcpStream, patience: Duration) -> Timed<'a> {
        Timed { stream, deadline: Deadline::after(patience) }
    }

    /// Does `once`, which gets the time that it may take, until it could or the time is over.
    fn in_time(&self, mut once: impl FnMut(Duration) -> io::Result<usize>) -> io::Result<usize> {
        use io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
        while let Some(slice) = self.deadline.slice() {
            match once(slice) {
                Err(e) if matches!(e.kind(), Interrupted | TimedOut | WouldBlock) => {}
                done => return done,
            }
        }
        Err(TimedOut.into())
    }

    /// Reads so many bytes.
    pub(crate) fn array<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.read_exact(&mut bytes)?;
        Ok(bytes)
    }
}

impl Read for Timed<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let mut stream = self.stream;
        self.in_time(|slice| {
            stream.set_read_timeout(Some(slice))?;
            stream.read(into)
        })
    }
}

impl Write for Timed<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut stream = self.stream;
        self.in_time(|slice| {
            stream.set_write_timeout(Some(slice))?;
            stream.write(bytes)
        })
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
