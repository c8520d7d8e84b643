//! The nonlinearity between the linear maps of an MLP.

use zeropp_data::choice;

choice! {
    /// The nonlinearity of a block's MLP.
    Activation {
        /// x·Φ(x) with the error function.
        Gelu = "gelu",
        /// The tanh form that GPT-2 was trained with.
        GeluTanh = "gelu-tanh",
        /// silu(gate)·up with a third matrix for the gate, as LLaMA has it.
        Swiglu = "swiglu",
    }
}
