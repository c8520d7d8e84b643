//! The flight recorder: what the ranks of this process did last, written to files when the run
//! fails.

mod hooks;
pub(crate) mod out_of_memory;
mod watch;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufWriter};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use crate::config::EngineKind;
use parking_lot::Mutex;
use zeropp_comm::Communicator;
use zeropp_comm::flight::now_ns;
use zeropp_comm::mesh::Coords;
use zeropp_comm::recorded::{OpLog, RecordedCommunicator};
use zeropp_failures::{
    End, EndKind, ExchangedProgram, ExpertLoad, Header, Pause, Peer, Record, Run,
};
use zeropp_pipeline::executor::StatusBoard;

use crate::plan::blueprint::Blueprint;
use crate::world::hello::{Roster, this_process};
pub(crate) use hooks::{active, this_thread_is};

/// How long a rank gets to see that its world has failed.
const RETURN_TIME: Duration = Duration::from_millis(300);
/// How long a process that is about to end waits for others of its host to write their records. A
/// launcher kills what is left after a second.
pub(crate) const LINGER: Duration = Duration::from_millis(700);

/// Records the ranks of this process for one run.
pub(crate) struct FlightRecorder {
    /// Where the records of a failed run go; none where the settings want none, and they are only
    /// judged.
    folder: Option<PathBuf>,
    blueprint: Arc<Blueprint>,
    status: Arc<StatusBoard>,
    /// The run's name until the processes have met: rank 0's counts then.
    run: Arc<str>,
    ranks: BTreeMap<usize, RankLog>,
    pauses: Mutex<Vec<Pause>>,
    watch: Mutex<Option<watch::Watch>>,
    /// The run has ended well: no record is to be written any more.
    ended_well: Mutex<bool>,
}

#[derive(Default)]
struct RankLog {
    ops: Arc<OpLog>,
    /// Weak: a communicator that is alive says that its rank still takes part.
    world: OnceLock<Weak<dyn Communicator>>,
    state: Mutex<RecorderState>,
    /// The program that it runs in place of the planned one.
    exchanged: Mutex<Option<ExchangedProgram>>,
    /// How the last step spread tokens over experts, of rank 0.
    experts: Mutex<Option<ExpertLoad>>,
}

#[derive(Default)]
struct RecorderState {
    roster: Option<Arc<Roster>>,
    end: Option<End>,
    /// The record of a rank that has ended: what is judged and what is written are the same.
    record: Option<Arc<Record>>,
    written: bool,
    /// Written for a signal that the run may still obey; a real end replaces it.
    provisional: bool,
}

impl FlightRecorder {
    /// A recorder of `ranks`, all that run in this process.
    pub(crate) fn start(
        blueprint: &Arc<Blueprint>,
        status: &Arc<StatusBoard>,
        ranks: impl Iterator<Item = usize>,
        run: &Arc<str>,
    ) -> Arc<FlightRecorder> {
        let folder = blueprint.config.flight_dir.clone();
        let folder = folder.filter(|folder| !folder.as_os_str().is_empty());
        let recorder = Arc::new(FlightRecorder {
            folder,
            blueprint: blueprint.clone(),
            status: status.clone(),
            run: run.clone(),
            ranks: ranks.map(|rank| (rank, RankLog::default())).collect(),
            pauses: Mutex::default(),
            watch: Mutex::default(),
            ended_well: Mutex::default(),
        });
        if recorder.folder.is_none() {
            return recorder;
        }
        let weak = Arc::downgrade(&recorder);
        let mut failed_at = None;
        *recorder.watch.lock() = watch::Watch::start(move |pause| {
            if let Some(recorder) = weak.upgrade() {
                recorder.pauses.lock().extend(pause);
                recorder.look_after(&mut failed_at);
            }
        });
        hooks::register(&recorder);
        recorder
    }

    /// The world communicator of `rank`, recorded.
    pub(crate) fn wrap(&self, rank: usize, world: Arc<dyn Communicator>) -> Arc<dyn Communicator> {
        let log = &self.ranks[&rank];
        let world: Arc<dyn Communicator> =
            Arc::new(RecordedCommunicator::new(world, log.ops.clone()));
        let _ = log.world.set(Arc::downgrade(&world));
        world
    }

    /// Writes what a rank that does not come back did last, once the world has failed for a
    /// while: its process may be ended at any time.
    fn look_after(&self, failed_at: &mut Option<Instant>) {
        if self.ranks.values().all(|log| log.state.lock().written) {
            return;
        }
        let world = |log: &RankLog| log.world.get().and_then(Weak::upgrade);
        let failure = || self.ranks.values().find_map(|log| world(log)?.failure());
        match failed_at {
            Some(at) if at.elapsed() > RETURN_TIME => {
                let text = failure().map(|error| error.to_string()).unwrap_or_default();
                self.write_all(EndKind::AtWork, &format!("did not come back after: {text}"));
            }
            Some(_) => {}
            None => *failed_at = failure().map(|_| Instant::now()),
        }
    }

