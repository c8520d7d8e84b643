//! Bits of a head know no slices: whole, and in slices that are computed apart.

use half::bf16 as Half;
use proptest::prelude::*;

use super::*;
use crate::bf16::convert::narrow;
use crate::bf16::{self, Mat, Packed};
use crate::gemm::{MatMut, MatRef, StoreMode, gemm, product};
use crate::loss;
use crate::threads::Threads;

fn numbers(n: usize, seed: u32, size: f32) -> Vec<f32> {
    let hash = |i: usize| (i as u32 ^ seed.wrapping_mul(77)).wrapping_mul(2_654_435_761);
    (0..n).map(|i| (hash(i).rotate_left(13) as f32 / u32::MAX as f32 * 2.0 - 1.0) * size).collect()
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// A head, its tokens, and the rows of a block.
struct Case {
    x: Vec<f32>,
    w: Vec<f32>,
    targets: Vec<usize>,
    h: usize,
    ids: usize,
    rows: usize,
    /// Whether products have factors in bf16.
    halves: bool,
}

/// The bits of a loss, dX and dW.
#[derive(PartialEq, Debug)]
struct Bits(u64, Vec<u32>, Vec<u32>);

impl Case {
    fn blocks(&self) -> usize {
        self.ids.div_ceil(self.rows)
    }

    fn block(&self, at: usize) -> std::ops::Range<usize> {
        at * self.rows..self.ids.min((at + 1) * self.rows)
    }

    fn w(&self, at: usize) -> &[f32] {
        let rows = self.block(at);
        &self.w[rows.start * self.h..rows.end * self.h]
    }

    fn logits(&self, at: usize) -> Vec<f32> {
        let (n, width) = (self.targets.len(), self.block(at).len());
        if !self.halves {
            let w = MatRef::new(self.w(at), width, self.h);
            return product(1.0, MatRef::new(&self.x, n, self.h), w.t());
        }
        let (x, w) = (narrow(&self.x), narrow(self.w(at)));
        let mut logits = vec![0.0; n * width];
        let w = Packed::new(Mat::new(&w, width, self.h).t());
        bf16::product_set(&mut logits, width, Mat::new(&x, n, self.h), &w);
        logits
    }

    /// A block's dX, set, and dW.
    fn gradients(&self, at: usize, slope: &[f32], dx: &mut [f32]) -> Vec<f32> {
        let (n, h, width) = (self.targets.len(), self.h, self.block(at).len());
        let mut dw = vec![0.0; width * h];
        if !self.halves {
            let slope = MatRef::new(slope, n, width);
            let w = MatRef::new(self.w(at), width, h);
            gemm(MatMut::new(dx, n, h), StoreMode::Set, 1.0, slope, w);
            let x = MatRef::new(&self.x, n, h);
            gemm(MatMut::new(&mut dw, width, h), StoreMode::Add, 1.0, slope.t(), x);
            return dw;
        }
        let [slope, w, x]: [Vec<Half>; 3] = [narrow(slope), narrow(self.w(at)), narrow(&self.x)];
        let slope = Mat::new(&slope, n, width);
        bf16::product_set(dx, h, slope, &Packed::new(Mat::new(&w, width, h)));
        bf16::add_product(&mut dw, h, slope.t(), &Packed::new(Mat::new(&x, n, h)));
        dw
    }

    /// Of slices that have so many blocks and share nothing but their sums.
    fn in_slices(&self, slices: &[usize]) -> Bits {
        let n = self.targets.len();
        let mut first = 0;
        let mut all: Vec<_> = slices
            .iter()
            .map(|blocks| {
                let mut logits = BlockLogits::new(&self.targets, first * self.rows);
                (first..first + blocks).for_each(|at| logits.push(self.logits(at)));
                first += blocks;
                logits
            })
            .collect();
        let totals = totals(all.iter().flat_map(BlockLogits::sums));
        let mut chosen = vec![0.0; n];
        for slice in &all {
            chosen.iter_mut().zip(slice.chosen()).for_each(|(sum, x)| *sum += x);
        }
        let loss = cross_entropy(0.0, &totals, &chosen, &self.targets);
        let (mut leaves, mut dw) = (Vec::new(), Vec::new());
        for slope in all.drain(..).flat_map(|slice| slice.slopes(&totals, 0.25)) {
            // A slice's memory holds anything.
            let mut dx = vec![f32::NAN; n * self.h];
            dw.extend(self.gradients(leaves.len(), &slope, &mut dx));
            leaves.push(dx);
        }
        Bits(loss.to_bits(), bits(&branch(&leaves)), bits(&dw))
    }

    /// As a rank does that has all of it.
    fn whole(&self) -> Bits {
        let mut logits = BlockLogits::new(&self.targets, 0);
        (0..self.blocks()).for_each(|at| logits.push(self.logits(at)));
        let totals = totals(logits.sums());
        let loss = cross_entropy(0.0, &totals, logits.chosen(), &self.targets);
        let (mut dx, mut dw) = (TreeSum::default(), Vec::new());
        for (at, slope) in logits.slopes(&totals, 0.25).enumerate() {
            let len = self.targets.len() * self.h;
            dx.add(len, |dx| dw.extend(self.gradients(at, &slope, dx)));
        }
        Bits(loss.to_bits(), bits(&dx.done()), bits(&dw))
    }
}

/// The sum of these blocks, by the rule of the tree.
fn branch(leaves: &[Vec<f32>]) -> Vec<f32> {
    if let [leaf] = leaves {
        return leaf.clone();
    }
    let (left, right) = leaves.split_at(leaves.len().next_power_of_two() / 2);
    branch(left).iter().zip(branch(right)).map(|(a, b)| a + b).collect()
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 30,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    /// Whole or in slices, of one thread or two: the same bits.
    #[test]
    fn no_bit_of_a_head_knows_its_slices(
        n in 1..70_usize, h in 1..90_usize, ids in 1..700_usize, rows in 1..5_usize,
        halves: bool, cuts in prop::collection::vec(0.0..1_f64, 0..5), seed: u32,
    ) {
        let target = |i: usize| match numbers(1, seed ^ i as u32, 1.0)[0] {
            x if x < -0.7 => NOT_SCORED,
            x => ((x + 0.7) / 1.7001 * ids as f32) as usize,
        };
        let case = Case {
            x: numbers(n * h, seed, 1.0),
            w: numbers(ids * h, seed ^ 1, 2.0),
            targets: (0..n).map(target).collect(),
            h, ids, rows: 32 * rows, halves,
        };
        let mut ends: Vec<usize> =
            cuts.iter().map(|cut| (cut * case.blocks() as f64) as usize).collect();
        ends.extend([0, case.blocks()]);
        ends.sort_unstable();
        let slices: Vec<usize> = ends.windows(2).map(|ends| ends[1] - ends[0]).collect();
        let want = case.whole();
        prop_assert_eq!(&case.in_slices(&slices), &want);
        let threads = Threads::new(2, false);
        let _in_use = threads.install();
        prop_assert_eq!(&case.in_slices(&slices), &want);
        prop_assert_eq!(&case.whole(), &want);
    }

    /// One block has the bits of a head without blocks, and several are close to it.
    #[test]
    fn blocks_change_a_loss_and_its_gradient_by_rounding_only(
        n in 1..20_usize, width in 1..300_usize, rows in 1..100_usize, size in 0.1..50_f32,
        seed: u32,
    ) {
        let logits = numbers(n * width, seed, size);
        let targets: Vec<usize> = (0..n)
            .map(|i| if i % 5 == 3 { NOT_SCORED } else { i * 31 % width })
            .collect();
        let mut want = logits.clone();
        let loss = loss::cross_entropy_gradient(&mut want, width, &targets, 0.5);
        for rows in [width, rows.min(width)] {
            let mut blocks = BlockLogits::new(&targets, 0);
            for first in (0..width).step_by(rows) {
                let of_row = |row: &[f32]| row[first..width.min(first + rows)].to_vec();
                blocks.push(logits.chunks(width).flat_map(of_row).collect());
            }
            let totals = totals(blocks.sums());
            let got = cross_entropy(0.0, &totals, blocks.chosen(), &targets);
            let slopes: Vec<_> = blocks.slopes(&totals, 0.5).collect();
            let row = |i: usize| {
                slopes.iter().flat_map(move |slope| slope.chunks(slope.len() / n).nth(i).unwrap())
            };
            let got_slopes: Vec<f32> = (0..n).flat_map(row).copied().collect();
            if rows == width {
                prop_assert_eq!(got.to_bits(), loss.to_bits());
                prop_assert_eq!(bits(&got_slopes), bits(&want));
            }
            prop_assert!((got - loss).abs() <= 1e-6 * loss.abs().max(1.0), "{got} and {loss}");
            for (got, want) in got_slopes.iter().zip(&want) {
                prop_assert!((got - want).abs() <= 1e-6 * want.abs() + 1e-7, "{got}, {want}");
            }
        }
    }
}

/// Each sum is of the branch that the rule names, whatever the number of blocks.
#[test]
fn a_tree_of_sums_adds_equal_halves_first() {
    for count in 1..=64 {
        let leaves: Vec<_> = (0..count).map(|i| numbers(100, i, 1.0)).collect();
        let mut tree = TreeSum::default();
        leaves.iter().for_each(|leaf| tree.add(100, |sum| sum.copy_from_slice(leaf)));
        assert_eq!(bits(&tree.done()), bits(&branch(&leaves)));
    }
    assert_eq!(TreeSum::default().done(), Vec::<f32>::new());
}
