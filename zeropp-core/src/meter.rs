//! Bytes alive on one rank, by kind, and their peaks: counted as a separate device would hold
//! them, whatever the ranks of this process share.

use std::collections::HashMap;
use std::sync::Arc;

use burn::tensor::Tensor;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::cpu_tensor;

/// What memory is used for. The names are those of `peak_bytes` in the metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryKind {
    /// The rank's own part of the fp32 parameters.
    ParameterShard,
    /// Whole weights of a stage, alive between all-gather and free.
    Gathered,
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
}

impl MemoryKind {
    /// All kinds, in the order of the fields of [`MemoryBytes`].
    pub const ALL: [MemoryKind; 8] = [
        MemoryKind::ParameterShard,
        MemoryKind::Gathered,
        MemoryKind::Gradient,
        MemoryKind::GradientShard,
        MemoryKind::Optimizer,
        MemoryKind::Activation,
        MemoryKind::WeightStash,
        MemoryKind::Communication,
    ];

    /// What people call it.
    pub fn name(self) -> &'static str {
        match self {
            MemoryKind::ParameterShard => "parameter shard",
            MemoryKind::Gathered => "gathered weights",
            MemoryKind::Gradient => "gradient",
            MemoryKind::GradientShard => "gradient shard",
            MemoryKind::Optimizer => "optimizer",
            MemoryKind::Activation => "activation",
            MemoryKind::WeightStash => "weight stash",
            MemoryKind::Communication => "communication",
        }
    }
}

/// Bytes with a binary unit: `1.50 MiB`.
pub fn in_words(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut x = bytes as f64;
    let mut unit = 0;
    while x >= 1023.5 && unit + 1 < units.len() {
        x /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{x:.2} {}", units[unit]) }
}

/// Bytes by kind: current ones, peaks or a prediction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)] // The fields are the variants of `MemoryKind`.
pub struct MemoryBytes {
    pub parameter_shard: u64,
    pub gathered: u64,
    pub gradient: u64,
    pub gradient_shard: u64,
    pub optimizer: u64,
    pub activation: u64,
    pub weight_stash: u64,
    pub communication: u64,
}

impl MemoryBytes {
    /// The field of one kind.
    pub fn get(&self, kind: MemoryKind) -> u64 {
        let mut copy = *self;
        *copy.get_mut(kind)
    }

    /// The field of one kind, to change it.
    pub fn get_mut(&mut self, kind: MemoryKind) -> &mut u64 {
        match kind {
            MemoryKind::ParameterShard => &mut self.parameter_shard,
            MemoryKind::Gathered => &mut self.gathered,
            MemoryKind::Gradient => &mut self.gradient,
            MemoryKind::GradientShard => &mut self.gradient_shard,
            MemoryKind::Optimizer => &mut self.optimizer,
            MemoryKind::Activation => &mut self.activation,
            MemoryKind::WeightStash => &mut self.weight_stash,
            MemoryKind::Communication => &mut self.communication,
        }
    }

    /// The larger of two values in every kind.
    pub fn max(mut self, other: &MemoryBytes) -> MemoryBytes {
        for kind in MemoryKind::ALL {
            let m = self.get(kind).max(other.get(kind));
            *self.get_mut(kind) = m;
        }
        self
    }

    /// Sum over all kinds.
    pub fn total(&self) -> u64 {
        MemoryKind::ALL.iter().map(|k| self.get(*k)).sum()
    }
}

#[derive(Default)]
struct State {
    now: MemoryBytes,
    peak: MemoryBytes,
    /// Buffers held through `hold_tensor`: (kind, storage) → (holders, bytes).
    shared: HashMap<(MemoryKind, usize), (usize, u64)>,
}

/// Counts the bytes of one rank.
#[derive(Default)]
pub struct Meter(Mutex<State>);

impl Meter {
    /// A meter with nothing alive.
    pub fn new() -> Arc<Meter> {
        Arc::default()
    }

    /// Counts `bytes` of `kind` until the returned guard is dropped.
    pub fn hold(self: &Arc<Self>, kind: MemoryKind, bytes: u64) -> Hold {
        self.0.lock().add(kind, bytes);
        Hold { meter: self.clone(), kind, bytes, storage: None }
    }

    /// Counts the elements of `t` until the guard is dropped; a buffer held more than once under
    /// one kind (two layers that keep the same input) counts once.
    pub fn hold_tensor<const D: usize>(self: &Arc<Self>, kind: MemoryKind, t: &Tensor<D>) -> Hold {
        let bytes = (t.shape().num_elements() * t.dtype().size()) as u64;
        let storage = cpu_tensor::storage_id(t);
        // Numbers of tensors are small, addresses are not: no two of them are equal.
        #[cfg(feature = "cube")]
        let storage = storage.or_else(|| crate::cube::tensor_id(t));
        let Some(storage) = storage else { return self.hold(kind, bytes) };
        let mut state = self.0.lock();
        let entry = state.shared.entry((kind, storage)).or_insert((0, bytes));
        entry.0 += 1;
        if entry.0 == 1 {
            state.add(kind, bytes);
        }
        Hold { meter: self.clone(), kind, bytes, storage: Some(storage) }
    }

    /// Bytes alive now.
    pub fn now(&self) -> MemoryBytes {
        self.0.lock().now
    }

    /// Largest bytes by kind since the last [`reset_peak`](Self::reset_peak).
    pub fn peak(&self) -> MemoryBytes {
        self.0.lock().peak
    }

    /// Starts a new peak measurement from what is alive now.
    pub fn reset_peak(&self) {
        let mut s = self.0.lock();
        s.peak = s.now;
    }
}

impl State {
    fn add(&mut self, kind: MemoryKind, bytes: u64) {
        *self.now.get_mut(kind) += bytes;
        let now = self.now.get(kind);
        let peak = self.peak.get_mut(kind);
        *peak = now.max(*peak);
    }
}

/// Memory counted by a [`Meter`] for as long as this lives.
pub struct Hold {
    meter: Arc<Meter>,
    kind: MemoryKind,
    bytes: u64,
    storage: Option<usize>,
}

impl Hold {
    /// Counts `bytes` more.
    pub fn grow(&mut self, bytes: u64) {
        debug_assert!(self.storage.is_none(), "a tensor does not grow");
        self.meter.0.lock().add(self.kind, bytes);
        self.bytes += bytes;
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        let mut s = self.meter.0.lock();
        let mut bytes = self.bytes;
        if let Some(storage) = self.storage {
            let key = (self.kind, storage);
            let entry = s.shared.get_mut(&key).expect("registered by hold_tensor");
            entry.0 -= 1;
            if entry.0 > 0 {
                return;
            }
            bytes = entry.1;
            s.shared.remove(&key);
        }
        *s.now.get_mut(self.kind) -= bytes;
    }
}
