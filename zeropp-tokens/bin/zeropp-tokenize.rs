//! `zeropp-tokenize`, which `zeropp tokenize` calls: text into files of tokens.

use std::io::{IsTerminal, Read, Write, stderr, stdin, stdout};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use zeropp_data::files::escaped;
use zeropp_tokens::{
    ChatTemplate, TextTokenizer, TokenizeOptions, Tokenized, TokensError, left_out, tokenize,
};

/// Notes that are printed one by one.
const NOTES_MAX: usize = 20;

/// Turn text into a file of tokens to train on
///
/// Inputs are text files (a document each), .jsonl and .jsonl.zst (a document a line), .parquet (a
/// document a row, where it was built with the feature parquet), and folders of them, read in the
/// order of their paths; what of a folder is no text is named and left out. OUT.bin and OUT.idx
/// are Megatron's; `zeropp run --data OUT.bin` reads them. The same inputs give the same bytes with
/// any number of threads, and the same command goes on where it was killed.
#[derive(Parser)]
#[command(
    name = "zeropp tokenize",
    version,
    after_help = "Exit codes: 0 written, 2 nothing was: the message names file and line."
)]
struct Args {
    /// Files and folders of text
    #[arg(required_unless_present_any = ["encode", "decode"], value_name = "INPUT")]
    inputs: Vec<PathBuf>,
    /// tokenizer.json or a folder with one, GPT-2's encoder.json, or a file of tiktoken's ranks
    #[arg(long, value_name = "FILE")]
    tokenizer: PathBuf,
    /// Write OUT.bin and OUT.idx
    #[arg(
        short,
        long,
        value_name = "OUT",
        required_unless_present_any = ["encode", "decode"]
    )]
    output: Option<PathBuf>,
    /// Field of a line of JSON that has the text
    #[arg(long, default_value = "text")]
    field: String,
    /// Lines are conversations (`messages` of roles and contents, ShareGPT's `conversations`,
    /// Alpaca's `instruction`, `input` and `output`): write them by the model's chat template, and
    /// OUT.mask, by which only the answers are scored
    #[arg(long)]
    chat: bool,
    /// The template of `--chat` [default: the tokenizer's]
    #[arg(long, value_name = "FILE", requires = "chat")]
    chat_template: Option<PathBuf>,
    /// What a template that writes today's date writes
    #[arg(long, value_name = "YYYY-MM-DD", requires = "chat")]
    chat_date: Option<String>,
    /// Leave out the tokens that the tokenizer's post-processor puts before and behind a text, as
    /// Llama's begin-of-text; a chat has those of its template alone
    #[arg(long)]
    no_special_tokens: bool,
    /// Leave out lines that are refused, and count them
    #[arg(long)]
    skip_bad_lines: bool,
    /// Token after each document, or `none` [default: what the tokenizer says; none with --chat]
    #[arg(long, value_name = "TOKEN")]
    eos: Option<String>,
    /// Threads that tokenize; 0 for one a core
    #[arg(long, default_value_t = 0, value_name = "N")]
    threads: usize,
    /// In place of files: text on standard input to ids on standard output
    #[arg(long, conflicts_with_all = ["inputs", "decode"])]
    encode: bool,
    /// In place of files: ids on standard input to text on standard output
    #[arg(long, conflicts_with = "inputs")]
    decode: bool,
    /// With --decode: the text that follows that of the first N ids
    #[arg(long, value_name = "N", requires = "decode", default_value_t = 0)]
    behind: usize,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            // It may quote a file, which is not to command the terminal.
            eprintln!("error: {}", escaped(&message));
            ExitCode::from(2)
        }
    }
}

