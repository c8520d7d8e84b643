//! Which experts each token goes to: scores, the choice, the weights of what is chosen, and the
//! gradient of the scores.
//!
//! Of n tokens each goes to k of E experts, so that there are n·k rows, however they spread: what
//! is kept of a choice has one size.

use std::ops::Range;

use crate::math::{exp, ln};
use crate::reduce::max;
use crate::threads::{self, piece};
use crate::{GRAIN, simd};

/// How logits become scores, by which experts are chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Score {
    /// Their softmax over all experts.
    #[default]
    Softmax,
    /// The sigmoid of each (DeepSeek-V3). A bias of each expert takes part in the choice, and not
    /// in the weights. Experts are in groups side by side; a token's experts are of the groups
    /// whose best two have the largest sums.
    Sigmoid {
        /// Groups; divides the experts.
        groups: usize,
        /// Groups of a token.
        groups_chosen: usize,
        /// The factor on the weights.
        scale: f32,
    },
}

/// How scores become a choice.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Routing {
    /// Experts E.
    pub experts: usize,
    /// Experts k of a token.
    pub chosen: usize,
    /// Whether the weights of a token's experts are divided by their sum.
    pub divided: bool,
    /// What is compared, and what the weights are.
    pub score: Score,
}

/// The experts of each token, and the tokens of each expert.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChosenExperts {
    chosen: usize,
    /// Of each token its experts, ascending: `[n, k]`.
    experts: Vec<u32>,
    /// The row of each of them, `[n, k]`: rows are in the order of experts, and of tokens in each.
    places: Vec<u32>,
    /// The place among `experts` of each row: the inverse of `places`.
    rows: Vec<u32>,
    /// The first row of each expert, and the end of the last one.
    starts: Vec<u32>,
}

impl ChosenExperts {
    /// The rows of these experts, k of each token: a counting sort.
    fn new(experts: Vec<u32>, routing: Routing) -> Self {
        let mut starts = vec![0; routing.experts + 1];
        for expert in &experts {
            starts[*expert as usize + 1] += 1;
        }
        for expert in 0..routing.experts {
            starts[expert + 1] += starts[expert];
        }
        let mut next = starts.clone();
        let (mut places, mut rows) = (vec![0; experts.len()], vec![0; experts.len()]);
        for (i, expert) in experts.iter().enumerate() {
            let row = &mut next[*expert as usize];
            (places[i], rows[*row as usize]) = (*row, i as u32);
            *row += 1;
        }
        Self { chosen: routing.chosen, experts, places, rows, starts }
    }

    /// Bytes of the choice for `tokens` tokens.
    pub fn bytes_of(tokens: usize, [experts, chosen]: [usize; 2]) -> usize {
        (3 * tokens * chosen + experts + 1) * size_of::<u32>()
    }

    /// Bytes that it takes.
    pub fn bytes(&self) -> usize {
        Self::bytes_of(self.tokens(), [self.experts(), self.chosen])
    }

    /// Tokens n.
    pub fn tokens(&self) -> usize {
        self.experts.len() / self.chosen
    }

    /// Experts E.
    pub fn experts(&self) -> usize {
        self.starts.len() - 1
    }

    /// Experts k of a token.
    pub fn chosen(&self) -> usize {
        self.chosen
    }

    /// The rows of an expert.
    pub(crate) fn rows_of(&self, expert: usize) -> Range<usize> {
        self.starts[expert] as usize..self.starts[expert + 1] as usize
    }

    /// The experts of a token, ascending.
    pub(crate) fn experts_of(&self, token: usize) -> &[u32] {
        &self.experts[token * self.chosen..][..self.chosen]
    }

    /// Of some rows, where they are among all tokens' experts, `[n, k]`.
    pub(crate) fn origins(&self, rows: Range<usize>) -> &[u32] {
        &self.rows[rows]
    }

    /// What is given for each row, for each expert of each token, `[n, k]`.
    pub(crate) fn by_token(&self, of_rows: &[f32]) -> Vec<f32> {
        self.places.iter().map(|place| of_rows[*place as usize]).collect()
    }

