//! How the processes of a run introduce themselves to each other: each says one [`Hello`], once,
//! and all that follows from who is where is read off the [`Roster`] of all of them.

use std::ops::RangeInclusive;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use zeropp_comm::flight::{now_ns, ns_at};
use zeropp_comm::launch::host_name;
use zeropp_comm::placement::one_name_each;
use zeropp_comm::{CommResult, Communicator};
use zeropp_failures::Peer;

use super::clocks::{self, ClockOffset};
use super::cores::{self, CoreRequest, Cores};
use super::shares::{CoreShare, Process, shares};
use crate::config::ConfigError;

/// A process's description of itself.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Hello {
    /// A name for the run; rank 0's counts.
    run: String,
    /// Its ranks, of which the first speaks for all.
    pub(crate) ranks: Vec<usize>,
    pub(crate) peer: Peer,
    /// Distinguishes its clock from others.
    clock: String,
    /// When its ranks started, by that clock.
    epoch_ns: u64,
    /// The speed of its ranks' devices.
    pub(crate) power: Power,
    /// Step that it would go on from.
    pub(crate) resumed: Option<u64>,
    /// Whether it has a folder for copies in memory.
    pub(crate) copies: bool,
    /// The cores that it may use, in the order in which they are to be taken; none on GPUs, or
    /// where the system does not report them.
    cores: Vec<usize>,
    /// Whether its ranks are to be bound to cores of their own.
    pins: bool,
}

/// The devices that the ranks of a process compute with.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Power {
    /// Cores or GPUs of its host.
    pub(crate) units: usize,
    /// FLOP/s of each at its best.
    pub(crate) unit_flops: f64,
    /// Threads of each of its ranks by its settings, if they say so; on a GPU 1.
    pub(crate) threads: Option<usize>,
}

impl Hello {
    /// That of the process on `host` whose `ranks` started at `epoch`, and which goes on from no
    /// checkpoint.
    pub(crate) fn new(host: &str, ranks: &[usize], epoch: Instant, power: Power) -> Hello {
        Hello {
            run: String::new(),
            ranks: ranks.to_vec(),
            peer: Peer { host: host.to_owned(), pid: std::process::id() },
            clock: clocks::own(host),
            epoch_ns: ns_at(epoch),
            power,
            resumed: None,
            copies: false,
            cores: Vec::new(),
            pins: false,
        }
    }

    /// The same with a name for the run.
    pub(crate) fn named(self, run: &str) -> Hello {
        Hello { run: run.into(), ..self }
    }

    /// The same with the step that it would go on from.
    pub(crate) fn after(self, resumed: Option<u64>) -> Hello {
        Hello { resumed, ..self }
    }

    /// The same that says whether it has a folder for copies.
    pub(crate) fn with_copies(self, copies: bool) -> Hello {
        Hello { copies, ..self }
    }

    /// The same that may use these cores, and whether its ranks are to be bound to some of them.
    pub(crate) fn on_cores(self, cores: Vec<usize>, pins: bool) -> Hello {
        Hello { cores, pins, ..self }
    }

    fn process(&self) -> Process<'_> {
        let (cores, units) = (&self.cores[..], self.power.units);
        Process { host: &self.peer.host, ranks: self.ranks.len(), cores, units }
    }

    /// Threads of each of its ranks, of such a share of its host.
    fn threads(&self, share: &CoreShare) -> usize {
        self.power.threads.unwrap_or(share.threads())
    }
}

/// The descriptions of all processes; the same on all ranks of a process.
#[derive(Debug)]
pub(crate) struct Roster {
    /// In the order of their first ranks.
    pub(crate) hellos: Vec<Hello>,
    /// The process of every rank.
    pub(crate) processes: Arc<[Peer]>,
    /// The share of each process in its host's cores, or GPUs.
    shares: Vec<CoreShare>,
    /// Which of `hellos` is this process's.
    own: usize,
    clock: OnceLock<ClockOffset>,
}

/// Introduces this process, which says `hello`, to the others, once for all of its ranks; what they
/// have said is kept in `roster`. All ranks call it.
///
/// # Errors
/// The world's first error, or a timeout.
pub(crate) fn meet(
    world: &dyn Communicator,
    hello: impl FnOnce() -> Hello,
    here: &[usize],
    roster: &OnceLock<Arc<Roster>>,
) -> CommResult<Arc<Roster>> {
    let alone = here.len() == world.size();
    if alone {
        return Ok(roster.get_or_init(|| Arc::new(Roster::of(vec![hello()], here[0]))).clone());
    }
    let speaks = world.rank() == here[0];
    let said = speaks.then(|| serde_json::to_vec(&hello()).expect("plain data"));
    let all = world.exchange(said.unwrap_or_default()).wait()?;
    let read = |bytes: &Vec<u8>| serde_json::from_slice(bytes).expect("said by a process");
    let hellos = || all.iter().filter(|bytes| !bytes.is_empty()).map(read).collect();
    let roster = roster.get_or_init(|| Arc::new(Roster::of(hellos(), here[0])));
    if roster.hellos.iter().any(|hello| hello.clock != roster.hellos[0].clock) {
        let rounds = clocks::tell(world)?;
        let bounds = || rounds.bounds(&roster.on_clock(roster.own), &roster.on_clock(0));
        roster.clock.get_or_init(|| roster.clock_within(bounds()));
    }
    Ok(roster.clone())
}

