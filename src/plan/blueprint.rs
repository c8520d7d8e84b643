//! Everything that follows from a configuration and a model before a rank starts: stages, the
//! verified program of every rank, predicted memory and bubble.

use crate::config::{Config, ConfigError, DeviceKind, PackWeights, Precision};
use burn::tensor::DType;
use zeropp_comm::mesh::Mesh;
use zeropp_core::kernels::bf16::Packed;
use zeropp_core::layer::{BackwardPeak, BatchShape, LayerCost, Model, Part};
use zeropp_core::meter::MemoryBytes;
use zeropp_core::metrics::{Plan, RankPlan};
use zeropp_core::params::FlatLayout;
use zeropp_core::split::ops::attention_keeps_probabilities;
use zeropp_pipeline::costs::Table;
use zeropp_pipeline::ir::{Action, Schedule};
use zeropp_pipeline::memory::{HeldBytes, StageBytes, predict, predict_at_once, predict_warm_up};
use zeropp_pipeline::schedules::unit_note;
use zeropp_pipeline::simulate::{Costs, StageCosts};
use zeropp_pipeline::timeline::Timeline;
use zeropp_zero3::Tie;
use zeropp_zero3::checkpoint::{Base, WRITER_BYTES};
use zeropp_zero3::held::{Cut, LayerBytes, layer_bytes};

use crate::Error;
use crate::own::Own;
use crate::plan::cut::{Cutter, Stages};
use crate::plan::program::{Resolved, generator_costs, shape};
use crate::plan::recompute::Recomputed;
use crate::plan::replicas::Programs;
use crate::plan::times::{Times, estimates};
use crate::plan::{evaluation, limit, memory, sizes};

/// What every rank builds from.
#[derive(Clone)]
pub(crate) struct Blueprint {
    pub(crate) config: Config,
    pub(crate) mesh: Mesh,
    pub(crate) model: Model,
    /// Parts of each stage.
    pub(crate) stages: Stages,
    /// The lowered, verified programs.
    pub(crate) programs: Programs,
    /// The programs of a validation loss, where one is measured.
    pub(crate) evaluation: Option<Programs>,
    pub(crate) recomputed: Recomputed,
    pub(crate) compute: DType,
    pub(crate) batch: BatchShape,
    pub(crate) times: Times,
    pub(crate) plan: Plan,
    pub(crate) own: Own,
    /// Where what does not train is from, if the run has looked.
    pub(crate) base: Option<Base>,
}

/// What the optimizer of a rank takes.
#[derive(Clone, Copy, Debug, Default)]
struct OptimizerTakes {
    /// Bytes from step to step.
    kept: u64,
    /// Bytes while it is at work, those included.
    at_work: u64,
    /// All-gathers of a step that make matrices whole.
    gathers: u64,
    /// Bytes sent for them.
    sent: u64,
}

impl Blueprint {
    pub(crate) fn new(config: &Config, model: Model, own: &Own) -> Result<Blueprint, Error> {
        let resolved = Resolved::new(config)?;
        let config = &resolved.config;
        let compute = match config.precision {
            Precision::Fp32 => DType::F32,
            Precision::Bf16 => DType::BF16,
        };
        let on_gpu = config.device != DeviceKind::Cpu;
        let batch = BatchShape {
            samples: config.micro_batch_size,
            seq: config.seq,
            element_bytes: compute.size(),
            keeps_probabilities: attention_keeps_probabilities(compute, on_gpu, config.seq)
                && !config.document_mask
                && config.dropout == 0.0,
            kernels: !on_gpu,
        };
        sizes::check(config, &model, batch)?;
        check_names(&model)?;
        let table = resolved.costs.as_ref();
        let cutter = Cutter::new((config, table, own), &model, batch, resolved.stages())?;
        let cut = |stages: Stages| {
            let costs = cutter.costs_of(table, &stages)?;
            Self::of((&resolved, costs.as_ref(), own), &model, (batch, compute), stages)
        };
        let first = cut(cutter.first()?)?;
        let mut made = cutter.within_memory(first, |bp| (&bp.stages, &bp.plan.ranks), cut)?;
        if config.pack_weights == PackWeights::Auto
            && made.packs_weights()
            && memory::is_short(&made)
        {
            let without = Config { pack_weights: PackWeights::Off, ..config.clone() };
            return Self::new(&without, made.model, own);
        }
        cutter.tell(&made.stages, &mut made.plan);
        Ok(made)
    }

