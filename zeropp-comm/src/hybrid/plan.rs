//! Which parts of the buffers of a collective go to which process, and what they make there.

use std::ops::Range;

use burn::tensor::{DType, Tensor};

use super::group::HybridGroup;
use crate::kernels;
use crate::signature::{Operation, Signature};

/// Collectives whose buffers of one process have at most this many bytes travel in the headers.
const SMALL_BYTES: usize = 768;

/// A collective on buffers, as all ranks have called it.
pub(super) struct CollectivePlan<'a> {
    group: &'a HybridGroup,
    operation: Operation,
    pub(super) kind: DType,
    /// Elements that each rank passes.
    len: usize,
    root: Option<usize>,
}

/// Buffers by the place of their process in the outer group; none from this one.
pub(super) type Arrived = Vec<Option<Tensor<1>>>;

impl<'a> CollectivePlan<'a> {
    /// `None` for collectives that are not on buffers.
    pub(super) fn new(group: &'a HybridGroup, signature: &Signature) -> Option<CollectivePlan<'a>> {
        let (kind, len) = signature.buffer?;
        Some(CollectivePlan {
            group,
            operation: signature.operation,
            kind,
            len,
            root: signature.root,
        })
    }

    /// Whether the headers carry all buffers: the same answer in all processes.
    pub(super) fn is_small(&self) -> bool {
        let most = self.group.places.iter().map(Vec::len).max().unwrap_or(0);
        most * self.len * self.kind.size() <= SMALL_BYTES
    }

    /// The parts of this process's `inputs` that the process at `to` needs, to be put end to end;
    /// empty where there is no message.
    pub(super) fn outgoing(&self, inputs: &[Tensor<1>], to: usize) -> Vec<Tensor<1>> {
        let all = |ranges: &[Range<usize>]| {
            let parts = |t: &Tensor<1>| ranges.iter().map(|r| slice(t, r)).collect::<Vec<_>>();
            inputs.iter().flat_map(parts).collect()
        };
        match self.operation {
            Operation::AllGather => inputs.to_vec(),
            Operation::ReduceScatter => {
                let places = &self.group.places[to];
                all(&places.iter().map(|place| self.part(*place)).collect::<Vec<_>>())
            }
            Operation::AllReduce => match self.cut(to) {
                range if range.is_empty() => Vec::new(),
                range => all(&[range]),
            },
            _ => match self.root_home() {
                (home, index) if home == self.group.here() => vec![inputs[index].clone()],
                _ => Vec::new(),
            },
        }
    }

    /// Elements of the message from the process at `from`; 0 where there is none.
    pub(super) fn incoming(&self, from: usize) -> usize {
        let (here, theirs) = (self.group.here(), self.group.places[from].len());
        match self.operation {
            Operation::AllGather => theirs * self.len,
            Operation::ReduceScatter => {
                theirs * self.group.places[here].len() * (self.len / self.group.size())
            }
            Operation::AllReduce => theirs * self.cut(here).len(),
            _ if self.root_home().0 == from => self.len,
            _ => 0,
        }
    }

    /// The results of this process's ranks; of an all-reduce this process's part of the sum.
    pub(super) fn results(&self, inputs: &[Tensor<1>], arrived: &Arrived) -> Vec<Tensor<1>> {
        let here = self.group.here();
        let mine = &self.group.places[here];
        match self.operation {
            Operation::AllGather => self.gathered(&self.pieces(inputs, arrived, 0..self.len, 0)),
            Operation::ReduceScatter => {
                let sum = |(index, place): (usize, &usize)| {
                    let pieces = self.pieces(inputs, arrived, self.part(*place), index);
                    kernels::all_reduce(&self.group.local.buffers, &pieces)[*place].clone()
                };
                mine.iter().enumerate().map(sum).collect()
            }
            Operation::AllReduce => {
                let pieces = self.pieces(inputs, arrived, self.cut(here), 0);
                vec![kernels::all_reduce(&self.group.local.buffers, &pieces)[mine[0]].clone()]
            }
            _ => {
                let (home, index) = self.root_home();
                let sent = if home == here { Some(&inputs[index]) } else { arrived[home].as_ref() };
                let sent = sent.expect("the root's process has sent");
                inputs.iter().map(|own| kernels::on(&own.device(), sent)).collect()
            }
        }
    }

    /// The same where the headers carry all ranks' buffers, by place.
    pub(super) fn small_results(&self, buffers: &[Tensor<1>]) -> Vec<Tensor<1>> {
        let mine = &self.group.places[self.group.here()];
        let pool = &self.group.local.buffers;
        let all = match self.operation {
            Operation::AllGather => kernels::all_gather(pool, buffers),
            Operation::AllReduce => kernels::all_reduce(pool, buffers),
            Operation::ReduceScatter => {
                return kernels::reduce_parts(pool, buffers, mine.iter().copied());
            }
            _ => {
                let sent = &buffers[self.root.expect("a broadcast names its root")];
                buffers.iter().map(|own| kernels::on(&own.device(), sent)).collect()
            }
        };
        mine.iter().map(|place| all[*place].clone()).collect()
    }

    /// Elements of the part of an all-reduced sum that the process at `home` makes.
    pub(super) fn cut(&self, home: usize) -> Range<usize> {
        let each = self.len.div_ceil(self.group.places.len());
        (home * each).min(self.len)..((home + 1) * each).min(self.len)
    }

    /// An all-reduced sum from its parts: `own` is this process's.
    pub(super) fn joined(&self, own: &Tensor<1>, arrived: &Arrived) -> Tensor<1> {
        let device = own.device();
        let part = |home: usize| match &arrived[home] {
            Some(part) => kernels::on(&device, part),
            None if home == self.group.here() => own.clone(),
            None => slice(own, &(0..0)),
        };
        let parts: Vec<Tensor<1>> = (0..arrived.len()).map(part).collect();
        kernels::all_gather(&self.group.local.buffers, &parts)[self.group.here()].clone()
    }

    /// Process of the root of a broadcast, and its place among that process's members.
    fn root_home(&self) -> (usize, usize) {
        self.group.homes[self.root.expect("a broadcast names its root")]
    }

    /// The part of a reduce-scattered buffer that the member at `place` keeps.
    fn part(&self, place: usize) -> Range<usize> {
        let part = self.len / self.group.size();
        place * part..(place + 1) * part
    }

    /// Every rank's elements of `range`, in rank order. A message holds, for each rank of its
    /// process, as many stretches of that length as it has receivers here; `index` is the one
    /// wanted.
    fn pieces(
        &self,
        inputs: &[Tensor<1>],
        arrived: &Arrived,
        range: Range<usize>,
        index: usize,
    ) -> Vec<Tensor<1>> {
        let device = inputs[0].device();
        let stretches = match self.operation {
            Operation::ReduceScatter => inputs.len(),
            _ => 1,
        };
        let piece = |(home, theirs): &(usize, usize)| match &arrived[*home] {
            Some(message) => {
                let start = (theirs * stretches + index) * range.len();
                kernels::on(&device, &slice(message, &(start..start + range.len())))
            }
            None if *home == self.group.here() => slice(&inputs[*theirs], &range),
            // No message: nothing is to be summed here.
            None => slice(&inputs[0], &(0..0)),
        };
        self.group.homes.iter().map(piece).collect()
    }

    fn gathered(&self, pieces: &[Tensor<1>]) -> Vec<Tensor<1>> {
        let all = kernels::all_gather(&self.group.local.buffers, pieces);
        let mine = &self.group.places[self.group.here()];
        mine.iter().map(|place| all[*place].clone()).collect()
    }
}

fn slice(tensor: &Tensor<1>, range: &Range<usize>) -> Tensor<1> {
    if *range == (0..tensor.dims()[0]) {
        tensor.clone()
    } else {
        tensor.clone().slice(range.clone())
    }
}
