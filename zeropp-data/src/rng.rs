//! Random numbers that are a function of (seed, name, position) and of nothing else.
//!
//! Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) turns a
//! 128-bit counter into 128 random bits under a 64-bit key. There is no state to carry, so any
//! rank can draw any number of any stream: initial weights and the order of the data do not depend
//! on the layout of the run, and a resumed run needs no saved generator.

use std::f64::consts::TAU;

const ROUNDS: usize = 10;
const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
/// Added to the key after each round: the golden ratio and √3 − 1, as 32-bit fractions.
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// The Philox4x32-10 block function.
pub(crate) fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for round in 0..ROUNDS {
        if round > 0 {
            key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
        }
        let a = u64::from(MULTIPLIERS[0]) * u64::from(counter[0]);
        let b = u64::from(MULTIPLIERS[1]) * u64::from(counter[2]);
        counter = [
            (b >> 32) as u32 ^ counter[1] ^ key[0],
            b as u32,
            (a >> 32) as u32 ^ counter[3] ^ key[1],
            a as u32,
        ];
    }
    counter
}

/// One stream of random numbers, read at any position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rng {
    key: [u32; 2],
}

impl Rng {
    /// The stream of this seed and name.
    pub fn keyed(seed: u64, name: &str) -> Self {
        // Eight bytes of the name at a time go through Philox, with the last output as the key:
        // every bit of seed and name reaches every bit of the stream's key.
        let mut key = words(seed);
        let mut absorb = |value: u64, tag: u32| {
            let [lo, hi] = words(value);
            let out = philox([lo, hi, tag, 0], key);
            key = [out[0] ^ out[2], out[1] ^ out[3]];
        };
        for chunk in name.as_bytes().chunks(8) {
            let mut bytes = [0; 8];
            bytes[..chunk.len()].copy_from_slice(chunk);
            absorb(u64::from_le_bytes(bytes), 1);
        }
        absorb(name.len() as u64, 2);
        Self { key }
    }

    /// The numbers that distinguish this stream from others.
    pub fn key(&self) -> [u32; 2] {
        self.key
    }

    /// 128 random bits at a two-dimensional position (step and sample, say).
    pub fn block(&self, position: u64, row: u64) -> [u32; 4] {
        let ([a, b], [c, d]) = (words(position), words(row));
        philox([a, b, c, d], self.key)
    }

    /// Normal with mean 0 and variance 1, at position `i`.
    pub fn normal_at(&self, i: u64) -> f32 {
        let block = self.block(i / 4, 0);
        normals(block)[(i % 4) as usize]
    }

    /// Fills `out` with numbers uniform in [0, 1), multiples of 2⁻²⁴, of positions `start`,
    /// `start` + 1 and so on.
    pub fn fill_uniform(&self, start: u64, out: &mut [f32]) {
        self.fill(start, out, |block| block.map(unit));
    }

    /// Fills `out` with [`normal_at`](Self::normal_at) of `start`, `start` + 1 and so on.
    pub fn fill_normal(&self, start: u64, out: &mut [f32]) {
        self.fill(start, out, normals);
    }

    /// Each block once, whatever the alignment of `start`.
    fn fill(&self, start: u64, out: &mut [f32], of_block: impl Fn([u32; 4]) -> [f32; 4]) {
        let skip = (start % 4) as usize;
        let (head, rest) = out.split_at_mut(out.len().min((4 - skip) % 4));
        if !head.is_empty() {
            let values = of_block(self.block(start / 4, 0));
            head.copy_from_slice(&values[skip..skip + head.len()]);
        }
        for (i, chunk) in rest.chunks_mut(4).enumerate() {
            let values = of_block(self.block(start.div_ceil(4) + i as u64, 0));
            chunk.copy_from_slice(&values[..chunk.len()]);
        }
    }
}

fn words(x: u64) -> [u32; 2] {
    [x as u32, (x >> 32) as u32]
}

