//! A request as flat tables that the search reads a billion times.

use std::cmp::Reverse;

use super::ledger::{PART, SHIFT};
use super::{Budgets, Objective};
use zeropp_schedule::ir::Schedule;
use zeropp_schedule::schedules::{OrderCosts, Shape};

/// Where the result of an action goes.
#[derive(Clone, Copy, Debug)]
pub(super) struct ResultTarget {
    /// The rank that takes it; [`NO_RANK`] at the pipeline's end.
    pub(super) rank: u32,
    /// First cell of the taking class.
    pub(super) cell: u32,
    /// Time of the message; 0 on the same rank.
    pub(super) delay: i64,
}

/// A class of a rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct Facts {
    pub(super) take: i64,
    pub(super) need: i64,
    pub(super) delta: i64,
    /// Of a B's W.
    pub(super) w: i64,
    pub(super) freed: i64,
    pub(super) link: ResultTarget,
    /// From the start of what makes its input to the input's arrival.
    pub(super) lag: i64,
}

/// No rank takes it.
pub(super) const NO_RANK: u32 = u32::MAX;

/// The first window of time is this part of a rank's work.
const WINDOWS: i64 = 48;

/// A *class* is F or B of one of a rank's stages: F of its v-th stage is v, B is V + v.
#[derive(Clone, Debug)]
pub(super) struct Problem {
    /// Pipeline ranks, P.
    pub(super) ranks: usize,
    /// Stages a rank, V.
    pub(super) v: usize,
    /// Micro-batches, B.
    pub(super) b: usize,
    /// 2V.
    pub(super) classes: usize,
    /// Rank of each stage.
    pub(super) placement: Vec<usize>,
    /// Stage by `rank · V + v`.
    pub(super) stage: Vec<usize>,
    /// Time of an F, or of R and B, by `rank · 2V + class`.
    pub(super) take: Vec<i64>,
    /// Memory that must be free when it starts.
    pub(super) need: Vec<i64>,
    /// Change of memory.
    pub(super) delta: Vec<i64>,
    /// The five facts of a class that timing needs, side by side.
    pub(super) table: Vec<Facts>,
    /// The time after which a changed plan is first looked at again.
    pub(super) step: i64,
    /// Weight of the sum of spans in a score.
    pub(super) part: i64,
    /// Consumer, by `rank · 2V + class`.
    pub(super) link: Vec<ResultTarget>,
    /// Producer of its input, as rank and class; none where nothing is waited for.
    pub(super) source: Vec<Option<(u32, u32)>>,
    /// Time of a W by `rank · V + v`.
    pub(super) w: Vec<i64>,
    /// Memory that a W frees.
    pub(super) freed: Vec<i64>,
    /// Time of a gather by `rank · V + v`.
    pub(super) gather: Vec<i64>,
    /// Time of a reduction by `rank · V + v`.
    pub(super) reduce: Vec<i64>,
    /// Whether gathers or reductions take any time.
    pub(super) timed: bool,
    /// Whether each stage recomputes.
    pub(super) recomputes: Vec<bool>,
    /// Space of a stage's gathered weights by `rank · V + v`, in the unit of `room`.
    pub(super) weight: Vec<u64>,
    /// The most gathered at once.
    pub(super) room: u64,
    /// Whether some rank cannot hold all of its stages gathered.
    pub(super) tight: bool,
    /// How many fit, where a rank's stages are of one size.
    pub(super) slots: Vec<Option<usize>>,
    /// Whether the W of a rank are alike: of one time and size, without collectives that take time.
    pub(super) same_w: Vec<bool>,
    /// The longest W of each rank.
    pub(super) longest_w: Vec<i64>,
    /// The most gathers a rank.
    pub(super) gathers_max: usize,
    /// The most stages with an unreduced gradient at once; V is no limit.
    pub(super) gradients_max: usize,
    /// The most activation memory of a rank.
    pub(super) memory: i64,
    /// Unit of each micro-batch: the cut of sums.
    pub(super) unit: Vec<u16>,
    /// The sizes of the units.
    pub(super) units: Vec<usize>,
    /// Computing time of each rank.
    pub(super) work: Vec<i64>,
    /// The objective.
    pub(super) objective: Objective,
    /// The same costs, for the clock that all generators share.
    pub(super) costs: OrderCosts,
}

