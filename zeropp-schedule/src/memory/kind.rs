//! Bytes on one rank by what they are used for: predicted or metered.

use serde::{Deserialize, Serialize};

/// What memory is used for. The names are those of `peak_bytes` in the metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryKind {
    /// The rank's own part of the fp32 parameters.
    ParameterShard,
    /// Whole weights of a stage, alive between all-gather and free.
    Gathered,
    /// Copies of gathered bf16 weights as the CPU's products read them, alive from the first
    /// product to the free.
    PackedWeights,
    /// Whole weight gradients of a stage, alive from its first W to its reduce-scatter.
    Gradient,
    /// The rank's part of the reduced gradients.
    GradientShard,
    /// Optimizer state (moments).
    Optimizer,
    /// What a forward keeps for its B.
    Activation,
    /// What a B keeps for its W.
    WeightStash,
    /// Buffers on their way to or from another rank.
    Communication,
    /// Buffers of a checkpoint that is being written while the rank computes.
    Save,
    /// The state before an update that may prove wrong: the rank's parameters, optimizer state and
    /// reduced gradient.
    Rollback,
    /// What was kept for a B and is out of the rank's memory, in a file: no part of a sum over all
    /// kinds.
    HostActivation,
    /// The rank's parameters, optimizer state and reduced gradients where these are in a file: no
    /// part of a sum over all kinds.
    HostState,
}

impl MemoryKind {
    /// All kinds, in the order of the fields of [`MemoryBytes`].
    pub const ALL: [MemoryKind; 13] = [
        MemoryKind::ParameterShard,
        MemoryKind::Gathered,
        MemoryKind::PackedWeights,
        MemoryKind::Gradient,
        MemoryKind::GradientShard,
        MemoryKind::Optimizer,
        MemoryKind::Activation,
        MemoryKind::WeightStash,
        MemoryKind::Communication,
        MemoryKind::Save,
        MemoryKind::Rollback,
        MemoryKind::HostActivation,
        MemoryKind::HostState,
    ];

    /// Whether it takes memory of the rank: what is in a file does not.
    pub fn is_in_memory(self) -> bool {
        !matches!(self, MemoryKind::HostActivation | MemoryKind::HostState)
    }

    /// What people call it.
    pub fn name(self) -> &'static str {
        match self {
            MemoryKind::ParameterShard => "parameter shard",
            MemoryKind::Gathered => "gathered weights",
            MemoryKind::PackedWeights => "packed weights",
            MemoryKind::Gradient => "gradient",
            MemoryKind::GradientShard => "gradient shard",
            MemoryKind::Optimizer => "optimizer",
            MemoryKind::Activation => "activation",
            MemoryKind::WeightStash => "weight stash",
            MemoryKind::Communication => "communication",
            MemoryKind::Save => "checkpoint",
            MemoryKind::Rollback => "rollback",
            MemoryKind::HostActivation => "host activation",
            MemoryKind::HostState => "host state",
        }
    }
}

/// Bytes by kind: current ones, peaks or a prediction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)] // The fields are the variants of `MemoryKind`.
pub struct MemoryBytes {
    pub parameter_shard: u64,
    pub gathered: u64,
    #[serde(default)]
    pub packed_weights: u64,
    pub gradient: u64,
    pub gradient_shard: u64,
    pub optimizer: u64,
    pub activation: u64,
    pub weight_stash: u64,
    pub communication: u64,
    #[serde(default)]
    pub save: u64,
    #[serde(default)]
    pub rollback: u64,
    /// Files leave it out where there is none.
    #[serde(default, skip_serializing_if = "is_nothing")]
    pub host_activation: u64,
    #[serde(default, skip_serializing_if = "is_nothing")]
    pub host_state: u64,
}

fn is_nothing(bytes: &u64) -> bool {
    *bytes == 0
}

/// What a rank holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldBytes {
    /// The most of each kind; they are not all there at the same time.
    #[serde(rename = "memory")]
    pub peaks: MemoryBytes,
    /// Bytes by kind at the moment when their sum is largest.
    #[serde(default)]
    pub at_once: MemoryBytes,
}

