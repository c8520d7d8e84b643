//! A rank's state to and from files: the only place that knows both shards and pieces.

use std::io::{Error, ErrorKind};
use std::path::Path;
use std::sync::Arc;

use burn::tensor::{Tensor, TensorData};
use zeropp_checkpoint::disk::Disk;
use zeropp_checkpoint::moves::HeldWords;
use zeropp_checkpoint::{
    Checked, Checkpoint, CheckpointError, PARAMETER, StateSource, StateTensor, StateWriter,
    UnsyncedState, WRITER_BYTES, WrittenPiece, tensor_name,
};
use zeropp_core::cpu_tensor;
use zeropp_core::device::take_to_read;
use zeropp_core::meter::{Hold, MemoryKind};
use zeropp_core::optimizer::Out;

use crate::layer_shard::FlatPiece;
use crate::layer_state::{KeptTensor, LayerState};
use crate::optimizer::Optimizer;
use crate::stage::ShardedStage;
use crate::state_file::StateFile;
use crate::words::{Words, each_piece};

/// A rank's state after a step, to be written by another thread while the rank computes on.
///
/// It shares the memory of the parameters and moments, so it takes none of its own; but the
/// optimizer, which writes to that memory in place, would have to copy it. So the rank updates
/// nothing before this is dropped.
pub struct StateToWrite {
    layers: Vec<LayerToWrite>,
    /// The file that they are in, if they are in one.
    read_from: Option<Arc<StateFile>>,
    /// The writer's buffers, from now on until the state is written.
    _buffers: Hold,
}

struct LayerToWrite {
    /// Parameters, and what is kept of them.
    tensors: Vec<Words>,
    pieces: Vec<PieceToWrite>,
}

struct PieceToWrite {
    name: String,
    shape: Vec<usize>,
    offset: usize,
    len: usize,
    /// The parts that are there.
    parts: Vec<PartToWrite>,
    /// What the optimizer keeps of the parameter.
    kept: Vec<StateTensor>,
}

/// Words of a piece that a file has together.
struct PartToWrite {
    name: String,
    /// Which of the layer's tensors has them, from which one on, and how many.
    tensor: usize,
    start: usize,
    words: usize,
}

impl PieceToWrite {
    /// Its part in the tensor, if the file has some of it.
    fn part(&self, tensor: usize) -> Option<&PartToWrite> {
        self.parts.iter().find(|part| part.tensor == tensor && part.words > 0)
    }
}

