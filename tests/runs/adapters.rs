//! Adapters against peft: loss, logits and all gradients of tiny models, and the file that they are
//! saved in. `fixtures/families/make_adapters.py` wrote the figures.

use std::collections::BTreeSet;
use std::path::Path;

use serde::Deserialize;
use zeropp::config::Recompute;
use zeropp::layer::Model;
use zeropp::weights::StoreAs;
use zeropp::{Config, NamedWeights, Trainer, export_adapter, model};

use crate::common::figures;
use crate::common::given::starting_from;
use crate::common::run;
use crate::families::{Family, LOGITS, apart, assert_near_theirs, initial, transposed};

#[derive(Deserialize)]
struct Figures {
    rank: usize,
    alpha: f64,
    /// The maps that are adapted, as peft's configuration has them.
    maps: BTreeSet<String>,
    loss: f64,
    /// Names and shapes as peft saves them.
    tensors: Vec<(String, [usize; 2])>,
}

/// What peft made of adapters on one family.
struct Adapted {
    figures: Figures,
    family: Family,
    /// Logits of the first samples, `[shown, s, V]`.
    logits: Vec<f32>,
    /// Gradients of the adapters, in the orientation of our parameters.
    gradients: NamedWeights,
    /// All weights, likewise.
    weights: NamedWeights,
}

/// Families and the targets by our names.
const FAMILIES: [(&str, &str); 4] =
    [("gpt2", "all"), ("llama3", "q,v"), ("qwen2", "all"), ("qwen2-moe", "q,v,gate,down")];

impl Adapted {
    fn read(name: &str) -> Self {
        let family = Family::read(name);
        let (figures, mut numbers): (Figures, _) = figures::read(&format!("adapters-{name}"));
        let logits = numbers.take(family.shown_logits());
        let (mut gradients, mut weights) = (NamedWeights::new(), family.weights.clone());
        for (tensor, [rows, columns]) in &figures.tensors {
            let bare = tensor.strip_prefix("base_model.model.").unwrap();
            let bare = bare.strip_prefix("transformer.").unwrap_or(bare);
            let both = [numbers.take(rows * columns), initial(bare, rows * columns)];
            let [gradient, weight] = both.map(|values| transposed(&values, *rows, *columns));
            gradients.insert(bare.to_string(), gradient);
            weights.insert(bare.to_string(), weight);
        }
        numbers.end();
        Self { figures, family, logits, gradients, weights }
    }

    /// Settings of a run on the script's data, without adapters.
    fn config(&self, data: &Path) -> Config {
        let bytes: Vec<u8> = self.family.ids().flat_map(u16::to_le_bytes).collect();
        std::fs::write(data, bytes).unwrap();
        self.family.config(data)
    }

    /// The same with adapters of these targets.
    fn tuned(&self, data: &Path, targets: &str) -> Config {
        Config {
            lora_rank: self.figures.rank,
            lora_alpha: Some(self.figures.alpha),
            lora_targets: Some(targets.into()),
            ..self.config(data)
        }
    }

    /// The model with adapters.
    fn model(&self, data: &Path, targets: &str) -> Model {
        let decoder = self.family.decoder;
        model::build_tuned(decoder, &self.tuned(data, targets).tuning(&decoder).unwrap())
    }
}

#[test]
fn loss_logits_and_gradients_of_adapters_are_those_of_peft_on_any_mesh() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("tokens.bin");
    let meshes =
        [(1, 1, 1, Recompute::None), (4, 1, 1, Recompute::Selective), (2, 2, 2, Recompute::Full)];
    for (name, targets) in FAMILIES {
        let adapted = Adapted::read(name);
        let model = adapted.model(&data, targets);
        let logits = model::logits(&model, &adapted.weights, adapted.family.shown_ids()).unwrap();
        let logits = logits.into_data().try_to_vec::<f32>().unwrap();
        let far = apart(&logits, &adapted.logits);
        println!("{name}: logits {far:.1e} apart");
        assert!(far <= LOGITS, "{name}: {far:e}");
        for (pp, v, zero3, recompute) in meshes {
            let config = Config {
                pp,
                virtual_stages: Some(v),
                zero3,
                micro_batches: Some(adapted.family.figures.samples / zero3),
                recompute,
                ..adapted.config(&data)
            };
            let (model, weights) = (adapted.model(&data, targets), adapted.weights.clone());
            let model = starting_from(model, move |spec| weights[&spec.name].clone());
            let trainer = Trainer::builder(config).model(model).build().unwrap();
            let (step, gradients) = trainer.first_gradients().unwrap();
            let what = format!("{name}, pp {pp}, virtual {v}, zero3 {zero3}");
            let loss = (step.loss / adapted.figures.loss - 1.0).abs();
            assert!(loss < 1e-6, "{what}: loss {} is {loss:e} apart", step.loss);
            assert_near_theirs(&gradients, &adapted.gradients, &what);
        }
    }
}

#[test]
fn adapters_are_saved_with_peft_s_names_and_shapes() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("tokens.bin");
    for (name, targets) in FAMILIES {
        let adapted = Adapted::read(name);
        let described = dir.path().join(name);
        std::fs::create_dir(&described).unwrap();
        let described = described.join("config.json");
        std::fs::write(&described, adapted.family.figures.config.to_string()).unwrap();
        let save = dir.path().join(format!("save-{name}"));
        run(Config {
            model: described.to_string_lossy().into_owned(),
            tied: adapted.family.decoder.tied,
            activation: adapted.family.decoder.activation,
            save: Some(save.clone()),
            ..adapted.tuned(&data, targets)
        });
        let to = dir.path().join(format!("adapter-{name}"));
        export_adapter(&save, &to, StoreAs::F32).unwrap();
        let config = std::fs::read_to_string(to.join("adapter_config.json")).unwrap();
        let config: serde_json::Value = serde_json::from_str(&config).unwrap();
        let maps: BTreeSet<String> =
            serde_json::from_value(config["target_modules"].clone()).unwrap();
        assert_eq!(maps, adapted.figures.maps, "{name}");
        let file = zeropp::weights::Weights::open(&to.join("adapter_model.safetensors")).unwrap();
        let ours: BTreeSet<_> = file.tensors().map(|t| (t.name.clone(), t.shape.clone())).collect();
        let theirs: BTreeSet<_> = adapted.figures.tensors.iter().cloned().collect();
        let theirs = theirs.into_iter().map(|(name, shape)| (name, shape.to_vec())).collect();
        assert_eq!(ours, theirs, "{name}");
    }
}