impl MemoryBytes {
    /// The field of one kind.
    pub fn get(&self, kind: MemoryKind) -> u64 {
        match kind {
            MemoryKind::ParameterShard => self.parameter_shard,
            MemoryKind::Gathered => self.gathered,
            MemoryKind::PackedWeights => self.packed_weights,
            MemoryKind::Gradient => self.gradient,
            MemoryKind::GradientShard => self.gradient_shard,
            MemoryKind::Optimizer => self.optimizer,
            MemoryKind::Activation => self.activation,
            MemoryKind::WeightStash => self.weight_stash,
            MemoryKind::Communication => self.communication,
            MemoryKind::Save => self.save,
            MemoryKind::Rollback => self.rollback,
            MemoryKind::HostActivation => self.host_activation,
            MemoryKind::HostState => self.host_state,
        }
    }

    /// The field of one kind, to change it.
    pub fn get_mut(&mut self, kind: MemoryKind) -> &mut u64 {
        match kind {
            MemoryKind::ParameterShard => &mut self.parameter_shard,
            MemoryKind::Gathered => &mut self.gathered,
            MemoryKind::PackedWeights => &mut self.packed_weights,
            MemoryKind::Gradient => &mut self.gradient,
            MemoryKind::GradientShard => &mut self.gradient_shard,
            MemoryKind::Optimizer => &mut self.optimizer,
            MemoryKind::Activation => &mut self.activation,
            MemoryKind::WeightStash => &mut self.weight_stash,
            MemoryKind::Communication => &mut self.communication,
            MemoryKind::Save => &mut self.save,
            MemoryKind::Rollback => &mut self.rollback,
            MemoryKind::HostActivation => &mut self.host_activation,
            MemoryKind::HostState => &mut self.host_state,
        }
    }

    /// All kinds with their bytes.
    pub fn kinds(&self) -> impl Iterator<Item = (MemoryKind, u64)> + use<> {
        let bytes = *self;
        MemoryKind::ALL.into_iter().map(move |kind| (kind, bytes.get(kind)))
    }

    /// The larger of two values in every kind.
    pub fn max(&self, other: &MemoryBytes) -> MemoryBytes {
        MemoryBytes {
            parameter_shard: self.parameter_shard.max(other.parameter_shard),
            gathered: self.gathered.max(other.gathered),
            packed_weights: self.packed_weights.max(other.packed_weights),
            gradient: self.gradient.max(other.gradient),
            gradient_shard: self.gradient_shard.max(other.gradient_shard),
            optimizer: self.optimizer.max(other.optimizer),
            activation: self.activation.max(other.activation),
            weight_stash: self.weight_stash.max(other.weight_stash),
            communication: self.communication.max(other.communication),
            save: self.save.max(other.save),
            rollback: self.rollback.max(other.rollback),
            host_activation: self.host_activation.max(other.host_activation),
            host_state: self.host_state.max(other.host_state),
        }
    }

    /// Sum over all kinds that take memory of the rank.
    pub fn total(&self) -> u64 {
        let MemoryBytes { parameter_shard, gradient_shard, optimizer, save, rollback, .. } = *self;
        let MemoryBytes { gathered, packed_weights, gradient, .. } = *self;
        let MemoryBytes { activation, weight_stash, communication, .. } = *self;
        let state = parameter_shard + gradient_shard + optimizer + save + rollback;
        state + gathered + packed_weights + gradient + activation + weight_stash + communication
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_and_maxima_leave_no_kind_out() {
        let (mut all, mut other) = (MemoryBytes::default(), MemoryBytes::default());
        for (i, kind) in MemoryKind::ALL.into_iter().enumerate() {
            *all.get_mut(kind) = 1 << i;
            *other.get_mut(kind) = if i % 2 == 0 { 2 << i } else { 0 };
        }
        let elsewhere = all.host_activation + all.host_state;
        assert_eq!(all.total() + elsewhere, (1 << MemoryKind::ALL.len()) - 1);
        let larger = all.max(&other);
        assert!(all.kinds().all(|(kind, n)| larger.get(kind) == n.max(other.get(kind))));
    }
}
