//! Everything that follows from a configuration and a model before a rank starts: stages, the
//! verified program of every rank, predicted memory and bubble.

use std::ops::Range;
use std::sync::Arc;

use crate::config::{Config, ConfigError, EngineKind, PackWeights};
use burn::tensor::DType;
use zeropp_comm::mesh::Mesh;
use zeropp_core::device;
use zeropp_core::layer::{BatchShape, Model, Part};
use zeropp_core::metrics::{EvaluationPlan, Plan, RankPlan};
use zeropp_core::optimizer::{Cut, Out, Shares};
use zeropp_pipeline::costs::Table;
use zeropp_pipeline::ir::{Action, Schedule};
use zeropp_pipeline::memory::{HeldBytes, StageBytes, predict_at_once};
use zeropp_pipeline::simulate::{Costs, StageCosts};
use zeropp_pipeline::timeline::Timeline;
use zeropp_plan::bytes::{LayerSizes, RankState, StageForm, StageState, is_behind};
use zeropp_plan::cutter::Stages;
use zeropp_plan::memory::{of_ranks, rank_states};
use zeropp_plan::parts::Parts;
use zeropp_plan::programs::Programs;
use zeropp_plan::recompute::Recomputed;
use zeropp_plan::slices::SampleSlices;
use zeropp_plan::split::tie_slices;
use zeropp_zero3::checkpoint::Base;
use zeropp_zero3::{Tie, TiedRows};

use crate::Error;
use crate::own::CustomParts;
use crate::plan::head::HeadPlan;
use crate::plan::needs::Needs;
use crate::plan::program::{Resolved, shape};
use crate::plan::times::ActionTimes;
use crate::plan::{cut, disk, evaluation, limit, memory, replicas, sizes, slices};

/// What every rank builds from.
#[derive(Clone)]
pub(crate) struct Blueprint {
    pub(crate) config: Config,
    pub(crate) mesh: Mesh,
    pub(crate) model: Model,
    /// The model's parts as predictions see them.
    pub(crate) parts: Parts,
    /// Parts of each stage.
    pub(crate) stages: Stages,
    /// The lowered, verified programs.
    pub(crate) programs: Programs,
    /// The programs of a validation loss, where one is measured.
    pub(crate) evaluation: Option<Programs>,
    pub(crate) recomputed: Recomputed,
    /// Whether that was chosen by the memory that there is.
    pub(crate) recompute_chosen: bool,
    /// Whether the slices of the head were chosen.
    pub(crate) split_chosen: bool,
    /// Whether the slices of samples were chosen.
    pub(crate) slices_chosen: bool,
    pub(crate) compute: DType,
    pub(crate) batch: BatchShape,
    pub(crate) times: ActionTimes,
    pub(crate) plan: Plan,
    pub(crate) own: CustomParts,
    /// How samples are cut into slices, where they are.
    pub(crate) slices: Option<Arc<SampleSlices>>,
    /// The slices of the head, where it is split.
    pub(crate) head: Option<Arc<HeadPlan>>,
    /// Where what does not train is from, if the run has looked.
    pub(crate) base: Option<Base>,
}

impl Blueprint {
    pub(crate) fn new(
        config: &Config,
        model: Model,
        own: &CustomParts,
    ) -> Result<Blueprint, Error> {
        let resolved = Resolved::new(config, own.schedule.as_deref())?;
        let config = &resolved.config;
        let batch = config.compute().batch(config.micro_batch_size, config.seq);
        sizes::check(config, &model, batch)?;
        check_names(&model)?;
        check_out(config, &model)?;
        let whole = parts(&model, batch);
        let given = &resolved.sample_slices;
        let slices = slices::of_run(config, given, &model, &whole, |batch| parts(&model, batch))?;
        let (parts, slices) = (whole, slices.map(Arc::new));
        let tokens = slices.as_ref().map_or(&[][..], |slices| slices.tokens());
        let resolved = resolved.clone().with_slices(tokens);
        let rule = config.run_state_with(own.parameters(config).rule).rule;
        let cutter = cut::cutter(&resolved, &parts, &rule)?;
        let made_of = |stages: Stages| {
            let costs = cut::costs_of(&resolved, &cutter, &stages)?;
            Self::of(&resolved, own, &model, &parts, &slices, stages, costs.as_ref())
        };
        let first = made_of(cut::first(config, &cutter)?)?;
        let mut made = cutter.within_memory(first, Self::held, made_of)?;
        if config.pack_weights == PackWeights::Auto
            && made.packs_weights()
            && memory::is_short(&made.needs())
        {
            let without = Config { pack_weights: PackWeights::Off, ..config.clone() };
            return Self::new(&without, made.model, own);
        }
        cut::tell(config, &cutter, &made.stages, &mut made.plan);
        Ok(made)
    }

