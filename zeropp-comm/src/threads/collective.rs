//! The work once all ranks have arrived: which thread does it, and which rank gets which result.

use std::any::Any;
use std::collections::BTreeMap;
use std::iter::repeat_n;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use burn::tensor::Tensor;

use super::barrier::{RankBarrier, RankInput, RankOutput};
use super::group::{ThreadsGroup, buffers_of};
use crate::kernels;
use crate::sync::Mutex;
use crate::{AllBytes, CommError};
use zeropp_core::device::hand_over;
use zeropp_failures::Operation;

/// Bytes that are worth a worker of their own.
const BYTES_A_JOB: usize = 1 << 20;

/// Carries out a collective: small things here, on the last rank's thread, where handing them
/// over would take longer; copies and sums of large buffers on the workers.
pub(super) fn start(group: &Arc<ThreadsGroup>, barrier: &Arc<RankBarrier>, inputs: Vec<RankInput>) {
    match barrier.signature.operation {
        Operation::Barrier => deliver(group, barrier, inputs.iter().map(|_| RankOutput::Nothing)),
        Operation::Exchange => exchange(group, barrier, inputs),
        Operation::Gather => gather(group, barrier, inputs),
        Operation::Split => split(group, barrier, inputs),
        Operation::Broadcast => broadcast(group, barrier, buffers_of(inputs)),
        Operation::AllGather | Operation::AllReduce | Operation::ReduceScatter => {
            compute(group, barrier, buffers_of(inputs));
        }
        Operation::Send | Operation::Recv => unreachable!("not a collective"),
    }
}

/// Gives every rank its result, in rank order.
fn deliver(
    group: &ThreadsGroup,
    barrier: &RankBarrier,
    outputs: impl IntoIterator<Item = RankOutput>,
) {
    barrier.slots.put(outputs);
    group.finish(barrier);
}

fn bytes_of(inputs: Vec<RankInput>) -> AllBytes {
    let bytes = |input| match input {
        RankInput::Bytes(bytes) => bytes,
        _ => unreachable!("signatures are equal, so every rank passed bytes"),
    };
    inputs.into_iter().map(bytes).collect()
}

/// Nothing is copied: all ranks share what each of them brought.
fn exchange(group: &ThreadsGroup, barrier: &RankBarrier, inputs: Vec<RankInput>) {
    let all = bytes_of(inputs);
    deliver(group, barrier, (0..all.len()).map(|_| RankOutput::Bytes(all.clone())));
}

fn gather(group: &ThreadsGroup, barrier: &RankBarrier, inputs: Vec<RankInput>) {
    let root = barrier.signature.root.expect("a gather names its root");
    let all = bytes_of(inputs);
    let none = AllBytes::default();
    let output = |place| RankOutput::Bytes(if place == root { all.clone() } else { none.clone() });
    deliver(group, barrier, (0..all.len()).map(output));
}

fn broadcast(group: &ThreadsGroup, barrier: &RankBarrier, buffers: Vec<Tensor<1>>) {
    let root = barrier.signature.root.expect("a broadcast names its root");
    let sent = &buffers[root];
    let received = |own: &Tensor<1>| hand_over(kernels::on(&own.device(), sent));
    let outputs: Vec<Tensor<1>> = buffers.iter().map(received).collect();
    drop(buffers);
    deliver(group, barrier, outputs.into_iter().map(RankOutput::Buffer));
}

/// Makes one group of each color; ranks are ordered by key, then by their order in this group.
fn split(group: &Arc<ThreadsGroup>, barrier: &RankBarrier, inputs: Vec<RankInput>) {
    let mut colors: BTreeMap<usize, Vec<(usize, usize, String)>> = BTreeMap::new();
    for (place, input) in inputs.into_iter().enumerate() {
        let RankInput::Split(name, color, key) = input else {
            unreachable!("signatures are equal, so every rank passed a color");
        };
        colors.entry(color).or_default().push((key, place, name));
    }
    let mut outputs: Vec<Option<RankOutput>> = (0..group.size()).map(|_| None).collect();
    for (_, mut ranks) in colors {
        ranks.sort();
        let (_, first, name) = ranks[0].clone();
        if let Some((_, other, theirs)) = ranks.iter().find(|rank| rank.2 != name) {
            return names_differ(group, barrier, *other, theirs, first, &name);
        }
        let places: Vec<usize> = ranks.iter().map(|&(_, place, _)| place).collect();
        let part = ThreadsGroup::new(group.world.clone(), name, group.world_ranks(&places));
        for (index, &place) in places.iter().enumerate() {
            outputs[place] = Some(RankOutput::Group(part.clone(), index));
        }
    }
    deliver(group, barrier, outputs.into_iter().flatten());
}

/// Fails the world: two ranks of one color disagree about its name.
fn names_differ(
    group: &ThreadsGroup,
    barrier: &RankBarrier,
    place: usize,
    mine: &str,
    peer: usize,
    theirs: &str,
) {
    let error = CommError::Mismatch {
        group: group.name.clone(),
        sequence: barrier.sequence,
        rank: group.members[place],
        mine: format!("{} into {mine}", barrier.signature),
        peer: group.members[peer],
        theirs: format!("{} into {theirs}", barrier.signature),
    };
    group.world.fail(group.members[place], error);
}

