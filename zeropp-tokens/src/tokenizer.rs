//! Text to token ids, by the files in which tokenizers come.

use std::panic::catch_unwind;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tokenizers::Tokenizer;
use zeropp_data::files::read_text;

use crate::error::{Checked, TokensError, unreadable, wrong};
use crate::gpt2::{self, BYTES_MAX};
use crate::known;
use crate::tiktoken;

/// A text is cut into pieces of about so many bytes, so that its tokens take a bounded memory: some
/// 160 bytes a byte while they are made.
const PIECE_BYTES: usize = if cfg!(test) { 1 << 10 } else { 1 << 20 };
/// The longest text that is tokenized without a cut.
const WHOLE_BYTES_MAX: usize = if cfg!(test) { 8 << 10 } else { 16 << 20 };
/// Bytes at both sides of a cut that are tokenized to see that it changes nothing.
const AROUND_BYTES: usize = if cfg!(test) { 256 } else { 4 << 10 };
/// Places that are tried for one cut.
const CUTS_TRIED: usize = 32;

/// The tokens that end a document in tokenizers that do not say so.
const ENDS: [&str; 4] = ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"];

/// Ids, and the first byte and the end of the text that each is of.
pub(crate) type Placed = (Vec<u32>, Vec<(usize, usize)>);

/// A tokenizer. Cloning it is cheap enough for one a thread, each with a cache of its own.
#[derive(Clone)]
pub struct TextTokenizer {
    inner: Tokenizer,
    path: PathBuf,
    /// The id that ends a document, where the tokenizer says so.
    end: Option<u32>,
    vocabulary: usize,
    /// Ids that its post-processor puts before a text and behind it.
    around: [Vec<u32>; 2],
    /// Keys of its file that are not obeyed, in words.
    notes: Vec<String>,
}

impl TextTokenizer {
    /// Opens `tokenizer.json`, or a folder with one; GPT-2's `encoder.json` with `vocab.bpe` beside
    /// it; a file of tiktoken's ranks.
    ///
    /// # Errors
    /// A file that is none of these, or that contradicts itself.
    pub fn open(path: &Path) -> Result<TextTokenizer, TokensError> {
        let is_folder = std::fs::metadata(path).map_err(unreadable(path))?.is_dir();
        let path = match is_folder {
            true => in_folder(path)?,
            false => path.to_path_buf(),
        };
        let text = read_text(&path, BYTES_MAX).map_err(unreadable(&path))?;
        let mut json: Option<Value> = match text.trim_start().starts_with('{') {
            true => Some(serde_json::from_str(&text).map_err(|e| {
                wrong(&path, format!("it is no JSON ({e})"), "name a tokenizer.json")
            })?),
            false => None,
        };
        let mut notes = Vec::new();
        let is_file =
            json.as_ref().and_then(|json| json.get("model")).is_some_and(Value::is_object);
        if let Some(Value::Object(file)) = json.as_mut().filter(|_| is_file) {
            if let Some(problem) = known::unknown_key(file) {
                let help = "remove it if the ids do not depend on it, or use another tokenizer";
                return Err(wrong(&path, format!("{problem}, which is not read"), help));
            }
            let dropout = file.get_mut("model").and_then(|model| model.get_mut("dropout"));
            if let Some(dropout) = dropout.filter(|dropout| !dropout.is_null()) {
                notes.push(format!(
                    "{}: its dropout of {dropout} is off, so that the same text gives the same ids",
                    path.display()
                ));
                *dropout = Value::Null;
            }
        }
        let text = match json {
            None => tiktoken::to_json(&path, &text)?,
            Some(json) if is_file && !notes.is_empty() => json.to_string(),
            Some(_) if is_file => text,
            Some(Value::Object(vocabulary)) => gpt2::to_json(&path, &vocabulary)?,
            Some(_) => unreachable!("it begins with a brace"),
        };
        // The crate panics over some merges whose result is no entry of the vocabulary.
        let parsed = catch_unwind(|| text.parse::<Tokenizer>());
        let mut inner = match parsed {
            Ok(parsed) => parsed.map_err(|e| format!("it is no tokenizer that is read ({e})")),
            Err(_) => Err("the library tokenizers panicked while it read this file".to_string()),
        }
        .map_err(|problem| {
            wrong(&path, problem, "name a tokenizer.json of Hugging Face's tokenizers")
        })?;
        // A file may ask for texts of one length, as batches for inference have it: it is of no use
        // here, where every document is whole.
        inner.with_truncation(None).expect("none asks for nothing");
        inner.with_padding(None);
        let vocabulary = inner.get_vocab(true).values().max().map_or(0, |id| *id as usize + 1);
        let end = end(&path, &inner)?;
        let around = around(&inner).ok_or_else(|| {
            let problem = "its post-processor changes the ids of a text";
            wrong(&path, problem, "use one that puts tokens before and behind it only")
        })?;
        Ok(TextTokenizer { inner, path, end, vocabulary, around, notes })
    }

