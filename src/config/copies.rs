//! Where a run's copies in memory are.

use std::path::{PathBuf, absolute};

use super::Config;

impl Config {
    /// The folder of this run's copies, if it makes any. There is one for each folder of
    /// checkpoints, so that runs that follow each other under one supervisor do not meet.
    pub(crate) fn copies_folder(&self) -> Option<PathBuf> {
        let (folder, save) = (self.copies.as_ref()?, self.save.as_ref()?);
        let save = absolute(save).unwrap_or_else(|_| save.clone());
        let name = blake3::hash(save.as_os_str().as_encoded_bytes()).to_hex();
        (self.copy_every > 0).then(|| folder.join(&name[..16]))
    }

    /// Writers that a rank may have at work: one for checkpoints, one for copies.
    pub(crate) fn writers(&self) -> u64 {
        u64::from(self.save.is_some()) + u64::from(self.copies_folder().is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_folder_of_checkpoints_has_its_own() {
        let of = |save: &str, copy_every| {
            let (save, copies) = (Some(save.into()), Some("/mem".into()));
            Config { save, copies, copy_every, ..Config::default() }.copies_folder()
        };
        assert_eq!(of("a", 1), of(&format!("{}/a", std::env::current_dir().unwrap().display()), 2));
        assert_ne!(of("a", 1), of("b", 1));
        assert!(of("a", 1).unwrap().starts_with("/mem"));
        assert_eq!(of("a", 0), None);
    }
}
