//! Fused kernels on the device against the CPU's, in shapes that do not fit their blocks.

#[path = "../../zeropp-core/tests/common/close.rs"]
mod close;
#[path = "../../zeropp-core/tests/common/random.rs"]
mod random;

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{DType, Device, Tensor, TensorData};
use close::assert_within;
use random::Random;
use zeropp::config::DeviceKind;
use zeropp_core::adamw::{AdamWElements, adamw};
use zeropp_core::kernels::adamw::{AdamWScalars, adamw as adamw_on_cpu};
use zeropp_core::meter::Meter;
use zeropp_core::params::{FlatLayout, Init, ParamSpec};
use zeropp_core::split::ops::{self, HeadNorms, Projection, Rotation, Turns};
use zeropp_core::split::{Documents, Grads, LayerWeights, Masks, OpCx, WQueue, seed_backward};
use zeropp_core::squares::block_squares;

use crate::{device, kind};

/// Numbers and their shape, on no device yet.
struct Data<const D: usize>(Vec<f32>, [usize; D]);

impl<const D: usize> Data<D> {
    fn new(rng: &mut Random, shape: [usize; D]) -> Self {
        Self(rng.normals(shape.iter().product()), shape)
    }

    fn on(&self, device: &Device, dtype: DType) -> Tensor<D> {
        Tensor::from_data(TensorData::new(self.0.clone(), self.1), (device, dtype))
    }
}

/// Values of a weight, and its shape.
type Parameter = (Vec<f32>, Vec<usize>);

fn values<const D: usize>(t: Tensor<D>) -> Vec<f32> {
    t.inner().cast(DType::F32).into_data().iter::<f32>().collect()
}

/// The types under test, and the largest difference allowed, relative to the largest element: in
/// bf16 of one rounding. WebGPU has no bf16.
fn types() -> Vec<(DType, f64)> {
    let mut types = vec![(DType::F32, 2e-6)];
    if kind() == DeviceKind::Cuda {
        types.push((DType::BF16, 1.0 / 128.0));
    }
    types
}

/// Output, gradient of the input, and gradients of the weights of `op` on `device`.
fn run(
    (device, dtype): (&Device, DType),
    [x, dy]: [&Data<3>; 2],
    weights: &[Parameter],
    masks: &Masks,
    op: &impl Fn(Tensor<3>, &LayerWeights, &OpCx) -> Tensor<3>,
) -> [Vec<f32>; 3] {
    let spec = |i: usize| ParamSpec::new(format!("w{i}"), &weights[i].1, Init::Zeros);
    let layout = Arc::new(FlatLayout::new((0..weights.len()).map(spec).collect(), 1));
    let mut flat = vec![0.0; layout.len];
    for (place, w) in layout.params.iter().zip(weights) {
        flat[place.offset..][..w.0.len()].copy_from_slice(&w.0);
    }
    let layer = LayerWeights::new("layer", 0, layout.clone());
    let n = flat.len();
    layer.set(Data(flat, [n]).on(device, dtype));
    let cx = OpCx {
        queue: WQueue::default(),
        meter: Meter::new(),
        token: Tensor::<1>::zeros([1], (device, DType::F32)).autodiff().require_grad(),
        makers: None,
        vault: None,
        output_wanted: true,
        forward_grads: None,
        masks: masks.clone(),
        routers: None,
        slice: None,
    };
    let leaf = x.on(device, dtype).autodiff().require_grad();
    let y = op(leaf.clone(), &layer, &cx);
    let out = values(y.clone());
    let mut graph = seed_backward(y).backward(dy.on(device, dtype));
    let dx = values(leaf.grad_remove(&mut graph).expect("a gradient"));
    let mut grads = Grads::new(vec![layout], device, &Meter::new());
    cx.queue.run(&mut grads);
    let dw = if weights.is_empty() { vec![] } else { values(grads.into_flat().0.remove(0)) };
    [out, dx, dw]
}

