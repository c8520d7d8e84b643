//! The cost of a decoder's parts for a micro-batch: FLOP, and bytes as the meter will count them.

use crate::decoder::{Decoder, Moe, Norm, SharedExpert};
use crate::head::{head_chunk, workspace_bytes};
use crate::layer::{BatchShape, LayerCost, SamplePart};
use crate::parts::{DecoderPart, PartKind};
use crate::slots::{Keeps, Slot};
use crate::tensors::{
    CHOICE_BIAS, DecoderTensor, EXPERTS, QK_NORMS, ROUTER, SHARED_GATE, shared_maps,
};
use crate::tuning::LORA;

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
        made: vectors(trained.count() * part.decoder.hidden, batch),
    }
}

/// Bytes of so many elements of gradients that are vectors, as B makes them for W.
fn vectors(elements: usize, batch: BatchShape) -> u64 {
    if batch.part.hands_on() { 0 } else { 4 * elements as u64 }
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
    let (count, matrix) = shape.split_at(shape.len().saturating_sub(2));
    let elements: u64 = matrix.iter().map(|n| n.next_multiple_of(32) as u64).product();
    elements * count.iter().product::<usize>() as u64
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
        let input = Slot::new(bytes(self.input, batch)).for_w();
        let input = match inputs {
            Some(inputs) => input.made_from(bytes(inputs, batch)),
            None => input,
        };
        let adapted = self.maps.iter().filter_map(|map| map.rank);
        let adapted = adapted.map(|rank| Slot::new(bytes(rank, batch)).for_w());
        let slots = self.needs_input().then_some(input).into_iter().chain(adapted).collect();
        Keeps { slots, made: self.made(batch) }
    }

    /// Whether W needs the input.
    fn needs_input(&self) -> bool {
        self.maps.iter().any(|map| map.weight || map.rank.is_some())
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
            false if map.bias => vectors(map.output, batch),
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

/// The linear maps of a block by their inputs: q, k and v, and what follows attention.
fn attention_maps(part: &DecoderPart) -> [Maps; 2] {
    let (d, names) = (&part.decoder, part.decoder.names());
    [
        Maps::of(part, names.qkv, d.hidden, true),
        Maps::of(part, &[names.out], d.query_width(), false),
    ]
}

/// What stands between the second norm of a block and its end: an MLP, or experts.
struct Inner {
    /// What its operations keep, in the order of their forwards.
    operations: Vec<Keeps>,
    /// Floating-point operations of adapters on a token.
    adapters: usize,
    /// Elements of a token's values between the maps into it and out of it.
    width: usize,
    /// Elements of its matrices that a token is not multiplied with.
    idle: usize,
}

fn mlp(part: &DecoderPart, batch: BatchShape) -> Inner {
    let (d, names) = (&part.decoder, part.decoder.names());
    let up = Maps::of(part, names.up, d.hidden, false);
    let kept = up.kept(Some(d.hidden), batch);
    mlp_of(part, &up, kept, names.down, d.intermediate, batch)
}

/// An MLP of inner size `f`, with the maps into it and what they keep.
fn mlp_of(
    part: &DecoderPart,
    up: &Maps,
    kept: Keeps,
    down: &'static str,
    f: usize,
    batch: BatchShape,
) -> Inner {
    let down = Maps::of(part, &[down], f, false);
    // The products before the activation.
    let before = (part.decoder.mlp_maps() - 1) * f;
    Inner {
        operations: vec![
            kept,
            Keeps { slots: vec![Slot::new(bytes(before, batch))], made: 0 },
            down.kept(Some(before), batch),
        ],
        adapters: up.adapter_flops() + down.adapter_flops(),
        width: f,
        idle: 0,
    }
}

/// Routing, experts and what stands beside them: what is kept is of the rows n·k, however they
/// spread over the experts.
fn experts(part: &DecoderPart, moe: Moe, batch: BatchShape) -> Inner {
    let (h, n) = (part.decoder.hidden, batch.tokens());
    let Moe { experts, chosen, inner, .. } = moe;
    let trains_of = |name: &str| trains(part, &format!("{name}.weight"));
    let (router, [gate, up, down]) = (trains_of(ROUTER), EXPERTS.map(trains_of));
    let (inputs, any) = (router || gate || up, gate || up || down);
    let rows = |width: usize| bytes(chosen * width, batch);
    // Indices of experts, rows and places, and where the rows of an expert begin; weights, scores
    // and a number of each token.
    let choice = 4 * (3 * n * chosen + experts + 1) as u64;
    let weights = 4 * (n * chosen) as u64;
    let scores = 4 * (n * (experts + 1)) as u64;
    let mut beside = moe.shared.map(|shared| shared_expert(part, shared, batch));
    let keeps = |what: fn(&Beside) -> bool| beside.as_ref().is_some_and(what);
    let made = u64::from(gate) * rows(inner)
        + u64::from(up) * rows(inner)
        + u64::from(down) * rows(inner)
        + u64::from(down && !keeps(|of| of.output)) * bytes(h, batch)
        + u64::from(any) * choice;
    let excess = if trains(part, CHOICE_BIAS) { 4 * experts as u64 } else { 0 };
    let dlogits = u64::from(router) * bytes(experts, batch) + excess;
    // Of all that keep x, the last one keeps it, whose B comes first.
    let x = Slot::new(bytes(h, batch)).for_w();
    let x = (inputs && !keeps(|of| of.input)).then_some(x);
    // Each gives back what W does not need after it has made what W needs.
    let operation =
        |slots: Vec<Slot>, made| [Keeps { slots, made: 0 }, Keeps { slots: vec![], made }];
    let [mut routed, routes] = operation(vec![Slot::new(choice + weights + scores)], dlogits);
    let [kept, makes] = operation(vec![Slot::new(rows(2 * inner))], made);
    routed.slots.extend(x);
    let mut operations = vec![routed, routes, kept, makes];
    let mut width = chosen * inner;
    let mut adapters = 0;
    if let Some(Beside { inner, .. }) = beside.take() {
        operations.extend(inner.operations);
        (width, adapters) = (width + inner.width, inner.adapters);
    }
    Inner { operations, adapters, width, idle: 3 * (experts - chosen) * h * inner }
}

/// A shared expert beside the others, and whether it keeps for W their input and the gradient of
/// their output, too.
struct Beside {
    inner: Inner,
    input: bool,
    output: bool,
}

fn shared_expert(part: &DecoderPart, shared: SharedExpert, batch: BatchShape) -> Beside {
    let h = part.decoder.hidden;
    let [gate, up, down] = *shared_maps(shared.gated);
    let up = Maps::of(part, &[gate, up], h, false);
    // Of experts the input is kept as it is.
    let mut inner = mlp_of(part, &up, up.kept(None, batch), down, shared.inner, batch);
    let mut input = up.needs_input();
    if shared.gated {
        let mut scores = Maps::of(part, &[SHARED_GATE], h, false).kept(None, batch);
        if input {
            scores.slots.clear();
        }
        input |= !scores.slots.is_empty();
        // What it scales, and the gates.
        let gates = vec![Slot::new(bytes(h, batch)), Slot::new(bytes(1, batch))];
        inner.operations.insert(0, scores);
        inner.operations.push(Keeps { slots: gates, made: 0 });
        // Its product is wanted, whatever becomes of the layer's output.
        inner.width = 0;
    }
    // A gate scales the gradient.
    let output = !shared.gated && trains(part, &format!("{down}.weight"));
    Beside { inner, input, output }
}

/// What a block's operations keep, in the order of their forwards.
fn operations(
    part: &DecoderPart,
    index: usize,
    [of_qkv, of_out]: &[Maps; 2],
    inner: Vec<Keeps>,
    batch: BatchShape,
) -> Vec<Keeps> {
    let (d, names) = (&part.decoder, part.decoder.names());
    let [norm_1, norm_2] = [names.norm_1, names.norm_2].map(|name| norm(part, name, batch));
    let qkv = d.qkv_width();
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
        let made = vectors(trained.count() * d.head_dim, batch);
        operations.push(Keeps { slots: vec![attended, heads], made });
        // Of a slice others need the keys and values before B.
        if batch.part == SamplePart::Whole {
            attended = attended.made_from(bytes(qkv, batch));
        }
    }
    operations.push(Keeps { slots: vec![attended, beside], made: 0 });
    operations.extend([of_out.kept(None, batch), norm_2]);
    operations.extend(inner);
    operations
}

