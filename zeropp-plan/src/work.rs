//! How long a layer takes on a device, from its operations and the bytes that it moves.

use zeropp_model::layer::BatchShape;
use zeropp_model::params::ParamSpec;
use zeropp_model::parts::{DecoderPart, PartKind};
use zeropp_schedule::costs::Machine;

use crate::bytes::LayerSizes;
use crate::layout::{ComputeSettings, Job};

/// A layer with what a micro-batch costs in it.
#[derive(Clone, Debug)]
pub(crate) struct LayerWork {
    pub(crate) sizes: LayerSizes,
    pub(crate) kind: PartKind,
    /// Floating-point operations of F, B, W and R.
    pub(crate) flops: [f64; 4],
    /// What B does besides where attention's probabilities are computed again, in as many.
    again: f64,
    /// Bytes that a pass over activations moves in a forward.
    pub(crate) traffic: f64,
    /// A block's matrices, and those of its experts.
    matrices: [MatrixWork; 2],
}

/// Matrices that a micro-batch is multiplied with, each pass of which reads all of them.
#[derive(Clone, Copy, Debug, Default)]
struct MatrixWork {
    /// Bytes of them that F, B, W and R move: B and R read them as F does, W reads and writes the
    /// fp32 gradient of those that train.
    moved: [f64; 4],
    /// Floating-point operations of F, B, W and R with them.
    flops: [f64; 4],
}

impl MatrixWork {
    /// Of those parameters that `is_of_these`; a token is multiplied with all but `idle` elements.
    fn new(
        sizes: &LayerSizes,
        idle: u64,
        batch: BatchShape,
        is_of_these: fn(&ParamSpec) -> bool,
    ) -> MatrixWork {
        let those = || sizes.parameters().iter().filter(|p| is_of_these(p));
        let elements = those().map(|p| p.len() as f64).sum::<f64>();
        let trained = those().filter(|p| p.trains).map(|p| p.len() as f64).sum::<f64>();
        let read = elements * batch.element_bytes as f64;
        let flops = 2.0 * batch.tokens() as f64 * (elements - idle as f64);
        let of_w = if elements > 0.0 { flops * trained / elements } else { 0.0 };
        MatrixWork { moved: [read, read, 8.0 * trained, read], flops: [flops, flops, of_w, flops] }
    }

    /// Seconds that F, B, W and R take longer than their operations do at `rate`, because memory
    /// gives the matrices no faster: few tokens for each expert (ADR 90).
    fn waits(&self, rate: f64, memory: f64) -> [f64; 4] {
        std::array::from_fn(|i| (self.moved[i] / memory - self.flops[i] / rate).max(0.0))
    }
}

/// What `of` says of each part of a model; most blocks are like the one before.
pub(crate) fn of_parts<T: Clone>(parts: &[DecoderPart], of: impl Fn(&DecoderPart) -> T) -> Vec<T> {
    let mut all: Vec<T> = Vec::with_capacity(parts.len());
    for (i, part) in parts.iter().enumerate() {
        let before = i.checked_sub(1).filter(|before| parts[*before].is_like(part));
        all.push(before.map_or_else(|| of(part), |before| all[before].clone()));
    }
    all
}

impl LayerWork {
    pub(crate) fn new(
        part: &DecoderPart,
        batch: BatchShape,
        compute: &ComputeSettings,
    ) -> LayerWork {
        let (parameters, mut cost) = (part.parameters(), part.cost(batch));
        if compute.redoes_outputs {
            cost.output_flops = 0.0;
        }
        let sizes = LayerSizes::new(parameters, part.role(), cost);
        let of_weights = sizes.weight_flops(batch.tokens());
        let mut flops = sizes.flops(batch.tokens(), false);
        // One of attention's two products, and as long for exponentials: what was measured for
        // samples of 128 and of 512 tokens (ADR 57).
        let again = if part.is_block() { (cost.forward_flops - of_weights).max(0.0) } else { 0.0 };
        if compute.dropout {
            flops[1] += again;
        }
        let d = &part.decoder;
        let of = |elements: usize| (elements * batch.element_bytes) as f64;
        let traffic = match part.kind {
            // Everything kept is written once and read once; the causal half of scores, too.
            PartKind::Block(index) => {
                let seen = d.window_of(index).map_or(batch.seq, |window| window.min(batch.seq));
                let scores = batch.tokens() * d.heads * seen;
                let without = BatchShape { keeps_probabilities: false, ..batch };
                2.0 * part.cost(without).activation_bytes as f64 + of(scores)
            }
            PartKind::Head => 2.0 * of(batch.tokens() * d.rows()),
            _ => 2.0 * of(batch.tokens() * d.hidden),
        };
        let kind = part.kind;
        let matrices = match part.is_block() {
            true => [
                MatrixWork::new(&sizes, 0, batch, |p| p.shape.len() == 2),
                MatrixWork::new(&sizes, cost.idle_elements, batch, |p| p.shape.len() == 3),
            ],
            false => Default::default(),
        };
        LayerWork { sizes, kind, flops, again, traffic, matrices }
    }

    pub(crate) fn is_block(&self) -> bool {
        matches!(self.kind, PartKind::Block(_))
    }

