//! Cross-entropy of logits that are made a block of the vocabulary at a time: the sums of a block,
//! those of all blocks, and the gradient. Each block is computed by itself, and sums over blocks
//! have one order, so no bit depends on which blocks are computed together.

use std::borrow::Cow;

use super::loss::NOT_SCORED;
use super::math::{exp, ln};
use super::reduce::{max, sum};
use super::threads::{Fresh, each, piece};
use super::{GRAIN, add, simd};

/// Of some of a token's logits: the largest, and the sum of eˣ⁻ᵗᵒᵖ over all of them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpSum {
    /// The largest.
    pub top: f32,
    /// The sum.
    pub sum: f32,
}

impl ExpSum {
    /// Of a token that is not scored; nothing is computed from it.
    const UNUSED: ExpSum = ExpSum { top: 0.0, sum: 1.0 };

    /// Of these logits and those that come after them.
    #[inline(always)]
    fn and(self, next: ExpSum) -> ExpSum {
        let top = if next.top > self.top { next.top } else { self.top };
        let sum = self.sum * exp(self.top - top) + next.sum * exp(next.top - top);
        ExpSum { top, sum }
    }
}

/// The logits of some tokens for a few blocks of the vocabulary that follow each other.
pub struct BlockLogits<'a> {
    targets: Cow<'a, [usize]>,
    /// The id of the next block's first column.
    next: usize,
    /// The logit of each token's target, if one of the blocks has it; else 0.
    chosen: Vec<f32>,
    blocks: Vec<Block>,
}

/// One block of `[tokens, width]`.
struct Block {
    first: usize,
    /// eˣ⁻ᵗᵒᵖ of each logit x.
    exps: Vec<f32>,
    sums: Vec<ExpSum>,
}

impl<'a> BlockLogits<'a> {
    /// For tokens with these targets, ids of the whole vocabulary or [`NOT_SCORED`]; the first
    /// column of the first block is the logit of id `first`.
    pub fn new(targets: impl Into<Cow<'a, [usize]>>, first: usize) -> Self {
        let targets = targets.into();
        Self { next: first, chosen: vec![0.0; targets.len()], blocks: Vec::new(), targets }
    }

    /// Adds the next block: `logits: [tokens, width]`.
    ///
    /// # Panics
    /// Panics if the logits are no whole rows.
    pub fn push(&mut self, mut logits: Vec<f32>) {
        let n = self.targets.len();
        let width = logits.len() / n.max(1);
        assert_eq!(width * n, logits.len(), "rows of logits for {n} tokens");
        let rows = rows_at_once(n, width);
        let mut sums = Fresh::new(n);
        let parts = logits.chunks_mut((rows * width).max(1)).zip(self.targets.chunks(rows));
        let parts = parts.zip(self.chosen.chunks_mut(rows)).zip(sums.parts(rows));
        let first = self.next;
        each(parts, |(((logits, targets), chosen), mut sums)| {
            simd(
                #[inline(always)]
                || {
                    let rows = logits.chunks_exact_mut(width).zip(targets);
                    for ((row, target), chosen) in rows.zip(chosen) {
                        if *target == NOT_SCORED {
                            row.fill(0.0);
                            sums.push(ExpSum::UNUSED);
                            continue;
                        }
                        if let Some(logit) = row.get(target.wrapping_sub(first)) {
                            *chosen = *logit;
                        }
                        let top = max(row);
                        row.iter_mut().for_each(|x| *x = exp(*x - top));
                        sums.push(ExpSum { top, sum: sum(row, |x| x) });
                    }
                },
            );
        });
        self.next += width;
        self.blocks.push(Block { first, exps: logits, sums: sums.done() });
    }

    /// The sums of each block, first block first: one for each token.
    pub fn sums(&self) -> impl Iterator<Item = &[ExpSum]> {
        self.blocks.iter().map(|block| &block.sums[..])
    }

    /// The logit of each token's target where one of these blocks has it; else 0.
    pub fn chosen(&self) -> &[f32] {
        &self.chosen
    }

