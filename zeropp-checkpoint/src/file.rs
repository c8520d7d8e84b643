//! One rank's safetensors file: written element by element with its digest, read by ranges.

use std::collections::BTreeMap;
use std::io::{BufWriter, SeekFrom, Write};
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};

use crate::disk::{Disk, PathKind, ReadFile, WriteFile};
use crate::error::{Checked, CheckpointError, damaged, io, unreadable};
use crate::manifest::FileRecord;

/// Bytes of the header's length at the start of the file.
const PREFIX_BYTES: u64 = 8;
/// Longest header that is read; the format's own limit.
const HEADER_BYTES_MAX: u64 = 100_000_000;
/// Bytes moved at a time.
const CHUNK_BYTES: usize = 1 << 20;
/// Memory that writing a file takes beside what is written: a chunk as bytes, and a buffer.
pub const WRITER_BYTES: u64 = 2 * CHUNK_BYTES as u64;

/// The prefix of the names of parameters' tensors; the names of an optimizer's state begin with its
/// own names for it.
pub const PARAMETER: &str = "parameter";

/// Name of the tensor that has what is called `kept` of the parameter `name`.
pub fn tensor_name(kept: &str, name: &str) -> String {
    format!("{kept}/{name}")
}

/// Counts and digests what passes.
struct Digesting {
    file: Box<dyn WriteFile>,
    hasher: blake3::Hasher,
    bytes: u64,
}

impl Write for Digesting {
    fn write(&mut self, data: &[u8]) -> std::io::Result<usize> {
        let n = self.file.write(data)?;
        self.hasher.update(&data[..n]);
        self.bytes += n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.file.flush()
    }
}

/// A file being written: first all names and lengths, then the elements in the same order.
pub struct StateWriter<'a> {
    path: &'a Path,
    out: BufWriter<Digesting>,
}

impl<'a> StateWriter<'a> {
    /// Creates the file and writes its header for flat f32 tensors of these names and lengths.
    ///
    /// # Errors
    /// The file system's; there is such a file.
    pub fn create(
        disk: &dyn Disk,
        path: &'a Path,
        tensors: &[(String, usize)],
    ) -> Checked<StateWriter<'a>> {
        let mut end = 0;
        let infos = tensors
            .iter()
            .map(|(name, len)| {
                let start = end;
                end += len * 4;
                let data_offsets = (start, end);
                let info = TensorInfo { dtype: Dtype::F32, shape: vec![*len], data_offsets };
                (name.clone(), info)
            })
            .collect();
        let metadata = Metadata::new(None, infos).expect("offsets follow each other");
        let mut header = serde_json::to_vec(&metadata).expect("names and numbers");
        header.resize(header.len().next_multiple_of(8), b' ');

        let file = disk.create_file(path).map_err(io("create", path))?;
        let inner = Digesting { file, hasher: blake3::Hasher::new(), bytes: 0 };
        let mut writer = Self { path, out: BufWriter::with_capacity(CHUNK_BYTES, inner) };
        writer.bytes(&(header.len() as u64).to_le_bytes())?;
        writer.bytes(&header)?;
        Ok(writer)
    }

    /// Writes the next elements.
    ///
    /// # Errors
    /// The file system's.
    pub fn values(&mut self, values: &[f32]) -> Checked<()> {
        let mut buffer = Vec::with_capacity(CHUNK_BYTES.min(values.len() * 4));
        for chunk in values.chunks(CHUNK_BYTES / 4) {
            buffer.clear();
            buffer.extend(chunk.iter().flat_map(|x| x.to_le_bytes()));
            self.bytes(&buffer)?;
        }
        Ok(())
    }

    fn bytes(&mut self, bytes: &[u8]) -> Checked<()> {
        self.out.write_all(bytes).map_err(io("write", self.path))
    }

    /// Gives the system what is left in the buffer: no element is needed any more.
    ///
    /// # Errors
    /// The file system's.
    pub fn finish(self) -> Checked<WrittenFile> {
        match self.out.into_inner() {
            Ok(inner) => Ok(WrittenFile { path: self.path.to_path_buf(), inner }),
            Err(e) => Err(io("write", self.path)(e.into_error())),
        }
    }
}

/// A file that is written and not yet durable.
pub struct WrittenFile {
    path: PathBuf,
    inner: Digesting,
}

impl WrittenFile {
    /// Makes the file durable.
    pub(crate) fn sync(self) -> Checked<FileRecord> {
        let WrittenFile { path, mut inner } = self;
        inner.file.sync().map_err(io("write", &path))?;
        let blake3 = inner.hasher.finalize().to_hex().to_string();
        Ok(FileRecord { bytes: inner.bytes, blake3 })
    }
}

/// Where a file's tensors are: first byte in the file and number of elements, by name.
pub(crate) type Places = BTreeMap<String, (u64, usize)>;

/// A file being read. Every byte that is read for the first time goes into its digest, if this
/// reader is the one that checks it; read in the order it was written, the file is read once.
pub(crate) struct StateReader<'a> {
    path: PathBuf,
    record: &'a FileRecord,
    file: Box<dyn ReadFile>,
    places: Places,
    digest: Option<Digest>,
}

