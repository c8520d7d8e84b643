//! One file, folder or text of tokens.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use super::DataError;
use super::bytes::{JoinedBytes, id};
use super::fingerprint::Fingerprint;
use super::ids;
use super::loss_mask::{self, LossMask};
use super::megatron::{self, MegatronIndex};
use super::sample::Hidden;
use crate::choices::Tokenizer;

/// A story written for this project. It stays as it is, since losses of tests follow from it.
static BUILTIN: &[u8] = include_bytes!("builtin.txt");

/// Tokens in one row. Those of files are read as they are asked for.
#[derive(Clone, Debug)]
pub(super) struct TokenStore {
    bytes: Arc<JoinedBytes>,
    /// Where the documents begin, where that is known.
    index: Option<Arc<MegatronIndex>>,
    /// Which tokens are scored, where not all are.
    mask: Option<Arc<LossMask>>,
    /// Bytes before the first token.
    header: usize,
    /// The first token of those in the file that are used, and their number.
    used: (usize, usize),
    tokenizer: Tokenizer,
    /// One more than the largest id that may be there; found when first asked for, or given.
    vocabulary: OnceLock<usize>,
    origin: String,
    /// Worked out when it is first asked for.
    fingerprint: OnceLock<Fingerprint>,
}

impl TokenStore {
    /// The built-in text, 47 KB of English prose, as bytes.
    pub(super) fn builtin() -> TokenStore {
        TokenStore::of(JoinedBytes::builtin(BUILTIN), "the built-in text".into())
    }

    /// These bytes as tokens.
    pub(super) fn from_bytes(bytes: Vec<u8>) -> TokenStore {
        TokenStore::of(JoinedBytes::in_memory(bytes), "bytes in memory".into())
    }

    fn of(bytes: JoinedBytes, origin: String) -> TokenStore {
        TokenStore {
            used: (0, bytes.len()),
            bytes: Arc::new(bytes),
            index: None,
            mask: None,
            header: 0,
            tokenizer: Tokenizer::Bytes,
            vocabulary: OnceLock::from(256),
            origin,
            fingerprint: OnceLock::new(),
        }
    }

    /// Opens a file, or all files of a folder in the order of the paths inside it. Large files are
    /// mapped into memory and not read; they must not be cut while they are used, or the system
    /// ends the process.
    ///
    /// # Errors
    /// Data that cannot be read, is neither file nor folder, or is not what the tokenizer reads.
    pub(super) fn open(path: &Path, tokenizer: Tokenizer) -> Result<TokenStore, DataError> {
        if let Some((bin, index)) = megatron::pair(path) {
            return TokenStore::indexed(&bin, &index, tokenizer);
        }
        let read_error = |source| DataError::Read { path: path.into(), source };
        let is_folder = fs::metadata(path).map_err(read_error)?.is_dir();
        let origin = path.display().to_string();
        match tokenizer {
            Tokenizer::Bytes => {
                let bytes =
                    if is_folder { JoinedBytes::folder(path)? } else { JoinedBytes::text(path)? };
                Ok(TokenStore::of(bytes, origin))
            }
            Tokenizer::U16 | Tokenizer::U32 => {
                let malformed =
                    |problem: String| DataError::Malformed { path: path.into(), problem };
                if is_folder {
                    return Err(malformed(format!(
                        "is a folder; tokenizer = {tokenizer} reads one .bin file"
                    )));
                }
                let bytes = JoinedBytes::file(path)?;
                let header = ids::header_bytes(&bytes, tokenizer).map_err(malformed)?;
                let vocabulary = OnceLock::new();
                let used = (0, (bytes.len() - header) / ids::token_bytes(tokenizer));
                let mask = TokenStore::mask_beside(path, used.1)?;
                let of = TokenStore::of(bytes, origin);
                Ok(TokenStore { header, tokenizer, vocabulary, used, mask, ..of })
            }
        }
    }

