//! Documents out of files and folders, in one order, in batches of some size.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};

use zeropp_data::files::{ForeignFile, WalkError, files_below, foreign, open_regular};

use crate::error::{Checked, unreadable, wrong};
use crate::zst::Zst;

/// About so many bytes of text go to a thread at a time.
const BATCH_BYTES: usize = 256 << 10;
/// The longest document.
const DOCUMENT_BYTES_MAX: u64 = 1 << 30;
/// Bytes that are looked at for the kind of a file.
const FIRST_BYTES: u64 = 32;
/// The mark that some programs write before UTF-8.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// How a file holds documents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CorpusFormat {
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
    files: Vec<(PathBuf, CorpusFormat)>,
    /// Bytes of each.
    sizes: Vec<u64>,
    /// Files of folders that are left out, and what they are.
    left_out: Vec<(PathBuf, &'static str)>,
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
    /// is there, and the rest is text. What is no text is refused, and left out of a folder.
    pub(crate) fn new(inputs: &[PathBuf]) -> Checked<Corpus> {
        let (mut files, mut left_out) = (Vec::new(), Vec::new());
        for input in inputs {
            let is_folder = std::fs::metadata(input).map_err(unreadable(input))?.is_dir();
            if !is_folder {
                let found = kind(input)?.map_err(|ForeignFile { what, help }| {
                    wrong(input, format!("it is {what}, which is not read as text"), help)
                })?;
                files.push((input.clone(), found));
                continue;
            }
            let found = files_below(input)
                .map_err(|WalkError { path, source }| unreadable(&path)(source))?;
            let before = (files.len(), left_out.len());
            for path in found {
                match kind(&path)? {
                    Ok(kind) => files.push((path, kind)),
                    Err(ForeignFile { what, .. }) => left_out.push((path, what)),
                }
            }
            leave_out_cards(&mut files, before.0, &mut left_out);
            if files.len() == before.0 {
                let problem = match left_out.get(before.1) {
                    None => "the folder has no files".to_owned(),
                    Some((path, what)) => {
                        format!("the folder has no texts ({} is {what})", path.display())
                    }
                };
                return Err(wrong(input, problem, "put text into it, or .jsonl"));
            }
        }
        let size = |(path, _): &(PathBuf, CorpusFormat)| {
            Ok(open_regular(path).and_then(|f| f.metadata()).map_err(unreadable(path))?.len())
        };
        let sizes = files.iter().map(size).collect::<Checked<_>>()?;
        Ok(Corpus { files, sizes, left_out })
    }

    /// The files of the folders that are left out, in words.
    pub(crate) fn left_out(&self) -> Vec<String> {
        let one = |(path, what): &(PathBuf, &str)| {
            format!("{}: it is {what} and is left out", path.display())
        };
        self.left_out.iter().map(one).collect()
    }

    /// Bytes of all files.
    pub(crate) fn bytes(&self) -> u64 {
        self.sizes.iter().sum()
    }

    /// Adds what distinguishes this corpus from others: names, sizes and times of all files.
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
            let mut batches =
                Batches { path, number, behind, line: 1, is_begun: false, take: &mut take };
            let file = open_regular(path).map_err(unreadable(path))?;
            let enough = match kind {
                CorpusFormat::Text => batches.text(file)?,
                CorpusFormat::Lines => {
                    batches.lines(&mut BufReader::with_capacity(1 << 20, file))?
                }
                CorpusFormat::LinesZst => {
                    let decoded = Zst::new(BufReader::with_capacity(1 << 20, file));
                    batches.lines(&mut BufReader::with_capacity(1 << 20, decoded))?
                }
                #[cfg(feature = "parquet")]
                CorpusFormat::Parquet => {
                    let rows = crate::rows::TableRows::new(file).map_err(unreadable(path))?;
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
    /// Whether some of the file is read.
    is_begun: bool,
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
        let mut whole = vec![self.begin(&bytes)..bytes.len()];
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
            documents.push(start + self.begin(&bytes)..bytes.len());
            if bytes.len() >= BATCH_BYTES && self.hand_on(&mut bytes, &mut documents) {
                return Ok(true);
            }
        }
    }

    /// Bytes before the text of a file, of which these are the first; none later.
    fn begin(&mut self, bytes: &[u8]) -> usize {
        let is_marked = !self.is_begun && bytes.starts_with(BYTE_ORDER_MARK);
        self.is_begun = true;
        if is_marked { BYTE_ORDER_MARK.len() } else { 0 }
    }

    fn check_length(&self, bytes: usize) -> Checked<()> {
        if bytes as u64 <= DOCUMENT_BYTES_MAX {
            return Ok(());
        }
        let problem = format!("it has a document of more than {DOCUMENT_BYTES_MAX} bytes");
        Err(wrong(self.path, problem, "cut it into documents, a line of .jsonl each"))
    }
}

/// How a file holds documents, or what it is that holds none.
fn kind(path: &Path) -> Checked<Result<CorpusFormat, ForeignFile>> {
    let mut first = Vec::new();
    let mut file = open_regular(path).map_err(unreadable(path))?.take(FIRST_BYTES);
    file.read_to_end(&mut first).map_err(unreadable(path))?;
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
    let ends = |ends: &[&str]| ends.iter().any(|end| name.ends_with(end));
    if ends(&[".jsonl.zst", ".ndjson.zst"]) {
        return Ok(Ok(CorpusFormat::LinesZst));
    }
    if ends(&[".parquet"]) {
        #[cfg(feature = "parquet")]
        return Ok(Ok(CorpusFormat::Parquet));
        #[cfg(not(feature = "parquet"))]
        return Err(wrong(
            path,
            "this build does not read parquet",
            "build zeropp-tokens with --features parquet, or write its rows as .jsonl",
        ));
    }
    if ends(&[".jsonl", ".ndjson"]) {
        let by_bytes = foreign(Path::new(""), &first);
        return Ok(by_bytes.map_or(Ok(CorpusFormat::Lines), Err));
    }
    if ends(&[".bin", ".idx"]) {
        let (what, help) = ("of an ending that tokens have", "name text, or .jsonl");
        return Ok(Err(ForeignFile { what, help }));
    }
    Ok(foreign(path, &first).map_or(Ok(CorpusFormat::Text), Err))
}

/// The text about a data set that lies beside its lines is none of its documents.
fn leave_out_cards(
    files: &mut Vec<(PathBuf, CorpusFormat)>,
    first: usize,
    left_out: &mut Vec<(PathBuf, &'static str)>,
) {
    let has_lines = files[first..].iter().any(|(_, kind)| *kind != CorpusFormat::Text);
    let is_card = |path: &Path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
        ["readme", "license", "licence"].iter().any(|begin| name.starts_with(begin))
    };
    for (path, kind) in files.split_off(first) {
        match has_lines && kind == CorpusFormat::Text && is_card(&path) {
            true => left_out.push((path, "text about the data")),
            false => files.push((path, kind)),
        }
    }
}
