//! What everything took in a run, from its timeline.

use std::collections::{BTreeMap, BTreeSet};

use crate::action::{Cost, MessageEnd};
use crate::ir::{Action, Compute, Message, Task};
use crate::memory::StageBytes;
use crate::simulate::{Costs, LinkCosts, StageCosts, StateCopies};
use crate::timeline::{RankTimeline, Span, Timeline};

use super::CostsError;

/// Durations by what took them and its stage; slices of a split head, whose stage is behind the
/// others, are as many as ranks.
#[derive(Default)]
struct Seen {
    stages: usize,
    /// F, B, W, R and BW: of each micro-batch all that there are.
    computes: BTreeMap<(Compute, usize), BTreeMap<usize, Vec<u64>>>,
    /// Gathers, reductions and sums over replicas.
    collectives: BTreeMap<(Cost, usize), u64>,
    /// Sends and receives, by pipeline, message, producing stage and micro-batch.
    messages: BTreeMap<(usize, Message, usize, usize), [Vec<u64>; 2]>,
    /// The shortest optimizer step of any rank, by the step's number.
    steps: BTreeMap<usize, u64>,
}

/// The costs of a run, simulated or measured; of several steps the first, which warms everything
/// up, is left out. There are no bytes.
///
/// A compute takes the mean over micro-batches of the median of each: those that come to a stage
/// first find its weights in no cache, step by step, while an outlier is of one step. A whole
/// backward counts as B. A collective takes the shortest
/// time from its start until it was seen to be done: ranks that come to it early wait for others. A
/// message takes the median over the links between stages of the shortest time from its sending to
/// its use, which is that of a receiver that was waiting for it. Where the head is split, those of
/// each rank's slice are behind the stages'.
///
/// # Errors
/// A stage without an F or a backward of its own.
pub fn measured(timeline: &Timeline) -> Result<Costs, CostsError> {
    let stages = stages_of(timeline);
    let mut seen = Seen { stages, ..Seen::default() };
    for rank in &timeline.ranks {
        for (step, spans) in steps_of(&rank.spans) {
            spans.iter().for_each(|span| seen.add(rank, step, span));
        }
    }
    let mut of_all: Vec<_> = (0..stages).map(|s| seen.stage(s)).collect::<Result<_, _>>()?;
    if seen.computes.keys().any(|(_, cell)| *cell >= stages) {
        let ranks = timeline.ranks.iter().map(|rank| rank.pp + 1).max().unwrap_or(0);
        let has = |cell: usize| seen.computes.contains_key(&(Compute::F, cell));
        for cell in stages..stages + ranks {
            of_all.push(if has(cell) { seen.stage(cell)? } else { StageCosts::default() });
        }
    }
    Ok(Costs {
        memory: vec![StageBytes::default(); of_all.len()],
        layers: Vec::new(),
        stages: of_all,
        link: LinkCosts { latency_ns: seen.message_ns(), ..LinkCosts::default() },
        file_bytes_per_s: None,
        copies_apart: false,
        states: Vec::new(),
        overlap_ns: None,
        step_ns: median(seen.steps.values().copied().collect()).unwrap_or(0),
    })
}

/// The stages that one rank each has. A timeline may list a split head, which several have, as one
/// more.
pub(super) fn stages_of(timeline: &Timeline) -> usize {
    let Some(last) = timeline.placement.len().checked_sub(1) else { return 0 };
    let has = |rank: &&RankTimeline| {
        let mut tasks = rank.spans.iter().flat_map(|span| span.action.computes());
        tasks.any(|task| task.stage == last)
    };
    let ranks: BTreeSet<usize> = timeline.ranks.iter().filter(has).map(|rank| rank.pp).collect();
    if ranks.len() > 1 { last } else { last + 1 }
}

/// A rank's spans step by step, without the first of several. A step ends with the optimizer's,
/// and a span belongs to the step that it starts in.
fn steps_of(spans: &[Span]) -> Vec<(usize, Vec<Span>)> {
    let is_step = |span: &&Span| span.action == Action::OptimizerStep;
    let mut ends: Vec<u64> = spans.iter().filter(is_step).map(|s| s.end_ns).collect();
    ends.sort_unstable();
    let mut steps: BTreeMap<usize, Vec<Span>> = BTreeMap::new();
    for span in spans {
        let begun = ends.partition_point(|end| *end <= span.start_ns);
        // An optimizer step that takes no time starts where it ends.
        let of_step = span.action == Action::OptimizerStep;
        let step = if of_step { ends.partition_point(|end| *end < span.end_ns) } else { begun };
        steps.entry(step).or_default().push(*span);
    }
    if steps.len() > 1 && ends.len() > 1 {
        steps.remove(&0);
    }
    steps.into_iter().collect()
}

