//! Times of stages as those of the blocks in them, for a model that is cut into other stages.

use serde_json::Value;

use super::{CostsError, Table};

/// Blocks of each stage that the times of a file are of.
pub(super) const KEY: &str = "blocks";
/// Computes, in the order of a block's times: F, B, W, R.
const COMPUTES: [&str; 4] = ["t_f", "t_b", "t_w", "t_r"];
/// Collectives and copies of states, which take about as long as a stage is large.
const COLLECTIVES: [&str; 6] =
    ["t_gather", "t_reduce", "t_replica_reduce", "t_state_read", "t_state_add", "t_state_update"];
/// What each layer of a stage has of its times.
const LAYERS: &str = "layers";

/// F, B, W and R of one block with what belongs to it, as the embedding does to the first: in µs,
/// or as weights, of which proportions alone count.
pub type BlockTimes = [f64; 4];

impl Table {
    /// Blocks of each of the stages that the times are of; none where the file does not say.
    ///
    /// # Errors
    /// What is no list of numbers from 1, of which the last may be 0: the head alone.
    pub(super) fn blocks(&self) -> Result<Option<Vec<usize>>, CostsError> {
        let Some(value) = self.keys.get(KEY) else { return Ok(None) };
        let number = |n: &Value| n.as_u64().and_then(|n| n.try_into().ok());
        let blocks: Option<Vec<usize>> =
            value.as_array().and_then(|list| list.iter().map(number).collect());
        let counts = |blocks: &Vec<usize>| match &blocks[..] {
            [some @ .., _] if !some.is_empty() => !some.contains(&0),
            all => !all.contains(&0),
        };
        match blocks.filter(counts) {
            Some(blocks) => Ok(Some(blocks)),
            None => {
                let works = "the blocks of each stage that the times are of, 1 or more";
                Err(CostsError::found(KEY, value, works))
            }
        }
    }

    /// Notes what `blocks` each stage has that the times are of.
    pub(super) fn set_blocks(&mut self, blocks: &[usize]) {
        self.set(KEY, blocks.into());
    }

    /// What every block takes, as far as stages tell: the blocks of one share its time as
    /// `weights` do. What the first and the last stage take beyond blocks like those between them
    /// is the embedding's and the head's. None where the file does not say what its stages had.
    ///
    /// # Errors
    /// Blocks that are not those of a model with as many as `weights`; lists that have not one
    /// entry a stage.
    pub fn of_blocks(&self, weights: &[BlockTimes]) -> Result<Option<Vec<BlockTimes>>, CostsError> {
        let Some(blocks) = self.blocks_of(weights.len())? else { return Ok(None) };
        let (stages, blocks) = (blocks.len(), without_empty(blocks));
        let mut times = vec![BlockTimes::default(); weights.len()];
        for (i, key) in COMPUTES.iter().enumerate() {
            let key = if *key == "t_r" && !self.has(key) { "t_f" } else { *key };
            let weights: Vec<f64> = weights.iter().map(|w| w[i]).collect();
            let of_stages = merged(self.list(key, stages)?, blocks.len());
            let spread = spread(&of_stages, &blocks, &weights);
            times.iter_mut().zip(spread).for_each(|(block, time)| block[i] = time);
        }
        Ok(Some(times))
    }

    /// The table for stages of so many `blocks` each. Where it does not say what its own stages
    /// had, or they had as many, its times stand as they are.
    ///
    /// # Errors
    /// As [`of_blocks`](Self::of_blocks).
    pub fn for_blocks(
        &self,
        blocks: &[usize],
        weights: &[BlockTimes],
    ) -> Result<Table, CostsError> {
        let own = self.blocks_of(weights.len())?;
        let (Some(own), Some(times)) = (own.filter(|own| own != blocks), self.of_blocks(weights)?)
        else {
            return Ok(self.clone());
        };
        let mut recut = self.clone();
        recut.keys.remove(KEY);
        recut.keys.remove(LAYERS);
        // Bytes of other stages; a run knows those of its own.
        recut.keys.retain(|key, value| !(key.starts_with("mem_") && value.is_array()));
        let sums = |of_block: &dyn Fn(usize) -> f64| -> Value {
            let mut at = 0;
            let sum = |n: &usize| {
                at += n;
                (at - n..at).map(of_block).sum::<f64>()
            };
            let mut stages: Vec<f64> = blocks.iter().map(sum).collect();
            if let ([.., before, last], Some(0)) = (&mut stages[..], blocks.last()) {
                let head = head(&(0..weights.len()).map(of_block).collect::<Vec<f64>>());
                *before -= head;
                *last += head;
            }
            stages.into()
        };
        for (i, key) in COMPUTES.iter().enumerate() {
            recut.set(key, sums(&|block| times[block][i]));
        }
        for key in COLLECTIVES.iter().filter(|key| self.has(key)) {
            let bare = without_empty(own.clone());
            let of_stages = merged(self.list(key, own.len())?, bare.len());
            let even = spread(&of_stages, &bare, &vec![1.0; weights.len()]);
            recut.set(key, sums(&|block| even[block]));
        }
        Ok(recut)
    }

