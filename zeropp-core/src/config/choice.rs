//! Settings that are one of a few words.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::options::{OptionKind, OptionType};

/// Defines an enum that is spelled the same in a file, in a flag and in a message.
macro_rules! choice {
    ($(#[doc = $doc:literal])+ $name:ident { $($(#[doc = $vdoc:literal])+ $variant:ident = $word:literal,)+ }) => {
        $(#[doc = $doc])+
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
        pub enum $name {
            $($(#[doc = $vdoc])+ #[serde(rename = $word)] $variant,)+
        }

        impl $name {
            /// All values, in the order of [`Self::NAMES`].
            pub const ALL: &'static [$name] = &[$($name::$variant),+];
            /// How they are spelled.
            pub const NAMES: &'static [&'static str] = &[$($word),+];

            /// The spelling in files and flags.
            pub fn name(self) -> &'static str {
                match self { $($name::$variant => $word),+ }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.name())
            }
        }

        impl OptionType for $name {
            const KIND: OptionKind = OptionKind::Choice($name::NAMES);
        }
    };
}

choice! {
    /// What is computed again in the backward instead of being kept (ZeroPP §3.3).
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

choice! {
    /// How the learning rate falls after the warm-up.
    Decay {
        /// Half a cosine to the minimum at the last step.
        Cosine = "cosine",
        /// A straight line to the minimum at the last step.
        Linear = "linear",
        /// It stays.
        Constant = "constant",
    }
}

choice! {
    /// The built-in models.
    ModelKind {
        /// Pre-norm, learned positions, GELU, as GPT-2.
        Gpt = "gpt",
    }
}

choice! {
    /// The nonlinearity between the two matrices of a block's MLP.
    Activation {
        /// x·Φ(x) with the error function.
        Gelu = "gelu",
        /// The tanh form that GPT-2 was trained with.
        GeluTanh = "gelu-tanh",
    }
}

choice! {
    /// How data becomes token ids.
    Tokenizer {
        /// Every byte is a token: 256 ids and nothing to prepare.
        Bytes = "bytes",
        /// The file holds token ids already: 16-bit little-endian numbers, as nanoGPT (no header)
        /// and llm.c (its header is recognised) write them.
        U16 = "u16",
    }
}

choice! {
    /// Which part of the data a sample is.
    Order {
        /// A place drawn anew for every sample, from seed, step and sample index alone.
        Random = "random",
        /// Sample n of the run starts at token n·seq, and at the end the data begins again.
        Sequential = "sequential",
    }
}

choice! {
    /// What weights and activations are computed in.
    Precision {
        /// 32-bit floating point throughout.
        Fp32 = "fp32",
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

choice! {
    /// Which process of a launched job gets which ranks of the mesh.
    Place {
        /// ZeRO-3 groups inside hosts, where the processes allow it.
        Hosts = "hosts",
        /// As the launcher numbers the processes.
        Ranks = "ranks",
    }
}

choice! {
    /// How ranks talk to each other.
    EngineKind {
        /// Ranks are threads of this process.
        Threads = "threads",
        /// Ranks are processes started by an MPI launcher.
        Mpi = "mpi",
        /// GPU ranks over NCCL.
        Nccl = "nccl",
    }
}