impl StateToWrite {
    /// The parameters and moments that this rank alone is to write. `None` where there is nothing:
    /// another replica or the embedding's rank has it. The rank's thread calls it.
    pub fn of(stages: &[ShardedStage], optimizer: &Optimizer) -> Option<StateToWrite> {
        optimizer.wait_for_update();
        let layer = |(s, l): (usize, usize)| {
            let (start, len) = stages[s].owned_range(l);
            let state = &optimizer.state[s][l];
            let tensors: Vec<_> =
                std::iter::once(&stages[s].layers[l].param).chain(state.all()).collect();
            let place = |kept: &KeptTensor<'_>, p: &FlatPiece<'_>| {
                let tensor = tensors.iter().position(|t| std::ptr::eq(*t, kept.tensor));
                let tensor = tensor.expect("of this layer");
                let words = kept.state.words_in_piece(p.offset, p.len);
                PartToWrite { name: kept.state.name.clone(), tensor, start: kept.start, words }
            };
            let piece = |p: FlatPiece<'_>| {
                let kept = state.kept(p.at);
                let (start, words) = (start + p.at, p.len);
                let whole = PartToWrite { name: PARAMETER.into(), tensor: 0, start, words };
                let parts = kept.iter().map(|kept| place(kept, &p));
                PieceToWrite {
                    name: p.spec.name.clone(),
                    shape: p.spec.whole_shape().to_vec(),
                    offset: p.offset,
                    len: p.len,
                    parts: std::iter::once(whole).chain(parts).collect(),
                    kept: kept.into_iter().map(|kept| kept.state).collect(),
                }
            };
            LayerToWrite {
                pieces: stages[s].pieces(l, start, len).into_iter().map(piece).collect(),
                tensors: tensors.into_iter().map(|words| words.handed_over()).collect(),
            }
        };
        let layers: Vec<_> = optimizer.layers_to_save(stages).into_iter().map(layer).collect();
        let out = optimizer.file.as_ref().map_or(Out::Nothing, |file| file.out);
        let is_something = layers.iter().any(|layer| !layer.pieces.is_empty());
        is_something.then(|| StateToWrite {
            layers,
            read_from: optimizer.file.clone(),
            _buffers: optimizer.meter.hold(MemoryKind::Save, WRITER_BYTES + out.saving()),
        })
    }

    /// A copy of it in memory, for other ranks to get their parts of. The rank's thread calls it.
    pub fn copied(&self) -> HeldWords {
        let mut all = HeldWords::default();
        for layer in &self.layers {
            for (of, tensor) in layer.tensors.iter().enumerate() {
                let here = layer.pieces.iter().filter_map(|p| Some((p, p.part(of)?)));
                let here: Vec<_> = here.collect();
                let places: Vec<_> =
                    here.iter().map(|(_, part)| (part.start, part.words)).collect();
                let mut here = here.into_iter();
                with_values(tensor, &places, |values| {
                    let (piece, part) = here.next().expect("one for each place");
                    let kept = piece.kept.iter().find(|kept| kept.name == part.name);
                    let each = StateTensor::per_element(PARAMETER);
                    let (first, _) = kept.unwrap_or(&each).span(piece.offset, piece.len);
                    all.add(tensor_name(&part.name, &piece.name), first, values.to_vec());
                    Ok(())
                })
                .expect("memory does not refuse");
            }
        }
        all.sort();
        all
    }

    /// Writes it into `folder/file` of `disk`, for as long as it is to `go_on`.
    ///
    /// # Errors
    /// The file system's; one of interruption where it was not to go on. What is written of the
    /// file stays.
    pub fn write(
        &self,
        disk: &dyn Disk,
        folder: &Path,
        file: &str,
        go_on: impl Fn() -> bool,
    ) -> Checked<UnsyncedState> {
        let names = |layer: &LayerToWrite| {
            let all = (0..layer.tensors.len()).flat_map(|tensor| {
                let name = move |p: &PieceToWrite| {
                    p.part(tensor).map(|part| (tensor_name(&part.name, &p.name), part.words))
                };
                layer.pieces.iter().filter_map(name)
            });
            all.collect::<Vec<_>>()
        };
        let tensors: Vec<_> = self.layers.iter().flat_map(names).collect();
        let path = folder.join(file);
        let mut writer = StateWriter::create(disk, &path, &tensors)?;
        let mut pieces = Vec::new();
        for layer in &self.layers {
            for (of, tensor) in layer.tensors.iter().enumerate() {
                let here = layer.pieces.iter().filter_map(|p| p.part(of));
                let here: Vec<_> = here.map(|part| (part.start, part.words)).collect();
                with_values(tensor, &here, |values| match go_on() {
                    true => writer.values(values),
                    false => {
                        let source = ErrorKind::Interrupted.into();
                        Err(CheckpointError::Io { action: "write", path: path.clone(), source })
                    }
                })?;
            }
            pieces.extend(layer.pieces.iter().map(|p| WrittenPiece {
                name: p.name.clone(),
                shape: p.shape.clone(),
                kept: p.kept.clone(),
                offset: p.offset,
                len: p.len,
            }));
        }
        let read = self.read_from.as_ref().map_or(Ok(()), |from| from.check());
        read.map_err(|e| {
            let (path, source) = (path.clone(), Error::other(e));
            CheckpointError::Io { action: "write", path, source }
        })?;
        Ok(UnsyncedState::new(writer.finish()?, file, pieces))
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
    read_from(&mut reader, checkpoint.manifest().updates, stages, optimizer)?;
    reader.finish()
}

