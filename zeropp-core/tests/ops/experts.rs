//! Routing and experts against the same in Burn's operations, with what they keep.

use burn::tensor::{DType, Device, Tensor, TensorData, activation};
use zeropp_core::check;
use zeropp_core::kernels::routing::ChosenExperts;
use zeropp_core::layer::{BatchShape, Layer, LayerCost, LayerCx};
use zeropp_core::params::{Init, ParamSpec};
use zeropp_core::split::ops::{self, Router, Routing, Score};

use crate::common::both_paths;

/// Samples, tokens in each, hidden size, inner size of an expert.
const SIZES: [usize; 4] = [2, 24, 16, 24];

/// A router and its experts; of these weights the ones named do not train.
struct Experts {
    routing: Routing,
    frozen: &'static [&'static str],
}

impl Experts {
    fn trains(&self, name: &str) -> u64 {
        u64::from(!self.frozen.contains(&name))
    }
}

impl Layer for Experts {
    fn name(&self) -> &str {
        "experts"
    }
    fn parameters(&self) -> Vec<ParamSpec> {
        let ([_, _, h, f], all) = (SIZES, self.routing.experts);
        let shapes: [(&str, &[usize]); 4] = [
            ("router", &[h, all]),
            ("gate", &[all, h, f]),
            ("up", &[all, h, f]),
            ("down", &[all, f, h]),
        ];
        let spec = |(name, shape): (&str, &[usize])| ParamSpec {
            trains: self.trains(name) == 1,
            ..ParamSpec::new(format!("experts.{name}"), shape, Init::Normal(0.1))
        };
        shapes.map(spec).into()
    }
    fn forward(&self, x: Tensor<3>, cx: &LayerCx) -> Tensor<3> {
        let router = Router { weight: cx.weight("router"), bias: None };
        let (w, routed) = ops::route(x.clone(), &router, self.routing, &cx.op);
        let maps = ["gate", "up", "down"].map(|name| cx.weight(name));
        ops::experts(x, w, &routed, maps.each_ref(), &cx.op)
    }
    fn is_split(&self) -> bool {
        true
    }
    fn cost(&self, batch: BatchShape) -> LayerCost {
        let ([_, _, h, f], n) = (SIZES, batch.tokens());
        let Routing { experts, chosen, .. } = self.routing;
        let [router, gate, up, down] =
            ["router", "gate", "up", "down"].map(|name| self.trains(name));
        let bytes = |elements: usize| 4 * elements as u64;
        let x = (router | gate | up) * bytes(n * h);
        let scores = bytes(n * (experts + 1));
        let choice = ChosenExperts::bytes_of(n, [experts, chosen]) as u64;
        let kept = x + bytes(2 * n * chosen * f + n * chosen) + scores + choice;
        LayerCost {
            activation_bytes: kept,
            activation_bytes_selective: kept,
            stash_bytes: x
                + (gate + up + down) * bytes(n * chosen * f)
                + down * bytes(n * h)
                + (gate | up | down) * choice
                + router * bytes(n * experts),
            ..LayerCost::default()
        }
    }
}

/// 1 for the k largest scores of each row, else 0.
fn chosen(scores: &Tensor<2>, k: usize) -> Tensor<2> {
    let [n, experts] = scores.dims();
    let values = scores.clone().inner().into_data().try_to_vec::<f64>().unwrap();
    let mut mask = vec![0.0; n * experts];
    for (row, mask) in values.chunks(experts).zip(mask.chunks_mut(experts)) {
        let mut order: Vec<usize> = (0..experts).collect();
        order.sort_by(|a, b| row[*b].total_cmp(&row[*a]));
        order[..k].iter().for_each(|expert| mask[*expert] = 1.0);
    }
    let data = TensorData::new(mask, [n, experts]);
    Tensor::<2>::from_data(data, (&Device::flex(), DType::F64)).autodiff()
}

