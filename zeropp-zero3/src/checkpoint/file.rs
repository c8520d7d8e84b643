//! One rank's safetensors file: written element by element with its digest, read by ranges.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Read, Seek, SeekFrom, Write};
use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};

use super::error::{Checked, damaged, io};
use super::manifest::FileRecord;

/// Bytes of the header's length at the start of the file.
const PREFIX_BYTES: u64 = 8;
/// Longest header that is read; the format's own limit.
const HEADER_BYTES_MAX: u64 = 100_000_000;
/// Bytes moved at a time.
const CHUNK_BYTES: usize = 1 << 20;

/// The three tensors kept of every piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Parameter,
    FirstMoment,
    SecondMoment,
}

impl Kind {
    pub(super) const ALL: [Kind; 3] = [Kind::Parameter, Kind::FirstMoment, Kind::SecondMoment];

    /// Name of the tensor that has this of the parameter `name`.
    pub(super) fn tensor(self, name: &str) -> String {
        let kind = match self {
            Kind::Parameter => "parameter",
            Kind::FirstMoment => "exp_avg",
            Kind::SecondMoment => "exp_avg_sq",
        };
        format!("{kind}/{name}")
    }
}

/// Counts and digests what passes.
struct Digesting {
    file: File,
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
pub(super) struct StateWriter<'a> {
    path: &'a Path,
    out: BufWriter<Digesting>,
}

impl<'a> StateWriter<'a> {
    /// Creates the file and writes its header for flat f32 tensors of these names and lengths.
    pub(super) fn create(path: &'a Path, tensors: &[(String, usize)]) -> Checked<Self> {
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

        let file = File::create_new(path).map_err(io("create", path))?;
        let inner = Digesting { file, hasher: blake3::Hasher::new(), bytes: 0 };
        let mut writer = Self { path, out: BufWriter::with_capacity(CHUNK_BYTES, inner) };
        writer.bytes(&(header.len() as u64).to_le_bytes())?;
        writer.bytes(&header)?;
        Ok(writer)
    }

    /// Writes the next elements.
    pub(super) fn values(&mut self, values: &[f32]) -> Checked<()> {
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

    /// Makes the file durable.
    pub(super) fn finish(self) -> Checked<FileRecord> {
        let failed = io("write", self.path);
        let inner = match self.out.into_inner() {
            Ok(inner) => inner,
            Err(e) => return Err(failed(e.into_error())),
        };
        inner.file.sync_all().map_err(failed)?;
        let blake3 = inner.hasher.finalize().to_hex().to_string();
        Ok(FileRecord { bytes: inner.bytes, blake3 })
    }
}

/// Size and digest of a file as it is.
pub(super) fn measure(path: &Path) -> Checked<FileRecord> {
    let mut file = File::open(path).map_err(io("read", path))?;
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0; CHUNK_BYTES];
    let mut bytes = 0;
    loop {
        let n = file.read(&mut buffer).map_err(io("read", path))?;
        if n == 0 {
            return Ok(FileRecord { bytes, blake3: hasher.finalize().to_hex().to_string() });
        }
        hasher.update(&buffer[..n]);
        bytes += n as u64;
    }
}

/// Where a file's tensors are: first byte in the file and number of elements, by name.
pub(super) type Places = BTreeMap<String, (u64, usize)>;

/// Reads the header alone.
pub(super) fn places(path: &Path) -> Checked<Places> {
    let mut file = File::open(path).map_err(io("read", path))?;
    let mut prefix = [0; PREFIX_BYTES as usize];
    file.read_exact(&mut prefix).map_err(io("read", path))?;
    let length = u64::from_le_bytes(prefix);
    if length > HEADER_BYTES_MAX {
        return Err(damaged(path, format!("its header claims {length} bytes")));
    }
    let mut header = vec![0; length as usize];
    file.read_exact(&mut header).map_err(io("read", path))?;
    let metadata: Metadata = serde_json::from_slice(&header)
        .map_err(|e| damaged(path, format!("its header is not safetensors' ({e})")))?;
    let data = PREFIX_BYTES + length;
    let place = |name: String| {
        let info = metadata.info(&name).expect("the header's own name");
        let elements = match (info.dtype, info.shape.as_slice()) {
            (Dtype::F32, [n]) => *n,
            _ => return Err(damaged(path, format!("{name} is not a flat f32 tensor"))),
        };
        Ok((name, (data + info.data_offsets.0 as u64, elements)))
    };
    metadata.offset_keys().into_iter().map(place).collect()
}

/// Reads elements from byte `start` of `file` on.
pub(super) fn read_values(file: &mut File, start: u64, out: &mut [f32]) -> std::io::Result<()> {
    file.seek(SeekFrom::Start(start))?;
    let mut buffer = vec![0; CHUNK_BYTES.min(out.len() * 4)];
    for chunk in out.chunks_mut(CHUNK_BYTES / 4) {
        let bytes = &mut buffer[..chunk.len() * 4];
        file.read_exact(bytes)?;
        for (x, b) in chunk.iter_mut().zip(bytes.chunks_exact(4)) {
            *x = f32::from_le_bytes(b.try_into().expect("four bytes"));
        }
    }
    Ok(())
}
