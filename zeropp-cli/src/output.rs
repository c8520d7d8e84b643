//! The files that commands write with `--out`: never one that they read.

use std::path::{Path, PathBuf};

use zeropp_core::files::{FilePlace, write_whole};

use crate::failure::Failure;

/// The output must not be one of the inputs, under whatever name.
pub(crate) fn keep_inputs<'a>(
    out: &Path,
    inputs: impl IntoIterator<Item = &'a PathBuf>,
) -> Result<(), Failure> {
    let Ok(place) = FilePlace::new(out) else { return Ok(()) };
    let is_out = |path: &&PathBuf| FilePlace::new(path).is_ok_and(|input| input == place);
    match inputs.into_iter().find(is_out) {
        Some(input) => Err(Failure::bad_input(format!(
            "out = {}: is the file {} and would overwrite it; choose another",
            out.display(),
            input.display()
        ))),
        None => Ok(()),
    }
}

/// Writes a file, whole or not at all.
pub(crate) fn write(path: &Path, text: &[u8]) -> Result<(), Failure> {
    write_whole(path, |out| out.write_all(text)).map_err(|e| {
        Failure::bad_input(format!(
            "out = {}: cannot be written ({e}); choose a file in a folder you may write to",
            path.display()
        ))
    })
}
