//! Where tokens come from.

use std::borrow::Cow;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::choice::Tokenizer;
use crate::data::DataError;

/// This project's own sources.
static BUILTIN: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/builtin.txt"));

/// First number of llm.c's header of 256 little-endian i32: {magic, version, tokens, 0…}.
const LLM_C_MAGIC: i32 = 20_240_520;
const LLM_C_VERSION: i32 = 1;
const LLM_C_HEADER_BYTES: usize = 1024;

/// Tokens in one row, all in memory.
#[derive(Clone, Debug)]
pub struct Dataset {
    tokens: Tokens,
    vocabulary: usize,
    origin: String,
}

#[derive(Clone, Debug)]
enum Tokens {
    Bytes(Cow<'static, [u8]>),
    Ids(Vec<u16>),
}

impl Dataset {
    /// The built-in text: zeropp's own sources, as bytes.
    pub fn builtin() -> Dataset {
        Dataset {
            tokens: Tokens::Bytes(Cow::Borrowed(BUILTIN)),
            vocabulary: 256,
            origin: "the built-in text".into(),
        }
    }

    /// These bytes as tokens.
    pub fn from_bytes(bytes: Vec<u8>) -> Dataset {
        Dataset {
            tokens: Tokens::Bytes(Cow::Owned(bytes)),
            vocabulary: 256,
            origin: "bytes in memory".into(),
        }
    }

    /// Reads a file, or all files of a folder in the order of the paths inside it.
    ///
    /// # Errors
    /// Data that cannot be read or is not what the tokenizer reads.
    pub fn open(path: &Path, tokenizer: Tokenizer) -> Result<Dataset, DataError> {
        let is_folder = fs::metadata(path).map_err(read_error(path))?.is_dir();
        let origin = path.display().to_string();
        match tokenizer {
            Tokenizer::Bytes => {
                let bytes = if is_folder { read_folder(path)? } else { read(path)? };
                Ok(Dataset { origin, ..Dataset::from_bytes(bytes) })
            }
            Tokenizer::U16 => {
                if is_folder {
                    let problem = "is a folder; tokenizer = u16 reads one .bin file";
                    return Err(malformed(path, problem));
                }
                let ids = parse_ids(&read(path)?).map_err(|problem| malformed(path, problem))?;
                let vocabulary = ids.iter().max().map_or(0, |id| usize::from(*id) + 1);
                Ok(Dataset { tokens: Tokens::Ids(ids), vocabulary, origin })
            }
        }
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        match &self.tokens {
            Tokens::Bytes(bytes) => bytes.len(),
            Tokens::Ids(ids) => ids.len(),
        }
    }

    /// Whether there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of token ids: 256 for bytes, one more than the largest in a file of ids.
    pub fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    /// Where the tokens come from, as messages call it.
    pub fn origin(&self) -> &str {
        &self.origin
    }

    /// The token at `position`.
    ///
    /// # Panics
    /// Panics beyond the end.
    pub fn token(&self, position: usize) -> u32 {
        match &self.tokens {
            Tokens::Bytes(bytes) => bytes[position].into(),
            Tokens::Ids(ids) => ids[position].into(),
        }
    }

    /// Checks that there is a sample of `seq` tokens and the token after it.
    ///
    /// # Errors
    /// The data is shorter.
    pub fn require(&self, seq: usize) -> Result<(), DataError> {
        let (tokens, origin) = (self.len(), self.origin.clone());
        if tokens > seq { Ok(()) } else { Err(DataError::TooShort { origin, tokens, seq }) }
    }
}

fn read_error(path: &Path) -> impl FnOnce(io::Error) -> DataError {
    |source| DataError::Read { path: path.into(), source }
}

fn malformed(path: &Path, problem: impl Into<String>) -> DataError {
    DataError::Malformed { path: path.into(), problem: problem.into() }
}

fn read(path: &Path) -> Result<Vec<u8>, DataError> {
    fs::read(path).map_err(read_error(path))
}

/// All files in the order of their paths, with a line feed after each but the last.
fn read_folder(folder: &Path) -> Result<Vec<u8>, DataError> {
    let mut files = Vec::new();
    collect(folder, &mut files)?;
    if files.is_empty() {
        return Err(DataError::NoFiles { path: folder.into() });
    }
    let texts = files.iter().map(|file| read(file)).collect::<Result<Vec<_>, _>>()?;
    Ok(texts.join(&b'\n'))
}

/// Files below `folder`, folders and files of one folder sorted by name together. Links to files
/// count, links to folders do not: they could lead back up.
fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> Result<(), DataError> {
    let entries = fs::read_dir(folder).map_err(read_error(folder))?;
    let mut entries = entries.collect::<Result<Vec<_>, _>>().map_err(read_error(folder))?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let path = entry.path();
        if entry.file_name().as_encoded_bytes().starts_with(b".") {
            continue;
        }
        if entry.file_type().map_err(read_error(&path))?.is_dir() {
            collect(&path, files)?;
        } else if path.is_file() {
            files.push(path);
        }
    }
    Ok(())
}

