//! The model that is planned for, and those of the papers.

use zeropp_model::Activation;
use zeropp_model::decoder::Decoder;
use zeropp_model::gpt::GptShape;

use crate::PlanError;

/// A model and the samples that it is trained on.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelSizes {
    /// What people call it.
    pub name: String,
    /// What it is.
    pub decoder: Decoder,
    /// Tokens in a sample.
    pub seq: usize,
}

/// The models of the papers that plans are held against, whose heads are not tied: layers, hidden
/// size, heads, vocabulary, tokens in a sample.
const GPTS: [(&str, [usize; 5]); 6] = [
    ("14.6b", [48, 5120, 40, 51200, 1024]),
    ("28.3b", [64, 6144, 48, 51200, 2048]),
    ("22b", [48, 6144, 64, 51200, 2048]),
    ("175b", [96, 12288, 96, 51200, 2048]),
    ("530b", [105, 20480, 128, 51200, 2048]),
    ("1t", [128, 25600, 160, 51200, 2048]),
];

/// Beyond this a slip of the keyboard is likelier than a model.
const SIZE_MAX: usize = 1 << 24;
/// Most blocks that are planned for.
const LAYERS_MAX: usize = 4096;

impl ModelSizes {
    /// A GPT: an MLP of four times the hidden size, biases, learned positions.
    pub fn gpt(name: &str, [layers, hidden, heads, vocabulary, seq]: [usize; 5]) -> ModelSizes {
        let shape = GptShape {
            layers,
            hidden,
            heads,
            seq,
            vocabulary,
            vocabulary_multiple: 1,
            tied: false,
            activation: Activation::GeluTanh,
        };
        ModelSizes { name: name.into(), decoder: shape.into(), seq }
    }

    /// A model that a paper's figures are of.
    pub fn of_a_paper(name: &str) -> Option<ModelSizes> {
        let found = GPTS.iter().find(|gpt| gpt.0.eq_ignore_ascii_case(name));
        found.map(|&(name, sizes)| ModelSizes::gpt(name, sizes))
    }

    /// The names that [`of_a_paper`](Self::of_a_paper) knows.
    pub fn paper_names() -> impl Iterator<Item = &'static str> {
        GPTS.iter().map(|gpt| gpt.0)
    }

    /// Refuses sizes that no model has.
    ///
    /// # Errors
    /// The first size that does not work.
    pub fn check(&self) -> Result<(), PlanError> {
        let d = &self.decoder;
        let sizes = [
            ("layers", d.layers, LAYERS_MAX),
            ("hidden", d.hidden, SIZE_MAX),
            ("heads", d.heads, SIZE_MAX),
            ("kv-heads", d.kv_heads, SIZE_MAX),
            ("head-dim", d.head_dim, SIZE_MAX),
            ("intermediate", d.intermediate, SIZE_MAX),
            ("vocab", d.rows(), SIZE_MAX),
            ("seq", self.seq, SIZE_MAX),
        ];
        if let Some((field, value, most)) = sizes.iter().find(|(_, v, most)| *v == 0 || v > most) {
            return Err(PlanError::new(format!(
                "{field} = {value}: no model has such a size; use 1 to {most}"
            )));
        }
        self.decoder.check().map_err(|(field, problem)| {
            PlanError::new(format!("{field}: {problem}; use sizes that do, or another model"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_that_no_model_has_are_refused_in_a_sentence() {
        let gpt = ModelSizes::gpt("a", [2, 8, 2, 9, 4]);
        gpt.check().unwrap();
        let with = |change: fn(&mut Decoder)| {
            let mut wrong = gpt.clone();
            change(&mut wrong.decoder);
            wrong.check().unwrap_err().to_string()
        };
        for (error, said) in [
            (with(|d| d.hidden = 0), "hidden = 0: no model has such a size"),
            (with(|d| d.kv_heads = 3), "kv-heads: does not divide heads = 2"),
            (with(|d| d.layers = LAYERS_MAX + 1), "layers = 4097: no model"),
        ] {
            assert!(error.starts_with(said), "{error}");
        }
        assert!(ModelSizes::of_a_paper("gpt5").is_none());
    }

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
            let model = ModelSizes::of_a_paper(name).unwrap();
            let n = model.decoder.parameter_count() as f64 / 1e9;
            assert!((n / billions - 1.0).abs() < 0.01, "{name}: {n}");
        }
    }
}