    /// The same with these stages, which take what `table` says, if there is one.
    fn of(
        resolved: &Resolved,
        own: &CustomParts,
        model: &Model,
        parts: &Parts,
        slices: &Option<Arc<SampleSlices>>,
        stages: Stages,
        table: Option<&Table>,
    ) -> Result<Blueprint, Error> {
        let config = &resolved.config;
        let batch = config.compute().batch(config.micro_batch_size, config.seq);
        let of_slice = |tokens: &u64| config.sample_of(*tokens as usize);
        let cut: Vec<_> = match slices {
            Some(slices) => slices.tokens().iter().map(of_slice).collect(),
            None => vec![batch],
        };
        let mut blueprint = Blueprint {
            config: config.clone(),
            mesh: config.mesh(),
            model: model.clone(),
            parts: parts.clone(),
            stages,
            programs: Programs::default(),
            evaluation: None,
            recomputed: Recomputed::default(),
            recompute_chosen: false,
            split_chosen: false,
            slices_chosen: false,
            compute: config.compute_type(),
            batch,
            times: ActionTimes::default(),
            plan: Plan::default(),
            own: own.clone(),
            slices: slices.clone(),
            head: HeadPlan::new(resolved, own, model, batch, &cut)?.map(Arc::new),
            base: None,
        };
        let stages = blueprint.stages.len();
        blueprint.recomputed = Recomputed::before(blueprint.config.recompute, stages);
        let bytes = blueprint.all_bytes();
        let recomputed = &blueprint.recomputed.whole;
        let stages: Vec<_> = (0..stages).map(|stage| blueprint.parts_of(stage)).collect();
        let mut estimates = parts.estimates(&stages, |s| recomputed.contains(&s));
        let last = estimates.last().copied().unwrap_or_default();
        let split = blueprint.head.as_ref().map(|head| head.times(parts, &last));
        estimates.extend(blueprint.head.iter().flat_map(|head| head.estimates(parts)));
        if let Some(slices) = slices {
            estimates = slices.times(estimates, blueprint.stages.len());
        }
        let split = split.as_ref();
        blueprint.times = ActionTimes::new(&blueprint.config, table, estimates, &bytes, split)?;
        let costs = resolved.generator_costs(&blueprint.times.costs, &bytes);
        let programs = replicas::programs(resolved, &costs)?;
        let measures = own.measures(&blueprint.config);
        blueprint.evaluation = evaluation::programs(&blueprint.config, &programs, measures)?;
        blueprint.programs = programs;
        blueprint.recomputed = Recomputed::new(blueprint.config.recompute, blueprint.schedule());
        blueprint.plan = blueprint.make_plan(batch)?;
        Ok(blueprint)
    }

    /// The programs of a replica with the most micro-batches, as the first is.
    pub(crate) fn schedule(&self) -> &Schedule {
        &self.programs.most
    }

    /// The same run with another partition, by the first part of each stage, and other programs.
    ///
    /// # Errors
    /// What does not suit this run's model or settings, in words.
    pub(crate) fn with_programs(
        &self,
        cuts: &[usize],
        all: Vec<Schedule>,
    ) -> Result<Blueprint, String> {
        let parts = self.model.parts.len();
        let ends = cuts.iter().skip(1).copied().chain([parts]);
        let stages: Vec<_> = cuts.iter().zip(ends).map(|(start, end)| *start..end).collect();
        if cuts.first() != Some(&0) || stages.iter().any(|s| s.is_empty() || s.end > parts) {
            return Err(format!("stages from parts {cuts:?} on, of a model with {parts}"));
        }
        let foreign = all.iter().any(|schedule| schedule.stages() != stages.len());
        if stages.len() != self.stages.len() || foreign {
            return Err(format!("{} stages, and {} here", stages.len(), self.stages.len()));
        }
        let cut = self.slices.as_ref().map_or(&[][..], |slices| slices.tokens());
        if all.iter().any(|schedule| schedule.sample_slices != cut) {
            return Err(format!("other slices of a sample than {cut:?}"));
        }
        let programs = replicas::given(&self.config, all)?;
        let unit = Some(programs.most.units[0] / programs.most.slices_per_sample());
        let recomputed = Recomputed::new(self.config.recompute, &programs.most);
        let config = Config { unit, ..self.config.clone() };
        let measures = self.own.measures(&config);
        let evaluation =
            evaluation::programs(&config, &programs, measures).map_err(|e| e.to_string())?;
        let mut taken =
            Blueprint { config, stages, programs, evaluation, recomputed, ..self.clone() };
        taken.plan = taken.make_plan(self.batch).map_err(|e| e.to_string())?;
        Ok(taken)
    }

