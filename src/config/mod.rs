//! The settings of a run: a TOML file and flags that override it, the defaults that follow from
//! other settings, and the checks that end bad input before any rank starts.

mod batch;
mod bytes;
mod choice;
mod copies;
mod error;
mod file;
mod foreign;
mod kind;
mod launch;
mod lists;
mod model;
mod optimizer;
mod optimizers;
mod options;
mod outputs;
mod parts;
mod predicted;
mod reschedule;
mod resume;
mod roles;
mod slice_count;
mod slices;
mod sources;
mod stages;
mod step_range;
mod table;
mod tuning;
mod validate;
mod values;

pub use batch::samples_of;
pub use bytes::Bytes;
pub use choice::{
    Activation, Balance, Decay, DeviceKind, EngineKind, OnLoss, OptimizerKind, OptimizerSync,
    Order, OutStates, OutUnits, PackWeights, Place, Precision, Recompute, Reschedule, SliceCut,
    Tokenizer,
};
pub use error::ConfigError;
pub use file::as_table;
pub use foreign::flags_for;
pub use kind::OptionKind;
pub(crate) use model::{is_gguf, is_path};
pub use options::{Config, OPTIONS};
pub use resume::Resume;
pub use roles::{Across, OnResume};
pub use slice_count::SliceCount;
pub use step_range::StepRange;
pub use table::OptionInfo;
pub use toml::{Table, Value};
pub(crate) use zeropp_plan::deal::Deal;

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;

use zeropp_comm::mesh::Mesh;
use zeropp_pipeline::schedules::{Kind, StagesPerRank, StepForm, default_unit};
use zeropp_plan::layout::HOST;

/// The value of `head-split` that leaves it to the run.
const AUTO: &str = "auto";

/// The settings that follow from others where they are not given.
/// Whether this stands for memory of a GPU's host, and not for a folder.
fn is_host(place: &Path) -> bool {
    place == Path::new(HOST)
}

impl Config {
    /// Whether ranks issue what they do together in one order (ADR 31): NCCL may keep an operation
    /// waiting for the other ranks', and all behind it.
    pub(crate) fn one_order(&self) -> bool {
        self.engine == EngineKind::Nccl || self.one_order_always
    }

    /// Sizes of the mesh.
    pub fn mesh(&self) -> Mesh {
        Mesh { pp: self.pp, zero3: self.zero3, dp: self.dp }
    }

    /// The schedule file, where `schedule` names one: it ends in `.csv` or `.json`.
    pub(crate) fn schedule_file(&self) -> Option<&Path> {
        let path = Path::new(&self.schedule);
        let extension = path.extension()?.to_str()?.to_ascii_lowercase();
        matches!(extension.as_str(), "csv" | "json").then_some(path)
    }

    /// Whether the run chooses for itself if the head is split.
    pub(crate) fn chooses_head_split(&self) -> bool {
        !self.recuts() && self.head_split.as_deref().is_none_or(|text| text == AUTO)
    }

    /// Slices of a sample: 1 where the run has yet to choose.
    pub fn slices(&self) -> usize {
        match self.slices {
            SliceCount::Auto => 1,
            SliceCount::Of(n) => n,
        }
    }

    /// The setting that splits the head, where one does.
    fn given_split(&self) -> Option<&str> {
        self.head_split.as_deref().filter(|text| !["off", AUTO].contains(text))
    }

    /// The row blocks of each rank, where the settings split the head.
    ///
    /// # Errors
    /// A text that has no number for each rank.
    pub(crate) fn head_blocks(&self) -> Result<Option<Vec<usize>>, ConfigError> {
        let Some(text) = self.given_split() else { return Ok(None) };
        let wrong = |problem: String| {
            let help =
                format!("give a number for each of the {} ranks, or use auto or off", self.pp);
            ConfigError::value("head-split", text, problem, help)
        };
        let numbers = text.split(',').map(|number| number.trim().parse::<usize>());
        let blocks: Vec<usize> =
            numbers.collect::<Result<_, _>>().map_err(|_| wrong("is no list of numbers".into()))?;
        match blocks.len() == self.pp {
            true => Ok(Some(blocks)),
            false => Err(wrong(format!("is for {} ranks", blocks.len()))),
        }
    }

    /// Stages on each pipeline rank (V): what a cut by hand says, else what the schedule needs,
    /// else 2 where the layers allow it, else 1. A schedule file decides it for itself; until it is
    /// read this says 1.
    pub fn virtual_stages(&self) -> usize {
        self.virtual_stages.or_else(|| self.given_stages_each()).unwrap_or_else(|| {
            // Emulated stages have no layers.
            let fits = |v| self.is_emulated() || self.layers >= self.pp.saturating_mul(v);
            match self.kind().map(|kind| kind.stages) {
                Some(StagesPerRank::Any(v)) if !fits(v) => 1,
                Some(stages) => stages.default_number(),
                None => 1,
            }
        })
    }

