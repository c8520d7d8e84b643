//! A stage's forward from its plain input to its plain output, and the way back.

use burn::backend::{Dispatch, DispatchTensor};
use burn::tensor::{DType, Device, Tensor};

use super::tape::{self, Tape};
use super::vjp::{Seed, VjpBackend, custom_vjp, seed_backward, tape_input};

/// Where the operations of a forward are recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordedBy {
    /// A tape of its own, for layers that are made of split operations alone
    /// ([`Layer::is_split`](crate::layer::Layer::is_split)).
    Tape,
    /// Burn's graph, for any other.
    Burn,
}

/// A forward that is being recorded. It belongs to the thread that began it.
pub struct Recording<const D: usize> {
    input: Option<Tensor<D>>,
    token: Tensor<1>,
    by: RecordedBy,
}

impl<const D: usize> Recording<D> {
    /// Begins to record a forward of `x` (plain), or of one without a tensor input, whose gradients
    /// are on the device and of the type given.
    pub fn start(x: Option<Tensor<D>>, on: (&Device, DType), by: RecordedBy) -> Self {
        let token = Tensor::<1>::zeros([1], on);
        let (input, token) = match by {
            RecordedBy::Tape => {
                tape::start();
                (x.map(tape_input), tape_input(token))
            }
            RecordedBy::Burn => {
                (x.map(|x| x.autodiff().require_grad()), token.autodiff().require_grad())
            }
        };
        Self { input, token, by }
    }

    /// The input of the first layer, where it is a tensor.
    pub fn input(&self) -> Option<Tensor<D>> {
        self.input.clone()
    }

    /// The input of operations without a tensor input ([`OpCx::token`](super::OpCx::token)).
    pub fn token(&self) -> Tensor<1> {
        self.token.clone()
    }

    /// Ends with the output `y`; its plain value, and the way back.
    ///
    /// # Panics
    /// Panics where a layer recorded on a tape has used other operations.
    pub fn finish<const DY: usize>(mut self, y: Tensor<DY>) -> (Tensor<DY>, Recorded<D, DY>) {
        let plain = y.clone().inner();
        let way = match self.by {
            RecordedBy::Tape => {
                // The last operation: the one whose pullback brings dY to y.
                custom_vjp(y, plain.clone(), |dy: Tensor<DY>| dy);
                Way::Tape(tape::take())
            }
            RecordedBy::Burn => Way::Burn(seed_backward(y), self.input.take()),
        };
        (plain, Recorded(way))
    }
}

impl<const D: usize> Drop for Recording<D> {
    /// A forward that was given up leaves no tape behind, on which later ones would be recorded.
    fn drop(&mut self) {
        if self.by == RecordedBy::Tape {
            drop(tape::take());
        }
    }
}

/// The record of a forward, until its backward.
pub struct Recorded<const D: usize, const DY: usize>(Way<D, DY>);

enum Way<const D: usize, const DY: usize> {
    Tape(Tape),
    Burn(Seed<DY>, Option<Tensor<D>>),
}

impl<const D: usize, const DY: usize> Recorded<D, DY> {
    /// Walks back from dY (plain, of y's shape): dX (plain), where the forward had an input that y
    /// depends on.
    pub fn backward(self, dy: Tensor<DY>) -> Option<Tensor<D>> {
        self.backward_by_layer(dy, &mut |_| ())
    }

    /// The same. Where the layers were told ([`begin_layer`](super::begin_layer)) and are on a
    /// tape, `passed` is told each one, from the last to number 0, as the walk has come past it.
    pub fn backward_by_layer(
        self,
        dy: Tensor<DY>,
        passed: &mut dyn FnMut(usize),
    ) -> Option<Tensor<D>> {
        match self.0 {
            Way::Tape(tape) => {
                let dx: Option<DispatchTensor> =
                    tape.backward(dy.into_dispatch(), Dispatch::sum, passed);
                dx.map(Tensor::from_dispatch)
            }
            Way::Burn(seed, input) => {
                let mut gradients = seed.backward(dy);
                input?.grad_remove(&mut gradients)
            }
        }
    }
}
