//! A way to train a model on a cluster.

use std::fmt;

use serde::Serialize;
pub use zeropp_model::Recompute;
use zeropp_model::layer::{BatchShape, SamplePart};
use zeropp_model::optimizer::{Cut, Out};
use zeropp_schedule::costs::{Machine, SLICE_GRID};
use zeropp_schedule::ir::looping;
use zeropp_schedule::lower::{LowerOptions, OptimizerSync};
use zeropp_schedule::schedules::{Forms, Kind, Planning, Shape, StepForm};

use crate::PlanError;
use crate::bytes::{RunState, is_behind};
use crate::model::ModelSizes;
use crate::slices::numbers;
use crate::split;

/// What is to be planned.
#[derive(Clone, Debug)]
pub struct Job {
    /// The model.
    pub model: ModelSizes,
    /// What each of the devices does in a second.
    pub machine: Machine,
    /// Devices in all, P·D·K.
    pub gpus: usize,
    /// Bytes that a rank may hold.
    pub memory: u64,
    /// Samples of a step, over all ranks.
    pub global_batch: usize,
    /// What ranks compute on, and in.
    pub compute: ComputeSettings,
    /// What a rank holds beside what comes and goes with its program.
    pub state: RunState,
    /// What is not to be searched for.
    pub fixed: Fixed,
}

/// What ranks compute on, and in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ComputeSettings {
    /// On GPUs, not on zeropp's kernels for the CPU.
    pub on_gpu: bool,
    /// Bytes of an element of activations and gathered weights.
    pub element_bytes: usize,
    /// Whether attention keeps its probabilities at the job's length of samples.
    pub keeps_probabilities: bool,
    /// Copies of gathered weights as products read them.
    pub packing: Packing,
    /// Whether training drops elements: B then computes attention's probabilities again.
    pub dropout: bool,
    /// Whether recomputation makes the outputs of layers too, which nothing needs: zeropp does not.
    pub redoes_outputs: bool,
}

/// When copies of gathered weights are kept as products read them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    /// Never.
    Never,
    /// Where a gather serves several micro-batches and memory is not short; of so many bytes an
    /// element.
    Auto(u64),
    /// Always.
    Always(u64),
}

impl Job {
    /// The ranks that share a stage of `layout`, and what of it is in their files.
    pub fn cut(&self, layout: &Layout) -> Cut {
        let out = match (&self.fixed.states, layout.moments) {
            (None, _) => Out::Nothing,
            (_, true) => Out::Moments,
            (_, false) => Out::All,
        };
        let host = self.fixed.states == Some(OutPlace::Host);
        let of_a_rank = host.then(|| layout.stages() / layout.pp);
        let behind = is_behind(&self.state, layout.zero1, self.model.decoder.tied, of_a_rank);
        Cut { out: out.beside(layout.dp).updated(behind), host, ..layout.cut() }
    }
}

/// How fast copies out of a rank's memory and back are.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CopyRate {
    /// None where there are none.
    pub(crate) bytes_per_s: Option<f64>,
    /// Whether those out and those in go at once, and beside all else.
    pub(crate) apart: bool,
}

impl CopyRate {
    fn is_unknown(self) -> bool {
        self.bytes_per_s.is_none()
    }
}

impl Packing {
    /// Bytes of an element of a copy where a gather serves so many of a step's micro-batches; 0
    /// where none is kept. Memory is not looked at.
    pub fn bytes(self, micro_batches: usize, of_a_gather: usize) -> u64 {
        match self {
            Packing::Always(bytes) => bytes,
            Packing::Auto(bytes) if micro_batches > 1 && of_a_gather > 1 => bytes,
            _ => 0,
        }
    }
}

impl ComputeSettings {
    /// A micro-batch of so many samples of `seq` tokens.
    pub fn batch(&self, samples: usize, seq: usize) -> BatchShape {
        BatchShape {
            samples,
            seq,
            element_bytes: self.element_bytes,
            keeps_probabilities: self.keeps_probabilities,
            kernels: !self.on_gpu,
            part: SamplePart::Whole,
        }
    }

    /// bf16 on GPUs.
    pub const GPU: ComputeSettings = ComputeSettings {
        on_gpu: true,
        element_bytes: 2,
        keeps_probabilities: false,
        packing: Packing::Never,
        dropout: false,
        redoes_outputs: false,
    };
}

