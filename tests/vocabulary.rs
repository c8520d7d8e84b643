//! Vocabularies of any size: the loss a chunk of tokens at a time, its gradients made in F, rows
//! that are no token ids, files of 32-bit ids.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{assert_same_bits, run, tiny};
use zeropp::config::{Precision, Recompute, Tokenizer};
use zeropp::split::ops;
use zeropp::{Config, Trainer};

/// Remembers the largest allocation.
struct Watched;

static LARGEST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: all is handed on to the system's allocator.
unsafe impl GlobalAlloc for Watched {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promises.
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promises.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises.
        unsafe { System.dealloc(at, layout) }
    }
    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        LARGEST.fetch_max(size, Ordering::Relaxed);
        // SAFETY: the caller's promises.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Watched = Watched;

/// A micro-batch of two chunks, the second one shorter.
fn two_chunks() -> Config {
    let (seq, vocab) = (300, 60_000);
    assert!(ops::head_chunk(seq, [vocab, tiny().hidden], 4, true) < seq);
    let (micro_batches, unit) = (Some(4), Some(4));
    Config { layers: 4, seq, vocab: Some(vocab), micro_batches, unit, steps: 2, ..tiny() }
}

/// A file of 32-bit ids below `vocabulary`, the largest among them.
fn ids(dir: &tempfile::TempDir, n: usize, vocabulary: u32) -> PathBuf {
    let path = dir.path().join("ids.bin");
    let id = |i: usize| match i {
        0 => vocabulary - 1,
        _ => (i as u32).wrapping_mul(2_654_435_761) % vocabulary,
    };
    let raw: Vec<u8> = (0..n).flat_map(|i| id(i).to_le_bytes()).collect();
    std::fs::write(&path, raw).expect("temporary file");
    path
}

/// The head's weight gradient is summed in F, which comes in micro-batch order in every schedule.
#[test]
fn chunks_change_no_bit_over_layouts_and_schedules() {
    let alone = run(two_chunks());
    let full = Recompute::Full;
    let with = |pp, v, schedule: &str| Config {
        pp,
        virtual_stages: Some(v),
        schedule: schedule.into(),
        ..two_chunks()
    };
    for config in [
        with(2, 2, "zeropp"),
        with(4, 1, "zeropp"),
        with(2, 1, "gpipe"),
        with(2, 1, "zb-h1"),
        with(2, 2, "zb-v"),
        with(2, 2, "interleaved"),
        // The last stage is computed again: gradients are made in R.
        Config { recompute: full, ..with(2, 1, "1f1b") },
    ] {
        let config = Config { unit: config.unit.filter(|_| config.schedule == "zeropp"), ..config };
        let what = format!("{} {} {:?}", config.schedule, config.pp, config.virtual_stages);
        let run = run(config);
        assert_same_bits(&alone, &run, &what);
        assert_eq!(run.summary.peak_bytes, run.summary.predicted_bytes, "{what}");
    }
    let bf16 = |config: Config| run(Config { precision: Precision::Bf16, ..config });
    assert_same_bits(&bf16(two_chunks()), &bf16(with(2, 2, "zeropp")), "bf16");
}

/// Each unit has a sum of its own, also where the forward of the second one comes before the
/// reduction of the first.
#[test]
fn units_are_summed_apart() {
    let dir = tempfile::tempdir().unwrap();
    let ahead = dir.path().join("ahead.csv");
    let order = "#units,2,2\n0F0,0F1,0F2,0I0,0W0,0I1,0W1,0F3,0I2,0W2,0I3,0W3\n";
    std::fs::write(&ahead, order).unwrap();
    let in_units = |pp, v| {
        let unit = Some(2);
        run(Config { pp, virtual_stages: Some(v), unit, ..two_chunks() })
    };
    let alone = in_units(1, 1);
    for zero3 in [1, 2] {
        let schedule = ahead.display().to_string();
        let free = Config { unit: None, micro_batches: None, virtual_stages: None, ..two_chunks() };
        let run = run(Config { schedule, zero3, ..free });
        assert_eq!(run.summary.peak_bytes, run.summary.predicted_bytes, "zero3 {zero3}");
        if zero3 == 1 {
            assert_same_bits(&alone, &run, "ahead of the reduction");
        }
    }
    for (pp, v) in [(1, 2), (2, 1), (2, 2), (4, 1)] {
        let run = in_units(pp, v);
        assert_same_bits(&alone, &run, &format!("{pp} x {v}"));
        assert_eq!(run.summary.peak_bytes, run.summary.predicted_bytes, "{pp} x {v}");
    }
}

