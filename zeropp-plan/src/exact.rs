//! A layout simulated: the time of its step, what that is made of, and what its ranks hold.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use serde::Serialize;
use zeropp_schedule::costs::check_sums;
use zeropp_schedule::head::HeadTree;
use zeropp_schedule::ir::{Action, Compute, Schedule, Task};
use zeropp_schedule::lower::{LowerOptions, OptimizerSync, in_issue_order, lower};
use zeropp_schedule::memory::{HeadBytes, HeldBytes, MemoryBytes};
use zeropp_schedule::schedules::{Kind, Shape, StepForm, generate_cut};
use zeropp_schedule::simulate::{Costs, LinkCosts, simulate, step_period_ns, times};
use zeropp_schedule::timeline::Timeline;
use zeropp_search::generate_with_costs;

use crate::PlanError;
use crate::layout::{Fixed, HeadSplit, Job, Layout, OutPlace};
use crate::links::{Links, Sent};
use crate::memory;
use crate::programs::generator_costs;
use crate::shared::{Crowd, contended};
use crate::stages::{Stage, simulator, step_ns, times_by_flop};

#[cfg(test)]
mod layer_tests;
mod made;

pub(crate) use made::MadePrograms;
use made::Recipe;

/// Actions of a program above which a shorter step is simulated twice, and the rest follows.
const ACTIONS_MAX: usize = 40_000;

/// What a step's time is made of, in seconds. They sum to the step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Terms {
    /// F, B and W of a rank, on average.
    pub compute: f64,
    /// Stages that a rank computes again (R), on average.
    pub recompute: f64,
    /// Norms and activation functions, and attention's scores where a device keeps them, that a
    /// rank's B computes again (selective recomputation), on average.
    pub selective: f64,
    /// What the busiest rank computes beyond the average.
    pub imbalance: f64,
    /// Waiting for other ranks where messages take no time.
    pub bubble: f64,
    /// What copies of activations add that are put out and come in again.
    pub copies: f64,
    /// What copies of parameters, optimizer state and gradients add that are out.
    pub states: f64,
    /// What messages add.
    pub messages: f64,
    /// What the bytes of a split head's messages add.
    pub head_messages: f64,
    /// What gathers add: those that no work hides, and the work that the others slow.
    pub gathers: f64,
    /// What reductions inside ZeRO-3 groups add, so too.
    pub reductions: f64,
    /// What sums over replicas add, so too.
    pub replicas: f64,
    /// The optimizer's update.
    pub optimizer: f64,
}

impl Terms {
    /// By what they are called.
    pub fn all(&self) -> [(&'static str, f64); 13] {
        [
            ("forwards and backwards", self.compute),
            ("recomputation of whole stages", self.recompute),
            ("recomputation of what is cheap", self.selective),
            ("uneven stages", self.imbalance),
            ("pipeline bubble", self.bubble),
            ("copies not hidden", self.copies),
            ("states' copies not hidden", self.states),
            ("messages not hidden", self.messages),
            ("head's messages", self.head_messages),
            ("gathers", self.gathers),
            ("reductions", self.reductions),
            ("sums over replicas", self.replicas),
            ("optimizer", self.optimizer),
        ]
    }

    fn along(&self, other: &Terms, by: f64) -> Terms {
        let at = |a: f64, b: f64| a + by * (b - a);
        Terms {
            compute: at(self.compute, other.compute),
            recompute: at(self.recompute, other.recompute),
            selective: at(self.selective, other.selective),
            imbalance: at(self.imbalance, other.imbalance),
            bubble: at(self.bubble, other.bubble),
            copies: at(self.copies, other.copies),
            states: at(self.states, other.states),
            messages: at(self.messages, other.messages),
            head_messages: at(self.head_messages, other.head_messages),
            gathers: at(self.gathers, other.gathers),
            reductions: at(self.reductions, other.reductions),
            replicas: at(self.replicas, other.replicas),
            optimizer: at(self.optimizer, other.optimizer),
        }
    }
}

/// Bytes that a rank sends in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct RankTraffic {
    /// Inside its node.
    pub inside: f64,
    /// To other nodes.
    pub between: f64,
}