impl Problem {
    /// Tables of `shape` on `placement`, with V stages on every rank. `recompute` has the time of
    /// each stage's R and what the activations need besides what F keeps, 0 and 0 where there is
    /// none.
    pub(super) fn new(
        shape: &Shape,
        costs: &OrderCosts,
        budgets: &Budgets,
        placement: Vec<usize>,
        objective: Objective,
    ) -> Problem {
        let (ranks, v) = (shape.pp, shape.virtual_stages);
        let mut stage = vec![0; ranks * v];
        let mut filled = vec![0; ranks];
        for (s, &r) in placement.iter().enumerate() {
            stage[r * v + filled[r]] = s;
            filled[r] += 1;
        }
        let units = budgets.units(shape);
        let unit: Vec<u16> =
            units.iter().enumerate().flat_map(|(u, n)| std::iter::repeat_n(u as u16, *n)).collect();
        let mut problem = Problem {
            ranks,
            v,
            b: shape.micro_batches,
            classes: 2 * v,
            placement,
            take: Vec::new(),
            need: Vec::new(),
            delta: Vec::new(),
            table: Vec::new(),
            step: 0,
            part: (PART << SHIFT) / ranks as i64,
            link: Vec::new(),
            source: vec![None; ranks * 2 * v],
            w: stage.iter().map(|&s| costs.w[s] as i64).collect(),
            freed: stage.iter().map(|&s| -costs.mem_w[s]).collect(),
            gather: stage.iter().map(|&s| costs.gather[s] as i64).collect(),
            reduce: stage.iter().map(|&s| costs.reduce[s] as i64).collect(),
            timed: costs.gather.iter().chain(&costs.reduce).any(|t| *t > 0),
            weight: stage.iter().map(|&s| budgets.weight_of(s)).collect(),
            room: budgets.gathered.unwrap_or(u64::MAX),
            recomputes: (0..shape.stages()).map(|s| budgets.recomputed(s) != (0, 0)).collect(),
            tight: false,
            slots: Vec::new(),
            same_w: Vec::new(),
            longest_w: Vec::new(),
            gathers_max: budgets.gathers.unwrap_or(usize::MAX),
            gradients_max: budgets.gradients.unwrap_or(v).min(v),
            memory: costs.mem_limit.unwrap_or(i64::MAX / 4),
            unit,
            units,
            work: vec![0; ranks],
            objective,
            stage,
            costs: costs.clone().with_objective(objective),
        };
        problem.compare_stages();
        for r in 0..ranks {
            for class in 0..2 * v {
                problem.add_class(r, class, costs, budgets);
            }
        }
        for (facts, source) in problem.table.iter_mut().zip(&problem.source) {
            if let Some((r, class)) = source {
                let from = *r as usize * 2 * v + *class as usize;
                facts.lag = problem.take[from] + problem.link[from].delay;
            }
        }
        let work = problem.work.iter().max().copied().unwrap_or(0);
        problem.step = (work / WINDOWS).max(1);
        problem
    }

    /// Facts of the stages of a rank together.
    fn compare_stages(&mut self) {
        let alike = |of: &[i64]| of.iter().all(|x| *x == of[0]);
        let w = self.w.chunks(self.v).zip(self.freed.chunks(self.v));
        self.same_w = w.map(|(w, freed)| !self.timed && alike(w) && alike(freed)).collect();
        let longest = |w: &[i64]| w.iter().max().copied().unwrap_or(0);
        self.longest_w = self.w.chunks(self.v).map(longest).collect();
        let room = self.room;
        let slots = |w: &[u64]| w.iter().all(|x| *x == w[0] && *x > 0).then(|| room / w[0]);
        let slots = self.weight.chunks(self.v).map(slots);
        self.slots = slots.map(|n| n.map(|n| n.min(self.v as u64) as usize)).collect();
        self.tight = self.weight.chunks(self.v).any(|w| w.iter().sum::<u64>() > self.room);
    }

    fn add_class(&mut self, r: usize, class: usize, costs: &OrderCosts, budgets: &Budgets) {
        let (v, b) = (self.v, self.b as i64);
        let s = self.stage[r * v + class % v];
        let last = self.placement.len() - 1;
        let (takes, need, delta, to) = if class < v {
            let to = if s == last { (s, v) } else { (s + 1, 0) };
            (costs.f[s], costs.mem_f[s], costs.mem_f[s], Some(to))
        } else {
            let (time, more) = budgets.recomputed(s);
            let need = more.max(costs.mem_b[s]).max(0);
            (costs.b[s] + time, need, costs.mem_b[s], s.checked_sub(1).map(|s| (s, v)))
        };
        let link = match to {
            None => ResultTarget { rank: NO_RANK, cell: 0, delay: 0 },
            Some((to, first)) => {
                let rank = self.placement[to];
                let local = (0..v).find(|l| self.stage[rank * v + l] == to).expect("placed there");
                let cell = (rank * self.classes + first + local) * self.b;
                let delay = if rank == r { 0 } else { costs.send as i64 };
                ResultTarget { rank: rank as u32, cell: cell as u32, delay }
            }
        };
        let (w, freed) = match class.checked_sub(v) {
            Some(l) => (self.w[r * v + l], self.freed[r * v + l]),
            None => (0, 0),
        };
        let take = takes as i64;
        self.table.push(Facts { take, need, delta, w, freed, link, lag: 1 });
        if link.rank != NO_RANK {
            self.source[link.cell as usize / self.b] = Some((r as u32, class as u32));
        }
        self.take.push(take);
        self.need.push(need);
        self.delta.push(delta);
        self.link.push(link);
        self.work[r] += b * (take + w);
    }

    /// F and B entries of all ranks.
    pub(super) fn entries(&self) -> usize {
        self.ranks * self.classes * self.b
    }

    /// The largest time of a whole micro-batch on one of a rank's stages, roughly the unit in
    /// which one order differs from another.
    pub(super) fn work_unit(&self) -> f64 {
        let most = self.work.iter().max().copied().unwrap_or(0);
        most as f64 / (self.b * self.v) as f64
    }

    /// The longest W of any rank, at least 1.
    pub(super) fn longest_w_of_all(&self) -> i64 {
        self.longest_w.iter().max().copied().unwrap_or(0).max(1)
    }

    /// Whether stages' weights alone say how many fit: the number that a rank can hold gathered,
    /// its stages being of equal size; the smallest over ranks.
    pub(super) fn window(&self) -> usize {
        let fits = |weights: &[u64]| {
            let mut sorted = weights.to_vec();
            sorted.sort_by_key(|weight| Reverse(*weight));
            let mut left = self.room;
            sorted
                .iter()
                .take_while(|w| {
                    let fits = **w <= left;
                    left = left.saturating_sub(**w);
                    fits
                })
                .count()
        };
        self.weight.chunks(self.v).map(fits).min().unwrap_or(self.v)
    }

    /// A schedule without actions.
    pub(super) fn empty_schedule(&self, kind: &str) -> Schedule {
        Schedule {
            kind: kind.into(),
            placement: self.placement.clone(),
            units: self.units.clone(),
            ranks: vec![Vec::new(); self.ranks],
            ..Schedule::default()
        }
    }
}