/// Rows that are no token ids change neither loss nor gradient norm, to the bit.
#[test]
fn padding_the_vocabulary_changes_nothing() {
    let with = |multiple, tied| {
        let config = Config { vocab: Some(300), vocab_multiple: multiple, tied, ..two_chunks() };
        run(config).steps.into_iter().map(|s| (s.loss.to_bits(), s.grad_norm.to_bits()))
    };
    for tied in [false, true] {
        assert!(with(1, tied).eq(with(128, tied)), "tied {tied}");
    }
    let rows = |multiple| {
        let config = Config { vocab: Some(300), vocab_multiple: multiple, ..two_chunks() };
        Trainer::new(config).unwrap().plan().parameters
    };
    assert_eq!(rows(128) - rows(1), 2 * (384 - 300) * 16);
}

/// No buffer of tokens × vocabulary, nor half of one, is ever allocated.
#[test]
fn logits_of_a_micro_batch_never_exist_whole() {
    let dir = tempfile::tempdir().unwrap();
    let (tokens, vocabulary) = (4096, 20_000);
    let config = Config {
        layers: 1,
        hidden: 8,
        heads: 1,
        seq: 512,
        micro_batch_size: tokens / 512,
        micro_batches: Some(2),
        unit: Some(2),
        steps: 2,
        data: Some(ids(&dir, 100_000, vocabulary)),
        tokenizer: Tokenizer::U32,
        ..tiny()
    };
    let before = LARGEST.swap(0, Ordering::Relaxed);
    let summary = run(config).summary;
    let largest = LARGEST.fetch_max(before, Ordering::Relaxed);
    let logits = tokens * vocabulary as usize * 4;
    assert!(largest < logits / 4, "{largest} of {logits}");
    assert_eq!(summary.peak_bytes, summary.predicted_bytes);
    assert!(summary.peak_bytes.activation < logits as u64 / 4, "{:?}", summary.peak_bytes);
}

/// 128k ids and samples of 8k tokens: less than a gibibyte on the last rank, where each of the
/// micro-batches in flight had two.
#[test]
fn a_large_vocabulary_takes_little_memory() {
    let last = |vocab| {
        let config = Config {
            pp: 8,
            virtual_stages: Some(2),
            unit: Some(15),
            micro_batches: Some(30),
            layers: 16,
            hidden: 4096,
            heads: 32,
            seq: 8192,
            precision: Precision::Bf16,
            vocab: Some(vocab),
            head_split: Some("off".into()),
            slices: 1.into(),
            ..Config::default()
        };
        let plan = Trainer::new(config).unwrap().plan().clone();
        let memory = plan.ranks[7].held.peaks;
        memory.activation + memory.weight_stash
    };
    let loss = last(131_072) - last(256);
    assert!(loss < 1 << 30, "{loss} bytes");
}

#[test]
fn an_unknown_id_ends_the_run_with_its_place() {
    let dir = tempfile::tempdir().unwrap();
    let path = ids(&dir, 1000, 70_000);
    let data = Config {
        data: Some(path.clone()),
        tokenizer: Tokenizer::U32,
        steps: 2,
        order: zeropp::config::Order::Sequential,
        ..tiny()
    };
    assert!(run(data.clone()).steps[0].loss.is_finite());
    let trainer = Trainer::new(Config { vocab: Some(69_999), ..data.clone() }).unwrap();
    let error = trainer.train(|_| {}).unwrap_err();
    // Before, it counted as a rank's failure.
    assert!(matches!(error, zeropp::Error::Data(_)) && error.is_bad_input(), "{error:?}");
    let place = format!(
        "data = {}: token id 69999 at byte 0 is not \
         below vocab = 69999; use a larger vocab",
        path.display()
    );
    assert!(error.to_string().starts_with(&place), "{error}");
    // The target that the last rank looks for is the same file's.
    let late = dir.path().join("late.bin");
    let ids = (0..1000u32).flat_map(|i| (if i == 8 { 400 } else { i % 300 }).to_le_bytes());
    std::fs::write(&late, ids.collect::<Vec<u8>>()).unwrap();
    let late = Config { data: Some(late), vocab: Some(300), seq: 8, pp: 2, ..data.clone() };
    let error = Trainer::new(late).unwrap().train(|_| {}).unwrap_err().to_string();
    assert!(error.contains("token id 400 at byte 32 is not below vocab = 300"), "{error}");
    assert!(!error.contains("panicked"), "{error}");
    // Wrong in another way: reported before the start, and by whom it would be read.
    let notes = |tokenizer| {
        let config = Config { tokenizer, ..data.clone() };
        Trainer::new(config).unwrap().plan().notes.join("\n")
    };
    assert!(notes(Tokenizer::Bytes).contains("use tokenizer = u32"), "{}", notes(Tokenizer::Bytes));
    let beside = "it has no .idx, and it has no .mask: every token is scored";
    assert_eq!(notes(Tokenizer::U32), format!("data = {}: {beside}", path.display()));
}
