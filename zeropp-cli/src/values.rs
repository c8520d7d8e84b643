//! Values of flags: whole numbers, and what is said of those that a flag does not take.

use clap::Command;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use zeropp::config::ConfigError;
use zeropp_core::files::escaped_line;

/// Reads a whole number of at least `least`.
pub(crate) fn whole<T>(least: u64) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync
where
    T: TryFrom<u64>,
{
    move |text| {
        let number = text.parse().ok().filter(|n: &u64| *n >= least);
        number.and_then(|n| T::try_from(n).ok()).ok_or_else(|| match least {
            0 => "expected a whole number, 0 or more".into(),
            _ => format!("expected a whole number of at least {least}"),
        })
    }
}

/// Has every flag with a value read `-1` as one, so that its error says what works in its place.
pub(crate) fn read_negative_numbers(command: Command) -> Command {
    command.mut_args(|arg| match arg.get_action().takes_values() && !arg.is_positional() {
        true => arg.allow_negative_numbers(true),
        false => arg,
    })
}

/// The error of a value that a flag does not take, in the form of every bad value: `flag = value:
/// problem; what would work`. None where something else is wrong.
pub(crate) fn refused(error: &clap::Error) -> Option<clap::Error> {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    let flag = text(ContextKind::InvalidArg)?;
    let key = flag.trim_start_matches(['-', '<']);
    let key = &key[..key.find([' ', '[', '=', '>']).unwrap_or(key.len())];
    let value = text(ContextKind::InvalidValue).unwrap_or("");
    let works = match (error.kind(), error.get(ContextKind::ValidValue)) {
        (ErrorKind::ValueValidation, _) => {
            let source = std::error::Error::source(error)?;
            // It names the setting, or the value behind it, itself.
            if let Some(whole) = source.downcast_ref::<ConfigError>() {
                return Some(clap::Error::raw(
                    ErrorKind::ValueValidation,
                    escaped_line(&whole.to_string()) + "\n",
                ));
            }
            source.to_string()
        }
        (ErrorKind::InvalidValue, Some(ContextValue::Strings(known))) if !known.is_empty() => {
            format!("expected {}", one_of(known))
        }
        (ErrorKind::InvalidValue, _) => "expected a value behind it".into(),
        _ => return None,
    };
    let shown = if value.is_empty() { "\"\"".into() } else { escaped_line(value) };
    let problem = if value.is_empty() { "is empty" } else { "does not work" };
    let reported = match works.strip_prefix("expected ") {
        Some(works) => format!("{key} = {shown}: {problem}; use {works}"),
        None => format!("{key} = {shown}: {works}"),
    };
    Some(clap::Error::raw(ErrorKind::ValueValidation, reported + "\n"))
}

