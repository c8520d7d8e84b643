//! A checkpoint that has been found whole, to read from.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use super::error::{Checked, CheckpointError, damaged, io};
use super::file::{Kind, Places, measure, places, read_values};
use super::manifest::{FileRecord, MANIFEST, Manifest};

/// A complete, undamaged checkpoint.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    path: PathBuf,
    manifest: Manifest,
    files: BTreeMap<String, Places>,
}

impl Checkpoint {
    /// Opens the folder and checks size, digest and contents of every file.
    ///
    /// # Errors
    /// The first file that is missing, cannot be read or is not what was written.
    pub fn open(path: &Path) -> Checked<Checkpoint> {
        let manifest_path = path.join(MANIFEST);
        let bytes = std::fs::read(&manifest_path).map_err(io("read", &manifest_path))?;
        let manifest = Manifest::from_bytes(&bytes, &manifest_path)?;
        let names: Vec<&String> = manifest.files.keys().collect();
        let found = in_parallel(&names, |name| {
            let file = path.join(name);
            check_file(&file, &manifest.files[*name])?;
            places(&file)
        });
        let mut files = BTreeMap::new();
        for (name, places) in names.into_iter().zip(found) {
            files.insert(name.clone(), places?);
        }
        let checkpoint = Checkpoint { path: path.to_path_buf(), manifest, files };
        checkpoint.check_tensors()?;
        Ok(checkpoint)
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its table.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Checks that it has exactly these parameters with these shapes.
    ///
    /// # Errors
    /// The first parameter, by name, that differs, with both shapes.
    pub fn check_model<'a>(
        &self,
        model: impl IntoIterator<Item = (&'a str, &'a [usize])>,
    ) -> Checked<()> {
        let model: BTreeMap<&str, &[usize]> = model.into_iter().collect();
        let mismatch =
            |problem| Err(CheckpointError::Mismatch { path: self.path.clone(), problem });
        for (name, shape) in &model {
            match self.manifest.parameters.get(*name) {
                None => {
                    return mismatch(format!("the model's {name} {shape:?} is not in it"));
                }
                Some(p) if p.shape != *shape => {
                    let theirs = &p.shape;
                    return mismatch(format!(
                        "{name} is {shape:?} in the model and {theirs:?} in the checkpoint"
                    ));
                }
                Some(_) => {}
            }
        }
        for (name, p) in &self.manifest.parameters {
            if !model.contains_key(name.as_str()) {
                return mismatch(format!("its {name} {:?} is not in the model", p.shape));
            }
        }
        Ok(())
    }

    /// Every piece is in its file, three times over, and nothing else is.
    fn check_tensors(&self) -> Checked<()> {
        let mut expected: HashMap<&str, usize> = HashMap::new();
        for (name, parameter) in &self.manifest.parameters {
            for piece in &parameter.pieces {
                for tensor in Kind::ALL.map(|kind| kind.tensor(name)) {
                    let found = self.files[&piece.file].get(&tensor).map(|place| place.1);
                    if found != Some(piece.len) {
                        let found = found.map_or("is missing".into(), |n| format!("has {n}"));
                        let problem = format!("{tensor}, {} elements, {found}", piece.len);
                        return Err(damaged(&self.path.join(&piece.file), problem));
                    }
                    *expected.entry(&piece.file).or_default() += 1;
                }
            }
        }
        for (file, places) in &self.files {
            let expected = expected.get(file.as_str()).copied().unwrap_or(0);
            if places.len() != expected {
                let problem = format!("{} tensors instead of {expected}", places.len());
                return Err(damaged(&self.path.join(file), problem));
            }
        }
        Ok(())
    }

    pub(super) fn reader(&self) -> Reader<'_> {
        Reader { checkpoint: self, open: HashMap::new() }
    }
}

/// Reads ranges of parameters; keeps the files it needs open.
pub(super) struct Reader<'a> {
    checkpoint: &'a Checkpoint,
    open: HashMap<&'a str, File>,
}

impl Reader<'_> {
    /// Elements `offset..offset + out.len()` of the parameter's `kind`.
    pub(super) fn read(
        &mut self,
        kind: Kind,
        name: &str,
        offset: usize,
        out: &mut [f32],
    ) -> Checked<()> {
        let checkpoint = self.checkpoint;
        let parameter = &checkpoint.manifest.parameters[name];
        let end = offset + out.len();
        // Pieces are sorted and without gaps.
        let first = parameter.pieces.partition_point(|p| p.offset + p.len <= offset);
        for piece in parameter.pieces[first..].iter().take_while(|p| p.offset < end) {
            let (a, b) = (piece.offset.max(offset), (piece.offset + piece.len).min(end));
            let (start, _) = checkpoint.files[&piece.file][&kind.tensor(name)];
            let path = checkpoint.path.join(&piece.file);
            let file = match self.open.entry(&piece.file) {
                std::collections::hash_map::Entry::Occupied(e) => e.into_mut(),
                std::collections::hash_map::Entry::Vacant(e) => {
                    e.insert(File::open(&path).map_err(io("read", &path))?)
                }
            };
            let from = start + 4 * (a - piece.offset) as u64;
            read_values(file, from, &mut out[a - offset..b - offset]).map_err(io("read", &path))?;
        }
        Ok(())
    }
}

fn check_file(path: &Path, record: &FileRecord) -> Checked<()> {
    let size = std::fs::metadata(path).map_err(io("read", path))?.len();
    if size != record.bytes {
        let problem = format!("{size} bytes instead of {}", record.bytes);
        return Err(damaged(path, problem));
    }
    if measure(path)?.blake3 != record.blake3 {
        return Err(damaged(path, "its content does not match its digest in the manifest"));
    }
    Ok(())
}

/// `f` of every item, in order, on as many threads as there are cores.
fn in_parallel<T: Sync, R: Send>(items: &[T], f: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let work = || {
        let mut done = Vec::new();
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(at) else { return done };
            done.push((at, f(item)));
        }
    };
    let mut results: Vec<(usize, R)> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..cores.min(items.len())).map(|_| scope.spawn(work)).collect();
        threads.into_iter().flat_map(|t| t.join().expect("reading does not panic")).collect()
    });
    results.sort_by_key(|(at, _)| *at);
    results.into_iter().map(|(_, r)| r).collect()
}