    /// The same run with other stages, by the first part of each, that run `program`.
    ///
    /// # Errors
    /// As [`with_programs`](Self::with_programs).
    pub(crate) fn recut(&self, starts: &[usize], program: Schedule) -> Result<Blueprint, String> {
        let mut made = self.with_programs(starts, vec![program])?;
        let stages: Vec<_> = (0..made.stages.len()).map(|stage| made.parts_of(stage)).collect();
        let whole = &made.recomputed.whole;
        made.times.costs.stages = self.parts.estimates(&stages, |s| whole.contains(&s));
        made.times.source = "estimated from FLOP, of stages that were cut anew".into();
        made.plan = made.make_plan(self.batch).map_err(|e| e.to_string())?;
        (made.plan.cut, made.plan.blocks) = ("by the run's own times".into(), made.blocks());
        Ok(made)
    }

    /// First part of each stage.
    pub(crate) fn starts(&self) -> Vec<usize> {
        self.stages.iter().map(|stage| stage.start).collect()
    }

    /// Blocks of each stage.
    pub(crate) fn blocks(&self) -> Vec<usize> {
        self.parts.groups().sizes(&self.stages)
    }

    /// Whether gathered weights are kept as products read them: bf16 on the CPU, and by itself
    /// where a gather serves several micro-batches.
    pub(crate) fn packs_weights(&self) -> bool {
        self.config.packed_bytes() > 0
    }

    /// The weight that embedding and a whole head share, if they do.
    pub(crate) fn tie(&self) -> Option<Tie> {
        let placement = &self.schedule().placement;
        let last = self.stages.len() - 1;
        (self.parts.trains_tied() && self.head.is_none()).then(|| Tie {
            first: (0, 0),
            last: (last, self.stages[last].len() - 1),
            ranks: (placement[0], placement[last]),
        })
    }

    /// The weight that embedding and slices of a head share, if they do.
    pub(crate) fn tied_rows(&self) -> Option<TiedRows> {
        let head = self.head.as_ref().filter(|_| self.parts.trains_tied())?;
        let rows = head.shared_rows(self.schedule().placement[0], self.cut().pieces());
        Some(TiedRows { embedding: (0, 0), slices: self.stages.len(), rows: Arc::new(rows) })
    }

    /// Bytes that the rank with the embedding exchanges for a tied weight at the end of a step, in
    /// messages that follow each other.
    pub(crate) fn exchanged_bytes(&self) -> u64 {
        let pieces = self.cut().pieces();
        if let Some(TiedRows { rows, .. }) = self.tied_rows() {
            let each = (0..pieces).map(|piece| rows.message_bytes(rows.owner, piece));
            return 2 * each.max().unwrap_or(0);
        }
        let is_parted = self.tie().is_some_and(|tie| tie.ranks.0 != tie.ranks.1);
        if is_parted { 4 * self.parts.layers()[0].trained(pieces) / pieces as u64 } else { 0 }
    }

