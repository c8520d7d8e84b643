//! All tensors of a folder or file, by name.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::Value;
use zeropp_data::files::{excerpt, open_regular};

use crate::error::{Checked, unreadable, wrong};
use crate::gguf_values::GgufValues;
use crate::stored::StoredTensor;
use crate::{folder, gguf, gguf_config, safetensors_file};

/// The longest name of a tensor.
const NAME_BYTES_MAX: usize = 1 << 10;

/// The format that weights were read from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Container {
    /// A folder as Hugging Face's `save_pretrained` writes it.
    Folder,
    /// One safetensors file.
    Safetensors,
    /// One GGUF file.
    Gguf,
}

/// The tensors of a model, mapped. Opening reads and checks tables alone.
#[derive(Debug)]
pub struct Weights {
    path: PathBuf,
    container: Container,
    tensors: BTreeMap<String, StoredTensor>,
    values: GgufValues,
}

impl Weights {
    /// Opens a folder, a `.safetensors` or a `.gguf`; which of the files it is, its first bytes
    /// say. The files must not be cut while this lives, or the system ends the process.
    ///
    /// # Errors
    /// A file that is none of them, or damaged, with its name and the tensor's.
    pub fn open(path: &Path) -> Result<Weights, crate::WeightsError> {
        let is_folder = std::fs::metadata(path).map_err(unreadable(path))?.is_dir();
        let (container, tensors, values) = if is_folder {
            (Container::Folder, folder::open(path)?, GgufValues::new())
        } else if is_gguf(path)? {
            let file = gguf::open(path)?;
            (Container::Gguf, file.tensors, file.values)
        } else {
            (Container::Safetensors, safetensors_file::open(path)?, GgufValues::new())
        };
        let path = path.to_path_buf();
        let mut by_name = BTreeMap::new();
        for mut tensor in tensors {
            check_name(&tensor)?;
            if container != Container::Gguf {
                // PyTorch's compiled modules are one deeper than their own.
                tensor.name = tensor.name.replace("_orig_mod.", "");
            }
            if let Some(other) = by_name.insert(tensor.name.clone(), tensor) {
                let problem = format!("its tensor {} is there twice", other.name);
                return Err(crate::error::damaged(&path, problem));
            }
        }
        Ok(Weights { path, container, tensors: by_name, values })
    }

    /// Where they were opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The format that they were opened as.
    pub fn container(&self) -> Container {
        self.container
    }

    /// All tensors in the order of their names.
    pub fn tensors(&self) -> impl Iterator<Item = &StoredTensor> {
        self.tensors.values()
    }

    /// The tensor of this name.
    pub fn find(&self, name: &str) -> Option<&StoredTensor> {
        self.tensors.get(name)
    }

    /// Key-values of a GGUF file; empty for the others.
    pub fn gguf_values(&self) -> &GgufValues {
        &self.values
    }

    /// The `config.json` of a GGUF file of an architecture whose names are known.
    ///
    /// # Errors
    /// A key of the architecture that is not known, has another type, or asks for what no family
    /// here has.
    pub fn gguf_config(&self) -> Result<Option<Value>, crate::WeightsError> {
        let embedding = self.find("model.embed_tokens.weight");
        let Some(rows) = embedding.and_then(|embedding| embedding.shape.first()) else {
            return Ok(None);
        };
        let tied = self.find("lm_head.weight").is_none();
        gguf_config::config(&self.values, tied, *rows)
            .map_err(|fault| wrong(&self.path, fault.problem, fault.help))
    }

    /// Elements of a tensor from number `start` on, in row-major order of its shape, as f32.
    ///
    /// # Errors
    /// An encoding that is not read.
    ///
    /// # Panics
    /// Panics beyond the end of the tensor.
    pub fn read(&self, tensor: &StoredTensor, start: usize, out: &mut [f32]) -> Checked<()> {
        if !tensor.encoding.is_read() {
            let problem = format!("its tensor {} is {}", tensor.name, tensor.encoding);
            let help = "F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q4_K and Q6_K are read";
            return Err(wrong(tensor.path(), problem, help));
        }
        tensor.decode(start, out);
        Ok(())
    }
}

/// Names stand in messages and tables.
fn check_name(tensor: &StoredTensor) -> Checked<()> {
    match tensor.name.len() {
        n if n > NAME_BYTES_MAX => {
            let problem = format!("a tensor has a name of {n} bytes: {}", excerpt(&tensor.name));
            Err(wrong(tensor.path(), problem, format!("use names of at most {NAME_BYTES_MAX}")))
        }
        _ => Ok(()),
    }
}

fn is_gguf(path: &Path) -> Checked<bool> {
    use std::io::Read;
    let mut start = Vec::new();
    let file = open_regular(path).map_err(unreadable(path))?;
    let n = gguf::MAGIC.len() as u64;
    file.take(n).read_to_end(&mut start).map_err(unreadable(path))?;
    Ok(start == gguf::MAGIC)
}
