//! How numbers stand in files, and the f32 they mean.

use std::fmt;

use half::{bf16, f16};

/// How the elements of a tensor are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// 32-bit floating point.
    F32,
    /// 16-bit floating point.
    F16,
    /// bfloat16.
    Bf16,
    /// Blocks of 32: a scale and 4-bit numbers around 8.
    Q4_0,
    /// Blocks of 32: a scale, a minimum and 4-bit numbers.
    Q4_1,
    /// Blocks of 32: a scale and 8-bit numbers.
    Q8_0,
    /// Blocks of 256: eight 6-bit scales and minima, and 4-bit numbers.
    Q4K,
    /// Blocks of 256: sixteen 8-bit scales, and 6-bit numbers around 32.
    Q6K,
    /// One that is known by name and size and not read.
    Unread {
        /// Its name.
        name: &'static str,
        /// Elements in a block.
        block: usize,
        /// Bytes of a block.
        bytes: usize,
    },
}

/// The most elements of a block.
const BLOCK_MAX: usize = 256;

impl Encoding {
    /// Elements in a block, and its bytes.
    pub fn block(self) -> (usize, usize) {
        match self {
            Encoding::F32 => (1, 4),
            Encoding::F16 | Encoding::Bf16 => (1, 2),
            Encoding::Q4_0 => (32, 18),
            Encoding::Q4_1 => (32, 20),
            Encoding::Q8_0 => (32, 34),
            Encoding::Q4K => (256, 144),
            Encoding::Q6K => (256, 210),
            Encoding::Unread { block, bytes, .. } => (block, bytes),
        }
    }

    /// Whether [`decode`](Self::decode) knows it.
    pub(crate) fn is_read(self) -> bool {
        !matches!(self, Encoding::Unread { .. })
    }

    /// Elements `start..start + out.len()` of a row of blocks.
    ///
    /// # Panics
    /// Panics beyond the end of `bytes`, and on what is not read.
    pub fn decode(self, bytes: &[u8], start: usize, out: &mut [f32]) {
        let (block, width) = self.block();
        if block == 1 {
            let bytes = &bytes[start * width..(start + out.len()) * width];
            return self.decode_plain(bytes, out);
        }
        let mut values = [0.0; BLOCK_MAX];
        let mut done = 0;
        while done < out.len() {
            let at = start + done;
            let n = (block - at % block).min(out.len() - done);
            let raw = &bytes[at / block * width..][..width];
            self.decode_block(raw, &mut values[..block]);
            out[done..done + n].copy_from_slice(&values[at % block..][..n]);
            done += n;
        }
    }

    fn decode_plain(self, bytes: &[u8], out: &mut [f32]) {
        match self {
            Encoding::F32 => {
                for (x, raw) in out.iter_mut().zip(bytes.chunks_exact(4)) {
                    *x = f32::from_le_bytes(raw.try_into().expect("four bytes"));
                }
            }
            Encoding::F16 => {
                for (x, raw) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                    *x = half_at(raw, 0);
                }
            }
            Encoding::Bf16 => {
                for (x, raw) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                    *x = bf16::from_le_bytes([raw[0], raw[1]]).to_f32();
                }
            }
            _ => unreachable!("{self} has blocks, or is refused before it is read"),
        }
    }

    fn decode_block(self, raw: &[u8], out: &mut [f32]) {
        match self {
            Encoding::Q4_0 => {
                let scale = half_at(raw, 0);
                nibbles(&raw[2..], out, |q| (f32::from(q) - 8.0) * scale);
            }
            Encoding::Q4_1 => {
                let (scale, min) = (half_at(raw, 0), half_at(raw, 2));
                nibbles(&raw[4..], out, |q| f32::from(q) * scale + min);
            }
            Encoding::Q8_0 => {
                let scale = half_at(raw, 0);
                for (x, q) in out.iter_mut().zip(&raw[2..]) {
                    *x = f32::from(*q as i8) * scale;
                }
            }
            Encoding::Q4K => q4_k(raw, out),
            Encoding::Q6K => q6_k(raw, out),
            _ => unreachable!("{self} has no blocks, or is refused before it is read"),
        }
    }
}

impl fmt::Display for Encoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Encoding::F32 => "F32",
            Encoding::F16 => "F16",
            Encoding::Bf16 => "BF16",
            Encoding::Q4_0 => "Q4_0",
            Encoding::Q4_1 => "Q4_1",
            Encoding::Q8_0 => "Q8_0",
            Encoding::Q4K => "Q4_K",
            Encoding::Q6K => "Q6_K",
            Encoding::Unread { name, .. } => name,
        })
    }
}

