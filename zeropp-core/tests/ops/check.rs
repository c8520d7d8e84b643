//! Faults that `check::layer` finds in a layer of one's own, and that it finds none where all is
//! right.

use burn::tensor::Tensor;
use zeropp_core::check;
use zeropp_core::layer::{BatchShape, Layer, LayerCost, LayerCx};
use zeropp_core::params::{Init, ParamSpec};
use zeropp_core::split::{custom_vjp, ops};

/// x · w, with a backward of its own that may be wrong by these factors, and a cost that may lack
/// something.
struct Scaled {
    b: f32,
    w: f32,
    forgets: u64,
}

const RIGHT: Scaled = Scaled { b: 1.0, w: 1.0, forgets: 0 };

impl Layer for Scaled {
    fn name(&self) -> &str {
        "scaled"
    }
    fn parameters(&self) -> Vec<ParamSpec> {
        let frozen = ParamSpec::new("scaled.shift", &[16], Init::Zeros).frozen();
        vec![frozen, ParamSpec::new("scaled.weight", &[16], Init::Ones)]
    }
    fn forward(&self, x: Tensor<3>, cx: &LayerCx) -> Tensor<3> {
        let (weight, op) = (cx.weight::<1>("weight"), cx.op.clone());
        let shift = cx.weight::<1>("shift").get().unsqueeze::<3>();
        let (b, w) = (self.b, self.w);
        let plain = x.clone().inner();
        let y = plain.clone() * weight.get().unsqueeze::<3>() + shift;
        let kept = op.save(plain);
        custom_vjp(x, y, move |dy: Tensor<3>| {
            let dx = dy.clone() * weight.get().unsqueeze::<3>() * b;
            let x = op.stash(kept.take());
            let dy = op.stash(dy);
            let slot = weight.slot();
            op.queue.push(move |grads| {
                let all = (x.take() * dy.take() * w).sum_dim(0).sum_dim(1);
                grads.add(slot, all.reshape([16]));
            });
            dx
        })
    }
    fn is_split(&self) -> bool {
        true
    }
    fn cost(&self, batch: BatchShape) -> LayerCost {
        let x = (batch.tokens() * 16 * batch.element_bytes) as u64;
        LayerCost {
            activation_bytes: x - self.forgets,
            activation_bytes_selective: x,
            stash_bytes: 2 * x,
            ..LayerCost::default()
        }
    }
}

fn found(layer: &dyn Layer) -> Vec<String> {
    let stock = |x: Tensor<3>, w: &check::StockWeights| {
        x * w.get::<1>("weight").unsqueeze() + w.get::<1>("shift").unsqueeze()
    };
    check::layer(layer, [2, 4, 16], stock).err().map_or(Vec::new(), |found| found.0)
}

#[test]
fn a_wrong_b_a_wrong_w_and_a_wrong_cost_are_found_each_by_itself() {
    assert_eq!(found(&RIGHT), [""; 0]);
    let b = found(&Scaled { b: 1.01, ..RIGHT });
    assert!(b.len() == 1 && b[0].starts_with("the gradient of x (B) is off by"), "{b:?}");
    let w = found(&Scaled { w: 0.99, ..RIGHT });
    let begins = "the gradient of scaled.weight (W) is off by";
    assert!(w.len() == 1 && w[0].starts_with(begins), "{w:?}");
    let cost = found(&Scaled { forgets: 512, ..RIGHT });
    assert_eq!(cost, ["its cost says activation_bytes = 0, and 512 bytes are kept from F to B"]);
}

#[test]
fn a_forward_of_split_operations_has_the_gradients_of_the_stock_one() {
    struct Gated;
    impl Layer for Gated {
        fn name(&self) -> &str {
            "gated"
        }
        fn parameters(&self) -> Vec<ParamSpec> {
            let p = |name: &str, shape: &[usize]| {
                ParamSpec::new(format!("gated.{name}"), shape, Init::Normal(0.02))
            };
            vec![p("gate", &[16, 24]), p("up", &[16, 24]), p("down", &[24, 16])]
        }
        fn forward(&self, x: Tensor<3>, cx: &LayerCx) -> Tensor<3> {
            let of = |x: Tensor<3>, name: &str| ops::linear(x, &cx.weight(name), None, &cx.op);
            let inner = ops::swiglu(of(x.clone(), "gate"), of(x.clone(), "up"), &cx.op);
            ops::add(x, of(inner, "down"))
        }
        fn is_split(&self) -> bool {
            true
        }
        fn cost(&self, batch: BatchShape) -> LayerCost {
            let n = (batch.tokens() * batch.element_bytes) as u64;
            let kept = n * (2 * 16 + 3 * 24);
            LayerCost { activation_bytes: kept, stash_bytes: kept + n * 16, ..LayerCost::default() }
        }
    }
    let stock = |x: Tensor<3>, w: &check::StockWeights| {
        let of = |x: Tensor<3>, name: &str| x.matmul(w.get::<2>(name).unsqueeze());
        let inner = burn::tensor::activation::silu(of(x.clone(), "gate")) * of(x.clone(), "up");
        x + of(inner, "down")
    };
    let found = check::layer(&Gated, [2, 4, 16], stock).err().map_or(Vec::new(), |found| found.0);
    assert!(found.iter().all(|line| line.starts_with("its cost says")), "{found:?}");
}
