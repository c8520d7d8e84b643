//! `zeropp-tokenize`, which `zeropp tokenize` calls: text into files of tokens.

use std::io::{IsTerminal, Read, Write, stderr, stdin, stdout};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use zeropp_data::files::escaped;
use zeropp_tokens::{
    ChatTemplate, TextTokenizer, TokenizeOptions, Tokenized, TokensError, tokenize,
};

/// Turn text into a file of tokens to train on
///
/// Inputs are text files (a document each), .jsonl and .jsonl.zst (a document a line), .parquet (a
/// document a row, where it was built with the feature parquet), and folders of them, read in the
/// order of their paths. OUT.bin and OUT.idx are Megatron's; `zeropp run
/// --data OUT.bin` reads them. The same inputs give the same bytes with any number of threads, and
/// the same command goes on where it was killed.
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
    /// Lines are conversations (`messages` of roles and contents): write them by the model's chat
    /// template, and OUT.mask, by which only the answers are scored
    #[arg(long)]
    chat: bool,
    /// The template of `--chat` [default: the tokenizer's]
    #[arg(long, value_name = "FILE", requires = "chat")]
    chat_template: Option<PathBuf>,
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
    if args.encode || args.decode {
        return translate(&tokenizer, args.encode);
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
    let template = || ChatTemplate::open(tokenizer.path(), args.chat_template.as_deref());
    let chat = args.chat.then(template).transpose().map_err(text)?;
    let options = TokenizeOptions { field: args.field.clone(), end, threads: args.threads, chat };
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
    let answers = match args.chat {
        true => format!(" ({} of answers, which the .mask marks)", done.answers),
        false => String::new(),
    };
    println!(
        "{}.bin: {} documents, {} tokens of {} ids{answers}, in {seconds:.1} s",
        escaped(&out.display().to_string()),
        done.documents,
        done.tokens,
        tokenizer.vocabulary()
    );
    Ok(())
}

/// Standard input to standard output: text to ids, or back.
fn translate(tokenizer: &TextTokenizer, encode: bool) -> Result<(), String> {
    let mut input = String::new();
    let read = stdin().read_to_string(&mut input);
    read.map_err(|e| format!("standard input: cannot be read ({e}); give UTF-8 text"))?;
    let output = if encode {
        let ids = tokenizer.encode(&input).map_err(|e| e.to_string())?;
        ids.iter().map(u32::to_string).collect::<Vec<_>>().join(" ")
    } else {
        let id = |word: &str| {
            word.parse().map_err(|e| format!("{word}: is no token id ({e}); give whole numbers"))
        };
        let ids = input.split_whitespace().map(id).collect::<Result<Vec<u32>, _>>()?;
        tokenizer.decode(&ids).map_err(|e| e.to_string())?
    };
    // Whoever reads it escapes it: here it is what the tokenizer made.
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
