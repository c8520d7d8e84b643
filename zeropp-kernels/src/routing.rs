//! Which experts each token goes to: scores, the choice, the weights of what is chosen, and the
//! gradient of the scores.
//!
//! Of n tokens each goes to k of E experts, so that there are n·k rows, however they spread: what
//! is kept of a choice has one size.

use std::ops::Range;

use crate::GRAIN;
use crate::math::{exp, ln};
use crate::threads::{self, piece};

/// How scores become a choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Routing {
    /// Experts E.
    pub experts: usize,
    /// Experts k of a token.
    pub chosen: usize,
    /// Whether the weights of a token's experts are divided by their sum.
    pub divided: bool,
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

    /// The rows of a token, in the order of its experts.
    pub(crate) fn places_of(&self, token: usize) -> &[u32] {
        &self.places[token * self.chosen..][..self.chosen]
    }

    /// Of some rows, where they are among all tokens' experts, `[n, k]`.
    pub(crate) fn origins(&self, rows: Range<usize>) -> &[u32] {
        &self.rows[rows]
    }

    /// What is given for each row, for each expert of each token, `[n, k]`.
    pub(crate) fn by_token(&self, of_rows: &[f32]) -> Vec<f32> {
        self.places.iter().map(|place| of_rows[*place as usize]).collect()
    }

    /// The parts of `data`, `width` elements a row, that are the experts' rows.
    pub(crate) fn split<'a, T>(
        &'a self,
        mut data: &'a mut [T],
        width: usize,
    ) -> impl Iterator<Item = &'a mut [T]> {
        (0..self.experts()).map(move |expert| {
            let n = self.rows_of(expert).len() * width;
            let (part, rest) = std::mem::take(&mut data).split_at_mut(n);
            data = rest;
            part
        })
    }
}

/// The weights `[n, k]`, the choice and the log-sum-exp of each token's logits, `[n]`, by
/// `logits: [n, E]`, which become the scores: their softmax over all experts. A token goes to the k
/// experts with the largest scores; of equal ones to the lower index, and `total_cmp` orders what
/// is not a number.
///
/// # Panics
/// Panics if there are fewer experts than are chosen, or logits are no whole rows.
pub fn route(logits: &mut [f32], routing: Routing) -> (Vec<f32>, ChosenExperts, Vec<f32>) {
    let Routing { experts: all, chosen: k, divided } = routing;
    assert!((1..=all).contains(&k) && logits.len().is_multiple_of(all), "{k} of {all} experts");
    let n = logits.len() / all;
    let (mut weights, mut experts) = (vec![0.0; n * k], vec![0; n * k]);
    let mut sums = vec![0.0; n];
    let tokens = piece(n, 1, GRAIN.div_ceil(16 * all));
    let outputs = weights.chunks_mut(tokens * k).zip(experts.chunks_mut(tokens * k));
    let inputs = logits.chunks_mut(tokens * all).zip(sums.chunks_mut(tokens));
    threads::each(inputs.zip(outputs), |((scores, sums), (weights, experts))| {
        let mut order = Vec::with_capacity(all);
        let outputs = weights.chunks_mut(k).zip(experts.chunks_mut(k));
        let inputs = scores.chunks_mut(all).zip(sums);
        for ((scores, sum), (weights, experts)) in inputs.zip(outputs) {
            *sum = softmax(scores);
            order.clear();
            order.extend(0..all as u32);
            // What is no number has either sign: here it has one, before all numbers.
            let score = |expert: u32| match scores[expert as usize] {
                score if score.is_nan() => f32::NAN,
                score => score,
            };
            if k < all {
                order.select_nth_unstable_by(k - 1, |a, b| {
                    score(*b).total_cmp(&score(*a)).then(a.cmp(b))
                });
            }
            experts.copy_from_slice(&order[..k]);
            experts.sort_unstable();
            weights.iter_mut().zip(&*experts).for_each(|(w, expert)| *w = score(*expert));
            if divided {
                let sum: f32 = weights.iter().sum();
                weights.iter_mut().for_each(|w| *w /= sum);
            }
        }
    });
    (weights, ChosenExperts::new(experts, routing), sums)
}

/// Makes logits scores; the logarithm of their sum of exponentials.
fn softmax(x: &mut [f32]) -> f32 {
    let largest = x.iter().fold(f32::NEG_INFINITY, |most, x| most.max(*x));
    let mut sum = 0.0;
    for x in &mut *x {
        *x = exp(*x - largest);
        sum += *x;
    }
    x.iter_mut().for_each(|x| *x /= sum);
    largest + ln(sum)
}

/// The gradient of the logits, `[n, E]`, by that of the weights, `[n, k]`. The scores are those of
/// [`route`]; where weights were divided, they are the softmax over the chosen experts alone, and
/// no scores are needed.
///
/// # Panics
/// Panics if sizes do not match.
pub fn route_backward(
    dweights: &[f32],
    weights: &[f32],
    scores: Option<&[f32]>,
    choice: &ChosenExperts,
) -> Vec<f32> {
    let (all, k) = (choice.experts(), choice.chosen());
    assert_eq!((dweights.len(), weights.len()), (choice.tokens() * k, choice.tokens() * k));
    assert!(scores.is_none_or(|scores| scores.len() == choice.tokens() * all));
    let mut dlogits = vec![0.0; choice.tokens() * all];
    for (token, dlogits) in dlogits.chunks_mut(all).enumerate() {
        let [dw, w] = [dweights, weights].map(|of| &of[token * k..][..k]);
        let mean: f32 = dw.iter().zip(w).map(|(dw, w)| dw * w).sum();
        if let Some(scores) = scores {
            let scores = &scores[token * all..][..all];
            dlogits.iter_mut().zip(scores).for_each(|(d, score)| *d = -score * mean);
        }
        for ((expert, dw), w) in choice.experts_of(token).iter().zip(dw).zip(w) {
            dlogits[*expert as usize] = w * (dw - mean);
        }
    }
    dlogits
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::threads::Threads;

    fn routed(logits: &[f32], [experts, chosen]: [usize; 2]) -> (Vec<f32>, ChosenExperts) {
        let routing = Routing { experts, chosen, divided: true };
        let (weights, choice, _) = route(&mut logits.to_vec(), routing);
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
            for (i, place) in choice.places_of(token).iter().enumerate() {
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

    /// By differences in double precision.
    #[test]
    fn the_gradient_of_logits_is_that_of_the_weights() {
        for divided in [false, true] {
            let routing = Routing { experts: 5, chosen: 3, divided };
            let logits = [0.3, -1.0, 0.9, 0.1, 0.5];
            let dweights = [0.7, -0.2, 1.5];
            let mut scores = logits.map(|x: f64| x as f32);
            let (weights, choice, _) = route(&mut scores, routing);
            let kept = (!divided).then_some(&scores[..]);
            let found = route_backward(&dweights, &weights, kept, &choice);
            let of = |logits: [f64; 5]| {
                let exps = logits.map(f64::exp);
                let chosen = choice.experts_of(0).iter().map(|expert| exps[*expert as usize]);
                let sum: f64 = if divided { chosen.clone().sum() } else { exps.iter().sum() };
                chosen.zip(dweights).map(|(x, d)| x / sum * f64::from(d)).sum::<f64>()
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
}
