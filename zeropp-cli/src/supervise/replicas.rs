//! How many replicas a supervised command is started with: fewer, where not all come back.

use clap::Arg;

use super::progress::ProgressFiles;
use crate::values::whole;

/// The flag for how many there are.
pub(super) const FLAG: &str = "replicas";
/// Most of them, as of ranks.
const MOST: u64 = 4096;
/// Stands for the number of replicas in a command; a factor may stand before `dp`.
const NAME: &str = "dp}";

pub(super) fn flag() -> Arg {
    let count = |text: &str| {
        let number = whole::<u64>(1)(text).ok().filter(|k| *k <= MOST);
        number.ok_or_else(|| format!("expected a whole number from 1 to {MOST}"))
    };
    Arg::new(FLAG).long(FLAG).value_name("K").value_parser(count).help(
        "Replicas of the run (dp). Where a start fails without progress, the next one has one \
         fewer; after progress all are tried again, and on signal USR2 the run stops after its \
         step and goes on with all. In COMMAND, {dp} stands for their number, and {8dp} for 8 \
         times as many",
    )
}

/// The replicas of a command that says where their number stands.
pub(super) struct Replicas {
    /// How many there are when all are there; none where the command is always the same.
    most: Option<usize>,
    /// Of the next start.
    now: usize,
    /// Whether it has fewer than the one before.
    fewer: bool,
}

impl Replicas {
    /// `most` replicas of the command `line`.
    ///
    /// # Errors
    /// The command does not say where the number stands, or its batch would change with it; in
    /// words.
    pub(super) fn new(
        most: Option<usize>,
        line: &[String],
        watched: &ProgressFiles,
    ) -> Result<Replicas, String> {
        let is_named = line.iter().any(|word| fill_in(word, 1) != *word);
        let problem = match most {
            Some(_) if !is_named => {
                "replicas: the command has no {dp} where their number would stand; write --dp {dp}"
            }
            Some(_) if !watched.has_batch => {
                "replicas: the command has no --global-batch, so each would keep its own batch and \
                 samples would be lost with it; add --global-batch SAMPLES"
            }
            None if is_named => {
                "supervise: the command has a {dp}, and the number of replicas is not given; add \
                 --replicas K"
            }
            _ => return Ok(Replicas { most, now: most.unwrap_or(1), fewer: false }),
        };
        Err(problem.into())
    }

    /// The command of the next start.
    pub(super) fn filled_in(&self, line: &[String]) -> Vec<String> {
        match self.most {
            None => line.to_vec(),
            Some(_) => line.iter().map(|word| fill_in(word, self.now)).collect(),
        }
    }

    /// A start has failed; what follows it, as the end of a sentence. After progress all replicas
    /// are tried, as who was lost may be there again; without it one fewer.
    pub(super) fn after_failure(&mut self, progress: bool) -> String {
        let Some(most) = self.most else { return String::new() };
        let before = self.now;
        self.now = if progress { most } else { before.saturating_sub(1).max(1) };
        self.fewer = self.now < before;
        format!(", with {} of {most} replicas", self.now)
    }

    /// Whether some are missing.
    pub(super) fn lack(&self) -> bool {
        self.most.is_some_and(|most| self.now < most)
    }

    /// All are there again; what the next start has, as the end of a sentence.
    pub(super) fn call_back(&mut self) -> String {
        self.now = self.most.unwrap_or(self.now);
        self.fewer = false;
        format!(", with all {} replicas", self.now)
    }

    /// Whether the next start has fewer than the last one had.
    pub(super) fn are_fewer(&self) -> bool {
        self.fewer
    }
}

/// `word` with the number of replicas in place of each `{dp}`, and its product with `N` in place of
/// each `{Ndp}`.
fn fill_in(word: &str, replicas: usize) -> String {
    let mut rest = word;
    let mut filled = String::new();
    while let Some(start) = rest.find('{') {
        let (before, from) = rest.split_at(start);
        filled.push_str(before);
        let digits = from[1..].bytes().take_while(u8::is_ascii_digit).count();
        let (number, after) = from[1..].split_at(digits);
        let factor = if number.is_empty() { Some(1) } else { number.parse::<usize>().ok() };
        let product = factor.and_then(|factor| factor.checked_mul(replicas));
        match (after.strip_prefix(NAME), product) {
            (Some(after), Some(product)) => {
                filled.push_str(&product.to_string());
                rest = after;
            }
            _ => {
                filled.push('{');
                rest = &from[1..];
            }
        }
    }
    filled + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_stands_where_the_command_says() {
        assert_eq!(fill_in("{dp}", 3), "3");
        assert_eq!(fill_in("-n={16dp},{dp}", 3), "-n=48,3");
        for kept in ["", "{", "{}", "{x}", "{99999999999999999999999dp}", "dp}", "{12d"] {
            assert_eq!(fill_in(kept, 3), kept);
        }
        assert_eq!(fill_in("{{dp}}", 2), "{2}");
    }

    fn of(most: Option<usize>, line: &str) -> Result<Replicas, String> {
        let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        let watched = ProgressFiles::of(&words).unwrap();
        Replicas::new(most, &words, &watched)
    }

    #[test]
    fn without_progress_there_is_one_fewer_and_after_it_all_are_tried() {
        let line = "run --save c --resume --dp {dp} --global-batch 8";
        let mut replicas = of(Some(3), line).unwrap();
        let steps = [true, false, false, false, false, true, false];
        let reported =
            steps.map(|progress| (replicas.after_failure(progress), replicas.are_fewer()));
        let numbers =
            [(3, false), (2, true), (1, true), (1, false), (1, false), (3, false), (2, true)];
        let expected = numbers.map(|(now, fewer)| (format!(", with {now} of 3 replicas"), fewer));
        assert_eq!(reported, expected);
        let error = of(Some(3), "run --save c --resume --dp {dp}").err().unwrap();
        assert!(error.contains("no --global-batch"), "{error}");
        let error = of(Some(3), "run --save c --resume --global-batch 8").err().unwrap();
        assert!(error.contains("no {dp}"), "{error}");
        assert!(of(None, line).err().unwrap().contains("add --replicas K"));
        let mut plain = of(None, "run --save c --resume").unwrap();
        assert_eq!((plain.after_failure(false), plain.are_fewer()), (String::new(), false));
    }
}
