//! Stock Burn modules as layers: nothing to rewrite, at the price of an unsplit backward.
//!
//! B computes everything, the weight gradients included; W only adds them to the fp32 buffer.
//! Burn's graph keeps the gathered weights from F to B, so a stage of stock modules holds them
//! longer than the schedule's free says, and what the graph itself keeps is not metered.

use std::collections::HashMap;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::Tensor;
use parking_lot::Mutex;

use crate::layer::{BatchShape, Layer, LayerCost, LayerCx};
use crate::params::{Init, ParamSpec};
use crate::split::custom_source;

/// A Burn module as a [`Layer`].
///
/// Its initial values are those the module was built with; build it from a seeded device where
/// several processes must agree. Bits may differ between recomputation and none, because stock
/// operations do not always round alike with and without a graph.
pub struct Stock<M, F> {
    name: String,
    /// The module's structure; its parameters are one-element placeholders.
    template: Mutex<M>,
    specs: Vec<ParamSpec>,
    index: HashMap<u64, usize>,
    forward: F,
    cost: Option<fn(BatchShape) -> LayerCost>,
}

impl<M, F> Stock<M, F>
where
    M: Module + 'static,
    F: Fn(&M, Tensor<3>) -> Tensor<3> + Send + Sync + 'static,
{
    /// A layer called `name` that computes `forward(module, x)`, `x: [b, s, h]`.
    pub fn new(name: impl Into<String>, module: M, forward: F) -> Self {
        let name = name.into();
        let mut reader = ModuleReader { prefix: vec![name.clone()], ..ModuleReader::default() };
        module.visit(&mut reader);
        let template = module.map(&mut Hollow);
        Self {
            name,
            template: Mutex::new(template),
            specs: reader.specs,
            index: reader.index,
            forward,
            cost: None,
        }
    }

    /// Says what a micro-batch costs, for balance and prediction. Without it two FLOP a weight
    /// and token are assumed, and that only the input is kept.
    pub fn with_cost(mut self, cost: fn(BatchShape) -> LayerCost) -> Self {
        self.cost = Some(cost);
        self
    }
}

impl<M, F> Layer for Stock<M, F>
where
    M: Module + 'static,
    F: Fn(&M, Tensor<3>) -> Tensor<3> + Send + Sync + 'static,
{
    fn name(&self) -> &str {
        &self.name
    }

    fn parameters(&self) -> Vec<ParamSpec> {
        self.specs.clone()
    }

    fn forward(&self, x: Tensor<3>, cx: &LayerCx) -> Tensor<3> {
        let template = self.template.lock().clone();
        let module = template.map(&mut Fill { index: &self.index, specs: &self.specs, cx });
        (self.forward)(&module, x)
    }

    fn cost(&self, batch: BatchShape) -> LayerCost {
        if let Some(cost) = self.cost {
            return cost(batch);
        }
        let weights: usize = self.specs.iter().map(ParamSpec::len).sum();
        LayerCost {
            forward_flops: 2.0 * weights as f64 * batch.tokens() as f64,
            ..LayerCost::default()
        }
    }
}

/// Reads names, shapes and values.
#[derive(Default)]
struct ModuleReader {
    prefix: Vec<String>,
    specs: Vec<ParamSpec>,
    index: HashMap<u64, usize>,
}

impl ModuleVisitor for ModuleReader {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.prefix.push(name.into());
    }
    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.prefix.pop();
    }
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let value = param.val().inner();
        let shape: Vec<usize> = value.dims().to_vec();
        let values = value.into_data().convert::<f32>();
        let values = values.try_to_vec::<f32>().expect("converted to f32");
        self.index.insert(param.id.val(), self.specs.len());
        let init = Init::Values(values.into());
        self.specs.push(ParamSpec::new(self.prefix.join("."), &shape, init));
    }
}

/// Replaces every parameter by a view of one zero, so that the template holds no memory.
struct Hollow;

impl ModuleMapper for Hollow {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, value, mapper) = param.consume();
        let value = value.inner();
        let zero = Tensor::<D>::zeros([1; D], &value.device()).expand(value.dims());
        Param::from_mapped_value(id, zero, mapper)
    }
}

/// Puts gathered weights in; on a graph, each with a hook that queues its gradient.
struct Fill<'a> {
    index: &'a HashMap<u64, usize>,
    specs: &'a [ParamSpec],
    cx: &'a LayerCx,
}

impl ModuleMapper for Fill<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, _, mapper) = param.consume();
        let spec = &self.specs[self.index[&id.val()]];
        let weight = self.cx.weight::<D>(&spec.name);
        let (queue, slot) = (self.cx.op.queue.clone(), weight.slot());
        let value = custom_source(&self.cx.op.token, weight.get(), move |dw: Tensor<D>| {
            queue.push(move |grads| grads.add(slot, dw));
        });
        Param::from_mapped_value(id, value, mapper)
    }
}
