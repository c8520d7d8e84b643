//! The same model for every kind of schedule: costs of a layer, from which those of stages follow.

use serde_json::Value;

use super::{CostsError, PER_STAGE, Table};

/// Keys of a stage whose values its layers do not change: its input and its message.
const NOT_PER_LAYER: [&str; 2] = ["mem_input", "mem_message"];

/// The layers of each stage, as even as they go: the first ones have one more where they must.
///
/// # Errors
/// Fewer layers than stages.
pub fn layers_of(layers: usize, stages: usize) -> Result<Vec<usize>, CostsError> {
    if stages == 0 || layers < stages {
        return Err(CostsError(format!(
            "layers = {layers}: {stages} stages have a layer each at least; use {stages} or more, \
             or fewer stages"
        )));
    }
    let more = layers % stages;
    Ok((0..stages).map(|s| layers / stages + usize::from(s < more)).collect())
}

impl Table {
    /// The costs of stages with so many layers each, where these are the costs of one layer: one
    /// number each.
    ///
    /// # Errors
    /// A list where a layer has one number.
    pub fn of_layers(&self, layers: &[usize]) -> Result<Table, CostsError> {
        let mut table = self.clone();
        for key in PER_STAGE.into_iter().filter(|key| !NOT_PER_LAYER.contains(key)) {
            let Some(value) = self.keys.get(key) else { continue };
            let Some(one) = value.as_f64() else {
                let works = "a layer has one number for all stages";
                return Err(CostsError::found(key, value, works));
            };
            let whole = (one.fract() == 0.0).then_some(one as i64);
            let of_stage = |n: &usize| match whole.and_then(|one| one.checked_mul(*n as i64)) {
                Some(whole) => Value::from(whole),
                None => Value::from(one * *n as f64),
            };
            table.set(key, layers.iter().map(of_stage).collect());
        }
        Ok(table)
    }
}

#[cfg(test)]
mod tests {
    use super::super::ALONE;
    use super::super::tests::table;
    use super::*;

    #[test]
    fn stages_cost_what_their_layers_do_and_the_whole_is_the_same_for_all() {
        let text = "t_f = 2.5\nt_b = 3\nt_w = 1\nt_comm = 7\n\
                    mem_f = 4\nmem_b = -2\nmem_w = -2\nmem_input = 1";
        let table = table(text).unwrap();
        for stages in [1, 3, 7, 12] {
            let cut = layers_of(12, stages).unwrap();
            let costs = table.of_layers(&cut).unwrap().of(stages, ALONE, None).unwrap();
            let sum = |of: &dyn Fn(usize) -> u64| (0..stages).map(of).sum::<u64>();
            assert_eq!(sum(&|s| costs.stages[s].f_ns), 30_000);
            assert_eq!(sum(&|s| costs.stages[s].b_ns), 36_000);
            assert_eq!(sum(&|s| costs.memory[s].activation), 48);
            assert!(costs.memory.iter().all(|m| m.input == 1));
            assert_eq!(costs.link.latency_ns, 7000);
        }
        assert_eq!(layers_of(7, 3).unwrap(), [3, 2, 2]);
        let said = layers_of(3, 4).unwrap_err().to_string();
        assert!(said.starts_with("layers = 3: 4 stages"), "{said}");
        let lists = super::super::tests::table("t_f = [1, 2]\nt_b = 1\nt_w = 1").unwrap();
        assert!(lists.of_layers(&[1, 1]).is_err());
    }
}
