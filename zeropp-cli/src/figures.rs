//! Numbers for people.

use std::sync::atomic::{AtomicBool, Ordering};

use zeropp_core::files::escaped;
pub(crate) use zeropp_core::files::in_words as bytes;

use crate::{log_file, stderr, stdout};

/// Whether standard output is for something else.
static ON_STDERR: AtomicBool = AtomicBool::new(false);

/// From now on [`say`] writes to standard error.
pub(crate) fn speak_on_stderr() {
    ON_STDERR.store(true, Ordering::Relaxed);
}

/// Whether [`say`] writes to standard error.
pub(crate) fn speaks_on_stderr() -> bool {
    ON_STDERR.load(Ordering::Relaxed)
}

/// Writes a line to standard output, and to the log file. A reader that has gone away does not end
/// a training run. What the line quotes of a file cannot command the terminal.
pub(crate) fn say(line: impl std::fmt::Display) {
    let line = line.to_string();
    let line = escaped(&line);
    log_file::write(format!("{line}\n").as_bytes());
    show(&line);
}

/// Writes a line to standard output alone.
pub(crate) fn show(line: &str) {
    let line = escaped(line);
    match speaks_on_stderr() {
        false => stdout::print(format!("{line}\n").as_bytes()),
        true => stderr::tell(&line),
    }
}

/// 12,345.
pub(crate) fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// A number and what it counts: `1 rank`, `1,024 ranks`.
pub(crate) fn count(n: usize, noun: &str) -> String {
    format!("{} {noun}{}", grouped(n as u64), if n == 1 { "" } else { "s" })
}

/// With three significant digits and a factor of 1000 in its unit: `1.23 M`.
pub(crate) fn scaled(x: f64) -> String {
    let units = ["", " k", " M", " G", " T", " P"];
    // 999.5 would be printed as 1000.
    let step = units.iter().enumerate().find(|(i, _)| x.abs() < 999.5 * 1e3f64.powi(*i as i32));
    let (power, unit) = step.unwrap_or((5, &" P"));
    let x = x / 1e3f64.powi(power as i32);
    let decimals = match x.abs() {
        x if power == 0 && x.fract() == 0.0 => 0,
        x if x < 9.995 => 2,
        x if x < 99.95 => 1,
        _ => 0,
    };
    format!("{x:.decimals$}{unit}")
}

/// A share as a percentage with one decimal.
pub(crate) fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

/// Hours, minutes and seconds, the larger ones only where needed.
pub(crate) fn duration(seconds: f64) -> String {
    if seconds < 60.0 {
        return format!("{seconds:.1} s");
    }
    let s = seconds.round() as u64;
    let (h, m, s) = (s / 3600, s / 60 % 60, s % 60);
    if h > 0 { format!("{h} h {m:02} min") } else { format!("{m} min {s:02} s") }
}

/// A table with its columns aligned to the right, the first to the left.
pub(crate) fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |c: usize| rows.iter().filter_map(|r| r.get(c)).map(|s| s.chars().count()).max();
    let widths: Vec<_> = (0..columns).map(|c| width(c).unwrap_or(0)).collect();
    let line = |row: &Vec<String>| {
        let mut line = String::new();
        for (c, (text, width)) in row.iter().zip(&widths).enumerate() {
            if c == 0 {
                line.push_str(&format!("{text:width$}"));
            } else {
                line.push_str(&format!("  {text:>width$}"));
            }
        }
        line.trim_end().to_string()
    };
    rows.iter().map(line).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        for (n, text) in [(0, "0"), (999, "999"), (1000, "1,000"), (1234567, "1,234,567")] {
            assert_eq!(grouped(n), text);
        }
        let cases = [
            (0.0, "0"),
            (12.0, "12"),
            (1.5, "1.50"),
            (999.4, "999"),
            (999.6, "1.00 k"),
            (12_345.0, "12.3 k"),
            (999_600.0, "1.00 M"),
            (432_000.0, "432 k"),
            (3.1e6, "3.10 M"),
            (1.75e11, "175 G"),
            (2e20, "200000 P"),
        ];
        for (x, text) in cases {
            assert_eq!(scaled(x), text);
        }
        for (n, text) in [(0, "0 B"), (1000, "1000 B"), (1024, "1.00 KiB"), (3 << 29, "1.50 GiB")] {
            assert_eq!(bytes(n), text);
        }
        for (s, text) in [(3.21, "3.2 s"), (61.0, "1 min 01 s"), (7260.0, "2 h 01 min")] {
            assert_eq!(duration(s), text);
        }
        assert_eq!(percent(0.0514), "5.1 %");
        assert_eq!((count(1, "rank"), count(0, "rank")), ("1 rank".into(), "0 ranks".into()));
    }

    #[test]
    fn tables_are_aligned() {
        let rows = [vec!["a".into(), "1".into()], vec!["bcd".into(), "1000".into(), "x".into()]];
        assert_eq!(table(&rows), "a       1\nbcd  1000  x");
    }
}
