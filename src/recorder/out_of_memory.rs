//! The end of a process whose allocator has no more memory to give.
//!
//! Whoever asked for the memory may hold any lock and can allocate nothing, so the records are
//! written by a thread that waits for this from the start, with a reserve of its own.

use std::cell::Cell;
use std::io::Write;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, Thread};
use std::time::Duration;

use zeropp_pipeline::flight::EndKind;

use super::hooks::active;

/// Blocks that the writer keeps to itself and gives back when it has to write.
const RESERVE: (usize, usize) = (128, 32 << 10);
/// How long the records may take: a rank that died in the middle of something may hold a lock that
/// they need.
const WRITING_TIME: Duration = Duration::from_secs(3);
/// How often it is seen whether they are written.
const LOOK: Duration = Duration::from_millis(5);

/// The thread that writes, once it has its reserve.
static WRITER: OnceLock<Thread> = OnceLock::new();
/// A thread has found the memory at its end.
static ENDING: AtomicBool = AtomicBool::new(false);
/// What it asked for.
static BYTES: AtomicUsize = AtomicUsize::new(0);
/// Its rank and one more; 0 where it is no rank's.
static RANK: AtomicUsize = AtomicUsize::new(0);
static WRITTEN: AtomicBool = AtomicBool::new(false);
/// How the program tells its user.
static SAY: OnceLock<fn(&str)> = OnceLock::new();

thread_local! {
    static IS_WRITER: Cell<bool> = const { Cell::new(false) };
}

/// Makes [`end_out_of_memory`] write the records of the runs under way. For programs that install
/// an allocator which calls that; the command does.
pub fn prepare_for_out_of_memory() {
    let body = || {
        IS_WRITER.set(true);
        let reserve: Vec<Vec<u8>> = (0..RESERVE.0).map(|_| Vec::with_capacity(RESERVE.1)).collect();
        let _ = WRITER.set(thread::current());
        while !ENDING.load(Ordering::SeqCst) {
            thread::park();
        }
        drop(reserve);
        write_records();
        WRITTEN.store(true, Ordering::SeqCst);
    };
    // Without a thread there is no record, which is no reason not to start.
    let _ = thread::Builder::new().name("out of memory".into()).spawn(body);
}

fn write_records() {
    let bytes = BYTES.load(Ordering::SeqCst);
    let what = format!("an allocation of {bytes} bytes failed");
    let rank = RANK.load(Ordering::SeqCst).checked_sub(1);
    for recorder in active() {
        let others = match rank {
            Some(rank) => {
                recorder.end_if_here(rank, EndKind::Error, &format!("out of memory: {what}"));
                (EndKind::AtWork, format!("rank {rank} of this process was out of memory: {what}"))
            }
            None => (EndKind::Error, format!("out of memory: {what}, on no rank's thread")),
        };
        let found = recorder.write_all(others.0, &others.1);
        if let Some(say) = SAY.get() {
            say(&format!("{found}\n"));
        }
    }
}

/// Ends the process with exit code 1, because an allocation of so many `bytes` has failed: one
/// message with the way out, and the records of the ranks of this process. For an allocator to
/// call in place of returning nothing; it allocates nothing itself. `say` is given the lines for
/// the user, first on this thread, where it must not allocate: an event would.
pub fn end_out_of_memory(bytes: usize, say: fn(&str)) -> ! {
    if IS_WRITER.get() {
        end();
    }
    if ENDING.swap(true, Ordering::SeqCst) {
        // Another thread is at it, and ends this one, too.
        loop {
            thread::sleep(WRITING_TIME);
        }
    }
    let _ = SAY.set(say);
    tell(bytes, say);
    BYTES.store(bytes, Ordering::SeqCst);
    let thread = thread::current();
    let rank = thread.name().and_then(|name| name.strip_prefix("rank ")?.parse::<usize>().ok());
    RANK.store(rank.map_or(0, |rank| rank + 1), Ordering::SeqCst);
    if let Some(writer) = WRITER.get() {
        writer.unpark();
        let mut waited = Duration::ZERO;
        while !WRITTEN.load(Ordering::SeqCst) && waited < WRITING_TIME {
            thread::sleep(LOOK);
            waited += LOOK;
        }
    }
    end()
}

/// The message, put together on the stack.
fn tell(bytes: usize, say: fn(&str)) {
    let mut text = [0u8; 512];
    let mut rest = &mut text[..];
    let mib = bytes as f64 / f64::from(1 << 20);
    // It fits; what would not is left out.
    let _ = writeln!(
        rest,
        "error: out of memory: an allocation of {mib:.1} MiB failed; zeropp run --dry-run says \
         what a rank needs, and a smaller unit or micro-batch-size, recompute = full or more \
         virtual stages lower it"
    );
    let left = rest.len();
    say(std::str::from_utf8(&text[..text.len() - left]).unwrap_or_default());
}

/// At once: whatever runs at the end of a process may need memory, too.
fn end() -> ! {
    #[cfg(unix)]
    signal_hook::low_level::exit(1);
    #[cfg(not(unix))]
    std::process::abort()
}