/// Settings that are given.
#[derive(Clone, Debug, Default)]
pub struct Fixed {
    /// P.
    pub pp: Option<usize>,
    /// D.
    pub zero3: Option<usize>,
    /// K.
    pub dp: Option<usize>,
    /// V.
    pub virtual_stages: Option<usize>,
    /// U.
    pub unit: Option<usize>,
    /// b.
    pub micro_batch_size: Option<usize>,
    /// Recomputation.
    pub recompute: Option<Recompute>,
    /// The kind of schedule.
    pub schedule: Option<String>,
    /// Slices of a sample.
    pub slices: Slices,
    /// When ranks learn the global norm.
    pub sync: OptimizerSync,
    /// Whether ranks may share the head.
    pub head: HeadSplit,
    /// Where activations may be put out.
    pub out: Option<OutPlace>,
    /// Where parameters, optimizer state and reduced gradients are, if not in memory.
    pub states: Option<OutPlace>,
    /// Whether that is the optimizer state alone.
    pub moments: Option<bool>,
}

/// The value of `recompute:out` and `optimizer:out` that stands for memory of a GPU's host.
pub const HOST: &str = "host";

/// A place outside a rank's memory for what its forwards keep.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OutPlace {
    /// The memory of the device's host, as runs on NVIDIA's GPUs have it for activations.
    Host,
    /// A file of each rank in this folder, as runs on CPUs have it.
    File(String),
}

impl OutPlace {
    /// As flags name it.
    pub(crate) fn name(&self) -> &str {
        match self {
            OutPlace::Host => HOST,
            OutPlace::File(folder) => folder,
        }
    }
}

/// What a plan makes of a head that ranks could share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HeadSplit {
    /// It is whole.
    #[default]
    Whole,
    /// It is whole, as runs cannot split it on these devices; the plan tells what that would save.
    Told,
    /// Layouts split it where that is faster, although runs cannot: their commands keep it whole.
    Ahead,
    /// Layouts and their commands split it where that is faster.
    Auto,
}

/// Fewest tokens of a sample that can be cut: the CPU's attention keeps probabilities of shorter
/// ones.
pub const SAMPLE_MIN: usize = 512;
/// Fewest tokens of a sample's last slice: the CPU's products of fewer rows have bits of their own.
pub const LAST_MIN: usize = 96;

/// Which numbers of slices of a sample are searched for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Slices {
    /// Those that runs can have: on GPUs, where they cannot be cut yet, others only where no layout
    /// of whole samples fits.
    #[default]
    Runnable,
    /// All, whether runs can have them or not.
    Any,
    /// None: samples are whole, as the settings want something that slices cannot have.
    Whole,
    /// This one.
    Number(usize),
}

/// Most devices that are planned for.
const GPUS_MAX: usize = 1 << 20;
/// Most samples of a step.
const BATCH_MAX: usize = 1 << 24;

impl Job {
    /// Refuses what nothing can be planned for.
    ///
    /// # Errors
    /// The first number that does not work, with what would.
    pub fn check(&self) -> Result<(), PlanError> {
        self.model.check()?;
        let refuse = |field: &str, value: &dyn fmt::Display, works: String| {
            Err(PlanError::new(format!("{field} = {value}: {works}")))
        };
        if self.gpus == 0 || self.gpus > GPUS_MAX {
            let works = format!("no cluster has so many; use 1 to {GPUS_MAX}");
            return refuse("gpus", &self.gpus, works);
        }
        if self.global_batch == 0 || self.global_batch > BATCH_MAX {
            let works = format!("samples of a step, of all ranks; use 1 to {BATCH_MAX}");
            return refuse("global-batch", &self.global_batch, works);
        }
        if self.memory == 0 {
            return refuse("memory", &0, "a rank holds something; use bytes, such as 80G".into());
        }
        self.check_out()?;
        let given = self.fixed.schedule.as_deref();
        let why = given.and_then(Kind::find).and_then(|kind| match &kind.planning {
            Planning::With(_) => None,
            Planning::Not(why) => Some(*why),
        });
        if let Some(name) = given.filter(|name| why.is_some() || Kind::find(name).is_none()) {
            let why = why.unwrap_or("there is no such kind");
            let planned = Kind::names(|kind| kind.forms().is_some());
            return refuse("schedule", &name, format!("{why}; plans are made for {planned}"));
        }
        Ok(())
    }

