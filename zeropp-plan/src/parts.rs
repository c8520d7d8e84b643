//! The layers of a model as a planner sees them: parameters, operations, bytes kept. They count as
//! zeropp's own layers do, so that a plan and the run that it leads to predict the same bytes.

use crate::model::ModelSizes;

/// Elements in a block of a flat buffer: parameters start at multiples of it.
const BLOCK: usize = 128;
/// Most bytes of logits at once on a GPU, and on a CPU.
const LOGITS_MAX: [usize; 2] = [512 << 20, 64 << 20];
/// Tokens of a chunk of logits are a multiple of this.
const CHUNK_MULTIPLE: usize = 64;

/// The micro-batch that costs are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Samples, b.
    pub samples: usize,
    /// Tokens of each.
    pub seq: usize,
    /// Bytes of an element of activations and gathered weights.
    pub element_bytes: usize,
    /// Whether it is computed by zeropp's kernels for the CPU in fp32, which keep attention's
    /// probabilities.
    pub on_kernels: bool,
}

impl Batch {
    /// Tokens.
    pub fn tokens(&self) -> usize {
        self.samples * self.seq
    }
}

/// One layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Elements of each parameter.
    pub parameters: Vec<usize>,
    kind: PartKind,
    sizes: ModelSizes,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PartKind {
    Embedding,
    Positions,
    Block,
    FinalNorm,
    Head,
}

/// What one micro-batch costs in a layer.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PartCost {
    /// Floating-point operations of a forward, with the causal half of attention.
    pub flops: f64,
    /// Those of them that multiply by weights: what W takes.
    pub weight_flops: f64,
    /// Bytes that a pass over activations moves in a forward.
    pub traffic: f64,
    /// Bytes kept from F to B.
    pub activation: u64,
    /// The same where attention is computed again.
    pub activation_selective: u64,
    /// Bytes kept from B to W.
    pub stash: u64,
    /// Bytes that F takes besides and gives back.
    pub workspace: u64,
    /// Whether F makes the gradients, as a head does.
    pub gradients_in_forward: bool,
}

/// The layers in order: embedding, blocks, norm and head.
pub fn parts(sizes: &ModelSizes) -> Vec<Part> {
    let ModelSizes { hidden: h, intermediate: i, vocabulary, .. } = *sizes;
    let part = |kind, parameters: Vec<usize>| Part { parameters, kind, sizes: sizes.clone() };
    let kv = h / sizes.heads * sizes.kv_heads;
    let block = match sizes.gated {
        false => vec![h, h, h * (h + 2 * kv), h + 2 * kv, h * h, h, h, h, h * i, i, i * h, h],
        true => vec![h, h * h, h * kv, h * kv, h * h, h, h * i, h * i, i * h],
    };
    let mut parts = vec![part(PartKind::Embedding, vec![vocabulary * h])];
    if !sizes.gated {
        parts.push(part(PartKind::Positions, vec![sizes.seq * h]));
    }
    parts.extend((0..sizes.layers).map(|_| part(PartKind::Block, block.clone())));
    let norm = if sizes.gated { vec![h] } else { vec![h, h] };
    parts.push(part(PartKind::FinalNorm, norm));
    parts.push(part(PartKind::Head, vec![vocabulary * h]));
    parts
}

/// Parameters of a model; a tied weight counts once.
pub fn parameters(sizes: &ModelSizes) -> f64 {
    let all: usize = parts(sizes).iter().map(Part::elements).sum();
    let twice = if sizes.tied { sizes.vocabulary * sizes.hidden } else { 0 };
    (all - twice) as f64
}

impl Part {
    /// Parameters.
    pub fn elements(&self) -> usize {
        self.parameters.iter().sum()
    }

    /// Elements of the flat buffer that can be cut into `pieces`, padding included.
    pub fn flat_elements(&self, pieces: usize) -> u64 {
        let all: usize = self.parameters.iter().map(|n| n.next_multiple_of(BLOCK)).sum();
        all.next_multiple_of(BLOCK * pieces) as u64
    }

    /// Whether a cut into stages may lie before and after it.
    pub fn is_block(&self) -> bool {
        self.kind == PartKind::Block
    }

