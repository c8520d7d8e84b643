//! From the reports of all ranks to a checkpoint with its name.

use std::collections::BTreeMap;
use std::path::PathBuf;

use zeropp_data::tokens::{Fingerprint, Position};

use crate::error::{Checked, CheckpointError};
use crate::manifest::{Base, Manifest, SavedProgram};
use crate::store::Store;
use crate::under_way::{Save, SaveOutcome, UnderWay, WriterReport};

/// The manifest's facts about the run.
#[derive(Clone, Debug, Default)]
pub struct About {
    /// Its settings by key, each as in a TOML file.
    pub settings: BTreeMap<String, String>,
    /// Number of token ids of the model.
    pub vocabulary: usize,
    /// The data that it is trained on.
    pub data: Option<Fingerprint>,
    /// The origin of its parameters that do not train, where there are some.
    pub base: Option<Base>,
    /// The samples that it has taken of the data after the step.
    pub position: Option<Position>,
    /// The learning rate of the step.
    pub learning_rate: Option<f64>,
    /// The program that took the place of the planned one, where one did.
    pub program: Option<SavedProgram>,
}

fn not_written(step: u64, problem: String) -> CheckpointError {
    CheckpointError::NotWritten { step, problem }
}

/// The end of one save: from the parts that all ranks have written to the checkpoint's name. Until
/// then the save is [`UnderWay`].
pub struct Completion<'a> {
    /// Where it is saved.
    pub store: &'a Store,
    /// Who saves: what [`Store::begin`] was given.
    pub run: &'a str,
    /// Complete checkpoints that stay.
    pub keep: usize,
    /// The save that is to be completed.
    pub save: Save,
}

impl Completion<'_> {
    /// Prepares the checkpoint and publishes it, or removes what there is of it.
    pub fn finish(self, about: &About, reports: Vec<WriterReport>, of: &UnderWay) -> SaveOutcome {
        let prepared = self.prepare(about, reports);
        self.publish(prepared, of)
    }

    /// Writes the manifest beside the parts of all ranks, and flushes; the folder that has them.
    ///
    /// # Errors
    /// A rank that could not write its part, by its number; the file system's.
    pub fn prepare(&self, about: &About, reports: Vec<WriterReport>) -> Checked<PathBuf> {
        self.store.check_held()?;
        let Save { step, updates, loss, plateau, .. } = self.save;
        let mut manifest = Manifest::new(step, updates, about.vocabulary, about.settings.clone());
        for WriterReport { rank, written, .. } in reports {
            match written {
                Ok(written) => written.into_iter().for_each(|w| w.enter(&mut manifest)),
                Err(problem) => return Err(not_written(step, format!("rank {rank}: {problem}"))),
            }
        }
        manifest.data = about.data.clone();
        manifest.base = about.base.clone();
        manifest.position = about.position.clone();
        manifest.program = about.program.clone();
        manifest.set_learning_rate(about.learning_rate);
        manifest.set_validation_loss(loss);
        manifest.set_plateau(plateau);
        manifest.sort_pieces();
        let staging = self.store.begin(step, self.run)?;
        self.store.prepare(&staging, &manifest)?;
        Ok(staging)
    }

    /// Gives the checkpoint its name, if its ranks are still those of the run, and removes older
    /// ones; or removes what there is of it.
    pub fn publish(self, prepared: Checked<PathBuf>, of: &UnderWay) -> SaveOutcome {
        let Save { step, rotates, best, .. } = self.save;
        let published = prepared.and_then(|staging| {
            // The ranks that continue in place of these read what this may remove.
            let publish = || {
                self.store.publish(&staging, step)?;
                Ok(if rotates { self.store.retain(self.keep, best) } else { Vec::new() })
            };
            let gone = || Err(not_written(step, "its ranks are gone".into()));
            of.while_open(publish).unwrap_or_else(gone)
        });
        match published {
            Ok(left) => SaveOutcome { step, result: Ok(()), left },
            Err(error) => {
                self.store.give_up(step, self.run);
                SaveOutcome { step, result: Err(error), left: Vec::new() }
            }
        }
    }
}