/// The block with this index.
fn block(part: &DecoderPart, index: usize, batch: BatchShape) -> LayerCost {
    let d = &part.decoder;
    let (maps, tensors) = (attention_maps(part), part.tensors());
    let inner = match d.moe_of(index) {
        Some(moe) => experts(part, moe, batch),
        None => mlp(part, batch),
    };
    let adapters = maps.iter().map(Maps::adapter_flops).sum::<usize>() + inner.adapters;
    let matrices = || tensors.iter().filter(|tensor| tensor.shape.len() > 1);
    let packed_of = |tensor: &DecoderTensor| packed(&tensor.shape);
    let last = [d.names().down, EXPERTS[2], shared_maps(false)[2]];
    let is_last = |tensor: &&DecoderTensor| {
        let name = &tensor.name;
        last.iter().any(|map| name.contains(map)) && !name.contains(LORA[0])
    };
    LayerCost {
        forward_flops: d.block_flops(index, batch.samples, batch.seq)
            + (batch.tokens() * adapters) as f64,
        output_flops: 2.0 * (batch.tokens() * inner.width * d.hidden) as f64,
        frozen_flops: 2.0 * batch.tokens() as f64 * frozen_weights(&tensors, d.moe_of(index)),
        packed_elements: matrices().map(packed_of).sum(),
        packed_output_elements: matrices().filter(is_last).map(packed_of).sum(),
        idle_elements: inner.idle as u64,
        context_bytes: match batch.part.is_followed() {
            true => bytes(2 * d.kv_heads * d.head_dim, batch),
            false => 0,
        },
        ..LayerCost::keeping(&operations(part, index, &maps, inner.operations, batch))
    }
}

/// Elements of the matrices that a token is multiplied with and that do not train.
fn frozen_weights(tensors: &[DecoderTensor], moe: Option<Moe>) -> f64 {
    let frozen = tensors.iter().filter(|tensor| !tensor.trains);
    let elements = frozen.filter_map(|tensor| match (tensor.shape.as_slice(), moe) {
        ([_, input, output], Some(moe)) => Some(moe.chosen * input * output),
        ([_, _], _) => Some(tensor.len()),
        _ => None,
    });
    elements.sum::<usize>() as f64
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
    let workspace = match batch.on_kernels() {
        // They leave out the rows that are no token ids.
        true => workspace_bytes(chunk, d.vocabulary, d.hidden, batch.element_bytes),
        false => chunk * rows * batch.element_bytes,
    };
    // The gradient of its input.
    let kept = hidden_bytes(d, batch);
    LayerCost {
        forward_flops: d.head_flops(n),
        frozen_flops: if any_trains(part) { 0.0 } else { d.head_flops(n) },
        activation_bytes: kept,
        activation_bytes_selective: kept,
        workspace_bytes: workspace as u64,
        packed_elements: packed(&[d.hidden, d.vocabulary]),
        gradients_in_forward: true,
        ..LayerCost::default()
    }
}
