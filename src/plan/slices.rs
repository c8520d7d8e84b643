//! Samples that are cut into slices: where, what a slice costs, and which runs cannot have them.

use zeropp_core::head::blocks;
use zeropp_core::layer::{BatchShape, Model, Part, SamplePart};
use zeropp_core::params::ParamSpec;
use zeropp_pipeline::costs::{SLICE_GRID, SampleGrowth, TimeGrowth, of_slices, slices_of};
use zeropp_pipeline::memory::StageBytes;
use zeropp_pipeline::simulate::{Costs, StageCosts};
use zeropp_plan::bytes::StageForm;
use zeropp_plan::cutter::Stages;
use zeropp_plan::parts::Parts;

use crate::config::{Config, ConfigError};

/// Rows from which on the CPU's products have the same bits for each row, however many there are:
/// the fewest of a sample's last slice.
const LAST_MIN: u64 = 96;

/// The fewest columns of such products.
const COLUMNS_MIN: usize = 3;

/// The slices of a run's samples, as predictions see them.
#[derive(Clone, Debug)]
pub(crate) struct SlicePlan {
    tokens: Vec<u64>,
    growth: SampleGrowth,
    /// The model's parts for each slice.
    parts: Vec<Parts>,
    /// The same for the first one, as if it handed its sums over tokens on: what it does not keep
    /// for W then is what slices hand on.
    handing_on: Parts,
}

impl SlicePlan {
    /// That of a run of `model`, whose parts for whole samples are `whole`; of a `given` cut, or of
    /// the one of the settings. None where samples are whole.
    ///
    /// # Errors
    /// A model or a length that is not cut so.
    pub(crate) fn new(
        config: &Config,
        given: &[u64],
        model: &Model,
        whole: &Parts,
        parts: impl Fn(BatchShape) -> Parts,
    ) -> Result<Option<SlicePlan>, ConfigError> {
        if config.slices < 2 {
            return Ok(None);
        }
        let refused = |problem: String, help: &str| {
            Err(ConfigError::value("slices", config.slices, problem, help))
        };
        if let Some(part) = model.parts.iter().find(|part| !part.takes_slices()) {
            let problem =
                format!("{} of this model computes on whole samples alone", Part::name(part));
            return refused(problem, "use 1");
        }
        if let Some(problem) = narrow(model) {
            return refused(problem, "use 1");
        }
        let seq = config.seq as u64;
        let of = |seq| parts(BatchShape { keeps_probabilities: false, ..config.sample_of(seq) });
        let (times, growth) = growth(whole, &of(config.seq / 2));
        let tokens = match given.is_empty() {
            false => given.to_vec(),
            true => match slices_of(seq, config.slices, config.slice_cut, times, &growth) {
                Ok(tokens) => tokens,
                Err(_) => {
                    let most = seq.div_ceil(SLICE_GRID);
                    let problem = format!(
                        "a sample of {seq} tokens has {most} blocks of {SLICE_GRID}, of which a \
                         slice has one at least"
                    );
                    return refused(problem, &format!("use 1 to {most}"));
                }
            },
        };
        if tokens.iter().sum::<u64>() != seq {
            let sum: u64 = tokens.iter().sum();
            let problem = format!("its slices have {sum} tokens in all, and seq is {seq}");
            let help = "make it for samples of as many tokens";
            return Err(ConfigError::value("schedule", &config.schedule, problem, help));
        }
        let (last, others) = tokens.split_last().expect("two or more");
        if *last < LAST_MIN || others.iter().any(|tokens| tokens % SLICE_GRID != 0) {
            let problem = format!(
                "cuts samples of seq = {seq} tokens into slices of {tokens:?}; the last one has to \
                 have {LAST_MIN} or more, the others multiples of {SLICE_GRID}"
            );
            return refused(problem, "use 1, or a seq that is a multiple of 256");
        }
        let part_of = |slice: usize| match slice {
            0 => SamplePart::FirstSlice,
            slice if slice + 1 == tokens.len() => SamplePart::LastSlice,
            _ => SamplePart::MiddleSlice,
        };
        let of_part = |slice: usize, part| {
            let batch = config.sample_of(tokens[slice] as usize);
            parts(BatchShape { keeps_probabilities: false, part, ..batch })
        };
        Ok(Some(SlicePlan {
            parts: (0..tokens.len()).map(|slice| of_part(slice, part_of(slice))).collect(),
            handing_on: of_part(0, SamplePart::MiddleSlice),
            growth,
            tokens,
        }))
    }