    /// The same without the special tokens that its post-processor adds to a text.
    pub fn without_special_tokens(self) -> TextTokenizer {
        TextTokenizer { around: Default::default(), ..self }
    }

    /// Ids that are put before a text and behind it.
    pub fn around(&self) -> [&[u32]; 2] {
        self.around.each_ref().map(Vec::as_slice)
    }

    /// Keys of the tokenizer's file that are not obeyed, in words.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// The file that it was read from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// One more than the largest id.
    pub fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    /// The id that ends a document: what `tokenizer_config.json` beside it says, else the usual
    /// token of that meaning; none where there is none.
    pub fn end(&self) -> Option<u32> {
        self.end
    }

    /// The id of a token by its text.
    pub fn id_of(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The ids of `text`, with the special tokens that the tokenizer's post-processor adds.
    ///
    /// # Errors
    /// Text that the tokenizer has no token for, or that is too long where no cut leaves its ids as
    /// they are.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TokensError> {
        let mut ids = self.around[0].clone();
        let mut rest = text;
        while rest.len() > PIECE_BYTES + AROUND_BYTES {
            let Some(cut) = self.cut(rest)? else { break };
            ids.extend(self.plain(&rest[..cut])?);
            rest = &rest[cut..];
        }
        if rest.len() > WHOLE_BYTES_MAX {
            let problem = format!(
                "no cut of {} bytes leaves the ids as they are, and {WHOLE_BYTES_MAX} bytes are \
                 the most without one",
                rest.len()
            );
            return Err(wrong(&self.path, problem, "cut it into documents, a line of .jsonl each"));
        }
        ids.extend(self.plain(rest)?);
        ids.extend(&self.around[1]);
        Ok(ids)
    }

    fn plain(&self, text: &str) -> Checked<Vec<u32>> {
        let encoded = self.inner.encode_fast(text, false);
        let encoded = encoded.map_err(|e| self.failed(&e.to_string()))?;
        Ok(encoded.get_ids().to_vec())
    }

    /// A place behind about a piece of `text` at which a cut changes no id: between two lines or
    /// two words, before a letter and behind no other blank, where the ids of both sides are those
    /// of both together.
    fn cut(&self, text: &str) -> Checked<Option<usize>> {
        let last = text.len().min(WHOLE_BYTES_MAX);
        let blanks = text.as_bytes()[..last].iter().enumerate().skip(PIECE_BYTES);
        let blanks = blanks.filter(|(_, byte)| matches!(byte, b'\n' | b' '));
        let is_plain = |(at, byte): &(usize, &u8)| {
            let before = text[..*at].chars().next_back().unwrap_or(' ');
            let behind = text[at + 1..].chars().next().is_some_and(char::is_alphabetic);
            behind && if **byte == b' ' { before.is_alphabetic() } else { !before.is_whitespace() }
        };
        // A line feed is of the line before, a blank of the word behind.
        let places = blanks.filter(is_plain).map(|(at, byte)| at + usize::from(*byte == b'\n'));
        let boundary = |mut at: usize| {
            while !text.is_char_boundary(at) {
                at -= 1;
            }
            at
        };
        for at in places.take(CUTS_TRIED) {
            let from = boundary(at - AROUND_BYTES.min(at));
            let to = boundary((at + AROUND_BYTES).min(text.len()));
            let both = self.plain(&text[from..to])?;
            let each = [self.plain(&text[from..at])?, self.plain(&text[at..to])?].concat();
            if both == each {
                return Ok(Some(at));
            }
        }
        Ok(None)
    }

