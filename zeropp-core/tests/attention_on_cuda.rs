//! Attention in bf16 by CUDA's fused kernels, held against fp32 on the CPU: its errors are those of
//! attention by blocks of queries, whose products are rounded to bf16 at the same places. Where
//! `ZEROPP_TEST_DEVICE` is not `cuda`, there is nothing to try.
#![cfg(feature = "cuda")]

#[path = "common/random.rs"]
mod random;

use std::sync::Arc;

use burn::tensor::{DType, Device, Tensor, TensorData};
use random::Random;
use zeropp_core::choice::{DeviceKind, Precision};
use zeropp_core::device::Devices;
use zeropp_core::meter::Meter;
use zeropp_core::split::ops::{self, force_blocks, force_generic};
use zeropp_core::split::{Documents, Dropout, Masks, OpCx, WQueue, seed_backward};

/// b, s, heads, groups, elements of a head.
type Sizes = [usize; 5];

/// What is hidden or dropped.
#[derive(Clone, Default)]
struct Hidden {
    window: Option<usize>,
    documents: Option<Arc<Documents>>,
    dropout: Option<Dropout>,
}

fn cuda() -> Option<Device> {
    let wanted = std::env::var("ZEROPP_TEST_DEVICE").is_ok_and(|kind| kind == "cuda");
    wanted.then(|| Devices::find(DeviceKind::Cuda, Precision::Bf16).expect("a GPU").of(0))
}

fn values<const D: usize>(t: Tensor<D>) -> Vec<f32> {
    t.inner().into_data().iter::<f32>().collect()
}

/// Random numbers that bf16 has.
fn numbers(rng: &mut Random, n: usize) -> Vec<f32> {
    rng.normals(n).into_iter().map(|x| f32::from_bits(x.to_bits() & 0xFFFF_0000)).collect()
}

/// The output, the gradient of qkv and the bytes kept from F to B.
fn run(
    (device, dtype): (&Device, DType),
    [b, s, heads, groups, d]: Sizes,
    (qkv, dy): (&[f32], &[f32]),
    hidden: &Hidden,
) -> (Vec<f32>, Vec<f32>, u64) {
    let on = |v: &[f32], width: usize| {
        Tensor::<3>::from_data(TensorData::new(v.to_vec(), [b, s, width]), (device, dtype))
    };
    let (qkv, dy) = (on(qkv, (heads + 2 * groups) * d), on(dy, heads * d));
    let meter = Meter::new();
    let cx = OpCx {
        queue: WQueue::default(),
        meter: meter.clone(),
        token: Tensor::zeros([1], (device, DType::F32)),
        makers: None,
        vault: None,
        output_wanted: true,
        forward_grads: None,
        masks: Masks {
            documents: hidden.documents.clone(),
            dropout: hidden.dropout,
            ..Masks::default()
        },
        routers: None,
        slice: None,
    };
    let op = |qkv| {
        let place = hidden.dropout.map(|_| ["h.0", "attention"]);
        match place {
            Some(place) => ops::dropout_attention(qkv, [heads, groups], hidden.window, place, &cx),
            None => ops::windowed_attention(qkv, [heads, groups], hidden.window, &cx),
        }
    };
    let untracked = values(op(qkv.clone()));
    assert_eq!(meter.peak().total(), 0, "a forward without gradients keeps nothing");
    let leaf = qkv.autodiff().require_grad();
    let y = op(leaf.clone());
    let kept = meter.now().activation;
    let out = values(y.clone());
    assert_eq!(out, untracked, "tracked and untracked forward");
    let mut graph = seed_backward(y).backward(dy);
    let dqkv = values(leaf.grad_remove(&mut graph).expect("a gradient"));
    assert_eq!(meter.now().total(), 0, "nothing is kept after B");
    (out, dqkv, kept)
}

/// The distance of `got` from `want` in columns `columns` of rows of `width`.
fn apart(got: &[f32], want: &[f32], width: usize, columns: [usize; 2]) -> [f64; 2] {
    assert_eq!(got.len(), want.len());
    let of = |f: &dyn Fn(f64, f64) -> f64| {
        let rows = got.chunks(width).zip(want.chunks(width));
        let squares = rows.flat_map(|(got, want)| {
            let part = columns[0]..columns[1];
            got[part.clone()].iter().zip(&want[part])
        });
        squares.map(|(got, want)| f(f64::from(*got), f64::from(*want)).powi(2)).sum::<f64>().sqrt()
    };
    [of(&|got, want| got - want), of(&|_, want| want)]
}

