//! A rank's state to and from files: the only place that knows both shards and pieces.

use std::io::ErrorKind;
use std::path::Path;

use burn::tensor::{Tensor, TensorData};
use serde::{Deserialize, Serialize};
use zeropp_core::cpu_tensor;
use zeropp_core::device::{hand_over, take_to_read};
use zeropp_core::meter::{Hold, MemoryKind};

use super::error::{Checked, io};
use super::file::{Kind, StateWriter, WRITER_BYTES, WrittenFile};
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

/// A rank's state after a step, to be written by another thread while the rank computes on.
///
/// It shares the memory of the parameters and moments, so it takes none of its own; but the
/// optimizer, which writes to that memory in place, would have to copy it. So the rank updates
/// nothing before this is dropped.
pub struct StateToWrite {
    layers: Vec<LayerToWrite>,
    /// The writer's buffers, from now on until the state is written.
    _buffers: Hold,
}

struct LayerToWrite {
    /// Parameters and both moments.
    tensors: [Tensor<1>; 3],
    /// Where the elements that this rank owns begin in each of them, and how many they are.
    starts: [usize; 3],
    len: usize,
    pieces: Vec<PieceToWrite>,
}

struct PieceToWrite {
    name: String,
    shape: Vec<usize>,
    offset: usize,
    at: usize,
    len: usize,
}

/// State that is in its file, which is not yet durable.
pub struct UnsyncedState {
    file: WrittenFile,
    written: WrittenState,
}

impl StateToWrite {
    /// The parameters and moments that this rank alone is to write. `None` where there is nothing:
    /// another replica or the embedding's rank has it. The rank's thread calls it.
    pub fn of(stages: &[ShardedStage], optimizer: &Optimizer) -> Option<StateToWrite> {
        let layer = |(s, l): (usize, usize)| {
            let (start, len) = stages[s].owned_range(l);
            let piece = |p: FlatPiece<'_>| PieceToWrite {
                name: p.spec.name.clone(),
                shape: p.spec.shape.clone(),
                offset: p.offset,
                at: p.at,
                len: p.len,
            };
            let (moments, param) = (&optimizer.moments[s][l], &stages[s].layers[l].param);
            LayerToWrite {
                tensors: [param, &moments.m, &moments.v].map(|t| hand_over(t.clone())),
                starts: [start, 0, 0],
                len,
                pieces: stages[s].pieces(l, start, len).into_iter().map(piece).collect(),
            }
        };
        let layers: Vec<_> = optimizer.layers_to_save(stages).into_iter().map(layer).collect();
        let is_something = layers.iter().any(|layer| !layer.pieces.is_empty());
        is_something.then(|| StateToWrite {
            layers,
            _buffers: optimizer.meter.hold(MemoryKind::Save, WRITER_BYTES),
        })
    }

    /// Writes it into `folder/file`, for as long as it is to `go_on`.
    ///
    /// # Errors
    /// The file system's; one of interruption where it was not to go on. What is written of the
    /// file stays.
    pub fn write(
        &self,
        folder: &Path,
        file: &str,
        go_on: impl Fn() -> bool,
    ) -> Checked<UnsyncedState> {
        let names = |layer: &LayerToWrite| {
            Kind::ALL.map(|kind| {
                layer.pieces.iter().map(|p| (kind.tensor(&p.name), p.len)).collect::<Vec<_>>()
            })
        };
        let tensors: Vec<_> = self.layers.iter().flat_map(names).flatten().collect();
        let path = folder.join(file);
        let mut writer = StateWriter::create(&path, &tensors)?;
        let mut pieces = Vec::new();
        for layer in &self.layers {
            for (tensor, start) in layer.tensors.iter().zip(layer.starts) {
                with_values(tensor, (start, layer.len), |values| {
                    layer.pieces.iter().try_for_each(|p| match go_on() {
                        true => writer.values(&values[p.at..p.at + p.len]),
                        false => Err(io("write", &path)(ErrorKind::Interrupted.into())),
                    })
                })?;
            }
            let piece = |p: &PieceToWrite| (p.name.clone(), p.shape.clone(), p.offset, p.len);
            pieces.extend(layer.pieces.iter().map(piece));
        }
        let written = WrittenState { file: file.into(), record: FileRecord::default(), pieces };
        Ok(UnsyncedState { file: writer.finish()?, written })
    }
}

impl UnsyncedState {
    /// Makes the file durable.
    ///
    /// # Errors
    /// The file system's; what the file has is not known then.
    pub fn sync(self) -> Checked<WrittenState> {
        Ok(WrittenState { record: self.file.sync()?, ..self.written })
    }
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

/// Calls `f` with elements `start..start + len` of the tensor, which another thread may have handed
/// over: in place on the CPU, else with a copy.
fn with_values<R>(
    tensor: &Tensor<1>,
    (start, len): (usize, usize),
    f: impl FnOnce(&[f32]) -> R,
) -> R {
    match cpu_tensor::on_cpu(tensor) {
        Some(view) => f(&view.as_slice()[start..start + len]),
        None => {
            let part = take_to_read(tensor.clone()).slice([start..start + len]);
            f(&part.to_data().try_to_vec::<f32>().expect("state is f32"))
        }
    }
}