    /// The blocks of the stages, of a model with so many.
    fn blocks_of(&self, layers: usize) -> Result<Option<Vec<usize>>, CostsError> {
        let blocks = self.blocks()?;
        let sum = |of: &Vec<usize>| of.iter().fold(0usize, |sum, n| sum.saturating_add(*n));
        match blocks.as_ref().map(sum).filter(|sum| *sum != layers) {
            None => Ok(blocks),
            Some(sum) => Err(CostsError(format!(
                "{KEY}: {sum} in all, and the model has layers = {layers}; leave {KEY} out \
                 where the times are another model's"
            ))),
        }
    }

    /// A key's value for each of so many stages.
    fn list(&self, key: &str, stages: usize) -> Result<Vec<f64>, CostsError> {
        let value = self.keys.get(key).cloned().unwrap_or_default();
        let time = |value: &Value| value.as_f64().filter(|t| t.is_finite() && *t >= 0.0);
        let list = match &value {
            Value::Array(list) => list.iter().map(time).collect(),
            one => time(one).map(|one| vec![one; stages]),
        };
        list.filter(|list: &Vec<f64>| list.len() == stages).ok_or_else(|| {
            let works = format!(
                "one time for each of the {stages} stages that {KEY} lists, or one for all"
            );
            CostsError::found(key, &value, &works)
        })
    }
}

/// The same without a last stage that has no block.
fn without_empty(mut blocks: Vec<usize>) -> Vec<usize> {
    while blocks.last() == Some(&0) {
        blocks.pop();
    }
    blocks
}

/// Times of so many stages: what there is beyond is the last one's.
fn merged(mut times: Vec<f64>, stages: usize) -> Vec<f64> {
    let beyond: f64 = times.drain(stages..).sum();
    times.iter_mut().next_back().into_iter().for_each(|last| *last += beyond);
    times
}

/// What the head takes of the last block's time: what that is beyond the mean of the blocks between
/// the first and it.
pub fn head(of_blocks: &[f64]) -> f64 {
    let [_, between @ .., last] = of_blocks else { return 0.0 };
    let mean = between.iter().sum::<f64>() / between.len() as f64;
    if mean.is_finite() { (last - mean).max(0.0) } else { 0.0 }
}