impl Seen {
    fn add(&mut self, rank: &RankTimeline, step: usize, span: &Span) {
        let ns = span.end_ns - span.start_ns;
        let stages = self.stages;
        let cell = |stage: usize| if stage < stages { stage } else { stages + rank.pp };
        let shortest = |known: &mut u64| *known = (*known).min(ns);
        let row = span.action.row();
        match row.cost {
            Cost::F | Cost::B | Cost::W | Cost::BW | Cost::R => {
                for Task { kind, stage, micro_batch } in span.action.computes() {
                    let of_stage = self.computes.entry((kind, cell(stage))).or_default();
                    of_stage.entry(micro_batch).or_default().push(ns);
                }
            }
            Cost::Gather | Cost::Reduce | Cost::ReplicaReduce => {
                let stage = span.action.stage().expect("a collective is of a stage");
                let at = (row.cost, cell(stage));
                self.collectives.entry(at).and_modify(shortest).or_insert(ns);
            }
            Cost::Step => {
                self.steps.entry(step).and_modify(shortest).or_insert(ns);
            }
            // A message takes from its sending until it was received. The two halves of an
            // overlapped pair have no times of their own.
            // A copy's bytes are not known, so its rate is not.
            Cost::Message | Cost::Copy | Cost::Nothing | Cost::Pair => {}
        }
        if let Some(end) = span.action.message() {
            let MessageEnd { is_send, message, stage, micro_batch } = end;
            let producer = match message {
                _ if is_send => stage,
                Message::Activation => stage.saturating_sub(1),
                Message::Gradient => stage + 1,
            };
            let [sent, used] =
                self.messages.entry((rank.group, message, producer, micro_batch)).or_default();
            if is_send { sent.push(span.start_ns) } else { used.push(span.end_ns) }
        }
    }

    fn stage(&self, stage: usize) -> Result<StageCosts, CostsError> {
        let of = |kind| {
            let each = self.computes.get(&(kind, stage))?.values();
            mean(&each.filter_map(|all| median(all.clone())).collect::<Vec<_>>())
        };
        let missing = |what: &str| {
            CostsError::new(format!("the run has no {what} of stage {stage} by itself"))
        };
        let (b, w) = match (of(Compute::B), of(Compute::BW)) {
            (Some(b), _) => (b, of(Compute::W).unwrap_or(0)),
            (None, Some(whole)) => (whole, 0),
            (None, None) => return Err(missing("backward")),
        };
        let f_ns = of(Compute::F).ok_or_else(|| missing("F"))?;
        let shortest = |cost| self.collectives.get(&(cost, stage)).copied().unwrap_or(0);
        Ok(StageCosts {
            f_ns,
            b_ns: b,
            w_ns: w,
            r_ns: of(Compute::R).unwrap_or(f_ns),
            all_gather_ns: shortest(Cost::Gather),
            reduce_scatter_ns: shortest(Cost::Reduce),
            replica_reduce_ns: shortest(Cost::ReplicaReduce),
        })
    }

    fn message_ns(&self) -> u64 {
        let mut links: BTreeMap<(Message, usize), u64> = BTreeMap::new();
        for ((_, message, producer, _), [sent, used]) in &self.messages {
            for (sent, used) in sent.iter().zip(used) {
                // Two hosts' clocks may be further apart than a message takes.
                let ns = used.saturating_sub(*sent);
                let link = links.entry((*message, *producer)).or_insert(ns);
                *link = (*link).min(ns);
            }
        }
        median(links.into_values().collect()).unwrap_or(0)
    }
}

fn mean(all: &[u64]) -> Option<u64> {
    all.iter().sum::<u64>().checked_div(all.len() as u64)
}

/// The lower one of two in the middle.
fn median(mut all: Vec<u64>) -> Option<u64> {
    all.sort_unstable();
    all.get(all.len().checked_sub(1)? / 2).copied()
}

