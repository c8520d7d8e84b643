//! `cargo run --release -p zeropp-tokens --example tokenize -- TOKENIZER OUT THREADS INPUT...`:
//! writes OUT.bin and OUT.idx and prints the seconds that it took.

use std::path::PathBuf;
use std::time::Instant;

use zeropp_tokens::{TextTokenizer, TokenizeOptions, tokenize};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let [tokenizer, out, threads, inputs @ ..] = args.as_slice() else {
        return Err("name a tokenizer, an output, threads and inputs".into());
    };
    let tokenizer = TextTokenizer::open(tokenizer)?;
    let threads = threads.to_str().ok_or("threads")?.parse()?;
    let (field, end) = ("text".into(), tokenizer.end());
    let options = TokenizeOptions { field, end, threads, chat: None, skip_bad_lines: false };
    let start = Instant::now();
    let done = tokenize(inputs, &tokenizer, out, &options, |_| ())?;
    println!("{} {}", done.tokens, start.elapsed().as_secs_f64());
    Ok(())
}
