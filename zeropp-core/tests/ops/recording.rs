//! A forward on a tape of its own against the same in Burn's graph.

use burn::tensor::{DType, Device, Tensor};
use proptest::prelude::*;
use zeropp_core::cpu_tensor;
use zeropp_core::meter::{MemoryBytes, Meter};
use zeropp_core::split::{Grads, OpCx, RecordedBy, Recording, WQueue, begin_layer, ops};

use crate::cases::cases;
use crate::common::*;
use crate::whole::{block, block_params};

type Forward<'a> = dyn Fn(Tensor<3>, &OpCx) -> Tensor<3> + Sync + 'a;

/// The results and kept bytes of a recorded forward and its backward, bit for bit.
#[derive(Debug, PartialEq)]
struct Traces {
    y: Vec<u32>,
    dx: Vec<u32>,
    dw: Vec<u32>,
    after_f: MemoryBytes,
    after_b: MemoryBytes,
}

fn recorded(
    by: RecordedBy,
    p: &Params,
    x: &Tensor<3>,
    dy: &Tensor<3>,
    forward: impl Fn(Tensor<3>, &OpCx) -> Tensor<3>,
) -> Traces {
    let meter = Meter::new();
    let recording = Recording::start(Some(x.clone()), (&Device::flex(), DType::F32), by);
    let mut cx = context(&meter, false, false);
    cx.token = recording.token();
    let y = forward(recording.input().expect("given above"), &cx);
    let (y, way_back) = recording.finish(y);
    let after_f = meter.now();
    let dx = way_back.backward(dy.clone()).expect("y depends on x");
    let after_b = meter.now();
    let mut grads = Grads::new(vec![p.layout.clone()], &Device::flex(), &meter);
    cx.queue.run(&mut grads);
    let dw = bits(&cpu_tensor::into_vec(grads.into_flat().0.remove(0)));
    assert_eq!(meter.now().total(), 0, "nothing is kept after W");
    Traces { y: bits(&values(&y)), dx: bits(&values(&dx)), dw, after_f, after_b }
}

proptest! {
    #![proptest_config(cases(12))]

    #[test]
    fn a_tape_gives_the_bits_of_burns_graph(seed: u64, s in 1..40usize, layers in 1..4usize) {
        let mut rng = Random(seed);
        let p = block_params(&mut rng, 24);
        let (x, dy) = (rng.tensor([2, s, 24]), rng.tensor([2, s, 24]));
        let forward = |x: Tensor<3>, cx: &OpCx| {
            (0..layers).fold(x, |x, _| block(x, &p.weights, cx))
        };
        let [tape, burn] = [RecordedBy::Tape, RecordedBy::Burn]
            .map(|by| recorded(by, &p, &x, &dy, forward));
        prop_assert_eq!(tape, burn);
    }
}

/// The walk back says when it has come past a layer, whose W may run then: to the same bits, and
/// with one layer's stash at a time.
#[test]
fn each_layer_s_w_may_follow_its_b() {
    let mut rng = Random(5);
    let p = block_params(&mut rng, 24);
    let (x, dy) = (rng.tensor([2, 7, 24]), rng.tensor([2, 7, 24]));
    let layers = |x: Tensor<3>, cx: &OpCx| {
        (0..3).fold(x, |x, layer| {
            begin_layer();
            let cx = OpCx { queue: cx.queue.of_layer(layer), ..cx.clone() };
            block(x, &p.weights, &cx)
        })
    };
    let whole = recorded(RecordedBy::Tape, &p, &x, &dy, layers);
    let meter = Meter::new();
    let on = (&Device::flex(), DType::F32);
    let recording = Recording::start(Some(x), on, RecordedBy::Tape);
    let cx = OpCx { token: recording.token(), ..context(&meter, false, false) };
    let y = layers(recording.input().expect("given above"), &cx);
    let (_, way_back) = recording.finish(y);
    let mut grads = Grads::new(vec![p.layout.clone()], &Device::flex(), &Meter::new());
    let (mut seen, mut left, mut most) = (Vec::new(), vec![meter.now().activation], 0);
    let dx = way_back.backward_by_layer(dy, &mut |layer| {
        most = most.max(meter.now().weight_stash);
        cx.queue.run_layer(layer, &mut grads);
        assert_eq!((cx.queue.len(), meter.now().weight_stash), (0, 0));
        seen.push(layer);
        left.push(meter.now().activation);
    });
    assert_eq!(seen, [2, 1, 0]);
    assert!(left.is_sorted_by(|a, b| a > b) && left[3] == 0, "{left:?}");
    assert_eq!(3 * most, whole.after_b.weight_stash);
    assert_eq!(bits(&values(&dx.expect("y depends on x"))), whole.dx);
    assert_eq!(bits(&cpu_tensor::into_vec(grads.into_flat().0.remove(0))), whole.dw);
}

