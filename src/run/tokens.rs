//! The micro-batches of a rank: samples of the step's batch, the documents in them, how many of
//! their tokens are scored, and what is dropped of them.

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{Device, Int, Tensor, TensorData};
use parking_lot::Mutex;
use zeropp_comm::groups::Groups;
use zeropp_core::data::{DataError, Sample, Sampler};
use zeropp_core::split::{Documents, Dropout, NOT_SCORED};
use zeropp_pipeline::executor::TokenSource;
use zeropp_pipeline::ir::Schedule;

use crate::own::samples;
use crate::plan::blueprint::Blueprint;
use crate::run::evaluation::EvaluationSet;
use crate::run::shared::RunShared;

/// Finds a sample by its step, as the executor counts, and its place in the step's batch.
type Find = Arc<dyn Fn(u64, usize) -> Result<Sample, DataError> + Send + Sync>;

/// How many tokens of a step are scored, of all ranks together, where not all are: known to ranks
/// with the head, once they have computed on it.
#[derive(Clone, Default)]
pub(crate) struct Scored(Arc<Mutex<Option<(u64, u64)>>>);

impl Scored {
    /// Those of `step`, if they were counted.
    pub(crate) fn of(&self, step: u64) -> Option<u64> {
        self.0.lock().filter(|(of, _)| *of == step).map(|(_, scored)| scored)
    }
}

/// The samples of this rank's steps, from where `sampler` begins; `scored` receives how many of
/// their tokens are scored.
pub(crate) fn training(
    shared: &RunShared,
    device: &Device,
    groups: &Groups,
    sampler: Sampler,
    scored: &Scored,
) -> TokenSource {
    let bp = &shared.blueprint;
    let (data, own) = (shared.data.clone(), bp.own.data.clone());
    let (seq, hidden) = (bp.config.seq, bp.config.hidden_of_samples());
    let per_step = bp.config.samples_per_step();
    let masks = sampler.masks(&shared.data.0);
    let find: Find = match own {
        Some(own) => Arc::new(move |step, index| {
            let n = u64::try_from(sampler.number(step - 1, index)).unwrap_or(u64::MAX);
            samples::sample(&*own, n, seq, hidden)
        }),
        None => Arc::new(move |step, index| sampler.masked(&data.0, step - 1, index)),
    };
    let mut source = source(bp, device, groups, find.clone());
    if bp.config.dropout > 0.0 {
        let (p, seed) = (bp.config.dropout, bp.config.seed);
        let (first, size) = (first_sample(bp, groups), bp.config.micro_batch_size);
        let slices = bp.schedule().slices_per_sample();
        source.dropout = Some(Arc::new(move |step, micro_batch| {
            Ok(Dropout { p, seed, step, sample: first + micro_batch / slices * size })
        }));
    }
    if masks {
        let micro_batches = per_step / bp.config.micro_batch_size;
        let last = scored.0.clone();
        source.scored = Some(Arc::new(move |step| {
            let mut last = last.lock();
            let all = match last.filter(|(of, _)| *of == step) {
                Some((_, all)) => all,
                None => {
                    let scored = |index| find(step, index).map(|sample| sample.scored() as u64);
                    (0..per_step).map(scored).sum::<Result<u64, DataError>>()?
                }
            };
            *last = Some((step, all));
            // Of a step without a scored token the loss is 0, and so is its gradient.
            Ok(all.max(1) as f64 / micro_batches as f64)
        }));
    }
    source
}

/// The samples of a validation loss.
pub(crate) fn evaluation(
    shared: &RunShared,
    device: &Device,
    groups: &Groups,
    set: &Arc<EvaluationSet>,
) -> TokenSource {
    let samples = set.clone();
    let per_batch = shared.blueprint.config.samples_per_step();
    let find = move |batch: u64, index: usize| samples.sample(batch as usize * per_batch + index);
    let mut source = source(&shared.blueprint, device, groups, Arc::new(find));
    if let Some(scored) = set.scored {
        source.scored = Some(Arc::new(move |_| Ok(scored)));
    }
    source
}

/// The number of this rank's first sample in the step's batch: replicas, then ZeRO-3 places, then
/// micro-batches take consecutive samples of it.
fn first_sample(bp: &Blueprint, groups: &Groups) -> usize {
    let c = groups.coords;
    bp.config.deal().first(c.dp, c.zero3, bp.mesh.zero3) * bp.config.micro_batch_size
}

/// Tokens of a micro-batch of this rank, of samples that `find` finds, or of a slice of one.
fn source(bp: &Arc<Blueprint>, device: &Device, groups: &Groups, find: Find) -> TokenSource {
    let device = device.clone();
    let (samples, seq) = (bp.config.micro_batch_size, bp.config.seq);
    let first = first_sample(bp, groups);
    let slices = slices(bp.schedule(), seq);
    let per_sample = slices.len();
    let all = move |step: u64, micro_batch: usize| {
        let first = first + micro_batch / per_sample * samples;
        (first..first + samples).map(|index| find(step, index)).collect::<Result<Vec<_>, _>>()
    };
    let (of, cut) = (all.clone(), slices.clone());
    let tokens = move |step: u64, micro_batch: usize| {
        let slice = slices[micro_batch % slices.len()].clone();
        let mut ids = Vec::with_capacity(samples * slice.len());
        let mut targets = Vec::with_capacity(samples * slice.len());
        for sample in of(step, micro_batch)? {
            ids.extend(sample.inputs[slice.clone()].iter().map(|t| *t as i32));
            let target = |i: usize| match &sample.scored {
                Some(scored) if !scored[i] => NOT_SCORED,
                _ => sample.targets[i] as i32,
            };
            targets.extend(slice.clone().map(target));
        }
        let dims = [samples, slice.len()];
        let tensor = |v: Vec<i32>| Tensor::<2, Int>::from_data(TensorData::new(v, dims), &device);
        Ok((tensor(ids), tensor(targets)))
    };
    let documents = move |step: u64, micro_batch: usize| {
        let samples = all(step, micro_batch)?;
        let whole = Documents::new(seq, samples.iter().map(|sample| sample.documents.as_slice()));
        Ok(if per_sample > 1 {
            whole.of_slice(cut[micro_batch % per_sample].clone())
        } else {
            whole
        })
    };
    let apart = bp.config.document_mask;
    TokenSource {
        tokens: Arc::new(tokens),
        documents: if apart { Some(Arc::new(documents)) } else { None },
        scored: None,
        dropout: None,
    }
}

/// The tokens of each slice of a sample of `seq` tokens.
fn slices(schedule: &Schedule, seq: usize) -> Vec<Range<usize>> {
    let mut end = 0;
    let of = |tokens: &u64| {
        let first = end;
        end += *tokens as usize;
        first..end
    };
    match schedule.sample_slices.is_empty() {
        true => vec![0..seq],
        false => schedule.sample_slices.iter().map(of).collect(),
    }
}
