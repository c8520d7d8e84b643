//! Samples in slices: where they are cut, and what a slice costs of what its sample costs.
//!
//! A slice's forward looks at its own tokens and, in attention, at pairs of them with all tokens
//! before, so slices of equal tokens have ever more work.

use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{CostsError, Table};
use crate::memory::{BackwardMoment, HeadBytes, LayerwiseBytes, StageBytes};
use crate::simulate::{Costs, StageCosts};

/// Every slice but the last of a sample has a multiple of so many tokens: blocks of so many are
/// what sums over tokens are taken in, wherever samples are cut.
pub const SLICE_GRID: u64 = 256;

/// The key of the shares of F and of B that grow by pairs of tokens.
pub(super) const KEY: &str = "slice_pairs";

impl Table {
    /// How a sample's times grow: by the shares of F and of B that the file has, else by tokens.
    ///
    /// # Errors
    /// What are no shares.
    pub fn growth(&self) -> Result<SampleGrowth, CostsError> {
        let Some(value) = self.keys.get(KEY) else { return Ok(SampleGrowth::default()) };
        let share = |value: &Value| value.as_f64().filter(|share| (0.0..=1.0).contains(share));
        let shares: Option<Vec<f64>> = match value {
            Value::Array(both) => both.iter().map(share).collect(),
            one => share(one).map(|share| vec![share; 2]),
        };
        match shares.as_deref() {
            Some([f, b]) => Ok(SampleGrowth::of_pairs(*f, *b)),
            _ => {
                let works = "the shares of F and of B that grow by pairs of tokens, 0 to 1";
                Err(CostsError::found(KEY, value, works))
            }
        }
    }
}

/// What the slices of a sample have the same of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SliceCut {
    /// Work, so that the first slice has the most tokens.
    #[default]
    Work,
    /// Tokens.
    Tokens,
}

impl SliceCut {
    /// All of them, in the order of [`Self::NAMES`].
    pub const ALL: &'static [SliceCut] = &[SliceCut::Work, SliceCut::Tokens];
    /// How they are spelled in flags.
    pub const NAMES: &'static [&'static str] = &["work", "tokens"];
}

impl fmt::Display for SliceCut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(SliceCut::NAMES[*self as usize])
    }
}

/// How a sample's time grows, as shares of it between 0 and 1; what is left grows by tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TimeGrowth {
    /// The part that grows by pairs of tokens.
    pub pairs: f64,
    /// The part that every slice has as the sample has it, whatever its length.
    pub each: f64,
}

/// The same of all computes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SampleGrowth {
    /// Of F.
    pub f: TimeGrowth,
    /// Of B.
    pub b: TimeGrowth,
    /// Of W.
    pub w: TimeGrowth,
    /// Of R.
    pub r: TimeGrowth,
}

impl SampleGrowth {
    /// These shares of F, which R does again, and of B grow by pairs of tokens, all else by tokens.
    pub fn of_pairs(f: f64, b: f64) -> SampleGrowth {
        let of = |pairs| TimeGrowth { pairs, each: 0.0 };
        SampleGrowth { f: of(f), b: of(b), w: of(0.0), r: of(f) }
    }
}

/// From a token of a sample to another, of so many in all.
#[derive(Clone, Copy)]
struct Part {
    first: u64,
    end: u64,
    all: u64,
}

impl Part {
    fn tokens(self) -> f64 {
        (self.end - self.first) as f64 / self.all as f64
    }

    /// The share of the pairs of a token with itself and those before it.
    fn pairs(self) -> f64 {
        let to = |n: u64| n as f64 * (n as f64 + 1.0);
        (to(self.end) - to(self.first)) / to(self.all)
    }

    fn time(self, whole: u64, growth: TimeGrowth) -> u64 {
        if self.end - self.first == self.all {
            return whole;
        }
        let TimeGrowth { pairs, each } = growth;
        let share = each + pairs * self.pairs() + (1.0 - each - pairs) * self.tokens();
        (whole as f64 * share).round() as u64
    }