    /// Tokens of each slice.
    pub(crate) fn tokens(&self) -> &[u64] {
        &self.tokens
    }

    /// Times of each stage and slice, where `whole` has those of samples.
    pub(crate) fn times(&self, stages: Vec<StageCosts>) -> Vec<StageCosts> {
        let whole = Costs { stages, ..Costs::default() };
        of_slices(&whole, &self.growth, &self.tokens).stages
    }

    /// Bytes of each stage and slice; `form` has those of whole samples.
    pub(crate) fn bytes(
        &self,
        stages: &Stages,
        form: impl Fn(usize) -> StageForm,
    ) -> Vec<StageBytes> {
        let all: u64 = self.tokens.iter().sum();
        let of = |stage: usize, slice: usize| {
            let form = form(stage);
            let form = StageForm { message: form.message / all * self.tokens[slice], ..form };
            let range = stages[stage].clone();
            let mut bytes = self.parts[slice].stage_bytes(range.clone(), &form);
            if slice == 0 {
                let handing_on = self.handing_on.stage_bytes(range, &form);
                bytes.context_gradient += bytes.stash - handing_on.stash;
            }
            bytes
        };
        let slices = 0..self.tokens.len();
        (0..stages.len())
            .flat_map(|stage| slices.clone().map(move |slice| (stage, slice)))
            .map(|(stage, slice)| of(stage, slice))
            .collect()
    }
}

/// What of the model is multiplied with fewer than [`COLUMNS_MIN`] columns.
fn narrow(model: &Model) -> Option<String> {
    let why = format!("products of fewer than {COLUMNS_MIN} columns have bits of their own");
    let of_map = |of: &ParamSpec| {
        let side = *of.shape.iter().min()?;
        let is_narrow = of.shape.len() > 1 && side < COLUMNS_MIN;
        is_narrow.then(|| format!("{} has a side of {side}, and {why}", of.name))
    };
    let ids = model.vocabulary;
    let last = blocks(ids).last().map_or(0, |block| block.len());
    let of_head = (last < COLUMNS_MIN)
        .then(|| format!("the head of {ids} token ids ends in a block of {last}, and {why}"));
    model.parts.iter().flat_map(Part::parameters).find_map(|of| of_map(&of)).or(of_head)
}

/// Operations of a sample's F, B and W, and how they grow, from those of one `half` as long: what
/// two halves do not have is half of what grows by pairs of tokens.
fn growth(whole: &Parts, half: &Parts) -> ([u64; 3], SampleGrowth) {
    let sums = |parts: &Parts| {
        let each = (0..parts.layers().len()).map(|part| parts.flops(part, false));
        each.fold([0.0; 4], |sum, part| std::array::from_fn(|i| sum[i] + part[i]))
    };
    let (whole, half) = (sums(whole), sums(half));
    let pairs = |i: usize| match whole[i] > 0.0 {
        true => (2.0 * (whole[i] - 2.0 * half[i]) / whole[i]).clamp(0.0, 1.0),
        false => 0.0,
    };
    let [f, b, w, r] = std::array::from_fn(|i| TimeGrowth { pairs: pairs(i), each: 0.0 });
    let ns = |i: usize| (whole[i] / whole.iter().sum::<f64>().max(1.0) * 1e9) as u64;
    ([ns(0), ns(1), ns(2)], SampleGrowth { f, b, w, r })
}
