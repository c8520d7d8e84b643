//! The batch of a step over all ranks, from which the micro-batches of each follow.

use super::validate::check;
use super::{Config, ConfigError};

/// Letters that a number may end with.
const UNITS: [(char, f64); 4] = [('k', 1e3), ('K', 1e3), ('M', 1e6), ('G', 1e9)];

/// A batch as it is asked for.
#[derive(Clone, Copy, Debug, PartialEq)]
enum GlobalBatch {
    /// So many samples, no more and no less.
    Samples(u64),
    /// About so many tokens: the nearest whole number of micro-batches.
    Tokens(u64),
}

impl GlobalBatch {
    fn parse(text: &str) -> Option<GlobalBatch> {
        let (number, word) = match text.trim().split_once(char::is_whitespace) {
            Some((number, word)) => (number, word.trim()),
            None => (text.trim(), "samples"),
        };
        let unit = UNITS.iter().find(|(letter, _)| number.ends_with(*letter));
        let digits =
            number.trim_end_matches(|c: char| unit.is_some_and(|(letter, _)| c == *letter));
        let plain = digits.chars().all(|c| c.is_ascii_digit() || c == '.');
        let n = digits.parse::<f64>().ok().filter(|_| plain)? * unit.map_or(1.0, |unit| unit.1);
        let is_whole = n.fract() == 0.0 && (1.0..=1e15).contains(&n);
        match word {
            "samples" | "sample" => is_whole.then_some(GlobalBatch::Samples(n as u64)),
            "tokens" | "token" => is_whole.then_some(GlobalBatch::Tokens(n as u64)),
            _ => None,
        }
    }
}

impl Config {
    /// Samples of a micro-batch on all ranks that have samples of their own.
    fn samples_at_a_time(&self) -> u64 {
        let each = self.micro_batch_size.saturating_mul(self.zero3).saturating_mul(self.dp);
        each.max(1) as u64
    }

    /// Micro-batches of each rank that make up the batch that is asked for, if one is.
    pub(super) fn micro_batches_of_global(&self) -> Option<usize> {
        let each = self.samples_at_a_time();
        let n = match GlobalBatch::parse(self.global_batch.as_ref()?)? {
            GlobalBatch::Samples(samples) => samples / each,
            GlobalBatch::Tokens(tokens) => {
                let each = each.saturating_mul(self.seq.max(1) as u64);
                (tokens.saturating_add(each / 2)) / each
            }
        };
        usize::try_from(n.max(1)).ok()
    }

    /// What a batch in tokens was taken to be, where that is another number.
    pub(crate) fn global_batch_note(&self) -> Option<String> {
        let text = self.global_batch.as_ref()?;
        let GlobalBatch::Tokens(asked) = GlobalBatch::parse(text)? else { return None };
        let got = self.tokens_per_step();
        (got as u64 != asked).then(|| {
            let samples = self.samples_per_step();
            format!("global-batch = {text}: a step has {samples} samples, which are {got} tokens")
        })
    }

    pub(super) fn check_global_batch(&self) -> Result<(), ConfigError> {
        let Some(text) = &self.global_batch else { return Ok(()) };
        let wrong =
            |problem: String, help: &str| ConfigError::value("global-batch", text, problem, help);
        let Some(batch) = GlobalBatch::parse(text) else {
            let help = "use a number such as 512, 512 samples, 524288 tokens or 0.5M tokens";
            return Err(wrong("expected samples or tokens of a step over all ranks".into(), help));
        };
        check(self.schedule_file().is_none(), || {
            let problem = "a schedule file says its micro-batches itself".into();
            wrong(problem, "leave it out, or name a schedule by its kind")
        })?;
        let each = self.samples_at_a_time();
        if let GlobalBatch::Samples(samples) = batch {
            check(samples.is_multiple_of(each), || {
                let problem = format!(
                    "is not a multiple of {each} samples, a micro-batch of {} on zero3 {} x dp {}",
                    self.micro_batch_size, self.zero3, self.dp
                );
                let (below, above) = (samples / each * each, (samples / each + 1) * each);
                let help = match below {
                    0 => format!("use {above}"),
                    _ => format!("use {below} or {above}"),
                };
                wrong(problem, &help)
            })?;
        }
        let follows = self.micro_batches_of_global().unwrap_or(usize::MAX);
        check(self.micro_batches.is_none_or(|given| given == follows), || {
            let given = self.micro_batches.expect("just looked at");
            let problem = format!("takes {follows} micro-batches, and micro-batches is {given}");
            wrong(problem, "leave one of the two out")
        })
    }
}
