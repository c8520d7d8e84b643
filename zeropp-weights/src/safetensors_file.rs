//! One safetensors file: u64 length of the header, the header in JSON, the elements.

use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::Metadata;

use crate::encoding::Encoding;
use crate::error::{Checked, damaged, wrong};
use crate::stored::{MappedFile, RowOrder, StoredTensor};

/// Bytes of the header's length at the start of the file.
const PREFIX_BYTES: usize = 8;
/// The longest header that is read; the format's own limit.
const HEADER_BYTES_MAX: usize = 100_000_000;

/// Opens `path` and checks that its tensors fill it exactly.
pub(crate) fn open(path: &Path) -> Checked<Vec<StoredTensor>> {
    let file = MappedFile::open(path)?;
    let bytes = &file.bytes;
    let Some(prefix) = bytes.first_chunk::<PREFIX_BYTES>() else {
        let n = bytes.len();
        return Err(damaged(path, format!("{n} bytes are too short for a safetensors file")));
    };
    let length = u64::from_le_bytes(*prefix);
    let most = HEADER_BYTES_MAX.min(bytes.len() - PREFIX_BYTES);
    let Some(length) = usize::try_from(length).ok().filter(|n| *n <= most) else {
        let n = bytes.len();
        let problem = format!("its header claims {length} bytes, and the file has {n}");
        return Err(damaged(path, problem));
    };
    let data = PREFIX_BYTES + length;
    let header = &bytes[PREFIX_BYTES..data];
    let metadata: Metadata = serde_json::from_slice(header)
        .map_err(|e| damaged(path, format!("its header is not safetensors' ({e})")))?;
    let (claimed, there) = (metadata.data_len(), bytes.len() - data);
    if claimed != there {
        let problem = format!("its tensors take {claimed} bytes, and {there} follow the header");
        return Err(damaged(path, problem));
    }
    let tensor = |name: String| {
        let info = metadata.info(&name).expect("the header's own name");
        let (start, end) = info.data_offsets;
        Ok(StoredTensor {
            encoding: encoding(path, &name, info.dtype)?,
            name,
            shape: info.shape.clone(),
            rows: RowOrder::AsNamed,
            file: file.clone(),
            start: data + start,
            bytes: end - start,
        })
    };
    metadata.offset_keys().into_iter().map(tensor).collect()
}

fn encoding(path: &Path, name: &str, dtype: Dtype) -> Checked<Encoding> {
    let unread = |name, bytes| Ok(Encoding::Unread { name, block: 1, bytes });
    match dtype {
        Dtype::F32 => Ok(Encoding::F32),
        Dtype::F16 => Ok(Encoding::F16),
        Dtype::BF16 => Ok(Encoding::Bf16),
        Dtype::F64 => unread("F64", 8),
        Dtype::I64 => unread("I64", 8),
        Dtype::U64 => unread("U64", 8),
        Dtype::I32 => unread("I32", 4),
        Dtype::U32 => unread("U32", 4),
        Dtype::I16 => unread("I16", 2),
        Dtype::U16 => unread("U16", 2),
        Dtype::I8 => unread("I8", 1),
        Dtype::U8 => unread("U8", 1),
        Dtype::BOOL => unread("BOOL", 1),
        other => {
            let problem = format!("its tensor {name} is {other:?}");
            Err(wrong(path, problem, "save it as F32, F16 or BF16"))
        }
    }
}
