//! Settings that are one of a few words.

use zeropp_core::choice;

pub use zeropp_comm::launch::EngineKind;
pub use zeropp_comm::placement::Place;
pub use zeropp_core::choice::{
    Activation, Decay, DeviceKind, Order, Precision, Recompute, Tokenizer,
};
pub use zeropp_pipeline::costs::SliceCut;
pub use zeropp_pipeline::lower::OptimizerSync;

pub use super::optimizers::OptimizerKind;

use super::kind::{OptionKind, OptionType};

choice! {
    /// How a run that recovers replaces the rank that has failed.
    OnLoss {
        /// Nothing: all ranks start again.
        Restart = "restart",
        /// It goes on with the other replicas, which share the samples of the lost one.
        Shrink = "shrink",
    }
}

choice! {
    /// The tokens over which the balance of experts is counted.
    Balance {
        /// None: there is no balance loss.
        None = "none",
        /// Those of a micro-batch.
        MicroBatch = "micro-batch",
        /// Those of each sample.
        Sample = "sample",
        /// Those of a step, by a bias of each expert in the choice, without a loss.
        Bias = "bias",
    }
}

choice! {
    /// Whether gathered bf16 weights are kept as the CPU's products read them.
    PackWeights {
        /// Where several micro-batches use a gather and the memory is there.
        Auto = "auto",
        /// Always.
        On = "on",
        /// Never: each product packs its weight anew.
        Off = "off",
    }
}

choice! {
    /// What `optimizer:out` has out of memory.
    OutStates {
        /// Moments, where the others fit into memory, else all.
        Auto = "auto",
        /// What the optimizer keeps.
        Moments = "moments",
        /// Parameters and gradients, too.
        All = "all",
    }
}

choice! {
    /// Units of which activations are copied out.
    OutUnits {
        /// Each.
        All = "all",
        /// All but a step's first.
        Later = "later",
    }
}

choice! {
    /// Whether a run exchanges its program for a better one by the times that its steps take.
    Reschedule {
        /// It runs the one that it was started with.
        Off = "off",
        /// It measures, searches and exchanges by itself.
        Auto = "auto",
        /// The same, and where ranks are uneven blocks move between their stages, too.
        Recut = "recut",
    }
}

macro_rules! settings {
    ($($name:ident),+) => {
        $(impl OptionType for $name {
            const KIND: OptionKind = OptionKind::Choice($name::NAMES);
        })+
    };
}
settings!(
    Activation,
    Balance,
    Decay,
    DeviceKind,
    EngineKind,
    OnLoss,
    OptimizerKind,
    OptimizerSync,
    Order,
    OutStates,
    OutUnits,
    PackWeights,
    Place,
    Precision,
    Recompute,
    Reschedule,
    SliceCut,
    Tokenizer
);
