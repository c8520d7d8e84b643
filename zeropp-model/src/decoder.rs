//! A decoder-only transformer as plain data: sizes, norms, positions, biases. Every family that
//! zeropp trains is a value of [`Decoder`]; nothing here needs Burn.
//!
//! Words: h hidden, f the MLP's inner size, d elements of a head, H query heads, G key and value
//! heads (groups), L blocks, V rows of embedding and head.

use crate::Activation;
pub use crate::rotary::{Rotary, RotaryScaling, Yarn};

/// Which names the parameters have, and how a block is put together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Naming {
    /// GPT-2's: `wte`, `h.0.attn.c_attn` (q, k and v in one), `h.0.mlp.c_fc`.
    Gpt2,
    /// LLaMA's, which Mistral and Qwen share: `model.layers.0.self_attn.q_proj`, gate, up and down.
    Llama,
}

/// The normalisation before attention, before the MLP and before the head.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Norm {
    /// (x − mean)/√(variance + eps)·weight + bias.
    Layer {
        /// Added to the variance.
        eps: f64,
    },
    /// x/√(mean(x²) + eps)·weight.
    Rms {
        /// Added to the mean square.
        eps: f64,
    },
}

/// How tokens know where they are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Positions {
    /// A learned vector for each of so many places, added to the token's.
    Learned(usize),
    /// Queries and keys turn by their place (RoFormer, rotate-half layout).
    Rotary(Rotary),
}

/// Which linear maps add a bias.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Biases {
    /// The projections to q, k and v.
    pub qkv: bool,
    /// The projection after attention.
    pub out: bool,
    /// Those of the MLP.
    pub mlp: bool,
}

impl Biases {
    /// None.
    pub const NONE: Biases = Biases { qkv: false, out: false, mlp: false };
    /// All, as GPT-2 has them.
    pub const ALL: Biases = Biases { qkv: true, out: true, mlp: true };
}

/// A sliding window: in some layers a query sees the last tokens alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Tokens that a query sees, itself included.
    pub tokens: usize,
    /// The first layer that has it; those after it do, too.
    pub first_layer: usize,
}

/// Most experts of a layer: beyond this a slip of the keyboard is likelier.
const EXPERTS_MAX: usize = 1 << 12;

/// Experts in place of the MLP of some layers: each token goes to a few of many small MLPs, and
/// none is dropped.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Moe {
    /// Experts E of a layer.
    pub experts: usize,
    /// Experts k that a token goes to: those with the largest scores.
    pub chosen: usize,
    /// Inner size of an expert.
    pub inner: usize,
    /// Whether the weights of a token's experts are divided by their sum.
    pub divided: bool,
    /// Layers at the beginning that have an MLP instead.
    pub first: usize,
    /// Of the others those have experts whose number, counted from 1, is a multiple of this.
    pub every: usize,
    /// The sigmoids that are scores; without, scores are the softmax of the logits over all E.
    pub sigmoid: Option<SigmoidScores>,
    /// An MLP beside the experts that all tokens go to.
    pub shared: Option<SharedExpert>,
}

/// Scores that are the sigmoids of logits (DeepSeek-V3). A bias of each expert, which has no
/// gradient, is added where they are compared.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SigmoidScores {
    /// Groups of experts; a token's experts are of those whose best two have the largest sums.
    pub groups: usize,
    /// Groups of a token.
    pub groups_chosen: usize,
    /// The factor on the weights.
    pub scale: f64,
}

impl SigmoidScores {
    /// Of experts in one group, whose weights are not scaled.
    pub const PLAIN: SigmoidScores = SigmoidScores { groups: 1, groups_chosen: 1, scale: 1.0 };
}

/// An MLP that all tokens go to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedExpert {
    /// Its inner size.
    pub inner: usize,
    /// Whether a sigmoid of the token scales what it gives.
    pub gated: bool,
}

