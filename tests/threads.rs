//! The threads of a rank change no bit of its loss, gradient norm or weights.

mod common;

use common::{assert_same_bits, run, text_file};
use zeropp::Config;
use zeropp::config::Precision;

/// Large enough for its products, norms, attention, loss and optimizer to be shared.
fn wide(folder: &tempfile::TempDir) -> Config {
    Config {
        data: Some(text_file(folder, 20_000)),
        layers: 2,
        hidden: 192,
        heads: 3,
        seq: 130,
        micro_batch_size: 2,
        unit: Some(2),
        micro_batches: Some(4),
        virtual_stages: Some(1),
        tied: true,
        warmup: Some(1),
        steps: 3,
        seed: 5,
        ..Config::default()
    }
}

#[test]
fn threads_change_nothing() {
    let folder = tempfile::tempdir().unwrap();
    for precision in [Precision::Fp32, Precision::Bf16] {
        let base = Config { precision, threads: Some(1), ..wide(&folder) };
        let reference = run(base.clone());
        for threads in [2, 3, 5] {
            let config = Config { threads: Some(threads), ..base.clone() };
            assert_same_bits(&reference, &run(config), &format!("{precision}, {threads} threads"));
        }
        let config = Config { threads: Some(2), pp: 2, ..base };
        assert_same_bits(&reference, &run(config), &format!("{precision}, pp 2, 2 threads each"));
    }
}

/// Samples of 512 tokens take the other attention, and a wide vocabulary several threads a row.
#[test]
fn long_samples_and_wide_vocabularies_do_not_either() {
    let folder = tempfile::tempdir().unwrap();
    let base = Config {
        seq: 520,
        vocab: Some(3000),
        micro_batch_size: 1,
        steps: 2,
        threads: Some(1),
        ..wide(&folder)
    };
    let reference = run(base.clone());
    for threads in [2, 5] {
        let config = Config { threads: Some(threads), ..base.clone() };
        assert_same_bits(&reference, &run(config), &format!("{threads} threads"));
    }
}

/// Nor do they in what is dropped: of elements, of short samples' probabilities and of long ones'.
#[test]
fn dropout_does_not_either() {
    let folder = tempfile::tempdir().unwrap();
    let wide = Config { dropout: 0.1, threads: Some(1), steps: 2, ..wide(&folder) };
    let long = Config { seq: 520, micro_batch_size: 1, ..wide.clone() };
    let bf16 = Config { precision: Precision::Bf16, ..wide.clone() };
    for base in [wide, long, bf16] {
        let reference = run(base.clone());
        for threads in [2, 5] {
            let config = Config { threads: Some(threads), ..base.clone() };
            let what = format!("{}, seq {}, {threads} threads", base.precision, base.seq);
            assert_same_bits(&reference, &run(config), &what);
        }
    }
}
