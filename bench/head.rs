//! The head that makes its gradients in F, a chunk of tokens at a time, beside one that keeps all
//! logits: core time of F, B and W together, in turns on one core: `cargo bench --bench head`.
//!
//! Each turn runs both, and gives one ratio of their times; the middle one is what counts, and the
//! spread says how much it does.

use std::sync::Arc;

use burn::tensor::{Device, Int, Tensor, TensorData};
use parking_lot::Mutex;
use zeropp_core::cpu_tensor;
use zeropp_core::meter::Meter;
use zeropp_core::params::{FlatLayout, Init, ParamSpec};
use zeropp_core::split::ops::{cross_entropy, linear_cross_entropy, linear_transposed};
use zeropp_core::split::{ForwardGrads, Grads, LayerWeights, Masks, OpCx, WQueue, seed_backward};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Tokens, hidden size, token ids, and turns.
const SIZES: [(usize, usize, usize, usize); 3] =
    [(2048, 256, 256, 100), (2048, 256, 8192, 12), (512, 256, 50_257, 8)];

/// Seconds that this thread spent on a core: other processes do not count.
fn cpu_now() -> f64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    t.tv_sec as f64 + t.tv_nsec as f64 * 1e-9
}

fn values(n: usize, seed: u32) -> Vec<f32> {
    let hash = |i: usize| (i as u32 ^ seed).wrapping_mul(2_654_435_761).rotate_left(13);
    (0..n).map(|i| hash(i).wrapping_mul(2_246_822_519) as f32 / u32::MAX as f32 - 0.5).collect()
}

/// A head of `[ids, hidden]` and the input and targets of a micro-batch.
struct Head {
    x: Tensor<3>,
    targets: Tensor<2, Int>,
    ids: usize,
    weights: LayerWeights,
    grads: Arc<Mutex<Grads>>,
    meter: Arc<Meter>,
}

impl Head {
    fn new(tokens: usize, hidden: usize, ids: usize) -> Head {
        let device = Device::flex();
        let spec = ParamSpec::new("w", &[ids, hidden], Init::Zeros);
        let layout = Arc::new(FlatLayout::new(vec![spec], 1));
        let weights = LayerWeights::new("head", 0, layout.clone());
        weights.set(cpu_tensor::from_vec(values(layout.len, 3), [layout.len]));
        let meter = Meter::new();
        let grads = Grads::new(vec![layout], &device, &meter);
        let target = |i: usize| (i.wrapping_mul(2_654_435_761) % ids) as i32;
        let targets: Vec<i32> = (0..tokens).map(target).collect();
        Head {
            x: cpu_tensor::from_vec(values(tokens * hidden, 7), [1, tokens, hidden]),
            targets: Tensor::from_data(TensorData::new(targets, [1, tokens]), &device),
            ids,
            weights,
            grads: Arc::new(Mutex::new(grads)),
            meter,
        }
    }

    /// Seconds of F, B and W, in `chunks` or with all logits.
    fn seconds(&self, chunks: bool) -> f64 {
        let token = cpu_tensor::from_vec(vec![0.0], [1]);
        let forward_grads = ForwardGrads { grads: self.grads.clone(), loss_scale: 1.0 };
        let cx = OpCx {
            queue: WQueue::default(),
            meter: self.meter.clone(),
            token: token.autodiff().require_grad(),
            makers: None,
            vault: None,
            output_wanted: true,
            forward_grads: Some(forward_grads),
            masks: Masks::default(),
            routers: None,
            slice: None,
        };
        let (x, targets) = (self.x.clone().autodiff().require_grad(), self.targets.clone());
        let w = self.weights.weight("w");
        let start = cpu_now();
        let loss = match chunks {
            true => linear_cross_entropy(x, &w, targets, self.ids, &cx),
            false => cross_entropy(linear_transposed(x, &w, &cx), targets, &cx),
        };
        seed_backward(loss).backward(cpu_tensor::from_vec(vec![1.0], [1]));
        cx.queue.run(&mut self.grads.lock());
        cpu_now() - start
    }
}

fn main() {
    println!(
        "{:>7} {:>7} {:>8}  {:>10} {:>10}  speed in chunks",
        "tokens", "hidden", "ids", "all", "chunks"
    );
    for (tokens, hidden, ids, turns) in SIZES {
        let head = Head::new(tokens, hidden, ids);
        // Pages and caches first.
        for chunks in [false, true] {
            head.seconds(chunks);
        }
        let mut best = [f64::INFINITY; 2];
        let mut speeds: Vec<f64> = (0..turns)
            .map(|turn| {
                // Who goes first alternates, too.
                let order = if turn % 2 == 0 { [false, true] } else { [true, false] };
                let mut times = [0.0; 2];
                for chunks in order {
                    times[usize::from(chunks)] = head.seconds(chunks);
                }
                best = std::array::from_fn(|i| f64::min(best[i], times[i]));
                times[0] / times[1]
            })
            .collect();
        speeds.sort_by(f64::total_cmp);
        let at = |share: f64| speeds[((turns - 1) as f64 * share).round() as usize];
        println!(
            "{tokens:>7} {hidden:>7} {ids:>8}  {:>7.2} ms {:>7.2} ms  {:.3} ({:.3} to {:.3})",
            best[0] * 1e3,
            best[1] * 1e3,
            at(0.5),
            at(0.25),
            at(0.75)
        );
    }
}
