//! A schedule that is compared: which costs it is simulated with.

use std::path::PathBuf;

use zeropp::pipeline::costs::{measured, scaled_to};
use zeropp::pipeline::ir::Schedule;
use zeropp::pipeline::report::first_pipeline;
use zeropp::pipeline::simulate::{Costs, simulate};
use zeropp::pipeline::timeline::{RankTimeline, Timeline};

use crate::Failure;
use crate::schedule::{CostFlags, Priced};

/// A plan whose ranks work this much longer or shorter than a run's is in other units than times.
const SCALE_MAX: f64 = 10.0;

/// A schedule of a file.
pub(super) struct Plan {
    pub(super) name: String,
    pub(super) path: PathBuf,
    pub(super) schedule: Schedule,
    /// Those of its file.
    pub(super) costs: Option<Costs>,
}

impl Plan {
    /// Simulated with what was given, or else with the file's own costs.
    pub(super) fn alone(self, flags: &CostFlags) -> Result<Timeline, Failure> {
        let costs = self.own(flags)?;
        self.run(&costs, "")
    }

    /// The same, beside a run: with its times, where own ones are missing or of another scale.
    pub(super) fn beside(self, run: &Timeline, flags: &CostFlags) -> Result<Timeline, Failure> {
        let own = self.own(flags)?;
        let planned = self.run(&own, "")?;
        let run = first_pipeline(run);
        let factor = work(&run) / work(&planned);
        let of_scale = (1.0 / SCALE_MAX..=SCALE_MAX).contains(&factor);
        if flags.is_given() || (self.costs.is_some() && of_scale) || !factor.is_finite() {
            return Ok(planned);
        }
        let found = measured(&run).ok().filter(|c| c.stages.len() == self.schedule.stages());
        if let Some(found) = found {
            let costs = Costs { memory: own.memory.clone(), ..found };
            // Of this step, and not of its medians: what is left is who waited for whom.
            let planned = self.run(&costs, "")?;
            let costs = scaled_to(&costs, &planned, &run).unwrap_or(costs);
            return self.run(&costs, &format!(" with the times of {}", run.title));
        }
        match scaled_to(&own, &planned, &run) {
            Some(costs) => {
                let how = format!(" with its times x {factor:.3}, so that both work as long");
                self.run(&costs, &how)
            }
            None => Ok(planned),
        }
    }

    fn own(&self, flags: &CostFlags) -> Result<Costs, Failure> {
        match &self.costs {
            Some(costs) if !flags.is_given() => Ok(costs.clone()),
            _ => {
                let (stages, micro_batches) =
                    (self.schedule.stages(), self.schedule.micro_batches());
                Ok(Priced::new(flags, stages, micro_batches)?.in_nanos())
            }
        }
    }

    fn run(&self, costs: &Costs, how: &str) -> Result<Timeline, Failure> {
        let mut timeline = simulate(&self.schedule, costs)
            .map_err(|e| Failure::bad_input(format!("{}: {e}", self.path.display())))?;
        timeline.title = format!("{} ({}{how})", self.name, timeline.title);
        Ok(timeline)
    }
}

/// What a rank computes on average, in ns.
fn work(timeline: &Timeline) -> f64 {
    let all: u64 = timeline.ranks.iter().map(RankTimeline::busy_ns).sum();
    all as f64 / timeline.ranks.len().max(1) as f64
}
