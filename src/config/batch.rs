//! The batch of a step over all ranks, from which the micro-batches of each follow.

use zeropp_pipeline::schedules::StepForm;

use super::validate::check;
use super::{Config, ConfigError, Deal};

/// Letters that a number may end with.
const UNITS: [(char, f64); 4] = [('k', 1e3), ('K', 1e3), ('M', 1e6), ('G', 1e9)];

/// The problem of a value that is no batch, and what would work.
const EXPECTED: (&str, &str) = (
    "expected samples or tokens of a step over all ranks",
    "use a number such as 512, 512 samples, 524288 tokens or 0.5M tokens",
);

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

/// The samples of a step that `global-batch` = `text` asks for, of `seq` tokens each, for a plan
/// over `ranks`, which have no layout yet: a number of tokens is rounded to as many samples for
/// each rank where there is one for each, and to a multiple of 2, 4, .. of that within a per cent;
/// else to whole samples.
///
/// # Errors
/// A text that `global-batch` does not take.
pub fn samples_of(text: &str, seq: usize, ranks: usize) -> Result<usize, ConfigError> {
    let refused = || ConfigError::value("global-batch", text, EXPECTED.0, EXPECTED.1);
    let samples = match GlobalBatch::parse(text).ok_or_else(refused)? {
        GlobalBatch::Samples(samples) => samples,
        GlobalBatch::Tokens(tokens) => {
            let (seq, ranks) = (seq.max(1) as u64, ranks.max(1) as u64);
            let samples = |each: u64| {
                let each_tokens = seq.saturating_mul(each);
                (tokens.saturating_add(each_tokens / 2) / each_tokens).saturating_mul(each)
            };
            let off = |samples: u64| samples.saturating_mul(seq).abs_diff(tokens);
            // The more often 2 divides them, the more layouts there are.
            let mut each = ranks;
            while samples(2 * each) > 0 && off(samples(2 * each)) <= tokens / 100 {
                each *= 2;
            }
            if samples(each) > 0 { samples(each) } else { samples(1).max(1) }
        }
    };
    usize::try_from(samples).map_err(|_| refused())
}

impl Config {
    /// Samples of a micro-batch on all ranks of a replica that have samples of their own.
    fn samples_of_a_replica(&self) -> u64 {
        self.micro_batch_size.saturating_mul(self.zero3).max(1) as u64
    }

    /// How many micro-batches the ranks of each replica have in a step: as many each, unless
    /// `global_batch` is a number of samples that does not divide so. Schedules that go in rounds
    /// of P micro-batches get whole rounds then, where the step has whole rounds.
    pub(crate) fn deal(&self) -> Deal {
        self.uneven_deal().unwrap_or_else(|| Deal::even(self.micro_batches(), self.dp))
    }

    /// That of a batch that does not divide evenly.
    fn uneven_deal(&self) -> Option<Deal> {
        let Some(GlobalBatch::Samples(samples)) = GlobalBatch::parse(self.global_batch.as_ref()?)
        else {
            return None;
        };
        let each = self.samples_of_a_replica();
        let all = usize::try_from(samples / each).ok()?;
        let divides = self.dp == 0 || all.is_multiple_of(self.dp);
        if divides || all < self.dp || !samples.is_multiple_of(each) {
            return None;
        }
        let rounds = self.kind().is_some_and(|kind| kind.step == StepForm::Rounds);
        let whole = rounds && all.is_multiple_of(self.pp.max(1)) && all / self.pp >= self.dp;
        let kept = self.dealt_by.filter(|at| all.is_multiple_of(*at) && all / at >= self.dp);
        Some(Deal::of(all, self.dp, kept.unwrap_or(if whole { self.pp } else { 1 })))
    }

    /// The most micro-batches of a rank with the batch that is asked for, if one is.
    pub(super) fn micro_batches_of_global(&self) -> Option<usize> {
        let batch = GlobalBatch::parse(self.global_batch.as_ref()?)?;
        if let Some(deal) = self.uneven_deal() {
            return Some(deal.most);
        }
        let each = self.samples_of_a_replica().saturating_mul(self.dp.max(1) as u64);
        let n = match batch {
            GlobalBatch::Samples(samples) => samples / each,
            GlobalBatch::Tokens(tokens) => {
                let each = each.saturating_mul(self.seq.max(1) as u64);
                (tokens.saturating_add(each / 2)) / each
            }
        };
        usize::try_from(n.max(1)).ok()
    }

    /// A note about the batch: the number that a batch in tokens was rounded to, where it is
    /// another; and how one in samples was dealt out to the replicas, where they have not as many
    /// each.
    pub(crate) fn global_batch_note(&self) -> Option<String> {
        let text = self.global_batch.as_ref()?;
        let samples = self.samples_per_step();
        if self.deal().fewer().is_some() {
            let dealt: Vec<_> = self.deal().to_vec().iter().map(usize::to_string).collect();
            let dealt = dealt.join(", ");
            return Some(format!(
                "global-batch = {text}: the replicas have {dealt} micro-batches a rank; those with \
                 fewer wait for the others at the end of each step"
            ));
        }
        let GlobalBatch::Tokens(asked) = GlobalBatch::parse(text)? else { return None };
        let got = self.tokens_per_step();
        (got as u64 != asked).then(|| {
            format!("global-batch = {text}: a step has {samples} samples, which are {got} tokens")
        })
    }

    /// The same with so many samples a step, dealt out to the replicas that it has; nothing where
    /// they do not come to whole micro-batches for each.
    pub(crate) fn with_samples(&self, samples: usize) -> Option<Config> {
        let global_batch = Some(samples.to_string());
        let config = Config { global_batch, micro_batches: None, dealt_by: None, ..self.clone() };
        (config.check_global_batch().is_ok() && config.samples_per_step() == samples)
            .then_some(config)
    }

    pub(super) fn check_global_batch(&self) -> Result<(), ConfigError> {
        let Some(text) = &self.global_batch else { return Ok(()) };
        let wrong =
            |problem: String, help: &str| ConfigError::value("global-batch", text, problem, help);
        let Some(batch) = GlobalBatch::parse(text) else {
            return Err(wrong(EXPECTED.0.into(), EXPECTED.1));
        };
        check(self.schedule_file().is_none(), || {
            let problem = "a schedule file says its micro-batches itself".into();
            wrong(problem, "leave it out, or name a schedule by its kind")
        })?;
        let each = self.samples_of_a_replica();
        if let GlobalBatch::Samples(samples) = batch {
            let of = format!("a micro-batch of {} on zero3 {}", self.micro_batch_size, self.zero3);
            check(samples.is_multiple_of(each), || {
                let (below, above) = (samples / each * each, (samples / each + 1) * each);
                let help = match below {
                    0 => format!("use {above}"),
                    _ => format!("use {below} or {above}"),
                };
                wrong(format!("is not a multiple of {each} samples, {of}"), &help)
            })?;
            check(samples / each >= self.dp as u64, || {
                let (dp, least) = (self.dp, each.saturating_mul(self.dp as u64));
                let problem = format!("is less than {least} samples, {of} for each of dp {dp}");
                wrong(problem, &format!("use {least} or more, or a smaller dp"))
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
