//! Text to token ids, by the files in which tokenizers come.

use std::path::{Path, PathBuf};

use serde_json::Value;
use tokenizers::Tokenizer;
use zeropp_data::files::read_text;

use crate::error::{Checked, TokensError, unreadable, wrong};
use crate::gpt2::{self, BYTES_MAX};
use crate::tiktoken;

/// What ends a document in tokenizers that do not say so.
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
        let json: Option<Value> = match text.trim_start().starts_with('{') {
            true => Some(serde_json::from_str(&text).map_err(|e| {
                wrong(&path, format!("it is no JSON ({e})"), "name a tokenizer.json")
            })?),
            false => None,
        };
        let text = match json {
            None => tiktoken::to_json(&path, &text)?,
            Some(json) if json.get("model").is_some_and(Value::is_object) => text,
            Some(Value::Object(vocabulary)) => gpt2::to_json(&path, &vocabulary)?,
            Some(_) => unreachable!("it begins with a brace"),
        };
        let mut inner: Tokenizer = text.parse().map_err(|e| {
            let problem = format!("it is no tokenizer that is read ({e})");
            wrong(&path, problem, "name a tokenizer.json of Hugging Face's tokenizers")
        })?;
        // A file may ask for texts of one length, as batches for inference have it: it is of no use
        // here, where every document is whole.
        inner.with_truncation(None).expect("none asks for nothing");
        inner.with_padding(None);
        let vocabulary = inner.get_vocab(true).values().max().map_or(0, |id| *id as usize + 1);
        let end = end(&path, &inner)?;
        Ok(TextTokenizer { inner, path, end, vocabulary })
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

    /// The ids of `text`, without any that a template would add.
    ///
    /// # Errors
    /// Text that the tokenizer has no token for.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TokensError> {
        let encoded = self.inner.encode_fast(text, false);
        let encoded = encoded.map_err(|e| self.failed(&e.to_string()))?;
        Ok(encoded.get_ids().to_vec())
    }

    /// The ids of a text that has its special tokens in it, and the bytes of it that each is of.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    pub(crate) fn encode_places(&self, text: &str) -> Checked<Placed> {
        let encoded = self.inner.encode(text, false).map_err(|e| self.failed(&e.to_string()))?;
        Ok((encoded.get_ids().to_vec(), encoded.get_offsets().to_vec()))
    }

    /// The text of `ids`.
    ///
    /// # Errors
    /// What the tokenizer cannot decode.
    pub fn decode(&self, ids: &[u32]) -> Result<String, TokensError> {
        self.inner.decode(ids, false).map_err(|e| self.failed(&e.to_string()))
    }

    fn failed(&self, problem: &str) -> TokensError {
        wrong(&self.path, format!("it fails ({problem})"), "use the tokenizer of the model")
    }
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
