//! Dropout whose masks are a function of counters, and of nothing that ran before.
//!
//! Whether an element is kept follows from a key, which stands for a seed and a place in the model,
//! and from the step, the sample, and the row and column of the element in its sample. So the same
//! elements are dropped on any rank or thread, in any order and however often they are computed;
//! nothing is kept for the backward. The generator is Philox4x32-10 (Salmon et al., "Parallel
//! random numbers: as easy as 1, 2, 3", 2011), that of `zeropp_data::rng`, on sixteen counters at a
//! time.

use crate::threads::{each, piece};
use crate::{GRAIN, simd};

/// Counters that are taken together.
const LANES: usize = 16;
/// Elements that their blocks decide: word w of block l is that of element 16·w + l.
const GROUP: usize = 4 * LANES;
const ROUNDS: usize = 10;
const MULTIPLIERS: [u64; 2] = [0xD251_1F53, 0xCD9E_8D57];
/// Added to the key after each round.
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
/// The low half of a lane. What is above it is left to stand where a product drops it.
const LOW: u64 = u32::MAX as u64;

/// Which elements of a place are dropped in a step, and what the others are multiplied by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DropoutRule {
    /// Of the run's seed and the place.
    pub key: [u32; 2],
    /// The step, counted from 1.
    pub step: u32,
    /// Elements whose word is below are dropped.
    pub threshold: u32,
    /// The factor of the others.
    pub scale: f32,
}

impl DropoutRule {
    /// Drops a share `p` of the elements, rounded to a multiple of 2⁻³²; the others are divided by
    /// what is left of 1.
    pub fn new(key: [u32; 2], step: u64, p: f64) -> Self {
        let words = (1_u64 << 32) as f64;
        let threshold = (p * words).round() as u32;
        let scale = 1.0 / (1.0 - f64::from(threshold) / words);
        Self { key, step: step as u32, threshold, scale: scale as f32 }
    }

    /// The factors of the elements of a sample's row from column `first` on.
    #[inline(always)]
    pub(crate) fn factors(&self, sample: usize, row: usize, first: usize, out: &mut [f32]) {
        let (mut group, skip) = (first / GROUP, first % GROUP);
        let (head, rest) = out.split_at_mut(out.len().min((GROUP - skip) % GROUP));
        if !head.is_empty() {
            let all = self.group(sample, row, group);
            head.copy_from_slice(&all[skip..skip + head.len()]);
            group += 1;
        }
        for (i, out) in rest.chunks_mut(GROUP).enumerate() {
            let all = self.group(sample, row, group + i);
            out.copy_from_slice(&all[..out.len()]);
        }
    }

    /// The factors of a group of a row's columns.
    #[inline(always)]
    fn group(&self, sample: usize, row: usize, group: usize) -> [f32; GROUP] {
        let first = group * LANES;
        let rest = [row as u32, sample as u32, self.step];
        let words =
            blocks(core::array::from_fn(|lane| (first + lane) as u64 & LOW), rest, self.key);
        let mut factors = [0.0; GROUP];
        for (factors, words) in factors.as_chunks_mut::<LANES>().0.iter_mut().zip(words) {
            for lane in 0..LANES {
                let is_kept = words[lane] & LOW >= u64::from(self.threshold);
                factors[lane] = if is_kept { self.scale } else { 0.0 };
            }
        }
        factors
    }
}

/// Word w of the blocks of counters that differ in their first word; the upper halves mean nothing.
#[inline(always)]
fn blocks(first: [u64; LANES], rest: [u32; 3], mut key: [u32; 2]) -> [[u64; LANES]; 4] {
    let [b, c, d] = rest.map(u64::from);
    let mut state = [first, [b; LANES], [c; LANES], [d; LANES]];
    for round in 0..ROUNDS {
        if round > 0 {
            key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
        }
        let keys = key.map(u64::from);
        for lane in 0..LANES {
            let [c0, c1, c2, c3] = state.each_ref().map(|words| words[lane]);
            let (a, b) = (MULTIPLIERS[0] * (c0 & LOW), MULTIPLIERS[1] * (c2 & LOW));
            let next = [(b >> 32) ^ c1 ^ keys[0], b, (a >> 32) ^ c3 ^ keys[1], a];
            for (words, next) in state.iter_mut().zip(next) {
                words[lane] = next;
            }
        }
    }
    state
}

