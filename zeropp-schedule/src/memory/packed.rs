//! What a ledger counts of weights that are packed as products read them.

use super::{Ledger, StageBytes};
use crate::ir::Compute;

/// Which copies there are of a gathered stage, by the constants below.
#[derive(Clone, Copy, Default)]
pub(super) struct Packed([bool; 5]);

const FORWARD: usize = 0;
const OUTPUT: usize = 1;
const REDONE: usize = 2;
const BACKWARD: usize = 3;
const IN_FORWARD: usize = 4;

impl Packed {
    /// Their bytes.
    pub(super) fn bytes(self, stage: &StageBytes) -> u64 {
        let StageBytes { packed_forward, packed_output, packed_redone, .. } = *stage;
        let StageBytes { packed_backward, packed_in_forward, .. } = *stage;
        let sizes =
            [packed_forward, packed_output, packed_redone, packed_backward, packed_in_forward];
        let held = self.0.into_iter().zip(sizes).filter(|(is, _)| *is);
        held.map(|(_, bytes)| bytes).sum()
    }
}

impl Ledger<'_> {
    /// The first products since the gather leave these copies of the stage's weights, whose F is
    /// `recomputed` or not.
    pub(super) fn pack(&mut self, kind: Compute, stage: usize, recomputed: bool) {
        let bytes = self.of_stage(stage);
        let makes_gradients = !self.forward_only && !recomputed;
        let Some(packed) = &mut self.packed[stage] else { return };
        let before = packed.bytes(&bytes);
        let made: &[usize] = match kind {
            Compute::F if makes_gradients => &[FORWARD, OUTPUT, REDONE, IN_FORWARD],
            Compute::F => &[FORWARD, OUTPUT, REDONE],
            Compute::R => &[FORWARD, IN_FORWARD],
            Compute::B | Compute::BW if recomputed => &[REDONE, BACKWARD],
            Compute::B | Compute::BW => &[BACKWARD],
            Compute::W => &[],
        };
        made.iter().for_each(|which| packed.0[*which] = true);
        self.now.packed_weights += packed.bytes(&bytes) - before;
    }
}
