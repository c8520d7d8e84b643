//! Documents out of files and folders, in one order, in batches of some size.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};

use zeropp_data::files::{WalkError, files_below, open_regular};

use crate::error::{Checked, unreadable, wrong};
use crate::zst::Zst;

/// About so many bytes of text go to a thread at a time.
const BATCH_BYTES: usize = 256 << 10;
/// The longest document.
const DOCUMENT_BYTES_MAX: u64 = 1 << 30;

/// How a file holds documents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// The file is a document.
    Text,
    /// A document a line, in JSON.
    Lines,
    /// The same, compressed.
    LinesZst,
    /// A document a row.
    #[cfg(feature = "parquet")]
    Parquet,
}

/// Files of documents in their order.
#[derive(Clone, Debug)]
pub(crate) struct Corpus {
    files: Vec<(PathBuf, Kind)>,
    /// Bytes of each.
    sizes: Vec<u64>,
}

/// Documents of one file that follow each other.
pub(crate) struct Batch {
    /// From 0.
    pub(crate) number: u64,
    pub(crate) path: PathBuf,
    /// Whether each is a line of JSON.
    pub(crate) is_json: bool,
    /// The line of the first, from 1.
    pub(crate) line: usize,
    bytes: Vec<u8>,
    documents: Vec<Range<usize>>,
    /// Bytes of the input that are behind, this batch counted.
    pub(crate) behind: u64,
}

impl Batch {
    /// The documents as they stand in the file.
    pub(crate) fn documents(&self) -> impl Iterator<Item = &[u8]> {
        self.documents.iter().map(|range| &self.bytes[range.clone()])
    }
}

impl Corpus {
    /// All files of these inputs; those of a folder in the order of their paths. `.jsonl` and
    /// `.jsonl.zst` are lines, `.parquet` rows that count as lines of JSON if the feature `parquet`
    /// is there, what else is compressed is refused, and the rest is text.
    pub(crate) fn new(inputs: &[PathBuf]) -> Checked<Corpus> {
        let mut files = Vec::new();
        for input in inputs {
            let is_folder = std::fs::metadata(input).map_err(unreadable(input))?.is_dir();
            let found = match is_folder {
                true => files_below(input)
                    .map_err(|WalkError { path, source }| unreadable(&path)(source))?,
                false => vec![input.clone()],
            };
            if found.is_empty() {
                return Err(wrong(input, "the folder has no files", "put text into it"));
            }
            for path in found {
                let kind = kind(&path)?;
                files.push((path, kind));
            }
        }
        let size = |(path, _): &(PathBuf, Kind)| {
            Ok(open_regular(path).and_then(|f| f.metadata()).map_err(unreadable(path))?.len())
        };
        let sizes = files.iter().map(size).collect::<Checked<_>>()?;
        Ok(Corpus { files, sizes })
    }

    /// Bytes of all files.
    pub(crate) fn bytes(&self) -> u64 {
        self.sizes.iter().sum()
    }

    /// What tells this corpus from another: names, sizes and times of all files.
    pub(crate) fn describe(&self, hasher: &mut blake3::Hasher) {
        for ((path, _), size) in self.files.iter().zip(&self.sizes) {
            let modified = std::fs::metadata(path).and_then(|m| m.modified()).ok();
            hasher.update(format!("{path:?} {size} {modified:?}\n").as_bytes());
        }
    }

    /// Hands all batches to `take`, in their order, until it has enough.
    pub(crate) fn batches(&self, mut take: impl FnMut(Batch) -> bool) -> Checked<()> {
        let (mut number, mut behind) = (0, 0);
        for ((path, kind), size) in self.files.iter().zip(&self.sizes) {
            let mut batches = Batches { path, number, behind, line: 1, take: &mut take };
            let file = open_regular(path).map_err(unreadable(path))?;
            let enough = match kind {
                Kind::Text => batches.text(file)?,
                Kind::Lines => batches.lines(&mut BufReader::with_capacity(1 << 20, file))?,
                Kind::LinesZst => {
                    let decoded = Zst::new(BufReader::with_capacity(1 << 20, file));
                    batches.lines(&mut BufReader::with_capacity(1 << 20, decoded))?
                }
                #[cfg(feature = "parquet")]
                Kind::Parquet => {
                    let rows = crate::rows::Rows::new(file).map_err(unreadable(path))?;
                    batches.lines(&mut BufReader::with_capacity(1 << 20, rows))?
                }
            };
            if enough {
                return Ok(());
            }
            number = batches.number;
            behind += size;
        }
        Ok(())
    }
}