/// The same from a `source` that has the state after so many `updates`.
///
/// # Errors
/// The source's.
pub fn read_from(
    source: &mut impl StateSource,
    updates: u64,
    stages: &mut [ShardedStage],
    optimizer: &mut Optimizer,
) -> Checked<()> {
    optimizer.forget();
    // In the order in which it was written, so that a file is read once.
    for stage in stages.iter_mut() {
        let mut states = Vec::new();
        for layer in 0..stage.layers.len() {
            if optimizer.is_shared((stage.index(), layer)) {
                states.push(LayerState::none());
                continue;
            }
            let n = stage.layers[layer].param.len();
            let whole = stage.pieces(layer, 0, n);
            let param = read_pieces(source, &whole, n)?;
            let device = stage.layers[layer].param.device();
            let param = Tensor::from_data(TensorData::new(param, [n]), &device);
            let meter = stage.meter.clone();
            stage.layers[layer].set_param(param, &meter);
            // A mean of the weights that it does not have begins with them.
            let mut state = optimizer.fresh(stage, layer);
            let (start, len) = stage.owned_range(layer);
            read_kept(source, &mut state, &stage.pieces(layer, start, len))?;
            states.push(state);
        }
        optimizer.state.push(states);
    }
    optimizer.hold_state();
    optimizer.updates = updates;
    Ok(())
}

/// Replaces what the checkpoint has of what is kept of these pieces of a layer.
fn read_kept(
    source: &mut impl StateSource,
    state: &mut LayerState,
    pieces: &[FlatPiece<'_>],
) -> Checked<()> {
    let all = state.all().count();
    for of in 0..all {
        let words = state.all().nth(of).expect("so many");
        let mut values = values_of(&words.tensor());
        for p in pieces {
            let kept = state.kept(p.at).into_iter().find(|k| std::ptr::eq(k.tensor, words));
            let Some(KeptTensor { state, start, .. }) = kept else { continue };
            if source.has(&state, &p.spec.name) {
                let out = &mut values[start..start + state.words(p.len)];
                let elements = p.offset..p.offset + p.len;
                source.read_state(&state, &p.spec.name, elements, out)?;
            }
        }
        let (n, device) = (values.len(), words.device());
        let read = Tensor::from_data(TensorData::new(values, [n]), &device);
        state.replace(of, read);
    }
    Ok(())
}

pub(crate) fn values_of(t: &Tensor<1>) -> Vec<f32> {
    t.to_data().try_to_vec::<f32>().expect("state is f32")
}

/// `len` elements of a flat buffer; padding is zero.
fn read_pieces(
    source: &mut impl StateSource,
    pieces: &[FlatPiece<'_>],
    len: usize,
) -> Checked<Vec<f32>> {
    let (mut values, each) = (vec![0f32; len], StateTensor::per_element(PARAMETER));
    for p in pieces {
        let elements = p.offset..p.offset + p.len;
        source.read_state(&each, &p.spec.name, elements, &mut values[p.at..p.at + p.len])?;
    }
    Ok(values)
}

/// Calls `f` with the given elements of the tensor, which another thread may have handed over, from
/// a first one on so many: in place on the CPU, else with a copy; of a file piece by piece.
fn with_values(
    words: &Words,
    pieces: &[(usize, usize)],
    mut f: impl FnMut(&[f32]) -> Checked<()>,
) -> Checked<()> {
    let Some(tensor) = words.here() else {
        return pieces.iter().try_for_each(|(start, n)| {
            let mut done = Ok(());
            each_piece(&[(words, *start)], *n, |_, values| {
                if done.is_ok() {
                    done = f(&values_of(&values[0]));
                }
            });
            done
        });
    };
    if let Some(view) = cpu_tensor::on_cpu(tensor) {
        return pieces.iter().try_for_each(|(start, n)| f(&view.as_slice()[*start..start + n]));
    }
    let from = pieces.iter().map(|(start, _)| *start).min().unwrap_or(0);
    let to = pieces.iter().map(|(start, n)| start + n).max().unwrap_or(0);
    if from == to {
        return Ok(());
    }
    let values = values_of(&take_to_read(tensor.clone()).slice([from..to]));
    pieces.iter().try_for_each(|(start, n)| f(&values[start - from..start - from + n]))
}
