//! What the micro-batches of a rank are: samples of the step's batch, the documents in them, how
//! many of their tokens are scored, and what is dropped of them.

use std::sync::Arc;

use burn::tensor::{Device, Int, Tensor, TensorData};
use parking_lot::Mutex;
use zeropp_comm::groups::Groups;
use zeropp_core::data::{DataError, Sample};
use zeropp_core::split::{Documents, Dropout, NOT_SCORED};
use zeropp_pipeline::executor::TokenSource;

use crate::own::samples;
use crate::plan::blueprint::Blueprint;
use crate::run::evaluation::EvaluationSet;
use crate::run::rank::Shared;

/// Finds a sample by its step, as the executor counts, and its place in the step's batch.
type Find = Arc<dyn Fn(u64, usize) -> Result<Sample, DataError> + Send + Sync>;

/// The samples of this rank's steps.
pub(crate) fn training(shared: &Shared, device: &Device, groups: &Groups) -> TokenSource {
    let bp = &shared.blueprint;
    let (data, own) = (shared.data.clone(), bp.own.data.clone());
    let (seq, hidden) = (bp.config.seq, bp.config.hidden_of_samples());
    let per_step = bp.config.samples_per_step();
    let find: Find = match own {
        Some(own) => Arc::new(move |step, index| {
            let n = (step - 1) * per_step as u64 + index as u64;
            samples::sample(&*own, n, seq, hidden)
        }),
        None => Arc::new(move |step, index| data.1.masked(&data.0, step - 1, index)),
    };
    let (data, sampler) = (&shared.data.0, &shared.data.1);
    let mut source = source(bp, device, groups, find.clone());
    if bp.config.dropout > 0.0 {
        let (p, seed) = (bp.config.dropout, bp.config.seed);
        let (first, size) = (first_sample(bp, groups), bp.config.micro_batch_size);
        source.dropout = Some(Arc::new(move |step, micro_batch| {
            Ok(Dropout { p, seed, step, sample: first + micro_batch * size })
        }));
    }
    if sampler.masks(data) {
        let micro_batches = per_step / bp.config.micro_batch_size;
        let last = Mutex::new(None);
        source.scored = Some(Arc::new(move |step| {
            let mut last = last.lock();
            if let Some((_, scored)) = last.filter(|(of, _)| *of == step) {
                return Ok(scored);
            }
            let mut all = 0;
            for index in 0..per_step {
                all += find(step, index)?.scored();
            }
            // Of a step without a scored token the loss is 0, and so is its gradient.
            let scored = all.max(1) as f64 / micro_batches as f64;
            *last = Some((step, scored));
            Ok(scored)
        }));
    }
    source
}

/// The samples of a validation loss.
pub(crate) fn evaluation(
    shared: &Shared,
    device: &Device,
    groups: &Groups,
    set: &Arc<EvaluationSet>,
) -> TokenSource {
    let samples = set.clone();
    let find = move |batch: u64, index: usize| {
        let (data, sampler) = &samples.data;
        sampler.masked(data, batch, index)
    };
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
    bp.config.deal().first(c.dp, (c.zero3, bp.mesh.zero3)) * bp.config.micro_batch_size
}

/// Tokens of a micro-batch of this rank, of samples that `find` finds.
fn source(bp: &Arc<Blueprint>, device: &Device, groups: &Groups, find: Find) -> TokenSource {
    let device = device.clone();
    let (samples, seq) = (bp.config.micro_batch_size, bp.config.seq);
    let first = first_sample(bp, groups);
    let all = move |step: u64, micro_batch: usize| {
        let first = first + micro_batch * samples;
        (first..first + samples).map(|index| find(step, index)).collect::<Result<Vec<_>, _>>()
    };
    let of = all.clone();
    let tokens = move |step: u64, micro_batch: usize| {
        let mut ids = Vec::with_capacity(samples * seq);
        let mut targets = Vec::with_capacity(samples * seq);
        for sample in of(step, micro_batch)? {
            ids.extend(sample.inputs.iter().map(|t| *t as i32));
            let target = |(i, id): (usize, &u32)| match &sample.scored {
                Some(scored) if !scored[i] => NOT_SCORED,
                _ => *id as i32,
            };
            targets.extend(sample.targets.iter().enumerate().map(target));
        }
        let tensor =
            |v: Vec<i32>| Tensor::<2, Int>::from_data(TensorData::new(v, [samples, seq]), &device);
        Ok((tensor(ids), tensor(targets)))
    };
    let documents = move |step: u64, micro_batch: usize| {
        let samples = all(step, micro_batch)?;
        Ok(Documents::new(seq, samples.iter().map(|sample| sample.documents.as_slice())))
    };
    let apart = bp.config.document_mask;
    TokenSource {
        tokens: Arc::new(tokens),
        documents: if apart { Some(Arc::new(documents)) } else { None },
        scored: None,
        dropout: None,
    }
}
