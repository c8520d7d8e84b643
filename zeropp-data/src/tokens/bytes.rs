//! The bytes of the data in one row, most of them still in their files.

use std::io::Read;
use std::path::Path;
use std::thread::ScopedJoinHandle;

use super::DataError;
use crate::files::{Mapped, WalkError, files_below, foreign, open_regular};
use crate::threads::start_scoped;

/// A smaller file of a folder is read: a page of its own and an entry in the system's table of
/// mappings, of which a process gets 65,530, would cost more.
const MAPPED_BYTES_MIN: u64 = 64 << 10;

/// Bytes in one row, in pieces.
#[derive(Debug)]
pub(super) struct JoinedBytes {
    pieces: Vec<ByteSource>,
    /// Where each piece ends; that of the last is the length.
    ends: Vec<usize>,
}

#[derive(Debug)]
enum ByteSource {
    Static(&'static [u8]),
    Read(Vec<u8>),
    Mapped(Mapped),
}

impl ByteSource {
    fn bytes(&self) -> &[u8] {
        match self {
            ByteSource::Static(bytes) => bytes,
            ByteSource::Read(bytes) => bytes,
            ByteSource::Mapped(bytes) => bytes,
        }
    }
}

impl JoinedBytes {
    pub(super) fn builtin(bytes: &'static [u8]) -> JoinedBytes {
        JoinedBytes::new(vec![ByteSource::Static(bytes)])
    }

    pub(super) fn in_memory(bytes: Vec<u8>) -> JoinedBytes {
        JoinedBytes::new(vec![ByteSource::Read(bytes)])
    }

    /// A file, mapped.
    pub(super) fn file(path: &Path) -> Result<JoinedBytes, DataError> {
        let failed = |source| DataError::Read { path: path.into(), source };
        let file = open_regular(path).map_err(failed)?;
        Ok(JoinedBytes::new(vec![ByteSource::Mapped(Mapped::new(&file).map_err(failed)?)]))
    }

    /// A file of text, mapped.
    pub(super) fn text(path: &Path) -> Result<JoinedBytes, DataError> {
        let bytes = JoinedBytes::file(path)?;
        let first = bytes.pieces.first().map_or(&[][..], ByteSource::bytes);
        check_text(path, first)?;
        Ok(bytes)
    }

    /// All files of a folder in the order of their paths, with a line feed after each but the last.
    pub(super) fn folder(folder: &Path) -> Result<JoinedBytes, DataError> {
        let unreadable = |e: WalkError| DataError::Read { path: e.path, source: e.source };
        let files = files_below(folder).map_err(unreadable)?;
        if files.is_empty() {
            return Err(DataError::NoFiles { path: folder.into() });
        }
        let mut pieces = Vec::new();
        let mut read = Vec::new();
        for (i, path) in files.iter().enumerate() {
            let failed = |source| DataError::Read { path: path.clone(), source };
            if i > 0 {
                read.push(b'\n');
            }
            let mut file = open_regular(path).map_err(failed)?;
            if file.metadata().map_err(failed)?.len() < MAPPED_BYTES_MIN {
                let start = read.len();
                file.read_to_end(&mut read).map_err(failed)?;
                check_text(path, &read[start..])?;
                continue;
            }
            pieces.push(ByteSource::Read(std::mem::take(&mut read)));
            let mapped = Mapped::new(&file).map_err(failed)?;
            check_text(path, &mapped)?;
            pieces.push(ByteSource::Mapped(mapped));
        }
        pieces.push(ByteSource::Read(read));
        Ok(JoinedBytes::new(pieces))
    }

    fn new(mut pieces: Vec<ByteSource>) -> JoinedBytes {
        pieces.retain(|piece| !piece.bytes().is_empty());
        let mut end = 0;
        let ends = pieces.iter().map(|piece| {
            end += piece.bytes().len();
            end
        });
        JoinedBytes { ends: ends.collect(), pieces }
    }

