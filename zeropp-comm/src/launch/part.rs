//! A process of its own for each rank, where a launcher has started one process for several.

use std::fmt;
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::str::FromStr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use std::{env, io};

use zeropp_core::field_error::FieldError;

use super::end_with_this_process;
use crate::patience::Deadline;
use crate::rendezvous::Address;

/// Variable by which a process that another one has started finds its part.
pub(super) const VARIABLE: &str = "ZEROPP_PART";
/// How long processes may take to end after the one that has started them.
const END_TIME: Duration = Duration::from_secs(10);
/// Pause between two looks at processes that are to end.
const LOOK_PERIOD: Duration = Duration::from_millis(10);

/// The part of this process, if the ranks of the launched one are divided.
static OWN: OnceLock<RankPart> = OnceLock::new();
/// Whether the ranks of this process have met those of others.
static MET: AtomicBool = AtomicBool::new(false);

/// One rank of a launched process, as the part of a process of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankPart {
    /// The rank among those of the launched process, from 0.
    pub place: usize,
    /// Where the parts meet, if the launched process had no others to meet.
    pub meeting: Address,
}

impl RankPart {
    /// The part of this process; none where it has all ranks of the launched one.
    ///
    /// # Errors
    /// A variable that cannot be read.
    pub fn own() -> Result<Option<RankPart>, FieldError> {
        if let Some(own) = OWN.get() {
            return Ok(Some(own.clone()));
        }
        let Ok(text) = env::var(VARIABLE) else { return Ok(None) };
        let wrong = |problem| FieldError::new(VARIABLE, &text, problem, "unset it");
        text.parse().map(Some).map_err(wrong)
    }
}

impl fmt::Display for RankPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.place, self.meeting)
    }
}

impl FromStr for RankPart {
    type Err = String;

    /// Reads `1@127.0.0.1:29400`.
    fn from_str(text: &str) -> Result<RankPart, String> {
        let (place, meeting) = text.split_once('@').ok_or("is no rank and address")?;
        let place = place.parse().map_err(|_| "has no rank before the @".to_owned())?;
        Ok(RankPart { place, meeting: meeting.parse()? })
    }
}

/// The processes of a launched process's other ranks. They end by themselves when rank 0's does;
/// dropping this waits for that, for some seconds at most, and ends them at once where they have
/// not met yet: they would wait for this one.
#[must_use = "dropping it ends the processes"]
#[derive(Debug, Default)]
pub struct RankProcesses(Vec<Child>);

impl RankProcesses {
    /// Leaves this process the first of its `ranks`, and starts a process for each of the others,
    /// with this one's program and arguments. Where this one has no address to meet others at,
    /// they meet on this machine. On Linux they get SIGTERM where the calling thread ends before
    /// them.
    ///
    /// # Errors
    /// A process cannot be started; those that were are ended.
    pub fn start(ranks: usize) -> io::Result<RankProcesses> {
        // Free now, and bound by rank 0 in a moment.
        let meeting = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let meeting = Address::new(meeting.ip().to_string(), meeting.port());
        let (program, arguments) = (env::current_exe()?, env::args_os().skip(1));
        let arguments: Vec<_> = arguments.collect();
        let mut started = RankProcesses(Vec::new());
        for place in 1..ranks {
            let part = RankPart { place, meeting: meeting.clone() };
            let mut command = Command::new(&program);
            command.args(&arguments).env(VARIABLE, part.to_string()).stdin(Stdio::null());
            end_with_this_process(&mut command);
            started.0.push(command.spawn()?);
        }
        let own = RankPart { place: 0, meeting };
        OWN.set(own).map_err(|_| io::Error::other("this process has divided its ranks before"))?;
        Ok(started)
    }

    /// Notes that the ranks of this process have met the others, who may now have something to save
    /// when they end.
    pub fn have_met() {
        MET.store(true, Ordering::Relaxed);
    }

    fn kill(&mut self) {
        for child in &mut self.0 {
            // One that has ended needs no more.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Drop for RankProcesses {
    fn drop(&mut self) {
        let have_met = MET.load(Ordering::Relaxed);
        let end = Deadline::after(if have_met { END_TIME } else { Duration::ZERO });
        while !self.0.iter_mut().all(|child| !matches!(child.try_wait(), Ok(None))) {
            if end.is_over() {
                return self.kill();
            }
            std::thread::sleep(LOOK_PERIOD);
        }
    }
}