impl RankTraffic {
    /// So many bytes, of which this share goes to other nodes.
    fn shared(bytes: f64, between: f64) -> RankTraffic {
        RankTraffic { inside: bytes * (1.0 - between), between: bytes * between }
    }
}

/// A layout with its predictions.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Planned {
    /// The layout.
    pub layout: Layout,
    /// Blocks of each stage.
    pub blocks: Vec<usize>,
    /// Blocks of the head's rows that each rank has; none where the head is whole.
    pub head_blocks: Vec<usize>,
    /// Whether a run might split its head by itself, which its flags decide then.
    #[serde(skip)]
    pub may_split_head: bool,
    /// Whether a run might cut its samples by itself, which its flags decide then.
    #[serde(skip)]
    pub may_slice: bool,
    /// Where activations are put out to, which a run's flag says.
    #[serde(skip)]
    pub out_to: Option<String>,
    /// Whether it has something on a host, which no GPU has done.
    #[serde(skip)]
    pub on_host: bool,
    /// Seconds of a step.
    pub step_s: f64,
    /// Idle share of all ranks from the first to the last compute.
    pub bubble: f64,
    /// What each pipeline rank holds when it holds most.
    pub memory: Vec<MemoryBytes>,
    /// The most that each holds of each kind.
    pub peaks: Vec<MemoryBytes>,
    /// Bytes that a rank sends in a step, on average.
    pub traffic: RankTraffic,
    /// Whether the whole step was simulated; else two shorter ones, from which it follows.
    pub whole: bool,
}

impl Planned {
    /// The rank that holds most, and what.
    pub fn worst(&self) -> (usize, MemoryBytes) {
        let ranks = self.memory.iter().copied().enumerate();
        ranks.max_by_key(|(_, bytes)| bytes.total()).unwrap_or_default()
    }

    /// Bytes that a rank has out of its memory at once, at most.
    pub fn outside(&self) -> u64 {
        let of = |rank: &MemoryBytes| rank.host_activation + rank.host_state;
        self.peaks.iter().map(of).max().unwrap_or(0)
    }

    /// The flags of `zeropp run` that it is, but those of the model: with the cut, unless a run
    /// `cuts_alike` by itself.
    pub fn flags(&self, cuts_alike: bool) -> Vec<String> {
        let mut values = Vec::new();
        if self.may_slice || self.layout.slices > 1 {
            values.push(format!("slices={}", self.layout.slices));
        }
        if self.may_split_head {
            let blocks: Vec<String> = self.head_blocks.iter().map(ToString::to_string).collect();
            let split = if blocks.is_empty() { "off".into() } else { blocks.join(",") };
            values.push(format!("head-split={split}"));
        }
        let out = self.out_to.as_ref().filter(|_| self.layout.out > 0);
        let out = out.map(|folder| {
            let colon = if self.layout.redone.is_some() { "," } else { ":" };
            let units = if self.layout.out_later { "later" } else { "all" };
            // Also where it is all: a file of settings may say otherwise.
            format!("{colon}out={folder},out-batches={},out-units={units}", self.layout.out)
        });
        let blocks: &[usize] = if cuts_alike { &[] } else { &self.blocks };
        self.layout.flags(blocks, &values, &out.unwrap_or_default())
    }
}

/// A layout that can be simulated.
pub struct Simulation<'a> {
    job: &'a Job,
    layout: &'a Layout,
    stages: &'a [Stage],
    costs: Costs,
    crowd: Option<Crowd>,
    /// One program, or two of shorter steps, with their shares of what follows from both.
    programs: Vec<Arc<Schedule>>,
    along: f64,
}

