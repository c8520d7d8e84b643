//! Recomputation: activations that are computed again in place of being kept.

use zeropp_data::choice;

choice! {
    /// The activations that are computed again in the backward instead of being kept (ZeroPP §3.3).
    Recompute {
        /// Nothing: every activation is kept from F to B.
        None = "none",
        /// Attention scores, on every stage: q, k and v are kept, the rest of attention is computed
        /// again. On GPUs and in bf16 that is so anyway.
        Selective = "selective",
        /// Whole stages, of which only the inputs are kept: all of a rank but, in schedules that
        /// split B and W, its last, whose attention alone is computed again.
        Full = "full",
    }
}
