//! The timeline that a run writes and the text of a rank's panic, the same for training and
//! emulation.

use std::any::Any;
use std::path::Path;

use zeropp_comm::mesh::Mesh;
use zeropp_core::files::write_whole;
use zeropp_pipeline::draw::chrome;
use zeropp_pipeline::ir::Action;
use zeropp_pipeline::memory::{KindPoint, StageBytes, over_time};
use zeropp_pipeline::timeline::{MemoryPoint, MemoryUnit, RankTimeline, Span, Timeline};

use crate::Error;

/// Writes `timeline` to `path` as a Chrome trace.
///
/// # Errors
/// [`Error::Output`] where the file cannot be written.
pub(crate) fn write(path: &Path, timeline: &Timeline) -> Result<(), Error> {
    let written = write_whole(path, |out| chrome::write(timeline, out));
    written.map_err(|source| Error::Output { path: path.to_path_buf(), source })
}

/// The timeline of every rank, by the `spans` of each.
pub(crate) fn timeline(
    title: String,
    mesh: Mesh,
    placement: &[usize],
    spans: impl IntoIterator<Item = Vec<Span>>,
) -> Timeline {
    let rank = |(rank, spans)| {
        let c = mesh.coords(rank);
        RankTimeline {
            name: format!("pp {} · zero3 {} · dp {}", c.pp, c.zero3, c.dp),
            pp: c.pp,
            group: c.dp * mesh.zero3 + c.zero3,
            spans,
            ..RankTimeline::default()
        }
    };
    let ranks = spans.into_iter().enumerate().map(rank).collect();
    Timeline { title, placement: placement.to_vec(), ranks, ..Timeline::default() }
}

/// Follows the activations and weight stashes of a run: the predicted bytes of its stages, at the
/// times of the run. `of` gives the program of a rank in a step, counted from the first that is
/// there, and what the stages had then. Steps that are not a whole program have no memory.
pub(crate) fn follow_memory<'a>(
    timeline: &mut Timeline,
    of: impl Fn(&RankTimeline, usize) -> (&'a [Action], &'a [StageBytes]),
) {
    timeline.memory_unit = MemoryUnit::Bytes;
    for rank in &mut timeline.ranks {
        let steps = rank.spans.split_inclusive(|s| s.action == Action::OptimizerStep);
        for (number, step) in steps.enumerate() {
            let (program, bytes) = of(rank, number);
            if !step.iter().map(|s| &s.action).eq(program) {
                continue;
            }
            let step = RankTimeline { spans: step.to_vec(), ..RankTimeline::default() };
            for KindPoint { at_ns, bytes } in over_time(&step, bytes) {
                let bytes = bytes.activation + bytes.weight_stash;
                if rank.memory.last().is_none_or(|last| last.bytes != bytes) {
                    rank.memory.push(MemoryPoint { at_ns, bytes });
                }
            }
        }
    }
}

/// The message that a thread panicked with.
pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|s| s.to_string()))
        .unwrap_or_else(|| "no message".into())
}

#[cfg(test)]
mod tests {
    use zeropp_pipeline::lower::lower;
    use zeropp_pipeline::schedules::{Shape, generate};
    use zeropp_pipeline::simulate::{Costs, simulate};

    use super::*;

    #[test]
    fn memory_follows_each_whole_step_as_the_simulator_does() {
        let shape = Shape { pp: 2, virtual_stages: 2, micro_batches: 6, unit: 3 };
        let schedule = lower(&generate("zeropp", &shape).unwrap(), &Default::default());
        let stage = StageBytes { activation: 5, stash: 2, weights: 40, ..StageBytes::default() };
        let costs = Costs { memory: vec![stage; 4], ..Costs::uniform(4, 10, 10, 10, 1) };
        let simulated = simulate(&schedule, &costs).unwrap();
        // A second step as long after the first, and one that was cut off.
        let length = 1_000_000;
        let later = |by: u64| {
            move |s: &Span| Span { start_ns: s.start_ns + by, end_ns: s.end_ns + by, ..*s }
        };
        let spans = simulated.ranks.iter().map(|rank| {
            let cut = rank.spans.len() - 4;
            let second = rank.spans.iter().map(later(length));
            let third = rank.spans[..cut].iter().map(later(2 * length));
            rank.spans.iter().copied().chain(second).chain(third).collect::<Vec<_>>()
        });
        let mesh = Mesh { pp: 2, zero3: 1, dp: 1 };
        let mut run = timeline(String::new(), mesh, &schedule.placement, spans);
        follow_memory(&mut run, |rank, _| (&schedule.ranks[rank.pp], &costs.memory));
        assert_eq!(run.memory_unit, MemoryUnit::Bytes);
        let peak = |rank: &RankTimeline| rank.memory.iter().map(|m| m.bytes).max();
        for (run, simulated) in run.ranks.iter().zip(&simulated.ranks) {
            assert_eq!(peak(run), peak(simulated));
            let steps = |from: u64| run.memory.iter().filter(move |m| m.at_ns / length == from);
            assert!(steps(0).count() > 1 && steps(1).count() > 1 && steps(2).count() == 0);
            assert!(steps(1).next_back().is_some_and(|m| m.bytes == 0), "a step keeps nothing");
        }
    }
}
