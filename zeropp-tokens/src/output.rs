//! Megatron's `.bin` and `.idx`, and of conversations a `.mask`, written so that a run that was
//! killed goes on.
//!
//! While it runs there are `.bin.partial`, `.lengths.partial` (i32 of each document), of
//! conversations `.mask.partial` (a byte of each id), and `.progress.json`, which says how much of
//! them is on disk and how many batches that were.

use std::fs::{self, File};
use std::io::{BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use zeropp_data::files::read_text;
use zeropp_data::tokens::LOSS_MASK_MAGIC;

use crate::error::{Checked, unreadable, unwritable, wrong};

/// Bytes of ids between two notes of the progress.
const NOTE_BYTES: u64 = if cfg!(test) { 1 } else { 64 << 20 };

/// The work that is done and on disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FinishedWork {
    /// The identity of the run: its inputs, tokenizer and settings.
    key: String,
    /// Batches that are done.
    pub(crate) batches: u64,
    /// Documents that are written.
    pub(crate) documents: u64,
    /// Ids that are written.
    pub(crate) tokens: u64,
    /// Ids of answers among them.
    #[serde(default)]
    pub(crate) answers: u64,
    /// Lines that are left out.
    #[serde(default)]
    pub(crate) bad_lines: u64,
}

/// How ids are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Width {
    U16,
    I32,
}

impl Width {
    /// Megatron's choice for so many ids.
    pub(crate) fn of(vocabulary: usize) -> Width {
        if vocabulary < 65_500 { Width::U16 } else { Width::I32 }
    }

    pub(crate) fn bytes(self) -> u64 {
        match self {
            Width::U16 => 2,
            Width::I32 => 4,
        }
    }

    fn code(self) -> u8 {
        match self {
            Width::U16 => 8,
            Width::I32 => 4,
        }
    }

    pub(crate) fn extend(self, ids: &[u32], out: &mut Vec<u8>) {
        match self {
            Width::U16 => out.extend(ids.iter().flat_map(|id| (*id as u16).to_le_bytes())),
            Width::I32 => out.extend(ids.iter().flat_map(|id| id.to_le_bytes())),
        }
    }
}

/// The files under way.
pub(crate) struct TokenFiles {
    out: PathBuf,
    width: Width,
    bin: File,
    lengths: File,
    scored: Option<File>,
    pub(crate) progress: FinishedWork,
    unnoted: u64,
}

/// `out` with another ending.
fn with_end(out: &Path, end: &str) -> PathBuf {
    PathBuf::from([out.as_os_str(), end.as_ref()].join("".as_ref()))
}

impl TokenFiles {
    /// Begins, or goes on where a run of the same `key` was killed.
    /// Conversations have a loss mask, too.
    pub(crate) fn open(out: &Path, key: String, width: Width, masked: bool) -> Checked<TokenFiles> {
        let at = |end: &str| with_end(out, end);
        let [bin, index, mask] = [".bin", ".idx", ".mask"].map(at);
        let note = at(".progress.json");
        let known = note.is_file().then(|| read_text(&note, 1 << 20)).transpose();
        let known = known.map_err(unreadable(&note))?;
        let known: Option<FinishedWork> = known.and_then(|text| serde_json::from_str(&text).ok());
        // A mask is looked for beside ids: an old one would be taken for one of these.
        let there = [&bin, &index, &mask].into_iter().find(|path| path.exists());
        if let (None, Some(path)) = (&known, there) {
            return Err(wrong(path, "it is there already", "name another, or remove it"));
        }
        let partial = at(".bin.partial");
        if known.is_some() && bin.exists() && !partial.exists() {
            // Killed between its two last steps.
            fs::rename(&bin, &partial).map_err(unwritable(&bin))?;
        }
        let stale = at(".mask.partial");
        let ours = known.as_ref().is_some_and(|p| p.key == key);
        // Of the run that was killed, which may have been another; `finish` writes the mask anew.
        for path in [Some(mask), (!ours).then_some(stale)].into_iter().flatten() {
            if path.exists() {
                fs::remove_file(&path).map_err(unwritable(&path))?;
            }
        }
        let known = known.filter(|p| p.key == key).unwrap_or_default();
        let progress = FinishedWork { key, ..known };
        let open = |end: &str, bytes: u64| {
            let path = at(end);
            let failed = || unwritable(&path);
            let mut options = File::options();
            let file = options.read(true).write(true).create(true).truncate(false).open(&path);
            let mut file = file.map_err(failed())?;
            let there = file.metadata().map_err(failed())?.len();
            if there < bytes {
                let problem = format!("it has {there} bytes of the {bytes} that were written");
                let help = format!("remove {} to begin anew", at(".progress.json").display());
                return Err(wrong(&path, problem, help));
            }
            file.set_len(bytes).map_err(failed())?;
            file.seek(SeekFrom::Start(bytes)).map_err(failed())?;
            Ok(file)
        };
        let bin = open(".bin.partial", progress.tokens * width.bytes())?;
        let lengths = open(".lengths.partial", progress.documents * 4)?;
        let scored = masked.then(|| open(".mask.partial", progress.tokens)).transpose()?;
        Ok(TokenFiles { out: out.into(), width, bin, lengths, scored, progress, unnoted: 0 })
    }

    fn at(&self, end: &str) -> PathBuf {
        with_end(&self.out, end)
    }