impl Moe {
    /// So many experts, k of which a token goes to by a softmax that is divided by its sum, in all
    /// layers.
    pub const fn new(experts: usize, chosen: usize, inner: usize) -> Moe {
        let (divided, sigmoid, shared) = (true, None, None);
        Moe { experts, chosen, inner, divided, first: 0, every: 1, sigmoid, shared }
    }
}

/// A decoder-only transformer with pre-norm blocks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Decoder {
    /// Names of the parameters.
    pub naming: Naming,
    /// Blocks L.
    pub layers: usize,
    /// Hidden size h.
    pub hidden: usize,
    /// Query heads H.
    pub heads: usize,
    /// Key and value heads G; divides `heads`, and consecutive query heads share one.
    pub kv_heads: usize,
    /// Elements of a head d; h/H in most families, not in all.
    pub head_dim: usize,
    /// Inner size f of the MLP, of layers that have one.
    pub intermediate: usize,
    /// Token ids: those below this number.
    pub vocabulary: usize,
    /// Embedding and head have rows for the vocabulary rounded up to a multiple of this; 1 adds
    /// none. A row that is no id is never looked up and takes no part in the loss.
    pub vocabulary_multiple: usize,
    /// The norms.
    pub norm: Norm,
    /// How tokens know where they are.
    pub positions: Positions,
    /// Which linear maps add a bias.
    pub biases: Biases,
    /// Whether q and k are normalised head by head before they turn (Qwen3); RMS, `norm`'s eps.
    pub qk_norm: bool,
    /// The MLP's nonlinearity; SwiGLU has a gate beside.
    pub activation: Activation,
    /// Whether the head uses the embedding's weight.
    pub tied: bool,
    /// The sliding window of attention, where there is one.
    pub window: Option<Window>,
    /// Experts, where it has some.
    pub moe: Option<Moe>,
    /// Tokens of the longest texts that it was made for.
    pub context: usize,
}

impl Decoder {
    /// Rows of embedding and head.
    pub fn rows(&self) -> usize {
        self.vocabulary.next_multiple_of(self.vocabulary_multiple.max(1))
    }

    /// Elements of a token's queries: H·d.
    pub(crate) fn query_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Elements of a token's keys, and of its values: G·d.
    pub(crate) fn key_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Elements of a token's q, k and v: (H + 2G)·d.
    pub(crate) fn qkv_width(&self) -> usize {
        self.query_width() + 2 * self.key_width()
    }

    /// Linear maps of the MLP: up and down, and a gate.
    pub(crate) fn mlp_maps(&self) -> usize {
        if self.activation == Activation::Swiglu { 3 } else { 2 }
    }

    /// The experts of a layer, if it has some in place of an MLP.
    pub fn moe_of(&self, layer: usize) -> Option<Moe> {
        self.moe.filter(|moe| layer >= moe.first && (layer + 1).is_multiple_of(moe.every))
    }

    /// Elements of a block's weight matrices that a token is multiplied with: of experts those that
    /// it goes to. Biases and norms are not counted.
    pub(crate) fn block_weights(&self, layer: usize) -> f64 {
        let h = self.hidden as f64;
        let attention = (self.qkv_width() + self.query_width()) as f64;
        let mlp = match self.moe_of(layer) {
            Some(moe) => {
                let shared = moe.shared.map_or(0, |shared| shared.inner);
                let gates = moe.experts + moe.shared.map_or(0, |shared| usize::from(shared.gated));
                gates + self.mlp_maps() * (moe.chosen * moe.inner + shared)
            }
            None => self.mlp_maps() * self.intermediate,
        };
        h * (attention + mlp as f64)
    }

    /// Tokens that a query of a layer sees, itself included, where not all before it.
    pub fn window_of(&self, layer: usize) -> Option<usize> {
        self.window.filter(|window| layer >= window.first_layer).map(|window| window.tokens)
    }

    /// Floating-point operations of a block's forward on `samples` of `seq` tokens: its matrix
    /// products, and of attention's scores and values the causal half, or what is within a window.
    pub(crate) fn block_flops(&self, layer: usize, samples: usize, seq: usize) -> f64 {
        let (n, s) = ((samples * seq) as f64, seq as f64);
        let seen = match self.window_of(layer).map(|window| window as f64) {
            Some(window) if window < s => window - window * window / (2.0 * s),
            _ => s / 2.0,
        };
        2.0 * n * self.block_weights(layer) + 4.0 * n * seen * self.query_width() as f64
    }

