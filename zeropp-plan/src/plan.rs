//! A plan: the best layouts with their numbers and reasons, for people and for programs.

use serde::Serialize;
use zeropp_data::files::escaped_line;
use zeropp_schedule::lower::OptimizerSync;

use crate::PlanError;
use crate::advice::{LargerBatch, MoreMemory, impossible, larger_batches, more_memory};
use crate::cores;
use crate::exact::{MadePrograms, Planned, Simulation, Terms};
use crate::layout::{Fixed, HeadSplit, Job, Layout};
use crate::race::Tried;
use crate::search::{Models, SHOWN, Search};
use crate::stages::Stage;

/// One layout of a plan.
#[derive(Clone, Debug, Serialize)]
pub struct Ranked {
    /// The layout and what it comes to.
    #[serde(flatten)]
    pub planned: Planned,
    /// What its step is made of.
    pub terms: Terms,
    /// Tokens in a second, of all ranks.
    pub tokens_per_s: f64,
    /// The least and the most of them within the margin of the model.
    pub tokens_per_s_range: [f64; 2],
    /// Share of the devices' peak that the model's own operations have, of attention the causal
    /// half.
    pub mfu: f64,
    /// The same with all of attention, as papers count it.
    pub mfu_whole_attention: f64,
    /// The pipeline rank that holds most.
    pub worst_rank: usize,
    /// Bytes that it holds.
    pub worst_bytes: u64,
    /// What costs most beside the model's own work, in words.
    pub limit: String,
    /// The command that runs it.
    pub command: String,
    /// What of it has no kernels for GPUs, so that its run refuses them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub only_on_cpus: Option<CpuFeature>,
    /// Layouts with one number run the same actions on the same stages.
    pub program: u64,
    /// What its command comes to, where that keeps the head whole although the layout does not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub whole_head: Option<OtherHead>,
    /// What it took where it was tried.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tried: Option<Tried>,
}

/// What runs have on CPUs alone today, although plans for GPUs count it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CpuFeature {
    /// Experts.
    Experts,
    /// Samples in slices.
    Slices,
}

impl CpuFeature {
    pub(crate) const ALL: [CpuFeature; 2] = [CpuFeature::Experts, CpuFeature::Slices];

    /// What of a layout has no kernels for the GPUs that it is planned for.
    fn of(job: &Job, layout: &Layout) -> Option<CpuFeature> {
        let has_experts = job.model.decoder.moe.is_some().then_some(CpuFeature::Experts);
        let is_sliced = (layout.slices > 1).then_some(CpuFeature::Slices);
        has_experts.or(is_sliced).filter(|_| job.compute.on_gpu)
    }

    /// In one word.
    pub(crate) fn name(self) -> &'static str {
        match self {
            CpuFeature::Experts => "experts",
            CpuFeature::Slices => "slices",
        }
    }

    /// Why runs on GPUs refuse that.
    pub fn why(self) -> &'static str {
        match self {
            CpuFeature::Experts => "models with experts run on CPUs only today",
            CpuFeature::Slices => "samples in slices (n above 1) run on CPUs only today",
        }
    }
}

/// What a layout comes to whose head is split and not whole, or the other way round.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct OtherHead {
    /// Seconds of a step.
    pub step_s: f64,
    /// Bytes that the rank which holds most holds.
    pub worst_bytes: u64,
}

impl OtherHead {
    fn of(planned: &Planned) -> OtherHead {
        OtherHead { step_s: planned.step_s, worst_bytes: planned.worst().1.total() }
    }
}

/// What the first layout comes to where updates are validated late.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct LateUpdates {
    /// Seconds of a step.
    pub step_s: f64,
    /// Bytes that the rank which holds most holds.
    pub worst_bytes: u64,
}

