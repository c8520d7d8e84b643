//! How fast attention is alone, forward and backward, by its fused kernels and by blocks of
//! queries.

use std::time::Instant;

use burn::tensor::{DType, Distribution, Tensor};
use zeropp::config::{DeviceKind, Precision};
use zeropp::meter::Meter;
use zeropp::split::ops::{self, force_blocks};
use zeropp::split::{Masks, OpCx, WQueue, seed_backward};
use zeropp_core::device::wait_for;

use crate::{Bench, Outcome, row};

/// A layer's attention: samples, tokens, query heads, key heads, elements of a head.
type Sizes = [usize; 5];

/// Seconds of a forward and of a backward, the mean of some that the device does one after another.
fn seconds(bench: &Bench, [b, s, heads, groups, d]: Sizes) -> Result<[f64; 2], zeropp::Error> {
    let device = bench.config().devices()?.of(0);
    let dtype = if bench.fast() == Precision::Bf16 { DType::BF16 } else { DType::F32 };
    let random = |width: usize| {
        let spread = Distribution::Normal(0.0, 1.0);
        Tensor::<3>::random([b, s, width], spread, (&device, DType::F32)).cast(dtype)
    };
    let (qkv, dy) = (random((heads + 2 * groups) * d), random(heads * d));
    let cx = OpCx {
        queue: WQueue::default(),
        meter: Meter::new(),
        token: Tensor::zeros([1], (&device, DType::F32)),
        makers: None,
        vault: None,
        output_wanted: true,
        forward_grads: None,
        masks: Masks::default(),
        routers: None,
        slice: None,
    };
    let forward = |x: Tensor<3>| ops::grouped_attention(x, heads, groups, &cx);
    let timed = |times: usize, work: &dyn Fn() -> Tensor<3>| {
        wait_for(work());
        let start = Instant::now();
        let mut last = work();
        for _ in 1..times {
            last = work();
        }
        wait_for(last);
        start.elapsed().as_secs_f64() / times as f64
    };
    let both = || {
        let leaf = qkv.clone().autodiff().require_grad();
        let mut graph = seed_backward(forward(leaf.clone())).backward(dy.clone());
        leaf.grad_remove(&mut graph).expect("a gradient").inner()
    };
    let times = if bench.small { 1 } else { 20 };
    wait_for(both());
    let forward_s = timed(times, &|| forward(qkv.clone()));
    Ok([forward_s, timed(times, &both) - forward_s])
}

/// LLaMA-3 8B's and GPT-2 124M's attention. TFLOP/s count what a causal query sees: two products
/// in a forward, five in a backward.
pub(crate) fn attention(bench: &Bench) -> Outcome {
    let models: [(&str, Sizes); 2] = if bench.small {
        [("small, shared keys", [1, 64, 4, 2, 64]), ("small", [1, 64, 2, 2, 64])]
    } else {
        [("LLaMA-3 8B", [1, 4096, 32, 8, 128]), ("GPT-2 124M", [16, 1024, 12, 12, 64])]
    };
    for (model, sizes) in models {
        let [b, s, heads, groups, d] = sizes;
        let product = b as f64 * heads as f64 * (s as f64).powi(2) * d as f64;
        // wgpu has no fused kernels.
        let paths = [("fused", false), ("in blocks", true)];
        for (path, blocks) in paths.into_iter().skip(usize::from(bench.device == DeviceKind::Wgpu))
        {
            force_blocks(blocks);
            let measured = seconds(bench, sizes);
            force_blocks(false);
            let [f, b] = measured?;
            let ms = |name: &str, seconds: f64, products: f64| {
                format!(
                    "{name} {:.3} ms, {:.0} TFLOP/s",
                    seconds * 1e3,
                    products * product / seconds / 1e12
                )
            };
            let what = format!(
                "attention of {model}, {b_} × {s}, {heads} heads on {groups}, {path}",
                b_ = sizes[0]
            );
            row(&what, format_args!("{}; {}", ms("F", f, 2.0), ms("B", b, 5.0)), "");
        }
    }
    Ok(true)
}
