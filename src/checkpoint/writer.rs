//! A rank's writer: a thread that brings the state of a step to the checkpoint's file while the
//! rank computes the next one. It is started before the first step, so that no later save depends
//! on what threads the system grants.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use zeropp_checkpoint::part;
use zeropp_checkpoint::under_way::WriterReport;
use zeropp_checkpoint::{CheckpointError, WrittenState};
use zeropp_core::threads::BackgroundThread;
use zeropp_pipeline::timeline::SaveSpan;
use zeropp_zero3::checkpoint::StateToWrite;

use crate::checkpoint::Saver;
use crate::world::cores::cpu_time;

/// How long a rank that ends for another reason lets its writer finish.
const LINGER: Duration = Duration::from_millis(300);

/// A rank's part of a save: which it is, how far its writer is, and what it kept the rank from.
pub(crate) struct RankSave {
    rank: usize,
    /// Steps behind the checkpoint.
    step: u64,
    in_memory: bool,
    /// The moment that times count from.
    zero: Instant,
    start_ns: u64,
    /// 0 until the state is written.
    end_ns: AtomicU64,
    blocked_ns: AtomicU64,
    /// The writer is asked to end.
    cancelled: AtomicBool,
}

impl RankSave {
    /// Of a save that begins now, in times from `zero`.
    pub(crate) fn begin(rank: usize, step: u64, in_memory: bool, zero: Instant) -> RankSave {
        let start_ns = zero.elapsed().as_nanos() as u64;
        let (end_ns, blocked_ns) = (AtomicU64::new(0), AtomicU64::new(0));
        let cancelled = AtomicBool::new(false);
        RankSave { rank, step, in_memory, zero, start_ns, end_ns, blocked_ns, cancelled }
    }

    /// The rank was kept from its work.
    pub(crate) fn block(&self, ns: u64) {
        self.blocked_ns.fetch_add(ns, Ordering::Relaxed);
    }