/// The digest of a file's first bytes.
#[derive(Default)]
struct Digest {
    hasher: blake3::Hasher,
    /// Number of bytes that are in it.
    upto: u64,
}

impl Digest {
    /// Takes what is new of `bytes`, which begin at byte `at` of the file, not beyond `upto`.
    fn see(&mut self, at: u64, bytes: &[u8]) {
        let seen = self.upto.saturating_sub(at) as usize;
        if let Some(new) = bytes.get(seen..) {
            self.hasher.update(new);
            self.upto = at + bytes.len() as u64;
        }
    }

    /// Reads and takes all up to byte `end`.
    fn advance(&mut self, file: &mut dyn ReadFile, end: u64) -> std::io::Result<()> {
        if self.upto >= end {
            return Ok(());
        }
        file.seek(SeekFrom::Start(self.upto))?;
        let mut buffer = vec![0; CHUNK_BYTES.min((end - self.upto) as usize)];
        while self.upto < end {
            let chunk = buffer.len().min((end - self.upto) as usize);
            file.read_exact(&mut buffer[..chunk])?;
            self.see(self.upto, &buffer[..chunk]);
        }
        Ok(())
    }
}

impl<'a> StateReader<'a> {
    /// Opens a file that is to be as `record` says and reads its header; `checks` if this reader is
    /// to compare the digest.
    pub(crate) fn open(
        disk: &dyn Disk,
        path: PathBuf,
        record: &'a FileRecord,
        checks: bool,
    ) -> Checked<Self> {
        check_size(disk, &path, record)?;
        let file = disk.open(&path).map_err(unreadable(&path))?;
        let digest = checks.then(Digest::default);
        let mut reader = Self { path, record, file, places: Places::new(), digest };
        let prefix = reader.bytes(0, PREFIX_BYTES)?.try_into().expect("as many as asked for");
        let length = u64::from_le_bytes(prefix);
        if length > HEADER_BYTES_MAX.min(record.bytes - PREFIX_BYTES) {
            return Err(reader.damaged(format!("its header claims {length} bytes")));
        }
        let header = reader.bytes(PREFIX_BYTES, length)?;
        reader.places = places(&header).map_err(|problem| reader.damaged(problem))?;
        Ok(reader)
    }

    /// Its tensors.
    pub(crate) fn places(&self) -> &Places {
        &self.places
    }

    /// Reads elements from byte `start` of the file on.
    pub(crate) fn values(&mut self, start: u64, out: &mut [f32]) -> Checked<()> {
        let mut at = start;
        for chunk in out.chunks_mut(CHUNK_BYTES / 4) {
            let bytes = self.bytes(at, 4 * chunk.len() as u64)?;
            for (x, b) in chunk.iter_mut().zip(bytes.chunks_exact(4)) {
                *x = f32::from_le_bytes(b.try_into().expect("four bytes"));
            }
            at += bytes.len() as u64;
        }
        Ok(())
    }

    fn bytes(&mut self, at: u64, len: u64) -> Checked<Vec<u8>> {
        let mut bytes = vec![0; len as usize];
        let mut read = || {
            if let Some(digest) = &mut self.digest {
                digest.advance(&mut *self.file, at)?;
            }
            self.file.seek(SeekFrom::Start(at))?;
            self.file.read_exact(&mut bytes)
        };
        read().map_err(unreadable(&self.path))?;
        if let Some(digest) = &mut self.digest {
            digest.see(at, &bytes);
        }
        Ok(bytes)
    }

    /// Reads what is left, if this reader is the one that checks, and compares the digest.
    pub(crate) fn finish(mut self) -> Checked<()> {
        let Some(digest) = &mut self.digest else { return Ok(()) };
        digest.advance(&mut *self.file, self.record.bytes).map_err(unreadable(&self.path))?;
        match digest.hasher.finalize().to_hex().as_str() == self.record.blake3 {
            true => Ok(()),
            false => Err(self.damaged("its content does not match its digest in the manifest")),
        }
    }

    pub(crate) fn damaged(&self, problem: impl Into<String>) -> CheckpointError {
        damaged(&self.path, problem)
    }
}

/// Checks that the file is there and as long as it was.
pub(crate) fn check_size(disk: &dyn Disk, path: &Path, record: &FileRecord) -> Checked<()> {
    let size = match disk.look(path).map_err(unreadable(path))? {
        PathKind::File(bytes) => bytes,
        PathKind::Folder => return Err(damaged(path, "it is a folder")),
    };
    match size == record.bytes && size >= PREFIX_BYTES {
        true => Ok(()),
        false => Err(damaged(path, format!("{size} bytes instead of {}", record.bytes))),
    }
}

fn places(header: &[u8]) -> Result<Places, String> {
    let metadata: Metadata = serde_json::from_slice(header)
        .map_err(|e| format!("its header is not safetensors' ({e})"))?;
    let data = PREFIX_BYTES + header.len() as u64;
    let place = |name: String| {
        let info = metadata.info(&name).expect("the header's own name");
        let elements = match (info.dtype, info.shape.as_slice()) {
            (Dtype::F32, [n]) => *n,
            _ => return Err(format!("{name} is not a flat f32 tensor")),
        };
        Ok((name, (data + info.data_offsets.0 as u64, elements)))
    };
    metadata.offset_keys().into_iter().map(place).collect()
}