    /// The same with these stages, which take what `table` says, if there is one.
    fn of(
        (resolved, table, own): (&Resolved, Option<&Table>, &Own),
        model: &Model,
        (batch, compute): (BatchShape, DType),
        stages: Stages,
    ) -> Result<Blueprint, Error> {
        let mut blueprint = Blueprint {
            config: resolved.config.clone(),
            mesh: resolved.config.mesh(),
            model: model.clone(),
            stages,
            programs: Programs::default(),
            evaluation: None,
            recomputed: Recomputed::default(),
            compute,
            batch,
            times: Times::default(),
            plan: Plan::default(),
            own: own.clone(),
            base: None,
        };
        let stages = blueprint.stages.len();
        blueprint.recomputed = Recomputed::before(blueprint.config.recompute, stages);
        let bytes = blueprint.all_bytes();
        let recomputed = &blueprint.recomputed.whole;
        let estimates =
            estimates(&blueprint.model.parts, &blueprint.stages, batch, |s| recomputed.contains(s));
        blueprint.times = Times::new((&blueprint.config, table), estimates, &bytes)?;
        let costs = generator_costs(&blueprint.config, &blueprint.times.costs, &bytes);
        let programs = Programs::new(resolved, &costs)?;
        if !programs.most.routes.is_empty() && blueprint.model.is_tied() {
            return Err(tied_copies(&blueprint.config));
        }
        blueprint.evaluation = evaluation::programs(&blueprint.config, &programs)?;
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
        let programs = Programs::given(&self.config, all)?;
        let unit = Some(programs.most.units[0]);
        let recomputed = Recomputed::new(self.config.recompute, &programs.most);
        let config = Config { unit, ..self.config.clone() };
        let evaluation = evaluation::programs(&config, &programs).map_err(|e| e.to_string())?;
        let mut taken =
            Blueprint { config, stages, programs, evaluation, recomputed, ..self.clone() };
        taken.plan = taken.make_plan(self.batch).map_err(|e| e.to_string())?;
        Ok(taken)
    }

    /// Whether gathered weights are kept as products read them: bf16 on the CPU, and by itself
    /// where a gather serves several micro-batches.
    pub(crate) fn packs_weights(&self) -> bool {
        let config = &self.config;
        let works = self.compute == DType::BF16 && config.device == DeviceKind::Cpu;
        let shared = config.micro_batches() > 1 && (!config.in_units() || config.unit() > 1);
        works
            && match config.pack_weights {
                PackWeights::Auto => shared,
                PackWeights::On => true,
                PackWeights::Off => false,
            }
    }

    /// The weight that embedding and head share, if they do.
    pub(crate) fn tie(&self) -> Option<Tie> {
        let placement = &self.schedule().placement;
        let last = self.stages.len() - 1;
        let trains = self.model.parts[0].parameters().iter().any(|p| p.trains);
        (trains && self.model.is_tied()).then(|| Tie {
            first: (0, 0),
            last: (last, self.stages[last].len() - 1),
            ranks: (placement[0], placement[last]),
        })
    }

    /// Equal pieces that every flat buffer can be cut into.
    pub(crate) fn layout_pieces(&self) -> usize {
        self.mesh.zero3 * if self.config.zero1 { self.mesh.dp } else { 1 }
    }

