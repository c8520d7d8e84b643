//! `zeropp run --find-lr N`: a learning-rate range test (Smith, 2017, Cyclical learning rates).

use std::path::Path;

use zeropp::pipeline::draw::chart::{self, Curve, CurveStyle, Mark, Panel, Scale};
use zeropp::pipeline::draw::page::{lines, page};
use zeropp::{Config, Trainer};

use crate::failure::Failure;
use crate::figures::say;
use crate::log::Voice;
use crate::output::write;
use crate::pace::LinePace;
use crate::plot::smoothed;
use crate::progress::Progress;
use crate::trial::writing_nothing;

/// Where the curve is drawn, and its numbers.
pub(crate) const PAGE: &str = "find-lr.html";
pub(crate) const ROWS: &str = "find-lr.csv";
/// The curve is smoothed over so many steps on both sides at least, and over this part of all.
const SMOOTHED_MIN: usize = 5;
const SMOOTHED_PART: usize = 20;
/// Beyond so many times the lowest loss nothing is to be learned.
const BEYOND: f64 = 4.0;
/// Losses up to so many times the first one are drawn.
const SHOWN: f64 = 1.25;
/// Points on both sides that a slope is over.
const ASIDE: usize = 2;

/// The run that tests rates with these settings: it begins anew, measures and writes nothing else.
pub(crate) fn test_of(config: Config) -> Config {
    Config {
        steps: config.find_lr,
        warmup: Some(0),
        min_lr: None,
        // A rate that is too high is what is looked for.
        max_skipped: 0,
        ..writing_nothing(config)
    }
}

/// Runs the test, draws it, and says which rate it suggests.
pub(crate) fn run(config: &Config, trainer: &Trainer, voice: Voice) -> Result<(), Failure> {
    let pace = LinePace::new(config.steps, config.log_every).on(config);
    let quiet = !voice.steps || voice.json;
    let mut progress = Progress::new(pace, config.steps, 0, !voice.json, quiet);
    let mut test = Test::new(config.steps as usize);
    trainer.train(|step| {
        progress.step(step);
        // A step without a scored token says nothing of its rate.
        let Some(loss) = step.measured_loss() else {
            return std::ops::ControlFlow::Continue(());
        };
        match test.add(step.lr, loss) {
            true => std::ops::ControlFlow::Continue(()),
            false => std::ops::ControlFlow::Break(()),
        }
    })?;
    progress.finish();
    write(Path::new(PAGE), test.page(&config.run_name()).as_bytes())?;
    write(Path::new(ROWS), test.rows().as_bytes())?;
    say(format_args!("\n{}\n{PAGE} has the curve, {ROWS} its numbers", test.verdict()));
    Ok(())
}

/// Rates and the losses at them.
struct Test {
    /// Those of the whole test.
    steps: usize,
    points: Vec<(f64, f64)>,
    over: usize,
    lowest: f64,
}

/// The suggestions of a test.
#[derive(Clone, Copy, Debug, PartialEq)]
struct RateSuggestions {
    /// Where the smoothed loss falls fastest.
    steepest: f64,
    /// Where it is lowest.
    lowest: f64,
}

impl Test {
    fn new(steps: usize) -> Test {
        let over = (steps / SMOOTHED_PART).max(SMOOTHED_MIN);
        Test { steps, points: Vec::new(), over, lowest: f64::INFINITY }
    }

    /// Takes a step; whether the next one can tell more.
    fn add(&mut self, rate: f64, loss: f64) -> bool {
        self.points.push((rate, loss));
        let last = &self.points[self.points.len().saturating_sub(self.over)..];
        let now = last.iter().map(|point| point.1).sum::<f64>() / last.len() as f64;
        self.lowest = self.lowest.min(now);
        now.is_finite() && now <= BEYOND * self.lowest
    }

    fn smooth(&self) -> Vec<(f64, f64)> {
        smoothed(&self.points, self.over)
    }

    fn found(&self) -> Option<RateSuggestions> {
        let smooth = self.smooth();
        let lowest = (0..smooth.len()).min_by(|a, b| smooth[*a].1.total_cmp(&smooth[*b].1))?;
        let slope = |i: &usize| {
            let (a, b) = (smooth[i - ASIDE], smooth[i + ASIDE]);
            (b.1 - a.1) / (b.0 / a.0).ln()
        };
        // At its ends the curve is of fewer points, and rougher.
        let first = self.over.max(ASIDE);
        let last = lowest.min(smooth.len().saturating_sub(ASIDE + 1));
        let steepest = (first..=last).min_by(|a, b| slope(a).total_cmp(&slope(b)))?;
        let found = RateSuggestions { steepest: smooth[steepest].0, lowest: smooth[lowest].0 };
        (slope(&steepest) < 0.0).then_some(found)
    }

