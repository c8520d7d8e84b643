//! Texts to files of tokens, on several threads, with the same bytes for any number of them.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crossbeam_channel::{Receiver, Sender, bounded};
use serde_json::Value;
use zeropp_data::files::open_regular;
use zeropp_data::threads::{REFUSED_HELP, start_scoped};

use crate::chat::ChatTemplate;
use crate::corpus::{Batch, Corpus};
use crate::error::{Checked, TokensError, wrong};
use crate::output::{FinishedWork, TokenFiles, Width};
use crate::tokenizer::TextTokenizer;

/// Batches of each thread that are under way.
const BATCHES_EACH: usize = 4;

/// How texts are tokenized.
#[derive(Clone, Debug)]
pub struct TokenizeOptions {
    /// The field of a line of JSON that has the text.
    pub field: String,
    /// The id after each document, if there is to be one.
    pub end: Option<u32>,
    /// Threads that tokenize; 0 for one a core.
    pub threads: usize,
    /// Lines are conversations, written by this template: `messages` in place of `field`, and a
    /// loss mask of the answers, `out.mask`.
    pub chat: Option<ChatTemplate>,
    /// Leave out lines that are refused, and count them.
    pub skip_bad_lines: bool,
}

/// How far a run has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tokenized {
    /// Bytes of the inputs that are behind, compressed ones counted as what they hold.
    pub bytes: u64,
    /// Bytes of all inputs, as they lie on disk.
    pub bytes_total: u64,
    /// Documents that are written.
    pub documents: u64,
    /// Ids that are written.
    pub tokens: u64,
    /// Ids of answers among them, of conversations.
    pub answers: u64,
    /// Lines that are left out, as they are refused.
    pub bad_lines: u64,
}

/// The files in the folders among `inputs` that are no text and would be left out, in words.
///
/// # Errors
/// As [`tokenize`].
pub fn left_out(inputs: &[PathBuf]) -> Result<Vec<String>, TokensError> {
    Ok(Corpus::new(inputs)?.left_out())
}

/// A batch in tokens.
struct Done {
    ids: Vec<u8>,
    lengths: Vec<i32>,
    /// A byte an id, 1 for those of answers; empty without conversations.
    scored: Vec<u8>,
    /// Lines that are left out.
    bad_lines: u64,
    behind: u64,
}

/// Writes `out.bin` and `out.idx` of all documents of `inputs`; `progress` receives how far it is.
/// Where a run with the same inputs and settings was killed it goes on. Empty documents are left
/// out.
///
/// # Errors
/// A file that cannot be read, or is no text, with file and line; a file of that name;
/// conversations of which nothing is scored.
pub fn tokenize(
    inputs: &[PathBuf],
    tokenizer: &TextTokenizer,
    out: &Path,
    options: &TokenizeOptions,
    mut progress: impl FnMut(Tokenized),
) -> Result<Tokenized, TokensError> {
    let corpus = Corpus::new(inputs)?;
    let width = Width::of(tokenizer.vocabulary());
    let key = key(&corpus, tokenizer, options)?;
    let mut output = TokenFiles::open(out, key, width, options.chat.is_some())?;
    let bytes_total = corpus.bytes();
    let cores = || std::thread::available_parallelism().map_or(1, usize::from);
    let threads = if options.threads == 0 { cores() } else { options.threads };
    let skip = output.progress.batches;
    let first_bad = OnceLock::new();
    let worker = LineEncoder { tokenizer, options, width, first_bad: &first_bad };
    let mut last = 0;
    std::thread::scope(|scope| -> Checked<()> {
        let (work, works) = bounded::<Batch>(BATCHES_EACH * threads);
        let (done, dones) = bounded::<(u64, Checked<Done>)>(BATCHES_EACH * threads);
        // One for each batch that is read and not yet written: what comes out of order is bounded.
        let (permit, permits) = bounded::<()>(2 * BATCHES_EACH * threads);
        let refused = |e: io::Error| {
            wrong(out, format!("no thread can be started to write it ({e})"), REFUSED_HELP)
        };
        for i in 0..threads {
            let (works, done, worker) = (works.clone(), done.clone(), worker.clone());
            match start_scoped(scope, "tokenize", move || worker.run(&works, &done)) {
                Err(e) if i == 0 => return Err(refused(e)),
                // With fewer it takes longer.
                Err(_) => break,
                Ok(_) => {}
            }
        }
        drop(works);
        let corpus = &corpus;
        start_scoped(scope, "read", move || read(corpus, skip, &permit, &work, &done))
            .map_err(refused)?;
        write(&dones, &permits, skip, |batch: Done| {
            output.progress.bad_lines += batch.bad_lines;
            output.batch(&batch.ids, &batch.lengths, &batch.scored)?;
            last = batch.behind;
            progress(said(&output.progress, last, bytes_total));
            Ok(())
        })
    })?;
    let now = &output.progress;
    let refused = match (now.documents, first_bad.into_inner()) {
        (0, Some(first)) => Some(first),
        (n @ 1.., _) if options.chat.is_some() && now.answers == 0 => {
            let problem = format!("none of its {n} conversations has an answer that is scored");
            let help = "answers are messages of the role assistant, without a weight of 0";
            Some(wrong(inputs.first().map_or(out, PathBuf::as_path), problem, help))
        }
        _ => None,
    };
    if let Some(refused) = refused {
        output.discard()?;
        return Err(refused);
    }
    let all = output.finish()?;
    Ok(said(&all, bytes_total.max(last), bytes_total))
}

