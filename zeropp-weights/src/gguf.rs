//! GGUF files, version 2 and 3: key-values, a table of tensors, their blocks.

use std::path::Path;
use std::sync::Arc;

use crate::encoding::Encoding;
use crate::error::{Checked, damaged, wrong};
use crate::gguf_names::{Architecture, hf_name, hf_names_of_experts, hf_shape, is_of_experts};
use crate::gguf_values::{Cursor, GgufValue, GgufValues};
use crate::stored::{MappedFile, RowOrder, StoredTensor};

pub(crate) const MAGIC: &[u8] = b"GGUF";
/// Where the data of tensors begins is a multiple of this, unless a key says otherwise.
const ALIGNMENT: u64 = 32;

/// No layer has more experts.
const EXPERTS_MAX: u32 = 1 << 16;

/// The content of a GGUF file.
pub(crate) struct GgufFile {
    pub(crate) values: GgufValues,
    pub(crate) tensors: Vec<StoredTensor>,
}

/// A row of the table of tensors.
struct TensorEntry {
    name: String,
    /// Outermost first, as everywhere else; the file has the innermost first.
    shape: Vec<usize>,
    encoding: Encoding,
    offset: u64,
    bytes: u64,
}

/// Opens `path`; names are Hugging Face's where the architecture is known, else the file's own.
pub(crate) fn open(path: &Path) -> Checked<GgufFile> {
    let file = MappedFile::open(path)?;
    let mut cursor = Cursor::new(path, &file.bytes);
    if cursor.take(4, "the magic number")? != MAGIC {
        return Err(wrong(path, "it is not a GGUF file", "name one, or a folder of safetensors"));
    }
    let version = cursor.u32("the version")?;
    if !(2..=3).contains(&version) {
        let problem = format!("its GGUF version is {version}");
        return Err(wrong(path, problem, "version 2 and 3 are read, little endian"));
    }
    let (tensors, keys) = (cursor.u64("the number of tensors")?, cursor.u64("that of keys")?);
    let values = cursor.values(keys)?;
    if let Some(parts) = values.get("split.count").filter(|n| **n != GgufValue::Whole(1)) {
        let problem = format!("it is one of {parts} parts of a split GGUF");
        let help = "merge them with llama-gguf-split --merge, and name the file that it makes";
        return Err(wrong(path, problem, help));
    }
    let mut entries = Vec::new();
    for _ in 0..tensors {
        // Each takes some bytes, so a number without end ends with the file.
        entries.push(entry(path, &mut cursor)?);
    }
    let alignment = match values.get("general.alignment") {
        None => ALIGNMENT,
        Some(GgufValue::Whole(n)) if *n > 0 && *n <= 1 << 20 && n & (n - 1) == 0 => *n as u64,
        Some(other) => {
            let problem = format!("its general.alignment is {other:?}, not a power of two");
            return Err(damaged(path, problem));
        }
    };
    let data = (cursor.at() as u64).next_multiple_of(alignment);
    check_places(path, &entries, (file.bytes.len() as u64).saturating_sub(data), alignment)?;
    let tensors = named(path, &file, &values, entries, data as usize)?;
    Ok(GgufFile { values, tensors })
}

fn entry(path: &Path, cursor: &mut Cursor<'_>) -> Checked<TensorEntry> {
    let name = cursor.name("the name of a tensor")?;
    let dimensions = cursor.u32("the dimensions of a tensor")?;
    if dimensions > 4 {
        return Err(damaged(path, format!("its tensor {name} has {dimensions} dimensions")));
    }
    let mut shape = Vec::new();
    for _ in 0..dimensions {
        let n = cursor.u64("a dimension")?;
        let too_large = |_| damaged(path, format!("its tensor {name} has a dimension {n}"));
        shape.insert(0, usize::try_from(n).map_err(too_large)?);
    }
    let kind = cursor.u32("the type of a tensor")?;
    let offset = cursor.u64("the place of a tensor")?;
    let Some(encoding) = encoding(kind) else {
        let problem = format!("its tensor {name} has the unknown type {kind}");
        return Err(wrong(path, problem, "convert it to F16, BF16, Q8_0 or Q4_K"));
    };
    let (block, width) = encoding.block();
    let row = shape.last().copied().unwrap_or(1);
    if !row.is_multiple_of(block) {
        let problem = format!("its tensor {name} has rows of {row}, and {encoding} needs {block}s");
        return Err(damaged(path, problem));
    }
    let elements = shape.iter().try_fold(1u64, |n, d| n.checked_mul(*d as u64));
    let bytes = elements.and_then(|n| (n / block as u64).checked_mul(width as u64));
    let Some(bytes) = bytes else {
        return Err(damaged(path, format!("its tensor {name} has the impossible shape {shape:?}")));
    };
    Ok(TensorEntry { name, shape, encoding, offset, bytes })
}

