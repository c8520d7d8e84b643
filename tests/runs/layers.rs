//! What a run says of each layer: against a graph of one device, the same in every layout, and for
//! nothing where it is not asked for.

use std::collections::BTreeMap;

use crate::common::{Run, assert_same_bits, run, tiny};
use crate::oracle::{first_batch, oracle};
use zeropp::config::{Precision, Recompute};
use zeropp::{Config, LayerMetrics};

fn small() -> Config {
    let base = Config { layers: 4, hidden: 32, heads: 4, seq: 16, micro_batch_size: 2, ..tiny() };
    Config { steps: 1, log_layers: 1, warmup: Some(0), ..base }
}

/// The layer that a parameter belongs to.
fn layer_of(parameter: &str) -> String {
    let words: Vec<&str> = parameter.split('.').collect();
    words[..if words[0] == "h" { 2 } else { 1 }].join(".")
}

fn squares<'a>(values: impl IntoIterator<Item = &'a f32>) -> f64 {
    values.into_iter().map(|x| f64::from(*x).powi(2)).sum()
}

/// Norms by layer of what `of` makes of each parameter.
fn norms(of: impl Iterator<Item = (String, f64)>) -> BTreeMap<String, f64> {
    let mut sums = BTreeMap::<String, f64>::new();
    of.for_each(|(name, squares)| *sums.entry(layer_of(&name)).or_default() += squares);
    sums.into_iter().map(|(layer, squares)| (layer, squares.sqrt())).collect()
}

/// The first step's rows, against gradients, outputs and initial weights of one graph.
fn check(config: Config) {
    let (_, gradients) = oracle(&config);
    let (_, leaves, outputs) = first_batch(&config);
    let one = leaves.one.iter().map(|(name, t)| (name.clone(), t.to_data()));
    let two = leaves.two.iter().map(|(name, t)| (name.clone(), t.to_data()));
    let before: BTreeMap<String, Vec<f32>> =
        one.chain(two).map(|(name, data)| (name, data.try_to_vec().unwrap())).collect();
    let run = run(config.clone());
    let changed = |(name, before): (&String, &Vec<f32>)| {
        let changes = before.iter().zip(&run.weights[name]).map(|(a, b)| b - a);
        (name.clone(), squares(&changes.collect::<Vec<f32>>()))
    };
    let change = norms(before.iter().map(changed));
    let weight = norms(before.iter().map(|(name, w)| (name.clone(), squares(w))));
    let gradient = norms(gradients.iter().map(|(name, g)| (name.clone(), squares(g))));

    let layers = &run.steps[0].layers;
    let names: Vec<&str> = layers.iter().map(|layer| layer.name.as_str()).collect();
    let head = (!config.tied).then_some("lm_head");
    let expected = ["wte", "wpe", "h.0", "h.1", "h.2", "h.3", "ln_f"];
    assert_eq!(names, expected.into_iter().chain(head).collect::<Vec<_>>());
    let near = |what: &str, a: Option<f64>, b: f64| {
        let a = a.unwrap_or_else(|| panic!("{what} is there"));
        assert!((a - b).abs() <= 3e-6 * b, "{what}: {a} against {b}");
    };
    for LayerMetrics { name, grad_norm, update_ratio, activation_rms } in layers {
        near(&format!("norm of {name}"), *grad_norm, gradient[name]);
        near(&format!("change of {name}"), *update_ratio, change[name] / weight[name]);
        match outputs.get(name) {
            Some(y) => {
                let y = y.to_data().try_to_vec::<f32>().unwrap();
                let rms = (squares(&y) / y.len() as f64).sqrt();
                near(&format!("scale of {name}"), *activation_rms, rms);
            }
            None => assert_eq!((name.as_str(), *activation_rms), ("lm_head", None)),
        }
    }
    let all: f64 = layers.iter().map(|layer| layer.grad_norm.unwrap().powi(2)).sum();
    near("norm of all", Some(all.sqrt()), run.steps[0].grad_norm);
}

#[test]
fn layers_are_those_of_one_graph() {
    check(small());
    check(Config { tied: true, ..small() });
    check(Config { pp: 2, virtual_stages: Some(2), zero3: 3, tied: true, ..small() });
    let head_split = Some("1,3".into());
    check(Config { pp: 2, zero3: 2, tied: true, vocab: Some(500), head_split, ..small() });
    check(Config { pp: 2, dp: 2, zero3: 2, zero1: true, recompute: Recompute::Full, ..small() });
}