/// The time of every block, where stages of `blocks` blocks take `times`.
fn spread(times: &[f64], blocks: &[usize], weights: &[f64]) -> Vec<f64> {
    let mut at = 0;
    let stages: Vec<(f64, &[f64])> = times
        .iter()
        .zip(blocks)
        .map(|(time, n)| {
            at += n;
            (*time, &weights[at - n..at])
        })
        .collect();
    let last = stages.len() - 1;
    // What a unit of weight takes where there is nothing but blocks.
    let between = stages.get(1..last).unwrap_or_default();
    let weight: f64 = between.iter().flat_map(|(_, weights)| *weights).sum();
    let rate = between.iter().map(|(time, _)| time).sum::<f64>() / weight;
    let mut all = Vec::with_capacity(weights.len());
    for (stage, (time, weights)) in stages.into_iter().enumerate() {
        let n = weights.len();
        let sum: f64 = weights.iter().sum();
        let share = |w: &f64| if sum > 0.0 { time * w / sum } else { time / n as f64 };
        let end = match stage {
            0 if last > 0 => Some(0),
            s if s == last => Some(n - 1),
            _ => None,
        };
        let beside = |end: usize| rate * (sum - weights[end]);
        match end.filter(|end| rate.is_finite() && beside(*end) < time) {
            None => all.extend(weights.iter().map(share)),
            Some(end) => {
                let block =
                    |(i, w): (usize, &f64)| if i == end { time - beside(end) } else { rate * w };
                all.extend(weights.iter().enumerate().map(block));
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::super::{ALONE, tests};
    use super::*;

    const EVEN: BlockTimes = [1.0, 1.0, 1.0, 1.0];

    fn table(text: &str) -> Table {
        tests::table(text).unwrap()
    }

    /// Stages of 2, 4, 3 and 1 blocks: 10 each for F, 5 for the embedding and 30 for the head.
    const UNEVEN: &str = "blocks = [2, 4, 3, 1]\nt_f = [25, 40, 30, 40]\nt_b = [20, 40, 30, 10]\n\
                          t_w = 0\nt_gather = [2, 4, 3, 1]\nmem_f = [1, 1, 1, 1]\n\
                          mem_b = [-1, -1, -1, -1]\nmem_w = [0, 0, 0, 0]\n";

    #[test]
    fn first_and_last_stage_extras_are_embedding_and_head() {
        let times = table(UNEVEN).of_blocks(&[EVEN; 10]).unwrap().unwrap();
        let f: Vec<f64> = times.iter().map(|t| t[0]).collect();
        assert_eq!(f, [15.0, 10.0, 10.0, 10.0, 10.0, 10.0, 10.0, 10.0, 10.0, 40.0]);
        assert!(times.iter().all(|t| (t[1], t[2], t[3]) == (10.0, 0.0, t[0])), "{times:?}");
        // Without stages between, or where they are slower than the ends, by weight.
        let two = table("blocks = [2, 2]\nt_f = [30, 60]\nt_b = 1\nt_w = 1");
        let weights = [[2.0, 0.0, 1.0, 1.0], EVEN, EVEN, [3.0, 1.0, 1.0, 1.0]];
        let f: Vec<f64> = two.of_blocks(&weights).unwrap().unwrap().iter().map(|t| t[0]).collect();
        assert_eq!(f, [20.0, 10.0, 15.0, 45.0]);
        assert_eq!(spread(&[10.0, 90.0, 10.0], &[2, 1, 2], &[1.0; 5]), [5.0, 5.0, 90.0, 5.0, 5.0]);
        assert_eq!(spread(&[8.0], &[2], &[0.0; 2]), [4.0, 4.0]);
    }

    #[test]
    fn other_stages_take_what_their_blocks_do() {
        let table = table(UNEVEN);
        let recut = table.for_blocks(&[4, 6], &[EVEN; 10]).unwrap();
        let costs = recut.of(2, ALONE, None).unwrap();
        let us: Vec<_> = costs.stages.iter().map(|s| [s.f_ns, s.b_ns, s.all_gather_ns]).collect();
        assert_eq!(us, [[45_000, 40_000, 4_000], [90_000, 60_000, 6_000]]);
        assert_eq!(costs.memory[0].activation, 0, "those bytes were other stages'");
        // The same stages, and stages that are not known: as they stand.
        assert_eq!(table.for_blocks(&[2, 4, 3, 1], &[EVEN; 10]).unwrap(), table);
        assert_eq!(table.of(4, ALONE, None).unwrap().stages[3].f_ns, 40_000);
        let plain = self::table("t_f = 1\nt_b = 1\nt_w = 1");
        assert_eq!(plain.for_blocks(&[5, 5], &[EVEN; 10]).unwrap(), plain);
        assert_eq!(plain.of_blocks(&[EVEN; 10]).unwrap(), None);
    }

    /// A head alone in the last stage is priced, and what it took is read back.
    #[test]
    fn a_last_stage_without_a_block_takes_what_the_head_does() {
        let table = table(UNEVEN);
        let recut = table.for_blocks(&[4, 6, 0], &[EVEN; 10]).unwrap();
        let costs = recut.of(3, ALONE, None).unwrap();
        let f: Vec<_> = costs.stages.iter().map(|s| s.f_ns).collect();
        assert_eq!(f, [45_000, 60_000, 30_000]);
        let own = self::table("blocks = [4, 6, 0]\nt_f = [45, 60, 30]\nt_b = 1\nt_w = 0");
        let times = own.of_blocks(&[EVEN; 10]).unwrap().unwrap();
        assert_eq!(times.iter().map(|t| t[0]).sum::<f64>(), 135.0);
        assert_eq!(own.for_blocks(&[4, 6, 0], &[EVEN; 10]).unwrap(), own);
    }

    #[test]
    fn blocks_that_are_not_the_model_s_are_named() {
        let fails = |text: &str| {
            let table = table(&format!("t_b = 1\nt_w = 1\n{text}"));
            table.of_blocks(&[EVEN; 3]).unwrap_err().to_string()
        };
        assert_eq!(
            fails("t_f = 1\nblocks = [2, 2]"),
            "blocks: 4 in all, and the model has layers = 3; leave blocks out where the times are \
             another model's"
        );
        assert!(
            fails("t_f = 1\nblocks = [0, 3]").starts_with("blocks: found [0,3]; the blocks of")
        );
        assert!(fails("t_f = 1\nblocks = 3").starts_with("blocks: found 3; the blocks of each"));
        assert!(
            fails("t_f = [1, 1, 1]\nblocks = [2, 1]")
                .starts_with("t_f: found [1,1,1]; one time for")
        );
        assert!(fails("t_f = -1\nblocks = [2, 1]").starts_with("t_f: found -1; one time for"));
    }
}
