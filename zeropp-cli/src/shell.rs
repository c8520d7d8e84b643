//! `zeropp completions` and `zeropp man`: made from the command line's own table, so that they
//! cannot differ from it.

use std::io;
use std::path::{Path, PathBuf};

use clap::{Arg, ArgMatches, Command, value_parser};
use clap_complete::Shell;
use zeropp_core::files::escaped_line;

use crate::failure::Failure;
use crate::figures::say;
use crate::stdout;

const COMPLETIONS_ABOUT: &str = "Print a script that completes zeropp's flags in a shell";

const COMPLETIONS_EXAMPLES: &str = "\
Examples:
  zeropp completions bash > ~/.local/share/bash-completion/completions/zeropp
  zeropp completions zsh > ~/.zfunc/_zeropp
  zeropp completions fish > ~/.config/fish/completions/zeropp.fish";

/// The flags of `zeropp completions`.
pub(crate) fn completions_command() -> Command {
    let shell = Arg::new("shell").value_name("SHELL").required(true);
    Command::new("completions")
        .about(COMPLETIONS_ABOUT)
        .after_help(COMPLETIONS_EXAMPLES)
        .arg(shell.value_parser(value_parser!(Shell)).help("The shell that reads it"))
}

/// Prints the script for the `whole` command line.
pub(crate) fn completions(matches: &ArgMatches, mut whole: Command) -> Result<(), Failure> {
    let shell = *matches.get_one::<Shell>("shell").expect("clap asks for it");
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut whole, "zeropp", &mut script);
    stdout::print(&script);
    Ok(())
}

/// The flags of `zeropp man`.
pub(crate) fn manual_command() -> Command {
    Command::new("man")
        .about("Write the manual pages of zeropp and of each of its commands")
        .after_help("Example:\n  zeropp man ~/.local/share/man/man1 && man zeropp-run")
        .arg(
            Arg::new("folder")
                .value_name("FOLDER")
                .required(true)
                .value_parser(value_parser!(PathBuf))
                .help("Where the pages go: zeropp.1, zeropp-run.1 and so on; made if need be"),
        )
}

/// Writes the pages of the `whole` command line.
pub(crate) fn manual(matches: &ArgMatches, whole: Command) -> Result<(), Failure> {
    let folder = matches.get_one::<PathBuf>("folder").expect("clap asks for it");
    let pages = write_pages(folder, whole).map_err(|e| {
        let folder = folder.display();
        Failure::bad_input(format!("folder = {folder}: cannot write manual pages there ({e})"))
    })?;
    say(format_args!("{pages} pages in {}", folder.display()));
    Ok(())
}

fn write_pages(folder: &Path, whole: Command) -> io::Result<usize> {
    std::fs::create_dir_all(folder)?;
    clap_mangen::generate_to(whole, folder)?;
    let entries = std::fs::read_dir(folder)?.filter_map(Result::ok);
    let is_page = |name: &str| name.starts_with("zeropp") && name.ends_with(".1");
    Ok(entries.filter(|entry| entry.file_name().to_str().is_some_and(is_page)).count())
}

/// The command that runs, as a shell reads it back.
pub(crate) fn command_line() -> String {
    command_line_without("\n")
}

/// The same without the words that begin so.
pub(crate) fn command_line_without(flag: &str) -> String {
    let words = std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned());
    let words = words.filter(|word| !word.starts_with(flag));
    let words = words.map(|word| quoted(&escaped_line(&word)));
    std::iter::once("zeropp".to_owned()).chain(words).collect::<Vec<_>>().join(" ")
}

/// A word as a shell reads it back.
pub(crate) fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,+@%".contains(c);
    match !word.is_empty() && word.chars().all(plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}
