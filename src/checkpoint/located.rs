//! The kind of weights at a path: a checkpoint or files of other tools.

use std::path::Path;

use zeropp_checkpoint::checkpoint_at;
use zeropp_weights::Weights;

use crate::Error;

/// Elements that are looked at on both ends of a tensor.
const SAMPLE: usize = 256;

/// A fingerprint of weights: of a checkpoint its manifest, of files every tensor's name, shape and
/// numbers on both ends.
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