impl<'a> Simulation<'a> {
    /// Makes the layout's program.
    ///
    /// # Errors
    /// A shape that its schedule does not have.
    pub fn new(
        job: &'a Job,
        layout: &'a Layout,
        stages: &'a [Stage],
    ) -> Result<Simulation<'a>, PlanError> {
        Simulation::with(job, layout, stages, job.fixed.sync, &MadePrograms::default())
    }

    /// The same, of programs of which some are made.
    ///
    /// # Errors
    /// A shape that its schedule does not have.
    pub(crate) fn of(
        job: &'a Job,
        layout: &'a Layout,
        stages: &'a [Stage],
        made: &MadePrograms,
    ) -> Result<Simulation<'a>, PlanError> {
        Simulation::with(job, layout, stages, job.fixed.sync, made)
    }

    /// The same, with updates that are validated late or not.
    ///
    /// # Errors
    /// A shape that its schedule does not have.
    pub(crate) fn with(
        job: &'a Job,
        layout: &'a Layout,
        stages: &'a [Stage],
        sync: OptimizerSync,
        made: &MadePrograms,
    ) -> Result<Simulation<'a>, PlanError> {
        let costs = simulator(job, layout, stages);
        check_sums(&costs, layout.shape().micro_batches).map_err(|e| {
            let help = "use rates in FLOP/s and bytes/s, such as flops_per_s = 312e12";
            PlanError::new(format!("machine: {e}; {help}"))
        })?;
        let head_blocks = head_blocks(layout, stages);
        let runs_so = !head_blocks.is_empty() && job.fixed.head == HeadSplit::Auto;
        let of_run = || Costs {
            stages: times_by_flop(stages),
            memory: costs.memory.clone(),
            ..Costs::default()
        };
        let ordered = if runs_so { of_run() } else { costs.clone() };
        let again = layout.recomputed_of_all() * layout.slices;
        let weighed = generator_costs(&ordered, &costs.memory, again, None);
        let weighed = weighed.with_objective(sync.into());
        let tokens: Vec<u64> = stages[0].slices.iter().map(|slice| slice.tokens).collect();
        if layout.slices > 1 && tokens.is_empty() {
            let problem = format!("slices = {}: more than a sample has blocks", layout.slices);
            return Err(PlanError::new(problem));
        }
        // As NCCL's runs have it: a receive takes its memory earlier there.
        let one_order = job.compute.on_gpu;
        let program = |micro_batches: usize| {
            let shape = Shape { micro_batches, ..layout.shape() };
            let shape = Shape { unit: shape.unit.min(micro_batches), ..shape };
            let options = LowerOptions { sync, ..layout.lowering() };
            let recipe = Recipe::new(layout, shape, &tokens, options);
            made.of(recipe.filter(|_| head_blocks.is_empty()), || {
                let kind = layout.schedule;
                let made = match tokens.is_empty() && head_blocks.is_empty() {
                    true => generate_with_costs(kind, &shape, &weighed),
                    false => generate_cut(kind, &shape, &tokens, &head_blocks, Some(&weighed)),
                };
                let made = made.map_err(|e| PlanError::new(e.to_string()))?;
                let program = lower(&made, &options);
                Ok::<_, PlanError>(if one_order { in_issue_order(&program) } else { program })
            })
        };
        let (sizes, along) = sizes(layout);
        let programs = sizes.into_iter().map(program).collect::<Result<_, _>>()?;
        let crowd = Crowd::new(&job.machine, layout);
        Ok(Simulation { job, layout, stages, costs, crowd, programs, along })
    }

    /// The times of a program that its generator's tests verify; those that are shown are verified.
    fn timeline(&self, program: &Schedule, costs: &Costs) -> Timeline {
        times(program, costs).expect("a generated program, and costs for it")
    }

    /// The program verified, its times, and its memory over time.
    fn whole_timeline(&self, program: &Schedule) -> Timeline {
        simulate(program, &self.costs).expect("a generated program, and costs for it")
    }

    /// What the layout comes to, cut into `blocks`.
    pub fn planned(&self, blocks: &[usize]) -> Planned {
        let runs: Vec<(&Schedule, Timeline)> =
            self.programs.iter().map(|p| (&**p, self.timeline(p, &self.costs))).collect();
        let line = |of: &dyn Fn(&Schedule, &Timeline) -> f64| {
            let first = of(runs[0].0, &runs[0].1);
            runs.get(1).map_or(first, |(p, t)| first + self.along * (of(p, t) - first))
        };
        let step_s = line(&|p, t| self.step_s(p, &self.costs, t));
        let computed = line(&|_, t| computed_s(t));
        let work = line(&|_, t| busy_s(t).0);
        let held = self.held();
        Planned {
            layout: self.layout.clone(),
            blocks: blocks.to_vec(),
            head_blocks: head_blocks(self.layout, self.stages),
            may_slice: self.job.may_slice(self.layout),
            may_split_head: self.job.run_may_split_head(self.layout),
            out_to: self.job.fixed.out.as_ref().map(|place| place.name().to_owned()),
            on_host: self.layout.out > 0 && self.job.fixed.out == Some(OutPlace::Host)
                || self.job.fixed.states == Some(OutPlace::Host),
            step_s,
            bubble: (1.0 - work / computed).max(0.0),
            memory: held.iter().map(|rank| rank.at_once).collect(),
            peaks: held.iter().map(|rank| rank.peaks).collect(),
            traffic: self.traffic(),
            whole: self.programs.len() == 1,
        }
    }

    /// A number of what all ranks do: layouts that have it in common run the same actions on the
    /// same stages, whatever their kinds are called. It is one of this build, not to be kept.
    pub(crate) fn program_id(&self) -> u64 {
        let mut hash = DefaultHasher::new();
        (self.layout.of_stages(), self.along.to_bits()).hash(&mut hash);
        for program in &self.programs {
            (&program.placement, &program.ranks, &program.head_blocks).hash(&mut hash);
        }
        hash.finish()
    }

    /// What its ranks hold; of a longer step than the simulated ones, what grows with it, grows on.
    pub fn held(&self) -> Vec<HeldBytes> {
        let of = |program: &Schedule| memory::exact(self.job, self.layout, program, self.stages);
        let first = of(&self.programs[0]);
        let Some(second) = self.programs.get(1).map(|program| of(program)) else { return first };
        let both = first.iter().zip(&second);
        let on = |a: MemoryBytes, b: MemoryBytes| {
            let (from, to) = (a.activation as f64, b.activation as f64);
            let activation = a.activation.max((from + self.along * (to - from)) as u64);
            MemoryBytes { activation, ..b }
        };
        let both = both.map(|(a, b)| HeldBytes {
            at_once: on(a.at_once, b.at_once),
            peaks: on(a.peaks, b.peaks),
        });
        both.collect()
    }

    /// What the step's time is made of: each kind of wait is what the step is shorter by without
    /// it, one after the other.
    pub fn terms(&self) -> Terms {
        let first = self.terms_of(&self.programs[0]);
        let second = self.programs.get(1).map(|program| self.terms_of(program));
        second.map_or(first, |second| first.along(&second, self.along))
    }

    fn terms_of(&self, program: &Schedule) -> Terms {
        let mut costs = self.costs.clone();
        let mut last = self.step_s(program, &costs, &self.whole_timeline(program));
        let mut without = |change: &dyn Fn(&mut Costs)| {
            let before = costs.clone();
            change(&mut costs);
            if costs == before {
                return 0.0;
            }
            let now = self.step_s(program, &costs, &self.timeline(program, &costs));
            let saved = (last - now).max(0.0);
            last = now;
            saved
        };
        let here = Fixed { states: None, ..self.job.fixed.clone() };
        let here = Job { fixed: here, ..self.job.clone() };
        let states = match self.costs.states.is_empty() {
            true => 0.0,
            false => without(&|c| {
                c.states.clear();
                c.step_ns = step_ns(&here, self.layout, self.stages);
            }),
        };
        let optimizer = without(&|c| c.step_ns = 0);
        let replicas = without(&|c| c.stages.iter_mut().for_each(|s| s.replica_reduce_ns = 0));
        let reductions = without(&|c| c.stages.iter_mut().for_each(|s| s.reduce_scatter_ns = 0));
        let gathers = without(&|c| c.stages.iter_mut().for_each(|s| s.all_gather_ns = 0));
        let copies = without(&|c| c.file_bytes_per_s = None);
        let head_messages =
            without(&|c| c.memory.iter_mut().for_each(|s| s.head = HeadBytes::default()));
        let messages = without(&|c| c.link = LinkCosts::default());
        let bare = self.timeline(program, &costs);
        let (mean, most, again) = busy_s(&bare);
        let selective = self.selective_s(program);
        Terms {
            compute: mean - again - selective,
            recompute: again,
            selective,
            imbalance: most - mean,
            bubble: (self.step_s(program, &costs, &bare) - most).max(0.0),
            copies,
            states,
            messages,
            head_messages,
            gathers,
            reductions,
            replicas,
            optimizer,
        }
    }

    /// Seconds of a rank's backwards that make again what F did not keep, on average.
    fn selective_s(&self, program: &Schedule) -> f64 {
        let ranks = program.ranks.iter().enumerate();
        let backwards = ranks.flat_map(|(rank, all)| {
            let of = move |task: Task| (program.cell(rank, task.stage), task);
            all.iter().flat_map(Action::computes).map(of)
        });
        let backwards = backwards.filter(|(_, t)| matches!(t.kind, Compute::B | Compute::BW));
        let all: u64 = backwards.map(|(cell, _)| self.stages[cell].again_ns).sum();
        all as f64 / 1e9 / (program.pp() * program.slices_per_sample()) as f64
    }

    /// Seconds of a step: to the end of the optimizer's, at which all ranks meet; or, where they do
    /// not, from one step to the next in a long run.
    fn step_s(&self, program: &Schedule, costs: &Costs, timeline: &Timeline) -> f64 {
        let alone = match program.validates_late() {
            true => step_period_ns(program, costs) as f64 / 1e9,
            false => end_s(timeline),
        };
        let crowded = self.crowd.map_or(1.0, |crowd| crowd.stretch(timeline));
        alone * crowded * contended(self.job.machine.contention, timeline)
    }

    /// What the actions of the program send, over the links that its times follow from.
    fn traffic(&self) -> RankTraffic {
        let links = Links::new(&self.job.machine, self.layout);
        let sent: Vec<Sent> = self.stages.iter().map(|s| s.sent(self.layout)).collect();
        let tree = self.programs.first().and_then(|program| HeadTree::of(program));
        let share = |leaves: bool| f64::from(u8::from(leaves));
        let of_action = |program: &Schedule, rank: usize, action: &Action| {
            let (bytes, between) = match *action {
                Action::AllGather { stage } => {
                    (sent[program.cell(rank, stage)].gather, links.zero3_between)
                }
                Action::ReduceScatter { stage } => {
                    (sent[program.cell(rank, stage)].reduce, links.zero3_between)
                }
                Action::ReplicaReduce { stage } => {
                    (sent[program.cell(rank, stage)].replicas, links.replicas_between)
                }
                Action::Send { message, stage, micro_batch } => {
                    let of = &self.stages[stage];
                    let slice = of.slices.get(micro_batch % self.layout.slices);
                    let bytes = slice.map_or(of.bytes, |slice| slice.bytes).message;
                    let to = program.destination(message, stage);
                    (bytes as f64, share(to.is_some_and(|to| links.leaves_node(rank, to))))
                }
                Action::SendHead { message, micro_batch, peer, .. } => {
                    let edge =
                        tree.as_ref().and_then(|t| Some(&t.edges[t.edge(message, rank, peer)?]));
                    let of = &self.stages[program.cell(rank, program.stages())];
                    let slice = of.slices.get(micro_batch % self.layout.slices);
                    let head = slice.map_or(of.bytes, |slice| slice.bytes).head;
                    let bytes = edge.map_or(0, |edge| head.message(message, edge.tensors));
                    (bytes as f64, share(links.leaves_node(rank, peer)))
                }
                _ => return RankTraffic::default(),
            };
            RankTraffic::shared(bytes, between)
        };
        let of = |program: &Schedule| {
            let mut all = RankTraffic::default();
            for (rank, actions) in program.ranks.iter().enumerate() {
                for action in actions {
                    let RankTraffic { inside, between } = of_action(program, rank, action);
                    all.inside += inside;
                    all.between += between;
                }
            }
            all
        };
        let all: Vec<RankTraffic> = self.programs.iter().map(|program| of(program)).collect();
        let update = sent.iter().map(|sent| sent.update).sum();
        let update = RankTraffic::shared(update, links.replicas_between);
        let mean = |part: fn(&RankTraffic) -> f64| {
            let first = part(&all[0]);
            let more = all.get(1).map_or(0.0, |second| self.along * (part(second) - first));
            (first + more + part(&update)) / self.layout.pp as f64
        };
        RankTraffic { inside: mean(|t| t.inside), between: mean(|t| t.between) }
    }

    /// The program that is simulated, and its run: the whole step, or the longer of the two.
    pub fn run(&self) -> (Schedule, Timeline, Costs) {
        let program = self.programs.last().expect("one or two");
        let states: Vec<_> = self.stages.iter().map(|stage| &stage.state).collect();
        let (cut, save) = (self.job.cut(self.layout), self.job.state.save);
        let ranks = memory::rank_states(&states, program, cut, save);
        let memory = memory::with_updates(&self.costs.memory, &ranks, program);
        let costs = Costs { memory, ..self.costs.clone() };
        (Schedule::clone(program), self.whole_timeline(program), costs)
    }
}