/// Compares the device with the CPU in all types, and two runs on it, which have the same bits.
fn compare(
    what: &str,
    [x, dy]: [&Data<3>; 2],
    weights: &[Parameter],
    masks: &Masks,
    op: impl Fn(Tensor<3>, &LayerWeights, &OpCx) -> Tensor<3>,
) {
    for (dtype, tolerance) in types() {
        let there = device(0);
        let got = run((&there, dtype), [x, dy], weights, masks, &op);
        let again = run((&there, dtype), [x, dy], weights, masks, &op);
        let want = run((&Device::flex(), dtype), [x, dy], weights, masks, &op);
        for (part, name) in ["y", "dx", "dw"].iter().enumerate() {
            let what = format!("{what}, {dtype:?}: {name}");
            assert!(got[part] == again[part], "{what}: another run has other bits");
            // Sums over rows are fp32 in both.
            let tolerance = if part == 2 { tolerance.min(2e-5) } else { tolerance };
            assert_within(&what, &got[part], &want[part], tolerance, 0.0);
        }
    }
}

/// Rows and widths: one row, widths of no vector, rows of no block, short and long rows.
const ROWS: [[usize; 2]; 6] = [[1, 8], [3, 7], [70, 96], [300, 24], [33, 2056], [2, 4099]];

#[test]
fn norms_of_rows_of_any_shape() {
    for [n, h] in ROWS {
        let mut rng = Random((n * h) as u64);
        let (x, dy) = (Data::new(&mut rng, [1, n, h]), Data::new(&mut rng, [1, n, h]));
        let weights = [(rng.normals(h), vec![h]), (rng.normals(h), vec![h])];
        let masks = Masks::default();
        compare(&format!("rms norm {n} × {h}"), [&x, &dy], &weights[..1], &masks, |x, w, cx| {
            ops::rms_norm(x, &w.weight("w0"), 1e-5, cx)
        });
        compare(&format!("layer norm {n} × {h}"), [&x, &dy], &weights, &masks, |x, w, cx| {
            ops::layer_norm(x, &w.weight("w0"), &w.weight("w1"), 1e-5, cx)
        });
    }
}

#[test]
fn heads_of_queries_and_keys_are_normed_and_values_pass() {
    let sizes = [(1, 1, 1, 8), (5, 3, 1, 6), (33, 4, 2, 64), (5, 2, 1, 128), (7, 3, 1, 40)];
    for (n, heads, groups, d) in sizes.into_iter().chain([(6, 2, 1, 96), (9, 2, 2, 300)]) {
        let width = (heads + 2 * groups) * d;
        let mut rng = Random((n * width) as u64);
        let (x, dy) = (Data::new(&mut rng, [1, n, width]), Data::new(&mut rng, [1, n, width]));
        let weights = [(rng.normals(d), vec![d]), (rng.normals(d), vec![d])];
        let what = format!("{heads} and {groups} heads of {d}");
        compare(&what, [&x, &dy], &weights, &Masks::default(), |x, w, cx| {
            let norms =
                HeadNorms { heads, groups, q: w.weight("w0"), k: w.weight("w1"), eps: 1e-5 };
            ops::head_norm(x, &norms, None, cx)
        });
    }
}

#[test]
fn heads_turn_and_the_rest_passes() {
    for (b, s, heads, d, rest) in [(1, 1, 1, 2, 0), (2, 5, 3, 6, 4), (2, 33, 2, 64, 128)] {
        let width = heads * d + rest;
        let mut rng = Random(width as u64);
        let (x, dy) = (Data::new(&mut rng, [b, s, width]), Data::new(&mut rng, [b, s, width]));
        let what = format!("{heads} heads of {d} in {width}");
        compare(&what, [&x, &dy], &[], &Masks::default(), |x, _, _| {
            ops::rope(x, heads, d, 10_000.0)
        });
    }
}

/// Of a projection by the unit matrix, so that what is compared is the turn.
#[test]
fn heads_turn_by_the_positions_of_documents_and_slices() {
    let (b, s, heads, d) = (2, 12, 2, 8);
    let width = heads * d;
    let mut rng = Random(11);
    let (x, dy) = (Data::new(&mut rng, [b, s, width]), Data::new(&mut rng, [b, s, width]));
    let mut unit = vec![0.0; width * width];
    (0..width).for_each(|i| unit[i * width + i] = 1.0);
    let rotation = Rotation::new((0..d / 2).map(|i| 1.0 / (1.0 + i as f64)).collect());
    let starts: [&[usize]; 2] = [&[0, 5], &[7]];
    let documents =
        Masks { documents: Some(Arc::new(Documents::new(s, starts))), ..Masks::default() };
    for (masks, first) in [(documents, 0), (Masks::default(), 3)] {
        let weights = [(unit.clone(), vec![width; 2])];
        let what = format!("turned from {first} on");
        compare(&what, [&x, &dy], &weights, &masks, |x, w, cx| {
            let maps = [Projection { weight: w.weight("w0"), bias: None }];
            let turns = Turns { rotation: &rotation, heads, first };
            ops::projections(x, &maps, Some(turns), cx)
        });
    }
}

