//! A schedule of one's own: written as data, verified, simulated, drawn, and trained with. Here it
//! is 1F1B with the backward in two halves, where rank r puts its weight gradients off by r
//! micro-batches, into the time in which 1F1B waits.
//!
//! `cargo run --release --example own_schedule`

use zeropp::pipeline::ascii;
use zeropp::pipeline::ir::{Action, Compute, Schedule};
use zeropp::pipeline::lower::lower;
use zeropp::pipeline::schedules::{Shape, generate};
use zeropp::pipeline::simulate::{Costs, simulate};
use zeropp::pipeline::timeline::Timeline;
use zeropp::pipeline::verify::{VerifyLimits, verify};
use zeropp::{Config, Trainer};

/// What one rank computes in a step, in order.
fn order(rank: usize, pp: usize, micro_batches: usize) -> Vec<Action> {
    let compute = |kind, micro_batch| Action::compute(kind, rank, micro_batch);
    let warmup = (pp - rank).min(micro_batches);
    let mut order: Vec<Action> = (0..warmup).map(|m| compute(Compute::F, m)).collect();
    for m in 0..micro_batches {
        order.push(compute(Compute::B, m));
        if warmup + m < micro_batches {
            order.push(compute(Compute::F, warmup + m));
        }
        if m >= rank {
            order.push(compute(Compute::W, m - rank));
        }
    }
    let left = micro_batches.saturating_sub(rank)..micro_batches;
    order.extend(left.map(|m| compute(Compute::W, m)));
    order
}

/// The schedule of all ranks, with one stage each. Gradients are reduced once a step, which so is
/// one unit.
fn own(pp: usize, micro_batches: usize) -> Schedule {
    Schedule {
        kind: "late weights".into(),
        placement: (0..pp).collect(),
        units: vec![micro_batches],
        ranks: (0..pp).map(|rank| order(rank, pp, micro_batches)).collect(),
        ..Schedule::default()
    }
}

/// When everything would happen if F, B and W took one unit of time each.
fn simulated(schedule: &Schedule) -> Result<Timeline, Box<dyn std::error::Error>> {
    // With gathers, reductions and messages in it, it can be proven that the ranks get through.
    let program = lower(schedule, &Default::default());
    verify(&program, &VerifyLimits::default())?;
    Ok(simulate(&program, &Costs::uniform(schedule.stages(), 1, 1, 1, 0))?)
}

/// The losses of a few steps of 4 ranks, with a schedule of one's own or one of the settings.
fn losses(schedule: &str, own: Option<Schedule>) -> Result<Vec<f64>, zeropp::Error> {
    let config = Config {
        pp: 4,
        schedule: schedule.into(),
        micro_batches: Some(8),
        layers: 4,
        hidden: 32,
        seq: 16,
        steps: 3,
        ..Config::default()
    };
    let builder = Trainer::builder(config);
    let builder = match own {
        Some(own) => builder.schedule(own),
        None => builder,
    };
    let mut losses = Vec::new();
    builder.build()?.train(|step| losses.push(step.loss))?;
    Ok(losses)
}

pub(crate) fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (pp, micro_batches) = (4, 8);
    let schedule = own(pp, micro_batches);
    let timeline = simulated(&schedule)?;
    println!("{}", ascii::chart(&timeline, 100));

    let shape = Shape { pp, virtual_stages: 1, micro_batches, unit: micro_batches };
    let usual = simulated(&generate("1f1b", &shape)?)?;
    let percent = |timeline: &Timeline| 100.0 * timeline.bubble();
    println!("bubble {:.1} %, 1f1b {:.1} %", percent(&timeline), percent(&usual));
    assert!(timeline.bubble() < usual.bubble());

    // `zeropp run --schedule FILE` takes one from a file, as `pipeline::exchange` writes it.
    let own = losses("1f1b", Some(schedule))?;
    println!("losses {own:?}");
    assert_eq!(own, losses("1f1b", None)?, "no bit depends on the schedule");
    Ok(())
}