    /// What the memory of its ranks is predicted from.
    pub(crate) fn needs(&self) -> Needs<'_> {
        Needs { config: &self.config, ranks: &self.plan.ranks }
    }

    /// What is known of a validation loss before the run: `batches` of it predict `tokens`.
    pub(crate) fn evaluation_plan(&self, batches: u64, tokens: u64) -> Option<EvaluationPlan> {
        let programs = self.evaluation.as_ref()?;
        let costs = self.in_layers(&self.times.costs);
        let simulated = programs.simulated(&costs).expect("verified, with these costs");
        // More micro-batches never take less of what forwards hold.
        let program = &programs.most;
        let held = predict_at_once(program, &self.all_bytes());
        let ranks = self.plan.ranks.iter().zip(self.rank_states());
        let held = held.iter().zip(ranks).map(|(held, (rank, state))| {
            let at_once = &rank.held.at_once;
            let gradient = at_once.gradient_shard.max(state.gradient_due());
            at_once.parameter_shard + gradient + state.optimizer_kept() + held.total()
        });
        let gathers = program.ranks[0].iter().filter(|a| matches!(a, Action::AllGather { .. }));
        Some(EvaluationPlan {
            every: self.config.eval_every,
            batches,
            tokens,
            all_gathers_per_rank: gathers.count() as u64,
            bubble: simulated.bubble(),
            held: held.collect(),
        })
    }

    /// The stages of each rank, with what it is predicted to hold.
    pub(crate) fn held(&self) -> (Stages, Vec<(Vec<usize>, HeldBytes)>) {
        let of = |rank: &RankPlan| {
            // Slices of a split head are no stage of the cut.
            let stages = rank.stages.iter().map(|(stage, _)| *stage);
            let stages = stages.filter(|stage| *stage < self.stages.len()).collect();
            (stages, rank.held)
        };
        (self.stages.clone(), self.plan.ranks.iter().map(of).collect())
    }

    /// Equal pieces that every flat buffer can be cut into.
    pub(crate) fn layout_pieces(&self) -> usize {
        self.cut().pieces()
    }

    /// The ranks that share a stage.
    pub(crate) fn cut(&self) -> Cut {
        let zero1 = self.config.zero1;
        let owners = if zero1 { self.mesh.dp } else { 1 };
        let out = self.states_out().beside(self.mesh.dp);
        Cut { zero3: self.mesh.zero3, owners, zero1, out, host: self.config.states_on_host() }
    }

    /// What of states is out of memory, where there are no other replicas.
    pub(crate) fn states_out(&self) -> Out {
        let config = &self.config;
        let run = config.run_state_with(self.own.parameters(config).rule);
        let of_a_rank = config.states_on_host().then(|| self.stages.len() / self.mesh.pp);
        let behind = is_behind(&run, config.zero1, self.parts.trains_tied(), of_a_rank);
        config.states_out().updated(behind)
    }

    fn make_plan(&self, batch: BatchShape) -> Result<Plan, Error> {
        let bytes = self.all_bytes();
        let ranks = self.rank_states();
        let held = of_ranks(self.programs.each(), &bytes, &ranks);
        let simulated = self.simulated(&Costs { memory: bytes, ..self.times.costs.clone() });
        limit::check(&self.config, &simulated)?;
        let bubble = simulated.bubble();
        let program = &self.schedule().ranks[0];
        let count = |f: fn(&Action) -> bool| program.iter().filter(|a| f(a)).count() as u64;
        Ok(Plan {
            pp: self.mesh.pp,
            zero3: self.mesh.zero3,
            dp: self.mesh.dp,
            schedule: self.schedule().kind.clone(),
            virtual_stages: self.config.virtual_stages(),
            units: self.units_of_samples(),
            micro_batches: self.config.deal().to_vec(),
            micro_batch_size: self.config.micro_batch_size,
            seq: self.config.seq,
            parameters: self.model.parameter_count(),
            flops_per_token: self.model.flops_per_token(batch),
            bubble,
            costs: self.times.source.clone(),
            all_gathers_per_rank: count(|a| matches!(a, Action::AllGather { .. })),
            reduce_scatters_per_rank: count(|a| matches!(a, Action::ReduceScatter { .. })),
            optimizer_gathers_per_rank: ranks.iter().map(|rank| rank.gathers).max().unwrap_or(0),
            optimizer_bytes_per_rank: ranks.iter().map(|rank| rank.sent).max().unwrap_or(0),
            ranks: (0..self.mesh.pp).map(|p| self.rank_plan(p, &ranks[p], &held[p])).collect(),
            notes: self.notes(batch),
            ..Plan::default()
        })
    }

    /// Micro-batches of each unit; samples where these are cut.
    fn units_of_samples(&self) -> Vec<usize> {
        let slices = self.schedule().slices_per_sample();
        self.schedule().units.iter().map(|unit| unit / slices).collect()
    }

    /// What the settings do not do here, or what others would do better.
    fn notes(&self, batch: BatchShape) -> Vec<String> {
        let mut costs = self.model.parts.iter().map(|p| p.cost(batch));
        let saves = costs.any(|c| c.activation_bytes_selective < c.activation_bytes);
        let recompute = self.config.recompute;
        let recompute = self.recomputed.note(recompute, saves, self.schedule());
        let unit = self.config.kind().and_then(|kind| (kind.note)(&shape(&self.config)));
        let batch = self.config.global_batch_note();
        let Config { engine, device, .. } = self.config;
        let gpus = device::gpus(device).len();
        let by_host = engine == EngineKind::Threads && gpus > 1 && self.mesh.world() > 1;
        let by_host = by_host.then(|| {
            format!(
                "engine = {engine}: tensors between this machine's {gpus} GPUs go through the \
                 memory of the host; nccl sends them directly"
            )
        });
        let in_memory = disk::note(&self.config);
        [recompute, unit, batch, by_host, in_memory].into_iter().flatten().collect()
    }

    fn rank_plan(&self, pp: usize, state: &RankState, held: &HeldBytes) -> RankPlan {
        let mine = self.layers_of(self.schedule(), pp);
        let names = |layers: &[Part]| layers.iter().map(|p| p.name().to_string()).collect();
        let all = mine.iter().flat_map(|(_, layers)| layers).flat_map(Part::parameters);
        RankPlan {
            pp,
            stages: mine.iter().map(|(stage, layers)| (*stage, names(layers))).collect(),
            parameters: all.map(|p| p.len() as u64).sum(),
            saved: state.saved(),
            held: *held,
        }
    }

    /// What every pipeline rank has all the time.
    pub(crate) fn rank_states(&self) -> Vec<RankState> {
        let rule = self.own.parameters(&self.config).rule;
        let run = self.config.run_state_with(rule);
        let (cut, parts) = (self.cut(), &self.parts);
        let tied = self.tied_rows();
        let shares = |part: usize| match part == 0 && tied.is_some() {
            true => Shares::default(),
            false => parts.layers()[part].shares(&run, cut, parts.is_tied_head(part)),
        };
        let state = |stage: usize| parts.stage_state(self.parts_of(stage), cut, shares);
        let mut stages: Vec<_> = (0..self.stages.len()).map(state).collect();
        if let Some(head) = &self.head {
            stages.extend(head.states(cut.pieces(), |slice| slice.shares(&run, cut, false)));
        }
        if let Some(TiedRows { slices, rows, .. }) = &tied {
            let embedding = parts.layers()[0].trained(cut.pieces());
            let mut states: Vec<_> = stages.iter_mut().collect();
            tie_slices(&mut states, *slices, embedding, rows);
        }
        let stages: Vec<&StageState> = stages.iter().collect();
        rank_states(&stages, self.schedule(), cut, run.save)
    }

    /// The model's parts of a stage: all of it, but for a head that is split.
    pub(crate) fn parts_of(&self, stage: usize) -> Range<usize> {
        let Range { start, end } = self.stages[stage].clone();
        let splits = self.head.is_some() && stage + 1 == self.stages.len();
        start..if splits { end - 1 } else { end }
    }

    /// The stages of a pipeline rank, with their layers; its slice of a split head is the last.
    pub(crate) fn layers_of(&self, schedule: &Schedule, pp: usize) -> Vec<(usize, Vec<Part>)> {
        let layers = |stage| (stage, self.model.parts[self.parts_of(stage)].to_vec());
        let slice = self.head.as_ref().and_then(|head| head.slices[pp].clone());
        let slice = slice.map(|slice| (self.stages.len(), vec![Part::Slice(slice)]));
        schedule.stages_of(pp).into_iter().map(layers).chain(slice).collect()
    }

    fn form(&self, stage: usize) -> StageForm {
        let element_bytes = self.compute.size();
        StageForm {
            cut: self.cut(),
            is_summed: self.mesh.dp > 1,
            selective: self.recomputed.selective.contains(&stage),
            whole: self.recomputed.whole.contains(&stage),
            element_bytes,
            packed_bytes: self.config.packed_bytes(),
            message: (self.batch.tokens() * self.model.hidden * element_bytes) as u64,
            is_first: stage == 0,
        }
    }

    /// Predicted bytes of every stage, and behind them of each rank's slice of a split head; where
    /// samples are cut, of every stage and slice.
    pub(crate) fn all_bytes(&self) -> Vec<StageBytes> {
        let stages: Stages = (0..self.stages.len()).map(|stage| self.parts_of(stage)).collect();
        let mut all = match &self.slices {
            Some(slices) => slices.bytes(&stages, |stage| self.form(stage)),
            None => {
                let each = stages.iter().cloned().enumerate();
                each.map(|(s, parts)| self.parts.stage_bytes(parts, &self.form(s))).collect()
            }
        };
        let (form, tokens) = (self.form(stages.len()), self.batch.tokens());
        all.extend(self.head.iter().flat_map(|head| head.bytes(&form, tokens)));
        all
    }

    fn simulated(&self, costs: &Costs) -> Timeline {
        let simulated = self.programs.simulated(&self.in_layers(costs));
        simulated.expect("the program is verified and the costs fit it")
    }

    /// The same costs, of stages with the layers that they have.
    fn in_layers(&self, costs: &Costs) -> Costs {
        let stages: Vec<_> = (0..self.stages.len()).map(|stage| self.parts_of(stage)).collect();
        let layers = self.parts.layer_shares(&stages, self.cut().pieces());
        Costs { layers, ..costs.clone() }
    }

    /// Simulated time of a step's actions, ns.
    pub(crate) fn step_ns(&self) -> u64 {
        let memory = vec![StageBytes::default(); self.schedule().cost_entries()];
        self.step_of(&Costs { memory, ..self.times.costs.clone() })
    }

    /// The same with these costs of its stages and slices.
    pub(crate) fn step_of(&self, costs: &Costs) -> u64 {
        self.simulated(costs).end_ns()
    }

    /// The schedule's `bubble` with measured times of each stage, and messages, gathers and
    /// reductions that take none; memory plays no part in it.
    pub(crate) fn timed_bubble(&self, mut stages: Vec<StageCosts>) -> f64 {
        let blocks = &self.schedule().head_blocks;
        if !blocks.is_empty() {
            // The mean over all ranks' slices.
            let slice = stages.pop().unwrap_or_default();
            let ranks = blocks.iter().filter(|n| **n > 0).count() as u64;
            let all = blocks.iter().sum::<usize>().max(1) as u64;
            let of = |ns: u64, n: usize| ns * ranks * n as u64 / all;
            stages.extend(blocks.iter().map(|n| StageCosts {
                f_ns: of(slice.f_ns, *n),
                b_ns: of(slice.b_ns, *n),
                w_ns: of(slice.w_ns, *n),
                ..StageCosts::default()
            }));
        }
        if let Some(slices) = &self.slices {
            // Means of a slice.
            let n = slices.tokens().len() as u64;
            let of_sample = |mean: StageCosts| StageCosts {
                f_ns: mean.f_ns * n,
                b_ns: mean.b_ns * n,
                w_ns: mean.w_ns * n,
                r_ns: mean.r_ns * n,
                ..mean
            };
            let whole = stages.into_iter().map(of_sample).collect();
            stages = slices.times(whole, self.stages.len());
        }
        let memory = vec![StageBytes::default(); stages.len()];
        self.simulated(&Costs { stages, memory, ..Costs::default() }).bubble()
    }
}