/// `a`, `a or b`, `a, b or c`.
fn one_of(words: &[String]) -> String {
    match words {
        [] => String::new(),
        [one] => one.clone(),
        [first @ .., last] => format!("{} or {last}", first.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use zeropp::config::OPTIONS;

    use super::*;
    use crate::args;
    use crate::command::{command, helpful};

    /// Words that are typed by mistake where a number is wanted.
    const BAD: [&str; 7] = ["-1", "nan", "inf", "0", "1000000000000", "abc", ""];

    /// The message for a value of a flag, where the command line refuses it.
    fn reported(name: &str, flag: &str, bad: &str) -> Option<String> {
        let line = ["zeropp", name, &format!("--{flag}={bad}")].map(String::from);
        let error = command().try_get_matches_from(line).err()?;
        let is_of_value = error.get(ContextKind::InvalidValue).is_some();
        is_of_value.then(|| helpful(error).to_string())
    }

    /// The flags of a command that take a number, or a few words.
    fn choosy(command: &Command) -> Vec<String> {
        let flags = command.get_arguments().filter(|arg| arg.get_action().takes_values());
        let flags = flags.filter_map(|arg| arg.get_long()).map(String::from);
        flags.filter(|flag| reported(command.get_name(), flag, "abc").is_some()).collect()
    }

    #[test]
    fn a_value_behind_a_setting_is_refused_by_its_own_name() {
        for (text, said) in [
            ("adamw:beta2=x", "optimizer:beta2 = x: does not work; use a number, such as 0.1"),
            ("adamw:beta2=", "optimizer:beta2 = \"\": is empty; use a number, such as 0.1"),
            ("adamw:eps=1,eps=2", "optimizer:eps = 2: is there twice; leave one of them out"),
        ] {
            let error = reported("run", "optimizer", text).expect(text);
            assert_eq!(error.trim_end(), format!("error: {said}"));
        }
    }

    #[test]
    fn a_value_that_no_flag_takes_is_reported_with_the_flag_and_what_would_work() {
        let mut whole = command();
        whole.build();
        let (mut reports_of, mut unfollowed) = (0, Vec::new());
        for sub in whole.get_subcommands().filter(|sub| sub.get_name() != "help") {
            for flag in choosy(sub) {
                for bad in BAD {
                    let Some(said) = reported(sub.get_name(), &flag, bad) else { continue };
                    let shown = if bad.is_empty() { "\"\"" } else { bad };
                    let first = format!("error: {flag} = {shown}: ");
                    assert!(said.starts_with(&first), "{} {said}", sub.get_name());
                    assert!(said.contains("; use "), "{} {said}", sub.get_name());
                    assert_eq!(said.trim_end().lines().count(), 1, "{said}");
                    if bad == "abc" {
                        // Advice can be followed: a word of it is a value that the flag takes.
                        let advice = said.split("; use ").nth(1).unwrap_or_default();
                        let words = advice.split_whitespace();
                        let words = words.map(|w| w.trim_end_matches([',', ';', '.', ')']));
                        let mut words = words.filter(|word| !word.is_empty());
                        let works = |word: &str| reported(sub.get_name(), &flag, word).is_none();
                        unfollowed.extend((!words.any(works)).then_some(said.clone()));
                    }
                    reports_of += 1;
                }
            }
        }
        assert!(unfollowed.is_empty(), "{unfollowed:#?}");
        assert!(reports_of > 1000, "{reports_of}");
    }

    /// Settings that are refused after the command line took them: `zeropp measure` has them all.
    #[test]
    fn a_number_that_no_setting_takes_is_reported_likewise() {
        let mut whole = command();
        whole.build();
        let sub = whole.find_subcommand("measure").unwrap();
        let mut refused = 0;
        for flag in choosy(sub) {
            for bad in BAD {
                let line = ["zeropp", "measure", &format!("--{flag}={bad}")].map(String::from);
                let Ok(matches) = command().try_get_matches_from(line) else { continue };
                let matches = matches.subcommand_matches("measure").unwrap();
                let config = args::settings(matches).unwrap_or_else(|f| panic!("{}", f.message));
                let Err(error) = config.validate() else { continue };
                let said = error.to_string();
                // What became a value of another setting has its name there.
                let option = OPTIONS.iter().find(|option| option.key == flag);
                let name = option.and_then(|option| option.part_of).unwrap_or(&flag);
                assert!(said.contains(name) && said.contains("; "), "--{flag}={bad}: {said}");
                refused += 1;
            }
        }
        assert!(refused > 50, "{refused}");
    }

    #[test]
    fn whole_numbers_are_read() {
        assert_eq!((whole::<usize>(1)("1"), whole::<u64>(0)("0")), (Ok(1), Ok(0)));
        for bad in ["", "-1", "0", "1.5", "1e3", "99999999999999999999", "+"] {
            let said = whole::<usize>(1)(bad).unwrap_err();
            assert_eq!(said, "expected a whole number of at least 1", "{bad}");
        }
        assert!(whole::<u8>(0)("256").is_err());
    }
}