fn check(layer: &Experts) {
    let [b, s, h, f] = SIZES;
    let Routing { experts, chosen: k, divided, score } = layer.routing;
    let stock = |x: Tensor<3>, weights: &check::StockWeights| {
        let x = x.reshape([b * s, h]);
        let logits = x.clone().matmul(weights.get::<2>("router"));
        let (scores, scale) = match score {
            Score::Softmax => (activation::softmax(logits, 1), 1.0),
            Score::Sigmoid { scale, .. } => (activation::sigmoid(logits), f64::from(scale)),
        };
        let mut w = scores.clone() * chosen(&scores, k);
        if divided {
            w = w.clone() / w.sum_dim(1);
        }
        let w = w * scale;
        let of = |expert: usize| {
            let map = |name: &str, sizes| {
                weights.get::<3>(name).narrow(0, expert, 1).reshape::<2, _>(sizes)
            };
            let gate = activation::silu(x.clone().matmul(map("gate", [h, f])));
            let inner = gate * x.clone().matmul(map("up", [h, f]));
            w.clone().narrow(1, expert, 1) * inner.matmul(map("down", [f, h]))
        };
        let all = (0..experts).map(of).reduce(|sum, more| sum + more).expect("experts");
        all.reshape([b, s, h])
    };
    check::layer(layer, [b, s, h], stock).unwrap();
}

#[test]
fn experts_agree_with_the_stock_graph_and_keep_what_is_said() {
    for (experts, chosen, divided) in [(6, 2, true), (6, 3, false), (3, 3, true), (4, 1, false)] {
        let sigmoid = Score::Sigmoid { groups: 1, groups_chosen: 1, scale: 1.5 };
        for score in [Score::Softmax, sigmoid] {
            check(&Experts { routing: Routing { experts, chosen, divided, score }, frozen: &[] });
        }
    }
}

#[test]
fn nothing_is_kept_for_experts_that_do_not_train() {
    let routing = Routing { experts: 5, chosen: 2, divided: true, score: Score::Softmax };
    let cases: [&[&str]; 5] = [
        &["router"],
        &["gate", "up", "down"],
        &["router", "gate"],
        &["down"],
        &["router", "gate", "up"],
    ];
    for frozen in cases {
        check(&Experts { routing, frozen });
    }
}

/// A sum of rows and of what a gate of each scales.
struct Gated;

impl Layer for Gated {
    fn name(&self) -> &str {
        "gated"
    }
    fn parameters(&self) -> Vec<ParamSpec> {
        let [_, _, h, _] = SIZES;
        vec![ParamSpec::new("gated.gate", &[h, 1], Init::Normal(0.5))]
    }
    fn forward(&self, x: Tensor<3>, cx: &LayerCx) -> Tensor<3> {
        let z = ops::linear(x.clone(), &cx.weight("gate"), None, &cx.op);
        ops::add(x.clone(), ops::gated(x, z, &cx.op))
    }
    fn is_split(&self) -> bool {
        true
    }
    fn cost(&self, batch: BatchShape) -> LayerCost {
        let ([_, _, h, _], n) = (SIZES, batch.tokens());
        let bytes = |elements: usize| 4 * elements as u64;
        let kept = bytes(n * h + n);
        LayerCost {
            activation_bytes: kept,
            activation_bytes_selective: kept,
            stash_bytes: kept,
            ..LayerCost::default()
        }
    }
}

#[test]
fn gated_rows_agree_with_the_stock_graph_and_keep_what_is_said() {
    let [b, s, h, _] = SIZES;
    let stock = |x: Tensor<3>, weights: &check::StockWeights| {
        let rows = x.reshape([b * s, h]);
        let gates = activation::sigmoid(rows.clone().matmul(weights.get::<2>("gate")));
        (rows.clone() + rows * gates).reshape([b, s, h])
    };
    both_paths(|| check::layer(&Gated, [b, s, h], stock).unwrap());
}
