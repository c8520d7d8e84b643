//! Which steps of a run have a line, and what such a line says.

use std::time::{Duration, Instant};

use zeropp::config::EngineKind;
use zeropp::{Config, StepMetrics};

use crate::figures::{duration, grouped, percent};

/// From one line to the next where nothing else is asked for.
const PAUSE: Duration = Duration::from_secs(1);
/// How much of the time of a step is the last one's, in the mean that tells the time left.
const NEWEST: f64 = 0.1;

/// A run's steps between two lines.
pub(crate) struct LinePace {
    steps: u64,
    /// Steps from one line to the next; none for a line a second.
    every: Option<u64>,
    /// Whether a line has the bubble: not where a rank waits for no other within a step, and not
    /// where it waits for a core.
    has_bubble: bool,
    /// When the last line came; none before the first.
    last_line: Option<Instant>,
    /// Sum and number of the losses since, of steps that had one.
    losses: (f64, u64),
    /// The loss of the last line that had one, and of how many steps it is the mean.
    mean: Option<(f64, u64)>,
    /// The last step, while it has no line.
    waiting: Option<StepMetrics>,
    /// When the last step came.
    last_step: Option<Instant>,
    /// Mean seconds from one step to the next, of late.
    each_s: Option<f64>,
}

impl LinePace {
    /// Of a run of `steps` steps with a line every `every` steps, or about every second.
    pub(crate) fn new(steps: u64, every: Option<u64>) -> LinePace {
        LinePace {
            steps,
            every,
            has_bubble: true,
            last_line: None,
            losses: (0.0, 0),
            mean: None,
            waiting: None,
            last_step: None,
            each_s: None,
        }
    }

    /// The same, of the ranks of `config`.
    pub(crate) fn on(self, config: &Config) -> LinePace {
        LinePace { has_bubble: !is_alone(config) && shared_cores(config).is_none(), ..self }
    }

    /// The same run, with a line every `every` steps.
    pub(crate) fn every(&self, every: u64) -> LinePace {
        LinePace { has_bubble: self.has_bubble, ..LinePace::new(self.steps, Some(every)) }
    }

    /// Takes a step that was done at `now`; its line, if it has one.
    pub(crate) fn step(&mut self, m: &StepMetrics, now: Instant) -> Option<String> {
        let since = self.last_step.map(|last| (now - last).as_secs_f64());
        // Evaluations and saves are part of it, and the first step is not.
        self.each_s = since.map(|s| match self.each_s {
            Some(mean) => mean + NEWEST * (s - mean),
            None => s,
        });
        self.last_step = Some(now);
        if let Some(loss) = m.measured_loss() {
            self.losses = (self.losses.0 + loss, self.losses.1 + 1);
        }
        self.waiting = Some(m.clone());
        let due = match (self.every, self.last_line) {
            (_, None) => true,
            (Some(every), _) => m.step.is_multiple_of(every),
            (None, Some(at)) => now - at >= PAUSE,
        };
        if due || m.step == self.steps { self.line(now) } else { None }
    }

    /// The line of the last step, if it had none: a run may end before its last step.
    pub(crate) fn rest(&mut self) -> Option<String> {
        self.line(Instant::now())
    }

    /// The loss of the last line that had one, and of how many steps it is the mean.
    pub(crate) fn mean(&self) -> Option<(f64, u64)> {
        self.mean
    }

    /// Seconds until the last step, as far as known.
    fn left_s(&self, step: u64) -> Option<f64> {
        let left = self.steps.saturating_sub(step);
        self.each_s.filter(|_| left > 0).map(|each| each * left as f64)
    }

    fn line(&mut self, now: Instant) -> Option<String> {
        let m = self.waiting.take()?;
        let (sum, steps) = std::mem::take(&mut self.losses);
        self.last_line = Some(now);
        if steps > 0 {
            self.mean = Some((sum / steps as f64, steps));
        }
        let loss = match steps {
            0 => "loss - (no token was scored)".into(),
            _ => mean_loss(sum / steps as f64, steps, ""),
        };
        let bubble = self.has_bubble.then(|| format!("  bubble {}", percent(m.bubble)));
        let left = self.left_s(m.step).map(|s| format!("  {} left", duration(s)));
        let experts = m.experts.as_ref().map(|experts| {
            let idle = match experts.idle {
                0 => String::new(),
                n => format!(", {n} idle"),
            };
            format!("  fullest expert {:.2}{idle}", experts.fullest)
        });
        Some(format!(
            "step {}/{}  {loss}  norm {:.3}  lr {:.2e}  {} tokens/s{}{}{}",
            m.step,
            self.steps,
            m.grad_norm,
            m.lr,
            grouped(m.tokens_per_s.round() as u64),
            bubble.unwrap_or_default(),
            experts.unwrap_or_default(),
            left.unwrap_or_default(),
        ))
    }
}

