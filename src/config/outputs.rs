//! Whether what a run is to write can be written, and is nothing that it reads: asked before it
//! starts.

use std::ffi::OsStr;
use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf};

use super::model::is_path;
use super::{Config, ConfigError};
use zeropp_comm::launch::ProcessJob;
use zeropp_core::files::{FilePlace, files_below, is_hidden};
use zeropp_weights::is_of_model;

type Checked = Result<(), ConfigError>;

/// A setting that names a file or folder.
#[derive(Clone, Copy)]
struct PathSetting<'a> {
    field: &'static str,
    path: &'a Path,
}

/// [`PathSetting`], and where that is.
struct OutputPath<'a> {
    field: &'static str,
    path: &'a Path,
    place: FilePlace,
}

impl Config {
    /// Whether this process writes them, by the variables that `get` knows: of several processes
    /// rank 0's does. Others must not even try: a file that they find missing and remove again may
    /// be the one that rank 0's has just begun, and their host may not have its folder.
    pub(super) fn writes_outputs(&self, get: impl Fn(&str) -> Option<String>) -> bool {
        // Errors in the variables are reported by the code that needs them.
        let Ok(options) = self.launch_options() else { return true };
        let job = ProcessJob::from_vars(&options, get);
        // The settings of a run that is yet to be planned may have no such part.
        let is_first = options.part.is_none_or(|part| part.place == 0);
        job.map_or(is_first, |job| job.has_rank_0())
    }

