//! Files of a supervised command as it goes on: its checkpoints and its metrics.

use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use zeropp::Config;
use zeropp::config::Resume;
use zeropp_checkpoint::Store;
use zeropp_core::files::open_regular;

/// Beginning of a line of the metrics that is of a run, and not of a step.
const RUN_LINE: &[u8] = b"{\"run\"";

/// Where the progress of a command shows.
pub(super) struct ProgressFiles {
    save: PathBuf,
    metrics: Option<PathBuf>,
    /// Whether it says how many samples a step has.
    pub(super) has_batch: bool,
}

impl ProgressFiles {
    /// Reads flags and configuration files of a command, of which a launcher's are a part.
    ///
    /// # Errors
    /// It does not save, or would begin anew, in words.
    pub(super) fn of(line: &[String]) -> Result<ProgressFiles, String> {
        let words = words_of(line);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
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
        goes_on(&words, file.resume)?;
        let has_batch = flag(&words, "--global-batch").is_some() || file.global_batch.is_some();
        Ok(ProgressFiles { save, metrics: path("--metrics").or(file.metrics), has_batch })
    }

    /// Step of the newest complete checkpoint.
    pub(super) fn newest(&self) -> Option<u64> {
        // Without a look at its lock, which a run that begins would find taken.
        Store::new(&self.save).steps().ok()?.last().copied()
    }

    /// A value that changes as the command goes on.
    pub(super) fn sign(&self) -> (Option<u64>, u64) {
        (self.newest(), self.metrics.as_ref().map_or(0, |path| bytes_of_steps(path)))
    }
}

/// Bytes of a metrics file that are steps'. What it says of a run comes with each start, whether
/// that goes on or not.
fn bytes_of_steps(path: &Path) -> u64 {
    let Ok(file) = open_regular(path) else { return 0 };
    let lines = BufReader::new(file).split(b'\n').map_while(Result::ok);
    lines.filter(|line| !line.starts_with(RUN_LINE)).map(|line| line.len() as u64).sum()
}

/// Bytes of the whole lines in `text` that are steps', and of all whole lines.
fn whole_lines(text: &[u8]) -> (usize, usize) {
    let Some(end) = text.iter().rposition(|byte| *byte == b'\n') else { return (0, 0) };
    let lines = text[..end].split(|byte| *byte == b'\n');
    let steps = lines.filter(|line| !line.starts_with(RUN_LINE));
    (steps.map(<[u8]>::len).sum(), end + 1)
}

/// Looks again and again whether a command has gone on, and reads only what is new.
pub(super) struct ProgressWatch<'a> {
    watched: &'a ProgressFiles,
    newest: Option<u64>,
    /// Bytes of the metrics that were looked at.
    seen: u64,
}

impl<'a> ProgressWatch<'a> {
    /// From now on.
    pub(super) fn new(watched: &'a ProgressFiles) -> ProgressWatch<'a> {
        let mut look = ProgressWatch { watched, newest: watched.newest(), seen: 0 };
        look.seen = look.length();
        look
    }

    fn length(&self) -> u64 {
        let meta = self.watched.metrics.as_ref().and_then(|path| std::fs::metadata(path).ok());
        meta.map_or(0, |meta| meta.len())
    }

    /// Whether there is a new checkpoint, or a new line of a step, since the last look.
    pub(super) fn has_gone_on(&mut self) -> bool {
        let newest = self.watched.newest();
        let is_saved = std::mem::replace(&mut self.newest, newest) != newest;
        let length = self.length();
        // A run that goes on cuts what it does again, which is no step.
        self.seen = self.seen.min(length);
        is_saved | (length > self.seen && self.has_new_step())
    }

    fn has_new_step(&mut self) -> bool {
        let path = self.watched.metrics.as_ref();
        let Some(mut file) = path.and_then(|path| open_regular(path).ok()) else { return false };
        let mut text = Vec::new();
        let read = file.seek(SeekFrom::Start(self.seen)).and_then(|_| file.read_to_end(&mut text));
        let (of_steps, whole) = if read.is_ok() { whole_lines(&text) } else { (0, 0) };
        self.seen += whole as u64;
        of_steps > 0
    }
}

/// The words of a command. What follows `-c` is a shell's command, and has words of its own; any
/// other word is one, whatever blanks are in it.
fn words_of(line: &[String]) -> Vec<String> {
    let mut words = Vec::new();
    let mut is_script = false;
    for word in line {
        if is_script {
            words.extend(shell_words(word));
        } else {
            words.push(word.clone());
        }
        // Flags of one letter may stand together, as in `bash -lc`.
        let letters = word.strip_prefix('-').and_then(|letters| letters.strip_suffix('c'));
        is_script = letters.is_some_and(|rest| rest.bytes().all(|b| b.is_ascii_alphabetic()));
    }
    words
}

/// The words of a shell's command, as it would see them before it puts in what variables say.
fn shell_words(text: &str) -> Vec<String> {
    let mut words = Vec::new();
    let (mut word, mut quote): (Option<String>, Option<char>) = (None, None);
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match (quote, c) {
            (Some(begun), c) if c == begun => quote = None,
            (None, '\'' | '"') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            // A line that goes on in the next one.
            (None | Some('"'), '\\') => {
                let next = chars.next().filter(|next| *next != '\n');
                word.get_or_insert_default().extend(next);
            }
            (None, c) if c.is_whitespace() || ";&|()<>".contains(c) => words.extend(word.take()),
            (_, c) => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    words
}

/// The value of `--resume`, if it is there; it can only stand behind `=`.
fn resume<'a>(words: &[&'a str]) -> Option<&'a str> {
    words.iter().find_map(|word| match word.strip_prefix("--resume")? {
        "" => Some("true"),
        rest => rest.strip_prefix('='),
    })
}

