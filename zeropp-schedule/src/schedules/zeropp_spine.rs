//! The F and B of one rank in ZeroPP's unit, block by block (ZeroPP §3.1): all that a step fixes
//! once the depth of the last stage's warm-up is chosen.

use std::ops::Range;

use super::Shape;
use crate::ir::Compute;

/// An F or B of a rank's fixed sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Op {
    pub(super) kind: Compute,
    /// Which of the rank's V stages.
    pub(super) v: usize,
    /// Micro-batch of the step.
    pub(super) i: usize,
    /// First of its block: the weights must have come.
    pub(super) opens: bool,
    /// Last B of its block.
    pub(super) closes: bool,
    /// The next one is a B.
    pub(super) before_b: bool,
    /// Where a block opens: the stage of the block after it, if there is one.
    pub(super) ahead: Option<usize>,
}

/// Sequences by the depth of their warm-up, each written when it is first asked for.
pub(super) struct Spines {
    shape: Shape,
    ops: Vec<Op>,
    /// Range of `ops` by depth; empty where not written yet.
    by_depth: Vec<Range<usize>>,
}

impl Spines {
    pub(super) fn new(shape: &Shape) -> Spines {
        let deepest = shape.unit.min(shape.micro_batches);
        Spines { shape: *shape, ops: Vec::new(), by_depth: vec![0..0; deepest + 1] }
    }

    /// Where [`Spines::op`] finds the sequence with `warm_up` forwards of the last stage before its
    /// first B, in units that have so many.
    pub(super) fn range(&mut self, warm_up: usize) -> Range<usize> {
        let depth = warm_up.clamp(1, self.by_depth.len() - 1);
        if self.by_depth[depth].is_empty() {
            let first = self.ops.len();
            self.write(depth);
            self.by_depth[depth] = first..self.ops.len();
        }
        self.by_depth[depth].clone()
    }

    pub(super) fn op(&self, at: usize) -> Op {
        self.ops[at]
    }

    fn write(&mut self, warm_up: usize) {
        let from = self.ops.len();
        let mut first = 0;
        for size in self.shape.units() {
            self.unit(first, size, warm_up.min(size));
            first += size;
        }
        let mut ahead = None;
        let mut before_b = false;
        for op in self.ops[from..].iter_mut().rev() {
            op.before_b = before_b;
            before_b = op.kind == Compute::B;
            if op.opens {
                op.ahead = ahead;
                ahead = Some(op.v);
            }
        }
    }

    /// The unit of the micro-batches `first..first + size`.
    fn unit(&mut self, first: usize, size: usize, warm_up: usize) {
        let last = self.shape.virtual_stages - 1;
        let mut push = |kind, v: usize, i: usize| {
            let opens = i == 0 && (kind == Compute::F || v < last);
            let closes = i + 1 == size && kind == Compute::B;
            let i = first + i;
            self.ops.push(Op { kind, v, i, opens, closes, before_b: false, ahead: None });
        };
        for v in 0..last {
            (0..size).for_each(|i| push(Compute::F, v, i));
        }
        (0..warm_up).for_each(|i| push(Compute::F, last, i));
        for i in 0..size {
            push(Compute::B, last, i);
            if warm_up + i < size {
                push(Compute::F, last, warm_up + i);
            }
        }
        for v in (0..last).rev() {
            (0..size).for_each(|i| push(Compute::B, v, i));
        }
    }
}
