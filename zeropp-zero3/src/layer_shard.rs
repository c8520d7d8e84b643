//! One layer's part on this rank: its parameters and gradient, how they begin, and what lies where
//! in them.

use std::sync::Arc;

use burn::tensor::{Device, Tensor};
use zeropp_core::cpu_tensor::{add_in_place, from_vec, into_vec, on_cpu};
use zeropp_core::kernels;
use zeropp_core::meter::{Hold, MemoryKind, Meter};
use zeropp_core::params::{FlatLayout, ParamSpec};
use zeropp_core::rng::initialise;
use zeropp_core::split::LayerWeights;

use crate::rule::Role;
use crate::state_file::StateFile;
use crate::under_way::{Due, Giver, UnderWay};
use crate::words::{Words, each_piece, own_copy};

/// One layer's part on this rank.
pub(crate) struct LayerShard {
    pub(crate) name: String,
    pub(crate) role: Role,
    pub(crate) weights: LayerWeights,
    /// The fp32 parameters that train and this rank owns, `[len / D]`; none of a layer of which
    /// nothing trains.
    pub(crate) param: Words,
    /// Those that do not train, if there are any.
    pub(crate) frozen: Option<FrozenShard>,
    /// The reduced gradient of the units so far; after a ZeRO-1 reduction only this replica's part.
    pub(crate) grad: Option<Words>,
    file: ShardFile,
    param_hold: Option<Hold>,
    grad_hold: Option<Hold>,
}

/// A rank's part of a layer's parameters that do not train.
pub(crate) struct FrozenShard {
    pub(crate) param: Words,
    _hold: Option<Hold>,
}

/// The file that a layer's shards are in, if they are in one.
#[derive(Clone, Default)]
pub(crate) struct ShardFile {
    /// That of parameters.
    pub(crate) parameters: Option<Arc<StateFile>>,
    /// That of reduced gradients.
    pub(crate) gradients: Option<Arc<StateFile>>,
}

impl LayerShard {
    /// A layer with these parameters.
    pub(crate) fn new(
        name: &str,
        role: Role,
        weights: LayerWeights,
        param: Tensor<1>,
        file: ShardFile,
        meter: &Arc<Meter>,
    ) -> LayerShard {
        let (param, param_hold) = kept(param, file.parameters.as_ref(), meter);
        LayerShard {
            name: name.into(),
            role,
            weights,
            param,
            frozen: None,
            grad: None,
            file,
            param_hold,
            grad_hold: None,
        }
    }

    /// Counts parameters that are on their way. The memory of those before is somebody else's by
    /// now, and must not be taken for theirs.
    pub(crate) fn expect_param(&mut self, elements: usize, meter: &Arc<Meter>) {
        self.param_hold = None;
        self.param_hold = Some(meter.hold(MemoryKind::ParameterShard, 4 * elements as u64));
    }

    /// Replaces the parameters, of which nothing is left.
    pub(crate) fn set_param(&mut self, param: Tensor<1>, meter: &Arc<Meter>) {
        self.param_hold = None;
        // The place of those before is used again.
        self.param = self.nothing();
        (self.param, self.param_hold) = kept(param, self.file.parameters.as_ref(), meter);
    }

    /// Replaces some of the parameters, which are in memory.
    pub(crate) fn write_param(
        &mut self,
        range: std::ops::Range<usize>,
        values: &[f32],
        meter: &Arc<Meter>,
    ) {
        self.param_hold = None;
        let mut all = into_vec(self.take_param().into_tensor());
        all[range].copy_from_slice(values);
        let n = all.len();
        self.set_param(from_vec(all, [n]), meter);
    }

    /// Replaces all, with what has counted them so far, until they are in their place.
    pub(crate) fn return_param(&mut self, param: Tensor<1>, counted: Hold, meter: &Arc<Meter>) {
        let file = self.file.parameters.clone();
        let counted = Some(counted).filter(|_| file.is_some());
        match file {
            Some(file) => self.param = Words::new(param, Some(&file)),
            None => self.set_param(param, meter),
        }
        drop(counted);
    }

    /// Makes the parameters those of another layer.
    pub(crate) fn share_param(&mut self, param: Words, meter: &Arc<Meter>) {
        match param {
            Words::Here(param) => self.set_param(param, meter),
            out => self.param = out,
        }
    }

