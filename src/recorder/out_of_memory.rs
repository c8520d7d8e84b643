//! The end of a process that cannot go on where it stands: its allocator has no more memory to
//! give, or a file that it has mapped was cut (ADR 17).
//!
//! The thread that finds that may hold any lock and can allocate nothing, so the records are
//! written by a thread that waits for this from the start, with a reserve of its own.

use std::cell::Cell;
use std::io::Write;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, Thread};
use std::time::Duration;

use zeropp_core::threads::start;
use zeropp_failures::EndKind;

use super::hooks::active;

/// Blocks that the writer keeps to itself and gives back when it has to write.
const RESERVE: (usize, usize) = (128, 32 << 10);
/// Bytes of the smallest page that is mapped.
const PAGE: u64 = 4 << 10;
/// How long the records may take: a rank that died in the middle of something may hold a lock that
/// they need.
const WRITING_TIME: Duration = Duration::from_secs(3);
/// How often it is seen whether they are written.
const LOOK: Duration = Duration::from_millis(5);

/// The thread that writes, once it has its reserve.
static WRITER: OnceLock<Thread> = OnceLock::new();
/// A thread cannot go on.
static ENDING: AtomicBool = AtomicBool::new(false);
/// Memory that is mapped from a file was not there.
static LOST: AtomicBool = AtomicBool::new(false);
/// The bytes that it asked for.
static BYTES: AtomicUsize = AtomicUsize::new(0);
/// Its rank and one more; 0 where it is no rank's.
static RANK: AtomicUsize = AtomicUsize::new(0);
static WRITTEN: AtomicBool = AtomicBool::new(false);
/// How the program tells its user.
static SAY: OnceLock<fn(&str)> = OnceLock::new();

thread_local! {
    static IS_WRITER: Cell<bool> = const { Cell::new(false) };
}

/// Makes [`end_out_of_memory`] and [`end_on_lost_file`] write the records of the runs under way.
/// For programs that install an allocator and a handler which call them; the command does.
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
    let _ = start("out of memory", body);
}

fn write_records() {
    let say = |text: &str| {
        if let Some(say) = SAY.get() {
            say(text);
        }
    };
    let what = if LOST.load(Ordering::SeqCst) {
        let cut = cut_files();
        cut.iter().for_each(|path| say(&format!("it is {path}, which is shorter now\n")));
        format!("a file that is mapped into memory was cut (SIGBUS): {}", cut.join(", "))
    } else {
        format!("out of memory: an allocation of {} bytes failed", BYTES.load(Ordering::SeqCst))
    };
    let rank = RANK.load(Ordering::SeqCst).checked_sub(1);
    for recorder in active() {
        let others = match rank {
            Some(rank) => {
                recorder.end_if_here(rank, EndKind::Error, &what);
                (EndKind::AtWork, format!("rank {rank} of this process ended: {what}"))
            }
            None => (EndKind::Error, format!("{what}, on no rank's thread")),
        };
        if let Some(found) = recorder.write_all(others.0, &others.1) {
            say(&format!("{found}\n"));
        }
    }
}

/// The files of which this process has mapped more than they have now, where the system tells.
fn cut_files() -> Vec<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let mut cut: Vec<String> = maps.lines().filter_map(cut_file).map(str::to_owned).collect();
    cut.dedup();
    cut
}

/// The file of a line of the system's table of mappings, where it was cut: addresses, permissions,
/// offset, device, inode, path.
fn cut_file(line: &str) -> Option<&str> {
    let mut words = line.split_ascii_whitespace();
    let (from, to) = words.next()?.split_once('-')?;
    let number = |text: &str| u64::from_str_radix(text, 16).ok();
    let offset = number(words.nth(1)?)?;
    let path = line.get(line.find('/')?..)?;
    let last_page = offset + number(to)? - number(from)? - PAGE;
    std::fs::metadata(path)
        .is_ok_and(|found| found.is_file() && found.len() <= last_page)
        .then_some(path)
}

/// Ends the process with exit code 1, because an allocation of so many `bytes` has failed: one
/// message with the way out, and the records of the ranks of this process. For an allocator to
/// call in place of returning nothing; it allocates nothing itself. `say` is given the lines for
/// the user, first on this thread, where it must not allocate: an event would.
pub fn end_out_of_memory(bytes: usize, say: fn(&str)) -> ! {
    begin_to_end(say);
    tell(bytes, say);
    BYTES.store(bytes, Ordering::SeqCst);
    end_recorded()
}

/// Ends the process with exit code 1, because memory that is mapped from a file cannot be read: one
/// message, and the records of the ranks of this process. For a handler of SIGBUS to call; it
/// allocates nothing itself. `say` is as for [`end_out_of_memory`].
pub fn end_on_lost_file(say: fn(&str)) -> ! {
    begin_to_end(say);
    LOST.store(true, Ordering::SeqCst);
    say("error: a file that is being read was cut, or cannot be read any more (SIGBUS); data, \
         masks and weights must stay as they are while they are used: put it back, and start \
         again\n");
    end_recorded()
}

/// The first thread to come ends the process; others wait for that here.
fn begin_to_end(say: fn(&str)) {
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
}

/// Has the records written, and ends.
fn end_recorded() -> ! {
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
