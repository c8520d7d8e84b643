//! Cuts a model's list of parts into stages.
//!
//! A stage begins at a block. What is no block stays with the block before it, the embedding and
//! what follows it with the first one: so the first stage has the embedding, and the last one the
//! final norm and the head, beside their blocks, and both count for what they cost.
//!
//! The best cut is found by searching for the smallest time that no stage exceeds. Whether a time
//! will do is seen by filling one stage after another, which takes O(S log n); so a cut of n
//! blocks into S stages takes O(n + S log n log T), with times of T units in all.

use std::ops::Range;

/// Units of the longest group: times are compared as whole numbers, so that equal ones are equal
/// whatever they are added to. 2¹⁴ groups of them stay below 2⁵⁵.
const UNITS: f64 = (1u64 << 40) as f64;

/// A model with fewer blocks than stages.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{stages} stages need as many layers, the model has {blocks}; lower pp or virtual, \
     or raise layers to {stages}"
)]
pub struct TooFewLayers {
    /// Stages asked for.
    pub stages: usize,
    /// Layers a stage may begin at.
    pub blocks: usize,
}

/// What the blocks of a model bring with them: a block and the parts that stay with it, each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockGroups {
    /// Where each group begins in the list of parts, and where the last one ends.
    begins: Vec<usize>,
    /// Where the parts after the last block begin, if there are any: they may be a stage.
    tail: Option<usize>,
}

impl BlockGroups {
    /// The groups of a model's parts, of which `is_block` says where a stage may begin.
    pub fn new(is_block: impl IntoIterator<Item = bool>) -> BlockGroups {
        let (mut begins, mut parts) = (Vec::new(), 0);
        for is_block in is_block {
            begins.extend(is_block.then_some(parts));
            parts += 1;
        }
        let tail = begins.last().map(|last| last + 1).filter(|tail| *tail < parts);
        if let Some(first) = begins.first_mut() {
            *first = 0;
            begins.push(parts);
        }
        BlockGroups { begins, tail }
    }

    /// How many there are: the model's blocks.
    pub fn len(&self) -> usize {
        self.begins.len().saturating_sub(1)
    }

    /// Where the parts after the last block begin: the head, and what is before it.
    pub(crate) fn tail(&self) -> Option<usize> {
        self.tail
    }

    /// Whether the model has no block.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The sum over each group's parts.
    pub fn sums<T: std::iter::Sum>(&self, of_part: impl Fn(usize) -> T) -> Vec<T> {
        self.begins.windows(2).map(|w| (w[0]..w[1]).map(&of_part).sum()).collect()
    }

    /// How many groups each stage of a cut has.
    pub fn sizes(&self, cut: &[Range<usize>]) -> Vec<usize> {
        let within = |range: &Range<usize>| {
            let starts = &self.begins[..self.len()];
            starts.partition_point(|b| *b < range.end)
                - starts.partition_point(|b| *b < range.start)
        };
        cut.iter().map(within).collect()
    }

    /// The parts of stages that have so many groups each; a last one without any has what comes
    /// after the last block.
    ///
    /// # Panics
    /// Panics where these are more than there are.
    pub fn stages(&self, sizes: impl IntoIterator<Item = usize>) -> Vec<Range<usize>> {
        let mut at = 0;
        let range = |n| {
            let from = at;
            at += n;
            self.begins[from]..self.begins[at]
        };
        let mut stages: Vec<Range<usize>> = sizes.into_iter().map(range).collect();
        if let ([.., before, last], Some(tail)) = (&mut stages[..], self.tail)
            && last.start == last.end
        {
            (before.end, last.start) = (tail, tail);
        }
        stages
    }

    /// The parts of each stage where stage i has `blocks[i]` blocks; none where these are not
    /// numbers from 1 that make up the model. The last stage may have none: the head is there.
    pub fn by_hand(&self, blocks: &[usize]) -> Option<Vec<Range<usize>>> {
        let sum = blocks.iter().try_fold(0usize, |sum, n| sum.checked_add(*n));
        let with_blocks = match blocks {
            [some @ .., 0] if self.tail.is_some() => some,
            all => all,
        };
        let has_blocks = !with_blocks.is_empty() && !with_blocks.contains(&0);
        (sum == Some(self.len()) && has_blocks).then(|| self.stages(blocks.iter().copied()))
    }

