//! A complete checkpoint, to read from: what is read is checked while it is read.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;

use crate::disk::{Disk, System};
use crate::error::{Checked, CheckpointError, damaged, unreadable};
use crate::file::{PARAMETER, StateReader, check_size, tensor_name};
use crate::kept::{EMA, StateTensor};
use crate::manifest::{MANIFEST, MANIFEST_BYTES_MAX, Manifest, Piece, SavedParameter};

/// A complete checkpoint. Its files are checked as they are read: each by the first reader of this
/// process that opens it.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    disk: Arc<dyn Disk>,
    path: PathBuf,
    manifest: Manifest,
    /// Files that a reader of this process has taken on to check.
    checked: Arc<Mutex<BTreeSet<String>>>,
}

impl Checkpoint {
    /// Opens the folder and reads its manifest.
    ///
    /// # Errors
    /// A manifest that is missing, cannot be read or is not what was written.
    pub fn open(path: &Path) -> Checked<Checkpoint> {
        Self::open_on(Arc::new(System), path)
    }

    pub(crate) fn open_on(disk: Arc<dyn Disk>, path: &Path) -> Checked<Checkpoint> {
        let manifest_path = path.join(MANIFEST);
        let mut bytes = Vec::new();
        let most = MANIFEST_BYTES_MAX;
        let read = disk.open(&manifest_path);
        let read = read.and_then(|file| file.take(most + 1).read_to_end(&mut bytes));
        if read.map_err(unreadable(&manifest_path))? as u64 > most {
            let problem = format!("it has more than {most} bytes, the most of a manifest");
            return Err(damaged(&manifest_path, problem));
        }
        let manifest = Manifest::from_bytes(&bytes, &manifest_path)?;
        Ok(Checkpoint { disk, path: path.to_path_buf(), manifest, checked: Arc::default() })
    }

    /// Checks that every file is there and has its size, without reading any: what is missing or
    /// cut short is known before a rank starts.
    ///
    /// # Errors
    /// The first file that is not.
    pub fn check_sizes(&self) -> Checked<()> {
        let mut files = self.manifest.files.iter();
        files.try_for_each(|(name, record)| check_size(&*self.disk, &self.path.join(name), record))
    }

    /// Reads all of it and compares the digest of every file.
    ///
    /// # Errors
    /// The first file that is not what was written.
    pub fn check_whole(&self) -> Checked<()> {
        let mut reader = self.reader();
        self.manifest.files.keys().try_for_each(|name| reader.file(name).map(drop))?;
        reader.finish()
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
                    return mismatch(format!(
                        "the model's {name} {shape:?} is not in the checkpoint"
                    ));
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
                return mismatch(format!(
                    "the checkpoint's {name} {:?} is not in the model",
                    p.shape
                ));
            }
        }
        Ok(())
    }

    /// Checks that an optimizer's state of each parameter is in it. A mean of the weights (EMA) may
    /// be missing, or be there without being used.
    ///
    /// # Errors
    /// The first parameter of which it has something else.
    pub fn check_kept(
        &self,
        rule: &str,
        kept: impl IntoIterator<Item = (String, Vec<StateTensor>)>,
    ) -> Checked<()> {
        let of_rule = |all: &[StateTensor]| {
            all.iter().filter(|kept| kept.name != EMA).cloned().collect::<Vec<_>>()
        };
        let names = |all: &[StateTensor]| match all.is_empty() {
            true => "nothing".to_owned(),
            false => all.iter().map(|kept| kept.name.as_str()).collect::<Vec<_>>().join(" and "),
        };
        for (name, wanted) in kept {
            let Some(parameter) = self.manifest.parameters.get(&name) else { continue };
            let (there, wanted) = (of_rule(&parameter.kept), of_rule(&wanted));
            if there != wanted {
                let problem = format!(
                    "the checkpoint has {} of {name}, and optimizer {rule} keeps {}; use the \
                     optimizer and the momentum it was saved with, or begin with its weights by \
                     init-from",
                    names(&there),
                    names(&wanted),
                );
                return Err(CheckpointError::Mismatch { path: self.path.clone(), problem });
            }
        }
        Ok(())
    }

    /// A reader of parameters, for those who train nothing.
    pub fn parameters(&self) -> ParameterReader<'_> {
        ParameterReader(self.reader(), PARAMETER)
    }

    /// A reader of the moving averages of the parameters in their place (EMA), if it has them.
    pub fn means(&self) -> Option<ParameterReader<'_>> {
        let has_mean = |p: &SavedParameter| p.kept.iter().any(|kept| kept.name == EMA);
        let all = self.manifest.parameters.values().all(has_mean);
        all.then(|| ParameterReader(self.reader(), EMA))
    }

    /// A reader of all that is in it.
    pub fn reader(&self) -> CheckpointReader<'_> {
        let mut tensors: HashMap<&str, Vec<PieceInFile<'_>>> = HashMap::new();
        for (name, parameter) in &self.manifest.parameters {
            for piece in &parameter.pieces {
                let of = PieceInFile { name, kept: &parameter.kept, piece };
                tensors.entry(&piece.file).or_default().push(of);
            }
        }
        CheckpointReader { checkpoint: self, tensors, open: HashMap::new() }
    }
}

