//! A schedule that is compared: which costs it is simulated with.

use std::path::PathBuf;

use zeropp::pipeline::costs::{measured, scaled_to};
use zeropp::pipeline::ir::Schedule;
use zeropp::pipeline::metrics::Metrics;
use zeropp::pipeline::report::first_pipeline;
use zeropp::pipeline::simulate::{Costs, simulate};
use zeropp::pipeline::timeline::{MemoryUnit, RankTimeline, Timeline};
use zeropp::search::bound::least_bubble_rate;

use crate::failure::Failure;
use crate::schedule::{CostFlags, ScheduleCosts, facts, shape};

/// A plan whose ranks work this much longer or shorter than a run's is in other units than times.
const SCALE_MAX: f64 = 10.0;

/// A schedule of a file.
pub(super) struct ComparedSchedule {
    pub(super) name: String,
    pub(super) path: PathBuf,
    pub(super) schedule: Schedule,
    /// Those of its file.
    pub(super) costs: Option<Costs>,
    /// Unit of their memory.
    pub(super) memory_unit: MemoryUnit,
}

/// One of the two that are compared.
pub(super) struct ComparedRun {
    pub(super) timeline: Timeline,
    /// The bubble rate, as the paper of its kind counts it; of what was simulated.
    pub(super) rate: Option<f64>,
    /// The least that it can be for any order that holds no more, where that is known.
    pub(super) rate_at_least: Option<f64>,
}

impl ComparedRun {
    /// A run that was measured.
    pub(super) fn measured(timeline: Timeline) -> ComparedRun {
        ComparedRun { timeline, rate: None, rate_at_least: None }
    }
}

impl ComparedSchedule {
    /// Simulated with what was given, or else with the file's own costs.
    pub(super) fn alone(self, flags: &CostFlags) -> Result<ComparedRun, Failure> {
        let own = self.own(flags)?;
        self.run(&own, &own.costs, "")
    }

    /// The same, beside a run: with its times, where own ones are missing or of another scale.
    pub(super) fn beside(self, run: &Timeline, flags: &CostFlags) -> Result<ComparedRun, Failure> {
        let own = self.own(flags)?;
        let planned = self.run(&own, &own.costs, "")?;
        let run = first_pipeline(run);
        let factor = work(&run) / work(&planned.timeline);
        let of_scale = (1.0 / SCALE_MAX..=SCALE_MAX).contains(&factor);
        if flags.is_given() || (self.costs.is_some() && of_scale) || !factor.is_finite() {
            return Ok(planned);
        }
        let cells = self.schedule.cost_entries();
        let found = measured(&run).ok().filter(|c| c.stages.len() == cells);
        if let Some(found) = found {
            let costs = Costs { memory: own.costs.memory.clone(), ..found };
            // Of this step, and not of its medians: what is left is who waited for whom.
            let planned = self.run(&own, &costs, "")?;
            let costs = scaled_to(&costs, &planned.timeline, &run).unwrap_or(costs);
            let own = OwnCosts { words: vec![format!("times of {}", run.title)], ..own };
            return self.run(&own, &costs, &format!(" with the times of {}", run.title));
        }
        match scaled_to(&own.costs, &planned.timeline, &run) {
            Some(costs) => {
                let mut own = own;
                own.words.push(format!("all times x {factor:.3}"));
                let how = format!(" with its times x {factor:.3}, so that both work as long");
                self.run(&own, &costs, &how)
            }
            None => Ok(planned),
        }
    }

    fn own(&self, flags: &CostFlags) -> Result<OwnCosts, Failure> {
        match &self.costs {
            Some(costs) if !flags.is_given() => {
                let words = vec![format!("costs of {}", self.name)];
                Ok(OwnCosts { costs: costs.clone(), words, memory_unit: self.memory_unit })
            }
            _ => {
                let (stages, micro_batches) =
                    (self.schedule.stages(), self.schedule.micro_batches());
                let schedule_costs = ScheduleCosts::new(flags, stages, micro_batches)?;
                let words = facts(&self.schedule, flags, &schedule_costs).split_off(1);
                Ok(OwnCosts {
                    costs: schedule_costs.simulator,
                    words,
                    memory_unit: schedule_costs.memory_unit,
                })
            }
        }
    }

    fn run(&self, own: &OwnCosts, costs: &Costs, how: &str) -> Result<ComparedRun, Failure> {
        let mut timeline = simulate(&self.schedule, costs)
            .map_err(|e| Failure::bad_input(format!("{}: {e}", self.path.display())))?;
        let metrics = Metrics::new(&self.schedule, &timeline, costs);
        let rate_at_least = least_bubble_rate(&self.schedule, &metrics, costs, None);
        timeline.title = format!("{} ({}{how})", self.name, timeline.title);
        timeline.memory_unit = own.memory_unit;
        timeline.facts = vec![shape(&self.schedule)];
        timeline.facts.extend(own.words.iter().cloned());
        Ok(ComparedRun { timeline, rate: Some(metrics.bubble_rate), rate_at_least })
    }
}

/// A plan's own costs.
struct OwnCosts {
    costs: Costs,
    /// Names of the parts.
    words: Vec<String>,
    memory_unit: MemoryUnit,
}

/// Computing time of a rank on average, in ns.
fn work(timeline: &Timeline) -> f64 {
    let all: u64 = timeline.ranks.iter().map(RankTimeline::busy_ns).sum();
    all as f64 / timeline.ranks.len().max(1) as f64
}