/// A plan.
#[derive(Clone, Debug, Serialize)]
pub struct LayoutPlan {
    /// The model's name and parameters.
    pub model: String,
    /// Parameters.
    pub parameters: f64,
    /// Training FLOP of a token, recomputation not counted.
    pub flops_per_token: f64,
    /// Devices.
    pub gpus: usize,
    /// Bytes that a rank may hold.
    pub memory: u64,
    /// Samples of a step.
    pub global_batch: usize,
    /// Tokens of a sample.
    pub seq: usize,
    /// Where the machine's rates are from.
    pub machine: String,
    /// Bytes of a device that are left to the driver, to NCCL and to gaps.
    pub reserve: u64,
    /// How far the machine's times were off at worst, as a share.
    pub margin: f64,
    /// Whether all that is predicted is of devices on which no run has been measured.
    pub is_unproven: bool,
    /// Layouts that were ranked in closed form.
    pub ranked: usize,
    /// Layouts whose closed form is above the memory.
    pub pruned: usize,
    /// Layouts that were simulated.
    pub simulated: usize,
    /// The best, best first.
    pub layouts: Vec<Ranked>,
    /// Why the first beats the second, in a sentence.
    pub why_first: Option<String>,
    /// What 10 % more memory would buy; none where it buys nothing.
    pub more_memory: Option<MoreMemory>,
    /// What larger batches come to, within the same memory.
    pub larger_batches: Vec<LargerBatch>,
    /// What late validation of updates would do for the first; none where it does nothing, does not
    /// fit, or is asked for already.
    pub late: Option<LateUpdates>,
    /// What a split head would do for the first, where runs cannot split it; none where it does
    /// nothing.
    pub split_head: Option<OtherHead>,
}

impl LayoutPlan {
    /// Plans a job; `model_flags` are the flags of `zeropp run` that say which model it is.
    ///
    /// # Errors
    /// A job that does not work, or one that fits no layout into the memory: then the nearest one,
    /// and by how much it misses.
    pub fn new(job: &Job, model_flags: &str) -> Result<LayoutPlan, PlanError> {
        LayoutPlan::made(job, model_flags, None)
    }

    /// The same, with the `count` best layouts that differ in what their ranks do given to
    /// `trials`, which tells what each of them took; the plan has them in that order. Those that
    /// took nothing, since they failed, come last.
    ///
    /// # Errors
    /// As [`LayoutPlan::new`].
    pub fn tried(
        job: &Job,
        model_flags: &str,
        count: usize,
        mut trials: impl FnMut(&[Planned]) -> Vec<Option<Tried>>,
    ) -> Result<LayoutPlan, PlanError> {
        LayoutPlan::made(job, model_flags, Some((count, &mut trials)))
    }