    /// Parts of a whole add up to it.
    fn bytes(self, whole: u64) -> u64 {
        let to = |n: u64| (u128::from(whole) * u128::from(n) / u128::from(self.all)) as u64;
        to(self.end) - to(self.first)
    }
}

fn parts(slices: &[u64]) -> impl Iterator<Item = Part> + use<'_> {
    let all = slices.iter().sum();
    slices.iter().scan(0, move |end, tokens| {
        let first = *end;
        *end += tokens;
        Some(Part { first, end: *end, all })
    })
}

/// The tokens of each of so many slices of a sample, multiples of [`SLICE_GRID`] but for its end,
/// where a stage's F, B and W take `times` and grow by `growth`.
///
/// # Errors
/// Fewer blocks than slices, in a sentence.
pub fn slices_of(
    tokens: u64,
    slices: usize,
    cut: SliceCut,
    times: [u64; 3],
    growth: &SampleGrowth,
) -> Result<Vec<u64>, String> {
    let blocks = tokens.div_ceil(SLICE_GRID);
    if slices == 0 || blocks < slices as u64 {
        return Err(format!(
            "slices = {slices}: a sample of {tokens} tokens has {blocks} blocks of {SLICE_GRID}, \
             of which a slice has one at least; use 1 to {blocks}"
        ));
    }
    let end_of = |block: u64| (block * SLICE_GRID).min(tokens);
    let pairs: f64 = match cut {
        SliceCut::Tokens => 0.0,
        SliceCut::Work => {
            let growths = [growth.f, growth.b, growth.w];
            let weighed = |of: fn(&TimeGrowth) -> f64| -> f64 {
                times.iter().zip(&growths).map(|(ns, growth)| *ns as f64 * of(growth)).sum()
            };
            let grows = weighed(|growth| 1.0 - growth.each);
            if grows > 0.0 { weighed(|growth| growth.pairs) / grows } else { 0.0 }
        }
    };
    let work = |block: u64| {
        let part = Part { first: 0, end: end_of(block), all: tokens };
        pairs * part.pairs() + (1.0 - pairs) * part.tokens()
    };
    let mut ends = vec![0];
    let mut block = 0;
    for slice in 1..slices {
        let wanted = slice as f64 / slices as f64;
        // Each slice behind it has a block left, too.
        let most = blocks - (slices - slice) as u64;
        let least = block + 1;
        // The first with that much work, or the one before it, whichever is nearer.
        block = first_in(least, most, |block| work(block) >= wanted);
        if block > least && (wanted - work(block - 1)).abs() < (work(block) - wanted).abs() {
            block -= 1;
        }
        ends.push(end_of(block));
    }
    ends.push(tokens);
    Ok(ends.windows(2).map(|pair| pair[1] - pair[0]).collect())
}

/// The first number from `least` on that `is_enough`, as are all behind it; `most` if none before
/// it is.
fn first_in(mut least: u64, mut most: u64, is_enough: impl Fn(u64) -> bool) -> u64 {
    while least < most {
        let middle = least + (most - least) / 2;
        match is_enough(middle) {
            true => most = middle,
            false => least = middle + 1,
        }
    }
    least
}

/// Costs of samples of so many tokens in as many slices as are asked for, and the tokens of each
/// slice. `pairs` is the share of pairs of tokens in the times of F, which R does again, and of B,
/// of so many `stages`; all else, and what is behind them, grows by tokens.
///
/// # Errors
/// As [`slices_of`].
pub fn cut_samples(
    whole: &Costs,
    stages: usize,
    tokens: u64,
    slices: usize,
    cut: SliceCut,
    [f, b]: [f64; 2],
) -> Result<(Costs, Vec<u64>), String> {
    let growth = SampleGrowth::of_pairs(f, b);
    let sum = |of: fn(&StageCosts) -> u64| {
        let times = whole.stages.iter().map(|stage| u128::from(of(stage)));
        u64::try_from(times.sum::<u128>()).unwrap_or(u64::MAX)
    };
    let times = [sum(|s| s.f_ns), sum(|s| s.b_ns), sum(|s| s.w_ns)];
    let tokens = slices_of(tokens, slices, cut, times, &growth)?;
    Ok((of_slices(whole, stages, &growth, &tokens), tokens))
}