/// The model's parts as predictions see them.
fn parts(model: &Model, batch: BatchShape) -> Parts {
    let (is_tied, last) = (model.is_tied(), model.parts.len().saturating_sub(1));
    let parts = model.parts.iter().enumerate();
    let layer = |(i, part): (usize, &Part)| {
        let role = part.role(is_tied && i == last);
        (LayerSizes::new(part.parameters(), role, part.cost(batch)), part.is_block())
    };
    Parts::new(parts.map(layer).collect(), is_tied, batch.tokens())
}

/// Parameter names must be unique, but for the weight that embedding and head share.
fn check_names(model: &Model) -> Result<(), Error> {
    let mut seen = std::collections::HashSet::new();
    let tied = model.is_tied();
    let last = model.parts.len().saturating_sub(1);
    for (i, part) in model.parts.iter().enumerate() {
        for p in part.parameters() {
            if p.is_empty() {
                return Err(Error::Model(format!("parameter {} has no elements", p.name)));
            }
            let shared = tied && i == last;
            if !seen.insert(p.name.clone()) && !shared {
                let why = "two layers declare it; give each layer its own name";
                return Err(Error::Model(format!("parameter {}: {why}", p.name)));
            }
        }
    }
    Ok(())
}

/// What is copied out of memory is what split operations keep.
fn check_out(config: &Config, model: &Model) -> Result<(), Error> {
    let Some(folder) = &config.recompute_out else { return Ok(()) };
    let Some(part) = model.parts.iter().find(|part| !part.is_split()) else { return Ok(()) };
    let problem = format!(
        "layer {} is not made of split operations alone, and what it keeps stays in memory",
        part.name()
    );
    let help = "leave it out, or write the layer with zeropp_core::split::ops";
    Err(ConfigError::value("recompute:out", folder.display(), problem, help).into())
}
