//! Blocks of every family with selective recomputation against the same blocks without: bits, and
//! what is kept.

use std::sync::Arc;

use burn::tensor::{DType, Device, Tensor};
use zeropp_core::choice::Activation;
use zeropp_core::cpu_tensor::{from_vec, into_vec};
use zeropp_core::kernels::attention::keeps_probabilities;
use zeropp_core::layer::{BatchShape, Layer, LayerCost, LayerCx, Part, SamplePart};
use zeropp_core::meter::Meter;
use zeropp_core::model::build_tuned;
use zeropp_core::model::decoder::Decoder;
use zeropp_core::params::FlatLayout;
use zeropp_core::split::{
    Dropout, Grads, LayerWeights, Makers, Masks, OpCx, RecordedBy, Recording, WQueue,
};
use zeropp_model::presets::Preset;
use zeropp_model::tensors::TensorNames;
use zeropp_model::tuning::{Lora, Tuning};

use crate::common::{bits, each_path};
use crate::random::Random;

/// x: `[samples, tokens, hidden]`.
const DIMS: [usize; 3] = [2, 12, 32];

/// A small model like the preset called `name`.
fn like(name: &str) -> Decoder {
    let decoder = Preset::find(name).expect("a preset").decoder;
    let (heads, kv_heads) = (4, if decoder.kv_heads < decoder.heads { 2 } else { 4 });
    let intermediate = if decoder.activation == Activation::Swiglu { 112 } else { 128 };
    let sizes = Decoder { layers: 1, hidden: 32, heads, kv_heads, head_dim: 8, ..decoder };
    Decoder { intermediate, vocabulary: 64, context: 64, window: None, ..sizes }
}

fn block(decoder: Decoder, tuning: &Tuning) -> Arc<dyn Layer> {
    let is_block = |part: Part| match part {
        Part::Layer(layer) if layer.is_block() => Some(layer),
        _ => None,
    };
    build_tuned(decoder, tuning).parts.into_iter().find_map(is_block).expect("a block")
}

/// A block's F, B and W: output, dX and the gradients, and the bytes kept between them.
struct Outcome {
    values: Vec<Vec<u32>>,
    kept: [u64; 2],
}

fn outcome(
    layer: &dyn Layer,
    (dtype, by): (DType, RecordedBy),
    dropout: Option<Dropout>,
    makers: Option<Makers>,
) -> Outcome {
    let (mut rng, device, meter) = (Random(7), Device::flex(), Meter::new());
    let [trained, frozen] =
        [FlatLayout::trained, FlatLayout::frozen].map(|of| Arc::new(of(layer.parameters(), 1)));
    let mut flat = |of: &FlatLayout| {
        let values = rng.normals(of.len).into_iter().map(|x| 0.2 * x).collect();
        from_vec::<1>(values, [of.len]).cast(dtype)
    };
    let weights = LayerWeights::new(layer.name(), 0, trained.clone()).with_frozen(frozen.clone());
    weights.set_both(flat(&trained), Some(flat(&frozen)));
    let mut given = || rng.tensor::<3>(DIMS).cast(dtype);
    let (x, dy) = (given(), given());
    let recording = Recording::start(Some(x), (&device, dtype), by);
    let op = OpCx {
        queue: WQueue::default(),
        meter: meter.clone(),
        token: recording.token(),
        makers,
        vault: None,
        output_wanted: true,
        forward_grads: None,
        masks: Masks { dropout, ..Masks::default() },
        routers: None,
        slice: None,
    };
    let queue = op.queue.clone();
    let cx = LayerCx { weights: weights.clone(), op, output_wanted: true };
    let y = layer.forward(recording.input().expect("it was given"), &cx);
    drop(cx);
    let (y, recorded) = recording.finish(y);
    let kept = meter.now().activation;
    let dx = recorded.backward(dy).expect("y depends on x");
    assert_eq!(meter.now().activation, 0, "nothing that F kept is left");
    let stashed = meter.now().weight_stash;
    weights.free();
    let mut grads = Grads::new(vec![trained], &device, &Meter::new());
    queue.run(&mut grads);
    assert_eq!(meter.now().total(), 0, "nothing is kept after W");
    let of = |t: Tensor<3>| bits(&into_vec(t.cast(DType::F32).flatten(0, 2)));
    let gradients = grads.into_flat().0.into_iter().map(|flat| bits(&into_vec(flat)));
    let values = [of(y), of(dx)].into_iter().chain(gradients).collect();
    Outcome { values, kept: [kept, stashed] }
}

fn cost(layer: &dyn Layer, dtype: DType, kernels: bool, dropped: bool) -> LayerCost {
    let [samples, seq, _] = DIMS;
    let is_fp32 = dtype == DType::F32;
    let keeps_probabilities = is_fp32 && kernels && !dropped && keeps_probabilities(seq);
    layer.cost(BatchShape {
        samples,
        seq,
        element_bytes: dtype.size(),
        keeps_probabilities,
        kernels,
        part: SamplePart::Whole,
    })
}

#[test]
fn blocks_that_make_again_what_is_cheap_have_the_same_bits_and_keep_less() {
    let lora = |targets: &str, names: &TensorNames| Tuning {
        lora: Some(Lora::new(4, 8.0, Some(targets), names).unwrap()),
        ..Tuning::default()
    };
    let drop = Dropout { p: 0.2, seed: 3, step: 2, sample: 5 };
    for name in ["gpt2", "llama3-8b", "qwen2.5-0.5b", "qwen3-0.6b"] {
        let decoder = like(name);
        let names = decoder.names();
        let tunings = [Tuning::default(), lora("all", names), lora(names.down, names)];
        for (i, tuning) in tunings.iter().enumerate() {
            let layer = block(decoder, tuning);
            let with = |dropout: Option<Dropout>, dtype, by, generic: bool| {
                let what = format!("{name}, tuning {i}, {dtype:?} {by:?} {generic} {dropout:?}");
                let run = |makers| outcome(&*layer, (dtype, by), dropout, makers);
                let (none, selective) = (run(None), run(Some(Makers::default())));
                assert!(none.values == selective.values, "{what}: other bits");
                let cost = cost(&*layer, dtype, !generic, dropout.is_some());
                let wanted = [cost.activation_bytes, cost.stash_bytes];
                assert_eq!(none.kept, wanted, "{what}: all is kept");
                let wanted = [cost.activation_bytes_selective, cost.stash_bytes];
                assert_eq!(selective.kept, wanted, "{what}");
                let saved = none.kept[0] - selective.kept[0];
                // Of a block that trains as a whole.
                assert!(i > 0 || 10 * saved >= 3 * none.kept[0], "{what}: {saved} saved");
            };
            each_path(|generic| {
                for dtype in [DType::F32, DType::BF16] {
                    with(None, dtype, RecordedBy::Tape, generic);
                }
                with(Some(drop), DType::F32, RecordedBy::Tape, generic);
                with(None, DType::F32, RecordedBy::Burn, generic);
            });
        }
    }
}