fn rows(run: &Run) -> Vec<Vec<LayerMetrics>> {
    run.steps.iter().map(|step| step.layers.clone()).collect()
}

fn scales(run: &Run) -> Vec<Option<f64>> {
    run.steps[0].layers.iter().map(|layer| layer.activation_rms).collect()
}

#[test]
fn no_layout_changes_what_is_said_of_a_layer() {
    let base = Config { layers: 8, steps: 4, log_layers: 1, ..tiny() };
    let tied = Config { tied: true, ..base.clone() };
    let bf16 = Config { precision: Precision::Bf16, ..base.clone() };
    for base in [base, tied, bf16] {
        let reference = run(base.clone());
        assert!(reference.steps.iter().all(|step| step.layers.len() >= 11));
        let full = Recompute::Full;
        for other in [
            Config { pp: 2, virtual_stages: Some(2), ..base.clone() },
            Config { pp: 4, virtual_stages: Some(2), recompute: full, ..base.clone() },
            Config { pp: 2, prefetch: 0, recompute: Recompute::Selective, ..base.clone() },
        ] {
            let what = format!("pp {} {:?}", other.pp, other.recompute);
            let other = run(other);
            assert_same_bits(&reference, &other, &what);
            assert_eq!(rows(&other), rows(&reference), "{what}");
        }
        // Sums of gradients have another order there; what the first forwards give has none.
        let cut = Config { zero3: 3, dp: 2, micro_batches: Some(1), unit: Some(1), ..base };
        let whole = run(cut.clone());
        assert_eq!(scales(&whole), scales(&reference));
        let shared = Config { zero1: true, pp: 2, virtual_stages: Some(2), ..cut };
        let shared = run(Config { recompute: full, ..shared });
        assert_same_bits(&whole, &shared, "zero1, pp 2, recomputed");
        assert_eq!(rows(&shared), rows(&whole));
    }
}

#[test]
fn a_look_at_layers_changes_nothing_else() {
    let base = Config { layers: 4, pp: 2, zero3: 2, dp: 2, steps: 7, ..tiny() };
    let (off, on) = (run(base.clone()), run(Config { log_layers: 3, ..base }));
    assert_same_bits(&off, &on, "layers");
    for (off, on) in off.steps.iter().zip(&on.steps) {
        let counts = |s: &zeropp::StepMetrics| (s.all_gathers, s.reduce_scatters, s.comm_bytes);
        assert_eq!(counts(off), counts(on));
        assert_eq!((off.layers.len(), !on.layers.is_empty()), (0, on.step % 3 == 0));
    }
}

#[test]
fn frozen_layers_report_only_activation_scale() {
    let freeze = Some("wte,h.0,*.c_fc.weight".into());
    let run = run(Config { layers: 2, steps: 1, warmup: Some(0), log_layers: 1, freeze, ..tiny() });
    let trained = |layer: &LayerMetrics| (layer.grad_norm.is_some(), layer.update_ratio.is_some());
    for layer in &run.steps[0].layers {
        let frozen = ["wte", "h.0"].contains(&layer.name.as_str());
        assert_eq!(trained(layer), (!frozen, !frozen), "{layer:?}");
        assert_eq!(layer.activation_rms.is_some(), layer.name != "lm_head", "{layer:?}");
    }
    assert_eq!(run.steps[0].layers.len(), 6);
}

#[test]
fn a_skipped_step_changes_no_layer_and_says_which_were_not_finite() {
    let blown = Config { lr: 1e30, warmup: Some(0), weight_decay: 0.0, clip: 0.0, ..tiny() };
    let run = run(Config { layers: 2, steps: 2, zero3: 2, log_layers: 1, ..blown });
    let [first, second] = run.steps.as_slice() else { panic!("two steps") };
    assert!(!first.skipped && second.skipped);
    assert!(first.layers.iter().all(|layer| layer.update_ratio.unwrap() > 1.0));
    assert!(second.layers.iter().all(|layer| layer.update_ratio == Some(0.0)));
    assert!(second.layers.iter().any(|layer| layer.grad_norm.is_some_and(f64::is_infinite)));
    let text = serde_json::to_string(second).unwrap();
    let back: zeropp::StepMetrics = serde_json::from_str(&text).unwrap();
    let names = |step: &zeropp::StepMetrics| -> Vec<(String, bool)> {
        let finite = |layer: &LayerMetrics| layer.grad_norm.is_some_and(f64::is_finite);
        step.layers.iter().map(|layer| (layer.name.clone(), finite(layer))).collect()
    };
    assert_eq!(names(&back), names(second));
}
