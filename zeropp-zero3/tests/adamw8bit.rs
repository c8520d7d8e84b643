//! AdamW with moments in 8 bits against torchao's: weights and moments after 100 steps with given
//! gradients, in one run of elements and in blocks. `fixtures/make_adamw8bit.py` wrote the figures.

use serde::Deserialize;
use zeropp_zero3::adamw::AdamW;
use zeropp_zero3::adamw8bit::AdamW8bit;
use zeropp_zero3::rule::{Elements, Parameter, Role, StepScale, UpdateRule};

const BLOCK: usize = 128;
/// Words of a block: its scale and its codes.
const WORDS: usize = 1 + BLOCK / 4;

#[derive(Deserialize)]
struct Table {
    steps: u64,
    lr: f64,
    beta1: f64,
    beta2: f64,
    eps: f64,
    weight_decay: f64,
    matrix: Vec<f32>,
    exp_avg: Moment,
    exp_avg_sq: Moment,
    vector: Vec<f32>,
}

#[derive(Deserialize)]
struct Moment {
    scales: Vec<f32>,
    codes: Vec<u8>,
}

/// From -128 to 127, as in the script.
fn number(i: usize, salt: usize) -> f32 {
    let mut x = (i as u32).wrapping_mul(2_654_435_761);
    x = x.wrapping_add((salt as u32).wrapping_mul(40_503)).wrapping_add(12_345);
    x ^= x >> 15;
    x = x.wrapping_mul(2_246_822_519);
    x ^= x >> 13;
    (x >> 16 & 0xFF) as f32 - 128.0
}

/// A whole number of either sign, from 128 to 255, over a power of two.
fn gradient(i: usize, salt: usize, step: u64) -> f32 {
    let x = number(i, 1000 * step as usize + salt);
    (if x < 0.0 { x - 127.0 } else { x + 128.0 }) / (1 << (12 + i % 7)) as f32
}

/// What becomes of a parameter and of what is kept of it, updated in runs of `run` elements.
fn trained(table: &Table, shape: &[usize], salt: usize, run: usize) -> (Vec<f32>, Vec<Vec<f32>>) {
    let Table { beta1, beta2, eps, weight_decay, lr, .. } = *table;
    let rule = AdamW8bit { adamw: AdamW { beta1, beta2, eps, weight_decay } };
    let of = Parameter { name: "w", shape, role: Role::Hidden, decay: shape.len() > 1 };
    let n: usize = shape.iter().product();
    let mut p: Vec<f32> = (0..n).map(|i| number(i, salt) / 512.0).collect();
    let kept = rule.state(&of);
    let mut state: Vec<Vec<f32>> = kept.iter().map(|kept| vec![0.0; kept.words(n)]).collect();
    for update in 1..=table.steps {
        let g: Vec<f32> = (0..n).map(|i| gradient(i, salt, update)).collect();
        let scale = StepScale { lr, update, gradient: 1.0 };
        for (at, p) in p.chunks_mut(run).enumerate() {
            let mut of_run: Vec<&mut [f32]> = Vec::new();
            for (kept, words) in kept.iter().zip(&mut state) {
                let each = kept.words(run);
                of_run.push(&mut words[at * each..][..kept.words(p.len())]);
            }
            let gradient = &g[at * run..][..p.len()];
            let elements = Elements { parameter: p, state: &mut of_run, gradient };
            rule.update(&of, elements, &scale);
        }
    }
    (p, state)
}

/// How far apart they are, relative to the largest.
fn apart(ours: &[f32], theirs: &[f32]) -> f32 {
    let largest = theirs.iter().fold(0f32, |most, x| most.max(x.abs()));
    let pairs = ours.iter().zip(theirs);
    pairs.fold(0f32, |most, (a, b)| most.max((a - b).abs())) / largest
}

#[test]
fn a_hundred_steps_in_8_bits_are_torchao_s() {
    let table: Table = serde_json::from_str(include_str!("fixtures/adamw8bit.json")).unwrap();
    let (matrix, state) = trained(&table, &[64, 96], 2, 64 * 96);
    // Where a moment is within a rounding of the middle between two codes, either may be taken.
    let stored = matrix.iter().zip(&table.matrix);
    let off: Vec<f32> = stored.map(|(a, b)| (a - b).abs()).filter(|off| *off > 1e-6).collect();
    assert!(off.len() <= 2 && off.iter().all(|off| *off < 1e-3), "from torchao's: {off:?}");
    for (words, theirs) in state.iter().zip([&table.exp_avg, &table.exp_avg_sq]) {
        let blocks: Vec<&[f32]> = words.chunks(WORDS).take(theirs.scales.len()).collect();
        let scales: Vec<f32> = blocks.iter().map(|block| block[0]).collect();
        let off = apart(&scales, &theirs.scales);
        assert!(off <= 1e-6, "scales are {off:e} apart");
        let codes = blocks.iter().flat_map(|block| &block[1..]);
        let codes = codes.flat_map(|word| word.to_bits().to_le_bytes());
        let pairs = codes.zip(&theirs.codes);
        let off: Vec<u8> = pairs.map(|(a, b)| a.abs_diff(*b)).filter(|off| *off > 0).collect();
        assert!(off.len() <= 2 && off.iter().all(|off| *off == 1), "codes are {off:?} apart");
    }
    let (vector, state) = trained(&table, &[24], 3, 24);
    assert!(state.iter().all(|moment| moment.len() == 24), "a small one keeps fp32");
    let off = apart(&vector, &table.vector);
    assert!(off <= 2e-6, "the vector is {off:e} from torchao's");
}

/// A shard may begin and end at any block.
#[test]
fn moments_in_8_bits_do_not_depend_on_where_shards_end() {
    let table: Table = serde_json::from_str(include_str!("fixtures/adamw8bit.json")).unwrap();
    let table = Table { steps: 5, ..table };
    // The last block is not whole.
    let shape = [65, 70];
    let bits = |(p, state): (Vec<f32>, Vec<Vec<f32>>)| {
        let bits = |x: Vec<f32>| x.into_iter().map(f32::to_bits).collect::<Vec<_>>();
        (bits(p), state.into_iter().map(bits).collect::<Vec<_>>())
    };
    let whole = bits(trained(&table, &shape, 2, 65 * 70));
    for run in [BLOCK, 3 * BLOCK, 32 * BLOCK] {
        assert!(bits(trained(&table, &shape, 2, run)) == whole, "runs of {run}");
    }
}
