//! Sharded safetensors as Hugging Face writes them, one tensor in memory at a time.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use half::bf16;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde_json::json;

use crate::error::{Checked, unwritable, wrong};
use crate::folder::INDEX;

/// Elements that are turned into bytes at a time.
const CHUNK: usize = 1 << 18;

/// How numbers are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreAs {
    /// As they are.
    F32,
    /// Rounded to bfloat16, to even.
    Bf16,
}

impl StoreAs {
    fn dtype(self) -> Dtype {
        match self {
            StoreAs::F32 => Dtype::F32,
            StoreAs::Bf16 => Dtype::BF16,
        }
    }

    fn bytes(self) -> usize {
        match self {
            StoreAs::F32 => 4,
            StoreAs::Bf16 => 2,
        }
    }

    fn extend(self, values: &[f32], out: &mut Vec<u8>) {
        match self {
            StoreAs::F32 => out.extend(values.iter().flat_map(|x| x.to_le_bytes())),
            StoreAs::Bf16 => {
                out.extend(values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()));
            }
        }
    }
}

/// A tensor that is to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Its name.
    pub name: String,
    /// Its dimensions.
    pub shape: Vec<usize>,
    /// How its numbers are written.
    pub store_as: StoreAs,
}

impl Tensor {
    fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    fn bytes(&self) -> usize {
        self.elements() * self.store_as.bytes()
    }
}

/// Writes `tensors` in their order into files of at most `limit` bytes of elements each (a larger
/// tensor has one of its own), and `others` beside them, into the new folder `folder`. It gets its
/// name once all is on disk. `values` gives the elements of tensor number i.
///
/// # Errors
/// A folder that is there and not empty, the file system's, and those of `values`.
pub fn write_folder<E: From<crate::WeightsError>>(
    folder: &Path,
    tensors: &[Tensor],
    limit: usize,
    others: &[(&str, Vec<u8>)],
    values: impl FnMut(usize) -> Result<Vec<f32>, E>,
) -> Result<(), E> {
    write_files(folder, "model", tensors, limit, others, values)
}

/// Writes the tensors of an adapter as peft does, `adapter_model.safetensors` and `others` beside
/// it, into the new folder `folder`: else as [`write_folder`].
///
/// # Errors
/// As [`write_folder`].
pub fn write_adapter<E: From<crate::WeightsError>>(
    folder: &Path,
    tensors: &[Tensor],
    others: &[(&str, Vec<u8>)],
    values: impl FnMut(usize) -> Result<Vec<f32>, E>,
) -> Result<(), E> {
    write_files(folder, "adapter_model", tensors, usize::MAX, others, values)
}

/// Writes files whose names begin with `stem`.
fn write_files<E: From<crate::WeightsError>>(
    folder: &Path,
    stem: &str,
    tensors: &[Tensor],
    limit: usize,
    others: &[(&str, Vec<u8>)],
    mut values: impl FnMut(usize) -> Result<Vec<f32>, E>,
) -> Result<(), E> {
    let partial = begin(folder)?;
    let shards = shards(tensors, limit);
    let mut weight_map = BTreeMap::new();
    for (i, shard) in shards.iter().enumerate() {
        let name = match shards.len() {
            1 => format!("{stem}.safetensors"),
            n => format!("{stem}-{:05}-of-{n:05}.safetensors", i + 1),
        };
        let path = partial.join(&name);
        let mut out = create(&path, &tensors[shard.clone()])?;
        for j in shard.clone() {
            let tensor = &tensors[j];
            let values = values(j)?;
            assert_eq!(values.len(), tensor.elements(), "{}", tensor.name);
            write_values(&mut out, tensor.store_as, &values).map_err(unwritable(&path))?;
            weight_map.insert(tensor.name.clone(), name.clone());
        }
        let file = out.into_inner().map_err(|e| unwritable(&path)(e.into_error()))?;
        file.sync_all().map_err(unwritable(&path))?;
    }
    if shards.len() > 1 {
        let size: usize = tensors.iter().map(Tensor::bytes).sum();
        let parameters: usize = tensors.iter().map(Tensor::elements).sum();
        let metadata = json!({ "total_parameters": parameters, "total_size": size });
        let index = json!({ "metadata": metadata, "weight_map": weight_map });
        let text = format!("{index:#}\n");
        write_durably(&partial.join(INDEX), text.as_bytes())?;
    }
    for (name, bytes) in others {
        write_durably(&partial.join(name), bytes)?;
    }
    finish(&partial, folder)?;
    Ok(())
}

