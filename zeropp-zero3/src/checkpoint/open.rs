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

#[cfg(test)]
mod tests {
    use super::super::file::StateWriter;
    use super::super::manifest::{Parameter, Piece};
    use super::super::store::Store;
    use super::*;

    /// Elements of the parameter `w`, `[2, 5]`, in two files cut at 4; `v`, `[3]`, in the first.
    fn write(dir: &Path, change: impl Fn(&str, &mut Vec<(String, usize)>)) -> PathBuf {
        let store = Store::new(dir);
        store.begin(3).unwrap();
        let mut manifest = Manifest::new(3, 3, 256, BTreeMap::new());
        let piece = |offset, len, file: &str| Piece { offset, len, file: file.into() };
        let w = vec![piece(0, 4, "a"), piece(4, 6, "b")];
        manifest.parameters.insert("w".into(), Parameter { shape: vec![2, 5], pieces: w });
        let v = vec![piece(0, 3, "a")];
        manifest.parameters.insert("v".into(), Parameter { shape: vec![3], pieces: v });
        for (file, pieces) in [("a", vec![("w", 0, 4), ("v", 0, 3)]), ("b", vec![("w", 4, 6)])] {
            let mut tensors = Vec::new();
            let mut values = Vec::new();
            for (k, kind) in Kind::ALL.into_iter().enumerate() {
                for (name, offset, len) in &pieces {
                    tensors.push((kind.tensor(name), *len));
                    values.extend((*offset..offset + len).map(|i| (100 * k + i) as f32));
                }
            }
            change(file, &mut tensors);
            let path = store.staging(3).join(file);
            let mut writer = StateWriter::create(&path, &tensors).unwrap();
            let n = tensors.iter().map(|t| t.1).sum();
            values.resize(n, 0.0);
            writer.values(&values).unwrap();
            manifest.files.insert(file.into(), writer.finish().unwrap());
        }
        store.commit(&manifest).unwrap()
    }

    fn refusal(change: impl Fn(&str, &mut Vec<(String, usize)>)) -> String {
        let dir = tempfile::tempdir().unwrap();
        Checkpoint::open(&write(dir.path(), change)).unwrap_err().to_string()
    }

    #[test]
    fn any_range_of_any_parameter_reads_back() {
        let dir = tempfile::tempdir().unwrap();
        let checkpoint = Checkpoint::open(&write(dir.path(), |_, _| ())).unwrap();
        let mut reader = checkpoint.reader();
        for (k, kind) in Kind::ALL.into_iter().enumerate() {
            for start in 0..10 {
                for end in start..=10 {
                    let mut out = vec![f32::NAN; end - start];
                    reader.read(kind, "w", start, &mut out).unwrap();
                    let expected: Vec<_> = (start..end).map(|i| (100 * k + i) as f32).collect();
                    assert_eq!(out, expected, "{kind:?} {start}..{end}");
                }
            }
        }
        let mut out = [0.0; 2];
        reader.read(Kind::FirstMoment, "v", 1, &mut out).unwrap();
        assert_eq!(out, [101.0, 102.0]);
    }

    #[test]
    fn other_tools_read_the_files() {
        let dir = tempfile::tempdir().unwrap();
        let bytes = std::fs::read(write(dir.path(), |_, _| ()).join("b")).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let moment = file.tensor("exp_avg_sq/w").unwrap();
        assert_eq!((moment.shape(), moment.dtype()), ([6].as_slice(), safetensors::Dtype::F32));
        assert_eq!(moment.data()[..4], 204f32.to_le_bytes());
    }

    #[test]
    fn missing_superfluous_and_short_tensors_are_named() {
        let missing = refusal(|file, t| t.retain(|t| file == "a" || !t.0.starts_with("exp_avg/")));
        assert!(missing.contains("/b ") && missing.contains("exp_avg/w, 6 elements, is missing"));
        let more = refusal(|file, t| t.extend((file == "a").then(|| ("x".to_string(), 2))));
        assert!(more.contains("/a ") && more.contains("7 tensors instead of 6"), "{more}");
        let short = refusal(|file, t| t[0].1 -= usize::from(file == "b"));
        assert!(short.contains("parameter/w, 6 elements, has 5"), "{short}");
    }

    #[test]
    fn the_model_must_have_the_same_tensors() {
        let dir = tempfile::tempdir().unwrap();
        let checkpoint = Checkpoint::open(&write(dir.path(), |_, _| ())).unwrap();
        let check = |model: &[(&str, &[usize])]| {
            checkpoint.check_model(model.iter().copied()).map_err(|e| e.to_string())
        };
        assert_eq!(check(&[("w", &[2, 5]), ("v", &[3])]), Ok(()));
        assert_eq!(check(&[("w", &[2, 5]), ("v", &[3]), ("w", &[2, 5])]), Ok(()), "tied");
        for (model, message) in [
            (vec![("w", [2, 5].as_slice())], "its v [3] is not in the model"),
            (
                vec![("w", [5, 2].as_slice()), ("v", &[3])],
                "w is [5, 2] in the model and [2, 5] in the checkpoint",
            ),
            (vec![("x", [1].as_slice())], "the model's x [1] is not in it"),
        ] {
            let error = check(&model).unwrap_err();
            assert!(error.contains(message) && error.contains("step-000003"), "{error}");
        }
    }
}