/// The progress as callers receive it.
fn said(progress: &FinishedWork, bytes: u64, bytes_total: u64) -> Tokenized {
    let FinishedWork { documents, tokens, answers, bad_lines, .. } = *progress;
    Tokenized { bytes, bytes_total, documents, tokens, answers, bad_lines }
}

/// The identity of this run, which another has not.
fn key(corpus: &Corpus, tokenizer: &TextTokenizer, options: &TokenizeOptions) -> Checked<String> {
    let mut hasher = blake3::Hasher::new();
    corpus.describe(&mut hasher);
    let path = tokenizer.path();
    let mut bytes = Vec::new();
    let read = open_regular(path).and_then(|mut file| file.read_to_end(&mut bytes));
    read.map_err(crate::error::unreadable(path))?;
    hasher.update(&bytes);
    hasher.update(format!("{:?} {:?}", options.field, options.end).as_bytes());
    if let Some(chat) = &options.chat {
        hasher.update(format!(" chat {}", chat.key()).as_bytes());
    }
    hasher.update(format!(" {:?} {}", tokenizer.around(), options.skip_bad_lines).as_bytes());
    Ok(hasher.finalize().to_hex().to_string())
}

/// Reads all batches but the first `skip`; ends early where the receiver is gone.
fn read(
    corpus: &Corpus,
    skip: u64,
    permit: &Sender<()>,
    work: &Sender<Batch>,
    done: &Sender<(u64, Checked<Done>)>,
) {
    let mut next = 0;
    let read = corpus.batches(|batch| {
        next = batch.number + 1;
        batch.number < skip || (permit.send(()).is_ok() && work.send(batch).is_ok())
    });
    if let Err(e) = read {
        // In its place after all that was read before.
        let _ = permit.send(()).is_ok() && done.send((next, Err(e))).is_ok();
    }
}

/// Takes what is done in the order of the batches, from number `next` on.
fn write(
    dones: &Receiver<(u64, Checked<Done>)>,
    permits: &Receiver<()>,
    mut next: u64,
    mut take: impl FnMut(Done) -> Checked<()>,
) -> Checked<()> {
    let mut early = BTreeMap::new();
    for (number, done) in dones {
        early.insert(number, done);
        while let Some(done) = early.remove(&next) {
            take(done?)?;
            // The reader has sent it before the batch.
            let _ = permits.recv();
            next += 1;
        }
    }
    Ok(())
}

#[derive(Clone)]
struct LineEncoder<'a> {
    tokenizer: &'a TextTokenizer,
    options: &'a TokenizeOptions,
    width: Width,
    /// Why the first line was left out that was.
    first_bad: &'a OnceLock<TokensError>,
}

