//! A model that does what it should until one rank, at one moment, does something else.

#![allow(dead_code)] // Each user takes its own part.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use burn::tensor::Tensor;
use parking_lot::Mutex;
use zeropp::layer::{BatchShape, Layer, LayerCost, LayerCx, Model, Part};
use zeropp::params::ParamSpec;
use zeropp::split::custom_vjp;

/// What goes wrong, on which rank, and when.
pub(crate) struct Fault {
    /// World rank.
    rank: usize,
    act: Box<dyn Fn() + Send + Sync>,
    /// Places passed on the rank until it happens: every block's F, B and W is one.
    left: AtomicI64,
    /// Block and kind of the action in which it happened.
    happened: Mutex<Option<(String, char)>>,
}

impl Fault {
    /// `act` on world rank `rank`, as it comes to its place number `place`, from 0.
    pub(crate) fn new(
        rank: usize,
        place: i64,
        act: impl Fn() + Send + Sync + 'static,
    ) -> Arc<Fault> {
        let (act, left) = (Box::new(act), AtomicI64::new(place));
        Arc::new(Fault { rank, act, left, happened: Mutex::default() })
    }

    /// Makes it happen at the next place.
    pub(crate) fn now(&self) {
        self.left.store(0, Ordering::Relaxed);
    }

    /// Block and kind (F, B or W) of the action in which it happened.
    pub(crate) fn happened(&self) -> Option<(String, char)> {
        self.happened.lock().clone()
    }

    /// `model` with this fault in each of its blocks.
    pub(crate) fn hidden_in(self: &Arc<Self>, model: Model) -> Model {
        let fault = self.clone();
        with_places(model, move |block, kind| fault.pass(block, kind))
    }

    fn pass(&self, block: &str, kind: char) {
        let thread = std::thread::current();
        let here = thread.name().and_then(|name| name.strip_prefix("rank ")?.parse().ok());
        if here == Some(self.rank) && self.left.fetch_sub(1, Ordering::Relaxed) == 0 {
            *self.happened.lock() = Some((block.to_string(), kind));
            (self.act)();
        }
    }
}

/// `model` with a place in F, B and W of each of its blocks. The rank that comes to one calls
/// `pass` with the block and the kind.
pub(crate) fn with_places(
    mut model: Model,
    pass: impl Fn(&str, char) + Send + Sync + 'static,
) -> Model {
    let pass = Arc::new(pass);
    for part in &mut model.parts {
        if let (true, Part::Layer(layer)) = (part.is_block(), &*part) {
            let layer = Saboteur { inner: layer.clone(), pass: pass.clone() };
            *part = Part::Layer(Arc::new(layer));
        }
    }
    model
}

struct Saboteur<P> {
    inner: Arc<dyn Layer>,
    pass: Arc<P>,
}

impl<P: Fn(&str, char) + Send + Sync + 'static> Layer for Saboteur<P> {
    fn name(&self) -> &str {
        self.inner.name()
    }
    fn parameters(&self) -> Vec<ParamSpec> {
        self.inner.parameters()
    }
    fn forward(&self, x: Tensor<3>, cx: &LayerCx) -> Tensor<3> {
        (self.pass)(self.name(), 'F');
        let y = self.inner.forward(x, cx);
        let (pass, block, queue) =
            (self.pass.clone(), self.name().to_string(), cx.op.queue.clone());
        let out = y.clone().inner();
        custom_vjp(y, out, move |dy| {
            pass(&block, 'B');
            let (pass, block) = (pass.clone(), block.clone());
            queue.push(move |_| pass(&block, 'W'));
            dy
        })
    }
    fn takes_slices(&self) -> bool {
        self.inner.takes_slices()
    }
    fn cost(&self, batch: BatchShape) -> LayerCost {
        self.inner.cost(batch)
    }
}