/// A new hidden folder beside `folder`.
fn begin(folder: &Path) -> Checked<PathBuf> {
    let taken = fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_some());
    if taken || folder.is_file() {
        let problem = if taken { "the folder is not empty" } else { "it is a file" };
        return Err(wrong(folder, problem, "name a new folder"));
    }
    let Some(name) = folder.file_name() else {
        return Err(wrong(folder, "it is not the name of a new folder", "name a new folder"));
    };
    let partial = folder.with_file_name(format!(".{}.partial", name.to_string_lossy()));
    if partial.exists() {
        // Of an export that was killed.
        fs::remove_dir_all(&partial).map_err(unwritable(&partial))?;
    }
    fs::create_dir_all(&partial).map_err(unwritable(&partial))?;
    Ok(partial)
}

fn finish(partial: &Path, folder: &Path) -> Checked<()> {
    let sync = |folder: &Path| File::open(folder).and_then(|f| f.sync_all());
    sync(partial).map_err(unwritable(partial))?;
    if folder.exists() {
        fs::remove_dir(folder).map_err(unwritable(folder))?;
    }
    fs::rename(partial, folder).map_err(unwritable(folder))?;
    let parent = folder.parent().filter(|p| !p.as_os_str().is_empty());
    // Not every file system lets a folder be flushed.
    let _ = sync(parent.unwrap_or(Path::new(".")));
    Ok(())
}

/// Ranges of tensors, each of one file.
fn shards(tensors: &[Tensor], limit: usize) -> Vec<std::ops::Range<usize>> {
    let mut shards = Vec::new();
    let (mut first, mut bytes) = (0, 0);
    for (i, tensor) in tensors.iter().enumerate() {
        if i > first && bytes + tensor.bytes() > limit {
            shards.push(first..i);
            (first, bytes) = (i, 0);
        }
        bytes += tensor.bytes();
    }
    shards.push(first..tensors.len());
    shards
}

/// A file with its header.
fn create(path: &Path, tensors: &[Tensor]) -> Checked<BufWriter<File>> {
    let mut end = 0;
    let infos = tensors.iter().map(|tensor| {
        let start = end;
        end += tensor.bytes();
        let (dtype, shape) = (tensor.store_as.dtype(), tensor.shape.clone());
        (tensor.name.clone(), TensorInfo { dtype, shape, data_offsets: (start, end) })
    });
    // transformers refuses files that do not say so.
    let format = [("format".to_string(), "pt".to_string())].into_iter().collect();
    let metadata = Metadata::new(Some(format), infos.collect()).expect("offsets follow each other");
    let mut header = serde_json::to_vec(&metadata).expect("names and numbers");
    header.resize(header.len().next_multiple_of(8), b' ');
    let write = || {
        let mut out = BufWriter::with_capacity(1 << 20, File::create(path)?);
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(&header)?;
        Ok(out)
    };
    write().map_err(unwritable(path))
}

fn write_values(out: &mut impl Write, store_as: StoreAs, values: &[f32]) -> std::io::Result<()> {
    let mut bytes = Vec::with_capacity(4 * CHUNK.min(values.len()));
    values.chunks(CHUNK).try_for_each(|chunk| {
        bytes.clear();
        store_as.extend(chunk, &mut bytes);
        out.write_all(&bytes)
    })
}

fn write_durably(path: &Path, bytes: &[u8]) -> Checked<()> {
    let write = || {
        let mut file = File::create(path)?;
        file.write_all(bytes)?;
        file.sync_all()
    };
    write().map_err(unwritable(path))
}
