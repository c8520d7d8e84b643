//! One collective under way: what every rank brought, and what each will get.

use std::any::Any;
use std::sync::Arc;

use burn::tensor::Tensor;

use super::group::ThreadsGroup;
use super::result_slots::ResultSlots;
use crate::AllBytes;
use crate::signature::{Operation, Signature};
use crate::sync::Mutex;
use zeropp_core::device::{take_over, take_to_read};

/// The data that a rank brings.
pub(crate) enum RankInput {
    /// A flat buffer.
    Buffer(Tensor<1>),
    /// Small data.
    Bytes(Vec<u8>),
    /// Name, color and key of the wanted sub-group.
    Split(String, usize, usize),
    /// Itself.
    Nothing,
}

/// The result that a rank gets.
pub(crate) enum RankOutput {
    /// A flat buffer.
    Buffer(Tensor<1>),
    /// Everyone's small data.
    Bytes(AllBytes),
    /// The sub-group, and the rank's place in it.
    Group(Arc<ThreadsGroup>, usize),
    /// The result of an engine that is built on this one, for the group's ranks.
    Own(Box<dyn Any + Send>),
    /// That all are here.
    Nothing,
}

impl RankOutput {
    /// The bytes that an exchange gives, or a gather its root.
    pub(crate) fn bytes(self) -> AllBytes {
        match self {
            RankOutput::Bytes(all) => all,
            _ => unreachable!("the operation gives bytes"),
        }
    }
}

/// The function that turns the output of `operation`, a collective on buffers, into a rank's result
/// on the rank's own thread.
pub(crate) fn opened(operation: Operation) -> fn(RankOutput) -> Tensor<1> {
    fn buffer(output: RankOutput) -> Tensor<1> {
        match output {
            RankOutput::Buffer(tensor) => tensor,
            _ => unreachable!("a collective on buffers gives buffers"),
        }
    }
    match operation {
        // All ranks share what was gathered.
        Operation::AllGather => |output| take_to_read(buffer(output)),
        _ => |output| take_over(buffer(output)),
    }
}

/// The barrier point of one collective. The rank that arrives last takes all inputs away.
pub(crate) struct RankBarrier {
    pub(crate) sequence: u64,
    pub(crate) signature: Signature,
    /// Place in the group of the rank that came first: the one others are compared with.
    pub(super) opener: usize,
    pub(crate) slots: ResultSlots<RankOutput>,
    arrivals: Mutex<Arrivals>,
}

struct Arrivals {
    inputs: Vec<Option<RankInput>>,
    here: Vec<bool>,
}

impl RankBarrier {
    pub(super) fn new(sequence: u64, signature: Signature, opener: usize, size: usize) -> Self {
        let inputs = (0..size).map(|_| None).collect();
        Self {
            sequence,
            signature,
            opener,
            slots: ResultSlots::new(size),
            arrivals: Mutex::new(Arrivals { inputs, here: vec![false; size] }),
        }
    }

    /// Leaves `input` at `place`; returns all inputs in rank order to the last to arrive.
    pub(super) fn arrive(&self, place: usize, input: RankInput) -> Option<Vec<RankInput>> {
        let mut arrivals = self.arrivals.lock();
        arrivals.here[place] = true;
        arrivals.inputs[place] = Some(input);
        let all = arrivals.here.iter().all(|&here| here);
        all.then(|| arrivals.inputs.drain(..).flatten().collect())
    }

    /// Places that have not arrived.
    pub(crate) fn missing(&self) -> Vec<usize> {
        let arrivals = self.arrivals.lock();
        (0..arrivals.here.len()).filter(|&place| !arrivals.here[place]).collect()
    }
}