fn run(args: &Args) -> Result<(), String> {
    let text = |e: TokensError| e.to_string();
    let tokenizer = TextTokenizer::open(&args.tokenizer).map_err(text)?;
    let tokenizer = match args.no_special_tokens {
        true => tokenizer.without_special_tokens(),
        false => tokenizer,
    };
    if args.encode || args.decode {
        return translate(&tokenizer, args);
    }
    let output = args.output.as_ref().expect("required without the two above");
    let end = match args.eos.as_deref() {
        Some("none") => None,
        Some(token) => Some(tokenizer.id_of(token).ok_or_else(|| {
            let path = tokenizer.path().display();
            format!("eos = {token}: is no token of {path}; name one, or none")
        })?),
        None if args.chat => None,
        None => Some(tokenizer.end().ok_or_else(|| {
            let path = tokenizer.path().display();
            format!("{path}: it does not say which token ends a document; name it with --eos")
        })?),
    };
    let (own, date) = (args.chat_template.as_deref(), args.chat_date.as_deref());
    let template = || ChatTemplate::open(tokenizer.path(), own, date);
    let chat = args.chat.then(template).transpose().map_err(text)?;
    let (field, threads, skip_bad_lines) = (args.field.clone(), args.threads, args.skip_bad_lines);
    let options = TokenizeOptions { field, end, threads, chat, skip_bad_lines };
    let left_out = left_out(&args.inputs).map_err(text)?;
    tell(tokenizer.notes().iter().chain(&left_out));
    // `-o x.bin` means x.
    let out = match output.extension().and_then(|e| e.to_str()) {
        Some("bin" | "idx") => output.with_extension(""),
        _ => output.clone(),
    };
    let (bar, start) = (bar(), Instant::now());
    let show = |now: Tokenized| {
        bar.set_length(now.bytes_total.max(now.bytes));
        bar.set_position(now.bytes);
    };
    let done = tokenize(&args.inputs, &tokenizer, &out, &options, show);
    bar.finish_and_clear();
    let done = done.map_err(text)?;
    let seconds = start.elapsed().as_secs_f64();
    if done.bad_lines > 0 {
        tell(&[format!("{} lines were refused and are left out", done.bad_lines)]);
    }
    println!("{}", summary(&out, &tokenizer, args, done, seconds));
    Ok(())
}

/// A line for each note, as far as there is room; they may quote files.
fn tell<'a>(notes: impl IntoIterator<Item = &'a String>) {
    let notes: Vec<&String> = notes.into_iter().collect();
    for note in notes.iter().take(NOTES_MAX) {
        eprintln!("note: {}", escaped(note));
    }
    if let Some(more) = notes.len().checked_sub(NOTES_MAX).filter(|more| *more > 0) {
        eprintln!("note: and {more} more");
    }
}

/// The lines about what was written.
fn summary(
    out: &Path,
    tokenizer: &TextTokenizer,
    args: &Args,
    done: Tokenized,
    seconds: f64,
) -> String {
    let answers = match args.chat {
        true => format!(" ({} of answers, which the .mask marks)", done.answers),
        false => String::new(),
    };
    let [before, behind] = tokenizer.around().map(|ids| ids.iter().map(u32::to_string));
    let [before, behind] = [before.collect::<Vec<_>>(), behind.collect()];
    let around = match (args.chat, before.is_empty(), behind.is_empty()) {
        (true, ..) | (_, true, true) => String::new(),
        (_, false, true) => format!(", each document behind id {}", before.join(" ")),
        (_, true, false) => format!(", each document before id {}", behind.join(" ")),
        _ => format!(", each document between ids {} and {}", before.join(" "), behind.join(" ")),
    };
    format!(
        "{}.bin: {} documents, {} tokens of {} ids{answers}{around}, in {seconds:.1} s",
        escaped(&out.display().to_string()),
        done.documents,
        done.tokens,
        tokenizer.vocabulary()
    )
}

/// Standard input to standard output: text to ids, or back.
fn translate(tokenizer: &TextTokenizer, args: &Args) -> Result<(), String> {
    let mut input = String::new();
    let read = stdin().read_to_string(&mut input);
    read.map_err(|e| format!("standard input: cannot be read ({e}); give UTF-8 text"))?;
    let output = if args.encode {
        let ids = tokenizer.encode(&input).map_err(|e| e.to_string())?;
        ids.iter().map(u32::to_string).collect::<Vec<_>>().join(" ")
    } else {
        let id = |word: &str| {
            word.parse().map_err(|e| format!("{word}: is no token id ({e}); give whole numbers"))
        };
        let ids = input.split_whitespace().map(id).collect::<Result<Vec<u32>, _>>()?;
        tokenizer.decode_behind(&ids, args.behind).map_err(|e| e.to_string())?
    };
    // The reader escapes it: here it is the tokenizer's own text.
    stdout().write_all(output.as_bytes()).map_err(|e| format!("standard output: {e}"))
}

/// A bar where somebody sees it.
fn bar() -> ProgressBar {
    if !stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let form = "{bar:20} {percent:>3} %  {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left";
    let bar = ProgressBar::new(0);
    bar.set_style(ProgressStyle::with_template(form).expect("a template"));
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}
