//! Initial values: a function of (seed, name, position), so that they do not depend on the layout
//! of a run.

pub use zeropp_data::rng::Rng;

use crate::kernels::threads;
use crate::params::{Init, ParamSpec};

/// Elements that are worth a thread.
const PIECE_MIN: usize = 1 << 14;

/// Starting values of elements `start..start + out.len()` of a parameter, in row-major order: any
/// part of it can be drawn alone. Of some rows of a larger one they are what these begin with.
pub fn initialise(seed: u64, spec: &ParamSpec, start: usize, out: &mut [f32]) {
    let rng = Rng::keyed(seed, &spec.name);
    let start = spec.first_element() + start;
    let piece = threads::piece(out.len(), 4, PIECE_MIN);
    threads::each(out.chunks_mut(piece).enumerate(), |(i, out)| {
        fill(&spec.init, &rng, (start + i * piece) as u64, out);
    });
}

fn fill(init: &Init, rng: &Rng, start: u64, out: &mut [f32]) {
    match init {
        Init::Zeros => out.fill(0.0),
        Init::Ones => out.fill(1.0),
        Init::Normal(deviation) => {
            rng.fill_normal(start, out);
            out.iter_mut().for_each(|x| *x *= *deviation);
        }
        Init::Uniform(bound) => {
            rng.fill_uniform(start, out);
            out.iter_mut().for_each(|x| *x = *bound * (2.0 * *x - 1.0));
        }
        Init::Values(all) => out.copy_from_slice(&all[start as usize..][..out.len()]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_number_of_threads_draws_the_same() {
        let specs = [Init::Normal(0.02), Init::Uniform(0.1)];
        for spec in specs.map(|init| ParamSpec::new("w", &[500, 301], init)) {
            let draw = |threads: usize| {
                let threads = threads::Threads::new(threads, false);
                let _in_use = threads.install();
                let mut out = vec![f32::NAN; 500 * 301 - 3];
                initialise(7, &spec, 3, &mut out);
                out
            };
            assert_eq!(draw(3), draw(1), "{spec:?}");
        }
    }

    #[test]
    fn starting_values_are_those_of_the_specification() {
        let fill = |init| {
            let mut out = vec![f32::NAN; 10_000];
            initialise(3, &ParamSpec::new("w", &[100, 100], init), 0, &mut out);
            out
        };
        assert!(fill(Init::Zeros).iter().all(|x| *x == 0.0));
        assert!(fill(Init::Ones).iter().all(|x| *x == 1.0));
        let normal = fill(Init::Normal(0.02));
        let deviation =
            (normal.iter().map(|x| f64::from(x * x)).sum::<f64>() / normal.len() as f64).sqrt();
        assert!((deviation - 0.02).abs() < 0.001, "{deviation}");
        let uniform = fill(Init::Uniform(0.5));
        assert!(uniform.iter().all(|x| x.abs() <= 0.5));
        let (low, high) = (-0.49, 0.49);
        assert!(uniform.iter().any(|x| *x < low) && uniform.iter().any(|x| *x > high));
    }
}
