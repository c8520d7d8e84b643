//! The figures of each layer in a step, from what its ranks have measured.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use zeropp_core::metrics::{ExpertMetrics, LayerMetrics};
use zeropp_core::split::RouterSums;
use zeropp_zero3::LayerSums;

use crate::config::Config;
use crate::plan::blueprint::Blueprint;

/// A rank's measurements of a layer.
#[derive(Serialize, Deserialize)]
pub(crate) struct LayerWatch {
    /// Place in the model's list.
    part: usize,
    sums: LayerSums,
}

impl Config {
    /// Whether layers are looked at in this step, counted from 1.
    pub(crate) fn looks_at_layers(&self, step: u64) -> bool {
        self.log_layers > 0 && step.is_multiple_of(self.log_layers)
    }
}

/// A rank's figures of its layers, which it knows by stage and place in it.
pub(crate) fn watched(
    bp: &Blueprint,
    seen: BTreeMap<(usize, usize), LayerSums>,
) -> Vec<LayerWatch> {
    let watch = |((stage, layer), sums)| LayerWatch { part: part_of(bp, stage, layer), sums };
    seen.into_iter().map(watch).collect()
}

/// The place in the model's list of a stage's layer.
fn part_of(bp: &Blueprint, stage: usize, layer: usize) -> usize {
    // A rank's slice of a head is a stage behind the others; the embedding has a tied weight.
    let head = if bp.model.is_tied() { 0 } else { bp.model.parts.len() - 1 };
    bp.stages.get(stage).map_or(head, |stage| stage.start + layer)
}

/// A rank's figures of its routers, which it knows by stage and place in it.
pub(crate) fn routers(
    bp: &Blueprint,
    sums: BTreeMap<(usize, usize), RouterSums>,
) -> Vec<(usize, RouterSums)> {
    sums.into_iter().map(|((stage, layer), sums)| (part_of(bp, stage, layer), sums)).collect()
}

/// The figures of the model's experts, from those of all ranks; none of a model without.
pub(crate) fn experts<'a>(
    bp: &Blueprint,
    routers: impl Iterator<Item = &'a (usize, RouterSums)>,
) -> Option<ExpertMetrics> {
    let mut layers = BTreeMap::<usize, RouterSums>::new();
    routers.for_each(|(part, sums)| layers.entry(*part).or_default().merge(sums));
    let mean = |figure: usize| {
        layers.values().map(|sums| sums.means()[figure]).sum::<f64>() / layers.len() as f64
    };
    let (fullest_part, fullest) = layers
        .iter()
        .map(|(part, sums)| (*part, sums.fullest()))
        .max_by(|a, b| a.1.total_cmp(&b.1).then(b.0.cmp(&a.0)))?;
    Some(ExpertMetrics {
        balance_loss: mean(0),
        z_loss: mean(1),
        entropy: mean(2),
        fullest,
        fullest_layer: bp.model.parts[fullest_part].name().into(),
        idle: layers.values().map(RouterSums::idle).sum(),
    })
}

/// The figures of the model's layers, from those of all ranks. The sums are exact, so that no
/// rank's place shows. Empty where no rank has any.
pub(crate) fn metrics<'a>(
    bp: &Blueprint,
    seen: impl Iterator<Item = &'a LayerWatch>,
    skipped: bool,
) -> Vec<LayerMetrics> {
    let mut layers = BTreeMap::<usize, LayerSums>::new();
    seen.for_each(|one| layers.entry(one.part).or_default().merge(&one.sums));
    let parts = &bp.model.parts;
    let trains = |part: usize| {
        let is_copy = bp.model.is_tied() && part + 1 == parts.len();
        !is_copy && parts[part].parameters().iter().any(|p| p.trains)
    };
    let metrics = |(part, sums): (usize, LayerSums)| {
        let norm = sums.gradient.value().sqrt();
        let change = sums.change.value().sqrt() / sums.weight.value().sqrt();
        let mean = sums.output.value() / sums.outputs as f64;
        LayerMetrics {
            name: parts[part].name().into(),
            grad_norm: trains(part).then_some(norm),
            update_ratio: trains(part).then_some(if skipped { 0.0 } else { change }),
            activation_rms: (sums.outputs > 0).then(|| mean.sqrt()),
        }
    };
    layers.into_iter().map(metrics).collect()
}
