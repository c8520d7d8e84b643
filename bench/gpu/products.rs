//! How fast products of matrices are, at the shapes of models: F, B and W of their linear maps, by
//! what a run uses and, for a few, by CubeCL's kernels beside it.

use std::time::Instant;

use burn::tensor::{DType, Device, Distribution, Tensor};
use zeropp::config::Precision;
use zeropp_core::device::wait_for;
use zeropp_core::split::ops::products::{add_product, force_cubecl, made_by, matmul};

use crate::{Bench, Outcome, row};

/// Tokens, inputs and outputs of a linear map.
type Map = (&'static str, [usize; 3]);

/// LLaMA-3 8B's, of a sample; the head's takes a chunk of tokens.
const LLAMA: [Map; 5] = [
    ("LLaMA-8B q, k, v", [4096, 4096, 6144]),
    ("LLaMA-8B attention's output", [4096, 4096, 4096]),
    ("LLaMA-8B gate, up", [4096, 4096, 14336]),
    ("LLaMA-8B down", [4096, 14336, 4096]),
    ("LLaMA-8B head", [2048, 4096, 128_256]),
];

/// GPT-2's of 124M parameters, of 16 samples.
const GPT2: [Map; 5] = [
    ("GPT-2 q, k, v", [16_384, 768, 2304]),
    ("GPT-2 attention's output", [16_384, 768, 768]),
    ("GPT-2 up", [16_384, 768, 3072]),
    ("GPT-2 down", [16_384, 3072, 768]),
    ("GPT-2 head", [2048, 768, 50_304]),
];

/// The map whose products CubeCL makes, too, at the end: its tuner takes a minute for one.
const BY_CUBECL: Map = GPT2[2];

/// FLOP that a measurement should take: tens of milliseconds.
const FLOP: f64 = 5e12;

/// The factors of a map: x, dY and W, random, as zeros take less power and so less time.
struct Factors {
    x: Tensor<2>,
    dy: Tensor<2>,
    w: Tensor<2>,
    sum: Option<Tensor<1>>,
}

impl Factors {
    fn new([tokens, input, output]: [usize; 3], device: &Device, dtype: DType) -> Factors {
        let random = |shape: [usize; 2]| {
            let normal = Distribution::Normal(0.0, 1.0);
            Tensor::<2>::random(shape, normal, (device, DType::F32)).cast(dtype)
        };
        let (x, dy, w) =
            (random([tokens, input]), random([tokens, output]), random([input, output]));
        let sum = Some(Tensor::zeros([input * output], (device, DType::F32)));
        Factors { x, dy, w, sum }
    }

    /// Seconds of each of F, B and W, the shortest of three measurements of so many of them.
    fn seconds(&mut self, times: usize) -> [f64; 3] {
        [Self::forward, Self::backward, Self::weights].map(|pass| {
            let mut measure = |times: usize| {
                let start = Instant::now();
                let last = (0..times).map(|_| pass(self)).last().expect("at least one");
                wait_for(last.unwrap_or_else(|| self.sum.clone().expect("put back")));
                start.elapsed().as_secs_f64() / times as f64
            };
            measure(1);
            measure(2);
            (0..3).map(|_| measure(times)).fold(f64::INFINITY, f64::min)
        })
    }

    fn forward(&mut self) -> Option<Tensor<1>> {
        Some(matmul(self.x.clone(), self.w.clone()).flatten(0, 1))
    }

    fn backward(&mut self) -> Option<Tensor<1>> {
        Some(matmul(self.dy.clone(), self.w.clone().transpose()).flatten(0, 1))
    }

    /// Into the fp32 sum of micro-batches, which nothing else holds: so there is no result beside.
    fn weights(&mut self) -> Option<Tensor<1>> {
        let (x, dy) = (self.x.clone().transpose(), self.dy.clone());
        self.sum = self.sum.take().map(|sum| add_product(sum, x, dy));
        None
    }
}

pub(crate) fn rates(bench: &Bench) -> Outcome {
    let device = bench.config().devices()?.of(0);
    let dtype = if bench.fast() == Precision::Bf16 { DType::BF16 } else { DType::F32 };
    let by = made_by(bench.device).unwrap_or_else(|| "CubeCL".into());
    row("products of matrices are made by", &by, "");
    let libraries = LLAMA.into_iter().chain(GPT2).map(|map| (map, false));
    for ((name, sizes), by_cubecl) in libraries.chain([(BY_CUBECL, true)]) {
        let sizes = if bench.small { sizes.map(|n| (n / 128).max(8)) } else { sizes };
        let mut factors = Factors::new(sizes, &device, dtype);
        let flop = 2.0 * sizes.iter().map(|n| *n as f64).product::<f64>();
        let times = if bench.small { 1 } else { (FLOP / flop).ceil().clamp(1.0, 200.0) as usize };
        force_cubecl(by_cubecl);
        let [f, b, w] = factors.seconds(times).map(|s| flop / s / 1e12);
        force_cubecl(false);
        let ([n, i, o], whose) = (sizes, if by_cubecl { "CubeCL's" } else { "a run's" });
        let what = format!("{name}, {n} × {i} × {o}, {}, {whose}", bench.fast());
        row(&what, format_args!("F {f:.0}, B {b:.0}, W {w:.0} TFLOP/s"), "");
    }
    Ok(true)
}
