use super::problem::Problem;
use super::*;
use crate::ir::{looping, vee};
use crate::schedules::{Costs, Shape};

fn env(name: &str, or: f64) -> f64 {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(or)
}

#[test]
#[ignore]
fn one() {
    let (pp, v, b) = (env("P", 8.) as usize, env("V", 4.) as usize, env("B", 24.) as usize);
    let shape = Shape { pp, virtual_stages: v, micro_batches: b, unit: b };
    let scale = 100.0;
    let t = |n, or| (env(n, or) * scale + 0.5) as u64;
    let costs = Costs::uniform(pp * v, t("F", 9.25), t("BW", 9.), t("W", 4.65), t("C", 0.6))
        .with_limit(env("MEM", 96.) as i64);
    let budgets = Budgets {
        gathered: Some(env("G", 2.) as u64),
        gathers: Some(env("GATHERS", 10000.) as usize),
        ..Budgets::default()
    };
    let placement = if env("LOOP", 0.) > 0. { looping(pp, v) } else { vee(pp, v) };
    let p = Problem::new(&shape, &costs, &budgets, placement, Objective::OwnSpan);
    let start = std::time::Instant::now();
    let best = search::run(&p, env("SEED", 1.) as u64, (env("LETTERS", 300.) * 1e6) as u64);
    let took = start.elapsed();
    match best {
        None => println!("none {took:?}"),
        Some(best) => println!(
            "M{} G{}/{} {} bubble {:.2}% from {} in {took:?}",
            env("MEM", 96.), env("G", 2.), env("GATHERS", 10000.), if env("LOOP", 0.) > 0. { "loop" } else { "wave" },
            100.0 * (1.0 - p.work[0] as f64 / best.value as f64),
            best.from
        ),
    }
}