    /// What a micro-batch costs.
    pub fn cost(&self, batch: Batch) -> PartCost {
        let (tokens, h) = (batch.tokens(), self.sizes.hidden);
        let hidden = (tokens * h * batch.element_bytes) as u64;
        let statistics = 8 * tokens as u64;
        let kept = |activation: u64| PartCost {
            activation,
            activation_selective: activation,
            traffic: 2.0 * hidden as f64,
            ..PartCost::default()
        };
        match self.kind {
            PartKind::Embedding => PartCost { stash: hidden, ..kept(0) },
            PartKind::Positions => PartCost { stash: (4 * batch.seq * h) as u64, ..kept(0) },
            PartKind::Block => self.block(batch, hidden, statistics),
            PartKind::FinalNorm => PartCost { stash: 8 * h as u64, ..kept(statistics + hidden) },
            PartKind::Head => {
                let flops = 2.0 * tokens as f64 * (h * self.sizes.vocabulary) as f64;
                let row = self.sizes.vocabulary * batch.element_bytes;
                let chunk = chunk(tokens, row, LOGITS_MAX[usize::from(batch.on_kernels)]);
                PartCost {
                    flops,
                    weight_flops: flops,
                    workspace: (chunk * row) as u64,
                    gradients_in_forward: true,
                    traffic: 2.0 * (tokens * row) as f64,
                    ..kept(hidden)
                }
            }
        }
    }

    fn block(&self, batch: Batch, hidden: u64, statistics: u64) -> PartCost {
        let s = &self.sizes;
        let tokens = batch.tokens();
        let of = |elements: usize| (tokens * elements * batch.element_bytes) as u64;
        let kv = of(s.hidden / s.heads * s.kv_heads);
        let inner = of(s.intermediate);
        // x, norm, q k v, attention's output, x after attention, norm, and the MLP's before and
        // after the activation, which a gate has one more of.
        let mlp = if s.gated { 3 } else { 2 };
        let kept = 6 * hidden + 2 * kv + mlp * inner + 2 * statistics;
        let queries = (batch.samples * s.heads * batch.seq) as u64;
        let scores = queries * (batch.seq * batch.element_bytes) as u64;
        let [probabilities, sums] = if batch.on_kernels { [scores, 0] } else { [0, 4 * queries] };
        let weight_flops = 2.0 * tokens as f64 * self.matrices() as f64;
        let attention = 2.0 * tokens as f64 * batch.seq as f64 * s.hidden as f64;
        // Input and dY of each product.
        let stash = match s.gated {
            false => 6 * hidden + 2 * kv + 2 * inner,
            true => 4 * hidden + 2 * kv + 3 * inner,
        };
        PartCost {
            flops: weight_flops + attention,
            weight_flops,
            // Everything kept is written once and read once; the causal half of scores, too.
            traffic: 2.0 * kept as f64 + scores as f64,
            activation: kept + probabilities + sums,
            activation_selective: kept + sums,
            stash: stash + if s.gated { 0 } else { 16 * s.hidden as u64 },
            ..PartCost::default()
        }
    }

    /// Elements of a block's matrices.
    fn matrices(&self) -> usize {
        let s = &self.sizes;
        let kv = s.hidden / s.heads * s.kv_heads;
        let mlp = if s.gated { 3 } else { 2 };
        s.hidden * (2 * s.hidden + 2 * kv + mlp * s.intermediate)
    }
}

/// Tokens whose logits are there at once.
fn chunk(tokens: usize, row_bytes: usize, bytes_max: usize) -> usize {
    let most = bytes_max / row_bytes.max(1);
    let most = (most / CHUNK_MULTIPLE * CHUNK_MULTIPLE).max(2 * CHUNK_MULTIPLE);
    let chunks = tokens.div_ceil(most).max(1);
    tokens.div_ceil(chunks).next_multiple_of(CHUNK_MULTIPLE).min(tokens)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_models_have_the_sizes_that_their_papers_print() {
        // In billions of parameters; ZeroPP's two are called by what 46 and 62 layers have.
        let sizes = [
            ("14.6b", 15.6),
            ("28.3b", 29.6),
            ("22b", 22.4),
            ("175b", 175.2),
            ("530b", 530.4),
            ("1t", 1009.0),
        ];
        for (name, billions) in sizes {
            let n = parameters(&ModelSizes::of_a_paper(name).unwrap()) / 1e9;
            assert!((n / billions - 1.0).abs() < 0.01, "{name}: {n}");
        }
    }
}
