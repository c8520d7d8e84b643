//! Models that start from weights that another implementation had, too.

use std::sync::Arc;

use burn::tensor::{Int, Tensor};
use zeropp::layer::{BatchShape, Embedding, Head, Layer, LayerCost, LayerCx, Model, Part};
use zeropp::params::{Init, ParamSpec};

/// The value at `i` of what the fixtures' scripts draw with `salt`: from -128 to 127.
pub(crate) fn number(i: usize, salt: usize) -> f32 {
    let mut x = (i as u32).wrapping_mul(2_654_435_761);
    x = x.wrapping_add((salt as u32).wrapping_mul(40_503)).wrapping_add(12_345);
    x ^= x >> 15;
    x = x.wrapping_mul(2_246_822_519);
    x ^= x >> 13;
    (x >> 16 & 0xFF) as f32 - 128.0
}

/// The salt that the scripts give to the parameter `name`.
pub(crate) fn salt_of(name: &str) -> usize {
    name.bytes().zip(1..).map(|(b, i)| i * usize::from(b)).sum()
}

/// Starting values of a parameter.
type Start = dyn Fn(&ParamSpec) -> Vec<f32> + Send + Sync;

/// A part that starts from given weights.
struct Given<T: ?Sized>(Arc<T>, Arc<Start>);

impl<T: ?Sized> Given<T> {
    fn start(&self, specs: Vec<ParamSpec>) -> Vec<ParamSpec> {
        let start = |spec: ParamSpec| {
            let values = (self.1)(&spec);
            ParamSpec { init: Init::Values(values.into()), ..spec }
        };
        specs.into_iter().map(start).collect()
    }
}

macro_rules! from_given_weights {
    ($kind:ident, $run:ident($($arg:ident: $of:ty),+) -> $out:ty $(, $more:item)?) => {
        impl $kind for Given<dyn $kind> {
            fn name(&self) -> &str {
                self.0.name()
            }
            fn parameters(&self) -> Vec<ParamSpec> {
                self.start(self.0.parameters())
            }
            fn $run(&self, $($arg: $of),+) -> $out {
                self.0.$run($($arg),+)
            }
            fn cost(&self, batch: BatchShape) -> LayerCost {
                self.0.cost(batch)
            }
            $($more)?
        }
    };
}
from_given_weights!(Embedding, forward(ids: Tensor<2, Int>, cx: &LayerCx) -> Tensor<3>);
from_given_weights!(
    Layer,
    forward(x: Tensor<3>, cx: &LayerCx) -> Tensor<3>,
    fn is_block(&self) -> bool {
        self.0.is_block()
    }
);
from_given_weights!(
    Head,
    loss(x: Tensor<3>, targets: Tensor<2, Int>, cx: &LayerCx) -> Tensor<1>
);

/// `model`, whose parameters start as `start` says.
pub(crate) fn starting_from(
    model: Model,
    start: impl Fn(&ParamSpec) -> Vec<f32> + Send + Sync + 'static,
) -> Model {
    let start: Arc<Start> = Arc::new(start);
    let parts = model.parts.into_iter().map(|part| match part {
        Part::Embedding(e) => Part::Embedding(Arc::new(Given(e, start.clone()))),
        Part::Layer(l) => Part::Layer(Arc::new(Given(l, start.clone()))),
        Part::Head(h) => Part::Head(Arc::new(Given(h, start.clone()))),
        Part::Slice(_) => unreachable!("no part of a model"),
    });
    Model { parts: parts.collect(), ..model }
}
