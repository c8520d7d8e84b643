//! A thread that works beside the ranks and gives way to them: it has a low priority, is not on
//! rank 0's cores where threads are bound to cores, and may take so much time of a core.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use zeropp_core::threads;

use crate::world::cores;

/// A thread that gets no core for this many times its limit has to end, too.
const PATIENCE: u32 = 100;

/// The limit of a piece of work in the background.
pub(super) struct Limit {
    begun: Instant,
    cpu: Duration,
    most: Duration,
}

impl Limit {
    /// Seconds of a core that are left to the calling thread, which has begun the work.
    pub(super) fn left_s(&self) -> f64 {
        if self.begun.elapsed() >= PATIENCE * self.most {
            return 0.0;
        }
        let taken = cores::cpu_time().saturating_sub(self.cpu);
        self.most.saturating_sub(taken).as_secs_f64()
    }
}

/// Starts `work` on a thread of its own, which may take `most` of a core's time and adds what it
/// took to `spent`, in ns. Where there are cores `beside` those of rank 0, it runs on them.
///
/// # Errors
/// The system grants no thread.
pub(super) fn start(
    beside: Vec<usize>,
    most: Duration,
    spent: &Arc<AtomicU64>,
    work: impl FnOnce(&Limit) + Send + 'static,
) -> io::Result<()> {
    let spent = spent.clone();
    let body = move || {
        cores::give_way(&beside);
        let limit = Limit { begun: Instant::now(), cpu: cores::cpu_time(), most };
        work(&limit);
        let taken = cores::cpu_time().saturating_sub(limit.cpu);
        spent.fetch_add(taken.as_nanos() as u64, Ordering::Relaxed);
    };
    threads::start("reschedule", body).map(drop)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn work_in_the_background_gives_way_and_stays_off_rank_0_s_cores() {
        let priority = || rustix::process::getpriority_process(None).expect("Linux says it");
        let (mine, before) = (cores::allowed(), priority());
        let (sender, seen) = channel();
        let spent = Arc::<AtomicU64>::default();
        let last = mine[mine.len() - 1];
        let most = Duration::from_millis(20);
        start(vec![last], most, &spent, move |limit| {
            while limit.left_s() > 0.0 {}
            let nice = rustix::process::getpriority_process(None);
            sender.send((nice, cores::allowed())).expect("it is waited for");
        })
        .expect("a thread");
        let (nice, on) = seen.recv().expect("it ends");
        let lower = (before + cores::LOWER_PRIORITY).min(19);
        assert_eq!((nice.expect("Linux says it"), on), (lower, vec![last]));
        assert_eq!(priority(), before, "no other thread's is lower");
        assert_eq!(cores::allowed(), mine, "no other thread is moved");
    }
}
