//! The library's `tracing` events on standard error: as text for people, or as JSON
//! lines.

use std::fmt;
use std::io::{self, Write};

use clap::{Arg, ArgMatches, Command};
use console::Style;
use tracing::level_filters::LevelFilter;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, MakeWriter};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use zeropp::RUN_EVENTS;
use zeropp_core::files::escaped;

use crate::{log_file, progress};

/// The targets of the library's own crates begin like this.
const OWN: &str = "zeropp";

const VERBOSITY_MANUAL: &str = "How much is written to standard error [default: info]\n\n\
A level (off, error, warn, info, debug, trace), or a list of levels for parts of the program: \
`warn,zeropp::checkpoint=debug`. Below info a run does not show its steps.";

const FORMAT_MANUAL: &str = "Text for people, or one JSON object a line [default: text]\n\n\
With json, `zeropp run` writes its plan, steps, checkpoints and summary as objects to standard \
error, too, and nothing to standard output.";

/// How the command speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Voice {
    /// Everything is a JSON object on standard error.
    pub(crate) json: bool,
    /// A run shows its steps.
    pub(crate) steps: bool,
}

/// Adds the flags that say how the command speaks, to it and all of its subcommands.
pub(crate) fn with_flags(command: Command) -> Command {
    let flag = |name, value, manual: &'static str| {
        let short = manual.split("\n\n").next().unwrap_or(manual);
        let arg = Arg::new(name).long(name).value_name(value).global(true);
        arg.help(short).long_help(manual).help_heading("Output").hide_short_help(true)
    };
    command
        .arg(flag("verbosity", "LEVEL|FILTER", VERBOSITY_MANUAL).value_parser(targets))
        .arg(flag("log-format", "FORMAT", FORMAT_MANUAL).value_parser(["text", "json"]))
}

/// A level means the own crates; what others have to say is of interest from a warning on.
fn targets(text: &str) -> Result<Targets, String> {
    // Of nothing the library makes a level, too.
    if let Some(level) = text.parse::<LevelFilter>().ok().filter(|_| !text.is_empty()) {
        let others = level.min(LevelFilter::WARN);
        return Ok(Targets::new().with_default(others).with_target(OWN, level));
    }
    let wrong = "expected off, error, warn, info, debug, trace, or a list target=level";
    // A word alone would be a target of which all is shown, and nothing of others.
    let is_level = |part: &str| part.contains('=') || part.trim().parse::<LevelFilter>().is_ok();
    if text.is_empty() || !text.split(',').all(is_level) {
        return Err(wrong.into());
    }
    text.parse().map_err(|_| wrong.into())
}

/// Starts to show what the library tells, as `matches` ask for it.
pub(crate) fn start(matches: &ArgMatches) -> Voice {
    let matches = matches.subcommand().map_or(matches, |(_, matches)| matches);
    let default = || targets("info").expect("a level");
    let filter = matches.get_one::<Targets>("verbosity").cloned().unwrap_or_else(default);
    let json = matches.get_one::<String>("log-format").is_some_and(|format| format == "json");
    let steps = filter.would_enable(RUN_EVENTS, &Level::INFO);
    let quiet = matches.try_get_one::<bool>("quiet").ok().flatten().copied().unwrap_or(false);
    let layer = tracing_subscriber::fmt::layer().with_writer(AboveTheBar);
    // Fails where one is set already, which is done nowhere else.
    let _ = match json {
        true => {
            let filter = if quiet { without_progress(filter) } else { filter };
            let layer = layer.json().flatten_event(true).with_span_list(false);
            let all = tracing_subscriber::registry().with(filter).with(layer);
            tracing::subscriber::set_global_default(all)
        }
        false => {
            // A run's progress is shown in the command's own words.
            let filter = without_progress(filter);
            let layer = layer.event_format(PlainEvent);
            let all = tracing_subscriber::registry().with(filter).with(layer);
            tracing::subscriber::set_global_default(all)
        }
    };
    Voice { json, steps: steps && !quiet }
}

fn without_progress(filter: Targets) -> Targets {
    filter.with_target(RUN_EVENTS, LevelFilter::OFF)
}

/// `warning:` and the like, in colour where standard error is a terminal and NO_COLOR is not set.
pub(crate) fn label(level: Level) -> String {
    let style = Style::new().for_stderr().bold();
    match level {
        Level::ERROR => format!("{} ", style.red().apply_to("error:")),
        Level::WARN => format!("{} ", style.yellow().apply_to("warning:")),
        Level::INFO => String::new(),
        _ => format!("{} ", style.dim().apply_to("debug:")),
    }
}

/// An event as a line: what kind it is of, its message, and its fields.
struct PlainEvent;

impl<S, N> FormatEvent<S, N> for PlainEvent
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut text = String::new();
        context.field_format().format_fields(Writer::new(&mut text), event)?;
        // It may quote a file, which is not to command the terminal.
        writeln!(writer, "{}{}", label(*event.metadata().level()), escaped(&text))
    }
}

/// Standard error and the log file; a progress bar makes room.
struct AboveTheBar;

impl<'a> MakeWriter<'a> for AboveTheBar {
    type Writer = AboveTheBar;

    fn make_writer(&'a self) -> AboveTheBar {
        AboveTheBar
    }
}

impl Write for AboveTheBar {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        log_file::write(console::strip_ansi_codes(&String::from_utf8_lossy(line)).as_bytes());
        progress::above_the_bar(|| io::stderr().write_all(line)).map(|()| line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_level_is_for_the_own_crates_and_a_filter_for_whom_it_names() {
        let all = targets("debug").unwrap();
        assert!(all.would_enable("zeropp_comm::mpi", &Level::DEBUG));
        assert!(!all.would_enable("burn", &Level::INFO) && all.would_enable("burn", &Level::WARN));
        let one = targets("warn,zeropp::checkpoint=debug").unwrap();
        assert!(one.would_enable("zeropp::checkpoint::resume", &Level::DEBUG));
        assert!(!one.would_enable(RUN_EVENTS, &Level::INFO));
        assert!(targets("off").unwrap().iter().all(|(_, level)| level == LevelFilter::OFF));
        assert!(targets("zeropp=loud").is_err());
    }
}