    /// The lengths of experts' rows, `width` elements each.
    pub(crate) fn lengths(
        &self,
        experts: Range<usize>,
        width: usize,
    ) -> impl Iterator<Item = usize> {
        experts.map(move |expert| self.rows_of(expert).len() * width)
    }

    /// The experts in groups side by side, of `rows` rows or one expert.
    pub(crate) fn groups(&self, rows: usize) -> impl Iterator<Item = Range<usize>> {
        let mut next = 0;
        std::iter::from_fn(move || {
            let first = next;
            let limit = *self.starts.get(first)? as usize + rows;
            next +=
                self.starts[first + 1..].iter().take_while(|end| **end as usize <= limit).count();
            next = next.max(first + 1);
            (first < self.experts()).then_some(first..next)
        })
    }
}

/// The weights `[n, k]`, the choice and a number of each token, `[n]`, by `logits: [n, E]`, which
/// become the scores. The number is the log-sum-exp of its logits, or with sigmoids the sum of its
/// scores. A token goes to the k experts with the largest scores, with sigmoids after the addition
/// of `bias: [E]`; of equal ones to the lower index, and `total_cmp` orders what is not a number.
///
/// # Panics
/// Panics if there are fewer experts than are chosen, or sizes do not match.
pub fn route(
    logits: &mut [f32],
    bias: Option<&[f32]>,
    routing: Routing,
) -> (Vec<f32>, ChosenExperts, Vec<f32>) {
    let Routing { experts: all, chosen: k, .. } = routing;
    assert!((1..=all).contains(&k) && logits.len().is_multiple_of(all), "{k} of {all} experts");
    assert!(bias.is_none_or(|bias| bias.len() == all), "a bias of each expert");
    let n = logits.len() / all;
    let (mut weights, mut experts) = (vec![0.0; n * k], vec![0; n * k]);
    let mut sums = vec![0.0; n];
    let tokens = piece(n, 1, GRAIN.div_ceil(16 * all));
    let outputs = weights.chunks_mut(tokens * k).zip(experts.chunks_mut(tokens * k));
    let inputs = logits.chunks_mut(tokens * all).zip(sums.chunks_mut(tokens));
    threads::each(inputs.zip(outputs), |((scores, sums), (weights, experts))| {
        let mut choose = Choose { routing, bias, compared: vec![0.0; all], order: Vec::new() };
        let outputs = weights.chunks_mut(k).zip(experts.chunks_mut(k));
        let inputs = scores.chunks_mut(all).zip(sums);
        for ((scores, sum), (weights, experts)) in inputs.zip(outputs) {
            *sum = match routing.score {
                Score::Softmax => softmax(scores),
                Score::Sigmoid { .. } => sigmoids(scores),
            };
            choose.of_token(scores, experts);
            choose.weigh(scores, experts, weights);
        }
    });
    (weights, ChosenExperts::new(experts, routing), sums)
}

/// The choice of one token after the other.
struct Choose<'a> {
    routing: Routing,
    bias: Option<&'a [f32]>,
    /// What is compared of each expert.
    compared: Vec<f32>,
    order: Vec<u64>,
}

impl Choose<'_> {
    /// Writes the experts of a token with these scores, ascending.
    fn of_token(&mut self, scores: &[f32], experts: &mut [u32]) {
        // What is no number has either sign: here it has one, before all numbers.
        let number = |x: f32| if x.is_nan() { f32::NAN } else { x };
        for (i, (compared, score)) in self.compared.iter_mut().zip(scores).enumerate() {
            *compared = number(score + self.bias.map_or(0.0, |bias| bias[i]));
        }
        self.leave_groups_out();
        let (compared, order, k) = (&self.compared, &mut self.order, experts.len());
        largest_first(order, k, compared);
        experts.iter_mut().zip(&*order).for_each(|(expert, entry)| *expert = *entry as u32);
        experts.sort_unstable();
    }

    /// Puts the experts of groups that are not chosen behind all others.
    fn leave_groups_out(&mut self) {
        let Score::Sigmoid { groups, groups_chosen, .. } = self.routing.score else { return };
        if groups_chosen >= groups {
            return;
        }
        let size = self.compared.len() / groups;
        let best_two = |group: &[f32]| {
            let mut best = [f32::NEG_INFINITY; 2];
            for x in group {
                if x.total_cmp(&best[0]).is_gt() {
                    best = [*x, best[0]];
                } else if x.total_cmp(&best[1]).is_gt() {
                    best[1] = *x;
                }
            }
            best[0] + best[1]
        };
        let sums: Vec<f32> = self.compared.chunks(size).map(best_two).collect();
        largest_first(&mut self.order, groups_chosen, &sums);
        for group in &self.order[groups_chosen..] {
            self.compared[*group as u32 as usize * size..][..size].fill(f32::NEG_INFINITY);
        }
    }

    /// Writes the weights of a token's experts.
    fn weigh(&self, scores: &[f32], experts: &[u32], weights: &mut [f32]) {
        weights.iter_mut().zip(experts).for_each(|(w, expert)| *w = scores[*expert as usize]);
        let sum: f32 = weights.iter().sum();
        let divided = self.routing.divided;
        match self.routing.score {
            Score::Softmax if divided => weights.iter_mut().for_each(|w| *w /= sum),
            Score::Softmax => {}
            Score::Sigmoid { scale, .. } => {
                let by = if divided { sum + NEVER_ZERO } else { 1.0 };
                weights.iter_mut().for_each(|w| *w = *w / by * scale);
            }
        }
    }
}

