//! What a planner has to know of a model.

use serde::Serialize;

use crate::PlanError;

/// The sizes of a decoder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ModelSizes {
    /// What people call it.
    pub name: String,
    /// Transformer blocks.
    pub layers: usize,
    /// Elements of a token's hidden state.
    pub hidden: usize,
    /// Attention heads.
    pub heads: usize,
    /// Heads of keys and values: as many as `heads`, or fewer where queries share them.
    pub kv_heads: usize,
    /// Elements between the products of the MLP.
    pub intermediate: usize,
    /// Whether the MLP has a gate beside its first product (SwiGLU), and no biases.
    pub gated: bool,
    /// Rows of the embedding.
    pub vocabulary: usize,
    /// Tokens in a sample.
    pub seq: usize,
    /// Whether the head shares the embedding's weights.
    pub tied: bool,
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
        ModelSizes {
            name: name.into(),
            layers,
            hidden,
            heads,
            kv_heads: heads,
            intermediate: 4 * hidden,
            gated: false,
            vocabulary,
            seq,
            tied: false,
        }
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
        let sizes = [
            ("layers", self.layers, LAYERS_MAX),
            ("hidden", self.hidden, SIZE_MAX),
            ("heads", self.heads, SIZE_MAX),
            ("kv-heads", self.kv_heads, SIZE_MAX),
            ("intermediate", self.intermediate, SIZE_MAX),
            ("vocab", self.vocabulary, SIZE_MAX),
            ("seq", self.seq, SIZE_MAX),
        ];
        if let Some((field, value, most)) = sizes.iter().find(|(_, v, most)| *v == 0 || v > most) {
            return Err(PlanError::new(format!(
                "{field} = {value}: no model has such a size; use 1 to {most}"
            )));
        }
        if !self.hidden.is_multiple_of(self.heads) || !self.heads.is_multiple_of(self.kv_heads) {
            return Err(PlanError::new(format!(
                "heads = {}: hidden = {} is cut into heads of equal size, and heads into groups \
                 of kv-heads = {}; use numbers that divide each other",
                self.heads, self.hidden, self.kv_heads
            )));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_that_no_model_has_are_refused_in_a_sentence() {
        let gpt = ModelSizes::gpt("a", [2, 8, 2, 9, 4]);
        gpt.check().unwrap();
        for (wrong, said) in [
            (ModelSizes { hidden: 0, ..gpt.clone() }, "hidden = 0: no model has such a size"),
            (ModelSizes { heads: 3, ..gpt.clone() }, "heads = 3: hidden = 8 is cut into heads"),
            (ModelSizes { layers: LAYERS_MAX + 1, ..gpt.clone() }, "layers = 4097: no model"),
        ] {
            let error = wrong.check().unwrap_err().to_string();
            assert!(error.starts_with(said), "{error}");
        }
        assert!(ModelSizes::of_a_paper("gpt5").is_none());
    }
}
