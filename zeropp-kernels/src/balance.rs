//! Losses of a router: how evenly it spreads tokens over experts, and how large its logits are.
//!
//! They are of one micro-batch and one layer, so that no message and no sum crosses ranks.

use crate::routing::{ChosenExperts, Score};

/// The weights of a router's losses, and the tokens that balance is counted over.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouterLosses {
    /// Weight of the balance loss: E·Σ f·P over the E experts, which is 1 where all are alike. f is
    /// the share of choices that an expert has, P the mean of its scores.
    pub balance: f32,
    /// Weight of the z-loss: the mean over tokens of the squared log-sum-exp of logits.
    pub z: f32,
    /// Tokens of a group; the balance loss is the mean of that of all groups. Divides the tokens.
    pub group: usize,
}

/// The losses of one micro-batch, without their weights, and how its choices are spread.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RouterFigures {
    /// E·Σ f·P, the mean over groups.
    pub balance: f64,
    /// The mean squared log-sum-exp of logits; 0 where scores are sigmoids.
    pub z: f64,
    /// Entropy of the experts' mean scores, in nats: ln E where all are alike.
    pub entropy: f64,
    /// Choices of each expert.
    pub choices: Vec<u32>,
}

/// The figures of `scores: [n, E]`, of which [`route`](crate::routing::route) made the choice and
/// `sums: [n]`, with balance counted over groups of so many tokens. Sums are in token order, in
/// double precision. Sigmoids count as shares of their sum.
///
/// # Panics
/// Panics if sizes do not match.
pub fn figures(
    [scores, sums]: [&[f32]; 2],
    score: Score,
    choice: &ChosenExperts,
    group: usize,
) -> RouterFigures {
    let (n, all) = (choice.tokens(), choice.experts());
    assert_eq!((scores.len(), sums.len(), n % group), (n * all, n, 0));
    let mut mean = vec![0.0; all];
    let mut balance = 0.0;
    for (at, scores) in scores.chunks(group * all).enumerate() {
        let mut of_group = vec![0.0; all];
        for (scores, of) in scores.chunks(all).zip(&sums[at * group..]) {
            let whole = if score == Score::Softmax { 1.0 } else { f64::from(*of) };
            let shares = scores.iter().map(|score| f64::from(*score) / whole);
            of_group.iter_mut().zip(shares).for_each(|(sum, share)| *sum += share);
        }
        for (expert, share) in shares(choice, at * group..(at + 1) * group).iter().enumerate() {
            balance += share * of_group[expert] * all as f64 / n as f64;
            mean[expert] += of_group[expert] / n as f64;
        }
    }
    let choices = (0..all).map(|expert| choice.rows_of(expert).len() as u32).collect();
    let z = match score {
        Score::Softmax => sums.iter().map(|sum| f64::from(*sum).powi(2)).sum::<f64>() / n as f64,
        Score::Sigmoid { .. } => 0.0,
    };
    let entropy = -mean.iter().filter(|p| **p > 0.0).map(|p| p * p.ln()).sum::<f64>();
    RouterFigures { balance, z, entropy, choices }
}

/// The share of these tokens' choices that each expert has.
fn shares(choice: &ChosenExperts, tokens: std::ops::Range<usize>) -> Vec<f64> {
    let mut counts = vec![0_u32; choice.experts()];
    let n = tokens.len() * choice.chosen();
    for token in tokens {
        choice.experts_of(token).iter().for_each(|expert| counts[*expert as usize] += 1);
    }
    counts.iter().map(|count| f64::from(*count) / n as f64).collect()
}

