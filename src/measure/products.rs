//! How fast products are, by shape.

use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::tensor::{DType, Device, Tensor};
use zeropp_core::device::Devices;
use zeropp_core::kernels::threads::Threads;
use zeropp_core::meter::Meter;
use zeropp_core::model::decoder::Decoder;
use zeropp_core::params::{FlatLayout, Init, ParamSpec};
use zeropp_core::split::ops::products::round_to_tf32;
use zeropp_core::split::{LayerWeights, Masks, OpCx, WQueue, ops};

use super::median;
use super::together::together;
use crate::Error;
use crate::config::{Config, DeviceKind, Precision};

/// How long one shape is measured.
const SHAPE_S: f64 = 0.4;
/// Times that it is measured at least, after one that is not counted.
const TRIES: usize = 3;
/// Token ids of a model whose data is not looked at.
const BYTE_IDS: usize = 256;

/// One shape: `rows x inner` by `inner x columns`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Product {
    /// Rows of the first factor: tokens.
    pub rows: usize,
    /// Columns of the first factor.
    pub inner: usize,
    /// Columns of the second.
    pub columns: usize,
    /// Floating-point operations in a second of each rank.
    pub flops_per_s: f64,
}

/// The products of `config`'s model, on so many ranks at once, by the operation that layers use.
///
/// # Errors
/// A model that is none.
pub(super) fn measure(
    config: &Config,
    devices: &Devices,
    ranks: usize,
) -> Result<Vec<Product>, Error> {
    let decoder = config.decoder(config.vocab.unwrap_or(BYTE_IDS))?;
    let tokens = config.micro_batch_size * config.seq;
    let dtype = config.compute_type();
    let on_gpu = config.device != DeviceKind::Cpu;
    let units = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = config.threads_of(ranks, units);
    let timed = |[rows, inner, columns]: [usize; 3]| {
        let seconds = together(ranks, |rank, ready| {
            let device = devices.of(rank);
            let threads = Threads::new(threads, ranks * threads <= units);
            let _installed = threads.install();
            round_to_tf32(config.precision == Precision::Tf32);
            let product = product([rows, inner, columns], &device, dtype, on_gpu);
            ready();
            repeated(product)
        });
        let flops = 2.0 * (rows * inner * columns) as f64;
        Ok(Product { rows, inner, columns, flops_per_s: flops / median(seconds?) })
    };
    shapes(&decoder, tokens).into_iter().map(timed).collect()
}

/// Those of a block for so many tokens, and the one into the MLP for fewer and more.
fn shapes(d: &Decoder, tokens: usize) -> Vec<[usize; 3]> {
    let (h, q, f) = (d.hidden, d.heads * d.head_dim, d.intermediate);
    let qkv = q + 2 * d.kv_heads * d.head_dim;
    let mut shapes = vec![[tokens, h, qkv], [tokens, q, h], [tokens, h, f], [tokens, f, h]];
    shapes.extend([tokens / 4, 4 * tokens].into_iter().filter(|n| *n > 0).map(|n| [n, h, f]));
    shapes
}

/// A product that is done when the call returns.
fn product(
    [rows, inner, columns]: [usize; 3],
    device: &Device,
    dtype: DType,
    on_gpu: bool,
) -> impl FnMut() + use<> {
    let layout = FlatLayout::new(vec![ParamSpec::new("w", &[inner, columns], Init::Zeros)], 1);
    let len = layout.len;
    let weights = LayerWeights::new("product", 0, Arc::new(layout));
    weights.set(Tensor::ones([len], (device, dtype)));
    let weight = weights.weight::<2>("w");
    let cx = OpCx {
        queue: WQueue::default(),
        meter: Meter::new(),
        token: Tensor::zeros([1], (device, DType::F32)),
        makers: None,
        vault: None,
        output_wanted: true,
        forward_grads: None,
        masks: Masks::default(),
        routers: None,
        slice: None,
    };
    let x = Tensor::<3>::ones([1, rows, inner], (device, dtype));
    move || {
        let y = ops::linear(x.clone(), &weight, None, &cx);
        if on_gpu {
            zeropp_core::device::wait_for(y);
        }
    }
}

/// The median time of a step, in seconds.
pub(super) fn repeated(mut step: impl FnMut()) -> f64 {
    step();
    let (begin, mut times) = (Instant::now(), Vec::new());
    while times.len() < TRIES || begin.elapsed() < Duration::from_secs_f64(SHAPE_S) {
        let start = Instant::now();
        step();
        times.push(start.elapsed().as_secs_f64());
    }
    median(times)
}