    /// The state is written, or given up.
    fn end(&self) {
        let now = self.zero.elapsed().as_nanos() as u64;
        // The first time counts.
        let _ = self.end_ns.compare_exchange(0, now, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// As a trace has it.
    pub(crate) fn span(&self) -> SaveSpan {
        let RankSave { step, in_memory, start_ns, .. } = *self;
        let end_ns = self.end_ns.load(Ordering::Relaxed).max(start_ns);
        let blocked_ns = self.blocked_ns.load(Ordering::Relaxed);
        SaveSpan { step, in_memory, start_ns, end_ns, blocked_ns }
    }
}

/// A rank's writer at work.
pub(crate) struct Writing {
    /// Receives the report for rank 0 where that is in another process; else it is noted there.
    done: Receiver<Option<WriterReport>>,
    save: Arc<RankSave>,
}

impl Writing {
    /// Has the rank's `writer` write `state` as its part of a checkpoint; the report is noted here
    /// in rank 0's process. The receiver gets a message once the state is not needed any more.
    pub(crate) fn start(
        writer: &BackgroundThread,
        saver: &Arc<Saver>,
        is_noted_here: bool,
        save: &Arc<RankSave>,
        state: Option<StateToWrite>,
    ) -> (Writing, Receiver<Vec<u8>>) {
        let (released_tx, released) = channel();
        let (done_tx, done) = channel();
        let (saver, own) = (saver.clone(), save.clone());
        let work = move || {
            let before = cpu_time();
            let release = || {
                own.end();
                // Where the receiver is gone, so is the rank.
                let _ = released_tx.send(Vec::new());
            };
            let written = write(&saver, &own, state, release);
            // Also where there was nothing to write, and nothing could be written.
            release();
            let written = written.map_err(|e| e.to_string());
            let cpu_s = (cpu_time() - before).as_secs_f64();
            let report = WriterReport { rank: own.rank, written, cpu_s };
            let report = match is_noted_here {
                true => {
                    saver.note(report);
                    None
                }
                false => Some(report),
            };
            // Where the rank is gone, nothing asks for it.
            let _ = done_tx.send(report);
        };
        writer.give(work);
        (Writing { done, save: save.clone() }, released)
    }

    /// Whether the writer is done, and then its report where it has to go to rank 0.
    pub(crate) fn report(&self) -> Option<Option<WriterReport>> {
        self.done.try_recv().ok()
    }

    /// The report where it has to go to rank 0, once the writer is done.
    pub(crate) fn wait(self) -> Option<WriterReport> {
        self.done.recv().ok().flatten()
    }
}

impl Drop for Writing {
    /// The writer may finish what it is about to; then it is asked to end, and waited for.
    fn drop(&mut self) {
        let _ = self.done.recv_timeout(LINGER);
        self.save.cancelled.store(true, Ordering::Relaxed);
        // Its end of the channel goes with the last of its work.
        while self.done.recv().is_ok() {}
    }
}

/// Writes the state, more than once where the file system refuses, and makes it durable. The state
/// is dropped, and `release` is called, before that.
fn write(
    saver: &Saver,
    save: &RankSave,
    state: Option<StateToWrite>,
    release: impl Fn(),
) -> Result<Option<WrittenState>, CheckpointError> {
    let Some(state) = state else { return Ok(None) };
    let goes_on = || !save.cancelled.load(Ordering::Relaxed);
    #[cfg(test)]
    tests::take_time(saver);
    let pause = |wait: Duration| {
        // Memory that refuses is full, and another copy follows.
        let goes_on = goes_on() && !saver.is_copier;
        if goes_on {
            std::thread::sleep(wait);
        }
        goes_on
    };
    let store = saver.store();
    let unsynced = part::write(store, save.step, saver.run(), save.rank, pause, |folder, file| {
        state.write(store.disk(), folder, file, goes_on)
    })?;
    drop(state);
    release();
    #[cfg(test)]
    tests::take_time(saver);
    unsynced.sync().map(Some)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::config::{Config, Resume};
    use crate::{StepMetrics, Trainer};

    /// On a disk that takes this long for a rank's file, and as long to make it durable.
    const SLOW: Duration = Duration::from_millis(120);

    /// Folders of this name are on a slow disk.
    pub(super) fn take_time(saver: &Saver) {
        if saver.folder().ends_with("slow") {
            std::thread::sleep(SLOW);
        }
    }

    fn config(folder: Option<&Path>, steps: u64) -> Config {
        Config {
            pp: 2,
            zero3: 2,
            layers: 2,
            hidden: 16,
            heads: 2,
            seq: 8,
            vocab: None,
            steps,
            warmup: Some(1),
            decay: crate::config::Decay::Constant,
            save: folder.map(Path::to_path_buf),
            save_every: 1,
            keep: 99,
            ..Config::default()
        }
    }

    fn train(config: Config) -> Vec<StepMetrics> {
        let mut steps = Vec::new();
        Trainer::new(config).unwrap().train(|step| steps.push(step.clone())).unwrap();
        steps
    }

    fn bits(steps: &[StepMetrics]) -> Vec<(u64, u64, u64)> {
        steps.iter().map(|s| (s.step, s.loss.to_bits(), s.grad_norm.to_bits())).collect()
    }

    /// The files of a checkpoint but for the manifest, which has the number of steps to come.
    fn files(folder: &Path, step: u64) -> Vec<Vec<u8>> {
        let folder = folder.join(format!("step-{step:06}"));
        (0..4)
            .map(|r| std::fs::read(folder.join(format!("rank-{r:05}.safetensors"))).unwrap())
            .collect()
    }

    /// A save is of the step it follows, however long the writers take: the update waits, and the
    /// files are those of a run that ended there, when nothing was computed meanwhile.
    #[test]
    fn a_slow_disk_holds_the_update_back_and_changes_no_bit() {
        let dir = tempfile::tempdir().unwrap();
        let slow = dir.path().join("slow");
        let steps = train(config(Some(&slow), 6));
        assert_eq!(bits(&steps), bits(&train(Config { save_every: 0, ..config(None, 6) })));
        // The second step's update waits for the first checkpoint's files. No later one is begun
        // before that is durable, but for the last, which no update follows. What of the wait is
        // not spent computing, which takes long on a busy machine, counts as blocked.
        let held: Vec<f64> = steps.iter().map(|s| s.save_blocked_s).collect();
        assert!(steps[1].step_s > 0.8 * SLOW.as_secs_f64(), "{steps:?}");
        assert!(held[1] <= steps[1].step_s && held[0] == 0.0, "{held:?}");

        let entries = std::fs::read_dir(&slow).unwrap().map(|e| e.unwrap().file_name());
        let mut saved: Vec<u64> =
            entries.filter_map(|name| name.to_str()?.strip_prefix("step-")?.parse().ok()).collect();
        saved.sort();
        assert_eq!((saved[0], *saved.last().unwrap()), (1, 6));
        assert!(
            saved.len() < 6,
            "a save that is due while one is under way is left out: {saved:?}"
        );
        for step in saved {
            let alone = dir.path().join(step.to_string());
            train(Config { save_every: 0, ..config(Some(&alone), step) });
            assert!(files(&slow, step) == files(&alone, step), "step {step}");
        }
        let rest = train(Config { resume: Resume::Step(1), ..config(Some(&slow), 6) });
        assert_eq!(bits(&rest), bits(&steps[1..]));
    }
}