/// Blocks of each rank's slice of a head, behind the stages of a layout.
fn head_blocks(layout: &Layout, stages: &[Stage]) -> Vec<usize> {
    stages.iter().skip(layout.stages()).map(|slice| slice.head_blocks).collect()
}

/// Actions of what is simulated of a layout, about.
pub(crate) fn actions(layout: &Layout) -> usize {
    let slices = layout.slices;
    sizes(layout).0.iter().map(|batches| layout.stages() * batches * slices * 7).sum()
}

/// The numbers of micro-batches to simulate, and how far the whole step lies along from the first
/// to the second.
fn sizes(layout: &Layout) -> (Vec<usize>, f64) {
    let b = layout.micro_batches;
    // F, B, W, perhaps R, two messages each way.
    let actions = layout.stages() * b * layout.slices * 7;
    if layout.slices > 1 {
        return sizes_in_slices(layout, actions);
    }
    let period = if layout.in_units() { layout.unit } else { layout.pp };
    // One stage a rank, and W that fill waits, settle sooner than stages by turns.
    let in_rounds = Kind::find(layout.schedule).is_some_and(|k| k.step == StepForm::Rounds);
    let settled = layout.virtual_stages == 1 || in_rounds && layout.splits();
    let shortest = if layout.in_units() || settled { 2 } else { 4 } * period + b % period;
    if actions <= ACTIONS_MAX || shortest + period >= b {
        return (vec![b], 0.0);
    }
    let along = ((b - shortest) / period) as f64;
    (vec![shortest, shortest + period], along)
}