/// Every tensor lies inside the data, begins aligned and overlaps no other; no name is there twice.
fn check_places(path: &Path, entries: &[TensorEntry], data: u64, alignment: u64) -> Checked<()> {
    let mut names: Vec<&str> = entries.iter().map(|e| e.name.as_str()).collect();
    names.sort_unstable();
    if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(damaged(path, format!("its tensor {} is there twice", pair[0])));
    }
    let mut places: Vec<&TensorEntry> = entries.iter().collect();
    places.sort_by_key(|e| e.offset);
    let mut end = 0;
    for e in places {
        let (name, offset) = (&e.name, e.offset);
        if !offset.is_multiple_of(alignment) {
            return Err(damaged(path, format!("its tensor {name} begins at byte {offset}")));
        }
        if offset < end {
            return Err(damaged(path, format!("its tensor {name} overlaps the one before it")));
        }
        let inside = offset.checked_add(e.bytes).filter(|end| *end <= data);
        end = inside.ok_or_else(|| {
            let bytes = e.bytes;
            let problem = format!("its tensor {name} has {bytes} bytes from {offset} of {data} on");
            damaged(path, problem)
        })?;
    }
    Ok(())
}

/// The tensors by Hugging Face's names, with rows in their order.
fn named(
    path: &Path,
    file: &Arc<MappedFile>,
    values: &GgufValues,
    entries: Vec<TensorEntry>,
    data: usize,
) -> Checked<Vec<StoredTensor>> {
    let architecture = Architecture::of(path, values)?;
    let count = architecture.as_ref().and_then(|a| values.get(&format!("{}.expert_count", a.name)));
    let count = count.and_then(GgufValue::count).filter(|n| (1..=EXPERTS_MAX).contains(n));
    let mut tensors = Vec::new();
    for e in entries {
        if architecture.is_some()
            && let [experts, rows, columns] = e.shape[..]
            && is_of_experts(&e.name)
        {
            if count.is_none_or(|n| n as usize != experts) {
                let problem = format!("its tensor {} has {experts} experts", e.name);
                let help = "get a file whose key expert_count is the same, and at most 65536";
                return Err(wrong(path, problem, help));
            }
            let names = hf_names_of_experts(&e.name, experts).unwrap_or_default();
            let bytes = e.bytes as usize / experts;
            let of = |(i, name)| StoredTensor {
                name,
                shape: vec![rows, columns],
                encoding: e.encoding,
                rows: RowOrder::AsNamed,
                file: file.clone(),
                start: data + e.offset as usize + i * bytes,
                bytes,
            };
            tensors.extend(names.into_iter().enumerate().map(of));
            continue;
        }
        let (name, rows) = match &architecture {
            Some(architecture) => match hf_name(architecture, &e.name) {
                Some((name, rows)) => (name, rows),
                None if e.name == "rope_freqs.weight" => {
                    let problem = "its rope_freqs.weight scales rope in a way that no key names";
                    return Err(wrong(path, problem, "use the model's Hugging Face folder"));
                }
                None => {
                    let problem = format!("its tensor {} is unknown", e.name);
                    let help = format!("it is none of the architecture {}", architecture.name);
                    return Err(wrong(path, problem, help));
                }
            },
            None => (e.name, RowOrder::AsNamed),
        };
        if let RowOrder::Interleaved { heads } = rows
            && (heads == 0 || !e.shape.first().is_some_and(|n| n.is_multiple_of(2 * heads)))
        {
            let problem = format!("its tensor {name} {:?} is not {heads} heads of rows", e.shape);
            return Err(damaged(path, problem));
        }
        let shape = hf_shape(&name, e.shape);
        tensors.push(StoredTensor {
            name,
            shape,
            encoding: e.encoding,
            rows,
            file: file.clone(),
            start: data + e.offset as usize,
            bytes: e.bytes as usize,
        });
    }
    Ok(tensors)
}

fn encoding(kind: u32) -> Option<Encoding> {
    let unread = |name, block, bytes| Some(Encoding::Unread { name, block, bytes });
    match kind {
        0 => Some(Encoding::F32),
        1 => Some(Encoding::F16),
        2 => Some(Encoding::Q4_0),
        3 => Some(Encoding::Q4_1),
        6 => unread("Q5_0", 32, 22),
        7 => unread("Q5_1", 32, 24),
        8 => Some(Encoding::Q8_0),
        10 => unread("Q2_K", 256, 84),
        11 => unread("Q3_K", 256, 110),
        12 => Some(Encoding::Q4K),
        13 => unread("Q5_K", 256, 176),
        14 => Some(Encoding::Q6K),
        24 => unread("I8", 1, 1),
        25 => unread("I16", 1, 2),
        26 => unread("I32", 1, 4),
        27 => unread("I64", 1, 8),
        28 => unread("F64", 1, 8),
        30 => Some(Encoding::Bf16),
        _ => None,
    }
}
