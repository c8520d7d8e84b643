//! When a run may exchange its program, and when it does so by itself (ADR 93, ADR 106).

use super::validate::Checked;
use super::{Config, ConfigError, DeviceKind, OptimizerSync, Reschedule};

/// The fewest steps of a run that looks for a better order without being asked to: in fewer, what a
/// search, a trial and a way back cost is not won again.
const STEPS_MIN: u64 = 100;

impl Config {
    /// Whether the run exchanges its program. By itself it does on CPUs, whose actions take what
    /// their spans say, where there is something to order, and time for it.
    pub fn reschedule(&self) -> Reschedule {
        let may = || {
            self.device == DeviceKind::Cpu
                && self.pp > 1
                && self.steps >= STEPS_MIN
                && !self.is_emulated()
                && self.recompute_out.is_none()
                && self.optimizer_out.is_none()
                && self.slices() == 1
                && self.keeps_program().is_none()
        };
        let by_itself = || if may() { Reschedule::Auto } else { Reschedule::Off };
        self.reschedule.unwrap_or_else(by_itself)
    }

    /// The wish for exchanges, where the settings name one.
    pub(crate) fn asked_reschedule(&self) -> Option<Reschedule> {
        self.reschedule.filter(|when| *when != Reschedule::Off)
    }

    /// Whether blocks move between stages, too.
    pub(crate) fn recuts(&self) -> bool {
        self.reschedule == Some(Reschedule::Recut)
    }

    /// Why the program stays the one that the run was started with, and what would work; none where
    /// it may be exchanged: where one of a kind, for every replica, runs between two barriers.
    fn keeps_program(&self) -> Option<(&'static str, &'static str)> {
        if self.schedule_file().is_some() {
            let help = "name a kind of schedule, or leave it out";
            return Some(("a schedule from a file runs as it stands", help));
        }
        if self.optimizer_sync == OptimizerSync::Late {
            let problem = "programs are exchanged where all ranks meet, which is not after each \
                           step with optimizer-sync = late";
            return Some((problem, "leave it out, or use optimizer-sync = barrier"));
        }
        if self.deal().fewer().is_some() {
            let problem = "the batch is dealt out unevenly, so that replicas run two programs";
            return Some((problem, "leave it out, or use a batch that divides by dp"));
        }
        None
    }

    /// Why stages stay as they are, and what would work; none where they may be cut anew.
    fn keeps_cut(&self) -> Option<(&'static str, &'static str)> {
        if self.is_emulated() {
            return Some(("emulated stages have no blocks that could move", "use auto"));
        }
        if self.head_split.as_deref().is_some_and(|text| text != "off" && text != "auto") {
            return Some(("stages with a split head are not cut anew yet", "use auto"));
        }
        None
    }

    /// Refuses a wish for exchanges where the program stays.
    pub(super) fn check_reschedule(&self) -> Checked {
        let Some(asked) = self.asked_reschedule() else { return Ok(()) };
        let refused = |(problem, help): (&str, &str)| {
            Err(ConfigError::value("reschedule", asked, problem, help))
        };
        let keeps = self.keeps_program();
        let keeps = keeps.or_else(|| self.keeps_cut().filter(|_| self.recuts()));
        keeps.map_or(Ok(()), refused)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_run_on_several_pipeline_ranks_looks_for_a_better_order_by_itself() {
        let long = Config { pp: 2, steps: STEPS_MIN, ..Config::default() };
        assert_eq!(long.reschedule(), Reschedule::Auto);
        let asked = Config { reschedule: Some(Reschedule::Off), ..long.clone() };
        for stays in [
            asked,
            Config { pp: 1, ..long.clone() },
            Config { steps: STEPS_MIN - 1, ..long.clone() },
            Config { schedule: "given.csv".into(), ..long.clone() },
            Config { device: DeviceKind::Wgpu, ..long.clone() },
            Config { optimizer_sync: OptimizerSync::Late, ..long.clone() },
            Config { slices: 2.into(), ..long.clone() },
            Config { without_model: true, ..long },
        ] {
            assert_eq!(stays.reschedule(), Reschedule::Off, "{stays:?}");
        }
    }
}