/// The same where samples are cut into slices: a rank has little more than a sample on the way.
fn sizes_in_slices(layout: &Layout, actions: usize) -> (Vec<usize>, f64) {
    let b = layout.micro_batches;
    let period = if layout.in_units() { layout.unit } else { 1 };
    let shortest = 2 * period + layout.pp.div_ceil(layout.slices) + b % period;
    if actions <= ACTIONS_MAX || shortest + period >= b {
        return (vec![b], 0.0);
    }
    (vec![shortest, shortest + period], ((b - shortest) / period) as f64)
}

/// The end of the optimizer's step.
pub(crate) fn end_s(timeline: &Timeline) -> f64 {
    timeline.end_ns() as f64 / 1e9
}

/// From the first start to the last end of a compute.
fn computed_s(timeline: &Timeline) -> f64 {
    let spans = || timeline.ranks.iter().filter_map(|r| r.own_span());
    let (start, end) = (spans().map(|s| s.0).min(), spans().map(|s| s.1).max());
    (end.unwrap_or(0) - start.unwrap_or(0)) as f64 / 1e9
}

/// Seconds that a rank computes on average, that the busiest one computes, and that a rank
/// recomputes on average.
fn busy_s(timeline: &Timeline) -> (f64, f64, f64) {
    let busy: Vec<f64> = timeline.ranks.iter().map(|r| r.busy_ns() as f64 / 1e9).collect();
    let ranks = busy.len().max(1) as f64;
    let again = timeline
        .ranks
        .iter()
        .flat_map(|r| &r.spans)
        .filter(|s| matches!(s.action, Action::Compute { kind: Compute::R, .. }));
    let again: u64 = again.map(|s| s.end_ns - s.start_ns).sum();
    let most = busy.iter().copied().fold(0.0, f64::max);
    (busy.iter().sum::<f64>() / ranks, most, again as f64 / 1e9 / ranks)
}
