//! AdamW with both moments in 8 bits (Dettmers et al. 2021, <https://arxiv.org/abs/2110.02861>), as
//! torchao's `AdamW8bit` has it: each block of elements has a scale, its largest moment, and each
//! element one of 256 shares of that, dense near 1 and near 0. Small parameters keep fp32.
//!
//! An update is AdamW's, on moments made fp32 and rounded again afterwards. Blocks end where shards
//! do, so no bit depends on the mesh.

use std::sync::LazyLock;

use zeropp_core::kernels::threads;

use crate::adamw::AdamW;
use crate::rule::{Elements, Parameter, StateTensor, StepScale, UpdateRule};

/// Elements that share a scale.
const BLOCK: usize = StateTensor::BLOCK;
/// Words of a block: its scale, and four codes in each.
const WORDS: usize = 1 + BLOCK / 4;
/// Parameters with fewer elements keep fp32, as in torchao and bitsandbytes.
const LEAST: usize = 4096;
/// Elements whose moments are fp32 at once, on a thread.
const CHUNK: usize = 8 * BLOCK;
/// Elements that are worth a thread.
const GRAIN: usize = 1 << 12;

/// AdamW, with moments in 8 bits for all but small parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW8bit {
    /// Hyper-parameters of one run.
    pub adamw: AdamW,
}

impl UpdateRule for AdamW8bit {
    fn name(&self) -> &str {
        "adamw8bit"
    }

    fn state(&self, of: &Parameter<'_>) -> Vec<StateTensor> {
        if !is_large(of) {
            return self.adamw.state(of);
        }
        let block = |name| StateTensor::per_block(name, BLOCK, WORDS);
        ["exp_avg_8bit", "exp_avg_sq_8bit"].map(block).to_vec()
    }

    fn update(&self, of: &Parameter<'_>, elements: Elements<'_, '_>, step: &StepScale) {
        if !is_large(of) {
            return self.adamw.update(of, elements, step);
        }
        let Elements { parameter, state, gradient } = elements;
        let [m, v] = state else { unreachable!("two moments are kept") };
        let piece = threads::piece(parameter.len(), CHUNK, GRAIN);
        let words = piece.div_ceil(BLOCK) * WORDS;
        let moments = m.chunks_mut(words).zip(v.chunks_mut(words));
        let pieces = parameter.chunks_mut(piece).zip(gradient.chunks(piece)).zip(moments);
        threads::each(pieces, |((p, g), (m, v))| {
            let moments =
                m.chunks_mut(CHUNK / BLOCK * WORDS).zip(v.chunks_mut(CHUNK / BLOCK * WORDS));
            for ((p, g), (m, v)) in p.chunks_mut(CHUNK).zip(g.chunks(CHUNK)).zip(moments) {
                self.update_chunk(of, p, g, [m, v], step);
            }
        });
    }
}

impl AdamW8bit {
    /// Updates up to [`CHUNK`] elements that begin at a block.
    fn update_chunk(
        &self,
        of: &Parameter<'_>,
        parameter: &mut [f32],
        gradient: &[f32],
        words: [&mut [f32]; 2],
        step: &StepScale,
    ) {
        let n = parameter.len();
        let mut moments = [[0f32; CHUNK]; 2];
        for ((moment, words), map) in moments.iter_mut().zip(&words).zip(&*MAPS) {
            map.decode(words, &mut moment[..n]);
        }
        let [m, v] = &mut moments;
        let state = &mut [&mut m[..n], &mut v[..n]];
        self.adamw.update(of, Elements { parameter, state, gradient }, step);
        for ((moment, words), map) in moments.iter().zip(words).zip(&*MAPS) {
            map.encode(&moment[..n], words);
        }
    }
}

/// Whether its moments are in 8 bits.
fn is_large(of: &Parameter<'_>) -> bool {
    of.shape.iter().product::<usize>() >= LEAST
}

/// The maps of the mean gradient, which has signs, and of the mean squared gradient.
static MAPS: LazyLock<[Map; 2]> = LazyLock::new(|| [Map::new(true), Map::new(false)]);

/// Bits of an fp32 number that do not count in [`Map::first`]: 6 of the mantissa do.
const DROPPED: u32 = 17;
/// The place of 2⁻²² there; the least share that does not round to 0 is not much less.
const LOWEST: u32 = (127 - 22) << (23 - DROPPED);
/// The places of magnitudes up to 1.
const PLACES: usize = (22 << (23 - DROPPED)) + 1;

/// What each code is as a share of the largest, and which code a share has.
struct Map {
    /// Ascending.
    shares: [f32; 256],
    /// The least number that rounds to the next code; the last has none, and nothing is above it.
    next: [f32; 256],
    /// By sign and place of a number, a code that is not above its own, and rarely much below.
    first: [[u8; PLACES]; 2],
    /// The least code that a share above 0 gets.
    least: u8,
}

