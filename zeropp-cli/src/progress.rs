//! A run while it goes: a bar on a terminal, a line a step elsewhere.

use std::io::IsTerminal;
use std::sync::Mutex;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use zeropp::{Evaluation, StepMetrics};

use crate::figures::{duration, grouped, percent, say, speaks_on_stderr};

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
    steps: u64,
    quiet: bool,
}

impl Progress {
    /// For a run of this many steps, `done` of which are behind it; `in_place` if they may be shown
    /// in one line that changes, and `quiet` if not at all.
    pub(crate) fn new(steps: u64, done: u64, in_place: bool, quiet: bool) -> Progress {
        let (is_terminal, target) = match speaks_on_stderr() {
            false => (std::io::stdout().is_terminal(), ProgressDrawTarget::stdout()),
            true => (std::io::stderr().is_terminal(), ProgressDrawTarget::stderr()),
        };
        let bar = (in_place && is_terminal && !quiet).then(|| {
            let bar = ProgressBar::with_draw_target(Some(steps), target);
            let style = "{bar:24} {pos}/{len}  {msg}  {eta} left";
            bar.set_style(ProgressStyle::with_template(style).expect("a valid template"));
            bar.set_position(done);
            bar.reset_eta();
            bar.enable_steady_tick(Duration::from_millis(500));
            bar
        });
        *BAR.lock().expect("nobody panics with it") = bar.clone();
        Progress { bar, steps, quiet }
    }

    /// Shows one step.
    pub(crate) fn step(&mut self, m: &StepMetrics) {
        match &self.bar {
            Some(bar) => {
                bar.set_message(figures(m));
                bar.set_position(m.step);
            }
            None if self.quiet => {}
            None => say(format!("step {}/{}  {}", m.step, self.steps, figures(m))),
        }
        if let Some(eval) = m.eval.filter(|_| !self.quiet) {
            above_the_bar(|| say(format!("step {}/{}  {}", m.step, self.steps, evaluated(&eval))));
        }
    }

    /// Takes the bar away.
    pub(crate) fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        *BAR.lock().expect("nobody panics with it") = None;
    }
}

/// A validation loss in a line.
pub(crate) fn evaluated(eval: &Evaluation) -> String {
    let bits = eval.bits_per_byte.map(|bits| format!("  {bits:.4} bits a byte"));
    format!(
        "validation loss {:.4}  perplexity {:.3}{}  {} tokens in {}{}",
        eval.loss,
        eval.perplexity,
        bits.unwrap_or_default(),
        grouped(eval.tokens),
        duration(eval.seconds),
        if eval.best { "  lowest so far" } else { "" },
    )
}

fn figures(m: &StepMetrics) -> String {
    format!(
        "loss {:.4}  norm {:.3}  {} tokens/s  bubble {}",
        m.loss,
        m.grad_norm,
        grouped(m.tokens_per_s.round() as u64),
        percent(m.bubble)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_told_in_a_line() {
        let m = StepMetrics {
            loss: 5.545_177,
            grad_norm: 1.25,
            tokens_per_s: 8191.6,
            bubble: 0.043,
            ..StepMetrics::default()
        };
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
        assert_eq!(figures(&m), "loss 5.5452  norm 1.250  8,192 tokens/s  bubble 4.3 %");
    }
}
