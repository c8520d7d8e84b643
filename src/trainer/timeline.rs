//! A run as a timeline: what every rank did when.

use zeropp_pipeline::timeline::{IN_SLICES, Timeline};

use crate::config::EngineKind;
use crate::plan::blueprint::Blueprint;
use crate::run::reschedule::NumberedProgram;
use crate::run::results::RankResult;
use crate::run::trace;

/// The actions of every rank with their times, of a run of `bp`.
pub(crate) fn timeline(bp: &Blueprint, results: &[RankResult]) -> Timeline {
    let mut title = format!("{} · {}", bp.schedule().kind, bp.mesh);
    if bp.slices.is_some() {
        title += &format!(" · {IN_SLICES}");
    }
    if let Some(ns) = results.iter().map(|r| r.clock_error_ns).max().filter(|ns| *ns > 0) {
        title += &format!(" · clocks within {} µs", ns.div_ceil(1000));
    }
    let spans = results.iter().map(|result| result.spans.clone());
    let mut placement = bp.schedule().placement.clone();
    // A split head is a stage behind the last one, with its root there.
    placement.extend(bp.head.as_ref().and(placement.last().copied()));
    let mut timeline = trace::timeline(title, bp.mesh, &placement, spans);
    for (rank, result) in timeline.ranks.iter_mut().zip(results) {
        rank.saves = result.saves.clone();
    }
    let exchanged = results.first().map_or(&[][..], |first| &first.programs);
    // What ranks hold of a split head, or of slices of samples, is not followed.
    if bp.head.is_none() && bp.slices.is_none() {
        follow_memory(&mut timeline, bp, exchanged);
    }
    timeline.facts = facts(bp);
    timeline.facts.extend(exchanged.iter().map(|(step, program)| in_words(*step, program)));
    timeline
}

/// Follows what ranks held with the programs, and the stages, that they had from steps on, the
/// first of which is the first one that is traced; with those of `bp` where they had no others.
fn follow_memory(timeline: &mut Timeline, bp: &Blueprint, had: &[(u64, NumberedProgram)]) {
    let planned = bp.all_bytes();
    let cuts = had.iter().map(|(_, program)| program.cut.as_deref().unwrap_or(bp));
    let bytes: Vec<_> = cuts.map(Blueprint::all_bytes).collect();
    trace::follow_memory(timeline, |rank, number| {
        let begun = |(from, _): &(u64, NumberedProgram)| *from <= had[0].0 + number as u64;
        let (program, bytes) = match had.partition_point(begun).checked_sub(1) {
            Some(at) => (&*had[at].1.program, &bytes[at]),
            None => (bp.programs.of(rank.group / bp.mesh.zero3), &planned),
        };
        (&program.ranks[rank.pp], bytes)
    });
}

/// The program of the steps from one on, which may be exchanged.
fn in_words(step: u64, NumberedProgram { number, program, .. }: &NumberedProgram) -> String {
    let kind = &program.kind;
    match number {
        0 => format!("from step {step} on: the planned order ({kind})"),
        _ => format!("from step {step} on: order {number} that was found in the run ({kind})"),
    }
}

/// The facts that a trace has of its run.
fn facts(bp: &Blueprint) -> Vec<String> {
    let (plan, deal) = (&bp.plan, bp.config.deal());
    let batches = match deal.fewer() {
        Some(fewer) => format!("{} or {fewer}", deal.most),
        None => deal.most.to_string(),
    };
    let world = bp.mesh.world();
    let cores = std::thread::available_parallelism().map_or(usize::MAX, usize::from);
    let of_threads = bp.config.engine == EngineKind::Threads;
    let shared = (of_threads && world > cores).then(|| {
        format!("{world} ranks share {cores} cores: what a rank computes takes longer than alone")
    });
    let mut facts = vec![
        format!(
            "{}; {} stages on each rank, {batches} micro-batches in {} units; times measured, \
             memory of activations and weight stashes as predicted",
            bp.mesh,
            plan.virtual_stages,
            bp.schedule().units.len(),
        ),
        format!("zeropp {}", env!("CARGO_PKG_VERSION")),
    ];
    facts.extend(shared);
    facts
}