/// The costs of every stage and slice, in the order of
/// [`Schedule::cost_entries`](crate::ir::Schedule::cost_entries), where `whole` has those of
/// samples. Slices of a split head, behind so many `stages`, grow by tokens.
pub fn of_slices(
    whole: &Costs,
    stages: usize,
    growth: &SampleGrowth,
    sample_slices: &[u64],
) -> Costs {
    let by_tokens = SampleGrowth::default();
    let times = |(cell, of): (usize, &StageCosts), part: Part| {
        let growth = if cell < stages { growth } else { &by_tokens };
        times_of(of, growth, part)
    };
    let cells = whole.stages.iter().enumerate();
    let memory = whole.memory.iter();
    Costs {
        stages: cells.flat_map(|of| parts(sample_slices).map(move |p| times(of, p))).collect(),
        memory: memory.flat_map(|of| parts(sample_slices).map(move |p| bytes(of, p))).collect(),
        ..whole.clone()
    }
}

fn times_of(of: &StageCosts, growth: &SampleGrowth, part: Part) -> StageCosts {
    StageCosts {
        f_ns: part.time(of.f_ns, growth.f),
        b_ns: part.time(of.b_ns, growth.b),
        w_ns: part.time(of.w_ns, growth.w),
        r_ns: part.time(of.r_ns, growth.r),
        ..*of
    }
}

