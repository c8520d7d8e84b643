//! The inputs of predictions from the settings, beside a layout.

use std::sync::Arc;

use burn::tensor::DType;
use zeropp_core::kernels::attention::keeps_probabilities;
use zeropp_core::kernels::balance::RouterLosses;
use zeropp_core::kernels::bf16::Packed;
use zeropp_core::layer::BatchShape;
use zeropp_core::optimizer::Out;
use zeropp_plan::bytes::RunState;
use zeropp_plan::layout::{ComputeSettings, Packing};
use zeropp_zero3::checkpoint::WRITER_BYTES;
use zeropp_zero3::rule::{ParameterGroups, UpdateRule};

use super::{Balance, Config, DeviceKind, OutStates, PackWeights, Precision};

impl Config {
    /// The type that ranks compute in, and gather weights in.
    pub(crate) fn compute_type(&self) -> DType {
        match self.precision {
            Precision::Fp32 | Precision::Tf32 => DType::F32,
            Precision::Bf16 => DType::BF16,
        }
    }

    /// The device and precision that ranks compute on, and in.
    pub fn compute(&self) -> ComputeSettings {
        let on_gpu = self.device != DeviceKind::Cpu;
        let dtype = self.compute_type();
        let fp32 = dtype == DType::F32;
        // Asked for where it counts alone: a path that is not there is refused for runs in bf16.
        let bytes = || Packed::element_bytes() as u64;
        ComputeSettings {
            on_gpu,
            element_bytes: dtype.size(),
            keeps_probabilities: fp32
                && !on_gpu
                && keeps_probabilities(self.seq)
                && !self.document_mask
                && self.dropout == 0.0,
            dropout: self.dropout > 0.0,
            redoes_outputs: false,
            packing: match self.pack_weights {
                _ if on_gpu || fp32 => Packing::Never,
                PackWeights::Off => Packing::Never,
                PackWeights::Auto => Packing::Auto(bytes()),
                PackWeights::On => Packing::Always(bytes()),
            },
        }
    }

    /// The losses that routers of experts add.
    pub(crate) fn router_losses(&self) -> RouterLosses {
        let weight = match self.balance {
            Balance::None | Balance::Bias => 0.0,
            Balance::MicroBatch | Balance::Sample => self.balance_weight.unwrap_or(0.01),
        };
        let samples = if self.balance == Balance::Sample { 1 } else { self.micro_batch_size };
        RouterLosses {
            balance: weight as f32,
            z: self.router_z.unwrap_or(0.0) as f32,
            group: samples * self.seq,
        }
    }

    /// Bytes of an element of gathered weights as the CPU's products read them; 0 where none are
    /// kept.
    pub(crate) fn packed_bytes(&self) -> u64 {
        let batches = self.micro_batches();
        let in_units = self.in_units() || self.slices() > 1;
        let of_a_gather = if in_units { self.unit() } else { batches };
        let slices = |samples: usize| samples.saturating_mul(self.slices());
        self.compute().packing.bytes(slices(batches), slices(of_a_gather))
    }

    /// A micro-batch of one sample of so many tokens.
    pub(crate) fn sample_of(&self, seq: usize) -> BatchShape {
        self.compute().batch(1, seq)
    }

    /// What of states is out of memory, where there are no other replicas; with `auto` what is out
    /// where memory is not short.
    pub(crate) fn states_out(&self) -> Out {
        match (&self.optimizer_out, self.optimizer_out_states) {
            (None, _) => Out::Nothing,
            (_, OutStates::All) => Out::All,
            (_, OutStates::Auto | OutStates::Moments) => Out::Moments,
        }
    }

    /// The bytes that a rank holds with the optimizer of these settings, beside what comes and goes
    /// with its program.
    pub fn run_state(&self) -> RunState {
        self.run_state_with(self.update_rule())
    }

    /// The same with this optimizer.
    pub(crate) fn run_state_with(&self, rule: Arc<dyn UpdateRule>) -> RunState {
        // How much is kept does not depend on what decays.
        let groups = ParameterGroups { rule, no_decay: None, ema: self.ema };
        let out = self.states_out();
        RunState {
            rule: groups.state_rule(),
            watched: self.log_layers > 0,
            save: (WRITER_BYTES + out.saving()) * self.writers(),
        }
    }
}
