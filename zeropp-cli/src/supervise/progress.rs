//! What a supervised command leaves behind as it goes on: its checkpoints and its metrics.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use zeropp::Config;
use zeropp::config::Resume;
use zeropp_core::files::open_regular;

/// Where the progress of a command shows.
pub(super) struct Watched {
    save: PathBuf,
    metrics: Option<PathBuf>,
    /// Whether it says how many samples a step has.
    pub(super) has_batch: bool,
}

impl Watched {
    /// Reads flags and configuration files of a command, of which a launcher's are a part.
    ///
    /// # Errors
    /// It does not save, or would begin anew, in words.
    pub(super) fn of(line: &[String]) -> Result<Watched, String> {
        // A command for a shell is one word of several.
        let words: Vec<&str> = line.iter().flat_map(|word| word.split_whitespace()).collect();
        let file = words.iter().filter(|word| word.ends_with(".toml"));
        let file = file.filter_map(|word| Config::load(Path::new(word)).ok()).next();
        let file = file.unwrap_or_default();
        let path = |key: &str| flag(&words, key).filter(|v| !v.is_empty()).map(PathBuf::from);
        let Some(save) = path("--save").or(file.save) else {
            return Err(
                "supervise: the command has no --save, a folder for checkpoints, so there \
                        would be nothing to go on from; add --save DIR --save-every N --resume"
                    .into(),
            );
        };
        if flag(&words, "--resume").is_none() && file.resume == Resume::No {
            return Err(
                "supervise: the command has no --resume, so it would begin anew each time; \
                        add --resume, with which it begins where nothing is saved, and goes on \
                        elsewhere"
                    .into(),
            );
        }
        let has_batch = flag(&words, "--global-batch").is_some() || file.global_batch.is_some();
        Ok(Watched { save, metrics: path("--metrics").or(file.metrics), has_batch })
    }

    /// The folder of checkpoints.
    pub(super) fn save(&self) -> &Path {
        &self.save
    }

    /// Step of the newest complete checkpoint.
    pub(super) fn newest(&self) -> Option<u64> {
        zeropp::saved(&self.save).ok().flatten()?.newest.map(|newest| newest.step)
    }

    /// What changes as the command goes on.
    pub(super) fn sign(&self) -> (Option<u64>, u64) {
        (self.newest(), self.metrics.as_ref().map_or(0, |path| bytes_of_steps(path)))
    }
}

/// Bytes of a metrics file that are steps'. What it says of a run comes with each start, whether
/// that goes on or not.
fn bytes_of_steps(path: &Path) -> u64 {
    let Ok(file) = open_regular(path) else { return 0 };
    let lines = BufReader::new(file).split(b'\n').map_while(Result::ok);
    lines.filter(|line| !line.starts_with(b"{\"run\"")).map(|line| line.len() as u64).sum()
}

/// The value of a flag, as `--key value` or `--key=value`; empty where nothing follows.
fn flag<'a>(words: &[&'a str], key: &str) -> Option<&'a str> {
    words.iter().enumerate().find_map(|(i, word)| match word.strip_prefix(key)? {
        "" => Some(words.get(i + 1).copied().unwrap_or("")),
        rest => rest.strip_prefix('='),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watched(line: &str) -> Result<Watched, String> {
        Watched::of(&line.split(' ').map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn a_command_must_save_and_resume() {
        let of = watched("mpirun -n 2 zeropp run --save=a/b --metrics m --resume=must").unwrap();
        assert_eq!((of.save, of.metrics), (PathBuf::from("a/b"), Some(PathBuf::from("m"))));
        let error = watched("zeropp run --resume").err().unwrap();
        assert!(error.contains("no --save"), "{error}");
        let error = watched("zeropp run --save-every 3 --resume").err().unwrap();
        assert!(error.contains("no --save"), "{error}");
        let error = watched("zeropp run --save c").err().unwrap();
        assert!(error.contains("no --resume"), "{error}");
        let shell = ["sh".into(), "-c".into(), "zeropp run --save c --resume".into()];
        assert!(Watched::of(&shell).is_ok());
    }

    /// Each start writes a line about itself, of one length or another.
    #[test]
    fn a_start_alone_is_no_progress() {
        let dir = tempfile::tempdir().unwrap();
        let metrics = dir.path().join("m");
        let (save, of) = (dir.path().join("c"), Some(metrics.clone()));
        let watched = Watched { save, metrics: of, has_batch: false };
        let sign = |text: &str| {
            std::fs::write(&metrics, text).unwrap();
            watched.sign()
        };
        let first = sign("{\"run\":{\"wall_time\":1.5}}\n{\"step\":1}\n");
        let again = "{\"run\":{\"wall_time\":1.5}}\n{\"step\":1}\n{\"run\":{\"wall_time\":2}}\n";
        assert_eq!(sign(again), first);
        assert_ne!(sign(&format!("{again}{{\"step\":2}}\n")), first);
    }

    #[test]
    fn a_file_may_say_so() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run.toml");
        std::fs::write(&path, "save = 'c'\nresume = true\nmetrics = 'm'\n").unwrap();
        let of = watched(&format!("zeropp run {}", path.display())).unwrap();
        assert_eq!((of.save, of.metrics), (dir.path().join("c"), Some(dir.path().join("m"))));
    }
}
