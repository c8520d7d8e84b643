//! Holding a layer of one's own against the same forward in Burn's operations: what its backward in
//! two halves gives, and what it keeps meanwhile.

use std::fmt;
use std::sync::Arc;

use burn::tensor::{DType, Device, Tensor};

use crate::cpu_tensor::{from_vec, into_vec};
use crate::kernels::attention::keeps_probabilities;
use crate::layer::{BatchShape, Layer, LayerCx, SamplePart};
use crate::meter::Meter;
use crate::params::{FlatLayout, Init, ParamSpec};
use crate::rng::Rng;
use crate::split::{Grads, LayerWeights, Makers, Masks, OpCx, RecordedBy, Recording, WQueue};

/// Largest difference of an element, as a part of the largest one of its tensor: fp32 against the
/// same in double precision, over sums of some thousand elements.
const TOLERANCE: f64 = 1e-4;
/// How far weights are from their first values, in standard deviations: zeros would hide mistakes.
const APART: f32 = 0.2;

/// The faults of a layer: a line each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Differences(pub Vec<String>);

impl fmt::Display for Differences {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join("\n"))
    }
}

impl std::error::Error for Differences {}

/// A layer's weights as leaves of Burn's graph, in double precision.
pub struct StockWeights(Vec<(ParamSpec, Tensor<1>)>);

impl StockWeights {
    /// The weight whose name ends like this: `"norm.weight"`.
    ///
    /// # Panics
    /// Panics if the layer has no such parameter, or it has another number of dimensions.
    pub fn get<const D: usize>(&self, name: &str) -> Tensor<D> {
        let is_it = |spec: &ParamSpec| {
            spec.name.strip_suffix(name).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
        };
        let found = self.0.iter().find(|(spec, _)| is_it(spec));
        let (spec, values) = found.unwrap_or_else(|| panic!("the layer has no parameter {name}"));
        let shape = <[usize; D]>::try_from(spec.shape.as_slice());
        let shape = shape.unwrap_or_else(|_| panic!("{name} has the shape {:?}", spec.shape));
        values.clone().reshape(shape)
    }
}

/// Runs F, B and W of `layer` on random `x: [samples, tokens, hidden]` and weights, in fp32 on the
/// CPU, and compares output, the gradient of `x` (B) and those of the weights (W) with what Burn's
/// own autodiff makes of `stock`, the same forward in Burn's operations, in double precision. What
/// the meter counts from F to B, with selective recomputation too, and from B to W is held against
/// the layer's [`cost`](Layer::cost). Layers of stock modules ([`crate::stock`]) keep what no meter
/// counts.
///
/// ```
/// use burn::tensor::Tensor;
/// use zeropp_core::check;
/// use zeropp_core::layer::{BatchShape, Layer, LayerCost, LayerCx};
/// use zeropp_core::params::{Init, ParamSpec};
/// use zeropp_core::split::ops;
///
/// struct Scaled {
///     hidden: usize,
/// }
///
/// impl Layer for Scaled {
///     fn name(&self) -> &str {
///         "scaled"
///     }
///     fn parameters(&self) -> Vec<ParamSpec> {
///         vec![ParamSpec::new("scaled.norm.weight", &[self.hidden], Init::Ones)]
///     }
///     fn forward(&self, x: Tensor<3>, cx: &LayerCx) -> Tensor<3> {
///         ops::rms_norm(x, &cx.weight("norm.weight"), 1e-6, &cx.op)
///     }
///     fn is_split(&self) -> bool {
///         true
///     }
///     fn cost(&self, batch: BatchShape) -> LayerCost {
///         let n = (batch.tokens() * batch.element_bytes) as u64;
///         // From F to B: x, and one number a token; from B to W: a sum over the tokens.
///         let kept = n * (self.hidden as u64 + 1);
///         LayerCost {
///             activation_bytes: kept,
///             activation_bytes_selective: kept,
///             stash_bytes: (self.hidden * batch.element_bytes) as u64,
///             ..LayerCost::default()
///         }
///     }
/// }
///
/// check::layer(&Scaled { hidden: 32 }, [2, 8, 32], |x, weights| {
///     let size = (x.clone().square().mean_dim(2) + 1e-6).sqrt();
///     x / size * weights.get::<1>("norm.weight").unsqueeze()
/// })
/// .unwrap();
/// ```
///
/// # Errors
/// All that differs, in words.
///
/// # Panics
/// Panics where the layer's code does: a parameter that it has not declared, or other operations
/// than split ones in a layer that says [`is_split`](Layer::is_split).
pub fn layer(
    layer: &dyn Layer,
    dims: [usize; 3],
    stock: impl Fn(Tensor<3>, &StockWeights) -> Tensor<3>,
) -> Result<(), Differences> {
    let specs = layer.parameters();
    let random = |name: &str, len: usize| {
        let mut values = vec![0.0; len];
        Rng::keyed(0, name).fill_normal(0, &mut values);
        values
    };
    let size: usize = dims.iter().product();
    let values = specs.iter().map(|spec| near_first(spec, random)).collect();
    let trial = Trial { specs, values, x: random("x", size), dy: random("dy", size), dims };
    let wanted = by_autodiff(&trial, stock);
    let mut differences = Vec::new();
    for selective in [false, true] {
        let (found, costs) = in_halves(layer, &trial, selective)?;
        let wrong = found.iter().zip(&wanted).filter_map(|((what, found), wanted)| {
            let (largest, off) = largest_difference(found, wanted)?;
            (off > TOLERANCE * largest || off.is_nan()).then(|| {
                format!(
                    "{what} is off by {off:.2e} where its largest element is {largest:.2e}, \
                     against Burn's autodiff of the same forward"
                )
            })
        });
        for line in costs.into_iter().chain(wrong) {
            // Most layers do the same in both.
            if !differences.contains(&line) {
                differences.push(line);
            }
        }
    }
    if differences.is_empty() { Ok(()) } else { Err(Differences(differences)) }
}

