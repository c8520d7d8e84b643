//! Initial values: a function of (seed, name, position), so that they do not depend on the layout
//! of a run.

pub use zeropp_data::rng::Rng;

use crate::params::{Init, ParamSpec};

/// Starting values of elements `start..start + out.len()` of a parameter, in row-major order: any
/// part of it can be drawn alone. Of some rows of a larger one they are what these begin with.
pub fn initialise(seed: u64, spec: &ParamSpec, start: usize, out: &mut [f32]) {
    let rng = Rng::keyed(seed, &spec.name);
    let start = (spec.first_element() + start) as u64;
    match &spec.init {
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