/// # Errors
/// With these flags and this setting of its file a command would not go on from its newest
/// checkpoint, in words.
fn goes_on(words: &[&str], file: Resume) -> Result<(), String> {
    let value = resume(words).map_or_else(|| file.to_string(), str::to_owned);
    match value.as_str() {
        "true" | "must" => Ok(()),
        "false" if resume(words).is_none() => {
            Err("supervise: the command has no --resume, so it would begin anew each time; add \
             --resume, with which it begins where nothing is saved, and goes on elsewhere"
                .into())
        }
        value => Err(format!(
            "resume = {value}: after each failure the command has to go on from its newest \
             checkpoint, or what came since would be lost; use --resume"
        )),
    }
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

    fn watched(line: &str) -> Result<ProgressFiles, String> {
        ProgressFiles::of(&line.split(' ').map(str::to_owned).collect::<Vec<_>>())
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
    }

    /// At every recovery any other would go back to where the first start began.
    #[test]
    fn only_the_newest_checkpoint_is_gone_on_from() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run.toml");
        std::fs::write(&path, "save = 'c'\nresume = 12\n").unwrap();
        let file = format!("zeropp run {}", path.display());
        for flag in ["--resume", "--resume=true", "--resume=must"] {
            assert!(watched(&format!("{file} {flag}")).is_ok(), "{flag}");
        }
        for (line, value) in [
            ("zeropp run --save c --resume=5".to_owned(), "5"),
            ("zeropp run --save c --resume=false".to_owned(), "false"),
            (format!("{file} --resume=0"), "0"),
            (file, "12"),
        ] {
            let error = watched(&line).err().unwrap();
            let begin = format!("resume = {value}: after each failure");
            assert!(error.starts_with(&begin) && error.ends_with("; use --resume"), "{error}");
        }
    }

    #[test]
    fn a_word_may_have_blanks_and_a_shell_s_command_has_words() {
        let of = |line: &[&str]| {
            let line: Vec<String> = line.iter().map(|word| (*word).to_owned()).collect();
            ProgressFiles::of(&line).unwrap()
        };
        let plain = of(&["zeropp", "run", "--save", "my folder", "--metrics=a b", "--resume"]);
        assert_eq!(plain.save, PathBuf::from("my folder"));
        assert_eq!(plain.metrics, Some(PathBuf::from("a b")));
        for flag in ["-c", "-lc"] {
            let script = "cd x;zeropp run --save 'a b' --metrics=\"c \\\"d\"\\ e \\\n--resume;x";
            let shell = of(&["sh", flag, script]);
            assert_eq!(shell.save, PathBuf::from("a b"));
            assert_eq!(shell.metrics, Some(PathBuf::from("c \"d e")));
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("my run.toml");
        std::fs::write(&path, "save = 'my c'\nresume = true\n").unwrap();
        let file = of(&["zeropp", "run", path.to_str().unwrap()]);
        assert_eq!(file.save, dir.path().join("my c"));
    }

    #[test]
    fn a_look_sees_steps_and_checkpoints_and_no_starts() {
        let dir = tempfile::tempdir().unwrap();
        let (save, metrics) = (dir.path().join("c"), dir.path().join("m"));
        let watched = ProgressFiles { save, metrics: Some(metrics.clone()), has_batch: false };
        let mut text = "{\"run\":{}}\n{\"step\":1}\n".to_owned();
        std::fs::write(&metrics, &text).unwrap();
        let mut look = ProgressWatch::new(&watched);
        let mut adds = |part: &str| {
            text.push_str(part);
            std::fs::write(&metrics, &text).unwrap();
            look.has_gone_on()
        };
        assert!(!adds("") && !adds("{\"run\":{\"pp\":2}}\n"));
        assert!(!adds("{\"step\""), "half a line");
        assert!(adds(":2}\n") && !adds(""));
        std::fs::create_dir_all(watched.save.join("step-000002")).unwrap();
        assert!(!adds(""), "not complete");
        std::fs::write(watched.save.join("step-000002/manifest.json"), "").unwrap();
        assert!(adds("") && !adds(""));
        // A run that goes on removes steps, does them again and does one more.
        std::fs::write(&metrics, "{\"step\":1}\n").unwrap();
        assert!(!look.has_gone_on());
        std::fs::write(&metrics, "{\"step\":1}\n{\"step\":2}\n").unwrap();
        assert!(look.has_gone_on() && !look.has_gone_on());
    }

    /// Each start writes a line about itself, of one length or another.
    #[test]
    fn a_start_alone_is_no_progress() {
        let dir = tempfile::tempdir().unwrap();
        let metrics = dir.path().join("m");
        let (save, of) = (dir.path().join("c"), Some(metrics.clone()));
        let watched = ProgressFiles { save, metrics: of, has_batch: false };
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