/// Values near those that a parameter begins with.
fn near_first(spec: &ParamSpec, random: impl Fn(&str, usize) -> Vec<f32>) -> Vec<f32> {
    let mut values = random(&spec.name, spec.len());
    for (i, value) in values.iter_mut().enumerate() {
        *value = APART * *value
            + match &spec.init {
                Init::Ones => 1.0,
                Init::Values(first) => first[i],
                Init::Zeros | Init::Normal(_) | Init::Uniform(_) => 0.0,
            };
    }
    values
}

/// The largest element that is wanted, and the largest difference from what is wanted.
fn largest_difference(found: &[f32], wanted: &[f64]) -> Option<(f64, f64)> {
    let largest = wanted.iter().fold(0.0, |most: f64, w| most.max(w.abs()));
    let apart = found.iter().zip(wanted).map(|(f, w)| (f64::from(*f) - w).abs());
    // A NaN is the largest of all.
    let off = apart.reduce(|a, b| if a >= b || a.is_nan() { a } else { b });
    off.map(|off| (largest, off))
}

/// What a layer and its stock twin are run with: parameters and their values, the input and the
/// gradient of the output, both of `dims`.
struct Trial {
    specs: Vec<ParamSpec>,
    values: Vec<Vec<f32>>,
    x: Vec<f32>,
    dy: Vec<f32>,
    dims: [usize; 3],
}

/// Output, the gradient of `x` and those of the weights that train, by Burn in double precision.
fn by_autodiff(
    trial: &Trial,
    stock: impl Fn(Tensor<3>, &StockWeights) -> Tensor<3>,
) -> Vec<Vec<f64>> {
    let Trial { specs, values, x, dy, dims } = trial;
    let double = |values: &[f32]| -> Tensor<1> {
        from_vec::<1>(values.to_vec(), [values.len()]).cast(DType::F64)
    };
    let leaf = |values: &[f32]| double(values).autodiff().require_grad();
    let flat = |t: Tensor<1>| t.into_data().try_to_vec::<f64>().expect("double precision");
    let leaves = specs.iter().cloned().zip(values.iter().map(|values| leaf(values)));
    let weights = StockWeights(leaves.collect());
    let x = leaf(x);
    let y = stock(x.clone().reshape(*dims), &weights);
    let dy = double(dy).autodiff().reshape(*dims);
    let gradients = (y.clone() * dy).sum().backward();
    let of = |leaf: &Tensor<1>| match leaf.grad(&gradients) {
        Some(gradient) => flat(gradient.inner()),
        // What the output does not depend on.
        None => vec![0.0; leaf.dims()[0]],
    };
    let trained = weights.0.iter().filter(|(spec, _)| spec.trains);
    let size: usize = dims.iter().product();
    let y = flat(y.inner().reshape([size]));
    [y, of(&x)].into_iter().chain(trained.map(|(_, leaf)| of(leaf))).collect()
}

/// A name and its elements.
type Named = (String, Vec<f32>);

