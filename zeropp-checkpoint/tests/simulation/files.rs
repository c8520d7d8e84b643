//! A rank's few numbers to and from checkpoints, by the code that real ranks use.

use std::time::Duration;

use zeropp_checkpoint::under_way::{Save, WriterReport};
use zeropp_checkpoint::{
    Checked, PARAMETER, StateWriter, Store, UnsyncedState, WrittenPiece, part, tensor_name,
};

/// Elements `offset..` of a parameter of `whole` elements.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Part {
    pub(crate) name: String,
    pub(crate) whole: usize,
    pub(crate) offset: usize,
    pub(crate) values: Vec<f32>,
}

/// Writes the parts of `rank` and flushes them, as its writer does.
pub(crate) fn write(
    store: &Store,
    step: u64,
    run: &str,
    rank: usize,
    parts: &[Part],
    mut pause: impl FnMut(Duration) -> bool,
) -> WriterReport {
    let once = |folder: &std::path::Path, file: &str| {
        let tensors: Vec<_> =
            parts.iter().map(|p| (tensor_name(PARAMETER, &p.name), p.values.len())).collect();
        let path = folder.join(file);
        let mut writer = StateWriter::create(store.disk(), &path, &tensors)?;
        parts.iter().try_for_each(|p| writer.values(&p.values))?;
        let piece = |p: &Part| WrittenPiece {
            name: p.name.clone(),
            shape: vec![p.whole],
            kept: Vec::new(),
            offset: p.offset,
            len: p.values.len(),
        };
        Ok(UnsyncedState::new(writer.finish()?, file, parts.iter().map(piece).collect()))
    };
    let written = match parts.is_empty() {
        true => Ok(None),
        false => part::write(store, step, run, rank, &mut pause, once)
            .and_then(UnsyncedState::sync)
            .map(Some),
    };
    WriterReport { rank, written: written.map_err(|e| e.to_string()), cpu_s: 0.0 }
}

/// All of the checkpoint of `step`, parameter by parameter in the order of their names.
pub(crate) fn read(store: &Store, step: u64) -> Checked<Vec<(String, Vec<f32>)>> {
    let checkpoint = store.open(step)?;
    checkpoint.check_sizes()?;
    let mut reader = checkpoint.parameters();
    let mut all = Vec::new();
    for (name, parameter) in &checkpoint.manifest().parameters {
        let mut values = vec![0.0; parameter.shape[0]];
        reader.read(name, 0, &mut values)?;
        all.push((name.clone(), values));
    }
    reader.finish()?;
    Ok(all)
}

pub(crate) fn save_of(step: u64) -> Save {
    Save { step, updates: step, rotates: true, loss: None, best: None, plateau: None }
}
