//! `zeropp supervise`: a command that is started again when it fails.

mod buddy;
mod child;
mod copies;
mod memory;
mod progress;
mod replicas;

use std::path::PathBuf;
use std::str::FromStr;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use clap::{Arg, ArgMatches, Command, value_parser};
use zeropp::rendezvous::Address;
use zeropp_checkpoint::attempts::{Attempts, Remedy, SAME_PLACE};

use crate::values::whole;
use crate::{Failure, stderr};
use child::{Child, Ended, Waiting};
use copies::Copies;
use progress::Watched;
use replicas::Replicas;

const ABOUT: &str = "Start a command again when it fails, from its newest checkpoint\n\n\
COMMAND is a whole run: `zeropp run`, or a launcher around it. When it ends with an error or is \
killed, its remaining processes are ended and it is started again, after half a second, or five \
where it fails at the same place once more. It goes on from its newest \
checkpoint, so it needs --save and --resume; or from a copy of a newer state, which it makes \
in this machine's memory after every step, or every --copy-every N steps. Signals are passed on; \
a run that was stopped by a signal is not started again. On several nodes, run one `zeropp \
supervise` on each, with that node's part of the run: the parts find each other again by \
themselves.";

const EXAMPLES: &str = "\
Examples:
  zeropp supervise -- zeropp run run.toml --save ckpt --save-every 100 --resume
  zeropp supervise -- mpirun -n 8 zeropp run run.toml --engine mpi --save ckpt --resume
  zeropp supervise --listen node1:29500
  zeropp supervise --buddy node1:29500 -- zeropp run run.toml --save ckpt --resume
  zeropp supervise --replicas 4 -- mpirun -n {2dp} zeropp run run.toml --engine mpi --pp 2 \
      --dp {dp} --global-batch 64 --save ckpt --save-every 10 --resume
  zeropp supervise --hang-s 900 -- zeropp run run.toml --save ckpt --save-every 10 --resume

Exit codes: that of the last COMMAND; 2 where it cannot be supervised.";

/// What tells a run where its copies are.
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
        .arg(address("listen", "Keep copies for other supervisors, which name this as their buddy"))
        .arg(address(
            "buddy",
            "Send each copy to the supervisor that listens there, and begin with its copy where \
             this machine has none",
        ))
        .arg(
            Arg::new("token-file")
                .long("token-file")
                .value_name("FILE")
                .value_parser(value_parser!(PathBuf))
                .help(
                    "A file with the secret that buddies share, or it is in ZEROPP_TOKEN; not \
                     needed within one machine",
                ),
        )
        .arg(
            Arg::new("command")
                .value_name("COMMAND")
                .required_unless_present("listen")
                .num_args(1..)
                .last(true)
                .help("The run, after `--`"),
        )
}

fn address(name: &'static str, help: &'static str) -> Arg {
    let arg = Arg::new(name).long(name).value_name("HOST:PORT");
    arg.value_parser(Address::from_str).help(help)
}

/// Runs the command until it ends well, is stopped, or fails for good.
pub(crate) fn run(matches: &ArgMatches) -> Result<(), Failure> {
    let line: Vec<String> = matches.get_many("command").into_iter().flatten().cloned().collect();
    let max = *matches.get_one::<u64>("max-recoveries").expect("it has a default");
    let hang = *matches.get_one::<u64>("hang-s").expect("it has a default");
    let hang = (hang > 0).then(|| Duration::from_secs(hang));
    let watched = (!line.is_empty()).then(|| Watched::of(&line)).transpose();
    let watched = watched.map_err(Failure::bad_input)?;
    let signals = child::signals().map_err(Failure::failed_run)?;
    let copies = Copies::of(matches, watched.as_ref())?;
    let Some(watched) = watched else { return keep(&signals) };
    let asked = matches.get_one::<u64>(replicas::FLAG).map(|k| *k as usize);
    let mut replicas = Replicas::new(asked, &line, &watched).map_err(Failure::bad_input)?;
    let mut attempts = Attempts::new(max);
    loop {
        let before = (watched.sign(), copies.newest());
        // What came while no command ran could end one that is just starting.
        if let Some(signal) = rest(attempts.pause(), &signals, &mut replicas) {
            copies.stop(watched.newest());
            return Err(Failure::stopped_by(signal));
        }
        let line = replicas.filled_in(&line);
        let mut child = Child::start(&line, copies.folder()).map_err(Failure::bad_input)?;
        let ended = child.follow(&signals, (&watched, hang), (replicas.lack(), PERIOD));
        child.end_rest();
        let code = match ended {
            Ended::Well => {
                copies.forget();
                return Ok(());
            }
            // It has said why.
            Ended::Stopped(code) => {
                copies.stop(watched.newest());
                return Err(silent(code));
            }
            Ended::CalledBack => {
                let newest = watched.newest().max(copies.newest());
                let with = replicas.call_back();
                tell(&format!("the command is started again from {}{with}", place(newest)));
                continue;
            }
            Ended::BadInput(code) => return Err(silent(code)),
            Ended::Failed(code) => code,
        };
        let copied = copies.newest();
        let newest = watched.newest().max(copied);
        let remedy = attempts.fail(newest);
        if let Some(why) = given_up(remedy, newest, max) {
            tell(&why);
            return Err(silent(code));
        }
        let from = place(newest);
        let with = replicas.after_failure((watched.sign(), copied) != before);
        if replicas.are_fewer() {
            attempts.go_on_with_fewer();
        }
        let is_copy = copied.is_some() && copied == newest;
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

/// Keeps copies for others until a signal comes.
fn keep(signals: &Receiver<i32>) -> Result<(), Failure> {
    loop {
        match signals.recv() {
            Ok(signal) if child::stops(signal) => {
                return Err(Failure::stopped_by(signal));
            }
            Ok(_) => {}
            // No signals here: it is ended from outside.
            Err(_) => std::thread::park(),
        }
    }
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
        Waiting::Nothing => None,
        Waiting::CallBack => {
            tell(&format!("replicas are there again{}", replicas.call_back()));
            None
        }
        Waiting::Stop(signal) => Some(signal),
    }
}

/// Ends with this code; all is said.
fn silent(code: u8) -> Failure {
    Failure { message: String::new(), code }
}

fn tell(text: &str) {
    stderr::tell(&format!("supervise: {text}"));
}
