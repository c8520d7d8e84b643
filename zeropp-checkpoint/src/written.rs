//! A rank's part of a checkpoint, once written.

use serde::{Deserialize, Serialize};

use crate::error::Checked;
use crate::file::WrittenFile;
use crate::kept::StateTensor;
use crate::manifest::{FileRecord, Manifest, Piece, SavedParameter};

/// The pieces and file that a rank has written, for the manifest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WrittenState {
    file: String,
    record: FileRecord,
    pieces: Vec<WrittenPiece>,
}

/// Elements `offset..offset + len` of a parameter, and what is kept of them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WrittenPiece {
    /// The parameter's name.
    pub name: String,
    /// Its dimensions.
    pub shape: Vec<usize>,
    /// The tensors that the optimizer keeps of the parameter; the file has
    /// [`StateTensor::words_in_piece`] of each.
    pub kept: Vec<StateTensor>,
    /// First element, in row-major order of the shape.
    pub offset: usize,
    /// Number of elements.
    pub len: usize,
}

impl WrittenState {
    /// Bytes of its file.
    pub fn bytes(&self) -> u64 {
        self.record.bytes
    }

    /// Enters the file and its pieces. Ranks come in any order; [`Manifest::sort_pieces`] follows.
    pub(crate) fn enter(self, manifest: &mut Manifest) {
        for WrittenPiece { name, shape, kept, offset, len } in self.pieces {
            let entry = manifest.parameters.entry(name);
            let parameter =
                entry.or_insert_with(|| SavedParameter { shape, kept, pieces: Vec::new() });
            parameter.pieces.push(Piece { offset, len, file: self.file.clone() });
        }
        manifest.files.insert(self.file, self.record);
    }
}

/// State that is in its file, which is not yet durable.
pub struct UnsyncedState {
    written: WrittenFile,
    file: String,
    pieces: Vec<WrittenPiece>,
}

impl UnsyncedState {
    /// These pieces are in the file that is called `file`.
    pub fn new(written: WrittenFile, file: &str, pieces: Vec<WrittenPiece>) -> UnsyncedState {
        UnsyncedState { written, file: file.into(), pieces }
    }

    /// Makes the file durable.
    ///
    /// # Errors
    /// The file system's; what the file has is not known then.
    pub fn sync(self) -> Checked<WrittenState> {
        let record = self.written.sync()?;
        Ok(WrittenState { file: self.file, record, pieces: self.pieces })
    }
}