/// Whether ranks share neither a pipeline nor a stage: then no gather moves anything, and no rank
/// waits for another one within a step.
pub(crate) fn is_alone(config: &Config) -> bool {
    config.pp * config.zero3 == 1
}

/// The cores of this machine, where the ranks of a run are its threads and share them. Their wait
/// for a core would be most of a measured bubble.
pub(crate) fn shared_cores(config: &Config) -> Option<usize> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let is_shared = config.engine == EngineKind::Threads && config.mesh().world() > cores;
    is_shared.then_some(cores)
}

/// A loss, and of how many steps it is the mean where it is one; `from` is what it was before.
pub(crate) fn mean_loss(loss: f64, steps: u64, from: &str) -> String {
    let mean = if steps > 1 { format!(" (mean of {steps})") } else { String::new() };
    format!("loss {from}{loss:.4}{mean}")
}

#[cfg(test)]
mod tests {
    use zeropp_core::metrics::ExpertMetrics;

    use super::*;

    fn step(step: u64, loss: f64) -> StepMetrics {
        StepMetrics {
            step,
            loss,
            grad_norm: 1.25,
            lr: 3e-3,
            tokens_per_s: 8191.6,
            bubble: 0.043,
            ..StepMetrics::default()
        }
    }

    /// The steps that have a line, of 100 that come every `ms` milliseconds.
    fn reported(every: Option<u64>, ms: u64) -> Vec<u64> {
        let (mut pace, begin) = (LinePace::new(100, every), Instant::now());
        let has_line = |n: &u64| {
            let now = begin + Duration::from_millis(n * ms);
            pace.step(&step(*n, 1.0), now).is_some()
        };
        (1..=100).filter(has_line).collect()
    }

    #[test]
    fn lines_come_about_every_second_or_as_asked_and_the_first_and_last_always() {
        assert_eq!(reported(None, 2000), (1..=100).collect::<Vec<_>>());
        assert_eq!(reported(None, 300), (1..=100).step_by(4).chain([100]).collect::<Vec<_>>());
        assert_eq!(reported(None, 1), [1, 100]);
        assert_eq!(reported(Some(40), 5), [1, 40, 80, 100]);
        assert_eq!(reported(Some(1), 0), (1..=100).collect::<Vec<_>>());
    }

    #[test]
    fn a_line_says_how_tokens_are_spread_over_experts() {
        let line = |idle| {
            let experts = ExpertMetrics { fullest: 1.375, idle, ..ExpertMetrics::default() };
            let m = StepMetrics { experts: Some(experts), ..step(1, 4.0) };
            LinePace::new(1, None).step(&m, Instant::now()).unwrap()
        };
        assert!(line(0).ends_with("  bubble 4.3 %  fullest expert 1.38"), "{}", line(0));
        assert!(line(3).ends_with("  fullest expert 1.38, 3 idle"), "{}", line(3));
    }

    #[test]
    fn a_line_has_the_mean_of_its_steps_and_the_time_left() {
        let (mut pace, begin) = (LinePace::new(50, Some(3)), Instant::now());
        let at = |s: u64| begin + Duration::from_secs(s);
        let line = "step 1/50  loss 4.0000  norm 1.250  lr 3.00e-3  8,192 tokens/s  bubble 4.3 %";
        assert_eq!(pace.step(&step(1, 4.0), at(0)).unwrap(), line);
        assert_eq!(pace.step(&step(2, 3.0), at(2)), None);
        let third = pace.step(&step(3, 2.0), at(4)).unwrap();
        assert!(third.starts_with("step 3/50  loss 2.5000 (mean of 2)  norm"), "{third}");
        assert!(third.ends_with("  1 min 34 s left"), "{third}");
        assert_eq!(pace.mean(), Some((2.5, 2)), "what the summary ends with");
        assert_eq!(pace.rest(), None, "it had its line");
        assert_eq!(pace.step(&step(4, 7.0), at(6)), None);
        // Before, a step without a scored token entered the mean as 0.
        let unscored = StepMetrics { scored_tokens: Some(0), ..step(5, 0.0) };
        assert_eq!(pace.step(&unscored, at(7)), None);
        // Stopped there.
        assert!(pace.rest().unwrap().starts_with("step 5/50  loss 7.0000  norm"));
        let alone = pace.step(&StepMetrics { step: 6, ..unscored }, at(8)).unwrap();
        assert!(alone.starts_with("step 6/50  loss - (no token was scored)  norm"), "{alone}");
        assert_eq!(pace.mean(), Some((7.0, 1)));
    }
}
