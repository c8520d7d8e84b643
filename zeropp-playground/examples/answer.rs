//! Answers what the page asks, natively: a request a line in, an answer a line out. The browser's
//! test holds the page's program against it, byte for byte.

use std::io::{self, BufRead, Write};

fn main() -> io::Result<()> {
    let mut out = io::stdout().lock();
    for line in io::stdin().lock().lines() {
        writeln!(out, "{}", zeropp_playground::answer(&line?))?;
    }
    Ok(())
}