fn unit(bits: u32) -> f32 {
    (bits >> 8) as f32 * (1.0 / (1 << 24) as f32)
}

/// Box–Muller on the two pairs of a block.
fn normals(block: [u32; 4]) -> [f32; 4] {
    let pair = |a: u32, b: u32| {
        // In (0, 1], so that the logarithm is finite; the largest value is 6.7 deviations out.
        let u = (f64::from(a) + 1.0) / 4_294_967_296.0;
        let (sin, cos) = (TAU * f64::from(b) / 4_294_967_296.0).sin_cos();
        let radius = (-2.0 * u.ln()).sqrt();
        [(radius * cos) as f32, (radius * sin) as f32]
    };
    let ([a, b], [c, d]) = (pair(block[0], block[1]), pair(block[2], block[3]));
    [a, b, c, d]
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::Rng;
    use super::*;

    /// The known answers published with Random123.
    #[test]
    fn philox_gives_the_known_answers() {
        let cases = [
            ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (counter, key, expected) in cases {
            assert_eq!(philox(counter, key), expected);
        }
    }

    /// Moments of 2²⁰ draws lie within five standard errors of the distribution's.
    #[test]
    fn moments_are_those_of_the_distributions() {
        let n = 1 << 20;
        let rng = Rng::keyed(7, "moments");
        let mut x = vec![0.0; n];
        let moment = |x: &[f32], p: i32, centre: f64| {
            x.iter().map(|v| (f64::from(*v) - centre).powi(p)).sum::<f64>() / n as f64
        };
        let close = |got: f64, want: f64, variance: f64| {
            let error = (variance / n as f64).sqrt();
            assert!((got - want).abs() < 5.0 * error, "{got} is not {want} ± {error}");
        };
        rng.fill_normal(0, &mut x);
        close(moment(&x, 1, 0.0), 0.0, 1.0);
        close(moment(&x, 2, 0.0), 1.0, 2.0);
        close(moment(&x, 3, 0.0), 0.0, 15.0);
        close(moment(&x, 4, 0.0), 3.0, 96.0);
        let lagged: f64 = x.windows(2).map(|w| f64::from(w[0] * w[1])).sum::<f64>() / n as f64;
        close(lagged, 0.0, 1.0);
        assert!(x.iter().any(|v| *v > 4.0) && x.iter().any(|v| *v < -4.0), "tails are there");

        rng.fill_uniform(0, &mut x);
        assert!(x.iter().all(|v| (0.0..1.0).contains(v)));
        close(moment(&x, 1, 0.0), 0.5, 1.0 / 12.0);
        close(moment(&x, 2, 0.5), 1.0 / 12.0, 1.0 / 180.0);
    }

    #[test]
    fn every_bit_of_seed_and_name_matters() {
        let mut keys = HashSet::new();
        for bit in 0..64 {
            keys.insert(Rng::keyed(1 << bit, "h.0").key);
        }
        for name in ["", "\0", "\0\0", "h.0", "h.1", "h.0\0", "12345678", "123456789", "912345678"]
        {
            keys.insert(Rng::keyed(0, name).key);
        }
        assert_eq!(keys.len(), 64 + 9);
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            failure_persistence: None,
            ..ProptestConfig::default()
        })]

        /// A part drawn alone is the same as that part of the whole, and as single draws.
        #[test]
        fn parts_agree_with_the_whole(seed: u64, start in 0u64..1 << 40, len in 0usize..20) {
            let rng = Rng::keyed(seed, "p");
            let (mut normal, mut uniform) = (vec![0f32; len], vec![0f32; len]);
            rng.fill_normal(start, &mut normal);
            rng.fill_uniform(start, &mut uniform);
            let at = |i: u64| unit(rng.block(i / 4, 0)[(i % 4) as usize]);
            for i in 0..len {
                prop_assert_eq!(normal[i].to_bits(), rng.normal_at(start + i as u64).to_bits());
                prop_assert_eq!(uniform[i].to_bits(), at(start + i as u64).to_bits());
            }
        }
    }
}