    /// Writes the ids and lengths of the next batch.
    pub(crate) fn batch(&mut self, ids: &[u8], lengths: &[i32], scored: &[u8]) -> Checked<()> {
        let raw: Vec<u8> = lengths.iter().flat_map(|n| n.to_le_bytes()).collect();
        self.bin.write_all(ids).map_err(unwritable(&self.at(".bin.partial")))?;
        self.lengths.write_all(&raw).map_err(unwritable(&self.at(".lengths.partial")))?;
        if let Some(file) = &mut self.scored {
            file.write_all(scored).map_err(unwritable(&with_end(&self.out, ".mask.partial")))?;
        }
        self.progress.answers += scored.iter().map(|one| u64::from(*one)).sum::<u64>();
        self.progress.batches += 1;
        self.progress.documents += lengths.len() as u64;
        self.progress.tokens += ids.len() as u64 / self.width.bytes();
        self.unnoted += ids.len() as u64;
        if self.unnoted >= NOTE_BYTES { self.note() } else { Ok(()) }
    }

    /// Puts all of it on disk and then says so.
    pub(crate) fn note(&mut self) -> Checked<()> {
        self.bin.sync_data().map_err(unwritable(&self.at(".bin.partial")))?;
        self.lengths.sync_data().map_err(unwritable(&self.at(".lengths.partial")))?;
        if let Some(scored) = &self.scored {
            scored.sync_data().map_err(unwritable(&self.at(".mask.partial")))?;
        }
        let (note, new) = (self.at(".progress.json"), self.at(".progress.json.new"));
        let text = serde_json::to_vec(&self.progress).expect("numbers");
        let write = || {
            let mut file = File::create(&new)?;
            file.write_all(&text)?;
            file.sync_all()?;
            fs::rename(&new, &note)
        };
        write().map_err(unwritable(&note))?;
        self.unnoted = 0;
        Ok(())
    }

    /// Removes what is under way.
    pub(crate) fn discard(self) -> Checked<()> {
        let ends = [".progress.json", ".bin.partial", ".lengths.partial", ".mask.partial"];
        for path in ends.map(|end| self.at(end)).iter().filter(|path| path.exists()) {
            fs::remove_file(path).map_err(unwritable(path))?;
        }
        Ok(())
    }

    /// Writes mask and index and gives the files their names, the index last.
    pub(crate) fn finish(mut self) -> Checked<FinishedWork> {
        self.note()?;
        let partial = self.at(".idx.partial");
        self.write_index(&partial).map_err(unwritable(&partial))?;
        let mask = self.at(".mask.new");
        if self.write_mask(&mask).map_err(unwritable(&mask))? {
            let to = self.at(".mask");
            fs::rename(&mask, &to).map_err(unwritable(&to))?;
        }
        for (from, to) in [(".bin.partial", ".bin"), (".idx.partial", ".idx")] {
            let to = self.at(to);
            fs::rename(self.at(from), &to).map_err(unwritable(&to))?;
        }
        let parent = self.out.parent().filter(|p| !p.as_os_str().is_empty());
        // Not every file system lets a folder be flushed.
        let _ = File::open(parent.unwrap_or(Path::new("."))).and_then(|folder| folder.sync_all());
        let mask = self.scored.as_ref().map(|_| ".mask.partial");
        for end in [".progress.json", ".lengths.partial"].into_iter().chain(mask) {
            let path = self.at(end);
            fs::remove_file(&path).map_err(unwritable(&path))?;
        }
        Ok(self.progress)
    }

    /// Writes the loss mask as `zeropp-data` reads it, a bit an id, if there is one.
    fn write_mask(&mut self, path: &Path) -> std::io::Result<bool> {
        let Some(scored) = &mut self.scored else { return Ok(false) };
        scored.seek(SeekFrom::Start(0))?;
        let mut scored = BufReader::with_capacity(1 << 20, scored).take(self.progress.tokens);
        let mut out = BufWriter::with_capacity(1 << 20, File::create(path)?);
        out.write_all(LOSS_MASK_MAGIC)?;
        out.write_all(&self.progress.tokens.to_le_bytes())?;
        let mut left = self.progress.tokens;
        while left > 0 {
            let (mut eight, n) = ([0; 8], left.min(8) as usize);
            scored.read_exact(&mut eight[..n])?;
            let byte = eight.iter().enumerate().fold(0, |byte, (i, one)| byte | one << i);
            out.write_all(&[byte])?;
            left -= n as u64;
        }
        out.into_inner().map_err(|e| e.into_error())?.sync_all()?;
        Ok(true)
    }

    fn write_index(&mut self, path: &Path) -> std::io::Result<()> {
        let documents = self.progress.documents;
        let mut out = BufWriter::with_capacity(1 << 20, File::create(path)?);
        out.write_all(b"MMIDIDX\0\0")?;
        out.write_all(&1u64.to_le_bytes())?;
        out.write_all(&[self.width.code()])?;
        out.write_all(&documents.to_le_bytes())?;
        out.write_all(&(documents + 1).to_le_bytes())?;
        self.each_length(|n| out.write_all(&n.to_le_bytes()))?;
        let (mut end, width) = (0i64, self.width.bytes() as i64);
        self.each_length(|n| {
            out.write_all(&end.to_le_bytes())?;
            end += i64::from(n) * width;
            Ok(())
        })?;
        for i in 0..=documents as i64 {
            out.write_all(&i.to_le_bytes())?;
        }
        out.into_inner().map_err(|e| e.into_error())?.sync_all()
    }

    fn each_length(
        &mut self,
        mut f: impl FnMut(i32) -> std::io::Result<()>,
    ) -> std::io::Result<()> {
        self.lengths.seek(SeekFrom::Start(0))?;
        let mut lengths = BufReader::with_capacity(1 << 20, &self.lengths);
        for _ in 0..self.progress.documents {
            let mut raw = [0; 4];
            lengths.read_exact(&mut raw)?;
            f(i32::from_le_bytes(raw))?;
        }
        Ok(())
    }
}
