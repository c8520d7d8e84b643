//! The ids of texts: `cargo run --release -p zeropp-tokens --example ids -- TOKENIZER`, a text a
//! line on standard input as JSON, a line of ids for each on standard output.

use std::io::{BufRead, Write, stdin, stdout};

use zeropp_tokens::TextTokenizer;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args_os().nth(1).ok_or("name a tokenizer")?;
    let tokenizer = TextTokenizer::open(path.as_ref())?.without_special_tokens();
    let mut out = std::io::BufWriter::new(stdout().lock());
    for line in stdin().lock().lines() {
        let text: String = serde_json::from_str(&line?)?;
        writeln!(out, "{}", serde_json::to_string(&tokenizer.encode(&text)?)?)?;
    }
    Ok(out.flush()?)
}