/// Adds to the gradient of the logits, `[n, E]`, that of the losses times their weights and
/// `scale`. How the choice is spread is no function of the logits, as elsewhere. With sigmoids
/// there is no z-loss.
///
/// # Panics
/// Panics if sizes do not match.
pub fn add_gradient(
    dlogits: &mut [f32],
    losses: RouterLosses,
    score: Score,
    scale: f32,
    [scores, sums]: [&[f32]; 2],
    choice: &ChosenExperts,
) {
    let (n, all) = (choice.tokens(), choice.experts());
    assert_eq!((dlogits.len(), scores.len(), sums.len()), (n * all, n * all, n));
    let (width, group) = (all, losses.group);
    let groups = dlogits.chunks_mut(group * width).zip(scores.chunks(group * width));
    for (at, (dlogits, scores)) in groups.enumerate() {
        let tokens = at * group..(at + 1) * group;
        let weight = f64::from(losses.balance * scale) * all as f64 / n as f64;
        let slopes: Vec<f32> =
            shares(choice, tokens.clone()).iter().map(|share| (weight * share) as f32).collect();
        let rows = dlogits.chunks_mut(width).zip(scores.chunks(width));
        for ((dlogits, scores), sum) in rows.zip(&sums[tokens]) {
            if score != Score::Softmax {
                let mean =
                    scores.iter().zip(&slopes).map(|(s, slope)| s * slope).sum::<f32>() / sum;
                for ((d, score), slope) in dlogits.iter_mut().zip(scores).zip(&slopes) {
                    *d += score * (1.0 - score) * (slope - mean) / sum;
                }
                continue;
            }
            let mean: f32 = scores.iter().zip(&slopes).map(|(score, slope)| score * slope).sum();
            let of_sum = 2.0 * losses.z * scale * sum / n as f32;
            for ((d, score), slope) in dlogits.iter_mut().zip(scores).zip(&slopes) {
                *d += score * (slope - mean + of_sum);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::routing::{Routing, route};

    const ROUTING: Routing =
        Routing { experts: 4, chosen: 2, divided: true, score: Score::Softmax };
    const SIGMOID: Score = Score::Sigmoid { groups: 1, groups_chosen: 1, scale: 1.0 };

    fn logits(n: usize) -> Vec<f32> {
        let value = |i: usize| (i as u32).wrapping_mul(2_654_435_761) as f32 / 1e9 - 2.0;
        (0..n * 4).map(value).collect()
    }

    #[test]
    fn the_balance_loss_is_one_where_experts_are_alike_and_their_number_where_one_has_all() {
        // Each pair of experts has all scores of one token.
        let mut even = [9.0, 9.0, -90.0, -90.0, -90.0, -90.0, 9.0, 9.0];
        let (_, choice, sums) = route(&mut even, None, ROUTING);
        let found = figures([&even, &sums], Score::Softmax, &choice, 2);
        assert!((found.balance - 1.0).abs() < 1e-6 && (found.entropy - 4f64.ln()).abs() < 1e-6);
        assert_eq!(found.choices, [1, 1, 1, 1]);
        // Of each token alone, half of the experts have all.
        assert!((figures([&even, &sums], Score::Softmax, &choice, 1).balance - 2.0).abs() < 1e-6);
        assert!((found.z - f64::from(9.0 + 2f32.ln()).powi(2)).abs() < 1e-3);
        let mut uneven = [9.0, -90.0, -90.0, -90.0];
        let routing = Routing { chosen: 1, ..ROUTING };
        let (_, choice, sums) = route(&mut uneven, None, routing);
        let found = figures([&uneven, &sums], Score::Softmax, &choice, 1);
        assert!((found.balance - 4.0).abs() < 1e-6);
    }

    /// By differences in double precision, with the choice as it is.
    #[test]
    fn the_gradient_of_the_losses_is_their_slope() {
        let n = 6;
        let logits = logits(n);
        for (group, score) in [(n, Score::Softmax), (2, Score::Softmax), (2, SIGMOID)] {
            let is_softmax = score == Score::Softmax;
            let losses = RouterLosses { balance: 0.3, z: 0.02, group };
            let mut scores = logits.clone();
            let (_, choice, sums) = route(&mut scores, None, Routing { score, ..ROUTING });
            let mut found = vec![0.5; n * 4];
            add_gradient(&mut found, losses, score, 2.0, [&scores, &sums], &choice);
            let of = |logits: &[f64]| {
                let mut total = 0.0;
                for (token, row) in logits.chunks(4).enumerate() {
                    let first = token / group * group;
                    let shares = shares(&choice, first..first + group);
                    let value = |x: &f64| match is_softmax {
                        true => x.exp(),
                        false => 1.0 / (1.0 + (-x).exp()),
                    };
                    let sum: f64 = row.iter().map(value).sum();
                    let p = row.iter().zip(&shares).map(|(x, share)| share * value(x) / sum);
                    total += 0.3 * 4.0 * p.sum::<f64>() / n as f64;
                    if is_softmax {
                        total += 0.02 * sum.ln().powi(2) / n as f64;
                    }
                }
                2.0 * total
            };
            for (i, found) in found.iter().enumerate() {
                let moved = |by: f64| {
                    let mut moved: Vec<f64> = logits.iter().map(|x| f64::from(*x)).collect();
                    moved[i] += by;
                    of(&moved)
                };
                let want = 0.5 + (moved(1e-5) - moved(-1e-5)) / 2e-5;
                assert!((f64::from(*found) - want).abs() < 1e-6, "{i}: {found} and {want}");
            }
        }
    }
}