/// Added to the sum that sigmoids are divided by, as elsewhere.
const NEVER_ZERO: f32 = 1e-20;

/// Makes `order` the places of `numbers`, in the lower halves of its entries, those of the `k`
/// largest ones first; of equal ones the lower place. A whole number is compared, without a branch
/// that depends on which is larger.
fn largest_first(order: &mut Vec<u64>, k: usize, numbers: &[f32]) {
    order.clear();
    order.extend(numbers.iter().enumerate().map(|(i, x)| {
        // As `total_cmp` orders them: of negative numbers those with larger bits are smaller.
        let bits = x.to_bits();
        let descending = if x.is_sign_negative() { bits } else { !bits & i32::MAX as u32 };
        u64::from(descending) << 32 | i as u64
    }));
    if k < order.len() {
        order.select_nth_unstable(k - 1);
    }
}

/// Makes logits scores; the logarithm of their sum of exponentials.
fn softmax(x: &mut [f32]) -> f32 {
    let largest = max(x);
    simd(
        #[inline(always)]
        || x.iter_mut().for_each(|x| *x = exp(*x - largest)),
    );
    let sum = x.iter().fold(0.0, |sum, x| sum + x);
    simd(
        #[inline(always)]
        || x.iter_mut().for_each(|x| *x /= sum),
    );
    largest + ln(sum)
}

/// Makes logits their sigmoids; the sum of those.
fn sigmoids(x: &mut [f32]) -> f32 {
    x.iter_mut().for_each(|x| *x = 1.0 / (1.0 + exp(-*x)));
    x.iter().sum()
}

/// The gradient of the logits, `[n, E]`, by that of the weights, `[n, k]`. The scores are those of
/// [`route`]; where weights are a divided softmax, they are that over the chosen experts alone, and
/// no scores are needed.
///
/// # Panics
/// Panics if sizes do not match.
pub fn route_backward(
    dweights: &[f32],
    weights: &[f32],
    scores: &[f32],
    choice: &ChosenExperts,
    routing: Routing,
) -> Vec<f32> {
    let (all, k) = (choice.experts(), choice.chosen());
    assert_eq!((dweights.len(), weights.len()), (choice.tokens() * k, choice.tokens() * k));
    assert_eq!(scores.len(), choice.tokens() * all);
    let mut dlogits = vec![0.0; choice.tokens() * all];
    let rows = dlogits.chunks_mut(all).zip(scores.chunks(all)).enumerate();
    for (token, (dlogits, scores)) in rows {
        let [dw, w] = [dweights, weights].map(|of| &of[token * k..][..k]);
        let experts = choice.experts_of(token);
        let mean: f32 = dw.iter().zip(w).map(|(dw, w)| dw * w).sum();
        let chosen = || experts.iter().map(|expert| *expert as usize);
        if let Score::Sigmoid { scale, .. } = routing.score {
            let sum: f32 = chosen().map(|expert| scores[expert]).sum();
            for (expert, dw) in chosen().zip(dw) {
                let d = match routing.divided {
                    true => (scale * dw - mean) / (sum + NEVER_ZERO),
                    false => scale * dw,
                };
                dlogits[expert] = d * scores[expert] * (1.0 - scores[expert]);
            }
            continue;
        }
        if !routing.divided {
            dlogits.iter_mut().zip(scores).for_each(|(d, score)| *d = -score * mean);
        }
        for ((expert, dw), w) in chosen().zip(dw).zip(w) {
            dlogits[expert] = w * (dw - mean);
        }
    }
    dlogits
}