/// Errors of the fused kernels against those of blocks, which are at most `factor` times as large.
#[track_caller]
fn agrees(gpu: &Device, sizes: Sizes, hidden: &Hidden, factor: f64) {
    let [b, s, heads, groups, d] = sizes;
    let width = (heads + 2 * groups) * d;
    let mut rng = Random(sizes.iter().fold(7, |seed, n| seed * 31 + *n as u64));
    let (qkv, dy) = (numbers(&mut rng, b * s * width), numbers(&mut rng, b * s * heads * d));
    let cpu = Device::flex();
    let given = (&qkv[..], &dy[..]);
    let want = run((&cpu, DType::F32), sizes, given, hidden);
    force_generic(true);
    let blocks = run((&cpu, DType::BF16), sizes, given, hidden);
    force_generic(false);
    let fused = run((gpu, DType::BF16), sizes, given, hidden);

    let halves = b * s * (width + heads * d);
    let bytes = 2 * halves + 4 * b * heads * s;
    assert_eq!(fused.2, bytes as u64, "{sizes:?}: qkv, the output and a number a query are kept");
    let (keys, values) = (heads * d, (heads + groups) * d);
    let parts = [
        ("y", &fused.0, &blocks.0, &want.0, heads * d, [0, heads * d]),
        ("dq", &fused.1, &blocks.1, &want.1, width, [0, keys]),
        ("dk", &fused.1, &blocks.1, &want.1, width, [keys, values]),
        ("dv", &fused.1, &blocks.1, &want.1, width, [values, width]),
    ];
    let all = apart(&want.1, &want.1, width, [0, width])[1];
    for (name, fused, blocks, want, width, columns) in parts {
        let [error, length] = apart(fused, want, width, columns);
        let [usual, _] = apart(blocks, want, width, columns);
        println!(
            "{sizes:?} {name}: {:.1e} of {length:.1e}, {:.2} of blocks'",
            error,
            error / usual
        );
        // What a first key gives to queries and keys is nothing but rounding.
        assert!(
            error <= factor * usual + 1e-5 * all,
            "{sizes:?}: {name} is {error:e} from fp32's of length {length:e}, blocks' is {usual:e}"
        );
        assert!(error <= 0.01 * length + 1e-5 * all, "{sizes:?}: {name}: {error:e} of {length:e}");
    }
}

/// Of which queries share keys or do not, and samples are whole blocks or not.
#[test]
fn causal_attention_has_the_errors_of_blocks() {
    let Some(gpu) = cuda() else { return };
    for d in [64, 128] {
        for s in [1, 63, 64, 65, 200, 257] {
            agrees(&gpu, [1, s, 2, 1, d], &Hidden::default(), 1.5);
        }
        agrees(&gpu, [2, 130, 4, 4, d], &Hidden::default(), 1.5);
        agrees(&gpu, [1, 130, 4, 1, d], &Hidden::default(), 1.5);
    }
}

/// Heads that are no whole tiles have zeros beside them.
#[test]
fn heads_of_any_multiple_of_8_elements_are_fused() {
    let Some(gpu) = cuda() else { return };
    for d in [8, 40, 80, 96, 120] {
        agrees(&gpu, [2, 100, 2, 1, d], &Hidden::default(), 1.5);
    }
}

/// Whatever else is hidden, and what is dropped.
#[test]
fn windows_documents_and_dropout_are_the_cpus() {
    let Some(gpu) = cuda() else { return };
    let starts: [&[usize]; 2] = [&[0, 3, 70, 128, 129], &[100]];
    let documents = Arc::new(Documents::new(300, starts));
    let dropout = Dropout { p: 0.2, seed: 5, step: 3, sample: 7 };
    let (none, documents) = (Hidden::default(), Some(documents));
    for d in [64, 128] {
        agrees(&gpu, [1, 300, 2, 1, d], &Hidden { window: Some(90), ..none.clone() }, 1.5);
        let both = Hidden { window: Some(50), documents: documents.clone(), ..none.clone() };
        agrees(&gpu, [2, 300, 2, 1, d], &both, 1.5);
        let packed = Hidden { documents: documents.clone(), ..none.clone() };
        agrees(&gpu, [2, 300, 2, 2, d], &packed, 1.5);
        let dropped = Hidden { dropout: Some(dropout), ..none.clone() };
        agrees(&gpu, [2, 130, 2, 1, d], &dropped, 1.5);
        let all = Hidden { window: Some(50), documents: documents.clone(), dropout: Some(dropout) };
        agrees(&gpu, [2, 300, 2, 1, d], &all, 1.5);
    }
}

/// No gradient is added up in the order in which blocks happen to end.
#[test]
fn the_same_bits_come_out_twice() {
    let Some(gpu) = cuda() else { return };
    let (sizes, mut rng) = ([2, 300, 4, 2, 64], Random(3));
    let (qkv, dy) = (numbers(&mut rng, 2 * 300 * 8 * 64), numbers(&mut rng, 2 * 300 * 4 * 64));
    let once = || run((&gpu, DType::BF16), sizes, (&qkv, &dy), &Hidden::default());
    let (first, second) = (once(), once());
    assert!(first.0 == second.0 && first.1 == second.1);
    force_blocks(true);
    let blocks = once();
    force_blocks(false);
    assert_ne!(first.1, blocks.1, "by other kernels");
    assert!(blocks.2 < first.2, "blocks do not keep the output");
}