    /// Refuses a place of which the machine does not say how fast it is, and what stays in memory.
    fn check_out(&self) -> Result<(), PlanError> {
        let Fixed { out, states, .. } = &self.fixed;
        if let Some(out) = out.as_ref().filter(|_| self.model.decoder.moe.is_some()) {
            return Err(PlanError::new(format!(
                "recompute:out = {}: model {} has experts, whose choices stay in memory; leave it \
                 out, or use a model without experts",
                out.name(),
                self.model.name
            )));
        }
        for (field, place) in [("recompute:out", out), ("optimizer:out", states)] {
            let Some(place) = place.as_ref().filter(|_| self.rate(place.as_ref()).is_unknown())
            else {
                continue;
            };
            let key = match place {
                OutPlace::Host => "host_bytes_per_s",
                OutPlace::File(_) => "file_bytes_per_s",
            };
            let place = place.name();
            return Err(PlanError::new(format!(
                "{field} = {place}: the machine's file has no {key}; add it, such as {key} = 12e9"
            )));
        }
        Ok(())
    }

    /// How fast copies to a place and back are.
    pub(crate) fn rate(&self, place: Option<&OutPlace>) -> CopyRate {
        let (bytes_per_s, apart) = match place {
            Some(OutPlace::Host) => (self.machine.host_bytes_per_s, true),
            Some(OutPlace::File(_)) => (self.machine.file_bytes_per_s, false),
            None => (None, false),
        };
        CopyRate { bytes_per_s, apart }
    }

    /// Bytes that may be out of each rank's memory.
    pub(crate) fn room_outside(&self) -> u64 {
        let on_host = [&self.fixed.out, &self.fixed.states].contains(&&Some(OutPlace::Host));
        let host = self.machine.host_bytes.filter(|_| on_host);
        host.map_or(u64::MAX, |bytes| (bytes / self.machine.per_node as f64) as u64)
    }

    /// Whether the optimizer state may be out alone, and whether it may not.
    pub(crate) fn moments(&self) -> Vec<bool> {
        let states = self.fixed.states.is_some();
        [true, false]
            .into_iter()
            .filter(|alone| match self.fixed.moments {
                Some(given) if states => given == *alone,
                _ => states || !alone,
            })
            .collect()
    }

    /// Whether layouts may put activations out.
    pub(crate) fn may_put_out(&self) -> bool {
        self.fixed.out.is_some()
    }

    /// Whether the ranks of a layout could share the head.
    pub(crate) fn can_split_head(&self, layout: &Layout) -> bool {
        let (ids, kind) = (self.model.decoder.vocabulary, Kind::find(layout.schedule));
        split::can_be(ids, layout.pp, kind, layout.slices > 1)
    }

    /// Whether a run of a layout may choose that by itself.
    pub(crate) fn run_may_split_head(&self, layout: &Layout) -> bool {
        let runs_can = !matches!(self.fixed.head, HeadSplit::Ahead | HeadSplit::Told);
        runs_can && self.can_split_head(layout)
    }

    /// Whether they may.
    pub(crate) fn may_split_head(&self, layout: &Layout) -> bool {
        matches!(self.fixed.head, HeadSplit::Auto | HeadSplit::Ahead) && self.can_split_head(layout)
    }

    /// A micro-batch of `samples`.
    pub fn batch(&self, samples: usize) -> BatchShape {
        self.compute.batch(samples, self.model.seq)
    }

    /// The numbers of slices of a sample that a layout may have beside one, as far as model and
    /// samples say it.
    pub(crate) fn slices(&self) -> Vec<usize> {
        let ModelSizes { decoder, seq, .. } = &self.model;
        // Blocks of the grid, of which a last one with few tokens has bits of its own.
        let rest = seq % SLICE_GRID as usize;
        if decoder.moe.is_some() || (1..LAST_MIN).contains(&rest) {
            return Vec::new();
        }
        match self.fixed.slices {
            Slices::Whole => Vec::new(),
            Slices::Number(n) => {
                let blocks = seq.div_ceil(SLICE_GRID as usize);
                let can = *seq >= SAMPLE_MIN && (2..=blocks).contains(&n);
                can.then_some(n).into_iter().collect()
            }
            Slices::Runnable | Slices::Any => numbers(*seq).collect(),
        }
    }

    /// Whether a run may choose slices of itself for a layout.
    pub(crate) fn may_slice(&self, layout: &Layout) -> bool {
        let has_order = Kind::find(layout.schedule).is_some_and(|kind| kind.in_slices.is_some());
        let can = !self.compute.on_gpu && layout.pp > 1 && layout.micro_batch_size == 1;
        can && has_order && self.fixed.slices != Slices::Number(1) && !self.slices().is_empty()
    }

    /// Floating-point operations of a training step, nothing counted twice: three forwards, with
    /// the causal half of attention.
    pub(crate) fn step_flops(&self) -> f64 {
        let ModelSizes { decoder, seq, .. } = &self.model;
        decoder.flops_per_token(*seq) * (seq * self.global_batch) as f64
    }