    /// Gives parameters and gradient to an update of the rank's stage number `stage`, and says
    /// where the parameters are to be given. Both count until they are [`settle`](Self::settle)d.
    pub(crate) fn update_behind(
        &mut self,
        stage: usize,
        update: &Arc<UnderWay>,
        meter: &Arc<Meter>,
    ) -> (Tensor<1>, Tensor<1>, Giver) {
        let param = self.take_param().into_tensor();
        let grad = self.take_grad().expect("a layer with a gradient").into_tensor();
        let n = param.dims()[0];
        self.expect_param(n, meter);
        let bytes = 4 * grad.dims()[0] as u64;
        // Its memory is somebody else's before the rank looks.
        self.grad_hold = Some(meter.hold(MemoryKind::GradientShard, bytes));
        let (due, giver) = Due::new(n, param.device(), stage, update);
        self.param = Words::Due(due);
        (param, grad, giver)
    }

    /// Waits for parameters that are being updated.
    pub(crate) fn settle(&mut self, meter: &Arc<Meter>) {
        if let Words::Due(_) = self.param {
            let param = self.take_param().into_tensor();
            self.grad_hold = None;
            self.set_param(param, meter);
        }
    }

    /// Forgets the step's gradient; that of an update under way counts on.
    pub(crate) fn clear_grad(&mut self) {
        if !matches!(self.param, Words::Due(_)) {
            drop(self.take_grad());
        }
    }

    /// Takes the parameters out, to be replaced.
    pub(crate) fn take_param(&mut self) -> Words {
        let nothing = self.nothing();
        std::mem::replace(&mut self.param, nothing)
    }

    fn nothing(&self) -> Words {
        Words::Here(Tensor::zeros([1], &self.param.device()))
    }

    /// Whether the parameters are there.
    pub(crate) fn has_param(&self) -> bool {
        self.param_hold.is_some() || self.param.out().is_some()
    }

    /// Gives up the parameters and the gradient.
    pub(crate) fn release(&mut self) {
        drop(self.take_grad());
        self.param_hold = None;
        self.param = self.nothing();
    }

    /// Whether any of it trains.
    pub(crate) fn trains(&self) -> bool {
        self.weights.layout().len > 0
    }

    /// Replaces what does not train.
    pub(crate) fn set_frozen(&mut self, param: Tensor<1>, meter: &Arc<Meter>) {
        self.frozen = None;
        let (param, _hold) = kept(param, self.file.parameters.as_ref(), meter);
        self.frozen = Some(FrozenShard { param, _hold });
    }

    /// Elements that this rank owns, whether they train or not.
    pub(crate) fn elements(&self) -> usize {
        let frozen = self.frozen.as_ref().map_or(0, |frozen| frozen.param.len());
        self.param.len() + frozen
    }

    /// The gradient, no longer counted here.
    pub(crate) fn take_grad(&mut self) -> Option<Words> {
        self.grad_hold = None;
        self.grad.take()
    }

    /// Replaces the gradient.
    pub(crate) fn set_grad(&mut self, grad: Tensor<1>, meter: &Arc<Meter>) {
        self.grad_hold = None;
        self.grad = None;
        if self.file.gradients.is_none() {
            self.grad_hold = Some(meter.hold_tensor(MemoryKind::GradientShard, &grad));
        }
        self.grad = Some(Words::new(grad, self.file.gradients.as_ref()));
    }

    /// Makes the gradient that of another layer, in the same file.
    pub(crate) fn share_grad(&mut self, grad: Words) {
        self.grad = Some(grad);
    }

    /// Adds a unit's gradient, which no other rank has where `alone`.
    pub(crate) fn add_grad(&mut self, part: Tensor<1>, alone: bool, meter: &Arc<Meter>) {
        if let Some(file) = self.file.gradients.clone() {
            return self.add_in_file(&part, &file);
        }
        let sum = match self.grad.take() {
            Some(sum) => add_in_place(sum.into_tensor(), part),
            None if alone => part,
            // The engine keeps its buffer for other results.
            None => own_copy(&part),
        };
        self.set_grad(sum, meter);
    }

    fn add_in_file(&mut self, part: &Tensor<1>, file: &Arc<StateFile>) {
        let n = part.dims()[0];
        let before = self.grad.take();
        let sum = before.as_ref().and_then(Words::out).cloned();
        let sum = sum.unwrap_or_else(|| file.place(n));
        let before: Vec<_> = before.iter().map(|sum| (sum, 0)).collect();
        let part = on_cpu(part).expect("files are for ranks on CPUs");
        each_piece(&before, n, |piece, before| {
            let part = &part.as_slice()[piece.clone()];
            let values = match before.into_iter().next() {
                Some(before) => {
                    let mut values = into_vec(before);
                    kernels::add(&mut values, part);
                    values
                }
                None => part.to_vec(),
            };
            file.write(vec![(sum.part(piece), values)]);
        });
        file.settle();
        self.grad = Some(Words::Out(sum));
    }
}