    fn verdict(&self) -> String {
        let (first, last) = (self.points[0].0, self.points[self.points.len() - 1].0);
        let steps = self.steps;
        match self.found() {
            Some(RateSuggestions { steepest, lowest }) => format!(
                "between learning rates {first:.1e} and {last:.1e} the loss falls fastest at \
                 {steepest:.1e} and is lowest at {lowest:.1e}\nsuggestion: --lr {steepest:.1e} (a \
                 tenth of the rate with the lowest loss is {:.1e})\nthis is of a test of {steps} \
                 steps: a longer one has learned more before it comes to a rate, so that the loss \
                 falls fastest at a lower one; compare tests of as many steps",
                lowest / 10.0
            ),
            None => format!(
                "the loss falls at no rate from {first:.1e} to {last:.1e}: test more steps, as \
                 with --find-lr 400, or larger batches"
            ),
        }
    }

    fn rows(&self) -> String {
        let smooth = self.smooth();
        let rows = self
            .points
            .iter()
            .zip(smooth)
            .map(|((rate, loss), (_, mean))| format!("{rate},{loss},{mean}\n"));
        format!("lr,loss,mean\n{}", rows.collect::<String>())
    }

    fn page(&self, name: &str) -> String {
        // What is far above the first loss would press the rest together.
        let most = SHOWN * self.points[0].1;
        let curve = |name: &str, points: Vec<(f64, f64)>, mark| {
            let points = points.into_iter().filter(|point| point.1 <= most).collect();
            Curve { name: name.into(), points, mark, look: CurveStyle::one_of(0, 1) }
        };
        let curves = vec![
            curve("a step", self.points.clone(), Mark::Faint),
            curve("smoothed", self.smooth(), Mark::Line),
        ];
        let mark = self.found().map(|f| (f.steepest, format!("{:.1e}", f.steepest)));
        let empty = Panel::new("Loss, nats a token", "learning rate");
        let panel = Panel { x: Scale::Log, curves, mark, ..empty };
        let body = lines(&self.verdict()) + &chart::both(&[panel]);
        page(&format!("Learning rates of {name}"), &body)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A loss that falls most around `fastest` and rises from ten times that on.
    fn test(fastest: f64, noise: f64) -> Test {
        let mut test = Test::new(100);
        for i in 0..100 {
            let rate = 1e-7 * 1e8f64.powf(f64::from(i) / 99.0);
            let x = (rate / fastest).ln();
            let rises = (rate / (10.0 * fastest)).powi(2);
            let loss = 5.0 - 2.0 / (1.0 + (-1.5 * x).exp()) + rises;
            let wave = noise * if i % 2 == 0 { 1.0 } else { -1.0 };
            if !test.add(rate, loss + wave) {
                break;
            }
        }
        test
    }

    #[test]
    fn the_suggestion_is_where_the_loss_falls_fastest() {
        for (fastest, noise) in [(1e-4, 0.0), (1e-3, 0.05), (3e-3, 0.0), (1e-2, 0.02)] {
            let test = test(fastest, noise);
            let found = test.found().unwrap();
            // A step is a fifth more.
            let off = found.steepest / fastest;
            assert!((0.8..1.25).contains(&off), "{fastest}: {found:?}");
            let raw = test.points.iter().min_by(|a, b| a.1.total_cmp(&b.1)).unwrap().0;
            let off = found.lowest / raw;
            assert!((0.6..1.45).contains(&off), "{fastest}: {found:?}, in the data {raw}");
            assert!(found.lowest > found.steepest, "{found:?}");
            assert!(test.points.len() < 100, "it ends where the loss has risen far");
            assert!(test.verdict().contains(&format!("--lr {:.1e}", found.steepest)));
            assert_eq!(test.rows().lines().count(), test.points.len() + 1);
        }
    }

    #[test]
    fn a_loss_that_never_falls_gives_none_and_one_that_is_not_finite_ends() {
        let mut rises = Test::new(40);
        assert!((0..40).all(|i| rises.add(1e-7 * 1.5f64.powi(i), 5.0 + 0.01 * f64::from(i))));
        assert_eq!(rises.found(), None);
        assert!(rises.verdict().contains("falls at no rate") && rises.page("x").contains("<svg"));
        assert!(!rises.add(1.0, f64::NAN), "not finite");
    }
}