impl Roster {
    /// Of all `hellos`, of which this process, with the first rank `first`, has said one.
    fn of(mut hellos: Vec<Hello>, first: usize) -> Roster {
        hellos.sort_by_key(|hello| hello.ranks[0]);
        let hosts: Vec<String> = hellos.iter().map(|hello| hello.peer.host.clone()).collect();
        for (hello, host) in hellos.iter_mut().zip(one_name_each(&hosts)) {
            hello.peer.host = host;
        }
        let world = hellos.iter().map(|hello| hello.ranks.len()).sum();
        let mut processes = vec![Peer::default(); world];
        for hello in &hellos {
            hello.ranks.iter().for_each(|rank| processes[*rank] = hello.peer.clone());
        }
        let own = hellos.iter().position(|hello| hello.ranks[0] == first).expect("it spoke");
        let shares = shares(&hellos.iter().map(Hello::process).collect::<Vec<_>>());
        Roster { hellos, processes: processes.into(), shares, own, clock: OnceLock::new() }
    }

    /// A name for the run that no other run has, and that later runs' names follow.
    pub(crate) fn run(&self) -> &str {
        &self.hellos[0].run
    }

    /// This process's clock beside rank 0's.
    pub(crate) fn clock(&self) -> ClockOffset {
        let is_first_s = self.hellos[self.own].clock == self.hellos[0].clock;
        match is_first_s {
            true => self.clock_within(0..=0),
            false => *self.clock.get().expect("the ranks have told each other the time"),
        }
    }

    fn clock_within(&self, ahead_ns: RangeInclusive<i64>) -> ClockOffset {
        ClockOffset::new(ahead_ns, self.hellos[self.own].epoch_ns, self.hellos[0].epoch_ns)
    }

    /// The ranks that share a clock with a process.
    fn on_clock(&self, process: usize) -> Vec<usize> {
        let clock = &self.hellos[process].clock;
        let sharing = self.hellos.iter().filter(|hello| hello.clock == *clock);
        sharing.flat_map(|hello| hello.ranks.iter().copied()).collect()
    }

    /// Threads of each rank of this process, and what it has of its host's cores.
    pub(crate) fn threads(&self) -> (usize, CoreShare) {
        let share = self.shares[self.own];
        (self.hellos[self.own].threads(&share), share)
    }

    /// The cores of all ranks that are to be bound to cores of their own; the same everywhere.
    ///
    /// # Errors
    /// As [`cores::share`].
    pub(crate) fn cores(&self) -> Result<Cores, ConfigError> {
        let pinned = self.hellos.iter().zip(&self.shares).filter(|(hello, _)| hello.pins);
        let asked = pinned.map(|(hello, share)| CoreRequest {
            host: &hello.peer.host,
            ranks: &hello.ranks,
            threads: hello.threads(share),
            allowed: &hello.cores,
        });
        cores::share(&asked.collect::<Vec<_>>())
    }

    /// The cores of rank 0's process that are not bound to rank 0, for what works beside it; none
    /// where its threads are not bound to cores.
    pub(crate) fn beside_rank_0(&self) -> Vec<usize> {
        let allowed = &self.hellos[0].cores;
        let all = self.cores().unwrap_or_default();
        let Some(own) = all.get(&0) else { return Vec::new() };
        let others: Vec<_> = allowed.iter().filter(|core| !own.contains(core)).copied().collect();
        if others.is_empty() { allowed.clone() } else { others }
    }

    /// FLOP/s of all ranks at their best. Those of a host cannot do more than its cores or GPUs.
    pub(crate) fn peak_flops(&self) -> f64 {
        let of_process = |(hello, share): (&Hello, &CoreShare)| {
            let busy = share.of_rank().min(hello.threads(share) as f64);
            hello.power.unit_flops * busy * hello.ranks.len() as f64
        };
        self.hellos.iter().zip(&self.shares).map(of_process).sum()
    }
}

/// This process, for others to find it by.
pub(crate) fn this_process() -> Peer {
    Peer { host: host_name(), pid: std::process::id() }
}

