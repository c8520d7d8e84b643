//! Slices of a head, each computed apart, have the bits of the whole one.

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{DType, Device, Int, Tensor};
use parking_lot::Mutex;
use proptest::prelude::*;
use zeropp_core::cpu_tensor;
use zeropp_core::meter::{MemoryKind, Meter};
use zeropp_core::params::{FlatLayout, Init, ParamSpec};
use zeropp_core::split::ops::{
    SplitHead, force_generic, force_head_chunk, input_gradient, join_sums, linear_cross_entropy,
};
use zeropp_core::split::{
    ForwardGrads, Grads, LayerWeights, Masks, NOT_SCORED, OpCx, Saved, WQueue, seed_backward,
};

use crate::cases::cases;
use crate::common::*;

/// A head and a micro-batch.
struct Case {
    head: SplitHead,
    w: Vec<f32>,
    x: Tensor<3>,
    targets: Tensor<2, Int>,
    scored: Option<f64>,
    dtype: DType,
}

const SCALE: f32 = 0.25;

/// Loss, dX and dW.
type Given = (u32, Vec<u32>, Vec<u32>);

impl Case {
    fn weights(&self, spec: ParamSpec, first: usize) -> (LayerWeights, Arc<FlatLayout>) {
        let (n, layout) = (spec.len(), Arc::new(FlatLayout::new(vec![spec], 1)));
        let weights = LayerWeights::new("head", 0, layout.clone());
        let mut flat = vec![0.0; layout.len];
        flat[..n].copy_from_slice(&self.w[first..first + n]);
        weights.set(cpu_tensor::from_vec(flat, [layout.len]).cast(self.dtype));
        (weights, layout)
    }

    fn context(&self, meter: &Arc<Meter>, grads: Option<Arc<Mutex<Grads>>>) -> OpCx {
        let masks = Masks { scored: self.scored, ..Masks::default() };
        let forward_grads = grads.map(|grads| ForwardGrads { grads, loss_scale: SCALE });
        OpCx { forward_grads, masks, ..context(meter, false, false) }
    }

    fn whole(&self) -> Given {
        let (weights, layout) = self.weights(self.head.weight.clone(), 0);
        let grads = Grads::new(vec![layout], &Device::flex(), &Meter::new());
        let grads = Arc::new(Mutex::new(grads));
        let mut cx = self.context(&Meter::new(), Some(grads.clone()));
        cx.token = leaf(&cx.token);
        let x = self.x.clone().autodiff().require_grad();
        let (w, ids) = (weights.weight("w"), self.head.ids);
        let loss = linear_cross_entropy(x.clone(), &w, self.targets.clone(), ids, &cx);
        let value = values(&loss.clone().inner())[0].to_bits();
        let mut graph = seed_backward(loss).backward(cpu_tensor::from_vec(vec![SCALE], [1]));
        let dx = x.grad_remove(&mut graph).expect("a gradient");
        drop(cx);
        let dw = flat_of(grads);
        let n = self.w.len();
        (value, bits(&values(&dx.cast(DType::F32))), bits(&dw[..n]))
    }

    /// The same by slices that end at these blocks.
    fn in_slices(&self, ends: &[usize]) -> Given {
        let n = self.targets.shape().num_elements();
        let starts = [0].into_iter().chain(ends.iter().copied());
        let slice = |(start, end): (usize, &usize)| {
            self.head.slice(start..*end, branches(self.head.blocks(), start..*end))
        };
        let slices: Vec<_> =
            starts.zip(ends).filter(|(start, end)| start < end).map(slice).collect();
        let meter = Meter::new();
        let mut forwards = Vec::new();
        for slice in &slices {
            let rows = slice.shape().own_rows();
            let spec = slice.parameters().remove(0);
            assert_eq!(spec.shape[0], rows.len());
            let (weights, layout) = self.weights(spec, rows.start * self.head.weight.shape[1]);
            let op = OpCx { queue: WQueue::default(), ..self.context(&meter, None) };
            let x = Saved::new(self.x.clone(), MemoryKind::Activation, &meter);
            let (sums, kept) = slice.forward(x, self.targets.clone(), &weights.weight("w"), &op);
            forwards.push((slice, layout, weights, op, sums, kept));
        }
        let sums: Vec<_> = forwards.iter().map(|(.., sums, _)| sums.clone()).collect();
        let sums = join_sums(&sums, n);
        let masks = Masks { scored: self.scored, ..Masks::default() };
        let (totals, loss) = self.head.loss(&sums, self.targets.clone(), &masks, n, &mut 0.0);
        let (mut parts, mut dw) = (Vec::new(), Vec::new());
        for (slice, layout, weights, op, _, kept) in forwards {
            let dx = slice.backward(kept, &totals, SCALE, &weights.weight("w"), &op);
            weights.free();
            parts.extend(slice.shape().sums.iter().cloned().zip(dx));
            let mut grads = Grads::new(vec![layout.clone()], &Device::flex(), &Meter::new());
            op.queue.run(&mut grads);
            let flat = cpu_tensor::into_vec(grads.into_flat().0.remove(0));
            dw.extend(bits(&flat[..layout.params[0].spec.len()]));
        }
        assert_eq!(meter.now().total(), 0, "nothing is kept in the end");
        let dx = input_gradient(sum(&parts, 0..self.head.blocks()), self.dtype);
        (values(&loss)[0].to_bits(), bits(&values(&dx.cast(DType::F32))), dw)
    }
}

