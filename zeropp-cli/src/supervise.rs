//! `zeropp supervise`: a command that is started again when it fails.

mod child;
mod memory;
mod progress;
mod replicas;

use std::path::Path;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use clap::{Arg, ArgMatches, Command};
use zeropp_checkpoint::attempts::{Attempts, Remedy, SAME_PLACE};

use crate::failure::Failure;
use crate::stderr;
use crate::values::whole;
use child::{Child, Ended, SignalAnswer};
use memory::CopyFolder;
use progress::ProgressFiles;
use replicas::Replicas;

const ABOUT: &str = "Start a command again when it fails, from its newest checkpoint\n\n\
COMMAND is a whole run: `zeropp run`, or a launcher around it. When it ends with an error or is \
killed, its remaining processes are ended and it is started again, after half a second, or five \
where it fails at the same place once more. It goes on from its newest \
checkpoint, so it needs --save and --resume; or from a copy of a newer state, which it makes \
in this machine's memory after every step, or every N steps (--copies every=N). Signals are \
passed on; a run that was stopped by a signal is not started again. On several nodes, run one \
`zeropp supervise` on each, with that node's part of the run: the parts find each other again by \
themselves.";

const EXAMPLES: &str = "\
Examples:
  zeropp supervise -- zeropp run run.toml --save ckpt --save-every 100 --resume
  zeropp supervise -- mpirun -n 8 zeropp run run.toml --engine mpi --save ckpt --resume
  zeropp supervise --replicas 4 -- mpirun -n {2dp} zeropp run run.toml --engine mpi --pp 2 \
      --dp {dp} --global-batch 64 --save ckpt --save-every 10 --resume
  zeropp supervise --hang-s 900 -- zeropp run run.toml --save ckpt --save-every 10 --resume

Exit codes: that of the last COMMAND; 2 where it cannot be supervised.";

/// Variable by which a run finds its copies.
pub(crate) const COPIES_VARIABLE: &str = "ZEROPP_COPIES";
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
                .value_parser(whole::<u64>(0))
                .default_value("100")
                .help(
                    "How often to start it again; three failures in a row without a new \
                     checkpoint end it earlier",
                ),
        )
        .arg(replicas::flag())
        .arg(
            Arg::new("hang-s")
                .long("hang-s")
                .value_name("S")
                .value_parser(whole::<u64>(0))
                .default_value("0")
                .help(
                    "Restart it after this many seconds without a new checkpoint or a new line in \
                     its metrics file; 0 never does",
                ),
        )
        .arg(
            Arg::new("memory")
                .long("memory")
                .value_name("DIR")
                .default_value(memory::DEFAULT)
                .help(
                    "Where copies of the state are kept: a folder whose files are in memory; an \
                     empty name keeps none",
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
    let line: Vec<String> = matches.get_many("command").into_iter().flatten().cloned().collect();
    let max = *matches.get_one::<u64>("max-recoveries").expect("it has a default");
    let hang = *matches.get_one::<u64>("hang-s").expect("it has a default");
    let hang = (hang > 0).then(|| Duration::from_secs(hang));
    let watched = ProgressFiles::of(&line).map_err(Failure::bad_input)?;
    let signals = child::signals().map_err(Failure::failed_run)?;
    let memory = matches.get_one::<String>("memory").expect("it has a default");
    let memory = take_memory(Path::new(memory));
    let copied = || memory.as_ref().and_then(CopyFolder::newest);
    let asked = matches.get_one::<u64>(replicas::FLAG).map(|k| *k as usize);
    let mut replicas = Replicas::new(asked, &line, &watched).map_err(Failure::bad_input)?;
    let mut attempts = Attempts::new(max);
    loop {
        let before = (watched.sign(), copied());
        // What came while no command ran could end one that is just starting.
        if let Some(signal) = rest(attempts.pause(), &signals, &mut replicas) {
            return Err(Failure::stopped_by(signal));
        }
        let line = replicas.filled_in(&line);
        let mut child = Child::start(&line, memory.as_ref().map(CopyFolder::folder))
            .map_err(Failure::bad_input)?;
        let ended = child.follow(&signals, &watched, hang, replicas.lack(), PERIOD);
        child.end_rest();
        let code = match ended {
            Ended::Well => return Ok(()),
            // It has said why.
            Ended::Stopped(code) | Ended::BadInput(code) => return Err(silent(code)),
            Ended::CalledBack => {
                let newest = watched.newest().max(copied());
                let with = replicas.call_back();
                tell(&format!("the command is started again from {}{with}", place(newest)));
                continue;
            }
            Ended::Failed(code) => code,
        };
        let in_memory = copied();
        let newest = watched.newest().max(in_memory);
        let remedy = attempts.fail(newest);
        if let Some(why) = given_up(remedy, newest, max) {
            tell(&why);
            return Err(silent(code));
        }
        let from = place(newest);
        let with = replicas.after_failure((watched.sign(), in_memory) != before);
        if replicas.are_fewer() {
            attempts.go_on_with_fewer();
        }
        let is_copy = in_memory.is_some() && in_memory == newest;
        let in_memory = if is_copy { ", copied in memory" } else { "" };
        tell(&format!(
            "the command failed ({}); recovery {} of {max}: it is started again from \
             {from}{in_memory}{with}",
            child::in_words(code),
            attempts.made()
        ));
    }
}

/// Where the next start goes on.
fn place(newest: Option<u64>) -> String {
    newest.map_or("the beginning".into(), |step| format!("step {step}"))
}

/// Why a command that has failed is not started again, if it is not.
fn given_up(remedy: Remedy, newest: Option<u64>, max: u64) -> Option<String> {
    let place = match newest {
        Some(step) => format!("after step {step}"),
        None => "before its first checkpoint".into(),
    };
    match remedy {
        Remedy::Again => None,
        Remedy::SamePlace => Some(format!(
            "the command failed {SAME_PLACE} times {place}, so it is not started again"
        )),
        Remedy::UsedUp => Some(format!(
            "the command failed {place}; max-recoveries = {max}: this many recoveries were made \
             already"
        )),
    }
}

/// The memory for copies, unless there is to be none, or can be none, which is reported.
fn take_memory(parent: &Path) -> Option<CopyFolder> {
    if parent.as_os_str().is_empty() {
        return None;
    }
    let report = |e| {
        let parent = parent.display();
        tell(&format!(
            "memory = {parent}: no copies in memory are kept, as it cannot be written ({e}); after \
             a failure the command goes on from its newest checkpoint"
        ));
    };
    CopyFolder::take(parent).map_err(report).ok()
}

/// Waits for so long, and heeds signals meanwhile; the one that stops, if one does.
fn rest(pause: Duration, signals: &Receiver<i32>, replicas: &mut Replicas) -> Option<i32> {
    let until = Instant::now() + pause;
    loop {
        let stopped = heeded(signals, replicas);
        if stopped.is_some() || Instant::now() >= until {
            return stopped;
        }
        std::thread::sleep(PERIOD);
    }
}

/// Heeds the signals that wait; the one that stops, if one does.
fn heeded(signals: &Receiver<i32>, replicas: &mut Replicas) -> Option<i32> {
    match child::waiting(signals, replicas.lack()) {
        SignalAnswer::Nothing => None,
        SignalAnswer::CallBack => {
            tell(&format!("replicas are there again{}", replicas.call_back()));
            None
        }
        SignalAnswer::Stop(signal) => Some(signal),
    }
}

/// Ends with this code; all is said.
fn silent(code: u8) -> Failure {
    Failure { message: String::new(), code }
}

fn tell(text: &str) {
    stderr::tell(&format!("supervise: {text}"));
}
