//! Emulated runs that exchange their program for a better one.

use std::fs;

use zeropp_pipeline::costs::Table;
use zeropp_pipeline::ir::Action;
use zeropp_pipeline::simulate::Costs;
use zeropp_pipeline::timeline::Span;

use super::emulate;
use crate::config::{Config, Reschedule};

#[test]
fn an_emulated_run_executes_the_programs_that_it_exchanges() {
    let dir = tempfile::tempdir().expect("a folder");
    let assumed = dir.path().join("equal.toml");
    fs::write(&assumed, "t_f = 100\nt_b = 100\nt_w = 100").expect("a file");
    let config = Config {
        pp: 4,
        schedule: "gpipe".into(),
        micro_batches: Some(8),
        steps: 14,
        warmup: Some(0),
        emulate: Some("other costs".into()),
        costs: Some(assumed),
        reschedule: Reschedule::Auto,
        exchanges_always: true,
        ..Config::default()
    };
    let costs = Table::from(&Costs::uniform(4, 70_000, 90_000, 40_000, 0));
    let report = emulate(&config, &costs, |_| {}).expect("it runs");
    assert!(report.steps.iter().any(|step| step.program > 0), "no program was exchanged");
    assert!(report.exchanging_ns > 0);
    for (rank, ran) in report.measured.ranks.iter().enumerate() {
        let simulated = &report.simulated.ranks[rank].spans;
        let of = |spans: &[Span]| spans.iter().map(|span| span.action).collect::<Vec<Action>>();
        assert_eq!(of(&ran.spans), of(simulated), "rank {rank}");
    }
}
