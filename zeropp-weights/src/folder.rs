//! Hugging Face folders: `model.safetensors`, or several files and their index.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;
use zeropp_data::files::{excerpt, read_text};

use crate::error::{Checked, damaged, unreadable, wrong};
use crate::safetensors_file;
use crate::stored::StoredTensor;

/// The one file of a small model.
pub(crate) const SINGLE: &str = "model.safetensors";
/// The table of a large one.
pub(crate) const INDEX: &str = "model.safetensors.index.json";
/// The longest index that is read.
const INDEX_BYTES_MAX: u64 = 256 << 20;

/// How the names of tensors end that are no weights, but that a class remembers of its sizes.
const REMEMBERED: [&str; 3] = [".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias"];
/// A head, which is not in the files where it is the embedding.
const HEAD: &str = "lm_head.weight";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FolderIndex {
    /// Sizes, for people.
    #[serde(default, rename = "metadata")]
    _metadata: Option<BTreeMap<String, Value>>,
    weight_map: BTreeMap<String, String>,
}

/// All tensors of the folder.
pub(crate) fn open(folder: &Path) -> Checked<Vec<StoredTensor>> {
    if folder.join(SINGLE).exists() {
        return safetensors_file::open(&folder.join(SINGLE));
    }
    let path = folder.join(INDEX);
    if !path.exists() {
        return Err(nothing(folder));
    }
    let text = read_text(&path, INDEX_BYTES_MAX).map_err(unreadable(&path))?;
    let index: FolderIndex = serde_json::from_str(&text)
        .map_err(|e| damaged(&path, format!("it is not an index of weights ({e})")))?;
    let files: BTreeSet<&String> = index.weight_map.values().collect();
    if files.is_empty() {
        return Err(damaged(&path, "it lists no file"));
    }
    let mut tensors: BTreeMap<String, StoredTensor> = BTreeMap::new();
    for name in files {
        if !is_plain(name) {
            let problem =
                format!("it names the file \"{}\", which is not beside it", excerpt(name));
            return Err(wrong(&path, problem, "weights lie in the folder of their index"));
        }
        let file = folder.join(name);
        for tensor in safetensors_file::open(&file)? {
            // What the index does not list is in the model or is refused with it.
            if let Some(listed) =
                index.weight_map.get(&tensor.name).filter(|listed| *listed != name)
            {
                let problem = format!("its tensor {} is in {listed} by {INDEX}", tensor.name);
                let help = "delete one of the two, or save the model again";
                return Err(wrong(&file, problem, help));
            }
            if tensors.contains_key(&tensor.name) {
                let problem = format!("its tensor {} is in another file too", tensor.name);
                return Err(wrong(
                    &file,
                    problem,
                    "delete one of the two, or save the model again",
                ));
            }
            tensors.insert(tensor.name.clone(), tensor);
        }
    }
    for (name, file) in &index.weight_map {
        let may_lack = name == HEAD || REMEMBERED.iter().any(|end| name.ends_with(end));
        if !tensors.contains_key(name) && !may_lack {
            return Err(damaged(&folder.join(file), format!("it lacks the tensor {name}")));
        }
    }
    Ok(tensors.into_values().collect())
}

fn is_plain(name: &str) -> bool {
    !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\\', '\0'])
}

fn nothing(folder: &Path) -> crate::WeightsError {
    let problem = format!("it has neither {SINGLE} nor {INDEX}");
    let pickled = folder.join("pytorch_model.bin").exists();
    let help = match pickled {
        true => "pytorch_model.bin may run code and is not read: save it as safetensors",
        false => "name a folder as Hugging Face's save_pretrained writes it",
    };
    wrong(folder, problem, help)
}