proptest! {
    #![proptest_config(cases(12))]

    /// A forward that is done again for its backward alone leaves its last product out.
    #[test]
    fn an_output_that_is_not_wanted_changes_no_gradient(seed: u64, s in 1..40usize, half: bool) {
        let mut rng = Random(seed);
        let p = block_params(&mut rng, 24);
        let (x, dy) = (rng.tensor([2, s, 24]), rng.tensor([2, s, 24]));
        let by = if half { RecordedBy::Burn } else { RecordedBy::Tape };
        let run = |output_wanted| recorded(by, &p, &x, &dy, |x, cx| {
            let last = OpCx { output_wanted, ..cx.clone() };
            let map = |x, name: &str, cx| {
                let of = |end| format!("{name}.{end}");
                ops::linear(x, &p.weights.weight(&of("w")), Some(&p.weights.weight(&of("b"))), cx)
            };
            let inner = ops::gelu(map(x.clone(), "fc", cx), cx);
            ops::add_last(x, map(inner, "out", &last), &last)
        });
        let (wanted, not) = (run(true), run(false));
        prop_assert!(wanted.y != not.y && not.y.iter().all(|y| *y == 0));
        prop_assert_eq!(Traces { y: Vec::new(), ..wanted }, Traces { y: Vec::new(), ..not });
    }
}

/// Gradients that stock operations would lose are an error.
#[test]
fn other_operations_on_a_tape_are_an_error() {
    let mut rng = Random(3);
    let p = block_params(&mut rng, 24);
    let (x, dy) = (rng.tensor([1, 4, 24]), rng.tensor([1, 4, 24]));
    let before = |x: Tensor<3>, cx: &OpCx| block(x * 2.0, &p.weights, cx);
    let after = |x: Tensor<3>, cx: &OpCx| block(x, &p.weights, cx) * 2.0;
    let beside = |x: Tensor<3>, cx: &OpCx| x.clone() + block(x, &p.weights, cx);
    let fresh = |x: Tensor<3>, cx: &OpCx| block(x.inner(), &p.weights, cx);
    let cases: [&Forward; 4] = [&before, &after, &beside, &fresh];
    for forward in cases {
        recorded(RecordedBy::Burn, &p, &x, &dy, |x, cx| block(x, &p.weights, cx));
        let (p, x, dy) = (&p, &x, &dy);
        let ended = std::thread::scope(|scope| {
            scope.spawn(move || recorded(RecordedBy::Tape, p, x, dy, forward)).join()
        });
        let payload = ended.expect_err("a gradient would be lost");
        let message = payload.downcast_ref::<String>().map(String::as_str);
        let message = message.or(payload.downcast_ref::<&str>().copied()).expect("a message");
        assert!(message.contains("`is_split`"), "{message}");
    }
}

/// A forward that is given up does not have later ones recorded.
#[test]
fn a_recording_that_is_given_up_ends() {
    let on = (&Device::flex(), DType::F32);
    let x = Random(4).tensor([1, 4, 8]);
    drop(Recording::start(Some(x.clone()), on, RecordedBy::Tape));
    let meter = Meter::new();
    let cx = OpCx { queue: WQueue::default(), ..context(&meter, false, false) };
    ops::gelu(x, &cx);
    assert_eq!(meter.peak().total(), 0, "a forward without gradients keeps nothing");
}
