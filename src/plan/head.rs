//! A head that is split over pipeline ranks: what each of them has of it, and what runs cannot do
//! with one yet.

use std::sync::Arc;

use zeropp_core::layer::{BatchShape, Model, Part};
use zeropp_core::optimizer::{Role, Shares};
use zeropp_core::params::{Init, ParamSpec};
use zeropp_core::shared_rows::SharedRows;
use zeropp_core::split::ops::{HeadSlice, SplitHead};
use zeropp_pipeline::head::HeadTree;
use zeropp_pipeline::memory::StageBytes;
use zeropp_pipeline::simulate::StageCosts;
use zeropp_plan::bytes::{LayerSizes, StageForm, StageState};
use zeropp_plan::parts::Parts;
use zeropp_plan::split::{of_rank, slice_bytes, slice_sizes, slice_state};

use crate::config::{Config, ConfigError};
use crate::own::CustomParts;
use crate::plan::program::Resolved;
use crate::plan::times::SplitTimes;

/// The slices of a split head.
pub(crate) struct HeadPlan {
    pub(crate) split: SplitHead,
    /// Blocks of each rank.
    blocks: Vec<usize>,
    /// The slice of each rank that has one.
    pub(crate) slices: Vec<Option<Arc<HeadSlice>>>,
    /// The same as predictions see them, of whole samples.
    sizes: Vec<Option<LayerSizes>>,
    /// Of each rank for each slice of a sample, with the tokens of that.
    parts: Vec<Vec<(Option<LayerSizes>, usize)>>,
}

impl HeadPlan {
    /// That of a run of `model`; none where its head is whole. `batch` is a micro-batch of whole
    /// samples, `cut` those that there are: it, or the slices of a sample.
    ///
    /// # Errors
    /// What cannot be done with a split head.
    pub(crate) fn new(
        resolved: &Resolved,
        own: &CustomParts,
        model: &Model,
        batch: BatchShape,
        cut: &[BatchShape],
    ) -> Result<Option<HeadPlan>, ConfigError> {
        let Some((blocks, root)) = resolved.head_blocks()? else { return Ok(None) };
        let split = check(resolved, own, model, &blocks)?;
        let messages = HeadTree::of_slices(&blocks, root).expect("there are ranks");
        let slice = |rank: usize| {
            let (blocks, sums) = of_rank(&messages, rank);
            let slice = split.slice(blocks, sums);
            messages.has(rank).then(|| Arc::new(slice))
        };
        let slices: Vec<_> = (0..blocks.len()).map(slice).collect();
        let is_tied = model.is_tied();
        let sizes_of = |slice: &Option<Arc<HeadSlice>>, batch: BatchShape| {
            Some(slice_sizes(&split.weight, slice.as_ref()?.shape(), batch, is_tied))
        };
        let sizes = slices.iter().map(|slice| sizes_of(slice, batch)).collect();
        let parts_of = |slice| cut.iter().map(|of| (sizes_of(slice, *of), of.tokens())).collect();
        let parts = slices.iter().map(parts_of).collect();
        Ok(Some(HeadPlan { split, blocks, slices, sizes, parts }))
    }

    /// How files of costs, whose last stage has a whole head, are for the slices; `last` is what
    /// that stage takes without it, as the model's parts estimate it.
    pub(crate) fn times(&self, parts: &Parts, last: &StageCosts) -> SplitTimes {
        let whole = parts.estimate(parts.flops(parts.layers().len() - 1, false));
        let share = |of: fn(&StageCosts) -> u64| {
            let (head, rest) = (of(&whole) as f64, of(last) as f64);
            head / (head + rest).max(1.0)
        };
        let share = [share(|of| of.f_ns), share(|of| of.b_ns), share(|of| of.w_ns)];
        SplitTimes { blocks: self.blocks.clone(), share }
    }

    /// Times of each rank's slice in proportion to its operations.
    pub(crate) fn estimates(&self, parts: &Parts) -> impl Iterator<Item = StageCosts> {
        let of = |sizes: &Option<LayerSizes>| match sizes {
            Some(sizes) => parts.estimate(sizes.flops(parts.tokens(), false)),
            None => StageCosts::default(),
        };
        self.sizes.iter().map(of)
    }