    fn made(
        job: &Job,
        model_flags: &str,
        trials: Option<(usize, &mut Trials<'_>)>,
    ) -> Result<LayoutPlan, PlanError> {
        let mut search = Search::new(job)?;
        let mut found = search.within(job.memory);
        if found.best.is_empty() {
            return Err(impossible(job, found.leanest.as_ref(), found.ranked));
        }
        let mut took = Vec::new();
        if let Some((count, trials)) = trials {
            found.best = search.differing(job.memory, count);
            took = in_order_of_trials(&mut found.best, trials);
        }
        let least_s = found.best.iter().map(|p| p.step_s).fold(f64::INFINITY, f64::min);
        found.best.truncate(SHOWN);
        let larger_batches = larger_batches(job, &found.best);
        let mut models = Models::new(job);
        models.made = search.made();
        let made = models.made.clone();
        let cut = found.best.into_iter().map(|p| {
            let whole = run_whole(job, &mut models, &p);
            let cuts_alike = models.is_cut_of_run(job, whole.as_ref().unwrap_or(&p));
            (models.stages_of(job, &p), cuts_alike, whole, p)
        });
        let cut: Vec<_> = cut.collect();
        let mut layouts = cores::map(&cut, |(stages, cuts_alike, whole, planned)| {
            let mut words = vec!["zeropp run".to_string()];
            words.extend((!model_flags.is_empty()).then(|| model_flags.to_string()));
            words.extend(whole.as_ref().unwrap_or(planned).flags(*cuts_alike));
            let whole_head = whole.as_ref().map(OtherHead::of);
            Ranked { whole_head, ..ranked(job, stages, &made, planned, words.join(" ")) }
        });
        for (ranked, tried) in layouts.iter_mut().zip(took) {
            ranked.tried = tried;
        }
        let why_first = layouts.first().zip(layouts.get(1)).map(|(a, b)| why(a, b));
        Ok(LayoutPlan {
            model: job.model.name.clone(),
            parameters: job.model.decoder.parameter_count() as f64,
            flops_per_token: job.model.decoder.flops_per_token(job.model.seq),
            gpus: job.gpus,
            memory: job.memory,
            global_batch: job.global_batch,
            seq: job.model.seq,
            machine: escaped_line(&job.machine.source).into_owned(),
            reserve: (job.machine.memory_bytes as u64).saturating_sub(job.memory),
            margin: job.machine.margin,
            is_unproven: job.compute.on_gpu,
            ranked: found.ranked,
            pruned: found.pruned,
            simulated: found.simulated,
            more_memory: more_memory(&mut search, job.memory, least_s),
            larger_batches,
            late: late(job, &mut models, &layouts[0]),
            split_head: split_head(job, &mut models, &layouts[0].planned),
            layouts,
            why_first,
        })
    }

    /// The program, the simulated run and the costs of layout `index`, from 0; for pictures.
    ///
    /// # Errors
    /// An index that is beyond the last.
    pub fn simulation<T>(
        &self,
        job: &Job,
        index: usize,
        of: impl FnOnce(&Simulation) -> T,
    ) -> Result<T, PlanError> {
        let Some(chosen) = self.layouts.get(index) else {
            return Err(PlanError::new(format!(
                "explain = {}: the plan has layouts 1 to {}",
                index + 1,
                self.layouts.len()
            )));
        };
        let mut models = Models::new(job);
        let stages = models.stages_of(job, &chosen.planned);
        Ok(of(&Simulation::new(job, &chosen.planned.layout, &stages)?))
    }
}

fn ranked(
    job: &Job,
    stages: &[Stage],
    made: &MadePrograms,
    planned: &Planned,
    command: String,
) -> Ranked {
    let layout = &planned.layout;
    let simulation = Simulation::of(job, layout, stages, made).ok();
    let terms = simulation.as_ref().map(Simulation::terms).unwrap_or_default();
    let (worst_rank, worst) = planned.worst();
    let tokens = (job.global_batch * job.model.seq) as f64;
    let peak = job.machine.flops_per_s * job.gpus as f64;
    let (per_s, margin) = (tokens / planned.step_s, job.machine.margin);
    let mfu = job.step_flops() / planned.step_s / peak;
    Ranked {
        tokens_per_s: per_s,
        tokens_per_s_range: [per_s / (1.0 + margin), per_s / (1.0 - margin).max(0.01)],
        mfu,
        mfu_whole_attention: mfu * job.whole_attention(),
        worst_rank,
        worst_bytes: worst.total(),
        limit: limit(&terms, planned.step_s),
        command,
        only_on_cpus: CpuFeature::of(job, layout),
        planned: planned.clone(),
        terms,
        program: simulation.as_ref().map_or(0, Simulation::program_id),
        whole_head: None,
        tried: None,
    }
}

/// What tries layouts.
type Trials<'a> = dyn FnMut(&[Planned]) -> Vec<Option<Tried>> + 'a;

/// Sorts layouts by what they take in trials; returns that, in the new order.
fn in_order_of_trials(layouts: &mut Vec<Planned>, trials: &mut Trials<'_>) -> Vec<Option<Tried>> {
    let took = trials(layouts);
    let mut both: Vec<_> = layouts.drain(..).zip(took).collect();
    both.sort_by(|(_, a), (_, b)| match (a, b) {
        (Some(a), Some(b)) => a.order(b),
        (a, b) => b.is_some().cmp(&a.is_some()),
    });
    let (sorted, took) = both.into_iter().unzip();
    *layouts = sorted;
    took
}

/// The largest terms beside the model's own work: `pipeline bubble 4.1 %, optimizer 2.0 %`.
fn limit(terms: &Terms, step_s: f64) -> String {
    let mut all: Vec<(&str, f64)> = terms.all()[1..].to_vec();
    all.sort_by(|a, b| b.1.total_cmp(&a.1));
    let reported: Vec<String> = all
        .iter()
        .take(2)
        .filter(|(_, seconds)| *seconds > 0.005 * step_s)
        .map(|(name, seconds)| format!("{name} {:.1} %", 100.0 * seconds / step_s))
        .collect();
    match reported.is_empty() {
        true => "the devices' own speed".into(),
        false => reported.join(", "),
    }
}

/// Why `a` takes less than `b`.
fn why(a: &Ranked, b: &Ranked) -> String {
    if let (Some(first), Some(second)) = (a.tried, b.tried) {
        let by = 100.0 * (second.step_s / first.step_s - 1.0);
        let noise = 100.0 * (first.most_s / first.least_s - 1.0);
        return format!(
            "1 beats 2 by {by:.1} % of its step in trials, in which its own rounds were {noise:.1} \
             % apart"
        );
    }
    let (first, second) = (a.planned.step_s, b.planned.step_s);
    let by = 100.0 * (second - first) / first;
    let mut gains: Vec<(&str, f64)> = a
        .terms
        .all()
        .iter()
        .zip(b.terms.all())
        .map(|((name, mine), (_, theirs))| (*name, theirs - mine))
        .collect();
    gains.sort_by(|x, y| y.1.total_cmp(&x.1));
    let share = |seconds: f64| format!("{:.1} %", 100.0 * seconds.abs() / first);
    let mut text = format!("1 beats 2 by {by:.1} % of its step");
    if let Some((name, seconds)) = gains.first().filter(|(_, s)| *s > 1e-4 * first) {
        text.push_str(&format!(": it has less {name}, by {}", share(*seconds)));
    }
    if let Some((name, seconds)) = gains.last().filter(|(_, s)| *s < -1e-4 * first) {
        text.push_str(&format!(", for more {name}, by {}", share(*seconds)));
    }
    let memory = b.worst_bytes as f64 - a.worst_bytes as f64;
    let share = memory / a.worst_bytes as f64 * 100.0;
    if share.abs() >= 1.0 {
        let word = if share > 0.0 { "less" } else { "more" };
        text.push_str(&format!("; its worst rank holds {:.0} % {word}", share.abs()));
    }
    text
}

/// The first layout with updates that are validated late, where that is faster by a thousandth or
/// more. GPUs run with NCCL, which does not have it.
fn late(job: &Job, models: &mut Models, first: &Ranked) -> Option<LateUpdates> {
    if job.compute.on_gpu || job.fixed.sync == OptimizerSync::Late {
        return None;
    }
    let layout = &first.planned.layout;
    let blocks = &first.planned.blocks;
    let stages = models.stages_of(job, &first.planned);
    let late = Simulation::with(job, layout, &stages, OptimizerSync::Late, &models.made).ok()?;
    let late = late.planned(blocks);
    let worst_bytes = late.worst().1.total();
    let pays = late.step_s < first.planned.step_s * 0.999 && worst_bytes <= job.memory;
    pays.then_some(LateUpdates { step_s: late.step_s, worst_bytes })
}

/// What a run of `planned` is, where that splits its head and runs cannot.
fn run_whole(job: &Job, models: &mut Models, planned: &Planned) -> Option<Planned> {
    if job.fixed.head != HeadSplit::Ahead || planned.head_blocks.is_empty() {
        return None;
    }
    let (stages, blocks) = models.stages(job, &planned.layout)?;
    Some(Simulation::new(job, &planned.layout, &stages).ok()?.planned(&blocks))
}

/// What a layout with a whole head would be with a split one, where runs cannot have that.
fn split_head(job: &Job, models: &mut Models, first: &Planned) -> Option<OtherHead> {
    if job.fixed.head != HeadSplit::Told {
        return None;
    }
    let fixed = Fixed { head: HeadSplit::Ahead, ..job.fixed.clone() };
    let job = Job { fixed, ..job.clone() };
    let split = models.splits(&job, &[Some(first.clone())]).pop().flatten()?;
    Some(OtherHead::of(&split))
}