/// Everything of a micro-batch grows by tokens; what is the stage's stays. Each is rounded by
/// itself, so a part of another is held to it: no B has a byte more than F took.
fn bytes(of: &StageBytes, part: Part) -> StageBytes {
    let activation = part.bytes(of.activation);
    let moment = |of: BackwardMoment, most: u64| BackwardMoment {
        kept: part.bytes(of.kept).min(most),
        stash: part.bytes(of.stash),
    };
    StageBytes {
        input: part.bytes(of.input),
        activation,
        stash: part.bytes(of.stash),
        context: part.bytes(of.context),
        context_gradient: part.bytes(of.context_gradient),
        inside: moment(of.inside, activation),
        inside_by_layer: moment(of.inside_by_layer, activation),
        stash_of_layer: part.bytes(of.stash_of_layer),
        layerwise: of.layerwise.map(|layers| {
            let most = part.bytes(layers.most);
            LayerwiseBytes {
                inputs: part.bytes(layers.inputs),
                redone: part.bytes(layers.redone).min(most),
                most,
                inside: moment(layers.inside, most),
                inside_by_layer: moment(layers.inside_by_layer, most),
            }
        }),
        workspace: part.bytes(of.workspace),
        message: part.bytes(of.message),
        head: HeadBytes {
            input: part.bytes(of.head.input),
            sums: part.bytes(of.head.sums),
            lse: part.bytes(of.head.lse),
            gradient: part.bytes(of.head.gradient),
        },
        ..*of
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Attention's pairs are so much of F and of B, and none of W.
    fn growth(f: f64, b: f64) -> SampleGrowth {
        SampleGrowth::of_pairs(f, b)
    }

    #[test]
    fn slices_are_blocks_of_tokens_and_make_the_sample() {
        let growth = growth(0.7, 0.8);
        for (tokens, slices) in [(256, 1), (4096, 3), (4096, 16), (5000, 7), (131_072, 32)] {
            for cut in SliceCut::ALL {
                let cut = slices_of(tokens, slices, *cut, [5, 6, 4], &growth).unwrap();
                assert_eq!((cut.len(), cut.iter().sum::<u64>()), (slices, tokens));
                let (last, others) = cut.split_last().unwrap();
                assert!(*last > 0 && others.iter().all(|n| n % SLICE_GRID == 0 && *n > 0));
            }
        }
        let few = slices_of(1000, 5, SliceCut::Work, [1; 3], &growth).unwrap_err();
        assert!(few.starts_with("slices = 5: a sample of 1000 tokens has 4 blocks"), "{few}");
    }

    #[test]
    fn a_cut_by_work_makes_slices_of_about_equal_time() {
        let growth = growth(0.6, 0.7);
        let whole = Costs::uniform(2, 50_000_000, 60_000_000, 40_000_000, 0);
        let spread = |cut| {
            let slices = slices_of(1 << 17, 8, cut, [50, 60, 40], &growth).unwrap();
            let costs = of_slices(&whole, whole.stages.len(), &growth, &slices);
            let all = costs.stages[..8].iter().map(|s| s.f_ns + s.b_ns + s.w_ns);
            let (least, most) = (all.clone().min().unwrap(), all.clone().max().unwrap());
            assert!(all.sum::<u64>().abs_diff(150_000_000) < 20);
            most as f64 / least as f64
        };
        assert!(spread(SliceCut::Work) < 1.05);
        assert!(spread(SliceCut::Tokens) > 2.0);
    }

    #[test]
    fn a_cut_by_work_ends_each_slice_at_the_nearest_block() {
        let tokens = 100 * SLICE_GRID;
        for pairs in [0.0, 0.3, 1.0] {
            let growth = growth(pairs, pairs);
            let cut = slices_of(tokens, 7, SliceCut::Work, [1, 0, 0], &growth).unwrap();
            let work = |end: u64| {
                let part = Part { first: 0, end, all: tokens };
                pairs * part.pairs() + (1.0 - pairs) * part.tokens()
            };
            let mut end = 0;
            for (slice, tokens) in cut[..6].iter().enumerate() {
                end += tokens;
                let away = |block: u64| (work(block * SLICE_GRID) - (slice + 1) as f64 / 7.0).abs();
                assert!((1..100).all(|block| away(end / SLICE_GRID) <= away(block)), "{cut:?}");
            }
        }
        // As many blocks as a sample may have take no longer.
        let cut = slices_of(1 << 40, 3, SliceCut::Work, [1; 3], &growth(0.5, 0.5)).unwrap();
        assert_eq!(cut.iter().sum::<u64>(), 1 << 40);
    }

    #[test]
    fn no_backward_of_a_slice_has_more_than_its_forward_took() {
        for activation in 1..40 {
            let mut whole = Costs::uniform(1, 7, 8, 9, 0);
            let inside = BackwardMoment { kept: activation + 1, stash: 0 };
            whole.memory[0] = StageBytes { activation, inside, ..whole.memory[0] };
            let costs = of_slices(&whole, 1, &growth(0.0, 0.0), &[256, 512, 256, 100]);
            assert!(costs.memory.iter().all(|m| m.inside.kept <= m.activation));
        }
    }

    #[test]
    fn bytes_of_slices_add_up_and_one_slice_is_the_sample() {
        let mut whole = Costs::uniform(1, 7, 8, 9, 0);
        whole.memory[0] = StageBytes { activation: 1001, stash: 77, weights: 5, ..whole.memory[0] };
        let growth = growth(0.5, 0.5);
        assert_eq!(of_slices(&whole, whole.stages.len(), &growth, &[4096]), whole);
        let costs = of_slices(&whole, whole.stages.len(), &growth, &[512, 256, 999]);
        assert_eq!(costs.memory.iter().map(|m| m.activation).sum::<u64>(), 1001);
        assert_eq!(costs.memory.iter().map(|m| m.stash).sum::<u64>(), 77);
        assert!(costs.memory.iter().all(|m| m.weights == 5));
    }
}