    /// Floating-point operations of the head's forward on `tokens`: rows that are no token ids are
    /// not counted.
    pub(crate) fn head_flops(&self, tokens: usize) -> f64 {
        2.0 * tokens as f64 * (self.hidden * self.vocabulary) as f64
    }

    /// Training FLOP of one token in samples of `seq`: three times the forward's, recomputation
    /// not counted.
    pub fn flops_per_token(&self, seq: usize) -> f64 {
        let blocks: f64 = (0..self.layers).map(|layer| self.block_flops(layer, 1, seq)).sum();
        3.0 * (blocks + self.head_flops(seq)) / seq as f64
    }

    /// Number of parameters, a tied weight counted once.
    pub fn parameter_count(&self) -> u64 {
        self.tensors().iter().map(|tensor| tensor.len() as u64).sum()
    }

    /// Refuses sizes that are zero or do not divide, and combinations that no model here has.
    ///
    /// # Errors
    /// The field, in words, and what is wrong with it.
    pub fn check(&self) -> Result<(), (&'static str, String)> {
        let sizes = [
            ("layers", self.layers),
            ("hidden", self.hidden),
            ("heads", self.heads),
            ("kv-heads", self.kv_heads),
            ("head-dim", self.head_dim),
            ("intermediate", self.intermediate),
            ("vocab", self.vocabulary),
        ];
        if let Some((field, _)) = sizes.iter().find(|(_, size)| *size == 0) {
            return Err((field, "at least 1 is needed".into()));
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(("kv-heads", format!("does not divide heads = {}", self.heads)));
        }
        self.check_experts()?;
        if let Positions::Rotary(_) = self.positions
            && !self.head_dim.is_multiple_of(2)
        {
            return Err(("head-dim", "rotary positions turn pairs of elements: it is odd".into()));
        }
        let gated = self.activation == Activation::Swiglu;
        match self.naming {
            Naming::Gpt2 if gated || self.qk_norm || self.biases != Biases::ALL => {
                Err(("model", "GPT-2's blocks have biases, and neither gate nor q/k norms".into()))
            }
            Naming::Llama if !gated => {
                Err(("activation", "blocks with LLaMA's names have a gate: swiglu".into()))
            }
            _ => Ok(()),
        }
    }

    fn check_experts(&self) -> Result<(), (&'static str, String)> {
        let Some(moe) = self.moe else { return Ok(()) };
        if moe.experts == 0 || moe.inner == 0 || moe.every == 0 {
            return Err(("experts", "at least 1 of at least 1 element is needed".into()));
        }
        if moe.experts > EXPERTS_MAX {
            return Err(("experts", format!("a layer has at most {EXPERTS_MAX}")));
        }
        if !(1..=moe.experts).contains(&moe.chosen) {
            let problem = format!("a token goes to 1 to {} of experts = {0}", moe.experts);
            return Err(("experts-per-token", problem));
        }
        if moe.shared.is_some_and(|shared| shared.inner == 0) {
            return Err(("experts", "a shared expert has at least 1 element".into()));
        }
        if let Some(SigmoidScores { groups, groups_chosen, .. }) = moe.sigmoid {
            let size = moe.experts / groups.max(1);
            if groups == 0 || !moe.experts.is_multiple_of(groups) || size < 2 {
                let problem = format!("are not {groups} groups of at least 2 experts");
                return Err(("experts", problem));
            }
            if !(1..=groups).contains(&groups_chosen) || groups_chosen * size < moe.chosen {
                let problem = format!("{groups_chosen} of {groups} groups have not so many");
                return Err(("experts-per-token", problem));
            }
        }
        if self.naming != Naming::Llama || self.biases.mlp {
            return Err(("experts", "blocks with biases in their MLP have none".into()));
        }
        Ok(())
    }
}