    /// The ids of a text that has its special tokens in it, and the bytes of it that each is of.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    pub(crate) fn encode_places(&self, text: &str) -> Checked<Placed> {
        let encoded = self.inner.encode(text, false).map_err(|e| self.failed(&e.to_string()))?;
        Ok((encoded.get_ids().to_vec(), encoded.get_offsets().to_vec()))
    }

    /// The text of those `ids` that follow the first `prompt`: what they add to the text of all
    /// before. A tokenizer that writes blanks into its tokens drops that of a text's begin.
    ///
    /// # Errors
    /// Ids that the tokenizer cannot decode.
    pub fn decode_behind(&self, ids: &[u32], prompt: usize) -> Result<String, TokensError> {
        let prompt = self.decode(&ids[..prompt.min(ids.len())])?;
        let whole = self.decode(ids)?;
        let same = prompt.chars().zip(whole.chars()).take_while(|(a, b)| a == b);
        let bytes: usize = same.map(|(c, _)| c.len_utf8()).sum();
        Ok(whole[bytes..].to_owned())
    }

    /// The text of `ids`.
    ///
    /// # Errors
    /// Ids that the tokenizer cannot decode.
    pub fn decode(&self, ids: &[u32]) -> Result<String, TokensError> {
        self.inner.decode(ids, false).map_err(|e| self.failed(&e.to_string()))
    }

    fn failed(&self, problem: &str) -> TokensError {
        wrong(&self.path, format!("it fails ({problem})"), "use the tokenizer of the model")
    }
}

/// The ids that the post-processor puts before a text and behind it; none where it does something
/// else.
fn around(tokenizer: &Tokenizer) -> Option<[Vec<u32>; 2]> {
    let ids = |text: &str, special: bool| {
        let encoded = tokenizer.encode_fast(text, special).ok()?;
        Some(encoded.get_ids().to_vec())
    };
    // The first that the tokenizer has tokens for.
    let texts = ["a", "the", "0", "."];
    let known = texts.into_iter().find_map(|text| {
        let plain = ids(text, false).filter(|plain| !plain.is_empty())?;
        Some((plain, ids(text, true)?))
    });
    let (plain, whole) = known.unwrap_or((Vec::new(), ids("", true)?));
    let at =
        (0..=whole.len().checked_sub(plain.len())?).find(|at| whole[*at..].starts_with(&plain))?;
    Some([whole[..at].to_vec(), whole[at + plain.len()..].to_vec()])
}

/// The file of a folder.
fn in_folder(folder: &Path) -> Checked<PathBuf> {
    let names = ["tokenizer.json", "encoder.json"];
    names.map(|name| folder.join(name)).into_iter().find(|path| path.is_file()).ok_or_else(|| {
        wrong(folder, "it has no tokenizer.json", "name a tokenizer's file, or a model's folder")
    })
}

fn end(path: &Path, tokenizer: &Tokenizer) -> Checked<Option<u32>> {
    let beside = path.with_file_name("tokenizer_config.json");
    if beside.is_file() {
        let text = read_text(&beside, BYTES_MAX).map_err(unreadable(&beside))?;
        let config: Value = serde_json::from_str(&text)
            .map_err(|e| wrong(&beside, format!("it is no JSON ({e})"), "restore it"))?;
        let token = config.get("eos_token").map(|eos| eos.get("content").unwrap_or(eos));
        if let Some(token) = token.and_then(Value::as_str) {
            let id = tokenizer.token_to_id(token).ok_or_else(|| {
                let problem = format!("its eos_token {token:?} is no token of the tokenizer");
                wrong(&beside, problem, "restore it, or remove it")
            })?;
            return Ok(Some(id));
        }
    }
    Ok(ENDS.into_iter().find_map(|token| tokenizer.token_to_id(token)))
}
