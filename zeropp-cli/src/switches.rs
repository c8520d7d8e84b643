//! Values of flags that may stand alone.

use std::ffi::OsString;

use clap::{Arg, ArgAction, Command};

/// Words that may stand behind a flag that may stand alone.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Takes {
    /// Nothing: the flag is there or not.
    Nothing,
    /// `=true` or `=false`.
    Truth,
    /// The same, `=must` or the number of a step.
    Resume,
}

impl Takes {
    fn of(arg: &Arg) -> Option<Takes> {
        match (arg.get_action(), arg.get_id().as_str()) {
            (ArgAction::SetTrue, _) => Some(Takes::Nothing),
            _ if !arg.is_require_equals_set() => None,
            (_, "resume") => Some(Takes::Resume),
            _ if arg.get_possible_values().iter().any(|v| v.get_name() == "true") => {
                Some(Takes::Truth)
            }
            _ => None,
        }
    }

    fn is_value(self, word: &str) -> bool {
        let is_step = || !word.is_empty() && word.bytes().all(|b| b.is_ascii_digit());
        // Values may stand behind it.
        let word = word.split(':').next().unwrap_or_default();
        matches!(word, "true" | "false") || self == Takes::Resume && (word == "must" || is_step())
    }
}

/// The words of a command line with `--switch true` as one word, `--switch=true`; and of a flag
/// that takes nothing, `--quiet true` as `--quiet`, `--quiet false` as nothing. (Another word
/// behind a flag that may stand alone is the command's file.)
pub(crate) fn joined(
    command: &Command,
    words: impl IntoIterator<Item = OsString>,
) -> Vec<OsString> {
    let mut words = words.into_iter().peekable();
    let mut out: Vec<OsString> = words.next().into_iter().collect();
    let mut chosen: Option<&Command> = None;
    while let Some(word) = words.next() {
        if word == "--" {
            out.push(word);
            out.extend(words);
            break;
        }
        let Some(sub) = chosen else {
            chosen = word.to_str().and_then(|name| command.find_subcommand(name));
            out.push(word);
            continue;
        };
        let flag = word.to_str().and_then(|word| word.strip_prefix("--")).map(str::to_owned);
        let (name, mut value) = match flag.as_deref().map(|f| f.split_once('=').unwrap_or((f, "")))
        {
            Some((name, value)) => (name, value.to_owned()),
            None => ("", String::new()),
        };
        let arg = sub.get_arguments().find(|arg| arg.get_long() == Some(name));
        let Some(takes) = arg.and_then(Takes::of) else {
            out.push(word);
            continue;
        };
        let follows = |word: &OsString| word.to_str().is_some_and(|word| takes.is_value(word));
        if value.is_empty()
            && let Some(next) = words.next_if(follows)
        {
            value = next.into_string().unwrap_or_default();
        }
        match (takes, value.as_str()) {
            (Takes::Nothing, "false") => {}
            (Takes::Nothing, "true") => out.push(format!("--{name}").into()),
            (Takes::Truth | Takes::Resume, value) if !value.is_empty() => {
                out.push(format!("--{name}={value}").into());
            }
            _ => out.push(word),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args;
    use crate::command::command;
    use zeropp::config::{OPTIONS, OptionKind, Resume};

    fn words(line: &str) -> Vec<String> {
        let joined = joined(&command(), line.split(' ').map(OsString::from));
        joined.into_iter().map(|word| word.into_string().unwrap()).collect()
    }

    #[test]
    fn a_switch_takes_its_value_with_a_blank_as_with_an_equals_sign() {
        for option in OPTIONS.iter().filter(|option| option.kind == OptionKind::Switch) {
            for value in ["true", "false"] {
                let both = ["=", " "].map(|between| {
                    let line = format!("zeropp run --{}{between}{value}", option.key);
                    let matches = command().try_get_matches_from(words(&line)).unwrap();
                    args::settings(matches.subcommand_matches("run").unwrap()).ok().unwrap()
                });
                assert_eq!(both[0], both[1], "{}", option.key);
                assert_eq!(both[0].get(option.key).unwrap().to_string(), value);
            }
        }
        for (value, resume) in [("must", Resume::Must), ("12", Resume::Step(12))] {
            let line = format!("zeropp run --resume {value} --zero1");
            let matches = command().try_get_matches_from(words(&line)).unwrap();
            let config = args::settings(matches.subcommand_matches("run").unwrap()).ok().unwrap();
            assert_eq!((config.resume, config.zero1), (resume, true));
        }
    }

    #[test]
    fn a_flag_without_a_value_takes_true_and_false() {
        assert_eq!(
            words("zeropp run --quiet true --pp 2"),
            ["zeropp", "run", "--quiet", "--pp", "2"]
        );
        assert_eq!(words("zeropp run --quiet false --pp 2"), ["zeropp", "run", "--pp", "2"]);
        assert_eq!(words("zeropp plan --json=false"), ["zeropp", "plan"]);
    }

    #[test]
    fn all_other_words_stay_as_they_are() {
        for line in [
            "zeropp run --zero1 run.toml --dry-run true.html --tied=false",
            "zeropp run --resume run.toml",
            "zeropp supervise -- mpirun zeropp run --tied true",
            "zeropp generate true --prompt true",
            "zeropp",
        ] {
            let line: Vec<&str> = line.split(' ').collect();
            assert_eq!(words(&line.join(" ")), line);
        }
    }
}
