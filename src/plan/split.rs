//! `head-split = auto`: the head in slices for all ranks where a step is predicted to be shorter
//! so, else whole.

use zeropp_core::layer::{Model, Part};
use zeropp_pipeline::simulate::{Costs, LinkCosts, StageCosts};
use zeropp_plan::split::candidates;

use crate::Error;
use crate::config::Config;
use crate::own::CustomParts;
use crate::plan::blueprint::Blueprint;
use crate::plan::{head, memory};

/// A head of fewer blocks stays whole: one would be too large a part of it to be dealt out evenly.
const BLOCKS_MIN: usize = 16;
/// The least share of a step that slices have to be predicted to gain: what ranks do between an
/// arrival and their next look at it is not predicted.
const GAIN: f64 = 0.03;
/// What a message takes where no file has times, as operations that a rank could do meanwhile:
/// 100 us, as ranks look for messages so often, and its bytes at 5 GB/s, for ranks that do 50
/// billion a second.
const MESSAGE_FLOP: f64 = 5e6;
const FLOP_PER_BYTE: f64 = 10.0;

/// The run of these settings; of those that leave it open whether the head is split, the one that
/// is predicted to be faster. A note says what was chosen, or why it could not be.
///
/// # Errors
/// What is wrong with the settings.
pub(crate) fn planned(
    config: &Config,
    model: Model,
    own: &CustomParts,
) -> Result<Blueprint, Error> {
    let mut whole = Blueprint::new(config, model, own)?;
    let Some(ids) = ids(&whole).filter(|_| config.chooses_head_split()) else { return Ok(whole) };
    let (ranks, head) = (busy(&whole), head_times(&whole));
    // With slices every rank takes the mean at best.
    let mean = ranks.iter().sum::<f64>() / ranks.len() as f64;
    let most = ranks.iter().copied().fold(0.0, f64::max);
    if mean > (1.0 - GAIN) * most {
        return Ok(whole);
    }
    if let Some(why) = head::obstacle(&whole.config, own, &whole.model) {
        let longer = 100.0 * (most / mean - 1.0);
        whole.plan.notes.push(format!(
            "head-split = auto: the head stays whole, and its rank computes {longer:.0} % longer \
             than the mean: {why}"
        ));
        return Ok(whole);
    }
    let split = |blocks: &[usize]| {
        let text: Vec<String> = blocks.iter().map(usize::to_string).collect();
        let config = Config { head_split: Some(text.join(",")), ..whole.config.clone() };
        // One that cannot be is none, such as beyond a limit on memory.
        Blueprint::new(&config, whole.model.clone(), own).ok()
    };
    // Cut anew, stages without the head leave other room for it.
    let even = candidates(ids, &ranks, head).into_iter().nth(1).and_then(|blocks| split(&blocks));
    let poured = even.as_ref().and_then(|even| {
        let blocks = candidates(ids, &busy(even), head).into_iter().nth(2)?;
        split(&blocks)
    });
    let is_short = memory::is_short(&whole.needs());
    let fits = |made: &Blueprint| is_short || !memory::is_short(&made.needs());
    let (before, mut best) = (step_ns(&whole), None::<(u64, Blueprint)>);
    for made in [even, poured].into_iter().flatten().filter(fits) {
        let ns = step_ns(&made);
        if best.as_ref().is_none_or(|(least, _)| ns < *least) {
            best = Some((ns, made));
        }
    }
    let gain = |ns: u64| 1.0 - ns as f64 / before.max(1) as f64;
    let Some((ns, mut best)) = best.filter(|(ns, _)| gain(*ns) >= GAIN) else { return Ok(whole) };
    best.split_chosen = true;
    best.plan.notes.push(format!(
        "head-split = auto: ranks have {} blocks of the head, and a step is predicted to take \
         {:.0} % less",
        best.config.head_split.as_deref().unwrap_or_default(),
        100.0 * gain(ns)
    ));
    Ok(best)
}

/// The same settings, with what was chosen for a run of them open again.
pub(crate) fn reopened(bp: &Blueprint) -> Config {
    let head_split = bp.config.head_split.clone().filter(|_| !bp.split_chosen);
    Config { head_split, ..bp.config.clone() }
}

/// The token ids of a head that may be split.
fn ids(bp: &Blueprint) -> Option<usize> {
    let Some(Part::Head(head)) = bp.model.parts.last() else { return None };
    let split = head.split().filter(|split| split.blocks() >= BLOCKS_MIN)?;
    let can = bp.config.pp > 1 && bp.config.kind().is_some_and(|kind| kind.ahead.is_some());
    // A cut by hand, as plans print them, is one for a whole head; runs in slices of samples cannot
    // split it yet.
    (can && bp.config.stages.is_none() && bp.config.slices() <= 1).then_some(split.ids)
}

fn sum(times: &StageCosts) -> f64 {
    (times.f_ns + times.b_ns + times.w_ns) as f64
}

/// What every rank computes for a micro-batch, without slices of the head.
fn busy(bp: &Blueprint) -> Vec<f64> {
    let placement = &bp.schedule().placement;
    let mut ranks = vec![0.0; bp.schedule().pp()];
    for (rank, times) in placement.iter().zip(&bp.times.costs.stages) {
        ranks[*rank] += sum(times);
    }
    ranks
}

/// What the whole head computes for a micro-batch, of what its stage does: by FLOP.
fn head_times(bp: &Blueprint) -> f64 {
    let estimate = |part: usize| sum(&bp.parts.estimate(bp.parts.flops(part, false)));
    let last = bp.stages.len() - 1;
    let all: f64 = bp.stages[last].clone().map(estimate).sum();
    sum(&bp.times.costs.stages[last]) * estimate(bp.model.parts.len() - 1) / all.max(1.0)
}

/// A step of the run, with messages that take time, so that slices do not seem to have theirs for
/// nothing.
pub(crate) fn step_ns(bp: &Blueprint) -> u64 {
    let costs = &bp.times.costs;
    let mut costs = Costs { memory: bp.all_bytes(), ..costs.clone() };
    if bp.config.costs.is_none() {
        let ns = |flop: f64| bp.parts.estimate([flop; 4]).f_ns;
        let each = ns(FLOP_PER_BYTE * 1e9).max(1);
        costs.link = LinkCosts {
            latency_ns: ns(MESSAGE_FLOP),
            bytes_per_s: Some((1e18 / each as f64).max(1.0) as u64),
            ..LinkCosts::default()
        };
    }
    bp.step_of(&costs)
}