/// The batches of one file.
struct Batches<'a, F> {
    path: &'a Path,
    number: u64,
    behind: u64,
    line: usize,
    take: &'a mut F,
}

impl<F: FnMut(Batch) -> bool> Batches<'_, F> {
    /// Hands on what is there; true where that is enough.
    fn hand_on(&mut self, bytes: &mut Vec<u8>, documents: &mut Vec<Range<usize>>) -> bool {
        if documents.is_empty() {
            return false;
        }
        let lines = documents.len();
        self.behind += bytes.len() as u64;
        let batch = Batch {
            number: self.number,
            path: self.path.into(),
            is_json: self.line > 0,
            line: self.line,
            bytes: std::mem::take(bytes),
            documents: std::mem::take(documents),
            behind: self.behind,
        };
        self.number += 1;
        self.line += lines;
        !(self.take)(batch)
    }

    fn text(&mut self, mut file: File) -> Checked<bool> {
        let mut bytes = Vec::new();
        let limit = DOCUMENT_BYTES_MAX + 1;
        (&mut file).take(limit).read_to_end(&mut bytes).map_err(unreadable(self.path))?;
        self.check_length(bytes.len())?;
        self.line = 0;
        let mut whole = vec![0..bytes.len()];
        Ok(self.hand_on(&mut bytes, &mut whole))
    }

    fn lines(&mut self, file: &mut dyn BufRead) -> Checked<bool> {
        let (mut bytes, mut documents) = (Vec::new(), Vec::new());
        loop {
            let start = bytes.len();
            let limited = &mut file.take(DOCUMENT_BYTES_MAX + 1);
            let n = limited.read_until(b'\n', &mut bytes).map_err(unreadable(self.path))?;
            self.check_length(n)?;
            if n == 0 {
                return Ok(self.hand_on(&mut bytes, &mut documents));
            }
            documents.push(start..bytes.len());
            if bytes.len() >= BATCH_BYTES && self.hand_on(&mut bytes, &mut documents) {
                return Ok(true);
            }
        }
    }

    fn check_length(&self, bytes: usize) -> Checked<()> {
        if bytes as u64 <= DOCUMENT_BYTES_MAX {
            return Ok(());
        }
        let problem = format!("it has a document of more than {DOCUMENT_BYTES_MAX} bytes");
        Err(wrong(self.path, problem, "cut it into documents, a line of .jsonl each"))
    }
}

fn kind(path: &Path) -> Checked<Kind> {
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
    let ends = |end: &str| name.ends_with(end);
    if [".jsonl", ".ndjson"].iter().any(|e| ends(e)) {
        return Ok(Kind::Lines);
    }
    if [".jsonl.zst", ".ndjson.zst"].iter().any(|e| ends(e)) {
        return Ok(Kind::LinesZst);
    }
    if ends(".parquet") {
        #[cfg(feature = "parquet")]
        return Ok(Kind::Parquet);
        #[cfg(not(feature = "parquet"))]
        return Err(wrong(
            path,
            "this build does not read parquet",
            "build zeropp-tokens with --features parquet, or write its rows as .jsonl",
        ));
    }
    if [".zst", ".gz", ".xz", ".bz2", ".zip", ".bin", ".idx"].iter().any(|e| ends(e)) {
        let problem = "files of this ending are not read as text";
        return Err(wrong(path, problem, "text, .jsonl and .jsonl.zst are read"));
    }
    Ok(Kind::Text)
}
