//! The cost of a decoder's parts for a micro-batch: FLOP, and bytes as the meter will count them.

use crate::decoder::{Decoder, Norm};
use crate::head::{head_chunk, logit_bytes};
use crate::layer::{BatchShape, LayerCost};
use crate::parts::{DecoderPart, PartKind};
use crate::slots::{Keeps, Slot};
use crate::tensors::{DecoderTensor, QK_NORMS};

impl DecoderPart {
    /// The cost of a micro-batch.
    pub fn cost(&self, batch: BatchShape) -> LayerCost {
        match self.kind {
            PartKind::Embedding => embedding(self, batch),
            PartKind::Positions => positions(self, batch),
            PartKind::Block(index) => block(self, index, batch),
            PartKind::FinalNorm => final_norm(self, batch),
            PartKind::Head => head(self, batch),
        }
    }
}

/// Bytes of the hidden states of a micro-batch.
fn hidden_bytes(d: &Decoder, batch: BatchShape) -> u64 {
    bytes(d.hidden, batch)
}

/// Bytes of `width` elements a token.
fn bytes(width: usize, batch: BatchShape) -> u64 {
    (batch.tokens() * width * batch.element_bytes) as u64
}

/// What the norm called `name` keeps: its input and one or two numbers of each row for B, a
/// gradient of h for each of its parameters that trains for W, all but the input fp32.
fn norm(part: &DecoderPart, name: &str, batch: BatchShape) -> Keeps {
    let numbers = match part.decoder.norm {
        Norm::Layer { .. } => 2,
        Norm::Rms { .. } => 1,
    };
    let statistics = 4 * numbers * batch.tokens() as u64;
    let trained = ["weight", "bias"].into_iter().filter(|of| trains(part, &format!("{name}.{of}")));
    Keeps {
        slots: vec![Slot::new(hidden_bytes(&part.decoder, batch)), Slot::new(statistics)],
        made: (4 * trained.count() * part.decoder.hidden) as u64,
    }
}

/// Whether the part has a parameter whose name ends so, and it trains.
fn trains(part: &DecoderPart, name: &str) -> bool {
    let is_it = |t: &DecoderTensor| t.name.strip_suffix(name).is_some_and(is_start);
    part.tensors().iter().any(|t| t.trains && is_it(t))
}

fn is_start(rest: &str) -> bool {
    rest.is_empty() || rest.ends_with('.')
}

/// Elements of a matrix that is packed: both sizes in whole tiles of bf16 products.
fn packed(shape: &[usize]) -> u64 {
    shape.iter().map(|n| n.next_multiple_of(32) as u64).product()
}

/// The embedding: W adds rows of dY.
fn embedding(part: &DecoderPart, batch: BatchShape) -> LayerCost {
    let stash = hidden_bytes(&part.decoder, batch);
    LayerCost { stash_bytes: if any_trains(part) { stash } else { 0 }, ..LayerCost::default() }
}

/// Learned positions: W adds dY summed over the samples, fp32.
fn positions(part: &DecoderPart, batch: BatchShape) -> LayerCost {
    let stash = (4 * batch.seq * part.decoder.hidden) as u64;
    LayerCost { stash_bytes: if any_trains(part) { stash } else { 0 }, ..LayerCost::default() }
}

fn any_trains(part: &DecoderPart) -> bool {
    part.tensors().iter().any(|t| t.trains)
}

/// Linear maps of one input: which of them train, and what that takes.
struct Maps {
    /// Elements of a token's input.
    input: usize,
    /// Whether they are one product, with one dY.
    joint: bool,
    maps: Vec<Map>,
}

struct Map {
    output: usize,
    weight: bool,
    bias: bool,
    /// Rank of its adapter, if it has one.
    rank: Option<usize>,
}

impl Maps {
    fn of(part: &DecoderPart, names: &[&'static str], input: usize, joint: bool) -> Maps {
        let tensors = part.tensors();
        let map = |name: &&'static str| {
            let end = format!(".{name}.weight");
            let weight = tensors.iter().find(|t| t.name.ends_with(&end)).expect("a map of it");
            let lora = part.tuning.lora.filter(|_| part.is_adapted(name));
            Map {
                output: weight.shape[1],
                weight: weight.trains,
                bias: trains(part, &format!("{name}.bias")),
                rank: lora.map(|lora| lora.rank),
            }
        };
        Maps { input, joint, maps: names.iter().map(map).collect() }
    }

    /// What they keep: the input where W needs it, x·A of adapters, and dY of each product with a
    /// weight that trains. B can make the input from `inputs` elements of a token, if any.
    fn kept(&self, inputs: Option<usize>, batch: BatchShape) -> Keeps {
        let needs_input = self.maps.iter().any(|map| map.weight || map.rank.is_some());
        let input = Slot::new(bytes(self.input, batch)).for_w();
        let input = match inputs {
            Some(inputs) => input.made_from(bytes(inputs, batch)),
            None => input,
        };
        let adapted = self.maps.iter().filter_map(|map| map.rank);
        let adapted = adapted.map(|rank| Slot::new(bytes(rank, batch)).for_w());
        let slots = needs_input.then_some(input).into_iter().chain(adapted).collect();
        Keeps { slots, made: self.made(batch) }
    }

