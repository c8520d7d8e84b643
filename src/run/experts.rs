//! What a rank's record says of experts.

use zeropp_core::metrics::ExpertMetrics;
use zeropp_failures::ExpertLoad;
use zeropp_pipeline::simulate::StageCosts;

use crate::plan::blueprint::Blueprint;
use crate::run::figures::StageTimes;

/// How `step`, whose stages took `times`, spread tokens over experts.
pub(crate) fn load(
    bp: &Blueprint,
    step: u64,
    of: &ExpertMetrics,
    times: &StageTimes,
) -> ExpertLoad {
    let ExpertMetrics { fullest, fullest_layer, idle, .. } = of;
    let slower = ExpertLoad::is_unbalanced(*fullest).then(|| slower(bp, fullest_layer, times));
    let (layer, slower) = (fullest_layer.clone(), slower.flatten());
    ExpertLoad { step, fullest: *fullest, layer, idle: *idle, slower }
}

/// How many times as long the stage of `layer` took as its operations say, by the other stages.
fn slower(bp: &Blueprint, layer: &str, times: &StageTimes) -> Option<f64> {
    let part = bp.model.parts.iter().position(|part| part.name() == layer)?;
    let stage = bp.stages.iter().position(|parts| parts.contains(&part))?;
    let stages: Vec<_> = (0..bp.stages.len()).map(|stage| bp.parts_of(stage)).collect();
    let expected = bp.parts.estimates(&stages, |_| false);
    let taken = times.costs(stages.len());
    let compute = |of: &StageCosts| (of.f_ns + of.b_ns + of.w_ns) as f64;
    let rates = taken.iter().zip(&expected).map(|(took, of)| compute(took) / compute(of));
    beside_others(&rates.collect::<Vec<_>>(), stage)
}

/// The rate of one over the mean of the others.
fn beside_others(rates: &[f64], one: usize) -> Option<f64> {
    let others = rates.iter().enumerate().filter(|(i, _)| *i != one).map(|(_, rate)| rate);
    let slower = rates[one] * (rates.len() - 1) as f64 / others.sum::<f64>();
    slower.is_finite().then_some(slower)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stage_stands_beside_the_mean_of_the_others() {
        assert_eq!(beside_others(&[2.0, 6.0, 4.0], 1), Some(2.0));
        assert_eq!(beside_others(&[2.0], 0), None);
        assert_eq!(beside_others(&[1.0, 0.0], 0), None, "a step that was not timed");
    }
}