const SCALARS: AdamWScalars = AdamWScalars {
    towards1: 0.1,
    beta2: 0.999,
    towards2: 0.001,
    eps: 1e-8,
    step_size: 3e-3,
    root_bias2: 0.03,
    keep: 0.99,
    gradient: 0.7,
};

#[test]
fn adamw_is_the_cpus_whoever_holds_the_parameters() {
    let cases: [&[(Range<usize>, bool)]; 4] = [
        &[(0..1, true)],
        &[(0..384, true)],
        &[(0..128, false), (128..640, true), (640..768, false), (768..1003, false)],
        &[(0..256, true), (256..384, false), (384..512, true)],
    ];
    for (parts, shared) in cases.into_iter().flat_map(|parts| [(parts, true), (parts, false)]) {
        let n = parts.last().expect("some").0.end;
        let mut rng = Random(n as u64);
        let [p, m, v, g] = [0; 4].map(|_| Data::new(&mut rng, [n]));
        let v = Data(v.0.iter().map(|v| v * v).collect(), [n]);
        let [mut wanted_p, mut wanted_m, mut wanted_v] = [&p, &m, &v].map(|x| x.0.clone());
        for (range, decays) in parts {
            let s = AdamWScalars { keep: if *decays { SCALARS.keep } else { 1.0 }, ..SCALARS };
            let r = range.clone();
            let (p, m, v) = (&mut wanted_p[r.clone()], &mut wanted_m[r.clone()], &mut wanted_v[r]);
            adamw_on_cpu(p, m, v, &g.0[range.clone()], &s);
        }
        let on = |x: &Data<1>| x.on(&device(0), DType::F32);
        let before = on(&p);
        let held = shared.then(|| before.clone());
        let elements =
            AdamWElements { parameter: before, mean: on(&m), square: on(&v), gradient: on(&g) };
        let after = adamw(elements, parts, &SCALARS).map(values);
        for (got, want) in after.iter().zip([wanted_p, wanted_m, wanted_v]) {
            assert_within(&format!("{parts:?}"), got, &want, 1e-6, 0.0);
        }
        // What somebody else holds is not written to.
        if let Some(held) = held {
            assert_eq!(values(held), p.0);
        }
    }
}

/// Products that go to columns of one tensor, and gradients that are sums of products.
#[test]
fn maps_of_one_input_are_side_by_side() {
    for (n, input, outs) in [(1, 8, [8, 8, 8]), (33, 24, [40, 8, 16]), (70, 5, [3, 7, 1])] {
        let width = outs.iter().sum();
        let mut rng = Random((n * width) as u64);
        let (x, dy) = (Data::new(&mut rng, [1, n, input]), Data::new(&mut rng, [1, n, width]));
        let mut weights: Vec<Parameter> =
            outs.map(|out| (rng.normals(input * out), vec![input, out])).into();
        // The first and the last have a bias.
        weights.extend([outs[0], outs[2]].map(|out| (rng.normals(out), vec![out])));
        compare(
            &format!("{input} to {outs:?}"),
            [&x, &dy],
            &weights,
            &Masks::default(),
            |x, w, cx| {
                let map = |(i, bias): (usize, Option<&str>)| Projection {
                    weight: w.weight(&format!("w{i}")),
                    bias: bias.map(|name| w.weight(name)),
                };
                let maps = [(0, Some("w3")), (1, None), (2, Some("w4"))];
                ops::projections(x, &maps.map(map), None, cx)
            },
        );
    }
}

#[test]
fn squares_are_summed_by_blocks() {
    for (n, block) in [(1, 1), (1000, 128), (1024, 256), (20_000, 8192), (777, 2048)] {
        let x = Data::new(&mut Random(n as u64), [n]);
        let wanted = x.0.chunks(block).map(|b| b.iter().map(|x| f64::from(*x).powi(2)).sum());
        let wanted: Vec<f32> = wanted.map(|sum: f64| sum as f32).collect();
        let got = values(block_squares(x.on(&device(0), DType::F32), block));
        assert_within(&format!("{n} by {block}"), &got, &wanted, 1e-6, 0.0);
    }
}
