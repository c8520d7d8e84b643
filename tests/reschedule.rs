//! Runs that exchange their program for another one between two steps.

mod common;

use common::captured::capture;
use common::{Run, assert_same_bits, run, tiny};
use zeropp::Config;
use zeropp::config::{Recompute, Reschedule};
use zeropp_core::meter::MemoryKind;
use zeropp_core::metrics::StepMetrics;

/// A number below `n` that follows from a job, and from which of its choices it is.
fn below(n: u64, job: u64, choice: u64) -> u64 {
    let mut z = (job * 64 + choice + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB) % n
}

/// A random job of so many steps.
fn job(number: u64, steps: u64) -> Config {
    let pick = |n: usize, choice: u64| below(n as u64, number, choice) as usize;
    let (kind, v, unit) = [
        ("zeropp", 2, Some(3)),
        ("zeropp", 2, Some(6)),
        ("zeropp", 1, Some(4)),
        ("zeropp-auto", 2, Some(3)),
        ("gpipe", 1, None),
        ("1f1b", 1, None),
        ("zb-h1", 1, None),
        ("zb-2p", 1, None),
        ("interleaved", 2, None),
        ("zb-v", 2, None),
        ("auto", 2, None),
    ][pick(11, 0)];
    let recompute = [Recompute::None, Recompute::Selective, Recompute::Full][pick(3, 1)];
    Config {
        schedule: kind.into(),
        virtual_stages: Some(v),
        unit,
        pp: [2, 2, 4][pick(3, 2)],
        zero3: [1, 1, 2][pick(3, 3)],
        dp: [1, 1, 2][pick(3, 4)],
        micro_batches: Some([4, 6, 8][pick(3, 5)]),
        layers: 8,
        zero1: pick(2, 6) == 1,
        prefetch: pick(3, 7),
        recompute,
        seed: number,
        steps,
        ..tiny()
    }
}

/// A run that exchanges programs at every chance, and how often it did.
fn exchanging(config: Config) -> (Run, usize) {
    let config = Config { reschedule: Reschedule::Auto, exchanges_always: true, ..config };
    let (run, captured) = capture(|| run(config));
    let changes = captured.iter().filter(|event| event.message().contains("order changed"));
    (run, changes.count())
}

#[test]
fn thirty_random_jobs_have_the_bits_that_they_have_without_exchanges() {
    let (mut exchanged, mut all) = (0, 0);
    for number in 0..30 {
        let config = job(number, 12);
        let (with, changes) = exchanging(config.clone());
        let what = format!("job {number}: {} pp {}", config.schedule, config.pp);
        println!("{what}: {changes} exchanges");
        assert_same_bits(&run(config), &with, &what);
        exchanged += usize::from(changes > 0);
        all += changes;
    }
    println!("{exchanged} of 30 jobs exchanged their program, {all} times in all");
    assert!(exchanged >= 12, "{exchanged} of 30");
}

#[test]
fn every_rank_stays_within_the_plan_when_programs_are_exchanged() {
    for number in [1, 4, 7, 11] {
        let config = job(number, 12);
        let planned = zeropp::Trainer::new(config.clone()).unwrap();
        let ranks = &planned.plan().ranks;
        let most = ranks.iter().map(|rank| rank.held.at_once.total()).max().unwrap();
        let peak = |kind| ranks.iter().map(|rank| rank.held.peaks.get(kind)).max().unwrap();
        let (run, changes) = exchanging(config);
        println!("job {number}: {changes} exchanges");
        for kind in MemoryKind::ALL {
            let within = |step: &StepMetrics| step.peak_bytes.get(kind) <= peak(kind);
            assert!(run.steps.iter().all(within), "job {number}: {kind:?}");
        }
        assert!(run.steps.iter().all(|step| step.at_once_bytes <= most), "job {number}");
    }
}