impl Map {
    /// The centres of equal parts of seven decades, each with half of the parts of the one above; 0
    /// and 1. Rounded as torch rounds them with FMA, so that its moments are these, too.
    fn new(signed: bool) -> Map {
        const DECADES: [f32; 7] = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0];
        let mut all = vec![0.0, 1.0];
        for (i, decade) in DECADES.into_iter().enumerate() {
            let parts = if signed { 1 << i } else { 2 << i };
            let each = (1.0 - 0.1f32) / parts as f32;
            let end = |part: i32| match 2 * part < parts {
                true => each.mul_add(part as f32, 0.1),
                false => each.mul_add((part - parts) as f32, 1.0),
            };
            for part in 0..parts {
                let share = (end(part) + end(part + 1)) / 2.0 * decade;
                all.push(share);
                all.extend(signed.then_some(-share));
            }
        }
        all.sort_by(f32::total_cmp);
        let shares: [f32; 256] = all.try_into().expect("256 shares");
        let mut next = [f32::NAN; 256];
        for (next, pair) in next.iter_mut().zip(shares.windows(2)) {
            *next = pair[0] + (pair[1] - pair[0]) * 0.5;
        }
        let code = |x: f32| next.iter().take_while(|next| x >= **next).count() as u8;
        let edge = |place: usize| f32::from_bits((LOWEST + place as u32) << DROPPED);
        let from_zero = |place: usize| if place == 0 { 0.0 } else { edge(place) };
        let first = [
            std::array::from_fn(|place| code(from_zero(place))),
            std::array::from_fn(|place| code(-edge(place + 1))),
        ];
        // A second moment that rounds to 0 would leave the mean gradient to be divided by eps.
        let least = u8::from(!signed);
        Map { shares, next, first, least }
    }

    /// The nearest code, the upper one of two.
    fn code(&self, x: f32) -> u8 {
        let place = ((x.to_bits() & !(1 << 31)) >> DROPPED).saturating_sub(LOWEST);
        let of_sign = &self.first[usize::from(x.is_sign_negative())];
        let mut code = of_sign[(place as usize).min(PLACES - 1)];
        while x >= self.next[usize::from(code)] {
            code += 1;
        }
        if x > 0.0 { code.max(self.least) } else { code }
    }

    fn decode(&self, words: &[f32], out: &mut [f32]) {
        for (words, out) in words.chunks(WORDS).zip(out.chunks_mut(BLOCK)) {
            let (scale, codes) = words.split_first().expect("a scale");
            for (word, out) in codes.iter().zip(out.chunks_mut(4)) {
                let codes = word.to_bits().to_le_bytes();
                let each = out.iter_mut().zip(codes);
                each.for_each(|(x, code)| *x = self.shares[usize::from(code)] * scale);
            }
        }
    }

    fn encode(&self, moments: &[f32], words: &mut [f32]) {
        for (moments, words) in moments.chunks(BLOCK).zip(words.chunks_mut(WORDS)) {
            let (scale, codes) = words.split_first_mut().expect("a scale");
            *scale = moments.iter().fold(0f32, |most, x| most.max(x.abs()));
            let by = scale.max(f32::MIN_POSITIVE);
            for (word, moments) in codes.iter_mut().zip(moments.chunks(4)) {
                let mut codes = [0; 4];
                codes.iter_mut().zip(moments).for_each(|(code, x)| *code = self.code(x / by));
                *word = f32::from_bits(u32::from_le_bytes(codes));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every code stands for its share, all shares between two go to the nearer one.
    #[test]
    fn a_number_gets_the_code_of_the_nearest_share() {
        for (map, signed) in MAPS.iter().zip([true, false]) {
            for (code, share) in map.shares.iter().enumerate() {
                assert_eq!(usize::from(map.code(*share)), code);
            }
            for i in 0..4_000 {
                let size = 10f32.powf(-8.0 * (i as f32 / 4_000.0));
                for x in if signed { vec![size, -size] } else { vec![size] } {
                    let apart = |code: u8| (map.shares[usize::from(code)] - x).abs();
                    let code = map.code(x);
                    let nearest = (0..=255).min_by(|a, b| apart(*a).total_cmp(&apart(*b))).unwrap();
                    let ok = apart(code) <= apart(nearest.max(map.least)) * (1.0 + 1e-5);
                    assert!(ok, "{x}: {code} and {nearest}");
                }
            }
        }
    }

    #[test]
    fn a_mean_squared_gradient_above_zero_stays_above_it() {
        let mut moments = [1e-12; 100];
        moments[3] = 1.0;
        moments[4] = 0.0;
        let (mut words, mut out) = ([0.0; WORDS], [1.0; 100]);
        MAPS[1].encode(&moments, &mut words);
        MAPS[1].decode(&words, &mut out);
        assert_eq!((out[3], out[4]), (1.0, 0.0));
        assert!(out[..3].iter().all(|x| *x > 0.0 && *x < 1e-6), "{out:?}");
        // What is 0 altogether, as at first, is not a share of nothing.
        MAPS[1].encode(&[0.0; 100], &mut words);
        MAPS[1].decode(&words, &mut out);
        assert_eq!(out, [0.0; 100]);
    }
}
