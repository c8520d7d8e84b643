//! What runs with samples in slices cannot do yet, as far as the settings say it.

use std::fmt::Display;

use zeropp_plan::layout::SAMPLE_MIN;

use super::validate::{MICRO_BATCHES_MAX, check};
use super::{Config, ConfigError, DeviceKind, SliceCount, SliceCut};

impl Config {
    /// Whether the run chooses for itself into how many slices samples are cut.
    pub(crate) fn chooses_slices(&self) -> bool {
        let can = self.kind().is_some_and(|kind| kind.in_slices.is_some());
        self.slices == SliceCount::Auto && self.pp > 1 && can && self.could_slice()
    }

    /// Whether nothing beside the kind of schedule keeps samples of these settings whole.
    pub fn could_slice(&self) -> bool {
        self.check_beside_slices().is_ok() && self.seq >= SAMPLE_MIN
    }

    /// Refuses settings that cannot stand beside slices.
    pub(crate) fn check_slices(&self) -> Result<(), ConfigError> {
        let n = self.slices();
        check(n > 0, || {
            ConfigError::value("slices", n, "at least 1 is needed", "use 1: whole samples")
        })?;
        if self.slices == SliceCount::Auto {
            return Ok(());
        }
        if n == 1 {
            return check(self.slice_cut == SliceCut::Work, || {
                let problem = "samples are whole, as slices is 1";
                ConfigError::value("slice-cut", self.slice_cut, problem, "leave it out")
            });
        }
        let most = MICRO_BATCHES_MAX / self.micro_batches().max(1);
        check(n <= most, || {
            let problem = "makes more micro-batches of a step than a schedule may have";
            ConfigError::value("slices", n, problem, format!("use 1 to {most}"))
        })?;
        check(self.seq >= SAMPLE_MIN, || {
            let problem = format!(
                "cuts samples of seq = {} tokens, which have fewer than {SAMPLE_MIN}",
                self.seq
            );
            ConfigError::value("slices", n, problem, "use 1, or longer samples")
        })?;
        self.check_beside_slices()
    }

    /// What else there is beside slices, and runs cannot do with them yet.
    fn check_beside_slices(&self) -> Result<(), ConfigError> {
        let refused = |what: &str, value: &dyn Display, works: &str| {
            let problem = format!("runs cannot do it with {what} = {value} yet");
            let help = format!("use 1, or {what} = {works}");
            Err(ConfigError::value("slices", self.slices(), problem, help))
        };
        if self.micro_batch_size > 1 {
            return refused("micro-batch-size", &self.micro_batch_size, "1");
        }
        if self.device != DeviceKind::Cpu {
            return refused("device", &self.device, "cpu");
        }
        if let Some(reschedule) = self.asked_reschedule() {
            return refused("reschedule", &reschedule, "off");
        }
        if let Some(first) = self.recompute_first {
            let problem = format!("runs cannot do it with recompute:first = {first} yet");
            let help = "use 1, or leave recompute:first out";
            return Err(ConfigError::value("slices", self.slices(), problem, help));
        }
        for (what, file) in [
            ("costs", &self.costs),
            ("save-costs", &self.save_costs),
            ("recompute:out", &self.recompute_out),
        ] {
            let Some(file) = file else { continue };
            let problem = format!("runs cannot do it with {what} = {} yet", file.display());
            let help = format!("use 1, or leave {what} out");
            return Err(ConfigError::value("slices", self.slices(), problem, help));
        }
        Ok(())
    }
}