    /// Waits until the ranks of other processes of this host have written their records, too: a
    /// launcher that ends a job may kill all of it as soon as one process is gone.
    pub(crate) fn await_neighbours(&self, until: Instant) {
        let roster = self.ranks.values().find_map(|log| log.state.lock().roster.clone());
        let (Some(roster), Some(own), Some(folder)) =
            (roster, self.ranks.keys().next(), &self.folder)
        else {
            return;
        };
        let (run, processes) = (roster.run(), &roster.processes);
        let neighbour = |rank: &usize| {
            processes[*rank].host == processes[*own].host && !self.ranks.contains_key(rank)
        };
        let files: Vec<PathBuf> = (0..processes.len())
            .filter(neighbour)
            .map(|rank| folder.join(Record::file_name(run, rank)))
            .collect();
        while Instant::now() < until && !files.iter().all(|file| file.exists()) {
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Notes what the processes have said of themselves.
    pub(crate) fn has_met(&self, rank: usize, roster: &Arc<Roster>) {
        self.ranks[&rank].state.lock().roster = Some(roster.clone());
    }

    /// Notes the program that `rank` runs from now on in place of another.
    pub(crate) fn exchanged(&self, rank: usize, program: ExchangedProgram) {
        *self.ranks[&rank].exchanged.lock() = Some(program);
    }

    /// Notes how the last step that `rank` saw whole spread tokens over experts.
    pub(crate) fn spread(&self, rank: usize, load: ExpertLoad) {
        *self.ranks[&rank].experts.lock() = Some(load);
    }

    /// Notes that `rank` ended, by no error between ranks.
    pub(crate) fn end(&self, rank: usize, kind: EndKind, text: &str) {
        self.end_as(rank, End { kind, at_ns: now_ns(), text: text.into(), error: None });
    }

    /// Notes how `rank` ended; the first end counts.
    pub(crate) fn end_as(&self, rank: usize, end: End) {
        self.ranks[&rank].state.lock().end.get_or_insert(end);
    }

    /// The same for a rank that may be another run's.
    pub(crate) fn end_if_here(&self, rank: usize, kind: EndKind, text: &str) {
        if self.ranks.contains_key(&rank) {
            self.end(rank, kind, text);
        }
    }

    /// The records of the ranks of this process, to judge who broke the run. Those that have not
    /// ended are said to end like this; from now on, if the run `is_over`.
    pub(crate) fn run(&self, kind: EndKind, text: &str, is_over: bool) -> Run {
        let record = |(rank, log): (&usize, &RankLog)| {
            let mut state = log.state.lock();
            if is_over || state.end.is_some() {
                let end = End { kind, at_ns: now_ns(), text: text.into(), error: None };
                state.end.get_or_insert(end);
                return self.kept(*rank, log, &mut state).map(|record| (*record).clone());
            }
            let end = End { kind, at_ns: now_ns(), text: text.into(), error: None };
            Some(self.record(*rank, &log.ops, state.roster.as_deref(), end))
        };
        let records: Vec<Record> = self.ranks.iter().filter_map(record).collect();
        let name = records.first().map(|record| record.header.run.clone()).unwrap_or_default();
        let world = self.blueprint.mesh.world();
        let unknown = (0..world).filter(|rank| !self.ranks.contains_key(rank)).collect();
        Run { name, records, unknown, ..Run::default() }
    }

    /// The record of a rank, once it has ended.
    fn kept(&self, rank: usize, log: &RankLog, state: &mut RecorderState) -> Option<Arc<Record>> {
        let end = state.end.clone()?;
        let make = || Arc::new(self.record(rank, &log.ops, state.roster.as_deref(), end));
        let record = state.record.take().unwrap_or_else(make);
        state.record = Some(record.clone());
        Some(record)
    }

    /// Writes the record of every rank of this process that is not written yet; those that have
    /// not ended, end like this. Returns how the user reads the records, where there are any.
    pub(crate) fn write_all(&self, kind: EndKind, text: &str) -> Option<String> {
        let mut problem = None;
        for rank in self.ranks.keys() {
            self.end(*rank, kind, text);
            problem = self.write(*rank).err().or(problem);
        }
        let folder = self.folder.as_ref()?.display();
        Some(match problem {
            None => format!("what every rank did last: zeropp why {folder}"),
            Some(e) => format!("what the ranks did last could not be written to {folder} ({e})"),
        })
    }

    /// Writes the record of `rank`, once, unless the run has ended as it was asked to.
    ///
    /// # Errors
    /// Those of the file system.
    pub(crate) fn write(&self, rank: usize) -> io::Result<()> {
        let Some(folder) = &self.folder else { return Ok(()) };
        let ended_well = self.ended_well.lock();
        if *ended_well {
            return Ok(());
        }
        let log = &self.ranks[&rank];
        let mut state = log.state.lock();
        if state.written {
            return Ok(());
        }
        let Some(record) = self.kept(rank, log, &mut state) else { return Ok(()) };
        write(folder, &record)?;
        state.written = true;
        Ok(())
    }

    /// Writes what the ranks have done so far, for a process that was asked to end and may be
    /// killed before it has: launchers do so where another process is gone. What cannot be written
    /// is missing then.
    pub(crate) fn write_provisionally(&self, signal: i32, text: &str) {
        let Some(folder) = &self.folder else { return };
        let ended_well = self.ended_well.lock();
        if *ended_well {
            return;
        }
        for (rank, log) in &self.ranks {
            let mut state = log.state.lock();
            if state.end.is_none() {
                let at_ns = now_ns();
                let end =
                    End { kind: EndKind::Signal(signal), at_ns, text: text.into(), error: None };
                let record = self.record(*rank, &log.ops, state.roster.as_deref(), end);
                state.provisional = write(folder, &record).is_ok();
            }
        }
    }

    /// The run has ended as it was asked to: takes back what was written in case it would not.
    pub(crate) fn withdraw(&self) {
        let mut ended_well = self.ended_well.lock();
        *ended_well = true;
        for (rank, log) in &self.ranks {
            let mut state = log.state.lock();
            let provisional = std::mem::take(&mut state.provisional) && !state.written;
            if let (true, Some(roster), Some(folder)) = (provisional, &state.roster, &self.folder) {
                // Gone already, perhaps, with its folder.
                let _ = fs::remove_file(folder.join(Record::file_name(roster.run(), *rank)));
                let _ = fs::remove_dir(folder);
            }
        }
    }

    fn record(&self, rank: usize, ops: &OpLog, roster: Option<&Roster>, end: End) -> Record {
        let (config, schedule) = (&self.blueprint.config, self.blueprint.schedule());
        let mesh = self.blueprint.mesh;
        let alone = || {
            let mut processes = vec![Peer::default(); mesh.world()];
            self.ranks.keys().for_each(|rank| processes[*rank] = this_process());
            processes
        };
        let job = || config.job().map(|job| job.name()).unwrap_or_default();
        let (groups, ops) = ops.snapshot();
        let mut pauses = self.pauses.lock().clone();
        pauses.extend(self.watch.lock().as_ref().and_then(watch::Watch::pausing));
        let header = Header {
            format: 0,
            run: roster.map_or(&*self.run, |roster| roster.run()).to_owned(),
            job: roster.map_or_else(job, |_| String::new()),
            rank,
            coords: mesh.coords(rank),
            mesh: Coords { pp: mesh.pp, zero3: mesh.zero3, dp: mesh.dp },
            processes: roster.map_or_else(alone, |roster| roster.processes.to_vec()),
            engine: config.engine.to_string(),
            schedule: schedule.kind.clone(),
            exchanged: self.ranks[&rank].exchanged.lock().clone(),
            experts: self.ranks[&rank].experts.lock().clone(),
            placement: schedule.placement.clone(),
            timeout_s: config.timeout_s,
            ahead_ns: roster.map_or(0, |roster| roster.clock().ahead_ns),
            end,
            pauses,
            groups,
            entries: 0,
        };
        Record::new(header, self.status.actions(rank), ops)
    }

    /// Whether a panic of any thread ends the process, and with it all ranks here.
    fn dies_of_panics(&self) -> bool {
        self.blueprint.config.engine == EngineKind::Mpi
    }
}

/// Writes a record aside, and gives it its name once it is whole.
fn write(folder: &Path, record: &Record) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    let name = Record::file_name(&record.header.run, record.header.rank);
    let aside = folder.join(format!(".{name}.{}", std::process::id()));
    let written = File::create(&aside).and_then(|file| {
        let mut out = BufWriter::new(file);
        record.write(&mut out)?;
        Ok(out.into_inner()?)
    });
    let named = written.and_then(|file| fs::rename(&aside, folder.join(name)).map(|()| file));
    match named {
        // On disk only after it has its name: that can take longer than a killer waits.
        Ok(file) => file.sync_all(),
        Err(e) => {
            // What cannot be removed has no name that anyone looks for.
            let _ = fs::remove_file(&aside);
            Err(e)
        }
    }
}