/// Cuts the work into jobs, one of which may serve several ranks.
fn compute(group: &Arc<ThreadsGroup>, barrier: &Arc<RankBarrier>, inputs: Vec<Tensor<1>>) {
    let bytes: usize = inputs.iter().map(|t| t.dims()[0] * t.dtype().size()).sum();
    let workers = &group.world.workers;
    let inline = bytes <= group.world.options.inline_bytes || workers.count() == 0;
    let size = inputs.len();
    let parts = match barrier.signature.operation {
        Operation::ReduceScatter if !inline => {
            (bytes / BYTES_A_JOB).clamp(1, size.min(workers.count()))
        }
        _ => 1,
    };
    let outputs = Mutex::new(vec![None; size]);
    let work = CollectiveWork { group: group.clone(), barrier: barrier.clone(), inputs, outputs };
    // `repeat_n` gives its own reference away with the last job: only jobs own the work.
    for (part, work) in repeat_n(Arc::new(work), parts).enumerate() {
        let places = part * size / parts..(part + 1) * size / parts;
        if inline {
            work.run(places);
        } else {
            workers.submit(Box::new(move || work.run(places)));
        }
    }
}

/// The inputs of one collective, and its results until they are complete.
struct CollectiveWork {
    group: Arc<ThreadsGroup>,
    barrier: Arc<RankBarrier>,
    inputs: Vec<Tensor<1>>,
    outputs: Mutex<Vec<Option<Tensor<1>>>>,
}

impl CollectiveWork {
    /// Makes the results of the ranks at `places`. A panic fails the world, so that no rank waits
    /// for a result that will not come.
    fn run(self: Arc<Self>, places: Range<usize>) {
        let first = places.start;
        match catch_unwind(AssertUnwindSafe(|| self.make(places))) {
            Ok(()) => {
                // The last job to end finds itself the only owner.
                if let Some(work) = Arc::into_inner(self) {
                    work.complete();
                }
            }
            Err(panic) => {
                fail_with_panic(&self.group, &self.barrier, first, &*panic);
            }
        }
    }

    fn make(&self, places: Range<usize>) {
        let buffers = &self.group.buffers;
        let made = match self.barrier.signature.operation {
            Operation::AllGather => kernels::all_gather(buffers, &self.inputs),
            Operation::AllReduce => kernels::all_reduce(buffers, &self.inputs),
            _ => kernels::reduce_parts(buffers, &self.inputs, places.clone()),
        };
        let mut outputs = self.outputs.lock();
        for (place, tensor) in places.zip(made) {
            outputs[place] = Some(tensor);
        }
    }

    /// Gives every rank its result. The inputs go first: a rank that has its result finds its
    /// own buffer unshared again, so that it can write there in place.
    fn complete(self) {
        drop(self.inputs);
        let outputs = self.outputs.into_inner().into_iter().flatten();
        deliver(&self.group, &self.barrier, outputs.map(RankOutput::Buffer));
    }
}

/// Fails the world: what the rank at `place` asked for has panicked.
pub(crate) fn fail_with_panic(
    group: &ThreadsGroup,
    barrier: &RankBarrier,
    place: usize,
    panic: &(dyn Any + Send),
) {
    let error = CommError::Backend {
        engine: "threads".into(),
        operation: format!("{}: {}", group.name, barrier.signature),
        code: 0,
        text: panic_text(panic),
    };
    group.world.fail(group.members[place], error);
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "panic".into())
}

#[cfg(test)]
mod tests {
    use burn::tensor::DType;

    use super::*;
    use crate::signature::Signature;
    use crate::threads::ThreadsOptions;
    use crate::threads::result_slots::WaitEnd;
    use crate::threads::world::ThreadsState;
    use zeropp_core::cpu_tensor::from_vec;

    #[test]
    fn a_panic_on_a_worker_fails_the_world() {
        let options = ThreadsOptions { inline_bytes: 0, ..ThreadsOptions::default() };
        let world = Arc::new(ThreadsState::new(0, 2, options));
        let group = ThreadsGroup::new(world.clone(), "world".into(), vec![0, 1]);
        let signature = Signature::with(Operation::AllReduce, DType::F32, 4);
        // The second length is not what the signature says.
        let join = |place, len| {
            let input = RankInput::Buffer(from_vec(vec![0.0; len], [len]));
            group.join(place, 0, signature, input).unwrap()
        };
        let barrier = join(0, 4);
        join(1, 2);
        let WaitEnd::Failed(error) = barrier.slots.wait(0, 0, &world, world.timeout.get()) else {
            panic!("the wait ends with the failure");
        };
        let text = error.to_string();
        assert!(text.starts_with("threads error 0 in world: all_reduce of 4 f32: "), "{text}");
    }
}
