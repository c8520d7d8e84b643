//! The paper's integer program (Zero Bubble, appendix G), for very small cases.
//!
//! One continuous end time a task; one binary variable for each pair of tasks of a rank that their
//! micro-batches do not order. Unlike the search it lets a rank delay its first F on purpose, so
//! its optimum lies between [`Optimum::bound`](super::Verdict::bound) and the search's.

use super::{Instance, bounds, own_span};
use good_lp::{
    Expression, ProblemVariables, Solution, SolutionStatus, SolverModel, Variable, WithTimeLimit,
    constraint, constraint::Constraint, microlp, variable,
};
use std::time::Duration;
use zeropp_schedule::ir::Compute;
use zeropp_schedule::schedules::{OrderCosts, ScheduleError, Shape, zb};

/// The solver's result.
#[derive(Clone, Debug, PartialEq)]
pub struct IntegerOptimum {
    /// The smallest largest own span, in the costs' unit; times are continuous here.
    pub own_span: f64,
    /// Start of each rank's first F.
    pub starts: Vec<f64>,
    /// Whether the solver proved it, or stopped at the time limit.
    pub optimal: bool,
}

/// Solves the integer program of `shape` and `costs` for at most `time`; the heuristic's schedule
/// is its upper limit. `None` if the solver found nothing in that time or gave up.
///
/// # Errors
/// Problems that [`zb`] refuses.
pub fn integer_program(
    shape: &Shape,
    costs: &OrderCosts,
    time: Duration,
) -> Result<Option<IntegerOptimum>, ScheduleError> {
    let heuristic = own_span(&zb("judge", shape, costs)?, costs);
    let instance = Instance { micro_batches: shape.micro_batches, costs };
    let mut program = Program::new(instance, heuristic);
    program.order_of_micro_batches();
    program.neighbours();
    for rank in 0..shape.pp {
        program.one_at_a_time(rank);
        program.memory(rank);
    }
    Ok(program.solve(time))
}

/// Kinds of task, as rows of [`Program::ends`].
const KINDS: [Compute; 3] = [Compute::F, Compute::B, Compute::W];

/// Two tasks of a rank, each a row of [`KINDS`] and a micro-batch.
struct Pair {
    /// B or W of an earlier micro-batch.
    early: (usize, usize),
    /// F or B of a later one.
    late: (usize, usize),
    /// 1 where `early` runs first.
    first: Variable,
}

struct Program<'a> {
    instance: Instance<'a>,
    variables: ProblemVariables,
    constraints: Vec<Constraint>,
    /// End of each task by rank, kind and micro-batch.
    ends: Vec<[Vec<Variable>; 3]>,
    /// Pairs of each rank's tasks that their micro-batches do not order.
    pairs: Vec<Vec<Pair>>,
    span: Variable,
    big: f64,
}