    fn make_plan(&self, batch: BatchShape) -> Result<Plan, Error> {
        let bytes = self.all_bytes();
        let each = || self.programs.each();
        let peaks = each().map(|program| predict(program, &bytes));
        let peaks = peaks.reduce(|a, b| a.iter().zip(&b).map(|(a, b)| a.max(b)).collect());
        let peaks = peaks.expect("a run has a program");
        let most = |of: fn(&Schedule, &[StageBytes]) -> Vec<HeldBytes>| {
            let held = each().map(|program| of(program, &bytes));
            held.reduce(larger).expect("a run has a program")
        };
        let (at_once, warm_ups) = (most(predict_at_once), most(predict_warm_up));
        let simulated = self.simulated(&Costs { memory: bytes, ..self.times.costs.clone() });
        limit::check(&self.config, &simulated)?;
        let bubble = simulated.bubble();
        let optimizer: Vec<_> = (0..self.mesh.pp).map(|p| self.optimizer_takes(p)).collect();
        let program = &self.schedule().ranks[0];
        let count = |f: fn(&Action) -> bool| program.iter().filter(|a| f(a)).count() as u64;
        Ok(Plan {
            pp: self.mesh.pp,
            zero3: self.mesh.zero3,
            dp: self.mesh.dp,
            schedule: self.schedule().kind.clone(),
            virtual_stages: self.config.virtual_stages(),
            units: self.schedule().units.clone(),
            micro_batches: self.config.deal().to_vec(),
            micro_batch_size: self.config.micro_batch_size,
            seq: self.config.seq,
            parameters: self.model.parameter_count(),
            flops_per_token: self.model.flops_per_token(batch),
            bubble,
            costs: self.times.source.clone(),
            all_gathers_per_rank: count(|a| matches!(a, Action::AllGather { .. })),
            reduce_scatters_per_rank: count(|a| matches!(a, Action::ReduceScatter { .. })),
            optimizer_gathers_per_rank: optimizer.iter().map(|o| o.gathers).max().unwrap_or(0),
            optimizer_bytes_per_rank: optimizer.iter().map(|o| o.sent).max().unwrap_or(0),
            ranks: (0..self.mesh.pp)
                .map(|p| self.rank_plan((p, optimizer[p]), peaks[p], [at_once[p], warm_ups[p]]))
                .collect(),
            notes: self.notes(batch),
            ..Plan::default()
        })
    }

    /// What the settings do not do here, or what others would do better.
    fn notes(&self, batch: BatchShape) -> Vec<String> {
        let mut costs = self.model.parts.iter().map(|p| p.cost(batch));
        let saves_scores = costs.any(|c| c.activation_bytes_selective < c.activation_bytes);
        let recompute = self.config.recompute;
        let recompute = self.recomputed.note(recompute, saves_scores, self.schedule());
        let unit = (self.config.schedule == "zeropp").then(|| unit_note(&shape(&self.config)));
        let batch = self.config.global_batch_note();
        let Config { dropout, device, .. } = self.config;
        let on_host = dropout > 0.0 && device != DeviceKind::Cpu;
        let dropout = on_host.then(|| {
            format!(
                "dropout = {dropout}: device {device} gets its masks from the host, which makes \
                 them for every F and B; that is slow"
            )
        });
        [recompute, unit.flatten(), batch, dropout].into_iter().flatten().collect()
    }

    fn rank_plan(
        &self,
        (pp, optimizer): (usize, OptimizerTakes),
        peaks: HeldBytes,
        [at_once, warm_up]: [HeldBytes; 2],
    ) -> RankPlan {
        let mine = self.schedule().stages_of(pp);
        let names = |s: usize| {
            self.model.parts[self.stages[s].clone()].iter().map(|p| p.name().to_string()).collect()
        };
        let parameters = mine.iter().map(|s| self.stage_parameters(*s)).sum();
        let shard = |elements: fn(&Self, usize) -> u64| {
            let elements: u64 = mine.iter().map(|s| elements(self, *s)).sum();
            elements * 4 / self.mesh.zero3 as u64
        };
        // A tied weight of which the rank has both layers: it has the parameters once, and after
        // their sum the gradient.
        let twice = self.tied_twice(pp);
        let all = shard(Self::flat_elements) - twice;
        let trained = shard(Self::trained_elements);
        let OptimizerTakes { kept, at_work, .. } = optimizer;
        // Nothing else is held when the optimizer is at work.
        let updating = HeldBytes { gradient_shard: trained - twice, ..HeldBytes::default() };
        let late = self.schedule().validates_late();
        // Parameters, their state, and the gradient.
        let own = (trained - twice) / self.owners();
        let rollback = if late { own + kept + own } else { 0 };
        let but_gradient = rollback.saturating_sub(own);
        let memory = |held: HeldBytes, optimizer: u64, rollback: u64| MemoryBytes {
            parameter_shard: all,
            gradient_shard: held.gradient_shard,
            optimizer,
            rollback,
            gathered: held.gathered,
            packed_weights: held.packed_weights,
            gradient: held.gradient,
            activation: held.activation,
            weight_stash: held.weight_stash,
            communication: held.communication,
            save: WRITER_BYTES * self.config.writers(),
        };
        RankPlan {
            pp,
            stages: mine.iter().map(|s| (*s, names(*s))).collect(),
            parameters,
            saved: own + kept,
            memory: memory(peaks, at_work, rollback),
            at_once: [
                memory(at_once, kept, 0),
                // What is kept to go back has the gradient in it, which is counted already.
                memory(updating, at_work, but_gradient),
                memory(warm_up, kept, rollback),
            ]
            .into_iter()
            .max_by_key(MemoryBytes::total)
            .expect("three"),
        }
    }

