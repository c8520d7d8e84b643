//! Hugging Face folders: `model.safetensors`, or several files and their index.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::Deserialize;
use zeropp_data::files::read_text;

use crate::error::{Checked, damaged, unreadable, wrong};
use crate::safetensors_file;
use crate::stored::StoredTensor;

/// The one file of a small model.
pub(crate) const SINGLE: &str = "model.safetensors";
/// The table of a large one.
pub(crate) const INDEX: &str = "model.safetensors.index.json";
/// The longest index that is read.
const INDEX_BYTES_MAX: u64 = 256 << 20;

#[derive(Deserialize)]
struct Index {
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
    let index: Index = serde_json::from_str(&text)
        .map_err(|e| damaged(&path, format!("it is not an index of weights ({e})")))?;
    let files: BTreeSet<&String> = index.weight_map.values().collect();
    if files.is_empty() {
        return Err(damaged(&path, "it lists no file"));
    }
    let mut tensors: BTreeMap<String, StoredTensor> = BTreeMap::new();
    for name in files {
        if !is_plain(name) {
            let problem = format!("it names the file {name:?}, which is not beside it");
            return Err(wrong(&path, problem, "weights lie in the folder of their index"));
        }
        let file = folder.join(name);
        for tensor in safetensors_file::open(&file)? {
            match index.weight_map.get(&tensor.name) {
                Some(listed) if listed == name => {}
                Some(listed) => {
                    let problem = format!("its tensor {} is in {listed} by {INDEX}", tensor.name);
                    return Err(damaged(&file, problem));
                }
                None => {
                    let problem = format!("its tensor {} is not in {INDEX}", tensor.name);
                    return Err(damaged(&file, problem));
                }
            }
            tensors.insert(tensor.name.clone(), tensor);
        }
    }
    for (name, file) in &index.weight_map {
        if !tensors.contains_key(name) {
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
