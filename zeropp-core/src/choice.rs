//! Settings that are one of a few words.

use zeropp_data::choice;
pub use zeropp_data::choices::{Order, Tokenizer};
pub use zeropp_model::{Activation, Recompute};

choice! {
    /// How the learning rate falls after the warm-up.
    Decay {
        /// Half a cosine to the minimum at the last step.
        Cosine = "cosine",
        /// A straight line to the minimum at the last step.
        Linear = "linear",
        /// It stays until four fifths of the run, then falls in a straight line to the minimum
        /// (warm-up, stable, decay).
        Wsd = "wsd",
        /// It falls with the root of the step, as √(warm-up / step), and never below the minimum.
        InverseSqrt = "inverse-sqrt",
        /// It stays.
        Constant = "constant",
    }
}

choice! {
    /// The number format in which weights and activations are computed.
    Precision {
        /// 32-bit floating point throughout.
        Fp32 = "fp32",
        /// The same, with factors of products rounded to TF32 on NVIDIA GPUs.
        Tf32 = "tf32",
        /// bfloat16 compute with fp32 master weights.
        Bf16 = "bf16",
    }
}

choice! {
    /// Where tensors live.
    DeviceKind {
        /// Burn's flex backend.
        Cpu = "cpu",
        /// NVIDIA GPUs.
        Cuda = "cuda",
        /// The GPU that Vulkan, Metal or DirectX drive; a software one too.
        Wgpu = "wgpu",
    }
}