    pub(super) fn len(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Copies the bytes from `start` on.
    ///
    /// # Panics
    /// Panics beyond the end.
    pub(super) fn read(&self, start: usize, mut out: &mut [u8]) {
        let mut at = start;
        let mut piece = self.ends.partition_point(|end| *end <= start);
        while !out.is_empty() {
            let bytes = self.pieces[piece].bytes();
            let from = &bytes[bytes.len() - (self.ends[piece] - at)..];
            let n = from.len().min(out.len());
            let (now, later) = out.split_at_mut(n);
            now.copy_from_slice(&from[..n]);
            (out, at, piece) = (later, at + n, piece + 1);
        }
    }

    /// The largest id, of `width` bytes, of a file of ids that begin after `header` bytes; reads
    /// all of it, on all cores.
    pub(super) fn largest_id(&self, header: usize, width: usize) -> Option<u32> {
        let ids = self.pieces.first()?.bytes().get(header..)?;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let share = (ids.len() / width).div_ceil(cores).max(1 << 16) * width;
        std::thread::scope(|scope| {
            let largest = |part: &[u8]| part.chunks_exact(width).map(id).max();
            let start = |part| start_scoped(scope, "ids", move || largest(part)).map_err(|_| part);
            let threads: Vec<_> = ids.chunks(share).map(start).collect();
            let found = |thread: Result<ScopedJoinHandle<'_, _>, _>| match thread {
                Ok(thread) => thread.join().expect("only compares"),
                // No thread is to be had: here, then.
                Err(part) => largest(part),
            };
            threads.into_iter().filter_map(found).max()
        })
    }
}

/// Refuses what is no text by its name or its first bytes.
fn check_text(path: &Path, bytes: &[u8]) -> Result<(), DataError> {
    let Some(found) = foreign(path, bytes) else { return Ok(()) };
    let problem = format!("it is {}, which is not read as text; {}", found.what, found.help);
    Err(DataError::Malformed { path: path.into(), problem })
}

/// A token from its bytes, the lowest one first.
pub(super) fn id(raw: &[u8]) -> u32 {
    raw.iter().rev().fold(0, |id, byte| id << 8 | u32::from(*byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_one_row() {
        let pieces = ["ab", "", "c", "defg"].map(|text| ByteSource::Read(text.into()));
        let bytes = JoinedBytes::new(pieces.into());
        assert_eq!(bytes.len(), 7);
        for start in 0..7 {
            for end in start..=7 {
                let mut out = vec![0; end - start];
                bytes.read(start, &mut out);
                assert_eq!(out, &b"abcdefg"[start..end]);
            }
        }
        assert_eq!(JoinedBytes::new(Vec::new()).len(), 0);
    }

    #[test]
    fn large_and_small_files_of_a_folder_are_one_row() {
        let dir = tempfile::tempdir().unwrap();
        let large = vec![b'x'; MAPPED_BYTES_MIN as usize];
        let files: [(&str, &[u8]); 5] =
            [("a", b"one"), ("b", &large), ("c", &large), ("d", b""), ("e", b"end")];
        for (name, content) in files {
            std::fs::write(dir.path().join(name), content).unwrap();
        }
        let bytes = JoinedBytes::folder(dir.path()).unwrap();
        assert_eq!(bytes.pieces.len(), 5, "small ones and line feeds together");
        let mut all = vec![0; bytes.len()];
        bytes.read(0, &mut all);
        assert_eq!(all, files.map(|(_, content)| content).join(&b'\n'));
    }

    #[test]
    fn ids_are_read_from_the_lowest_byte() {
        assert_eq!(id(&[7]), 7);
        assert_eq!(id(&[1, 2]), 0x0201);
        assert_eq!(id(&[1, 2, 3, 4]), 0x0403_0201);
    }

    #[test]
    fn the_largest_id_is_found_wherever_it_is() {
        for n in [1usize, 1 << 16, (1 << 18) + 3] {
            for place in [0, n / 2, n - 1] {
                let mut ids = vec![7u16; n];
                ids[place] = 65_535;
                let raw: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
                let bytes = JoinedBytes::in_memory([vec![255; 10], raw].concat());
                assert_eq!(bytes.largest_id(10, 2), Some(65_535), "{place} of {n}");
            }
        }
        assert_eq!(JoinedBytes::in_memory(Vec::new()).largest_id(0, 2), None);
        assert_eq!(JoinedBytes::in_memory(vec![255; 4]).largest_id(4, 4), None);
    }
}