    /// The gradients of the blocks, first block first, each in the memory of its logits: of `scale`
    /// times the sum of the cross-entropies, scale·(softmax − one-hot). `totals` are the sums over
    /// all blocks of the vocabulary.
    pub fn slopes(self, totals: &[ExpSum], scale: f32) -> impl Iterator<Item = Vec<f32>> {
        let targets = self.targets;
        self.blocks.into_iter().map(move |block| block.slopes(&targets, totals, scale))
    }
}

/// Rows that are worth a thread.
fn rows_at_once(n: usize, width: usize) -> usize {
    piece(n, 1, GRAIN.div_ceil(width.max(1)))
}

impl Block {
    fn slopes(mut self, targets: &[usize], totals: &[ExpSum], scale: f32) -> Vec<f32> {
        let (n, first) = (targets.len(), self.first);
        let width = self.exps.len() / n.max(1);
        let rows = rows_at_once(n, width);
        let parts = self.exps.chunks_mut((rows * width).max(1)).zip(targets.chunks(rows));
        let parts = parts.zip(self.sums.chunks(rows)).zip(totals.chunks(rows));
        each(parts, |(((exps, targets), sums), totals)| {
            simd(
                #[inline(always)]
                || {
                    let rows = exps.chunks_exact_mut(width).zip(targets);
                    for ((row, target), (own, all)) in rows.zip(sums.iter().zip(totals)) {
                        if *target == NOT_SCORED {
                            continue;
                        }
                        let share = scale / all.sum * exp(own.top - all.top);
                        row.iter_mut().for_each(|x| *x *= share);
                        if let Some(slope) = row.get_mut(target.wrapping_sub(first)) {
                            *slope -= scale;
                        }
                    }
                },
            );
        });
        self.exps
    }
}

/// The sums over all blocks for each token, of those of each block in the order of the vocabulary.
pub fn totals<'a>(mut blocks: impl Iterator<Item = &'a [ExpSum]>) -> Vec<ExpSum> {
    let mut totals = blocks.next().unwrap_or_default().to_vec();
    for block in blocks {
        simd(
            #[inline(always)]
            || totals.iter_mut().zip(block).for_each(|(all, next)| *all = all.and(*next)),
        );
    }
    totals
}

/// `sum`, that of earlier tokens, and the cross-entropies of these, added in f64, first token
/// first. `chosen`: the logit of each one's target.
pub fn cross_entropy(sum: f64, totals: &[ExpSum], chosen: &[f32], targets: &[usize]) -> f64 {
    let tokens = totals.iter().zip(chosen).zip(targets);
    let scored = tokens.filter(|(_, target)| **target != NOT_SCORED);
    scored.fold(sum, |sum, ((all, chosen), _)| sum + f64::from(all.top - chosen + ln(all.sum)))
}

/// A sum over blocks as a binary tree: of the first 2ⁿ of them, as many as are fewer than all, and
/// of the others. So the blocks of a branch may be summed anywhere.
#[derive(Default)]
pub struct TreeSum {
    /// Sums of branches that follow each other, each of half as many blocks as the one before it or
    /// fewer, with their blocks.
    branches: Vec<(usize, Vec<f32>)>,
    spare: Vec<Vec<f32>>,
}

impl TreeSum {
    /// Adds the next block's `len` elements, all of which `fill` sets; they hold anything before.
    pub fn add(&mut self, len: usize, fill: impl FnOnce(&mut [f32])) {
        let mut next = self.spare.pop().unwrap_or_else(|| vec![0.0; len]);
        fill(&mut next);
        self.branches.push((1, next));
        while let [.., (left, _), (right, _)] = self.branches[..]
            && left == right
        {
            self.join_last();
        }
    }

    /// The sum of all blocks; empty without any.
    pub fn done(mut self) -> Vec<f32> {
        while self.branches.len() > 1 {
            self.join_last();
        }
        self.branches.pop().map(|(_, sum)| sum).unwrap_or_default()
    }

    fn join_last(&mut self) {
        let (count, right) = self.branches.pop().expect("there are two");
        let (blocks, left) = self.branches.last_mut().expect("there are two");
        *blocks += count;
        add(left, &right);
        self.spare.push(right);
    }
}

#[cfg(test)]
mod tests;