/// A name for a run that later runs' names follow: seconds since 1970, and something that
/// distinguishes those of one second.
pub(crate) fn new_name() -> String {
    let now = now_ns();
    let mix = (now ^ u64::from(std::process::id()) << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    format!("{}-{:06x}", Duration::from_nanos(now).as_secs(), mix >> 40)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use zeropp_comm::threads::{ThreadsOptions, ThreadsWorld};

    use super::*;

    const POWER: Power = Power { units: 8, unit_flops: 10.0, threads: None };

    /// Processes of two ranks each that say what they are given, and how often each has spoken.
    fn met(hellos: Vec<Hello>) -> Vec<(Arc<Roster>, usize)> {
        let world = ThreadsWorld::new(2 * hellos.len(), ThreadsOptions::default());
        let ranks = world.communicators();
        let rosters = vec![OnceLock::new(); hellos.len()];
        let spoken: Vec<AtomicUsize> = hellos.iter().map(|_| AtomicUsize::new(0)).collect();
        std::thread::scope(|scope| {
            for world in ranks {
                let process = world.rank() / 2;
                let (hello, roster) = (&hellos[process], &rosters[process]);
                let spoken = &spoken[process];
                let say = move || {
                    spoken.fetch_add(1, Ordering::SeqCst);
                    hello.clone()
                };
                scope.spawn(move || {
                    let got = meet(&*world, say, &hello.ranks, roster).unwrap();
                    assert!(Arc::ptr_eq(&got, roster.get().unwrap()));
                });
            }
        });
        let rosters = rosters.into_iter().map(|roster| roster.into_inner().unwrap());
        rosters.zip(spoken.into_iter().map(AtomicUsize::into_inner)).collect()
    }

    fn hello(process: usize, epoch: Instant, clock: &str) -> Hello {
        let here = [2 * process, 2 * process + 1];
        let hello = Hello::new(&format!("host {process}"), &here, epoch, POWER);
        Hello { clock: clock.into(), ..hello }
    }

    /// With many ranks in a process, each reading what all of them say would be their square.
    #[test]
    fn a_process_sends_once_and_all_of_its_ranks_share_what_it_received() {
        let epoch = Instant::now();
        let all = met((0..3).map(|process| hello(process, epoch, "one")).collect());
        for (roster, spoken) in &all {
            assert_eq!((*spoken, roster.run()), (1, all[0].0.run()));
            let hosts: Vec<&str> = roster.processes.iter().map(|p| &*p.host).collect();
            assert_eq!(hosts, ["host 0", "host 0", "host 1", "host 1", "host 2", "host 2"]);
        }
    }

    #[test]
    fn a_clock_that_started_later_is_put_right() {
        let early = Instant::now();
        let apart = Duration::from_millis(30);
        let late = early + apart;
        for clocks in [["one", "one", "one"], ["one", "two", "two"]] {
            let hellos = [early, late, late];
            let hellos = hellos.iter().zip(clocks).enumerate();
            let all = met(hellos.map(|(p, (epoch, clock))| hello(p, *epoch, clock)).collect());
            let [first, second, third] = [0, 1, 2].map(|process| all[process].0.clock());
            assert_eq!(first, ClockOffset::default());
            // In truth all have one clock, which the bounds must allow for.
            assert_eq!((second, second.ahead_ns), (third, 0));
            assert_eq!(second.shift(0), apart.as_nanos() as u64);
            assert_eq!(second.error_ns == 0, clocks[1] == "one", "{second:?}");
        }
    }

    #[test]
    fn hosts_are_no_faster_than_their_cores() {
        let peak = |units: [usize; 2], threads| {
            let said = |host: &str, ranks: &[usize], units| {
                let power = Power { units, threads, ..POWER };
                Hello::new(host, ranks, Instant::now(), power)
            };
            let hellos = vec![
                said("a", &[0], units[0]),
                said("a", &[1], units[0]),
                said("b", &[2], units[1]),
            ];
            Roster::of(hellos, 0).peak_flops()
        };
        assert_eq!((peak([2, 8], Some(1)), peak([1, 8], Some(1))), (30.0, 20.0));
        // Without the setting a rank has its share of the cores, and more threads are no more.
        assert_eq!((peak([5, 8], None), peak([2, 8], Some(3))), (120.0, 50.0));
    }

    #[test]
    fn ranks_bound_to_cores_of_their_own_use_all_of_them() {
        let met = |host: &str, sets: [[usize; 4]; 2]| {
            let said = |(rank, cores): (usize, [usize; 4])| {
                let host = if rank == 0 { "n1.rack-a" } else { host };
                let power = Power { units: 4, ..POWER };
                let hello = Hello::new(host, &[rank], Instant::now(), power);
                hello.on_cores(cores.to_vec(), true)
            };
            let roster = Roster::of(sets.into_iter().enumerate().map(said).collect(), 0);
            (roster.threads().0, roster.peak_flops(), roster.cores().unwrap())
        };
        let (all, others) = ([0, 1, 2, 3], [4, 5, 6, 7]);
        let own = |second: &[usize]| Cores::from([(0, all.to_vec()), (1, second.to_vec())]);
        assert_eq!(met("n1.rack-a", [all, others]), (4, 80.0, own(&others)));
        // Another machine, whatever its short name is.
        assert_eq!(met("n1.rack-b", [all, all]), (4, 80.0, own(&all)));
        let halves = Cores::from([(0, vec![0, 1]), (1, vec![2, 3])]);
        assert_eq!(met("n1", [all, all]), (2, 40.0, halves));
    }
}