    /// Bytes of each rank's slice, and of that for each slice of a sample; `form` is for
    /// micro-batches of `all` tokens.
    pub(crate) fn bytes(&self, form: &StageForm, all: usize) -> impl Iterator<Item = StageBytes> {
        self.parts.iter().flatten().map(move |(sizes, tokens)| {
            let message = form.message / all as u64 * *tokens as u64;
            slice_bytes(sizes.as_ref(), &StageForm { message, ..*form }, *tokens)
        })
    }

    /// The weight in so many shards, where pipeline rank `owner` has all of it as an embedding.
    pub(crate) fn shared_rows(&self, owner: usize, pieces: usize) -> SharedRows {
        let rows = self.slices.iter();
        let rows = rows.map(|slice| slice.as_ref().map_or(0..0, |slice| slice.shape().own_rows()));
        let weight = &self.split.weight.shape;
        SharedRows::new(owner, [weight[0], weight[1]], rows, pieces)
    }

    /// What ranks have of each slice from step to step.
    pub(crate) fn states(
        &self,
        pieces: usize,
        shares: impl Fn(&LayerSizes) -> Shares,
    ) -> Vec<StageState> {
        let of = |sizes: &Option<LayerSizes>| {
            let sizes = sizes.as_ref();
            sizes
                .map_or_else(StageState::default, |sizes| slice_state(sizes, pieces, shares(sizes)))
        };
        self.sizes.iter().map(of).collect()
    }
}

/// What keeps a run from splitting its head: a problem in words, and what would work.
struct Obstacle {
    problem: String,
    help: String,
}

/// Why a run of these settings cannot split the head of `model`, in words; none where it can.
pub(crate) fn obstacle(config: &Config, own: &CustomParts, model: &Model) -> Option<String> {
    splittable(config, own, model).err().map(|obstacle| obstacle.problem)
}

/// Whether runs of these settings can split the head of a model of the library's.
pub fn may_split_head(config: &Config) -> bool {
    let parameters = CustomParts::default().parameters(config);
    let weight = ParamSpec::new("weight", &[1, 1], Init::Zeros);
    let role = if config.tied { Role::Embedding } else { Role::Head };
    let whole = parameters.rule.whole(&parameters.parameter(&weight, role));
    whole.is_none()
}

/// The head of `model`, if this run can split it into these blocks.
fn check(
    resolved: &Resolved,
    own: &CustomParts,
    model: &Model,
    blocks: &[usize],
) -> Result<SplitHead, ConfigError> {
    let split = splittable(&resolved.config, own, model);
    let split = split.map_err(|of| resolved.wrong_split(of.problem, &of.help))?;
    let sum = blocks.iter().fold(0_usize, |sum, n| sum.saturating_add(*n));
    let all = split.blocks();
    if sum != all {
        let problem = format!("has {sum} blocks, and a head of {} ids has {all}", split.ids);
        return Err(resolved.wrong_split(problem, &format!("give numbers whose sum is {all}")));
    }
    Ok(split)
}

/// The head of `model`, if this run can split it.
fn splittable(config: &Config, own: &CustomParts, model: &Model) -> Result<SplitHead, Obstacle> {
    let whole = |problem: &str| {
        Err(Obstacle { problem: problem.into(), help: "leave the head whole".into() })
    };
    let head = match model.parts.last() {
        Some(Part::Head(head)) => head.split(),
        _ => None,
    };
    let Some(split) = head else {
        return whole("the program's own head or loss computes with all rows at once");
    };
    let parameters = own.parameters(config);
    let role = if model.is_tied() { Role::Embedding } else { Role::Head };
    let of_head = parameters.parameter(&split.weight, role);
    if parameters.rule.whole(&of_head).is_some() {
        let problem = format!("{} updates the head's weight as a whole", parameters.rule.name());
        return Err(Obstacle { problem, help: "use another optimizer, such as adamw".into() });
    }
    Ok(split)
}