    /// How many times as many operations a step has where all of attention is counted, as PaLM
    /// does, and not the causal half: that of samples twice as long.
    pub(crate) fn whole_attention(&self) -> f64 {
        let ModelSizes { decoder, seq, .. } = &self.model;
        decoder.flops_per_token(2 * seq) / decoder.flops_per_token(*seq)
    }
}

/// One layout.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Layout {
    /// Pipeline ranks, P.
    pub pp: usize,
    /// Ranks that share a stage's weights, D.
    pub zero3: usize,
    /// Replicas, K.
    pub dp: usize,
    /// Stages on each rank, V.
    pub virtual_stages: usize,
    /// Micro-batches between two reductions of a stage, U; B where a step is one unit.
    pub unit: usize,
    /// Micro-batches of a rank and step, B.
    pub micro_batches: usize,
    /// Samples in each, b.
    pub micro_batch_size: usize,
    /// What is computed again.
    pub recompute: Recompute,
    /// Of each unit only the first so many micro-batches are recomputed in full, if that is given,
    /// the others as with `selective`.
    pub redone: Option<usize>,
    /// Whether replicas share the optimizer's state.
    pub zero1: bool,
    /// The kind of schedule.
    pub schedule: &'static str,
    /// Stages gathered ahead.
    pub prefetch: usize,
    /// Slices of a sample; 1 where samples are whole.
    pub slices: usize,
    /// Of each unit so many micro-batches of which what F keeps is put out.
    pub out: usize,
    /// Whether that begins with the second of several units.
    pub out_later: bool,
    /// Whether, of states that are put out, what the optimizer keeps is alone.
    pub moments: bool,
}

impl Layout {
    /// What the generator makes a schedule for.
    pub fn shape(&self) -> Shape {
        Shape {
            pp: self.pp,
            virtual_stages: self.virtual_stages,
            micro_batches: self.micro_batches,
            unit: self.unit,
        }
    }

    /// Stages, P·V.
    pub fn stages(&self) -> usize {
        self.pp * self.virtual_stages
    }

    /// Bytes of an element of packed weights; memory is not looked at.
    pub(crate) fn packed_bytes(&self, packing: Packing) -> u64 {
        let unit = if self.in_units() { self.unit } else { self.micro_batches };
        let unit = if self.in_rounds_of_slices() { 1 } else { unit };
        packing.bytes(self.micro_batches * self.slices, unit * self.slices)
    }

    /// Whether its unit is a sample, as the schedule goes in rounds of its slices.
    pub(crate) fn in_rounds_of_slices(&self) -> bool {
        let kind = Kind::find(self.schedule);
        self.slices > 1 && kind.is_some_and(|kind| kind.step == StepForm::Rounds)
    }

    /// The ranks that share a stage, which have its states in memory.
    pub fn cut(&self) -> Cut {
        let owners = if self.zero1 { self.dp } else { 1 };
        Cut { zero3: self.zero3, owners, zero1: self.zero1, out: Out::Nothing, host: false }
    }

    /// How its schedule is lowered.
    pub fn lowering(&self) -> LowerOptions {
        LowerOptions {
            prefetch: self.prefetch,
            recompute: self.recompute == Recompute::Full,
            redone: self.redone,
            out: self.out,
            out_later: self.out_later,
            replicas: self.dp > 1,
            ..LowerOptions::default()
        }
    }

    /// What is recomputed, as a setting has it.
    pub(crate) fn recomputation(&self) -> String {
        let first = self.redone.map_or_else(String::new, |first| format!(":first={first}"));
        format!("{}{first}", self.recompute)
    }

    /// How many stages are done again as a whole, from the first on; with `redone`, for those
    /// micro-batches alone.
    pub fn recomputed(&self) -> usize {
        let kind = Kind::find(self.schedule).filter(|_| self.recompute == Recompute::Full);
        // Slices keep what the last stage of all makes, as a head has its gradient of F.
        let most = self.stages() - usize::from(self.redone.is_some() || self.slices > 1);
        kind.map_or(0, |kind| kind.recomputed(self.pp, self.virtual_stages).min(most))
    }

    /// The share of micro-batches that are recomputed in full, where stages are.
    pub(crate) fn share_redone(&self) -> f64 {
        self.redone.map_or(1.0, |first| first as f64 / self.unit as f64)
    }

    /// Of each unit so many micro-batches go out of which there are inputs alone.
    pub(crate) fn inputs_out(&self) -> usize {
        let again = match self.recompute {
            Recompute::Full => self.redone.unwrap_or(self.unit),
            _ => 0,
        };
        self.out.saturating_sub(self.unit - again.min(self.unit))
    }