    /// Bytes of the parameters, of a rank's shards, that both layers of a tied weight have.
    fn tied_twice(&self, pp: usize) -> u64 {
        let both = self.tie().filter(|tie| tie.ranks == (pp, pp));
        both.map_or(0, |_| {
            4 * self.trained_elements_of(&self.model.parts[0]) / self.mesh.zero3 as u64
        })
    }

    /// Whether several ranks of a pipeline have the stage.
    fn has_copies(&self, stage: usize) -> bool {
        let schedule = self.schedule();
        let routes = &schedule.routes;
        routes.iter().any(|route| route[stage] != schedule.placement[stage])
    }

    /// Ranks that share the optimizer's work on a shard.
    fn owners(&self) -> u64 {
        if self.config.zero1 { self.mesh.dp as u64 } else { 1 }
    }

    /// Bytes that the optimizer of a pipeline rank keeps from step to step.
    pub(crate) fn optimizer_kept(&self, pp: usize) -> u64 {
        self.optimizer_takes(pp).kept
    }

    /// What the optimizer of a pipeline rank takes: the most of any that share its stages.
    fn optimizer_takes(&self, pp: usize) -> OptimizerTakes {
        let groups = self.own.parameters(&self.config);
        let (zero3, owners) = (self.mesh.zero3, self.owners() as usize);
        let cut = Cut { zero3, owners, zero1: self.config.zero1 };
        let last = self.model.parts.len() - 1;
        let tied = |part: usize| self.model.is_tied() && part == last;
        let shared = self.tied_twice(pp) > 0;
        let stages = self.schedule().stages_of(pp);
        let parts: Vec<usize> = stages.iter().flat_map(|s| self.stages[*s].clone()).collect();
        // A tied gradient on its way to and from another rank.
        let shard = |part: &Part| self.trained_elements_of(part) / zero3 as u64 * 4;
        let swapped = self.tie().filter(|tie| tie.ranks.0 != tie.ranks.1).map_or(0, |tie| {
            let has = stages.iter().any(|s| [tie.first.0, tie.last.0].contains(s));
            if has { 2 * shard(&self.model.parts[0]) / owners as u64 } else { 0 }
        });
        // All pieces are alike where all elements are.
        let pieces = if groups.is_uniform(&self.model.parts) { 1 } else { zero3 * owners };
        let mut takes = OptimizerTakes::default();
        for piece in 0..pieces {
            let of = |part: &usize| {
                let tied = tied(*part);
                layer_bytes((&self.model.parts[*part], tied), cut, piece, &groups)
            };
            let layers: Vec<LayerBytes> =
                parts.iter().filter(|part| !(shared && tied(**part))).map(of).collect();
            let kept: u64 = layers.iter().map(|layer| layer.state).sum();
            let watches = self.config.log_layers > 0;
            let update = |l: &LayerBytes| l.update + if watches { l.watched } else { 0 };
            let update = layers.iter().map(update).max().unwrap_or(0);
            takes.kept = takes.kept.max(kept);
            takes.at_work = takes.at_work.max(kept + update.max(swapped));
            takes.gathers = layers.iter().map(|layer| layer.gathers).sum();
            takes.sent = layers.iter().map(|layer| layer.sent).sum();
        }
        takes
    }

    /// Elements of a layer's flat buffers, padding included.
    fn flat_elements_of(&self, part: &Part) -> u64 {
        let frozen = FlatLayout::frozen(part.parameters(), self.layout_pieces());
        self.trained_elements_of(part) + frozen.len as u64
    }

    /// Those of them that train.
    fn trained_elements_of(&self, part: &Part) -> u64 {
        FlatLayout::trained(part.parameters(), self.layout_pieces()).len as u64
    }

    fn stage_parameters(&self, stage: usize) -> u64 {
        let parts = &self.model.parts[self.stages[stage].clone()];
        parts.iter().flat_map(|p| p.parameters()).map(|p| p.len() as u64).sum()
    }

    /// Elements of the stage's flat buffers, padding included.
    fn flat_elements(&self, stage: usize) -> u64 {
        let parts = &self.model.parts[self.stages[stage].clone()];
        parts.iter().map(|part| self.flat_elements_of(part)).sum()
    }