/// Ids of a nanoGPT or llm.c file. The header's first 16 bits, read as a token, lie beyond GPT-2's
/// vocabulary, so one cannot be taken for the other.
fn parse_ids(bytes: &[u8]) -> Result<Vec<u16>, String> {
    let number = |i: usize| {
        let raw = bytes.get(4 * i..4 * i + 4)?;
        Some(i32::from_le_bytes(raw.try_into().expect("four bytes")))
    };
    let body = if number(0) == Some(LLM_C_MAGIC) {
        check_header(bytes.len(), number(1), number(2))?;
        &bytes[LLM_C_HEADER_BYTES..]
    } else {
        bytes
    };
    if body.len() % 2 != 0 {
        return Err(format!("{} bytes are not whole 16-bit tokens", body.len()));
    }
    Ok(body.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect())
}

fn check_header(bytes: usize, version: Option<i32>, tokens: Option<i32>) -> Result<(), String> {
    let (Some(version), Some(tokens)) = (version, tokens) else {
        return Err(format!("{bytes} bytes are too short for llm.c's header of 1024"));
    };
    if version != LLM_C_VERSION {
        return Err(format!("llm.c version {version} is unknown; version 1 (16-bit) is read"));
    }
    let expected = usize::try_from(tokens).ok().map(|n| LLM_C_HEADER_BYTES + 2 * n);
    if expected != Some(bytes) {
        return Err(format!(
            "llm.c's header says {tokens} tokens, but the file has {bytes} bytes; was it cut?"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(files: &[(&str, &[u8])]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        dir
    }

    fn all(data: &Dataset) -> Vec<u32> {
        (0..data.len()).map(|i| data.token(i)).collect()
    }

    #[test]
    fn the_builtin_text_is_this_crate() {
        let data = Dataset::builtin();
        assert!(data.len() > 50_000, "{} bytes", data.len());
        let text = String::from_utf8(all(&data).iter().map(|t| *t as u8).collect()).unwrap();
        assert!(text.contains("fn the_builtin_text_is_this_crate"));
        assert_eq!(data.vocabulary(), 256);
    }

    #[test]
    fn a_folder_is_read_in_the_order_of_its_paths() {
        let dir = folder(&[
            ("b.txt", b"second"),
            ("a/z", b"first\n"),
            ("c/a", b"third"),
            (".git/x", b"never"),
            (".hidden", b"never"),
            ("c/b", b"\xff"),
        ]);
        let data = Dataset::open(dir.path(), Tokenizer::Bytes).unwrap();
        let expected: Vec<u32> =
            b"first\n\nsecond\nthird\n\xff".iter().map(|b| u32::from(*b)).collect();
        assert_eq!(all(&data), expected);
        assert_eq!(data.vocabulary(), 256);
    }

    #[test]
    fn files_of_ids_are_read_with_and_without_header() {
        let header = |version: i32, tokens: i32, ids: &[u16]| {
            let mut bytes = vec![0; LLM_C_HEADER_BYTES];
            for (i, n) in [LLM_C_MAGIC, version, tokens].into_iter().enumerate() {
                bytes[4 * i..4 * i + 4].copy_from_slice(&n.to_le_bytes());
            }
            bytes.extend(ids.iter().flat_map(|id| id.to_le_bytes()));
            bytes
        };
        let cut = header(1, 3, &[1, 2, 3])[..10].to_vec();
        let dir = folder(&[
            ("nano.bin", &[5, 0, 0, 1, 7, 0]),
            ("llm.bin", &header(1, 3, &[5, 256, 7])),
            ("odd.bin", &[1, 2, 3]),
            ("short.bin", &header(1, 9, &[1, 2])),
            ("negative.bin", &header(1, -1, &[])),
            ("version.bin", &header(7, 0, &[])),
            ("cut.bin", &cut),
        ]);
        let open = |name: &str| Dataset::open(&dir.path().join(name), Tokenizer::U16);
        for name in ["nano.bin", "llm.bin"] {
            let data = open(name).unwrap();
            assert_eq!((all(&data), data.vocabulary()), (vec![5, 256, 7], 257), "{name}");
        }
        for (name, message) in [
            ("odd.bin", "3 bytes are not whole 16-bit tokens"),
            ("short.bin", "says 9 tokens, but the file has 1028 bytes"),
            ("negative.bin", "says -1 tokens"),
            ("version.bin", "version 7 is unknown"),
            ("cut.bin", "10 bytes are too short for llm.c's header"),
        ] {
            let error = open(name).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains(message), "{error}");
        }
        let error = Dataset::open(dir.path(), Tokenizer::U16).unwrap_err().to_string();
        assert!(error.contains("is a folder"), "{error}");
    }

    #[test]
    fn data_that_cannot_be_trained_on_is_named() {
        let dir = folder(&[("empty", b""), ("one", b"x"), ("five", b"12345"), ("no/.dot", b"x")]);
        let cases = [
            ("none", "none: cannot be read (", "name a text file or a folder"),
            ("no", "no: the folder has no files", "put text files into it"),
            ("empty", "empty: 0 tokens are too short, since seq = 5 needs 6", "a longer text"),
            ("one", "one: 1 tokens", "a longer text"),
            ("five", "five: 5 tokens are too short, since seq = 5 needs 6", "a seq of at most 4"),
        ];
        for (name, problem, help) in cases {
            let opened = Dataset::open(&dir.path().join(name), Tokenizer::Bytes);
            let error = opened.and_then(|data| data.require(5)).unwrap_err().to_string();
            assert!(error.starts_with("data = "), "{error}");
            assert!(error.contains(problem) && error.contains(help), "{error}");
        }
        let five = Dataset::open(&dir.path().join("five"), Tokenizer::Bytes).unwrap();
        five.require(4).unwrap();
        assert_eq!(five.len(), 5);
    }
}
