//! `head-split = auto`: the head in slices for all ranks where a step is predicted to be shorter
//! so, else whole.

use zeropp_core::layer::{Model, Part};
use zeropp_pipeline::simulate::{Costs, LinkCosts, StageCosts};
use zeropp_plan::split::{self, PredictedStep};

use crate::Error;
use crate::config::Config;
use crate::own::CustomParts;
use crate::plan::blueprint::Blueprint;
use crate::plan::{head, memory};

/// What a message takes where no file has times, as operations that a rank could do meanwhile:
/// 100 us, as ranks look for messages so often, and its bytes at 5 GB/s, for ranks that do 50
/// billion a second.
const MESSAGE_FLOP: f64 = 5e6;
const FLOP_PER_BYTE: f64 = 10.0;

/// The run of these settings; of those that leave it open whether the head is split, the one that
/// is predicted to be faster, or that can be. A note says what was chosen, or why it could not be.
///
/// # Errors
/// What is wrong with the settings.
pub(crate) fn planned(
    config: &Config,
    model: Model,
    own: &CustomParts,
) -> Result<Blueprint, Error> {
    let ids = ids(config, &model).filter(|_| config.chooses_head_split());
    let Some(ids) = ids else { return Blueprint::new(config, model, own) };
    let mut whole = Blueprint::new(config, model.clone(), own);
    let ranks = whole.as_ref().map(busy).unwrap_or_default();
    // A split head can only meet a limit on memory that a whole one does not.
    if whole.is_err() && config.mem_limit.is_none() {
        return whole;
    }
    let is_too_large = whole.as_ref().is_ok_and(|whole| memory::is_short(&whole.needs()));
    if !split::is_worth_trying(whole.is_ok() && !is_too_large, &ranks) {
        return whole;
    }
    if let Some(why) = head::obstacle(config, own, &model) {
        if let Ok(whole) = &mut whole {
            let own = whole.schedule().placement.last().map_or(0.0, |rank| ranks[*rank]);
            let longer = 100.0 * (own * ranks.len() as f64 / ranks.iter().sum::<f64>() - 1.0);
            let longer = if longer < 1.0 {
                String::new()
            } else {
                format!(", and its rank computes {longer:.0} % longer than the mean")
            };
            let note = format!("head-split = auto: the head stays whole{longer}: {why}");
            whole.plan.notes.push(note);
        }
        return whole;
    }
    let made = |blocks: &[usize]| {
        let text: Vec<String> = blocks.iter().map(usize::to_string).collect();
        let config = Config { head_split: Some(text.join(",")), ..config.clone() };
        // One that cannot be is none, such as beyond a limit on memory.
        Blueprint::new(&config, model.clone(), own).ok()
    };
    // Cut anew, stages without the head leave other room for it.
    let blocks = split::even(ids, config.pp);
    let even = made(&blocks);
    let poured = even.as_ref().and_then(|even| {
        let head = even.times.costs.stages[even.stages.len()..].iter().map(sum).sum();
        let poured = split::poured(ids, &busy(even), head);
        (poured != blocks).then(|| made(&poured)).flatten()
    });
    let predicted = |made: &Blueprint| PredictedStep {
        step: step_ns(made) as f64,
        fits: !memory::is_short(&made.needs()),
    };
    let all = [even, poured].into_iter().flatten().map(|made| {
        let of = predicted(&made);
        (made, of)
    });
    let chosen = split::chosen(whole.as_ref().ok().map(predicted), all);
    let Some((mut best, gain)) = chosen else { return whole };
    best.split_chosen = true;
    let why = match &whole {
        Ok(_) if is_too_large => "a whole one needs more memory".into(),
        Ok(_) => format!("a step is predicted to take {:.0} % less", 100.0 * gain),
        Err(why) => format!("with a whole one, {why}"),
    };
    best.plan.notes.push(format!(
        "head-split = auto: ranks have {} blocks of the head: {why}",
        best.config.head_split.as_deref().unwrap_or_default(),
    ));
    Ok(best)
}

/// The same settings, with what was chosen for a run of them open again.
pub(crate) fn reopened(bp: &Blueprint) -> Config {
    let head_split = bp.config.head_split.clone().filter(|_| !bp.split_chosen);
    Config { head_split, ..bp.config.clone() }
}

/// The token ids of a head that may be split.
fn ids(config: &Config, model: &Model) -> Option<usize> {
    let Some(Part::Head(head)) = model.parts.last() else { return None };
    let ids = head.split()?.ids;
    // A cut by hand is one for a whole head.
    let can_be = split::can_be(ids, config.pp, config.kind(), config.slices() > 1);
    (config.stages.is_none() && can_be).then_some(ids)
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
        costs.step_ns += ns(FLOP_PER_BYTE * bp.exchanged_bytes() as f64);
    }
    bp.step_of(&costs)
}