    /// Bytes that B keeps for W and F has not kept for B: dY of each product with a weight that
    /// trains; of a bias alone its gradient.
    fn made(&self, batch: BatchShape) -> u64 {
        // The gradients of x·A, and of what an adapter gives.
        let adapted = self.maps.iter().filter_map(|map| Some(map.rank? + map.output));
        let elements = adapted.sum::<usize>();
        let any = self.joint && self.maps.iter().any(|map| map.weight);
        let each = self.maps.iter().map(|map| match any || map.weight {
            true => bytes(map.output, batch),
            false if map.bias => 4 * map.output as u64,
            false => 0,
        });
        bytes(elements, batch) + each.sum::<u64>()
    }

    /// Floating-point operations of the adapters of these maps on a token.
    fn adapter_flops(&self) -> usize {
        let each = |map: &Map| map.rank.map_or(0, |rank| 2 * rank * (self.input + map.output));
        self.maps.iter().map(each).sum()
    }
}

/// The linear maps of a block by their inputs.
fn groups(part: &DecoderPart) -> [Maps; 4] {
    let (d, names) = (&part.decoder, part.decoder.names());
    [
        Maps::of(part, names.qkv, d.hidden, true),
        Maps::of(part, &[names.out], d.query_width(), false),
        Maps::of(part, names.up, d.hidden, false),
        Maps::of(part, &[names.down], d.intermediate, false),
    ]
}

/// What a block's operations keep, in the order of their forwards.
fn operations(part: &DecoderPart, index: usize, batch: BatchShape) -> Vec<Keeps> {
    let (d, names) = (&part.decoder, part.decoder.names());
    let [norm_1, norm_2] = [names.norm_1, names.norm_2].map(|name| norm(part, name, batch));
    let [of_qkv, of_out, of_up, of_down] = groups(part);
    let (qkv, inner) = (d.qkv_width(), (d.mlp_maps() - 1) * d.intermediate);
    let queries = (batch.samples * d.heads * batch.seq) as u64;
    let slides = d.window_of(index).is_some_and(|window| window < batch.seq);
    let beside = if batch.keeps_probabilities && !slides {
        Slot::new(queries * (batch.seq * batch.element_bytes) as u64).not_needed()
    } else {
        Slot::new(4 * queries)
    };
    let mut operations = vec![norm_1, of_qkv.kept(Some(d.hidden), batch)];
    let mut attended = Slot::new(bytes(qkv, batch));
    if d.qk_norm {
        // q and k before their norms, and one number of each of their heads.
        let heads = Slot::new(4 * (batch.tokens() * (d.heads + d.kv_heads)) as u64);
        let trained = QK_NORMS.iter().filter(|name| trains(part, &format!("{name}.weight")));
        let made = (4 * trained.count() * d.head_dim) as u64;
        operations.push(Keeps { slots: vec![attended, heads], made });
        attended = attended.made_from(bytes(qkv, batch));
    }
    operations.extend([
        Keeps { slots: vec![attended, beside], made: 0 },
        of_out.kept(None, batch),
        norm_2,
        of_up.kept(Some(d.hidden), batch),
        Keeps { slots: vec![Slot::new(bytes(inner, batch))], made: 0 },
        of_down.kept(Some(inner), batch),
    ]);
    operations
}

/// The block with this index.
fn block(part: &DecoderPart, index: usize, batch: BatchShape) -> LayerCost {
    let d = &part.decoder;
    let tensors = part.tensors();
    let matrices = || tensors.iter().filter(|tensor| tensor.shape.len() == 2);
    let frozen: usize = matrices().filter(|t| !t.trains).map(DecoderTensor::len).sum();
    let adapters: usize = groups(part).iter().map(Maps::adapter_flops).sum();
    LayerCost {
        forward_flops: d.block_flops(index, batch.samples, batch.seq)
            + (batch.tokens() * adapters) as f64,
        output_flops: 2.0 * (batch.tokens() * d.intermediate * d.hidden) as f64,
        frozen_flops: 2.0 * (batch.tokens() * frozen) as f64,
        packed_elements: matrices().map(|tensor| packed(&tensor.shape)).sum(),
        ..LayerCost::keeping(&operations(part, index, batch))
    }
}

/// The norm before the head.
fn final_norm(part: &DecoderPart, batch: BatchShape) -> LayerCost {
    LayerCost::keeping(&[norm(part, part.decoder.names().final_norm, batch)])
}

/// The head and its loss.
fn head(part: &DecoderPart, batch: BatchShape) -> LayerCost {
    let d = &part.decoder;
    let (rows, n) = (d.rows(), batch.tokens());
    let shape = [rows, d.hidden];
    let chunk = head_chunk(n, shape, batch.element_bytes, batch.on_kernels());
    let logit = logit_bytes(batch.element_bytes, batch.on_kernels());
    // The kernels leave out the rows that are no token ids.
    let columns = if batch.on_kernels() { d.vocabulary } else { rows };
    // The gradient of its input.
    let kept = hidden_bytes(d, batch);
    LayerCost {
        forward_flops: d.head_flops(n),
        frozen_flops: if any_trains(part) { 0.0 } else { d.head_flops(n) },
        activation_bytes: kept,
        activation_bytes_selective: kept,
        workspace_bytes: (chunk * columns * logit) as u64,
        packed_elements: packed(&[d.hidden, d.vocabulary]),
        gradients_in_forward: true,
        ..LayerCost::default()
    }
}