    /// Every file that a run reads.
    fn inputs(&self) -> Vec<PathSetting<'_>> {
        let files = [
            ("the configuration", self.file.as_deref()),
            ("data", self.data.as_deref()),
            ("eval-data", self.eval_data.as_deref()),
            ("schedule", self.schedule_file()),
            ("emulate", self.emulate.as_deref()),
            ("costs", self.costs.as_deref()),
            ("token-file", self.token_file.as_deref()),
            ("init-from", self.init_from.as_deref()),
        ];
        given(files)
    }

    /// [`inputs`](Self::inputs), the sources of `data-mix` and the file that describes the model.
    fn all_inputs(&self) -> Vec<(&'static str, PathBuf)> {
        let mixed = self.sources().unwrap_or_default().into_iter();
        let inputs = self.inputs().into_iter().map(|g| (g.field, g.path.to_path_buf()));
        let model = self.model_file().map(|path| ("model", path));
        let mut all: Vec<_> =
            inputs.chain(mixed.map(|(path, _)| ("data-mix", path))).chain(model).collect();
        // What says where the documents of such a file begin lies beside it.
        let indices = all.iter().filter(|(_, path)| path.extension().is_some_and(|e| e == "bin"));
        let indices = indices.map(|(field, path)| (*field, path.with_extension("idx")));
        let indices: Vec<_> = indices.filter(|(_, path)| path.is_file()).collect();
        all.extend(indices);
        all
    }

    /// Every file that a run writes.
    fn output_files(&self) -> Vec<PathSetting<'_>> {
        given([
            ("metrics", self.metrics.as_deref()),
            ("log-file", self.log_file.as_deref()),
            ("trace", self.trace.as_deref()),
            ("save-costs", self.save_costs.as_deref()),
        ])
    }

    /// Every folder that a run writes into.
    fn output_folders(&self) -> Vec<PathSetting<'_>> {
        // An empty one is none.
        let flight = self.flight_dir.as_deref().filter(|path| !path.as_os_str().is_empty());
        let events = self.tensorboard.as_deref();
        // What is out of memory has no names, and may share a folder.
        let states = self.states_folder();
        let states = states.filter(|folder| self.recompute_out.as_deref() != Some(*folder));
        given([
            ("save", self.save.as_deref()),
            ("copies", self.copies.as_deref()),
            ("flight-dir", flight),
            ("tensorboard", events),
            ("recompute:out", self.out_folder()),
            ("optimizer:out", states),
        ])
    }

    /// Checks that no path is empty, and none a name for standard input or output.
    pub(super) fn check_paths(&self) -> Checked {
        let (inputs, files) = (self.inputs(), self.output_files());
        for PathSetting { field, path } in
            inputs.into_iter().chain(files).chain(self.output_folders())
        {
            if path.as_os_str().is_empty() {
                let help = "name a file or folder, or leave it out";
                return Err(ConfigError::value(field, "\"\"", "the path is empty", help));
            }
            if path == Path::new("-") {
                let help = "name a file, or ./- for one of that name";
                let problem = match field {
                    "metrics" => "only the command writes metrics to standard output",
                    _ => "is no file here",
                };
                return Err(ConfigError::value(field, "-", problem, help));
            }
        }
        Ok(())
    }

    /// Checks that what the run writes can be written, is nothing that it reads, and no two
    /// outputs are the same; paths are compared by where they lead, through links of any kind.
    ///
    /// Opens the files for appending; one that was not there is removed again.
    ///
    /// # Errors
    /// The first that cannot be written, or is in the way of another.
    pub(crate) fn check_outputs(&self) -> Checked {
        self.check_outputs_beside(&[], &[])
    }

    /// The same with what a program reads and writes of its own beside the run, each with the words
    /// or the flag that messages call it by; on other processes than rank 0's it does nothing.
    ///
    /// # Errors
    /// As [`validate`](Self::validate) for the settings that name files.
    pub fn check_files(
        &self,
        reads: &[(&'static str, &Path)],
        writes: &[(&'static str, &Path)],
    ) -> Checked {
        match self.writes_outputs(|name| std::env::var(name).ok()) {
            true => self.check_outputs_beside(reads, writes),
            false => Ok(()),
        }
    }

    fn check_outputs_beside(
        &self,
        reads: &[(&'static str, &Path)],
        writes: &[(&'static str, &Path)],
    ) -> Checked {
        // Before any output is made, which might come to lie among the data.
        let data = self.data_files();
        let own = self.all_inputs();
        let own = own.iter().map(|(field, path)| PathSetting { field, path });
        let inputs = own.chain(reads.iter().map(|(field, path)| PathSetting { field, path }));
        let inputs = inputs.collect();
        let mut outputs = self.output_files();
        outputs.extend(writes.iter().map(|(field, path)| PathSetting { field, path }));
        let mut made = Vec::new();
        let checked = outputs.iter().try_for_each(|output| open(*output, &mut made));
        // Now that all are there, one file has one identity under all its names.
        let checked = checked.and_then(|()| self.check_clashes(inputs, outputs, &data, &made));
        for path in made {
            // What was just created and cannot be removed does no harm.
            let _ = fs::remove_file(path);
        }
        checked
    }

    fn check_clashes(
        &self,
        inputs: Vec<PathSetting>,
        outputs: Vec<PathSetting>,
        data: &[PathBuf],
        made: &[PathBuf],
    ) -> Checked {
        let (inputs, mut files) = (found(inputs), found(outputs));
        // What is written to a pipe or a device overwrites nothing.
        files.retain(|file| file.path.is_file());
        let folders = found(self.output_folders());
        let outputs = || files.iter().chain(&folders);
        for (i, output) in outputs().enumerate() {
            if let Some(other) = outputs().skip(i + 1).find(|other| other.place == output.place) {
                return output.clash(format!("is the file or folder of `{}` too", other.field));
            }
        }
        for output in &files {
            if let Some(input) = inputs.iter().find(|input| input.place == output.place) {
                return output
                    .clash(format!("is the file of {} too and would overwrite it", input));
            }
            let is_output = |path: &&PathBuf| FilePlace::new(path).is_ok_and(|p| p == output.place);
            if let Some(path) = data.iter().find(is_output) {
                let path = path.display();
                return output
                    .clash(format!("is the file {path} of `data` and would overwrite it"));
            }
        }
        check_apart_from_data(&inputs, outputs())?;
        let old = files
            .iter()
            .filter(|file| file.path.canonicalize().is_ok_and(|path| !made.contains(&path)));
        self.check_apart_from_models(old)?;
        check_apart_from_checkpoints(&folders, inputs.iter().chain(outputs()))
    }

    /// A model's files in a folder that it comes from, and all of checkpoints there, are not
    /// written. Other files are a run's own, of which a second start finds what the first wrote.
    fn check_apart_from_models<'a>(
        &self,
        mut files: impl Iterator<Item = &'a OutputPath<'a>>,
    ) -> Checked {
        let model = is_path(&self.model).then(|| Path::new(&self.model));
        let mut folders =
            found(given([("init-from", self.init_from.as_deref()), ("model", model)]));
        folders.retain(|folder| folder.path.is_dir());
        files.try_for_each(|file| {
            let reads = |model: &&OutputPath| {
                let inside = file.place.within(&model.place);
                inside.is_some_and(|inside| is_read_from(model.path, &inside))
                    || is_linked_from(model.path, &file.place)
            };
            let Some(model) = folders.iter().find(reads) else { return Ok(()) };
            let folder = model.path.display();
            file.clash(format!(
                "is a file of the model in the folder of `{}`, {folder}, and would be overwritten",
                model.field
            ))
        })
    }

    /// The files of a folder of data.
    fn data_files(&self) -> Vec<PathBuf> {
        // A folder that cannot be read is reported by the code that reads it.
        let below = |path: &PathBuf| path.is_dir().then(|| files_below(path).ok()).flatten();
        let mixed = self.sources().unwrap_or_default().into_iter().map(|(path, _)| path);
        let data = self.data.iter().chain(&self.eval_data).cloned().chain(mixed);
        data.filter_map(|path| below(&path)).flatten().collect()
    }
}

/// Whether a run that begins with the model in `folder` reads the file at `inside` it.
fn is_read_from(folder: &Path, inside: &Path) -> bool {
    // A folder that is a checkpoint itself, or one of several.
    let names = folder.file_name().into_iter().chain(inside.parent().into_iter().flatten());
    names.into_iter().any(is_checkpoint) || is_of_model(inside)
}

/// Whether a file of the model in `folder` is a link to what is at `place`, as in caches of models.
fn is_linked_from(folder: &Path, place: &FilePlace) -> bool {
    // A folder that cannot be read is reported by the code that reads it.
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut links = entries.map(|entry| entry.path()).filter(|path| path.is_symlink());
    links.any(|path| {
        is_of_model(&path) && FilePlace::new(&path).is_ok_and(|target| target == *place)
    })
}

/// Refuses outputs in a folder of data: the next run would train on them.
fn check_apart_from_data<'a>(
    inputs: &[OutputPath],
    mut outputs: impl Iterator<Item = &'a OutputPath<'a>>,
) -> Checked {
    let data: Vec<_> = inputs
        .iter()
        .filter(|input| ["data", "data-mix", "eval-data"].contains(&input.field))
        .collect();
    outputs.try_for_each(|output| {
        let holds = |data: &&&OutputPath| {
            let inside = output.place.within(&data.place);
            inside.is_some_and(|path| !path.iter().any(is_hidden))
        };
        let Some(data) = data.iter().find(holds) else { return Ok(()) };
        output.clash(format!(
            "lies in the folder of `{}`, {}, and the next run would train on what is written",
            data.field,
            data.path.display()
        ))
    })
}

/// Checkpoints come and go; nothing else may lie in one, or be its folder's lock.
fn check_apart_from_checkpoints<'a>(
    folders: &[OutputPath],
    mut all: impl Iterator<Item = &'a OutputPath<'a>>,
) -> Checked {
    let Some(save) = folders.iter().find(|folder| folder.field == "save") else { return Ok(()) };
    let is_checkpoints = |one: &&OutputPath| {
        let inside = one.place.within(&save.place).unwrap_or_default();
        inside.iter().next().is_some_and(|first| first == ".lock" || is_checkpoint(first))
    };
    match all.find(is_checkpoints) {
        Some(one) => one.clash(format!(
            "belongs to the checkpoints of save = {}, which come and go",
            save.path.display()
        )),
        None => Ok(()),
    }
}

/// Whether this is the name of a checkpoint's folder, or of one that is being written.
fn is_checkpoint(name: &OsStr) -> bool {
    let name = name.to_str().unwrap_or_default().trim_start_matches('.');
    let step = name.strip_prefix("step-").unwrap_or_default();
    step.starts_with(|c: char| c.is_ascii_digit())
}

impl OutputPath<'_> {
    fn clash(&self, problem: String) -> Checked {
        Err(ConfigError::value(self.field, self.path.display(), problem, "choose another"))
    }
}

impl std::fmt::Display for OutputPath<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.field.contains(' ') {
            true => f.write_str(self.field),
            false => write!(f, "`{}`", self.field),
        }
    }
}

fn given<'a, const N: usize>(
    settings: [(&'static str, Option<&'a Path>); N],
) -> Vec<PathSetting<'a>> {
    settings
        .into_iter()
        .filter_map(|(field, path)| Some(PathSetting { field, path: path? }))
        .collect()
}

/// Those whose places can be found.
fn found(given: Vec<PathSetting<'_>>) -> Vec<OutputPath<'_>> {
    let place = |PathSetting { field, path }| {
        Some(OutputPath { field, path, place: FilePlace::new(path).ok()? })
    };
    given.into_iter().filter_map(place).collect()
}

/// Tries to open an output; what had to be made for it joins `made`.
fn open(PathSetting { field, path }: PathSetting, made: &mut Vec<PathBuf>) -> Checked {
    let there = fs::metadata(path).ok();
    // A pipe or a device is left to the user who named it; opening a pipe would wait for its
    // reader.
    if there.as_ref().is_some_and(|there| !there.is_file() && !there.is_dir()) {
        return Ok(());
    }
    OpenOptions::new().append(true).create(true).open(path).map_err(|e| {
        let problem = format!("cannot be written ({e})");
        ConfigError::value(field, path.display(), problem, advice(path))
    })?;
    if there.is_none() {
        // Of a link to nowhere this is what was made, and not the link.
        made.extend(path.canonicalize());
    }
    Ok(())
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