fn flat_of(grads: Arc<Mutex<Grads>>) -> Vec<f32> {
    let grads = Arc::into_inner(grads).expect("nothing else holds it").into_inner();
    cpu_tensor::into_vec(grads.into_flat().0.remove(0))
}

/// The two halves of a branch of the tree over blocks.
fn halves(of: &Range<usize>) -> [Range<usize>; 2] {
    let middle = of.start + of.len().next_power_of_two() / 2;
    [of.start..middle, middle..of.end]
}

/// The largest branches of the tree over `all` blocks that are within `own`.
fn branches(all: usize, own: Range<usize>) -> Vec<Range<usize>> {
    fn add(of: Range<usize>, own: &Range<usize>, found: &mut Vec<Range<usize>>) {
        if of.end <= own.start || own.end <= of.start {
            return;
        }
        if own.start <= of.start && of.end <= own.end {
            return found.push(of);
        }
        halves(&of).into_iter().for_each(|half| add(half, own, found));
    }
    let mut found = Vec::new();
    add(0..all, &own, &mut found);
    found
}

fn sum(parts: &[(Range<usize>, Tensor<1>)], of: Range<usize>) -> Tensor<1> {
    if let Some((_, sum)) = parts.iter().find(|(blocks, _)| *blocks == of) {
        return sum.clone();
    }
    let [left, right] = halves(&of);
    cpu_tensor::add_in_place(sum(parts, left), sum(parts, right))
}

/// How far numbers are from others, as a part of these.
fn apart(found: &[u32], wanted: &[u32]) -> f64 {
    let norm = |of: &mut dyn Iterator<Item = f64>| of.map(|x| x * x).sum::<f64>().sqrt();
    let value = |bits: &u32| f64::from(f32::from_bits(*bits));
    assert_eq!(found.len(), wanted.len());
    let mut both = found.iter().zip(wanted).map(|(x, y)| value(x) - value(y));
    norm(&mut both) / norm(&mut wanted.iter().map(value)).max(1e-6)
}

/// As the whole head's, by tensor operations.
#[test]
fn by_tensors_the_loss_of_a_target_that_is_no_id_is_nan() {
    let head = SplitHead {
        name: "head".into(),
        weight: ParamSpec::new("w", &[200, 4], Init::Zeros),
        ids: 190,
    };
    let sums = Tensor::ones([2 * 5], &Device::flex());
    let losses = |targets: [i32; 2], scored| {
        let masks = Masks { scored, ..Masks::default() };
        let targets = Tensor::<2, Int>::from_data([targets], &Device::flex());
        force_generic(true);
        let (_, loss) = head.loss(&sums, targets, &masks, 2, &mut 0.0);
        force_generic(false);
        values(&loss)[0]
    };
    assert!(losses([3, 190], None).is_nan() && losses([-1, 3], Some(1.0)).is_nan());
    assert!(losses([3, NOT_SCORED], None).is_nan());
    assert!(!losses([3, 189], None).is_nan() && !losses([3, NOT_SCORED], Some(1.0)).is_nan());
}

proptest! {
    #![proptest_config(cases(40))]

    /// Whatever the slices, the chunks of tokens, the type, the tokens that are scored, and the
    /// rows that are no ids.
    #[test]
    fn slices_have_the_bits_of_the_whole_head(
        s in 1..70_usize, h in 1..24_usize, ids in 1..1500_usize, padding in 0..40_usize,
        chunk in 1..150_usize, cuts in prop::collection::vec(0..13_usize, 0..4), halves: bool,
        masked: bool, seed: u64,
    ) {
        let mut rng = Random(seed);
        let weight = ParamSpec::new("w", &[ids + padding, h], Init::Zeros);
        let dtype = if halves { DType::BF16 } else { DType::F32 };
        let w = rng.normals((ids + padding) * h);
        let x = rng.tensor([2, s, h]).cast(dtype);
        let targets = rng.ids([2, s], ids);
        let targets = match masked {
            // Every token whose id is odd is left out.
            true => {
                let odd = targets.clone().remainder_scalar(2).equal_scalar(1);
                targets.mask_fill(odd, NOT_SCORED)
            }
            false => targets,
        };
        let scored = masked.then_some(1.5);
        let head = SplitHead { name: "head".into(), weight, ids };
        let mut ends: Vec<_> = cuts.into_iter().map(|cut| cut.min(head.blocks())).collect();
        ends.push(head.blocks());
        ends.sort_unstable();
        let case = Case { head, w, x, targets, scored, dtype };
        force_head_chunk(Some(chunk));
        let (whole, slices) = (case.whole(), case.in_slices(&ends));
        force_head_chunk(None);
        force_head_chunk(None);
        force_generic(true);
        let by_tensors = case.in_slices(&ends);
        force_generic(false);
        let tolerance = if halves { 2e-2 } else { 1e-5 };
        prop_assert!(apart(&[by_tensors.0], &[whole.0]) <= tolerance, "loss by tensors");
        prop_assert!(apart(&by_tensors.1, &whole.1) <= tolerance, "dx by tensors");
        prop_assert!(apart(&by_tensors.2, &whole.2) <= tolerance, "dw by tensors");
        prop_assert_eq!(whole.0, slices.0, "loss");
        prop_assert!(whole.1 == slices.1, "dx");
        prop_assert!(whole.2 == slices.2, "dw");
    }
}