/// Parameters where they are kept, and what counts them in memory.
fn kept(
    param: Tensor<1>,
    file: Option<&Arc<StateFile>>,
    meter: &Arc<Meter>,
) -> (Words, Option<Hold>) {
    let hold = meter.hold_tensor(MemoryKind::ParameterShard, &param);
    let param = Words::new(param, file);
    let hold = param.here().is_some().then_some(hold);
    (param, hold)
}

/// The part of a parameter that lies in a range of a layer's shard.
pub(crate) struct FlatPiece<'a> {
    /// The parameter.
    pub(crate) spec: &'a ParamSpec,
    /// First element of the piece, within the whole parameter of that name.
    pub(crate) offset: usize,
    /// Number of elements.
    pub(crate) len: usize,
    /// Where the piece begins, within the range.
    pub(crate) at: usize,
}

/// The initial values of shard number `shard` of `of`: each parameter from its own generator, at
/// each element's place in the parameter.
pub(crate) fn initial_shard(
    layout: &FlatLayout,
    of: usize,
    shard: usize,
    device: &Device,
    seed: u64,
) -> Tensor<1> {
    let n = layout.len / of;
    let start = shard * n;
    let mut values = vec![0f32; n];
    for place in &layout.params {
        let first = place.offset.max(start);
        let last = (place.offset + place.spec.len()).min(start + n);
        if first < last {
            let out = &mut values[first - start..last - start];
            initialise(seed, &place.spec, first - place.offset, out);
        }
    }
    Tensor::from_data(burn::tensor::TensorData::new(values, [n]), device)
}

pub(crate) fn flat_pieces(layout: &FlatLayout, first: usize, len: usize) -> Vec<FlatPiece<'_>> {
    layout
        .params
        .iter()
        .filter_map(|place| {
            let a = place.offset.max(first);
            let b = (place.offset + place.spec.len()).min(first + len);
            (a < b).then(|| FlatPiece {
                spec: &place.spec,
                offset: place.spec.first_element() + a - place.offset,
                len: b - a,
                at: a - first,
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use zeropp_core::params::Init;

    fn layout(parts: usize) -> FlatLayout {
        let specs = vec![
            ParamSpec::new("a.weight", &[10, 20], Init::Normal(0.02)),
            ParamSpec::new("a.bias", &[20], Init::Ones),
        ];
        FlatLayout::new(specs, parts)
    }

    #[test]
    fn initial_values_do_not_depend_on_the_cut() {
        let shard = |layout: &FlatLayout, of, s| initial_shard(layout, of, s, &Device::flex(), 7);
        let whole = shard(&layout(1), 1, 0).into_data().try_to_vec::<f32>().unwrap();
        let cut: Vec<f32> = (0..2)
            .flat_map(|s| shard(&layout(2), 2, s).into_data().try_to_vec::<f32>().unwrap())
            .collect();
        assert_eq!(whole[..276], cut[..276]);
        assert!(whole[..200].iter().any(|x| *x != 0.0));
        assert!(whole[256..276].iter().all(|x| *x == 1.0));
    }

    /// The memory behind a tensor counts, whatever its length says.
    #[test]
    fn parameters_and_gradients_are_measured_not_computed() {
        let meter = Meter::new();
        let param = initial_shard(&layout(1), 1, 0, &Device::flex(), 7);
        let bytes = 4 * param.dims()[0] as u64;
        let weights = LayerWeights::new("a", 0, Arc::new(layout(1)));
        let mut layer =
            LayerShard::new("a", Role::Hidden, weights, param, ShardFile::default(), &meter);
        assert_eq!((meter.now().parameter_shard, meter.now().total()), (bytes, bytes));
        let part_of = |n: usize| Tensor::<1>::zeros([3 * n], &Device::flex()).slice([0..n]);
        layer.set_param(part_of(384), &meter);
        assert_eq!(meter.now().parameter_shard, 3 * 384 * 4);
        layer.set_grad(part_of(384), &meter);
        assert_eq!(meter.now().gradient_shard, 3 * 384 * 4);
        drop(layer.take_grad());
        assert_eq!(meter.now().gradient_shard, 0);
        // In a group of one rank the gathered weights are the parameters.
        let gathered = meter.hold_tensor(MemoryKind::Gathered, layer.param.here().unwrap());
        assert_eq!(meter.now().gathered, 0);
        drop(gathered);
        drop(layer);
        assert_eq!(meter.now().total(), 0);
    }
}