    /// How many stages are done again as a whole for every micro-batch.
    pub(crate) fn recomputed_of_all(&self) -> usize {
        if self.redone.is_some() { 0 } else { self.recomputed() }
    }

    /// What is known of its schedule in closed form.
    pub(crate) fn forms(&self) -> &'static Forms {
        Kind::find(self.schedule).and_then(Kind::forms).unwrap_or(&Forms::UNKNOWN)
    }

    /// The pipeline rank of each stage.
    pub(crate) fn placement(&self) -> Vec<usize> {
        let placement = Kind::find(self.schedule).map_or(looping as _, |kind| kind.placement);
        placement(self.pp, self.virtual_stages)
    }

    /// Whether B and W are apart in its schedule.
    pub(crate) fn splits(&self) -> bool {
        Kind::find(self.schedule).is_some_and(|kind| kind.splits)
    }

    /// The layout that stands for all with the same stages, whatever their kinds and units, and
    /// which of its stages full recomputation does again; what its weights are packed in depends
    /// on kind and unit, too ([`Layout::packed_bytes`]).
    pub(crate) fn of_stages(&self) -> (Layout, bool) {
        let redone = self.redone.map(|_| 0);
        let same = Layout { schedule: "", unit: 0, prefetch: 0, redone, ..self.clone() };
        let same = Layout { out: 0, out_later: false, ..same };
        (same, self.splits())
    }

    /// Whether its schedule is cut into units.
    pub fn in_units(&self) -> bool {
        Kind::find(self.schedule).is_some_and(|kind| kind.step == StepForm::Units)
    }

    /// The flags of `zeropp run` that it is, but those of the model; `stages` are the blocks of
    /// each stage, empty where a run cuts as well by itself, `values` those of its schedule, and
    /// `out` what follows what is recomputed.
    pub fn flags(&self, stages: &[usize], values: &[String], out: &str) -> Vec<String> {
        let colon = if values.is_empty() { "" } else { ":" };
        let mut flags = vec![
            format!("--pp {}", self.pp),
            format!("--zero3 {}", self.zero3),
            format!("--dp {}", self.dp),
            format!("--virtual {}", self.virtual_stages),
            format!("--schedule {}{colon}{}", self.schedule, values.join(",")),
            format!("--micro-batches {}", self.micro_batches),
            format!("--micro-batch-size {}", self.micro_batch_size),
        ];
        if self.in_units() {
            flags.push(format!("--unit {}", self.unit));
        }
        // Also where it is none: a run's default follows from the machine that it is on.
        flags.push(format!("--recompute {}{out}", self.recomputation()));
        if self.zero1 {
            flags.push("--zero1".into());
        }
        if self.prefetch != 1 {
            flags.push(format!("--prefetch {}", self.prefetch));
        }
        if stages.len() > 1 && stages.iter().any(|n| *n != 1) {
            flags.push(format!("--stages {}", list(stages)));
        }
        flags
    }
}

/// Numbers as `--stages` takes them, three and more equal ones together: `1,8x2,1`.
fn list(numbers: &[usize]) -> String {
    let each = |same: &[usize]| match same {
        [n, _, _, ..] => format!("{}x{n}", same.len()),
        few => few.iter().map(ToString::to_string).collect::<Vec<_>>().join(","),
    };
    numbers.chunk_by(|a, b| a == b).map(each).collect::<Vec<_>>().join(",")
}

/// `P 4 · D 8 · K 1, V 2, U 8, b 1, zeropp`.
impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Layout { pp, zero3, dp, virtual_stages, unit, micro_batches, micro_batch_size, .. } =
            self;
        match pp {
            1 => write!(f, "no pipeline ({})", self.schedule)?,
            _ => f.write_str(self.schedule)?,
        }
        write!(f, " on P {pp} x D {zero3} x K {dp}, V {virtual_stages}")?;
        if self.in_units() {
            write!(f, ", U {unit}")?;
        }
        write!(f, ", {micro_batches} micro-batches of {micro_batch_size}")?;
        if self.slices > 1 {
            write!(f, " in {} slices", self.slices)?;
        }
        if self.recompute != Recompute::None {
            write!(f, ", recompute {}", self.recompute)?;
            if let Some(first) = self.redone {
                write!(f, " for {first} of each unit")?;
            }
        }
        if self.out > 0 {
            let but_first = if self.out_later { " but the first" } else { "" };
            write!(f, ", {} of each unit{but_first} out", self.out)?;
        }
        if self.moments {
            write!(f, ", moments out")?;
        }
        if self.zero1 {
            write!(f, ", ZeRO-1")?;
        }
        Ok(())
    }
}