/// The same by the layer's F, B and W, with their names; and what of its cost is not as metered.
/// `selective` says whether B makes again what it can.
fn in_halves(
    layer: &dyn Layer,
    trial: &Trial,
    selective: bool,
) -> Result<(Vec<Named>, Vec<String>), Differences> {
    let (specs, dims) = (&trial.specs, trial.dims);
    let device = Device::flex();
    let meter = Meter::new();
    let layouts = [FlatLayout::trained, FlatLayout::frozen];
    let [trained, frozen] = layouts.map(|of| Arc::new(of(specs.clone(), 1)));
    let flat = |layout: &FlatLayout| {
        let mut flat = vec![0.0; layout.len];
        for place in &layout.params {
            let at = specs.iter().position(|spec| spec.name == place.spec.name);
            let values = &trial.values[at.expect("made of them")];
            flat[place.offset..][..values.len()].copy_from_slice(values);
        }
        from_vec::<1>(flat, [layout.len])
    };
    let weights = LayerWeights::new(layer.name(), 0, trained.clone()).with_frozen(frozen.clone());
    weights.set_both(flat(&trained), Some(flat(&frozen)));
    let by = if layer.is_split() { RecordedBy::Tape } else { RecordedBy::Burn };
    let recording =
        Recording::start(Some(from_vec::<3>(trial.x.clone(), dims)), (&device, DType::F32), by);
    let queue = WQueue::default();
    let op = OpCx {
        queue: queue.clone(),
        meter: meter.clone(),
        token: recording.token(),
        makers: selective.then(Makers::default),
        vault: None,
        output_wanted: true,
        forward_grads: None,
        masks: Masks::default(),
        routers: None,
        slice: None,
    };
    let input = recording.input().expect("it was given");
    let cx = LayerCx { weights: weights.clone(), op, output_wanted: true };
    let y = layer.forward(input, &cx);
    if y.dims() != dims {
        let shape = y.dims();
        return Err(Differences(vec![format!("the output is {shape:?}, and x {dims:?}")]));
    }
    let (y, recorded) = recording.finish(y);
    let size: usize = dims.iter().product();
    let y = into_vec(y.reshape([size]));
    let kept = meter.now().activation;
    let dx = recorded.backward(from_vec::<3>(trial.dy.clone(), dims));
    let dx = dx.map_or_else(|| vec![0.0; size], |dx| into_vec(dx.reshape([size])));
    let stashed = meter.now().weight_stash;
    // W needs no weights.
    weights.free();
    let mut grads = Grads::new(vec![trained.clone()], &device, &Meter::new());
    queue.run(&mut grads);
    let mut found = vec![("the output".to_owned(), y), ("the gradient of x (B)".to_owned(), dx)];
    let gradients = grads.into_flat().0.into_iter().next().map(into_vec);
    let gradients = gradients.filter(|flat| flat.len() == trained.len);
    let gradients = gradients.unwrap_or_else(|| vec![0.0; trained.len]);
    // In the order of the parameters, as they were given.
    for spec in specs.iter().filter(|spec| spec.trains) {
        let place = trained.params.iter().find(|place| place.spec.name == spec.name);
        let place = place.expect("it trains");
        let gradient = gradients[place.offset..][..spec.len()].to_vec();
        found.push((format!("the gradient of {} (W)", spec.name), gradient));
    }
    Ok((found, costs(layer, dims, [kept, stashed], selective)))
}

/// The parts of a layer's cost that are not as the meter has counted.
fn costs(
    layer: &dyn Layer,
    [samples, seq, _]: [usize; 3],
    [kept, stashed]: [u64; 2],
    selective: bool,
) -> Vec<String> {
    let batch = BatchShape {
        samples,
        seq,
        element_bytes: 4,
        keeps_probabilities: keeps_probabilities(seq),
        kernels: true,
        part: SamplePart::Whole,
    };
    let cost = layer.cost(batch);
    let activation = match selective {
        true => ("activation_bytes_selective", cost.activation_bytes_selective, kept, "F to B"),
        false => ("activation_bytes", cost.activation_bytes, kept, "F to B"),
    };
    let sides = [activation, ("stash_bytes", cost.stash_bytes, stashed, "B to W")];
    let differ = sides.into_iter().filter(|(_, said, counted, _)| said != counted);
    let line = |(field, said, counted, when): (&str, u64, u64, &str)| {
        format!("its cost says {field} = {said}, and {counted} bytes are kept from {when}")
    };
    differ.map(line).collect()
}