    /// A file of ids with Megatron's index, which knows what they are.
    fn indexed(bin: &Path, index: &Path, tokenizer: Tokenizer) -> Result<TokenStore, DataError> {
        let bytes = JoinedBytes::file(bin)?;
        let index = MegatronIndex::open(index, bytes.len())?;
        let known = index.tokenizer;
        if tokenizer != Tokenizer::Bytes && tokenizer != known {
            let problem = format!("its index says tokenizer = {known}; leave {tokenizer} out");
            return Err(DataError::Malformed { path: bin.into(), problem });
        }
        let (used, vocabulary) = ((0, bytes.len() / ids::token_bytes(known)), OnceLock::new());
        let (index, mask) = (Some(Arc::new(index)), TokenStore::mask_beside(bin, used.1)?);
        let of = TokenStore::of(bytes, bin.display().to_string());
        Ok(TokenStore { index, mask, tokenizer: known, vocabulary, used, ..of })
    }

    /// Which of the tokens of a file of ids are scored, where a file beside it says so.
    fn mask_beside(bin: &Path, tokens: usize) -> Result<Option<Arc<LossMask>>, DataError> {
        let open = |path: PathBuf| LossMask::open(&path, tokens).map(Arc::new);
        loss_mask::beside(bin).map(open).transpose()
    }

    /// The tokens `first..first + len` of these alone.
    pub(super) fn part(self, first: usize, len: usize) -> TokenStore {
        TokenStore { used: (self.used.0 + first, len), fingerprint: OnceLock::new(), ..self }
    }

    /// Where a cut at token `at` is moved to, so that it lies between two documents: where the last
    /// one before it ends. `at` itself where documents are not known, where none ends before it,
    /// and at the end, where nothing is cut.
    pub(super) fn cut(&self, at: usize) -> usize {
        let Some(index) = self.index.as_ref().filter(|_| at < self.len()) else { return at };
        let last = index.before(self.used.0 + at + 1).checked_sub(1);
        let start = last.map_or(0, |last| index.start(last).saturating_sub(self.used.0));
        if start == 0 { at } else { start }
    }

    /// Which of the `len` tokens from `start` on are the first of a document.
    pub(super) fn document_starts(&self, start: usize, len: usize) -> Vec<usize> {
        let Some(index) = &self.index else { return Vec::new() };
        let first = self.used.0 + start;
        let range = index.before(first)..index.before(first + len);
        let starts = range.map(|i| index.start(i) - first);
        starts.collect()
    }

    /// The meaning of its tokens.
    pub(super) fn tokenizer(&self) -> Tokenizer {
        self.tokenizer
    }

    /// Whether its tokens are bytes of text.
    pub(super) fn is_bytes(&self) -> bool {
        self.tokenizer == Tokenizer::Bytes
    }

    /// Whether it says where documents begin.
    pub(super) fn has_documents(&self) -> bool {
        self.index.is_some()
    }

    /// Whether it says which tokens are scored.
    pub(super) fn has_loss_mask(&self) -> bool {
        self.mask.is_some()
    }

    /// Which of the `len` tokens from `start` on are scored, where not all are; after the last
    /// comes the first.
    pub(super) fn scored(&self, start: usize, len: usize) -> Option<Vec<bool>> {
        let mask = self.mask.as_ref()?;
        let at = |i: usize| self.used.0 + (start + i) % self.len();
        Some((0..len).map(|i| mask.is_scored(at(i))).collect())
    }

    /// Whether any of its tokens is scored with what is `hidden`. Looks for the first one.
    ///
    /// # Errors
    /// As [`tokens`](Self::tokens).
    pub(super) fn scores_any(&self, hidden: Hidden) -> Result<bool, DataError> {
        let (first, len) = self.used;
        let mask = self.mask.as_ref().filter(|_| hidden.by_loss_mask);
        // The first token is a target of none.
        let mut at = first + 1;
        while let Some(marked) = mask.map_or(Some(at), |mask| mask.next(at, first + len)) {
            if marked >= first + len {
                break;
            }
            let begins = match hidden.end {
                _ if !hidden.documents => false,
                Some(end) => self.tokens(marked - first - 1, 1)? == [end],
                None => !self.document_starts(marked - first, 1).is_empty(),
            };
            if !begins {
                return Ok(true);
            }
            at = marked + 1;
        }
        Ok(false)
    }

    /// The contents of files beside one of ids, in words; none for text.
    pub(super) fn beside(&self, by_loss_mask: bool) -> Option<String> {
        if self.is_bytes() && self.index.is_none() {
            return None;
        }
        let documents = match &self.index {
            Some(index) => format!("its .idx has {} documents", index.documents()),
            None => "it has no .idx".into(),
        };
        let scored = match &self.mask {
            Some(_) if by_loss_mask => "its .mask says which tokens are scored",
            Some(_) => "its .mask is not used (loss-mask = false): every token is scored",
            None => "it has no .mask: every token is scored",
        };
        Some(format!("data = {}: {documents}, and {scored}", self.origin))
    }

