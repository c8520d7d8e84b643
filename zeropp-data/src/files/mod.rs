//! Files that a run is given: how text and data are opened, what tells one file from another, and
//! how what stands in them is printed; and how files are written that are to be whole.

mod escape;
mod foreign;
mod kept;
mod map;
mod output;
mod place;
mod regular;
mod room;
mod scratch;
mod toml_keys;
mod walk;
mod whole;
mod words;

pub use escape::{escaped, escaped_line, excerpt};
pub use foreign::{ForeignFile, foreign};
pub use kept::open_kept;
pub use map::Mapped;
pub use output::open_output;
pub use place::FilePlace;
pub use regular::{is_named, open_regular, read_text};
pub use room::{DiskRoom, room_in};
pub use scratch::{ScratchCopy, ScratchFile, ScratchPlace, copies_in_any_order, nameless};
pub use toml_keys::toml_keys;
pub use walk::{WalkError, files_below, is_hidden};
pub use whole::write_whole;
pub use words::in_words;