    /// The kind of the schedule; none for a file, or for a name that no schedule has.
    pub(crate) fn kind(&self) -> Option<&'static Kind> {
        Kind::find(&self.schedule)
    }

    /// Whether given times stand for a model.
    pub(crate) fn is_emulated(&self) -> bool {
        self.without_model || self.emulate.is_some()
    }

    /// Micro-batches of each rank in a step (B): those of `global_batch`, else two units, of 2P−1
    /// where none is given, and for interleaved schedules rounded up to a multiple of P. A schedule
    /// file has its own. Where the replicas have not as many each, the most of them.
    pub fn micro_batches(&self) -> usize {
        self.micro_batches.or_else(|| self.micro_batches_of_global()).unwrap_or_else(|| {
            let unit = || self.pp.saturating_mul(2).saturating_sub(1);
            let two_units = self.unit.unwrap_or_else(unit).saturating_mul(2);
            let rounds = self.kind().is_some_and(|kind| kind.step == StepForm::Rounds);
            let round = if rounds { self.pp.max(1) } else { 1 };
            two_units.checked_next_multiple_of(round).unwrap_or(two_units)
        })
    }

    /// Whether activations are copied out to memory of the host, and not to files.
    pub(crate) fn copies_to_host(&self) -> bool {
        self.recompute_out.as_deref().is_some_and(is_host)
    }

    /// Whether what optimizers keep is there.
    pub(crate) fn states_on_host(&self) -> bool {
        self.optimizer_out.as_deref().is_some_and(is_host)
    }

    /// The folder whose files activations are copied out to.
    pub(crate) fn out_folder(&self) -> Option<&Path> {
        self.recompute_out.as_deref().filter(|_| !self.copies_to_host())
    }

    /// The same for states.
    pub(crate) fn states_folder(&self) -> Option<&Path> {
        self.optimizer_out.as_deref().filter(|_| !self.states_on_host())
    }

    /// How many micro-batches of each unit have their activations copied out of memory.
    pub(crate) fn copied_out(&self) -> usize {
        let batches = self.recompute_out_batches.unwrap_or(usize::MAX);
        if self.recompute_out.is_some() { batches } else { 0 }
    }

    /// Micro-batches in a unit (U): that of [`default_unit`] for P, V and B; the whole step for
    /// schedules that reduce once a step, and a sample where they go in rounds of its slices. A
    /// schedule file has its own.
    pub fn unit(&self) -> usize {
        let step = self.micro_batches();
        let rounds = self.kind().is_some_and(|kind| kind.step == StepForm::Rounds);
        if rounds && self.slices() > 1 {
            return 1;
        }
        match self.in_units() {
            true => self.unit.unwrap_or_else(|| default_unit(self.pp, self.virtual_stages(), step)),
            false => step,
        }
    }

    /// Whether the schedule cuts a step into units, as opposed to reducing once a step.
    pub fn in_units(&self) -> bool {
        self.kind().is_some_and(|kind| kind.step == StepForm::Units)
    }

    /// Steps in which the learning rate rises: a tenth of all, at most 100.
    pub fn warmup(&self) -> u64 {
        self.warmup.unwrap_or((self.steps / 10).min(100))
    }

    /// Learning rate at the last step: a tenth of the largest.
    pub fn min_lr(&self) -> f64 {
        self.min_lr.unwrap_or(self.lr / 10.0)
    }

    /// The name of the run: by its settings, else after their file, else after its metrics.
    pub fn run_name(&self) -> String {
        let of_file = || self.file.iter().chain(&self.metrics).find_map(|path| path.file_stem());
        let given = self.run_name.as_ref().map(|name| name.trim().to_owned());
        given.unwrap_or_else(|| {
            of_file().map_or("zeropp".into(), |stem| stem.to_string_lossy().into_owned())
        })
    }

    /// Where figures are served to Prometheus, if they are.
    ///
    /// # Errors
    /// Text that is no address and port.
    pub(crate) fn prometheus_address(&self) -> Result<Option<SocketAddr>, ConfigError> {
        let Some(text) = &self.prometheus else { return Ok(None) };
        let alone = || text.parse().ok().map(|port: u16| (Ipv4Addr::LOCALHOST, port).into());
        let help = "use a port, as in 9400, or an address of this machine and a port, as in \
                    0.0.0.0:9400 or [::1]:9400";
        text.parse().ok().or_else(alone).map(Some).ok_or_else(|| {
            ConfigError::value("prometheus", text, "is not a port or an address with a port", help)
        })
    }

    /// Samples of one step over all ranks. Ranks of a ZeRO-3 group and replicas train on samples
    /// of their own.
    pub fn samples_per_step(&self) -> usize {
        self.deal().all().saturating_mul(self.micro_batch_size).saturating_mul(self.zero3)
    }

    /// Tokens of one step over all ranks.
    pub fn tokens_per_step(&self) -> usize {
        self.samples_per_step().saturating_mul(self.seq)
    }

    /// The same run with every setting that follows from others written out; what follows from a
    /// schedule file stays open.
    pub fn resolved(&self) -> Config {
        let own = |value: usize| self.schedule_file().is_none().then_some(value);
        Config {
            unit: own(self.unit()).or(self.unit),
            virtual_stages: self.virtual_stages.or(own(self.virtual_stages())),
            micro_batches: self.micro_batches.or(own(self.micro_batches())),
            warmup: Some(self.warmup()),
            min_lr: Some(self.min_lr()),
            reschedule: Some(self.reschedule()),
            beta1: self.beta1(),
            beta2: self.beta2(),
            eps: self.eps(),
            momentum: self.momentum(),
            nesterov: self.nesterov(),
            ..self.clone()
        }
    }
}

#[cfg(test)]
mod followed;
#[cfg(test)]
mod model_tests;
#[cfg(test)]
mod mutated_tests;
#[cfg(test)]
mod path_tests;
#[cfg(test)]
mod tests;
