//! `zeropp supervise`: a command that is started again when it fails.

mod child;
mod progress;

use std::time::Duration;

use clap::{Arg, ArgMatches, Command, value_parser};
use zeropp_checkpoint::attempts::{Attempts, Remedy, SAME_PLACE};

use crate::Failure;
use child::{Child, Ended};
use progress::Watched;

const ABOUT: &str = "Start a command again when it fails, from its newest checkpoint\n\n\
COMMAND is a whole run: `zeropp run`, or a launcher around it. When it ends with an error or is \
killed, its remaining processes are ended and it is started again. It goes on from its newest \
checkpoint, so it needs --save and --resume. Signals are passed on; a run that was stopped by a \
signal is not started again. On several nodes, run one `zeropp supervise` on each, with that \
node's part of the run: the parts find each other again by themselves.";

const EXAMPLES: &str = "\
Examples:
  zeropp supervise -- zeropp run run.toml --save ckpt --save-every 100 --resume
  zeropp supervise -- mpirun -n 8 zeropp run run.toml --engine mpi --save ckpt --resume
  zeropp supervise --hang-s 900 -- zeropp run run.toml --save ckpt --save-every 10 --resume

Exit codes: that of the last COMMAND; 2 where it cannot be supervised.";

/// How often the command is looked at.
const PERIOD: Duration = Duration::from_millis(20);

/// The flags of `zeropp supervise`.
pub(crate) fn command() -> Command {
    Command::new("supervise")
        .about("Start a run again when it fails")
        .long_about(ABOUT)
        .after_help(EXAMPLES)
        .arg(
            Arg::new("max-recoveries")
                .long("max-recoveries")
                .value_name("N")
                .value_parser(value_parser!(u64))
                .default_value("100")
                .help(
                    "How often to start it again; three failures in a row without a new \
                     checkpoint end it earlier",
                ),
        )
        .arg(
            Arg::new("hang-s")
                .long("hang-s")
                .value_name("S")
                .value_parser(value_parser!(u64))
                .default_value("0")
                .help(
                    "Restart it after this many seconds without a new checkpoint or a new line in \
                     its metrics file; 0 never does",
                ),
        )
        .arg(
            Arg::new("command")
                .value_name("COMMAND")
                .required(true)
                .num_args(1..)
                .last(true)
                .help("The run, after `--`"),
        )
}

/// Runs the command until it ends well, is stopped, or fails for good.
pub(crate) fn run(matches: &ArgMatches) -> Result<(), Failure> {
    let line: Vec<String> = matches.get_many("command").expect("required").cloned().collect();
    let max = *matches.get_one::<u64>("max-recoveries").expect("it has a default");
    let hang = *matches.get_one::<u64>("hang-s").expect("it has a default");
    let hang = (hang > 0).then(|| Duration::from_secs(hang));
    let watched = Watched::of(&line).map_err(Failure::bad_input)?;
    let signals = child::signals().map_err(Failure::failed_run)?;
    let mut attempts = Attempts::new(max);
    loop {
        let mut child = Child::start(&line).map_err(Failure::bad_input)?;
        let ended = child.follow(&signals, (&watched, hang), PERIOD);
        child.end_rest();
        let code = match ended {
            Ended::Well => return Ok(()),
            // It has said why.
            Ended::Stopped(code) | Ended::BadInput(code) => return Err(silent(code)),
            Ended::Failed(code) => code,
        };
        let newest = watched.newest();
        let place = match newest {
            Some(step) => format!("after step {step}"),
            None => "before its first checkpoint".into(),
        };
        match attempts.fail(newest) {
            Remedy::Again => {}
            Remedy::SamePlace => {
                tell(&format!(
                    "the command failed {SAME_PLACE} times {place}, so it is not started again"
                ));
                return Err(silent(code));
            }
            Remedy::UsedUp => {
                tell(&format!(
                    "the command failed {place}; max-recoveries = {max}: this many recoveries \
                     were made already"
                ));
                return Err(silent(code));
            }
        }
        let from = newest.map_or("the beginning".into(), |step| format!("step {step}"));
        tell(&format!(
            "the command failed ({}); recovery {} of {max}: it is started again from \
             {from}",
            child::in_words(code),
            attempts.made()
        ));
    }
}

/// Ends with this code; all is said.
fn silent(code: u8) -> Failure {
    Failure { message: String::new(), code }
}

fn tell(text: &str) {
    eprintln!("supervise: {text}");
}
