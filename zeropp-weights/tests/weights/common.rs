//! Files made by hand, byte by byte.

use std::path::Path;

use serde_json::{Value, json};

/// Tensors of F32: name, shape, elements counted up from `first`.
pub(crate) struct F32s<'a>(pub(crate) &'a str, pub(crate) &'a [usize], pub(crate) f32);

impl F32s<'_> {
    pub(crate) fn values(&self) -> Vec<f32> {
        let n: usize = self.1.iter().product();
        (0..n).map(|i| self.2 + i as f32).collect()
    }
}

/// A safetensors file.
pub(crate) fn safetensors(tensors: &[F32s]) -> Vec<u8> {
    let mut header = serde_json::Map::new();
    let mut data: Vec<u8> = Vec::new();
    for tensor in tensors {
        let start = data.len();
        data.extend(tensor.values().iter().flat_map(|x| x.to_le_bytes()));
        let offsets = [start, data.len()];
        let info = json!({ "dtype": "F32", "shape": tensor.1, "data_offsets": offsets });
        header.insert(tensor.0.into(), info);
    }
    with_header(&Value::Object(header).to_string(), &data)
}

pub(crate) fn with_header(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

/// A GGUF file that is put together piece by piece.
pub(crate) struct Gguf {
    pub(crate) tensors: u64,
    pub(crate) keys: u64,
    pub(crate) head: Vec<u8>,
    pub(crate) table: Vec<u8>,
    pub(crate) data: Vec<u8>,
}

pub(crate) fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

impl Gguf {
    pub(crate) fn new() -> Gguf {
        Gguf { tensors: 0, keys: 0, head: Vec::new(), table: Vec::new(), data: Vec::new() }
    }

    pub(crate) fn key(mut self, key: &str, kind: u32, value: &[u8]) -> Gguf {
        self.keys += 1;
        self.head.extend([text(key), kind.to_le_bytes().to_vec(), value.to_vec()].concat());
        self
    }

    pub(crate) fn word(self, key: &str, value: &str) -> Gguf {
        self.key(key, 8, &text(value))
    }

    pub(crate) fn number(self, key: &str, value: u32) -> Gguf {
        self.key(key, 4, &value.to_le_bytes())
    }

    /// A row of the table as it stands, the innermost dimension first.
    pub(crate) fn row(mut self, name: &str, dimensions: &[u64], kind: u32, offset: u64) -> Gguf {
        self.tensors += 1;
        self.table.extend(text(name));
        self.table.extend((dimensions.len() as u32).to_le_bytes());
        self.table.extend(dimensions.iter().flat_map(|n| n.to_le_bytes()));
        self.table.extend([kind.to_le_bytes().to_vec(), offset.to_le_bytes().to_vec()].concat());
        self
    }

    /// A tensor of F32, its shape outermost first.
    pub(crate) fn f32s(mut self, name: &str, shape: &[usize], values: &[f32]) -> Gguf {
        self.data.resize(self.data.len().next_multiple_of(32), 0);
        let offset = self.data.len() as u64;
        self.data.extend(values.iter().flat_map(|x| x.to_le_bytes()));
        let dimensions: Vec<u64> = shape.iter().rev().map(|n| *n as u64).collect();
        self.row(name, &dimensions, 0, offset)
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend(self.tensors.to_le_bytes());
        out.extend(self.keys.to_le_bytes());
        out.extend(&self.head);
        out.extend(&self.table);
        out.resize(out.len().next_multiple_of(32), 0);
        out.extend(&self.data);
        out
    }
}

/// Writes files into a folder.
pub(crate) fn folder(files: &[(&str, Vec<u8>)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, bytes) in files {
        write(&dir.path().join(name), bytes);
    }
    dir
}

pub(crate) fn write(path: &Path, bytes: &[u8]) {
    std::fs::write(path, bytes).unwrap();
}