impl LineEncoder<'_> {
    fn run(&self, works: &Receiver<Batch>, done: &Sender<(u64, Checked<Done>)>) {
        // With a cache of its own: threads that share one wait for each other.
        let tokenizer = self.tokenizer.clone();
        for batch in works {
            // Who waits for this batch would wait for ever; the panic itself has said why.
            let work = AssertUnwindSafe(|| self.batch(&tokenizer, &batch));
            let result = catch_unwind(work).unwrap_or_else(|_| {
                let from = place(batch.is_json.then_some(batch.line));
                let problem = format!("the tokenizer gave up on a text from {from} on");
                Err(wrong(&batch.path, problem, "use another tokenizer, or leave the text out"))
            });
            if done.send((batch.number, result)).is_err() {
                return;
            }
        }
    }

    fn batch(&self, tokenizer: &TextTokenizer, batch: &Batch) -> Checked<Done> {
        let (mut ids, mut lengths, mut scored) = (Vec::new(), Vec::new(), Vec::new());
        let mut bad_lines = 0;
        // A post-processor may have put it there already.
        let is_ended = self.options.end.is_some() && self.options.chat.is_none();
        let is_ended = is_ended && tokenizer.around()[1].last() == self.options.end.as_ref();
        for (i, raw) in batch.documents().enumerate() {
            let line = batch.is_json.then_some(batch.line + i);
            let document = match self.document(tokenizer, raw, &batch.path, line, &mut scored) {
                Err(error) if line.is_some() && self.options.skip_bad_lines => {
                    let _ = self.first_bad.set(error);
                    bad_lines += 1;
                    continue;
                }
                document => document?,
            };
            let Some(mut document) = document else { continue };
            document.extend(self.options.end.filter(|_| !is_ended));
            let too_long = |_| {
                let problem = format!("{} has too many tokens for one document", place(line));
                wrong(&batch.path, problem, "cut it into several")
            };
            lengths.push(i32::try_from(document.len()).map_err(too_long)?);
            self.width.extend(&document, &mut ids);
        }
        Ok(Done { ids, lengths, scored, bad_lines, behind: batch.behind })
    }

    /// The ids of a document; none where it is empty. Of a conversation says for each, and for the
    /// one behind it, whether it is scored.
    fn document(
        &self,
        tokenizer: &TextTokenizer,
        raw: &[u8],
        path: &Path,
        line: Option<usize>,
        scored: &mut Vec<u8>,
    ) -> Checked<Option<Vec<u32>>> {
        let Some(chat) = &self.options.chat else {
            let Some(text) = self.text(raw, path, line)? else { return Ok(None) };
            let ids = tokenizer.encode(&text).map_err(|e| {
                wrong(
                    path,
                    format!("{}: the tokenizer refuses it: {}", place(line), e.problem),
                    e.help,
                )
            });
            return ids.map(Some);
        };
        let refused = |problem: String| wrong(path, format!("{}: {problem}", place(line)), CHATS);
        if line.is_none() {
            return Err(wrong(path, "it is a text, and no lines of JSON", CHATS));
        }
        if raw.iter().all(u8::is_ascii_whitespace) {
            return Ok(None);
        }
        let tokens = chat_tokens(chat, tokenizer, raw, &refused)?;
        let (ids, answers) = tokens;
        scored.extend(answers.iter().map(|answer| u8::from(*answer)));
        scored.extend(self.options.end.map(|_| 0));
        Ok(Some(ids))
    }

    /// The text of a document; none where it is empty.
    fn text(&self, raw: &[u8], path: &Path, line: Option<usize>) -> Checked<Option<String>> {
        let refused = |problem: String, help: &str| Err(wrong(path, problem, help));
        let at = place(line);
        if line.is_none() {
            return match std::str::from_utf8(raw) {
                Ok(text) => Ok((!text.is_empty()).then(|| text.to_owned())),
                Err(e) => {
                    let problem = format!("it is not UTF-8 text (byte {})", e.valid_up_to());
                    refused(problem, "leave it out, or convert it")
                }
            };
        }
        if raw.iter().all(u8::is_ascii_whitespace) {
            return Ok(None);
        }
        let json: Value = match serde_json::from_slice(raw) {
            Ok(json) => json,
            Err(e) => {
                let problem = format!("{at} is no JSON ({})", without_line(&e));
                return refused(problem, RESTORE);
            }
        };
        match json.get(&self.options.field) {
            Some(Value::String(text)) => Ok((!text.is_empty()).then(|| text.clone())),
            Some(Value::Null) => {
                refused(format!("{at}: {:?} is null", self.options.field), RESTORE)
            }
            Some(_) => {
                let problem = format!("{at}: {:?} is no text", self.options.field);
                refused(problem, "name the field that has the text")
            }
            None => {
                let problem = format!("{at} has no field {:?}", self.options.field);
                let chats = ["messages", "conversations", "instruction"];
                match chats.iter().find(|name| json.get(name).is_some()) {
                    None => refused(problem, "name the field that has the text"),
                    Some(name) => {
                        refused(format!("{problem} but {name:?}"), "tokenize it with --chat")
                    }
                }
            }
        }
    }
}

/// Advice, beside others, where a line is damaged.
const RESTORE: &str = "restore the line, or leave out such lines with --skip-bad-lines";

/// Why a line is no JSON, with its column: the line is known.
fn without_line(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let what = text.split(" at line ").next().unwrap_or_default();
    match error.line() {
        1 => format!("{what} at column {}", error.column()),
        _ => what.to_owned(),
    }
}

/// The form of lines of conversations.
const CHATS: &str =
    "give lines such as {\"messages\": [{\"role\": \"user\", \"content\": \"..\"}, ..]}";

/// The ids of a line of JSON that is a conversation, and which of them are of answers: those that
/// have a byte of one.
fn chat_tokens(
    chat: &ChatTemplate,
    tokenizer: &TextTokenizer,
    raw: &[u8],
    refused: &dyn Fn(String) -> TokensError,
) -> Checked<(Vec<u32>, Vec<bool>)> {
    let line: minijinja::Value = serde_json::from_slice(raw)
        .map_err(|e| refused(format!("it is no JSON ({})", without_line(&e))))?;
    let conversation = chat.conversation(&line).map_err(refused)?;
    let (ids, places) = tokenizer.encode_places(&conversation.text)?;
    let answers = &conversation.answers;
    let (mut next, mut before) = (0, 0);
    let is_answer = |(start, end): &(usize, usize)| {
        // Of blanks alone nothing is left where a tokenizer trims its places.
        let start = if start == end { &before.min(*start) } else { start };
        before = *end;
        while answers.get(next).is_some_and(|answer| answer.end <= *start) {
            next += 1;
        }
        answers.get(next).is_some_and(|answer| *end > answer.start && end > start)
    };
    let scored = places.iter().map(is_answer).collect();
    Ok((ids, scored))
}

fn place(line: Option<usize>) -> String {
    line.map_or("it".into(), |line| format!("line {line}"))
}
