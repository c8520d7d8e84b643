//! A run while it goes: lines of steps, and on a terminal a bar below them.

use std::io::IsTerminal;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use zeropp::{Evaluation, RUN_EVENTS, StepMetrics};

use crate::figures::{duration, grouped, say, show, speaks_on_stderr};
use crate::log_file;
use crate::pace::LinePace;

/// With seven digits of steps it has 60 columns.
const STYLE: &str = "{bar:12} {pos}/{len}  {msg}  {eta} left";

/// The bar on the terminal, while there is one.
static BAR: Mutex<Option<ProgressBar>> = Mutex::new(None);

/// Writes something to the terminal while the bar is out of the way.
pub(crate) fn above_the_bar<T>(write: impl FnOnce() -> T) -> T {
    let bar = BAR.lock().expect("nobody panics with it").clone();
    match bar {
        Some(bar) => bar.suspend(write),
        None => write(),
    }
}

/// Shows the steps of a run.
pub(crate) struct Progress {
    /// `None` off a terminal.
    bar: Option<ProgressBar>,
    pace: LinePace,
    /// Of the log file, which has every step.
    in_file: Option<LinePace>,
    steps: u64,
    quiet: bool,
}

impl Progress {
    /// For a run of this many steps, `done` of which are behind it; `in_place` if a bar may be
    /// shown, and `quiet` if nothing is to be on the terminal.
    pub(crate) fn new(pace: LinePace, steps: u64, done: u64, in_place: bool, quiet: bool) -> Self {
        let (is_terminal, target) = match speaks_on_stderr() {
            false => (std::io::stdout().is_terminal(), ProgressDrawTarget::stdout()),
            true => (std::io::stderr().is_terminal(), ProgressDrawTarget::stderr()),
        };
        let bar = (in_place && is_terminal && !quiet).then(|| {
            let bar = ProgressBar::with_draw_target(Some(steps), target);
            bar.set_style(ProgressStyle::with_template(STYLE).expect("a valid template"));
            bar.set_position(done);
            bar.reset_eta();
            bar.enable_steady_tick(Duration::from_millis(500));
            bar
        });
        *BAR.lock().expect("nobody panics with it") = bar.clone();
        let in_file = log_file::is_open().then(|| pace.every(1));
        Progress { bar, pace, in_file, steps, quiet }
    }

    /// Shows one step.
    pub(crate) fn step(&mut self, m: &StepMetrics) {
        let now = Instant::now();
        if let Some(line) = self.in_file.as_mut().and_then(|pace| pace.step(m, now)) {
            log_file::write(format!("{line}\n").as_bytes());
        }
        if let Some(line) = self.pace.step(m, now) {
            self.show(&line);
        }
        if let Some(eval) = m.eval {
            self.tell(&format!("step {}/{}  {}", m.step, self.steps, evaluated(&eval)));
        }
        if let Some(bar) = &self.bar {
            if let Some(loss) = m.measured_loss() {
                bar.set_message(format!("loss {loss:.4}"));
            }
            bar.set_position(m.step);
        }
    }

    /// Shows a text that the model has written after `step`.
    pub(crate) fn sample(&self, step: u64, text: &str) {
        tracing::info!(target: RUN_EVENTS, step, text, "sample");
        let lines: String = text.lines().map(|line| format!("\n  | {line}")).collect();
        self.tell(&format!("step {step}/{}  the model writes{lines}", self.steps));
    }

    /// A line on the terminal alone, unless that is to be quiet.
    fn show(&self, line: &str) {
        if !self.quiet {
            above_the_bar(|| show(line));
        }
    }

    /// A line on the terminal, unless that is to be quiet, and in the log file.
    fn tell(&self, line: &str) {
        match self.quiet {
            true => log_file::write(format!("{line}\n").as_bytes()),
            false => above_the_bar(|| say(line)),
        }
    }

    /// Takes the bar away. The last step has its line, whose mean of the loss is given back.
    pub(crate) fn finish(&mut self) -> Option<(f64, u64)> {
        if let Some(line) = self.pace.rest() {
            self.show(&line);
        }
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        *BAR.lock().expect("nobody panics with it") = None;
        self.pace.mean()
    }
}

/// How many tokens a loss is of.
fn tokens(eval: &Evaluation) -> String {
    let all = grouped(eval.tokens);
    match eval.scored_tokens {
        Some(scored) => format!("{} scored of {all} tokens", grouped(scored)),
        None => format!("{all} tokens"),
    }
}

/// A validation loss in a line.
pub(crate) fn evaluated(eval: &Evaluation) -> String {
    let bits = eval.bits_per_byte.map(|bits| format!("  {bits:.4} bits a byte"));
    format!(
        "validation loss {:.4}  perplexity {:.3}{}  {} in {}{}",
        eval.loss,
        eval.perplexity,
        bits.unwrap_or_default(),
        tokens(eval),
        duration(eval.seconds),
        if eval.best { "  lowest so far" } else { "" },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_validation_loss_is_reported_in_a_line() {
        let eval = Evaluation {
            loss: 2.0,
            perplexity: 2f64.exp(),
            bits_per_byte: Some(2.0 / std::f64::consts::LN_2),
            tokens: 4096,
            seconds: 0.5,
            best: true,
            ..Evaluation::default()
        };
        let line = "validation loss 2.0000  perplexity 7.389  2.8854 bits a byte  4,096 tokens in \
                    0.5 s  lowest so far";
        assert_eq!(evaluated(&eval), line);
        let masked = evaluated(&Evaluation { scored_tokens: Some(1024), ..eval });
        assert!(masked.contains("  1,024 scored of 4,096 tokens in 0.5 s"), "{masked}");
    }
}