/// The costs of `planned`, slower or faster by one factor, so that its ranks compute as long on
/// average as those of `measured`: for runs that do not have the same stages. None where there is
/// nothing to compare.
pub fn scaled_to(costs: &Costs, planned: &Timeline, measured: &Timeline) -> Option<Costs> {
    let busy = |timeline: &Timeline| {
        let all: u64 = timeline.ranks.iter().map(|rank| rank.busy_ns()).sum();
        all as f64 / timeline.ranks.len().max(1) as f64
    };
    let factor = busy(measured) / busy(planned);
    if !(factor.is_finite() && factor > 0.0) {
        return None;
    }
    let scale = |ns: u64| (ns as f64 * factor).round() as u64;
    let stage = |s: &StageCosts| StageCosts {
        f_ns: scale(s.f_ns),
        b_ns: scale(s.b_ns),
        w_ns: scale(s.w_ns),
        r_ns: scale(s.r_ns),
        all_gather_ns: scale(s.all_gather_ns),
        reduce_scatter_ns: scale(s.reduce_scatter_ns),
        replica_reduce_ns: scale(s.replica_reduce_ns),
    };
    let states = |of: &StateCopies| StateCopies {
        read_ns: scale(of.read_ns),
        add_ns: scale(of.add_ns),
        update_ns: scale(of.update_ns),
        ..*of
    };
    let rate = |rate: u64| ((rate as f64 / factor) as u64).max(1);
    Some(Costs {
        stages: costs.stages.iter().map(stage).collect(),
        memory: costs.memory.clone(),
        layers: costs.layers.clone(),
        link: LinkCosts {
            latency_ns: scale(costs.link.latency_ns),
            bytes_per_s: costs.link.bytes_per_s.map(rate),
            ..costs.link
        },
        file_bytes_per_s: costs.file_bytes_per_s.map(rate),
        copies_apart: costs.copies_apart,
        states: costs.states.iter().map(states).collect(),
        overlap_ns: costs.overlap_ns.map(scale),
        step_ns: scale(costs.step_ns),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draw::samples::gpipe;
    use crate::lower::{LowerOptions, lower};
    use crate::schedules::{KINDS, Shape, generate, generate_split};
    use crate::simulate::simulate;

    fn uneven(stages: usize) -> Costs {
        let stage = |s: usize| StageCosts {
            f_ns: 1000 + 10 * s as u64,
            b_ns: 1100,
            w_ns: 700 + s as u64,
            r_ns: 900,
            all_gather_ns: 300 + s as u64,
            reduce_scatter_ns: 350,
            replica_reduce_ns: 200,
        };
        Costs {
            stages: (0..stages).map(stage).collect(),
            memory: vec![StageBytes::default(); stages],
            link: LinkCosts { latency_ns: 70, ..LinkCosts::default() },
            layers: Vec::new(),
            file_bytes_per_s: None,
            copies_apart: false,
            states: Vec::new(),
            overlap_ns: None,
            step_ns: 500,
        }
    }

    /// A simulated run is measured to be what it was simulated with, whatever the kind.
    #[test]
    fn costs_of_a_simulated_run_are_those_it_was_simulated_with() {
        for kind in KINDS.iter().filter(|kind| kind.name != "dualpipe-v" && !kind.is_searched()) {
            let v = kind.stages.default_number();
            let shape = Shape { pp: 4, virtual_stages: v, micro_batches: 8, unit: 8 };
            let compact = generate(kind.name, &shape).unwrap();
            let whole = LowerOptions { recompute: true, replicas: true, ..Default::default() };
            let program = lower(&compact, &whole);
            let costs = uneven(program.stages());
            let timeline = simulate(&program, &costs).unwrap();
            let found = measured(&timeline).unwrap();
            assert_eq!((found.link, found.step_ns), (costs.link, costs.step_ns), "{}", kind.name);
            let actions = || program.ranks.iter().flatten().flat_map(Action::computes);
            for (s, (found, costs)) in found.stages.iter().zip(&costs.stages).enumerate() {
                let has = |kind| actions().any(|t| (t.kind, t.stage) == (kind, s));
                let (b, w) = match has(Compute::B) {
                    true => (costs.b_ns, costs.w_ns),
                    false => (costs.b_ns + costs.w_ns, 0),
                };
                let r = if has(Compute::R) { costs.r_ns } else { costs.f_ns };
                let want = StageCosts { b_ns: b, w_ns: w, r_ns: r, ..*costs };
                assert_eq!(*found, want, "{} stage {s}", kind.name);
            }
        }
    }

    /// Also of a head that is split.
    #[test]
    fn costs_of_slices_are_those_that_each_rank_was_simulated_with() {
        let shape = Shape { pp: 3, virtual_stages: 2, micro_batches: 6, unit: 6 };
        let compact = generate_split("zeropp", &shape, &[3, 0, 5], None).unwrap();
        let program = lower(&compact, &LowerOptions::default());
        let mut costs = uneven(program.cost_entries());
        let timeline = simulate(&program, &costs).unwrap();
        let found = measured(&timeline).unwrap();
        costs.stages[7] = StageCosts::default();
        for (cell, (found, costs)) in found.stages.iter().zip(&costs.stages).enumerate() {
            let times = |of: &StageCosts| (of.f_ns, of.b_ns, of.w_ns, of.all_gather_ns);
            assert_eq!(times(found), times(costs), "{cell}");
        }
        assert_eq!((found.stages.len(), found.memory.len()), (9, 9));
    }

    #[test]
    fn the_first_of_several_steps_does_not_count() {
        let mut timeline = gpipe(2, 2, 3, 3);
        let one = measured(&gpipe(2, 2, 3, 1)).unwrap();
        let end = timeline.ranks.iter().flat_map(|r| &r.spans).map(|s| s.end_ns).max().unwrap();
        for rank in &mut timeline.ranks {
            for span in &mut rank.spans {
                let first = rank.name.is_empty() || span.end_ns < end / 3;
                // A slow first step; nothing else moves, so that its spans overlap.
                span.start_ns -= if first { span.start_ns / 2 } else { 0 };
            }
        }
        assert_eq!(measured(&timeline).unwrap().stages, one.stages);
        assert_eq!(one.stages[0].f_ns, 1_000_001);
        assert_eq!(one.link.latency_ns, 150_007);
    }

    /// The first micro-batch of each step is slower, and one of a later step once: what repeats
    /// counts, and what does not, does not.
    #[test]
    fn a_compute_takes_the_mean_of_its_micro_batches() {
        let mut timeline = gpipe(1, 1, 4, 4);
        let before = measured(&timeline).unwrap().stages[0].f_ns;
        let f_of = |span: &Span, wanted| match span.action {
            Action::Compute { kind: Compute::F, micro_batch, .. } => micro_batch == wanted,
            _ => false,
        };
        let spans = &mut timeline.ranks[0].spans;
        spans.iter_mut().filter(|s| f_of(s, 0)).for_each(|s| s.end_ns += 400_000);
        spans.iter_mut().filter(|s| f_of(s, 2)).nth(2).expect("four steps").end_ns += 7_000_000;
        assert_eq!(measured(&timeline).unwrap().stages[0].f_ns, before + 100_000);
    }

    #[test]
    fn unmeasured_actions_are_named() {
        let mut timeline = gpipe(2, 1, 2, 1);
        timeline.placement.push(0);
        let error = measured(&timeline).unwrap_err().to_string();
        assert_eq!(error, "the run has no backward of stage 2 by itself");
    }

    #[test]
    fn scaled_costs_do_the_same_work() {
        let compact =
            generate("1f1b", &Shape { pp: 2, virtual_stages: 1, micro_batches: 4, unit: 4 });
        let costs = uneven(2);
        let planned = simulate(&compact.unwrap(), &costs).unwrap();
        let slow = gpipe(2, 1, 4, 1);
        let scaled = scaled_to(&costs, &planned, &slow).unwrap();
        let busy: u64 = slow.ranks.iter().map(|r| r.busy_ns()).sum();
        let work = |c: &Costs| 4 * c.stages.iter().map(|s| s.f_ns + s.b_ns + s.w_ns).sum::<u64>();
        assert!(work(&scaled).abs_diff(busy) < 100, "{} and {busy}", work(&scaled));
        assert_eq!(scaled_to(&costs, &planned, &Timeline::default()), None);
    }
}