/// Reads parameters, without moments, whichever pieces they are in.
pub struct ParameterReader<'a>(CheckpointReader<'a>, &'static str);

impl ParameterReader<'_> {
    /// Elements `offset..offset + out.len()` of the parameter `name`, in row-major order of its
    /// shape. They may be wrong until [`finish`](Self::finish) has found otherwise.
    ///
    /// # Errors
    /// A file that cannot be read or is not what was written.
    ///
    /// # Panics
    /// Panics for a name that is not in the manifest, and beyond the parameter's end.
    pub fn read(&mut self, name: &str, offset: usize, out: &mut [f32]) -> Checked<()> {
        self.0.read(self.1, name, offset, out)
    }

    /// Compares the digests of all files that were read from.
    ///
    /// # Errors
    /// The first file that is not what was written.
    pub fn finish(self) -> Checked<()> {
        self.0.finish()
    }
}

/// Where what ranks have of a run's state is read from.
pub trait StateSource {
    /// The words of `kept` for these elements of the parameter `name`; of a tensor of the whole
    /// parameter, all of it.
    ///
    /// # Errors
    /// A file that cannot be read or is not what was written.
    fn read_state(
        &mut self,
        kept: &StateTensor,
        name: &str,
        elements: Range<usize>,
        out: &mut [f32],
    ) -> Checked<()>;

    /// Whether it has this state of the parameter `name`.
    fn has(&self, kept: &StateTensor, name: &str) -> bool;
}

impl StateSource for CheckpointReader<'_> {
    /// # Panics
    /// As [`read`](Self::read), and where no block begins at the first element.
    fn read_state(
        &mut self,
        kept: &StateTensor,
        name: &str,
        elements: Range<usize>,
        out: &mut [f32],
    ) -> Checked<()> {
        let parameter = &self.checkpoint.manifest.parameters[name];
        let Range { start: offset, end } = elements;
        // Pieces are sorted and without gaps.
        let first = parameter.pieces.partition_point(|p| p.offset + p.len <= offset);
        let pieces =
            if kept.is_whole() { &parameter.pieces[..1] } else { &parameter.pieces[first..] };
        for piece in pieces.iter().take_while(|p| kept.is_whole() || p.offset < end) {
            let (a, b) = (piece.offset.max(offset), (piece.offset + piece.len).min(end));
            let file = self.file(&piece.file)?;
            let (start, _) = file.places()[&tensor_name(&kept.name, name)];
            let (skipped, here) = match kept.is_whole() {
                true => (0, 0..out.len()),
                false => {
                    (kept.words(a - piece.offset), kept.words(a - offset)..kept.words(b - offset))
                }
            };
            file.values(start + 4 * skipped as u64, &mut out[here])?;
        }
        Ok(())
    }

    fn has(&self, kept: &StateTensor, name: &str) -> bool {
        let parameter = self.checkpoint.manifest.parameters.get(name);
        parameter.is_some_and(|p| p.kept.contains(kept))
    }
}

