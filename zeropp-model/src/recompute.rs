//! Recomputation: activations that are computed again in place of being kept.

use zeropp_data::choice;

choice! {
    /// The activations that are computed again in the backward instead of being kept (ZeroPP §3.3).
    Recompute {
        /// The least of the others with which a run fits its memory: `none`, where that does.
        Auto = "auto",
        /// Nothing: every activation is kept from F to B.
        None = "none",
        /// What is cheap, on every stage: the outputs of norms and activation functions, and
        /// attention's scores, which GPUs and bf16 never keep. B makes them again.
        Selective = "selective",
        /// Whole stages, of which only the inputs are kept: all of a rank but, in schedules that
        /// split B and W, its last, which does as with `selective`.
        Full = "full",
    }
}