    /// The parts of each of `stages` stages, whose longest takes as little time as can be and the
    /// others about the same. Where `limit` is given, no stage exceeds that either; none if that
    /// cannot be.
    ///
    /// # Errors
    /// [`TooFewLayers`] where a stage would have no block.
    pub fn balanced(
        &self,
        times: &GroupTimes,
        stages: usize,
        limit: Option<&StageLimits>,
    ) -> Result<Option<Vec<Range<usize>>>, TooFewLayers> {
        let blocks = self.len();
        if blocks < stages || stages == 0 {
            return Err(TooFewLayers { stages, blocks });
        }
        let cuts = balance(&IntTimes::of(times), stages, limit);
        Ok(cuts.map(|cuts| self.stages(cuts.windows(2).map(|w| w[1] - w[0]))))
    }
}

/// What each group takes of a micro-batch, F, B and W together, in any unit, estimated or measured.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GroupTimes {
    /// In a stage that keeps what its F makes.
    pub kept: Vec<f64>,
    /// In a stage that is recomputed: R is a part of it.
    pub recomputed: Vec<f64>,
    /// How many of the stages are recomputed, from the first on.
    pub recomputing: usize,
    /// What of the last group's times is of the parts after its block.
    pub tail: f64,
}

impl GroupTimes {
    /// Leaves the parts after the last block out.
    pub(crate) fn leave_tail_out(&mut self) {
        for times in [&mut self.kept, &mut self.recomputed] {
            times.last_mut().into_iter().for_each(|last| *last -= self.tail);
        }
        self.tail = 0.0;
    }

    /// What each stage takes, of so many groups each; one without any has the tail.
    pub(crate) fn of_stages(&self, sizes: &[usize]) -> Vec<f64> {
        let mut at = 0;
        let of = |(stage, n): (usize, &usize)| {
            let times = if stage < self.recomputing { &self.recomputed } else { &self.kept };
            at += n;
            times[at - n..at].iter().sum::<f64>()
        };
        let mut stages: Vec<f64> = sizes.iter().enumerate().map(of).collect();
        if let ([.., before, last], Some(0)) = (&mut stages[..], sizes.last()) {
            *before -= self.tail;
            *last += self.tail;
        }
        stages
    }

    /// The same without the tail.
    pub(crate) fn without_tail(&self) -> GroupTimes {
        let mut bare = GroupTimes { tail: 0.0, ..self.clone() };
        for times in [&mut bare.kept, &mut bare.recomputed] {
            times.iter_mut().next_back().into_iter().for_each(|last| *last -= self.tail);
        }
        bare
    }

    /// What a group takes on average, without the tail: in a stage that keeps what its F makes, and
    /// in one that is recomputed.
    pub(crate) fn of_blocks(&self) -> [f64; 2] {
        let mean = |times: &[f64]| (times.iter().sum::<f64>() - self.tail) / times.len() as f64;
        [mean(&self.kept), mean(&self.recomputed)]
    }
}

/// Times as whole numbers, in proportion. What is negative or no number counts as nothing.
struct IntTimes {
    kept: Vec<u64>,
    recomputed: Vec<u64>,
    recomputing: usize,
}

impl IntTimes {
    fn of(times: &GroupTimes) -> IntTimes {
        let GroupTimes { kept, recomputed, recomputing, .. } = times;
        let longest = kept.iter().chain(recomputed).copied().fold(0.0, f64::max);
        let unit = if longest > 0.0 && longest.is_finite() { UNITS / longest } else { 0.0 };
        let in_units = |times: &[f64]| times.iter().map(|t| (t * unit).round() as u64).collect();
        IntTimes {
            kept: in_units(kept),
            recomputed: in_units(recomputed),
            recomputing: *recomputing,
        }
    }
}

/// The most bytes of every stage.
#[derive(Clone, Debug)]
pub struct StageLimits {
    /// Sums of the bytes of the first groups, 0 first.
    sums: Vec<u64>,
    /// The limit of each stage.
    limits: Vec<u64>,
}

impl StageLimits {
    /// Limits of each stage on what its groups hold together; `bytes` has an entry for each group.
    pub fn new(bytes: &[u64], limits: Vec<u64>) -> StageLimits {
        StageLimits { sums: sums(bytes), limits }
    }
}

fn sums(values: &[u64]) -> Vec<u64> {
    let mut sum = 0u64;
    let add = |v: &u64| {
        sum = sum.saturating_add(*v);
        sum
    };
    [0].into_iter().chain(values.iter().map(add)).collect()
}

/// One search for a cut.
struct CutSearch<'a> {
    /// Sums of the times of the first groups, 0 first; those of stages that are recomputed first.
    times: [Vec<u64>; 2],
    recomputing: usize,
    stages: usize,
    limit: Option<&'a StageLimits>,
}