impl<'a> Program<'a> {
    fn new(instance: Instance<'a>, heuristic: u64) -> Program<'a> {
        let (p, m) = (instance.stages(), instance.micro_batches);
        let mut variables = ProblemVariables::new();
        let mut tasks = || variables.add_vector(variable().min(0), m);
        let ends: Vec<[Vec<Variable>; 3]> = (0..p).map(|_| [tasks(), tasks(), tasks()]).collect();
        let lowest = bounds::own_span(&instance) as f64;
        // Half a unit of slack, so that rounding in the solver does not cut off the heuristic.
        let span = variables.add(variable().min(lowest).max(heuristic as f64 + 0.5));
        let costs = instance.costs;
        let most = |of: &[u64]| of.iter().max().copied().unwrap_or(0);
        let longest = most(&costs.f) + most(&costs.b) + most(&costs.w) + 3 * costs.send;
        let mut program = Program {
            instance,
            variables,
            constraints: Vec::new(),
            ends,
            pairs: (0..p).map(|_| Vec::new()).collect(),
            span,
            big: (longest as usize * p * m) as f64,
        };
        for rank in 0..p {
            let first = program.ends[rank][0][0];
            let last = program.ends[rank][2][m - 1];
            let takes = program.takes(rank, 0);
            program.constraints.push(constraint!(program.span >= last - first + takes));
            program.constraints.push(constraint!(first >= takes));
        }
        program
    }

    fn takes(&self, rank: usize, kind: usize) -> f64 {
        let costs = self.instance.costs;
        [&costs.f, &costs.b, &costs.w][kind][rank] as f64
    }

    /// Task `later` of `rank` starts at least `wait` after `earlier` has ended.
    fn after(&mut self, rank: usize, later: (usize, usize), earlier: Variable, wait: f64) {
        let end = self.ends[rank][later.0][later.1];
        let takes = self.takes(rank, later.0);
        self.constraints.push(constraint!(end >= earlier + wait + takes));
    }

    fn order_of_micro_batches(&mut self) {
        for rank in 0..self.instance.stages() {
            for i in 0..self.instance.micro_batches {
                for kind in 0..KINDS.len() {
                    if i > 0 {
                        self.after(rank, (kind, i), self.ends[rank][kind][i - 1], 0.0);
                    }
                    if kind > 0 {
                        self.after(rank, (kind, i), self.ends[rank][kind - 1][i], 0.0);
                    }
                }
            }
        }
    }

    fn neighbours(&mut self) {
        let send = self.instance.costs.send as f64;
        for rank in 1..self.instance.stages() {
            for i in 0..self.instance.micro_batches {
                self.after(rank, (0, i), self.ends[rank - 1][0][i], send);
                self.after(rank - 1, (1, i), self.ends[rank][1][i], send);
            }
        }
    }

    /// Every pair of tasks that is not ordered yet: B or W of an earlier micro-batch against F or B
    /// of a later one.
    fn one_at_a_time(&mut self, rank: usize) {
        for (early, late) in [(1, 0), (2, 0), (2, 1)] {
            for j in 1..self.instance.micro_batches {
                for i in 0..j {
                    let first = self.variables.add(variable().binary());
                    self.pairs[rank].push(Pair { early: (early, i), late: (late, j), first });
                    let (a, b) = (self.ends[rank][early][i], self.ends[rank][late][j]);
                    let (takes_a, takes_b) = (self.takes(rank, early), self.takes(rank, late));
                    let big = self.big;
                    self.constraints.push(constraint!(b >= a + takes_b - big * (1 - first)));
                    self.constraints.push(constraint!(a >= b + takes_a - big * first));
                }
            }
        }
    }

    /// Before every F there is room for it.
    fn memory(&mut self, rank: usize) {
        let costs = self.instance.costs;
        for j in 0..self.instance.micro_batches {
            let mut held = Expression::from(((j + 1) as i64 * costs.mem_f[rank]) as f64);
            for pair in self.pairs[rank].iter().filter(|pair| pair.late == (0, j)) {
                let b = pair.early.0 == 1;
                let change = if b { costs.mem_b[rank] } else { costs.mem_w[rank] };
                held += change as f64 * pair.first;
            }
            let limit = self.instance.limit() as f64;
            self.constraints.push(constraint!(held <= limit));
        }
    }

    fn solve(self, time: Duration) -> Option<IntegerOptimum> {
        let costs = self.instance.costs;
        let model = self.variables.minimise(self.span).using(microlp);
        let model = model.with_all(self.constraints).with_time_limit(time.as_secs_f64());
        let solution = model.solve().ok()?;
        let start = |rank: usize| solution.value(self.ends[rank][0][0]) - costs.f[rank] as f64;
        Some(IntegerOptimum {
            own_span: solution.value(self.span),
            starts: (0..self.instance.stages()).map(start).collect(),
            optimal: matches!(solution.status(), SolutionStatus::Optimal),
        })
    }
}
