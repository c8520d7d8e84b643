//! A rank's state to and from files: the only place that knows both shards and pieces.

use std::path::Path;

use burn::tensor::{Tensor, TensorData};
use serde::{Deserialize, Serialize};
use zeropp_core::cpu_tensor;

use super::error::Checked;
use super::file::{Kind, StateWriter};
use super::manifest::{FileRecord, Manifest, Parameter, Piece};
use super::open::{Checkpoint, Reader};
use crate::layer_shard::FlatPiece;
use crate::optimizer::Optimizer;
use crate::stage::ShardedStage;

/// What a rank has written, for the manifest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WrittenState {
    file: String,
    record: FileRecord,
    /// Name, shape, first element and number of elements of each piece.
    pieces: Vec<(String, Vec<usize>, usize, usize)>,
}

impl WrittenState {
    /// Enters the file and its pieces. Ranks come in any order; [`Manifest::sort_pieces`] follows.
    pub fn enter(self, manifest: &mut Manifest) {
        for (name, shape, offset, len) in self.pieces {
            let entry = manifest.parameters.entry(name);
            let parameter = entry.or_insert_with(|| Parameter { shape, pieces: Vec::new() });
            parameter.pieces.push(Piece { offset, len, file: self.file.clone() });
        }
        manifest.files.insert(self.file, self.record);
    }
}

/// Writes parameters and moments that this rank alone is to write into `folder/file`, durably.
/// `None`, and no file, where there is nothing: another replica or the embedding's rank has it.
///
/// # Errors
/// The file system's.
pub fn write_state(
    folder: &Path,
    file: &str,
    stages: &[ShardedStage],
    optimizer: &Optimizer,
) -> Checked<Option<WrittenState>> {
    let mine = optimizer.layers_to_save(stages);
    let pieces = |(s, l): &(usize, usize)| {
        let (start, len) = stages[*s].owned_range(*l);
        stages[*s].pieces(*l, start, len)
    };
    let tensors: Vec<(String, usize)> = mine
        .iter()
        .flat_map(|at| {
            let pieces = pieces(at);
            Kind::ALL.map(|kind| {
                pieces.iter().map(|p| (kind.tensor(&p.spec.name), p.len)).collect::<Vec<_>>()
            })
        })
        .flatten()
        .collect();
    if tensors.is_empty() {
        return Ok(None);
    }
    let path = folder.join(file);
    let mut writer = StateWriter::create(&path, &tensors)?;
    let mut written = Vec::new();
    for at @ (s, l) in &mine {
        let pieces = pieces(at);
        let (start, len) = stages[*s].owned_range(*l);
        let moments = &optimizer.moments[*s][*l];
        let param = stages[*s].layers[*l].param.clone().slice([start..start + len]);
        for values in [&param, &moments.m, &moments.v] {
            with_values(values, |values| {
                pieces.iter().try_for_each(|p| writer.values(&values[p.at..p.at + p.len]))
            })?;
        }
        written.extend(
            pieces.iter().map(|p| (p.spec.name.clone(), p.spec.shape.clone(), p.offset, p.len)),
        );
    }
    let record = writer.finish()?;
    Ok(Some(WrittenState { file: file.into(), record, pieces: written }))
}

/// Replaces parameters, moments and the count of updates by the checkpoint's, reading only what
/// this rank holds and checking it on the way. [`Checkpoint::check_model`] has found that it fits.
///
/// # Errors
/// A file that is not what was written. Then the state is not to be used: another checkpoint may be
/// read in its place.
pub fn read_state(
    checkpoint: &Checkpoint,
    stages: &mut [ShardedStage],
    optimizer: &mut Optimizer,
) -> Checked<()> {
    let mut reader = checkpoint.reader();
    for (stage, moments) in stages.iter_mut().zip(&mut optimizer.moments) {
        for (layer, moments) in moments.iter_mut().enumerate() {
            let n = stage.layers[layer].param.dims()[0];
            let whole = stage.pieces(layer, 0, n);
            let param = read_pieces(&mut reader, Kind::Parameter, &whole, n)?;
            let (start, len) = stage.owned_range(layer);
            let owned = stage.pieces(layer, start, len);
            let m = read_pieces(&mut reader, Kind::FirstMoment, &owned, len)?;
            let v = read_pieces(&mut reader, Kind::SecondMoment, &owned, len)?;
            let device = stage.layers[layer].param.device();
            let tensor = |values: Vec<f32>| {
                let n = values.len();
                Tensor::from_data(TensorData::new(values, [n]), &device)
            };
            (moments.m, moments.v) = (tensor(m), tensor(v));
            let meter = stage.meter.clone();
            stage.layers[layer].set_param(tensor(param), &meter);
        }
    }
    optimizer.hold_moments();
    optimizer.updates = checkpoint.manifest().updates;
    reader.finish()
}

/// `len` elements of a flat buffer; padding is zero.
fn read_pieces(
    reader: &mut Reader<'_>,
    kind: Kind,
    pieces: &[FlatPiece<'_>],
    len: usize,
) -> Checked<Vec<f32>> {
    let mut values = vec![0f32; len];
    for p in pieces {
        reader.read(kind, &p.spec.name, p.offset, &mut values[p.at..p.at + p.len])?;
    }
    Ok(values)
}

/// Calls `f` with the tensor's elements: in place on the CPU, else with a copy.
fn with_values<R>(tensor: &Tensor<1>, f: impl FnOnce(&[f32]) -> R) -> R {
    match cpu_tensor::on_cpu(tensor) {
        Some(view) => f(view.as_slice()),
        None => f(&tensor.to_data().try_to_vec::<f32>().expect("state is f32")),
    }
}
