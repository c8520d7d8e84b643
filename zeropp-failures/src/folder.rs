//! Finding the records of one run in a folder that may hold others, and broken ones.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use zeropp_data::files::{escaped_line, read_text};

use super::record::Record;

/// Largest file of a record, in bytes. A rank keeps its last few hundred actions.
const FILE_BYTES_MAX: u64 = 64 << 20;

/// Folders that hold nothing to judge.
#[derive(Debug, thiserror::Error)]
pub enum FlightError {
    /// It cannot be read.
    #[error(
        "{}: cannot be read ({source}); name the folder that the failed run named",
        path.display()
    )]
    Unreadable {
        /// The folder or file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It has no records.
    #[error(
        "{folders}: no records of a failed run; a run leaves files NAME-rank0000.jsonl, unless it \
         ended well or all of it was killed at once"
    )]
    Empty {
        /// The folders.
        folders: String,
    },
    /// It has none of this run.
    #[error("run = {run}: not in {folders}, which has {there}")]
    NoSuchRun {
        /// The run asked for.
        run: String,
        /// The folders.
        folders: String,
        /// The runs that are there.
        there: String,
    },
}

/// The records of one run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Run {
    /// Its name.
    pub name: String,
    /// One record a rank, in rank order; some ranks may have left none.
    pub records: Vec<Record>,
    /// Files that are damaged, and how. Of some, a part is among the records.
    pub damaged: Vec<String>,
    /// Ranks whose records are not here, though they may have left some: their files cannot be
    /// read, or they are another process's, as seen from this one.
    pub unknown: Vec<usize>,
    /// Other runs in the same folders, oldest first.
    pub others: Vec<String>,
}

impl Run {
    /// Reads the records of `run`, or of the newest run, in `folders`: several where the ranks'
    /// machines have no folder in common.
    ///
    /// # Errors
    /// A folder that cannot be read, or no record of the run.
    pub fn read(folders: &[PathBuf], run: Option<&str>) -> Result<Run, FlightError> {
        let mut runs: BTreeMap<String, Vec<PathBuf>> = BTreeMap::new();
        for folder in folders {
            for path in files(folder)? {
                if let Some((run, _)) = path.file_name().and_then(|n| parse(n.to_str()?)) {
                    runs.entry(run).or_default().push(path);
                }
            }
        }
        let shown = || {
            let all: Vec<_> = folders.iter().map(|f| f.display().to_string()).collect();
            all.join(", ")
        };
        let mut names: Vec<String> = runs.keys().cloned().collect();
        names.sort_by_key(|name| (name.len(), name.clone()));
        let newest = names.last().ok_or_else(|| FlightError::Empty { folders: shown() })?;
        let name = run.unwrap_or(newest).to_string();
        let paths = runs.remove(&name).ok_or_else(|| FlightError::NoSuchRun {
            run: name.clone(),
            folders: shown(),
            there: names.join(", "),
        })?;
        let mut run = Run::of(name, &paths);
        let joined = run.join(&runs);
        names.retain(|other| *other != run.name && !joined.contains(other));
        Ok(Run { others: names, ..run })
    }

    fn of(name: String, paths: &[PathBuf]) -> Run {
        let mut run = Run { name, ..Run::default() };
        paths.iter().for_each(|path| run.add(path));
        run.records.sort_by_key(|record| record.header.rank);
        run.records.dedup_by_key(|record| record.header.rank);
        run
    }

    /// Adds what other processes of the job wrote that failed before they had met: each gave the
    /// run a name of its own. A try of the same job before this one had ended when this one began.
    /// Returns their names.
    fn join(&mut self, runs: &BTreeMap<String, Vec<PathBuf>>) -> Vec<String> {
        let Some(job) = self.records.first().map(|record| record.header.job.clone()) else {
            return Vec::new();
        };
        let Some((begin, end)) = self.time().filter(|_| !job.is_empty()) else { return Vec::new() };
        let mut joined = Vec::new();
        for (name, paths) in runs {
            let other = Run::of(name.clone(), paths);
            let at_once = other.time().is_some_and(|(b, e)| b <= end && begin <= e);
            let has = |rank| self.records.iter().any(|record| record.header.rank == rank);
            let joins = |r: &Record| r.header.job == job && !has(r.header.rank);
            if at_once && other.records.iter().all(joins) {
                self.damaged.extend(other.damaged);
                self.unknown.extend(other.unknown);
                self.records.extend(other.records);
                joined.push(other.name);
            }
        }
        self.records.sort_by_key(|record| record.header.rank);
        // Each knows its own process only.
        let known: Vec<_> = self.records.iter().map(|r| r.header.processes.clone()).collect();
        for (rank, process) in
            self.records.iter_mut().flat_map(|r| r.header.processes.iter_mut().enumerate())
        {
            let of = known.iter().filter_map(|all| all.get(rank));
            *process = of.max_by_key(|peer| peer.pid).cloned().unwrap_or_default();
        }
        joined
    }

    /// When the run began, by its name, and when its last rank ended, in nanoseconds since 1970.
    fn time(&self) -> Option<(u64, u64)> {
        let begin: u64 = self.name.split('-').next()?.parse().ok()?;
        let end = self.records.iter().map(|record| record.header.end.at_ns).max()?;
        Some((begin.saturating_mul(1_000_000_000), end))
    }

    fn add(&mut self, path: &Path) {
        // A file that is no record gives no evidence; the others may.
        let read = read_text(path, FILE_BYTES_MAX).map_err(|e| e.to_string());
        let shown = path.display();
        match read.and_then(|text| Record::read(text.as_bytes())) {
            Ok((record, problem)) => {
                self.damaged.extend(problem.map(|problem| format!("{shown}: {problem}")));
                if record.header.run == self.name {
                    self.records.push(record);
                } else {
                    self.damaged.push(format!("{shown}: says run {}", record.header.run));
                }
            }
            Err(problem) => {
                let name = path.file_name().and_then(|name| parse(name.to_str()?));
                self.unknown.extend(name.map(|(_, rank)| rank));
                self.damaged.push(format!("{shown}: {}", escaped_line(&problem)));
            }
        }
    }
}

fn files(folder: &Path) -> Result<Vec<PathBuf>, FlightError> {
    let unreadable = |source| FlightError::Unreadable { path: folder.into(), source };
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(unreadable)? {
        paths.push(entry.map_err(unreadable)?.path());
    }
    paths.sort();
    Ok(paths)
}

/// Run and rank of a record's file name.
fn parse(name: &str) -> Option<(String, usize)> {
    let (run, rank) = name.strip_suffix(".jsonl")?.rsplit_once("-rank")?;
    Some((run.to_string(), rank.parse().ok()?))
}
