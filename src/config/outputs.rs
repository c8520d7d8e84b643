//! Whether the files a run is to write can be written, asked before it starts.

use std::fs::OpenOptions;
use std::path::{Path, PathBuf};

use super::{Config, ConfigError};
use zeropp_comm::launch::Job;

impl Config {
    /// Whether this process writes them, by the variables that `get` knows: of several processes
    /// rank 0's does. Others must not even try: a file that they find missing and remove again may
    /// be the one that rank 0's has just begun, and their host may not have its folder.
    pub(super) fn writes_outputs(&self, get: impl Fn(&str) -> Option<String>) -> bool {
        // What is wrong with the variables is told by whoever needs them.
        let Ok(options) = self.launch_options() else { return true };
        Job::from_vars(&options, get).map_or(true, |job| job.has_rank_0())
    }

    /// Checks that the metrics and trace files can be written and are nobody's input.
    ///
    /// Opens each for appending; a file that was not there is removed again.
    ///
    /// # Errors
    /// A file that cannot be opened, or is also the data or the other output.
    pub fn check_outputs(&self) -> Result<(), ConfigError> {
        let outputs = [("metrics", &self.metrics), ("trace", &self.trace)];
        for (field, path) in outputs.iter().filter_map(|(f, p)| Some((*f, p.as_deref()?))) {
            let existed = path.exists();
            OpenOptions::new().append(true).create(true).open(path).map_err(|e| {
                let problem = format!("cannot be written ({e})");
                ConfigError::value(field, path.display(), problem, advice(path))
            })?;
            let clash = self.clash(field, path);
            if !existed {
                // What was just created and cannot be removed does no harm.
                let _ = std::fs::remove_file(path);
            }
            clash?;
        }
        Ok(())
    }

    fn clash(&self, field: &str, path: &Path) -> Result<(), ConfigError> {
        let others = [("data", &self.data), ("metrics", &self.metrics), ("trace", &self.trace)];
        let same = |other: &PathBuf| other.canonicalize().ok() == path.canonicalize().ok();
        for (other, other_path) in others {
            if other != field && other_path.as_ref().is_some_and(same) {
                let problem = format!("is the file of `{other}` too and would overwrite it");
                return Err(ConfigError::value(
                    field,
                    path.display(),
                    problem,
                    "choose another file",
                ));
            }
        }
        Ok(())
    }
}

fn advice(path: &Path) -> String {
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty());
    match parent {
        _ if path.is_dir() => "it is a folder: name a file inside it".into(),
        Some(parent) if !parent.exists() => {
            format!("create the folder {} first, or choose another", parent.display())
        }
        _ => "choose a file in a folder you may write to".into(),
    }
}
