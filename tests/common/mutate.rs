//! Damaged inputs: valid ones with a few changes, and what may come of reading them.
//!
//! The seed is another one each time and is printed; `ZEROPP_SEED` repeats one.
//! `ZEROPP_MUTATIONS` is how many inputs of each kind there are.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{SystemTime, UNIX_EPOCH};

/// The longest message, in bytes: a screen.
pub(crate) const MESSAGE_MAX: usize = 2500;

/// Words that are put in the place of a number or in between.
const WORDS: [&str; 30] = [
    "-1",
    "0",
    "1",
    "3",
    "256",
    "65536",
    "4294967296",
    "9223372036854775807",
    "18446744073709551615",
    "1e308",
    "1e-320",
    "-0.0",
    "0.1",
    "1e21",
    "nan",
    "null",
    "true",
    "\"\"",
    "[]",
    "{}",
    "[[]]",
    "\"x\"",
    "\"\\u001b[2J\"",
    "\"\\u202e\"",
    "\u{1b}]0;x\u{7}",
    ",",
    "\n",
    "=",
    "\u{202e}",
    "\u{9b}2J",
];

/// Random numbers (splitmix64).
pub(crate) struct Random(pub(crate) u64);

impl Random {
    /// For a kind of inputs; the seed is printed.
    pub(crate) fn for_kind(kind: &str) -> Random {
        let fresh =
            || SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |t| t.as_nanos() as u64);
        let given = std::env::var("ZEROPP_SEED").ok().and_then(|text| text.parse().ok());
        let seed = given.unwrap_or_else(fresh);
        println!("{kind}: ZEROPP_SEED={seed}");
        Random(seed)
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n.max(1) as u64) as usize
    }
}

/// How many inputs of a kind; `usual` where the environment does not say.
pub(crate) fn count(usual: usize) -> usize {
    std::env::var("ZEROPP_MUTATIONS").ok().and_then(|text| text.parse().ok()).unwrap_or(usual)
}

/// `input` with one to four changes.
pub(crate) fn mutated(input: &[u8], random: &mut Random) -> Vec<u8> {
    let mut bytes = input.to_vec();
    for _ in 0..1 + random.below(4) {
        let (at, len) = (random.below(bytes.len()), 1 + random.below(8));
        let end = (at + len).min(bytes.len());
        match random.below(9) {
            0 if !bytes.is_empty() => bytes[at] ^= 1 << random.below(8),
            1 => drop(bytes.drain(at.min(end)..end)),
            2 => {
                let piece = bytes[at.min(end)..end].to_vec();
                bytes.splice(at..at, piece);
            }
            3 => bytes.truncate(at),
            4 => drop(bytes.splice(at..at, word(random))),
            5 => swap_lines(&mut bytes, random),
            _ => replace_number(&mut bytes, random),
        }
    }
    bytes
}

fn word(random: &mut Random) -> Vec<u8> {
    WORDS[random.below(WORDS.len())].as_bytes().to_vec()
}

/// One of the numbers in it becomes a word.
fn replace_number(bytes: &mut Vec<u8>, random: &mut Random) {
    let is_of = |b: &u8| b.is_ascii_digit() || *b == b'.';
    let starts: Vec<usize> = (0..bytes.len())
        .filter(|i| bytes[*i].is_ascii_digit() && (*i == 0 || !is_of(&bytes[i - 1])))
        .collect();
    if starts.is_empty() {
        return;
    }
    let start = starts[random.below(starts.len())];
    let end = start + bytes[start..].iter().take_while(|b| is_of(b)).count();
    let word = word(random);
    bytes.splice(start..end, word);
}

fn swap_lines(bytes: &mut Vec<u8>, random: &mut Random) {
    let mut lines: Vec<&[u8]> = bytes.split(|b| *b == b'\n').collect();
    let (a, b) = (random.below(lines.len()), random.below(lines.len()));
    lines.swap(a, b);
    *bytes = lines.join(&b'\n');
}

/// Has `read` read mutations of the inputs; each is read or refused in a message of bounded length,
/// and nothing panics. `read` returns whether it was read.
#[allow(dead_code, reason = "not every test reads in its own process")]
pub(crate) fn read_or_refused(
    kind: &str,
    inputs: &[&[u8]],
    usual: usize,
    read: impl Fn(&[u8]) -> Result<(), String>,
) {
    let mut random = Random::for_kind(kind);
    for input in inputs {
        read(input).unwrap_or_else(|e| panic!("{kind}: {} is good: {e}", input.escape_ascii()));
    }
    let mut refused = 0;
    for _ in 0..count(usual) {
        let input = mutated(inputs[random.below(inputs.len())], &mut random);
        let result = catch_unwind(AssertUnwindSafe(|| read(&input)));
        let result = result.unwrap_or_else(|_| panic!("{kind} panics: {}", input.escape_ascii()));
        if let Err(message) = result {
            refused += 1;
            let long = message.len();
            assert!(!message.is_empty(), "{kind}: nothing is said of {}", input.escape_ascii());
            assert!(long <= MESSAGE_MAX, "{kind}: {long} bytes on {}", input.escape_ascii());
        }
    }
    assert!(refused > 0, "{kind}: nothing was refused");
}
