//! What lies at a path that is to have weights: a checkpoint or files of other tools.

use std::path::Path;

use zeropp_weights::Weights;
use zeropp_zero3::checkpoint::{Checkpoint, CheckpointError, Store};

use crate::Error;

/// Elements that are looked at on both ends of a tensor.
const SAMPLE: usize = 256;

/// The checkpoint that `path` is, or the newest in it; none where it is neither.
///
/// # Errors
/// A checkpoint that is damaged.
pub(crate) fn checkpoint_at(path: &Path) -> Result<Option<Checkpoint>, CheckpointError> {
    if path.join("manifest.json").is_file() {
        return Checkpoint::open(path).map(Some);
    }
    if !path.is_dir() {
        return Ok(None);
    }
    let store = Store::new(path);
    let newest = store.steps()?.last().copied();
    newest.map(|step| Checkpoint::open(&store.path(step))).transpose()
}

/// What tells weights from others: of a checkpoint its manifest, of files every tensor's name,
/// shape and numbers on both ends.
pub(crate) fn fingerprint(path: &Path) -> Result<String, Error> {
    let mut hash = blake3::Hasher::new();
    if let Some(checkpoint) = checkpoint_at(path)? {
        for (name, file) in &checkpoint.manifest().files {
            hash.update(format!("{name} {}\n", file.blake3).as_bytes());
        }
        return Ok(hash.finalize().to_hex().to_string());
    }
    let weights = Weights::open(path)?;
    for tensor in weights.tensors() {
        hash.update(format!("{} {:?} {}\n", tensor.name, tensor.shape, tensor.encoding).as_bytes());
        let (n, take) = (tensor.elements(), tensor.elements().min(SAMPLE));
        let mut sample = vec![0.0; take];
        for start in [0, n - take] {
            weights.read(tensor, start, &mut sample)?;
            let bytes: Vec<u8> = sample.iter().flat_map(|x: &f32| x.to_le_bytes()).collect();
            hash.update(&bytes);
        }
    }
    Ok(hash.finalize().to_hex().to_string())
}