/// Where rows lie: which sample the first is of, and how many rows each has.
#[derive(Clone, Copy, Debug)]
pub struct SampleRows {
    /// Number of the first sample; the others follow.
    pub first: usize,
    /// Which token of its sample a sample's first row is: that of a slice, else 0.
    pub token: usize,
    /// Rows of a sample.
    pub rows: usize,
}

/// Calls `f` with parts of `x: [n, width]` and their factors.
pub(crate) fn each_group<T: Send>(
    x: &mut [T],
    width: usize,
    samples: SampleRows,
    dropout: DropoutRule,
    f: impl Fn(&mut [T], &[f32]) + Sync + Copy,
) {
    let width = width.max(1);
    let n = piece(x.len() / width, 1, GRAIN.div_ceil(width));
    each(x.chunks_mut(n * width).enumerate(), |(i, x)| {
        simd(
            #[inline(always)]
            || {
                for (j, row) in x.chunks_exact_mut(width).enumerate() {
                    let at = i * n + j;
                    let sample = samples.first + at / samples.rows;
                    let row_there = samples.token + at % samples.rows;
                    for (group, x) in row.chunks_mut(GROUP).enumerate() {
                        let factors = dropout.group(sample, row_there, group);
                        f(x, &factors[..x.len()]);
                    }
                }
            },
        );
    });
}

/// Multiplies `x: [samples·rows, width]` by its factors, in place.
pub fn apply(x: &mut [f32], width: usize, samples: SampleRows, dropout: DropoutRule) {
    each_group(
        x,
        width,
        samples,
        dropout,
        #[inline(always)]
        |x, factors| x.iter_mut().zip(factors).for_each(|(x, factor)| *x *= *factor),
    );
}

/// The factors of `len` rows of `width` elements.
pub fn factors(len: usize, width: usize, samples: SampleRows, dropout: DropoutRule) -> Vec<f32> {
    let mut all = vec![1.0; len * width];
    apply(&mut all, width, samples, dropout);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers published with Random123, in each lane.
    #[test]
    fn blocks_are_philox() {
        let all = u32::MAX;
        let cases = [
            ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([all; 4], [all; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for ([first, rest @ ..], key, expected) in cases {
            let words = simd(
                #[inline(always)]
                || blocks([u64::from(first); LANES], rest, key),
            );
            for lane in 0..LANES {
                assert_eq!(words.map(|words| words[lane] as u32), expected);
            }
        }
    }

    /// Any part of a row is that part of the whole row.
    #[test]
    fn parts_are_those_of_the_whole() {
        let dropout = DropoutRule::new([3, 4], 5, 0.3);
        let samples = SampleRows { first: 7, token: 0, rows: 3 };
        let width = 200;
        let whole = factors(5, width, samples, dropout);
        for first in [0, 1, 63, 64, 65, 130] {
            for len in [0, 1, 64, 70] {
                let mut part = vec![f32::NAN; len];
                dropout.factors(8, 1, first, &mut part);
                assert_eq!(part, whole[4 * width..][first..first + len], "{first} {len}");
            }
        }
    }

    #[test]
    fn kept_elements_are_scaled_for_dropped_ones() {
        for p in [0.0, 1e-9, 0.1, 0.5, 0.999, 1.0 - 1e-16] {
            let DropoutRule { threshold, scale, .. } = DropoutRule::new([0; 2], 0, p);
            let kept = 1.0 - f64::from(threshold) / (1_u64 << 32) as f64;
            assert!((f64::from(scale) * kept - 1.0).abs() < 1e-6 && scale.is_finite(), "{p}");
        }
        assert_eq!(DropoutRule::new([0; 2], 0, 0.0).scale, 1.0);
    }
}
