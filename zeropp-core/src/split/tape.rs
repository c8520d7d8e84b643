//! The record of one forward, for stages all of whose layers are made of operations of
//! [`split`](super).
//!
//! Burn keeps the graphs of a whole process in one map that every backward walks, so that hundreds
//! of ranks in a process wait for each other's graphs (ADR 63). A tape belongs to one stage and
//! micro-batch: what is recorded between [`start`] and [`take`] on a thread. Tensors are identified
//! by the number that Burn gives each tensor of an autodiff device, and are not in Burn's graph.

use std::cell::RefCell;

use burn::backend::DispatchTensor;
use burn::backend::autodiff::NodeId;

/// A pullback: the output's gradient in, one for each input out.
pub(super) type PullBack = Box<dyn FnOnce(DispatchTensor) -> Vec<Option<DispatchTensor>> + Send>;

/// A recorded tensor: an input of the forward, or the output of an operation.
struct TapeEntry {
    id: NodeId,
    /// Where the operation's inputs stand on the tape.
    inputs: Vec<usize>,
    /// `None` for the inputs of the forward.
    pull: Option<PullBack>,
}

/// The operations that a forward has recorded, in their order.
#[derive(Default)]
pub(super) struct Tape {
    entries: Vec<TapeEntry>,
    /// Where each layer's operations begin.
    layers: Vec<usize>,
}

thread_local! {
    static RECORDING: RefCell<Option<Tape>> = const { RefCell::new(None) };
}

/// Whether operations of this thread are recorded on a tape.
pub(super) fn is_recording() -> bool {
    RECORDING.with_borrow(Option::is_some)
}

/// Begins a tape of this thread. What an abandoned forward left is dropped.
pub(super) fn start() {
    RECORDING.set(Some(Tape::default()));
}

/// Ends this thread's tape.
pub(super) fn take() -> Tape {
    RECORDING.take().unwrap_or_default()
}

/// Records a tensor that a forward begins with.
pub(super) fn begin_with(id: NodeId) {
    RECORDING.with_borrow_mut(|tape| {
        let tape = tape.as_mut().expect("a tape was started");
        tape.entries.push(TapeEntry { id, inputs: Vec::new(), pull: None });
    });
}

/// The operations of another layer follow, on a tape of this thread, if one is recorded: its
/// backward says when it has come past them.
pub fn begin_layer() {
    RECORDING.with_borrow_mut(|tape| {
        if let Some(Tape { entries, layers }) = tape {
            layers.push(entries.len());
        }
    });
}

/// Records the output `id` of an operation on `inputs`.
///
/// # Panics
/// Panics if an input was not recorded: a gradient would be lost in silence.
pub(super) fn record(id: NodeId, inputs: &[NodeId], pull: PullBack) {
    RECORDING.with_borrow_mut(|tape| {
        let tape = tape.as_mut().expect("a tape was started");
        let inputs = inputs.iter().map(|id| tape.place(*id)).collect();
        tape.entries.push(TapeEntry { id, inputs, pull: Some(pull) });
    });
}

/// The message where an operation's input is not on the tape.
pub(super) const UNKNOWN: &str = "a layer that says that it is made of split operations \
    (`is_split`) has computed something by other operations; without `is_split` it works";

impl Tape {
    /// Where a tensor stands, from the end: most inputs were made a moment ago.
    fn place(&self, id: NodeId) -> usize {
        self.entries.iter().rposition(|entry| entry.id == id).expect(UNKNOWN)
    }

    /// Walks back from the last operation with its output's gradient; gives the gradient of the
    /// tensor that the forward began with. `add` sums the gradients of a tensor with several uses;
    /// `passed` is told the layers, by their numbers on the tape, as the walk has come past them.
    pub(super) fn backward(
        mut self,
        dy: DispatchTensor,
        add: impl Fn(DispatchTensor, DispatchTensor) -> DispatchTensor,
        passed: &mut dyn FnMut(usize),
    ) -> Option<DispatchTensor> {
        let mut gradients: Vec<Option<DispatchTensor>> =
            self.entries.iter().map(|_| None).collect();
        *gradients.last_mut().expect("something was recorded") = Some(dy);
        loop {
            while self.layers.pop_if(|begin| self.entries.len() <= *begin).is_some() {
                passed(self.layers.len());
            }
            // What a forward begins with comes before its operations, and has no pullback.
            let Some(TapeEntry { inputs, pull: Some(pull), .. }) = self.entries.pop() else {
                break;
            };
            // What the output does not depend on has no gradient, and is dropped as it is.
            let Some(dy) = gradients.pop().flatten() else { continue };
            for (at, gradient) in inputs.into_iter().zip(pull(dy)) {
                let Some(gradient) = gradient else { continue };
                gradients[at] = Some(match gradients[at].take() {
                    Some(sum) => add(sum, gradient),
                    None => gradient,
                });
            }
        }
        gradients.swap_remove(0)
    }
}
