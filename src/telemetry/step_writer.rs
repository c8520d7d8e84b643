//! What each kind of file that steps are written to can do.

use std::io;

use zeropp_core::metrics::{JsonLines, RunHeader, StepMetrics};

/// Something that is written step by step.
pub(super) trait StepWriter: Send {
    /// Writes what comes before the first step.
    fn begin(&mut self, run: &RunHeader) -> io::Result<()>;

    /// Writes a step and hands it to the operating system.
    fn write(&mut self, step: &StepMetrics) -> io::Result<()>;
}

impl StepWriter for JsonLines {
    fn begin(&mut self, run: &RunHeader) -> io::Result<()> {
        self.write_header(run)
    }

    fn write(&mut self, step: &StepMetrics) -> io::Result<()> {
        JsonLines::write(self, step)
    }
}