    /// Those of them that train.
    fn trained_elements(&self, stage: usize) -> u64 {
        let parts = &self.model.parts[self.stages[stage].clone()];
        parts.iter().map(|part| self.trained_elements_of(part)).sum()
    }

    /// Those of them whose gradient is made in F.
    fn elements_in_forward(&self, stage: usize, batch: BatchShape) -> u64 {
        let parts = self.model.parts[self.stages[stage].clone()].iter();
        let made = parts.filter(|part| part.cost(batch).gradients_in_forward);
        made.map(|part| self.trained_elements_of(part)).sum()
    }

    fn bytes(&self, stage: usize, batch: BatchShape) -> StageBytes {
        let parts = &self.model.parts[self.stages[stage].clone()];
        let costs: Vec<_> = parts.iter().map(|p| p.cost(batch)).collect();
        let selective = self.recomputed.attention.contains(&stage);
        let kept: u64 = costs
            .iter()
            .map(|c| if selective { c.activation_bytes_selective } else { c.activation_bytes })
            .sum();
        let message = (batch.tokens() * self.model.hidden * batch.element_bytes) as u64;
        let input = if stage == 0 { 0 } else { message };
        let (elements, trained) = (self.flat_elements(stage), self.trained_elements(stage));
        // Without shards a gather of fp32 weights is the parameters themselves.
        let (alone, fp32) = (self.mesh.zero3 == 1, self.compute == DType::F32);
        let [shard, trained_shard] = [elements, trained].map(|n| n / self.mesh.zero3 as u64);
        let packed = |of: fn(&LayerCost) -> bool| {
            let elements = costs.iter().filter(|c| of(c)).map(|c| c.packed_elements).sum::<u64>();
            if self.packs_weights() { elements * Packed::element_bytes() as u64 } else { 0 }
        };
        let backward = BackwardPeak::of_layers(costs.iter(), selective);
        StageBytes {
            input,
            activation: kept.max(input),
            stash: costs.iter().map(|c| c.stash_bytes).sum(),
            backward_freed: backward.freed,
            backward_stash: backward.stashed,
            workspace: costs.iter().map(|c| c.workspace_bytes).max().unwrap_or(0),
            weights: if alone && fp32 { 0 } else { elements * self.compute.size() as u64 },
            packed_forward: packed(|_| true),
            packed_backward: packed(|c| !c.gradients_in_forward),
            packed_in_forward: packed(|c| c.gradients_in_forward),
            gradient: trained * 4,
            gradient_in_forward: self.elements_in_forward(stage, batch) * 4,
            keeps_first_gradient: alone,
            gradient_shard: trained_shard * 4,
            message,
            gather_input: if alone || fp32 { 0 } else { shard * self.compute.size() as u64 },
            reduced: if alone { 0 } else { trained_shard * 4 },
            replica_reduced: match self.mesh.dp > 1 || self.has_copies(stage) {
                true => trained_shard * 4 / self.owners(),
                false => 0,
            },
        }
    }

    /// Predicted bytes of every stage.
    pub(crate) fn all_bytes(&self) -> Vec<StageBytes> {
        (0..self.stages.len()).map(|s| self.bytes(s, self.batch)).collect()
    }

    fn simulated(&self, costs: &Costs) -> Timeline {
        self.programs.simulated(costs).expect("the program is verified and the costs fit it")
    }

    /// The schedule's `bubble` with measured times of each stage, and messages, gathers and
    /// reductions that take none; memory plays no part in it.
    pub(crate) fn timed_bubble(&self, stages: Vec<StageCosts>) -> f64 {
        let memory = vec![StageBytes::default(); self.stages.len()];
        self.simulated(&Costs { stages, memory, ..Costs::default() }).bubble()
    }
}

/// What holds more at once, of each rank.
fn larger(a: Vec<HeldBytes>, b: Vec<HeldBytes>) -> Vec<HeldBytes> {
    let most = |(a, b): (HeldBytes, HeldBytes)| if b.total() > a.total() { b } else { a };
    a.into_iter().zip(b).map(most).collect()
}

/// A tied weight's gradient is summed between two ranks, and not between copies of both.
fn tied_copies(config: &Config) -> Error {
    let problem = "has copies of stages, and embedding and head of this model share a weight";
    let help = "use a model whose embedding and head have weights of their own (untied)";
    ConfigError::value("schedule", &config.schedule, problem, help).into()
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