/// Cut points `0 = c0 < c1 < … < cS = n` of the best contiguous split, if one keeps the limits.
fn balance(times: &IntTimes, stages: usize, limit: Option<&StageLimits>) -> Option<Vec<usize>> {
    let IntTimes { kept, recomputed, recomputing } = times;
    let both = || kept.iter().zip(recomputed);
    let [least, most]: [Vec<u64>; 2] =
        [both().map(|(a, b)| *a.min(b)).collect(), both().map(|(a, b)| *a.max(b)).collect()];
    let times = [sums(recomputed), sums(kept)];
    let cut = CutSearch { times, recomputing: *recomputing, stages, limit };
    // Some stage has the longest group, and some at least the mean.
    let longest = least.iter().copied().max().unwrap_or(0);
    let mut low = longest.max(least.iter().sum::<u64>() / stages as u64);
    let mut high = most.iter().sum();
    cut.filled(high)?;
    while low < high {
        let middle = low.midpoint(high);
        match cut.filled(middle) {
            Some(_) => high = middle,
            None => low = middle + 1,
        }
    }
    let evened = cut.evened(high);
    Some(if cut.keeps(&evened, high) { evened } else { cut.filled(high)? })
}

impl CutSearch<'_> {
    fn groups(&self) -> usize {
        self.times[0].len() - 1
    }

    /// Sums of the times of the first groups, as `stage` takes them.
    fn sums(&self, stage: usize) -> &[u64] {
        &self.times[usize::from(stage >= self.recomputing)]
    }

    /// Where `stage` ends at the latest if it begins at `from` and takes at most `time`; other
    /// stages need a group each. `from` itself where not even one group fits.
    fn end(&self, stage: usize, from: usize, time: u64) -> usize {
        let last = self.groups() - (self.stages - 1 - stage);
        let within = |sums: &[u64], most: u64| {
            let top = sums[from].saturating_add(most);
            from + sums[from..=last.max(from)].partition_point(|s| *s <= top) - 1
        };
        let end = within(self.sums(stage), time);
        self.limit.map_or(end, |l| end.min(within(&l.sums, l.limits[stage])))
    }

    /// Where `stage` begins at the earliest if it ends at `to` and takes at most `time`.
    fn begin(&self, stage: usize, to: usize, time: u64) -> usize {
        let within = |sums: &[u64], most: u64| {
            let least = sums[to].saturating_sub(most);
            sums[..=to].partition_point(|s| *s < least)
        };
        let begin = within(self.sums(stage), time).max(stage);
        self.limit.map_or(begin, |l| begin.max(within(&l.sums, l.limits[stage])))
    }

    /// The cut whose stages are as full as they can be, one after another, if none then takes more
    /// than `time`.
    fn filled(&self, time: u64) -> Option<Vec<usize>> {
        let mut cuts = vec![0];
        for stage in 0..self.stages {
            cuts.push(self.end(stage, cuts[stage], time));
        }
        // What the next group is too long for, as it is recomputed, takes one of the stage before.
        for stage in (1..self.stages).rev() {
            cuts[stage] = cuts[stage].min(cuts[stage + 1].saturating_sub(1));
        }
        (cuts[self.stages] == self.groups() && self.keeps(&cuts, time)).then_some(cuts)
    }

    /// Whether every stage of a cut keeps within `time` and its limit.
    fn keeps(&self, cuts: &[usize], time: u64) -> bool {
        let keeps =
            |(stage, w): (usize, &[usize])| w[0] < w[1] && w[1] <= self.end(stage, w[0], time);
        cuts.windows(2).enumerate().all(keeps)
    }

    /// The cut whose stages are about even, of those that take at most `time`, which must do: one
    /// stage after another gets its share of what is left, as far as the others then have room.
    fn evened(&self, time: u64) -> Vec<usize> {
        let latest = self.filled(time).expect("a time that will do");
        let mut earliest = vec![self.groups(); self.stages];
        for stage in (1..self.stages).rev() {
            earliest[stage - 1] = self.begin(stage, earliest[stage], time);
        }
        let mut cuts = vec![0];
        for stage in 0..self.stages {
            let (from, times) = (cuts[stage], self.sums(stage));
            let left = times[self.groups()] - times[from];
            let share = times[from] + left / (self.stages - stage) as u64;
            let most = self.end(stage, from, time).min(latest[stage + 1]);
            let least = earliest[stage].max(from + 1).min(most);
            let after = times.partition_point(|t| *t < share);
            let before = after.saturating_sub(1);
            let off = |i: usize| times[i.min(self.groups())].abs_diff(share);
            let nearest = if off(before) <= off(after) { before } else { after };
            cuts.push(nearest.clamp(least, most));
        }
        cuts
    }
}

#[cfg(test)]
mod tests;
