//! What forwards have kept, out of memory and back.

use std::collections::{HashMap, HashSet};

use burn::tensor::Tensor;
use zeropp_core::files::ScratchFile;
use zeropp_core::meter::MemoryKind;
use zeropp_core::split::{AwayTensors, Saved, Vault};

use super::super::error::StepError;
use super::ModelWorker;

/// What a worker copies out of memory.
#[derive(Default)]
pub(super) struct Offload {
    /// Stages and micro-batches that the program copies out.
    out: HashSet<(usize, usize)>,
    /// Where to; none where nothing is.
    file: Option<ScratchFile>,
    /// What the forwards have kept that are to be copied out.
    vaults: HashMap<(usize, usize), Vault>,
    away: HashMap<(usize, usize), AwayTensors>,
}

const NO_FILE: &str = "a worker whose program copies activations out has a file for them";

impl ModelWorker {
    /// The same, which copies what the forwards of these stages and micro-batches keep to `file`
    /// where its program says so.
    pub fn copying_out(mut self, out: HashSet<(usize, usize)>, file: ScratchFile) -> Self {
        self.offload = Offload { out, file: Some(file), ..Offload::default() };
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

    pub(super) fn copy_out(&mut self, at: (usize, usize)) {
        let Offload { file, vaults, away, .. } = &mut self.offload;
        let vault = vaults.remove(&at).expect("a copy out follows its F");
        let file = file.as_mut().expect(NO_FILE);
        away.insert(at, AwayTensors::start_out(vault, file, &self.meter));
    }

    pub(super) fn drop_copied(&mut self, at: (usize, usize)) -> Result<(), StepError> {
        Ok(self.away(at).finish_out()?)
    }

    pub(super) fn copy_in(&mut self, at: (usize, usize)) {
        let Offload { file, away, .. } = &mut self.offload;
        let away = away.get_mut(&at).expect("a copy in follows one out");
        away.start_in(file.as_mut().expect(NO_FILE));
    }

    pub(super) fn have_copied(&mut self, at: (usize, usize)) -> Result<(), StepError> {
        let Offload { file, away, .. } = &mut self.offload;
        let away = away.remove(&at).expect("a copy in follows one out");
        Ok(away.finish_in(file.as_mut().expect(NO_FILE))?)
    }

    pub(super) fn away(&mut self, at: (usize, usize)) -> &mut AwayTensors {
        self.offload.away.get_mut(&at).expect("a copy was started")
    }

    /// What was copied out in forwards that are dropped is not wanted.
    pub(super) fn forget_copies(&mut self) {
        let Offload { file, vaults, away, .. } = &mut self.offload;
        vaults.clear();
        for (_, away) in away.drain() {
            away.forget(file.as_mut().expect(NO_FILE));
        }
    }
}