/// How many more choices than the mean each expert has, as whole numbers `[E]`: its count times E
/// less those of all, over the largest number that divides both. Sums of them are exact below
/// 2^24 in size.
pub fn excess(choice: &ChosenExperts) -> Vec<f32> {
    let (all, rows) = (choice.experts(), choice.tokens() * choice.chosen());
    let (mut divisor, mut rest) = (all, rows);
    while rest > 0 {
        (divisor, rest) = (rest, divisor % rest);
    }
    let of = |expert: usize| {
        let count = choice.rows_of(expert).len() * (all / divisor);
        count as f32 - (rows / divisor) as f32
    };
    (0..all).map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::threads::Threads;

    fn routed(logits: &[f32], [experts, chosen]: [usize; 2]) -> (Vec<f32>, ChosenExperts) {
        let routing = Routing { experts, chosen, divided: true, score: Score::Softmax };
        let (weights, choice, _) = route(&mut logits.to_vec(), None, routing);
        (weights, choice)
    }

    #[test]
    fn equal_scores_go_to_the_lower_index_and_no_number_still_chooses() {
        let (weights, choice) = routed(&[1.0, 2.0, 2.0, 2.0, 0.0, 0.0, 0.0, 0.0], [4, 2]);
        assert_eq!((choice.experts_of(0), choice.experts_of(1)), (&[1, 2][..], &[0, 1][..]));
        assert_eq!(weights, [0.5; 4]);
        let (_, choice) = routed(&[f32::NAN, 1.0, f32::INFINITY, 0.0], [4, 3]);
        assert_eq!(choice.experts_of(0), [0, 1, 2]);
        let (weights, choice) = routed(&[3.0, -1.0], [2, 2]);
        assert_eq!(choice.experts_of(0), [0, 1]);
        assert!((weights[0] + weights[1] - 1.0).abs() < 1e-6);
    }

    #[test]
    fn rows_are_in_the_order_of_experts_and_of_tokens_in_each() {
        let logits = [[0.0, 1.0, 2.0], [2.0, 0.0, 1.0], [1.0, 0.0, 2.0], [5.0, 0.0, 5.0]].concat();
        let (_, choice) = routed(&logits, [3, 2]);
        let tokens = |expert| {
            let rows = choice.origins(choice.rows_of(expert));
            rows.iter().map(|row| row / 2).collect::<Vec<_>>()
        };
        assert_eq!([0, 1, 2].map(tokens), [vec![1, 2, 3], vec![0], vec![0, 1, 2, 3]]);
        for token in 0..4 {
            for (i, place) in choice.places[token * 2..][..2].iter().enumerate() {
                let origin = choice.origins(*place as usize..*place as usize + 1);
                assert_eq!(origin, [(token * 2 + i) as u32]);
            }
        }
        assert_eq!(choice.bytes(), (3 * 8 + 4) * 4);
    }

    #[test]
    fn threads_change_no_weight_and_no_choice() {
        let value = |i: usize| (i as u32).wrapping_mul(2_654_435_761) as f32 / 4e8 - 5.0;
        let logits: Vec<f32> = (0..3000 * 7).map(value).collect();
        let alone = routed(&logits, [7, 3]);
        let _installed = Threads::new(3, false).install();
        assert_eq!(routed(&logits, [7, 3]), alone);
    }

    const SIGMOID: Score = Score::Sigmoid { groups: 1, groups_chosen: 1, scale: 2.5 };

    /// By differences in double precision.
    #[test]
    fn the_gradient_of_logits_is_that_of_the_weights() {
        for (divided, score) in [false, true]
            .into_iter()
            .flat_map(|divided| [(divided, Score::Softmax), (divided, SIGMOID)])
        {
            let routing = Routing { experts: 5, chosen: 3, divided, score };
            let logits = [0.3, -1.0, 0.9, 0.1, 0.5];
            let dweights = [0.7, -0.2, 1.5];
            let mut scores = logits.map(|x: f64| x as f32);
            let (weights, choice, _) = route(&mut scores, None, routing);
            let found = route_backward(&dweights, &weights, &scores, &choice, routing);
            let of = |logits: [f64; 5]| {
                let (values, scale) = match score {
                    Score::Softmax => (logits.map(f64::exp), 1.0),
                    Score::Sigmoid { .. } => (logits.map(|x| 1.0 / (1.0 + (-x).exp())), 2.5),
                };
                let chosen = choice.experts_of(0).iter().map(|expert| values[*expert as usize]);
                let sum: f64 = match (divided, score) {
                    (true, _) => chosen.clone().sum(),
                    (false, Score::Softmax) => values.iter().sum(),
                    (false, Score::Sigmoid { .. }) => 1.0,
                };
                chosen.zip(dweights).map(|(x, d)| scale * x / sum * f64::from(d)).sum::<f64>()
            };
            for (i, found) in found.iter().enumerate() {
                let moved = |by: f64| {
                    let mut moved = logits;
                    moved[i] += by;
                    of(moved)
                };
                let want = (moved(1e-5) - moved(-1e-5)) / 2e-5;
                assert!((f64::from(*found) - want).abs() < 1e-6, "{i}: {found} and {want}");
            }
        }
    }

    #[test]
    fn a_bias_moves_the_choice_and_no_weight() {
        let score = Score::Sigmoid { groups: 1, groups_chosen: 1, scale: 1.0 };
        let routing = Routing { experts: 4, chosen: 2, divided: false, score };
        let logits = [2.0, 1.0, 0.0, -9.0];
        let bias = [-1.0, 0.0, 0.0, 2.0];
        let (weights, choice, sums) = route(&mut logits.to_vec(), Some(&bias), routing);
        assert_eq!(choice.experts_of(0), [1, 3]);
        let sigmoid = |x: f32| 1.0 / (1.0 + (-x).exp());
        let expected = [1.0, -9.0].map(sigmoid);
        assert!(weights.iter().zip(expected).all(|(w, e)| (w - e).abs() < 1e-6), "{weights:?}");
        assert!((sums[0] - logits.map(sigmoid).iter().sum::<f32>()).abs() < 1e-6);
    }

    /// The groups are those with the largest sum of the best two, not those with the best one.
    #[test]
    fn experts_are_of_the_groups_whose_best_two_have_most() {
        let score = Score::Sigmoid { groups: 3, groups_chosen: 1, scale: 1.0 };
        let routing = Routing { experts: 9, chosen: 2, divided: true, score };
        let logits = [4.0, -6.0, -6.0, 1.0, 2.0, 3.0, 0.0, 0.0, 0.0];
        let (_, choice, _) = route(&mut logits.to_vec(), None, routing);
        assert_eq!(choice.experts_of(0), [4, 5]);
        let score = Score::Sigmoid { groups: 3, groups_chosen: 2, scale: 1.0 };
        let (_, choice, _) = route(&mut logits.to_vec(), None, Routing { score, ..routing });
        assert_eq!(choice.experts_of(0), [4, 5]);
        let with = Routing { score, chosen: 4, ..routing };
        let (_, choice, _) = route(&mut logits.to_vec(), None, with);
        assert_eq!(choice.experts_of(0), [3, 4, 5, 6], "the lowest of equal groups and experts");
    }

    #[test]
    fn counts_beyond_the_mean_are_whole_numbers() {
        let logits = [[0.0, 1.0, 2.0], [2.0, 0.0, 1.0], [1.0, 0.0, 2.0], [5.0, 0.0, 5.0]].concat();
        // 3, 1 and 4 choices of 8: three times each, less 8.
        let (_, choice) = routed(&logits, [3, 2]);
        assert_eq!(excess(&choice), [1.0, -5.0, 4.0]);
        // 1 and 3 of 4: the mean is whole.
        let (_, choice) = routed(&[1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0], [2, 1]);
        assert_eq!(excess(&choice), [-1.0, 1.0]);
    }
}
