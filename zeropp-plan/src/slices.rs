//! Samples that are cut into slices: where, and what a slice takes and holds.

use zeropp_model::layer::{BatchShape, SamplePart};
use zeropp_schedule::costs::{SampleGrowth, SliceCut, TimeGrowth, of_slices, slices_of};
use zeropp_schedule::memory::StageBytes;
use zeropp_schedule::simulate::{Costs, StageCosts};

use crate::bytes::StageForm;
use crate::cutter::Stages;
use crate::parts::Parts;

/// Fewest tokens of a slice that is chosen, on average: shorter ones cost more than they bring.
const TOKENS_MIN: usize = 2048;

/// The numbers of slices that are tried for samples of `seq` tokens: 2, 4 and so on.
pub fn numbers(seq: usize) -> impl Iterator<Item = usize> {
    (1..usize::BITS).map(|power| 1 << power).take_while(move |n| seq / n >= TOKENS_MIN)
}

/// The slices of a run's samples, as predictions see them.
#[derive(Clone, Debug)]
pub struct SampleSlices {
    tokens: Vec<u64>,
    growth: SampleGrowth,
    /// The model's parts for each slice.
    parts: Vec<Parts>,
    /// The same for the first one, as if it handed its sums over tokens on: what it does not keep
    /// for W then is what slices hand on.
    handing_on: Parts,
}

impl SampleSlices {
    /// Those with so many `tokens` each, whose times grow by `growth`; `batch` is a sample of so
    /// many tokens, and `parts` the model's parts for a micro-batch.
    pub fn new(
        tokens: Vec<u64>,
        growth: SampleGrowth,
        batch: impl Fn(usize) -> BatchShape,
        parts: impl Fn(BatchShape) -> Parts,
    ) -> SampleSlices {
        let part_of = |slice: usize| match slice {
            0 => SamplePart::FirstSlice,
            slice if slice + 1 == tokens.len() => SamplePart::LastSlice,
            _ => SamplePart::MiddleSlice,
        };
        let of_part = |slice: usize, part| {
            let batch = batch(tokens[slice] as usize);
            parts(BatchShape { keeps_probabilities: false, part, ..batch })
        };
        SampleSlices {
            parts: (0..tokens.len()).map(|slice| of_part(slice, part_of(slice))).collect(),
            handing_on: of_part(0, SamplePart::MiddleSlice),
            growth,
            tokens,
        }
    }

    /// Tokens of each of `n` slices of a sample of `seq`, by the operations of its parts, of which
    /// `whole` has those of a sample, and how these grow; none where there are fewer blocks of the
    /// grid than slices. `half` has the parts of half a sample.
    pub fn cut(
        seq: usize,
        n: usize,
        cut: SliceCut,
        [whole, half]: [&Parts; 2],
    ) -> (Option<Vec<u64>>, SampleGrowth) {
        let (times, growth) = growth(whole, half);
        (slices_of(seq as u64, n, cut, times, &growth).ok(), growth)
    }

    /// Tokens of each slice.
    pub fn tokens(&self) -> &[u64] {
        &self.tokens
    }

    /// Times of each stage and slice, where `all` have those of samples: of so many `stages`, and
    /// behind them of the slices of a split head.
    pub fn times(&self, all: Vec<StageCosts>, stages: usize) -> Vec<StageCosts> {
        let whole = Costs { stages: all, ..Costs::default() };
        of_slices(&whole, stages, &self.growth, &self.tokens).stages
    }

    /// Bytes of each stage and slice; `form` has those of whole samples.
    pub fn bytes(&self, stages: &Stages, form: impl Fn(usize) -> StageForm) -> Vec<StageBytes> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_that_are_tried_have_two_thousand_tokens() {
        let all = |seq| numbers(seq).collect::<Vec<_>>();
        assert!(all(4095).is_empty());
        assert_eq!(all(8192), [2, 4]);
        assert_eq!(all(1 << 17), [2, 4, 8, 16, 32, 64]);
    }
}