fn half_at(raw: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([raw[at], raw[at + 1]]).to_f32()
}

/// The low halves of all bytes, then the high ones.
fn nibbles(raw: &[u8], out: &mut [f32], value: impl Fn(u8) -> f32) {
    let (low, high) = out.split_at_mut(raw.len());
    for (i, q) in raw.iter().enumerate() {
        (low[i], high[i]) = (value(q & 15), value(q >> 4));
    }
}

/// Scale and minimum number `i` of the twelve bytes that hold eight pairs of six bits.
fn scale_and_min(raw: &[u8], i: usize) -> (f32, f32) {
    let (scale, min) = if i < 4 {
        (raw[i] & 63, raw[i + 4] & 63)
    } else {
        let scale = raw[i + 4] & 15 | raw[i - 4] >> 6 << 4;
        (scale, raw[i + 4] >> 4 | raw[i] >> 6 << 4)
    };
    (f32::from(scale), f32::from(min))
}

fn q4_k(raw: &[u8], out: &mut [f32]) {
    let (scale, min) = (half_at(raw, 0), half_at(raw, 2));
    let (scales, quants) = (&raw[4..16], &raw[16..]);
    for (pair, (out, quants)) in out.chunks_mut(64).zip(quants.chunks(32)).enumerate() {
        let of = |i| {
            let (s, m) = scale_and_min(scales, i);
            (scale * s, min * m)
        };
        let ((low, low_min), (high, high_min)) = (of(2 * pair), of(2 * pair + 1));
        for (i, q) in quants.iter().enumerate() {
            out[i] = low * f32::from(q & 15) - low_min;
            out[i + 32] = high * f32::from(q >> 4) - high_min;
        }
    }
}

fn q6_k(raw: &[u8], out: &mut [f32]) {
    let scale = half_at(raw, 208);
    for half in 0..2 {
        let (low, high) = (&raw[64 * half..][..64], &raw[128 + 32 * half..][..32]);
        let (scales, out) = (&raw[192 + 8 * half..][..8], &mut out[128 * half..][..128]);
        for i in 0..32 {
            let quarters = [low[i] & 15, low[i + 32] & 15, low[i] >> 4, low[i + 32] >> 4];
            for (k, four_bits) in quarters.into_iter().enumerate() {
                let q = four_bits | (high[i] >> (2 * k) & 3) << 4;
                let by = scale * f32::from(scales[2 * k + i / 16] as i8);
                out[32 * k + i] = by * (f32::from(q) - 32.0);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Blocks with their values as the Python package `gguf` gives them.
    #[test]
    fn blocks_decode_as_in_ggml() {
        let text = include_str!("../tests/blocks.txt");
        let mut seen = 0;
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let mut words = line.split(' ');
            let encoding = match words.next().unwrap() {
                "Q4_0" => Encoding::Q4_0,
                "Q4_1" => Encoding::Q4_1,
                "Q8_0" => Encoding::Q8_0,
                "Q4_K" => Encoding::Q4K,
                "Q6_K" => Encoding::Q6K,
                other => panic!("{other}"),
            };
            let hex = words.next().unwrap().as_bytes();
            let byte =
                |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
            let raw: Vec<u8> = hex.chunks(2).map(byte).collect();
            let expected: Vec<u32> =
                words.map(|word| u32::from_str_radix(word, 16).unwrap()).collect();
            let mut out = vec![0f32; encoding.block().0];
            encoding.decode(&raw, 0, &mut out);
            let bits: Vec<u32> = out.iter().map(|x| x.to_bits()).collect();
            assert_eq!(bits, expected, "{encoding}");
            seen += 1;
        }
        assert_eq!(seen, 15);
    }

    #[test]
    fn a_part_is_the_same_as_that_part_of_the_whole() {
        for encoding in [Encoding::F16, Encoding::Q4_1, Encoding::Q6K] {
            let (block, width) = encoding.block();
            let blocks = 600usize.div_ceil(block);
            let raw: Vec<u8> = (0..blocks * width).map(|i| (i * 37 % 113) as u8).collect();
            let mut whole = vec![0f32; blocks * block];
            encoding.decode(&raw, 0, &mut whole);
            for (start, len) in [(0, 1), (31, 2), (5, 300), (255, 3), (599, 1)] {
                let mut part = vec![0f32; len];
                encoding.decode(&raw, start, &mut part);
                assert_eq!(part, whole[start..start + len], "{encoding} {start} {len}");
            }
        }
    }
}