/// Reads ranges of parameters; keeps the files it needs open.
pub struct CheckpointReader<'a> {
    checkpoint: &'a Checkpoint,
    /// Every piece, by file.
    tensors: HashMap<&'a str, Vec<PieceInFile<'a>>>,
    open: HashMap<&'a str, StateReader<'a>>,
}

/// A piece of a parameter, and what is kept of it.
struct PieceInFile<'a> {
    name: &'a str,
    kept: &'a [StateTensor],
    piece: &'a Piece,
}

impl<'a> CheckpointReader<'a> {
    /// Elements `offset..offset + out.len()` of what is called `kept` of the parameter. They may be
    /// wrong until [`finish`](Self::finish) has found that the files are what was written.
    ///
    /// # Errors
    /// A file that cannot be read or is not what was written.
    ///
    /// # Panics
    /// Panics for a name that is not in the manifest, and beyond the parameter's end.
    pub fn read(&mut self, kept: &str, name: &str, offset: usize, out: &mut [f32]) -> Checked<()> {
        self.read_state(&StateTensor::per_element(kept), name, offset..offset + out.len(), out)
    }

    fn file(&mut self, name: &'a str) -> Checked<&mut StateReader<'a>> {
        match self.open.entry(name) {
            Entry::Occupied(open) => Ok(open.into_mut()),
            Entry::Vacant(closed) => {
                let Checkpoint { disk, path, manifest, checked } = self.checkpoint;
                let checks = checked.lock().insert(name.to_owned());
                let file =
                    StateReader::open(&**disk, path.join(name), &manifest.files[name], checks)?;
                check_tensors(&file, self.tensors.get(name).map_or(&[][..], Vec::as_slice))?;
                Ok(closed.insert(file))
            }
        }
    }

    /// Compares the digests of the files that this reader is to check.
    ///
    /// # Errors
    /// The first file that is not what was written.
    pub fn finish(self) -> Checked<()> {
        self.open.into_values().try_for_each(StateReader::finish)
    }
}

/// Every piece is in its file, with all that is kept of it, and nothing else is.
fn check_tensors(file: &StateReader, pieces: &[PieceInFile<'_>]) -> Checked<()> {
    let mut expected = 0;
    for PieceInFile { name, kept, piece } in pieces {
        let state = kept.iter().map(|k| (&*k.name, k.words_in_piece(piece.offset, piece.len)));
        for (kept, len) in std::iter::once((PARAMETER, piece.len)).chain(state) {
            if len == 0 {
                continue;
            }
            expected += 1;
            let tensor = tensor_name(kept, name);
            let found = file.places().get(&tensor).map(|place| place.1);
            if found != Some(len) {
                let found = found.map_or("is missing".into(), |n| format!("has {n}"));
                return Err(file.damaged(format!("{tensor}, {len} elements, {found}")));
            }
        }
    }
    match file.places().len() {
        found if found == expected => Ok(()),
        found => Err(file.damaged(format!("{found} tensors instead of {expected}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::StateWriter;
    use crate::manifest::{Piece, SavedParameter};
    use crate::store::Store;

    const ALL: [&str; 3] = [PARAMETER, "exp_avg", "exp_avg_sq"];

    fn parameter(shape: Vec<usize>, pieces: Vec<Piece>) -> SavedParameter {
        SavedParameter {
            shape,
            kept: ALL[1..].iter().map(|name| StateTensor::per_element(name)).collect(),
            pieces,
        }
    }

    /// Elements of the parameter `w`, `[2, 5]`, in two files cut at 4; `v`, `[3]`, in the first.
    fn write(dir: &Path, change: impl Fn(&str, &mut Vec<(String, usize)>)) -> PathBuf {
        let store = Store::new(dir);
        let staging = store.begin(3, "a").unwrap();
        let mut manifest = Manifest::new(3, 3, 256, BTreeMap::new());
        let piece = |offset, len, file: &str| Piece { offset, len, file: file.into() };
        let w = vec![piece(0, 4, "a"), piece(4, 6, "b")];
        manifest.parameters.insert("w".into(), parameter(vec![2, 5], w));
        let v = vec![piece(0, 3, "a")];
        manifest.parameters.insert("v".into(), parameter(vec![3], v));
        for (file, pieces) in [("a", vec![("w", 0, 4), ("v", 0, 3)]), ("b", vec![("w", 4, 6)])] {
            let mut tensors = Vec::new();
            let mut values = Vec::new();
            for (k, kept) in ALL.into_iter().enumerate() {
                for (name, offset, len) in &pieces {
                    tensors.push((tensor_name(kept, name), *len));
                    values.extend((*offset..offset + len).map(|i| (100 * k + i) as f32));
                }
            }
            change(file, &mut tensors);
            let path = staging.join(file);
            let mut writer = StateWriter::create(&System, &path, &tensors).unwrap();
            let n = tensors.iter().map(|t| t.1).sum();
            values.resize(n, 0.0);
            writer.values(&values).unwrap();
            manifest.files.insert(file.into(), writer.finish().unwrap().sync().unwrap());
        }
        store.prepare(&staging, &manifest).unwrap();
        store.publish(&staging, 3).unwrap()
    }

    fn refusal(change: impl Fn(&str, &mut Vec<(String, usize)>)) -> String {
        let dir = tempfile::tempdir().unwrap();
        let checkpoint = Checkpoint::open(&write(dir.path(), change)).unwrap();
        checkpoint.check_sizes().unwrap();
        read_all(&checkpoint).unwrap_err().to_string()
    }

    fn read_all(checkpoint: &Checkpoint) -> Checked<()> {
        let mut reader = checkpoint.reader();
        reader.read(PARAMETER, "w", 0, &mut [0.0; 10])?;
        reader.finish()
    }

    #[test]
    fn a_manifest_beyond_any_use_is_not_read_to_its_end() {
        let dir = tempfile::tempdir().unwrap();
        let file = std::fs::File::create(dir.path().join(MANIFEST)).unwrap();
        file.set_len(1 << 40).unwrap();
        let error = Checkpoint::open(dir.path()).unwrap_err().to_string();
        assert!(error.contains("it has more than 268435456 bytes"), "{error}");
    }

    #[test]
    fn any_range_of_any_parameter_reads_back() {
        let dir = tempfile::tempdir().unwrap();
        let checkpoint = Checkpoint::open(&write(dir.path(), |_, _| ())).unwrap();
        let mut reader = checkpoint.reader();
        for (k, kept) in ALL.into_iter().enumerate() {
            for start in 0..10 {
                for end in start..=10 {
                    let mut out = vec![f32::NAN; end - start];
                    reader.read(kept, "w", start, &mut out).unwrap();
                    let expected: Vec<_> = (start..end).map(|i| (100 * k + i) as f32).collect();
                    assert_eq!(out, expected, "{kept} {start}..{end}");
                }
            }
        }
        let mut out = [0.0; 2];
        reader.read("exp_avg", "v", 1, &mut out).unwrap();
        assert_eq!(out, [101.0, 102.0]);
        reader.finish().unwrap();
    }

    #[test]
    fn a_file_is_checked_by_its_first_reader_and_only_if_it_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = write(dir.path(), |_, _| ());
        let mut bytes = std::fs::read(path.join("b")).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(path.join("b"), bytes).unwrap();
        let checkpoint = Checkpoint::open(&path).unwrap();
        checkpoint.check_sizes().unwrap();
        // Elements 0..4 of w are in the other file.
        let mut reader = checkpoint.reader();
        reader.read(PARAMETER, "w", 0, &mut [0.0; 4]).unwrap();
        reader.finish().unwrap();
        // The last byte is of another tensor than the one that is read.
        let error = read_all(&checkpoint).unwrap_err().to_string();
        assert!(error.contains("/b is damaged: its content does not match"), "{error}");
        read_all(&checkpoint).expect("another reader of the process has told of it");
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
            (vec![("w", [2, 5].as_slice())], "the checkpoint's v [3] is not in the model"),
            (
                vec![("w", [5, 2].as_slice()), ("v", &[3])],
                "w is [5, 2] in the model and [2, 5] in the checkpoint",
            ),
            (vec![("x", [1].as_slice())], "the model's x [1] is not in the checkpoint"),
        ] {
            let error = check(&model).unwrap_err();
            assert!(error.contains(message) && error.contains("step-000003"), "{error}");
        }
    }
}