    /// Number of tokens.
    pub(super) fn len(&self) -> usize {
        self.used.1
    }

    /// The same data, whose ids have to be below `vocabulary`: looked at as they are read, so that
    /// a file of ids need not be searched for its largest.
    pub(super) fn with_vocabulary(self, vocabulary: usize) -> TokenStore {
        TokenStore { vocabulary: OnceLock::from(vocabulary), ..self }
    }

    /// Number of token ids: what was given, else 256 for bytes and one more than the largest in a
    /// file of ids, all of which is read the first time.
    pub(super) fn vocabulary(&self) -> usize {
        *self.vocabulary.get_or_init(|| {
            let largest = self.bytes.largest_id(self.header, self.token_bytes());
            largest.map_or(0, |id| id as usize + 1)
        })
    }

    /// Where the data does not look like the tokenizer's: its look, and the setting that would
    /// read it: bytes that may be ids, ids that may be wider.
    pub(super) fn doubt(&self) -> Option<String> {
        if self.index.is_some() {
            return None;
        }
        let doubt = ids::doubt(&self.bytes, self.header, self.tokenizer)?;
        Some(format!("data = {}: {doubt}", self.origin))
    }

    /// Where the tokens come from, as messages call it.
    pub(super) fn origin(&self) -> &str {
        &self.origin
    }

    fn token_bytes(&self) -> usize {
        ids::token_bytes(self.tokenizer)
    }

    /// The `len` tokens from `start` on; after the last one comes the first.
    ///
    /// # Errors
    /// An id beyond the vocabulary that was given or found before, with file and offset.
    ///
    /// # Panics
    /// Panics if there are no tokens.
    pub(super) fn tokens(&self, start: usize, len: usize) -> Result<Vec<u32>, DataError> {
        let mut tokens = Vec::with_capacity(len);
        let mut raw = Vec::new();
        while tokens.len() < len {
            let at = (start + tokens.len()) % self.len();
            let n = (len - tokens.len()).min(self.len() - at);
            raw.resize(n * self.token_bytes(), 0);
            let offset = self.header + (self.used.0 + at) * self.token_bytes();
            self.bytes.read(offset, &mut raw);
            let first = tokens.len();
            tokens.extend(raw.chunks_exact(self.token_bytes()).map(id));
            self.check(&tokens[first..], offset)?;
        }
        Ok(tokens)
    }

    /// Ids that were read from byte `offset` on.
    fn check(&self, ids: &[u32], offset: usize) -> Result<(), DataError> {
        let Some(vocabulary) = self.vocabulary.get().copied() else { return Ok(()) };
        match ids.iter().position(|id| *id as usize >= vocabulary) {
            None => Ok(()),
            Some(i) => Err(DataError::UnknownId {
                origin: self.origin.clone(),
                id: ids[i],
                offset: offset + i * self.token_bytes(),
                vocabulary,
                tokenizer: self.tokenizer,
            }),
        }
    }

    /// A value that other data does not have, found quickly whatever the data's size.
    pub(super) fn fingerprint(&self) -> &Fingerprint {
        self.fingerprint.get_or_init(|| {
            let index = self.index.iter().map(|index| index.bytes());
            let mask = self.mask.iter().map(|mask| mask.bytes());
            let ids = Fingerprint::new(&self.bytes, self.header);
            index.chain(mask).fold(ids, Fingerprint::with)
        })
    }

    /// Checks that there is a sample of `seq` tokens and the token after it.
    ///
    /// # Errors
    /// The data is shorter.
    pub(super) fn require(&self, seq: usize) -> Result<(), DataError> {
        let (tokens, origin) = (self.len(), self.origin.clone());
        if tokens > seq { Ok(()) } else { Err(DataError::TooShort { origin, tokens, seq }) }
    }
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

    fn all(data: &TokenStore) -> Vec<u32> {
        data.tokens(0, data.len()).unwrap()
    }

