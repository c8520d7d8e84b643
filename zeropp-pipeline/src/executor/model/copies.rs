//! What forwards have kept, out of memory and back.

use std::collections::{HashMap, HashSet};

use burn::tensor::Tensor;
use zeropp_core::meter::MemoryKind;
use zeropp_core::split::{AwayPlace, AwayTensors, Saved, Vault};

use super::super::error::StepError;
use super::ModelWorker;

/// What a worker copies out of memory.
#[derive(Default)]
pub(super) struct Offload {
    /// Stages and micro-batches that the program copies out.
    out: HashSet<(usize, usize)>,
    /// Where to; none where nothing is.
    place: Option<AwayPlace>,
    /// What the forwards have kept that are to be copied out.
    vaults: HashMap<(usize, usize), Vault>,
    away: HashMap<(usize, usize), AwayTensors>,
}

const NO_PLACE: &str = "a worker whose program copies activations out has a place for them";

impl ModelWorker {
    /// The same, which copies what the forwards of these stages and micro-batches keep to `place`
    /// where its program says so.
    pub fn copying_out(mut self, out: HashSet<(usize, usize)>, place: AwayPlace) -> Self {
        self.offload = Offload { out, place: Some(place), ..Offload::default() };
        self
    }

    /// Before a forward that keeps something: where it is to be copied out, it is noted.
    pub(super) fn begin_vault(&mut self, at: (usize, usize)) {
        if self.offload.out.contains(&at) {
            self.offload.vaults.insert(at, Vault::default());
        }
    }

    /// Keeps what a forward was given until B needs it; noted where that is copied out.
    pub(super) fn keep<const D: usize>(&self, at: (usize, usize), x: Tensor<D>) -> Saved<D> {
        let kept = Saved::new(x, MemoryKind::Activation, &self.meter);
        if let Some(vault) = self.vault(at) {
            vault.note(&kept);
        }
        kept
    }

    pub(super) fn vault(&self, at: (usize, usize)) -> Option<&Vault> {
        self.offload.vaults.get(&at)
    }

    pub(super) fn copy_out(&mut self, at: (usize, usize)) -> Result<(), StepError> {
        let Offload { place, vaults, away, .. } = &mut self.offload;
        let vault = vaults.remove(&at).expect("a copy out follows its F");
        let place = place.as_mut().expect(NO_PLACE);
        away.insert(at, AwayTensors::start_out(vault, place, &self.meter)?);
        Ok(())
    }

    pub(super) fn drop_copied(&mut self, at: (usize, usize)) -> Result<(), StepError> {
        Ok(self.away(at).finish_out()?)
    }

    pub(super) fn copy_in(&mut self, at: (usize, usize)) {
        self.away(at).start_in();
    }

    pub(super) fn have_copied(&mut self, at: (usize, usize)) -> Result<(), StepError> {
        let away = self.offload.away.remove(&at).expect("a copy in follows one out");
        Ok(away.finish_in()?)
    }

    pub(super) fn away(&mut self, at: (usize, usize)) -> &mut AwayTensors {
        self.offload.away.get_mut(&at).expect("a copy was started")
    }

    /// What was copied out in forwards that are dropped is not wanted.
    pub(super) fn forget_copies(&mut self) {
        self.offload.vaults.clear();
        self.offload.away.clear();
    }
}