    /// Seconds that B takes longer with selective recomputation: a pass over what it makes again,
    /// and attention's probabilities where they were kept.
    pub(crate) fn again_s(&self, job: &Job) -> f64 {
        let machine = &job.machine;
        let passes = self.sizes.cost.again_bytes as f64 / machine.memory_bytes_per_s;
        if !job.compute.keeps_probabilities {
            return passes;
        }
        let rate = machine.block_flops_per_s.map(|rates| rates[1]);
        let rate = rate.unwrap_or(machine.flops_per_s * machine.flops_share);
        passes + self.again / rate
    }

    /// Seconds of F, B, W and R: by what layers were measured to do, else products at the
    /// machine's rate or as memory gives their matrices, passes over what is kept, and in a block
    /// the gaps between its kernels; a head that makes its gradients in F has all of it there.
    pub(crate) fn seconds(&self, machine: &Machine) -> [f64; 4] {
        let measured = match self.kind {
            PartKind::Block(_) => machine.block_flops_per_s.map(|rates| (rates, machine.block_s)),
            PartKind::Head => machine.head_flops_per_s.map(|rate| ([rate; 4], [0.0; 4])),
            _ => None,
        };
        if let Some((rates, beside)) = measured {
            return std::array::from_fn(|i| self.flops[i] / rates[i] + beside[i]);
        }
        let passes = match self.sizes.cost.gradients_in_forward {
            true => [2.0, 0.0, 0.0, 2.0],
            false => [1.0, 1.5, 0.0, 1.0],
        };
        let stash = [0.0, 0.0, self.sizes.cost.stash_bytes as f64, 0.0];
        // W is a few large products.
        let gaps = match self.kind {
            PartKind::Block(_) => [1.0, 2.0, 0.0, 1.0],
            _ => [0.0; 4],
        };
        let rate = machine.flops_per_s * machine.flops_share;
        let waits = self.matrices.map(|of| of.waits(rate, machine.memory_bytes_per_s));
        std::array::from_fn(|i| {
            let bytes = passes[i] * self.traffic + stash[i];
            let moved = bytes / machine.memory_bytes_per_s;
            let products = self.flops[i] / rate + waits[0][i] + waits[1][i];
            products + moved + gaps[i] * machine.layer_s
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zeropp_model::layer::SamplePart;
    use zeropp_model::presets::Preset;

    /// A block of a model, and a micro-batch of so many samples of so many tokens.
    fn block(model: &str, samples: usize, seq: usize) -> LayerWork {
        let parts = Preset::find(model).unwrap().decoder.parts();
        let block = parts.iter().find(|part| part.is_block()).unwrap();
        let batch = BatchShape {
            samples,
            seq,
            element_bytes: 2,
            keeps_probabilities: false,
            kernels: false,
            part: SamplePart::Whole,
        };
        LayerWork::new(block, batch, &ComputeSettings::GPU)
    }

    /// What a block's matrices and its experts wait for memory, and take by their operations, ms
    /// of F, B and W together.
    fn waits(model: &str, tokens: usize) -> [[f64; 2]; 2] {
        let (rate, memory) = (0.45 * 989e12, 3.35e12);
        block(model, 1, tokens).matrices.map(|of| {
            let ms = |s: [f64; 4]| s[..3].iter().sum::<f64>() * 1e3;
            [ms(of.waits(rate, memory)), ms(of.flops.map(|flops| flops / rate))]
        })
    }

    #[test]
    fn a_measured_layer_of_experts_has_a_part_that_more_samples_do_not_make_longer() {
        let measured = "block_flops_per_s = [3e11, 2e11, 4e11, 3e11]\n\
                        t_block = [800, 700, 1000, 800]\n";
        let text = format!("{}\n{measured}", crate::machines::file("h100").unwrap());
        let machine = crate::machines::read("measured.toml", &text).unwrap();
        let of = |samples| block("qwen3-30b-a3b", samples, 256).seconds(&machine);
        let (one, four) = (of(1), of(4));
        for (i, fixed) in [8e-4, 7e-4, 1e-3, 8e-4].into_iter().enumerate() {
            let grown = fixed + 4.0 * (one[i] - fixed);
            assert!(one[i] > fixed && (four[i] / grown - 1.0).abs() < 1e-9, "{one:?} {four:?}");
        }
    }

    #[test]
    fn experts_with_few_tokens_take_as_long_as_memory_needs_for_their_gradients() {
        // Of Qwen3-30B by arithmetic: 2.1 ms of products, 2.8 with their bytes.
        let [dense, experts] = waits("qwen3-30b-a3b", 4096);
        assert!((experts[1] - 2.1).abs() < 0.05, "{experts:?}");
        assert!((experts[0] + experts[1] - 2.8).abs() < 0.1, "{experts:?}");
        assert_eq!(dense[0], 0.0, "attention's matrices have enough tokens");
        assert_eq!(waits("qwen3-30b-a3b", 32_768)[1][0], 0.0);
        assert_eq!(waits("llama3-8b", 4096)[1], [0.0; 2], "no experts");
        assert_eq!(waits("llama3-8b", 4096)[0][0], 0.0);
        assert!(waits("llama3-8b", 128)[0][0] > 0.0, "any matrix with few tokens");
    }
}