    #[test]
    fn the_built_in_text_stays_as_it_is() {
        let data = TokenStore::builtin();
        let text: Vec<u8> = all(&data).iter().map(|t| *t as u8).collect();
        let digest = blake3::hash(&text).to_hex();
        assert!(text.is_ascii());
        assert_eq!((text.len(), &digest[..16]), (47_563, "6428fd67e0f1c8af"));
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
        let data = TokenStore::open(dir.path(), Tokenizer::Bytes).unwrap();
        let expected: Vec<u32> =
            b"first\n\nsecond\nthird\n\xff".iter().map(|b| u32::from(*b)).collect();
        assert_eq!(all(&data), expected);
        assert_eq!(data.vocabulary(), 256);
    }

    /// A file as llm.c writes it.
    fn llm_c(magic: i32, version: i32, tokens: i32, ids: &[u32], width: usize) -> Vec<u8> {
        let mut bytes = vec![0; 1024];
        for (i, n) in [magic, version, tokens].into_iter().enumerate() {
            bytes[4 * i..4 * i + 4].copy_from_slice(&n.to_le_bytes());
        }
        bytes.extend(ids.iter().flat_map(|id| id.to_le_bytes()[..width].to_vec()));
        bytes
    }

    #[test]
    fn files_of_ids_are_read_with_and_without_header() {
        let header = |version, tokens, ids: &[u32]| llm_c(20_240_520, version, tokens, ids, 2);
        let wide = llm_c(20_240_801, 7, 3, &[5, 256, 128_255], 4);
        let cut = header(1, 3, &[1, 2, 3])[..10].to_vec();
        let dir = folder(&[
            ("nano.bin", &[5, 0, 0, 1, 7, 0]),
            ("llm.bin", &header(1, 3, &[5, 256, 7])),
            ("llama.bin", &wide),
            ("nano32.bin", &wide[1024..]),
            ("odd.bin", &[1, 2, 3]),
            ("short.bin", &header(1, 9, &[1, 2])),
            ("negative.bin", &header(1, -1, &[])),
            ("version.bin", &header(7, 0, &[])),
            ("cut.bin", &cut),
        ]);
        let open = |name: &str, tokenizer| TokenStore::open(&dir.path().join(name), tokenizer);
        for (name, tokenizer, largest) in [
            ("nano.bin", Tokenizer::U16, 7),
            ("llm.bin", Tokenizer::U16, 7),
            ("llama.bin", Tokenizer::U32, 128_255),
            ("nano32.bin", Tokenizer::U32, 128_255),
        ] {
            let data = open(name, tokenizer).unwrap();
            let vocabulary = largest.max(256) as usize + 1;
            assert_eq!(
                (all(&data), data.vocabulary()),
                (vec![5, 256, largest], vocabulary),
                "{name}"
            );
        }
        for (name, tokenizer, message) in [
            ("odd.bin", Tokenizer::U16, "3 bytes are not whole 16-bit tokens"),
            ("nano.bin", Tokenizer::U32, "6 bytes are not whole 32-bit tokens"),
            ("llama.bin", Tokenizer::U16, "header says 32-bit ids; use tokenizer = u32"),
            ("llm.bin", Tokenizer::U32, "header says 16-bit ids; use tokenizer = u16"),
            ("short.bin", Tokenizer::U16, "says 9 tokens, but the file has 1028 bytes"),
            ("negative.bin", Tokenizer::U16, "says -1 tokens"),
            ("version.bin", Tokenizer::U16, "version 7 is unknown"),
            ("cut.bin", Tokenizer::U16, "10 bytes are too short for llm.c's header"),
        ] {
            let error = open(name, tokenizer).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains(message), "{error}");
        }
        let error = TokenStore::open(dir.path(), Tokenizer::U16).unwrap_err().to_string();
        assert!(error.contains("is a folder"), "{error}");
    }

    #[test]
    fn ids_beyond_the_vocabulary_are_named_with_file_and_offset() {
        let dir = folder(&[
            ("ids.bin", &[1, 0, 0, 0, 9, 0, 0, 0, 2, 0, 1, 0]),
            ("llm.bin", &llm_c(20_240_520, 1, 3, &[5, 50_257, 7], 2)),
        ]);
        for (name, tokenizer, vocabulary, message) in [
            (
                "ids.bin",
                Tokenizer::U32,
                65_537,
                "token id 65538 at byte 8 is not below vocab = 65537",
            ),
            ("llm.bin", Tokenizer::U16, 50_257, "token id 50257 at byte 1026"),
        ] {
            let data = TokenStore::open(&dir.path().join(name), tokenizer).unwrap();
            let limited = data.clone().with_vocabulary(vocabulary);
            assert_eq!(limited.vocabulary(), vocabulary);
            let error = limited.tokens(0, 3).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains(message), "{error}");
            let enough = data.clone().with_vocabulary(vocabulary + 2);
            assert_eq!(all(&enough), all(&data));
        }
    }

    /// Bytes of physical memory of this process.
    #[cfg(target_os = "linux")]
    fn resident_bytes() -> usize {
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
        1024 * line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap()
    }

    /// A file far beyond any memory starts at once and costs the pages that are looked at.
    #[test]
    #[cfg(target_os = "linux")]
    fn a_terabyte_is_mapped_and_not_read() {
        use std::os::unix::fs::FileExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("huge");
        let file = fs::File::create(&path).unwrap();
        // As much as the file system allows to seem there.
        let sizes = (30..=40).rev().map(|bits| 1usize << bits);
        let size = sizes.into_iter().find(|size| file.set_len(*size as u64).is_ok()).unwrap();
        let far = size - 12_345;
        file.write_at(b"found", far as u64).unwrap();
        let (before, start) = (resident_bytes(), std::time::Instant::now());

        let data = TokenStore::open(&path, Tokenizer::Bytes).unwrap();
        assert_eq!(data.len(), size);
        assert_eq!(data.tokens(far, 5).unwrap(), b"found".map(u32::from));
        assert_eq!(data.tokens(size - 1, 2).unwrap(), [0, 0], "the first token follows the last");
        let rng = crate::rng::Rng::keyed(1, "places");
        for index in 0..64 {
            let place = rng.block(index, 0)[0] as usize * (size >> 33);
            assert_eq!(data.tokens(place, 1025).unwrap().len(), 1025);
        }
        assert_eq!(data.fingerprint().bytes, size as u64);

        println!("{} GiB in {:?}", size >> 30, start.elapsed());
        assert!(start.elapsed() < std::time::Duration::from_secs(20), "{:?}", start.elapsed());
        // Other tests of this process take some, too.
        let grown = resident_bytes().saturating_sub(before);
        assert!(grown < 256 << 20, "{} MiB", grown >> 20);
    }

    /// Before, a FIFO hung for ever, and /dev/zero was read until memory was gone.
    #[test]
    #[cfg(unix)]
    fn only_files_and_folders_are_data() {
        let dir = tempfile::tempdir().unwrap();
        let fifo = dir.path().join("fifo");
        assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
        for (path, kind) in
            [(fifo.as_path(), "a pipe (FIFO)"), (Path::new("/dev/zero"), "a device")]
        {
            for tokenizer in [Tokenizer::Bytes, Tokenizer::U16] {
                let error = TokenStore::open(path, tokenizer).unwrap_err().to_string();
                assert!(error.contains(&format!("it is {kind}, not a regular file")), "{error}");
            }
        }
    }

    #[test]
    fn files_that_are_no_text_are_refused_by_name_or_first_bytes() {
        let dir = folder(&[
            ("x.jsonl", b"{}"),
            ("x.gz", b"x"),
            ("p", b"\x89PNG\r\n"),
            ("texts/a.txt", b"a"),
            ("texts/b.csv", b"a,b"),
        ]);
        for (name, message) in [
            ("x.jsonl", "x.jsonl: it is lines of JSON, which is not read as text; turn it into"),
            ("x.gz", "x.gz: it is compressed, which"),
            ("p", "p: it is a PNG picture"),
            ("texts", "texts/b.csv: it is a table, which is not read as text; write its texts as"),
        ] {
            let opened = TokenStore::open(&dir.path().join(name), Tokenizer::Bytes);
            let error = opened.unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
        }
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
            let opened = TokenStore::open(&dir.path().join(name), Tokenizer::Bytes);
            let error = opened.and_then(|data| data.require(5)).unwrap_err().to_string();
            assert!(error.starts_with("data = "), "{error}");
            assert!(error.contains(problem) && error.contains(help), "{error}");
        }
        let five = TokenStore::open(&dir.path().join("five"), Tokenizer::Bytes).unwrap();
        five.require(4).unwrap();
        assert_eq!(five.len(), 5);
    }
}
