//! Attention of a few new tokens to all before them, whose keys and values were kept.

use super::Dims;
use super::windowed::first_key;

/// Lanes of a dot product.
const LANES: usize = 8;

/// softmax(q·kᵀ/√d, causal)·v for the queries in `qkv: [s, (H + 2G)·d]`, which are the last s of
/// the tokens whose keys and values, `[T, G·d]` each, are `keys` and `values`; the result is
/// `[s, H·d]`. A query sees the last `window` of them, itself included, if there is one. `dims.b`
/// is not looked at.
///
/// # Panics
/// Panics if there are fewer keys or values than queries.
pub fn attention(
    qkv: &[f32],
    keys: &[f32],
    values: &[f32],
    dims: Dims,
    window: Option<usize>,
) -> Vec<f32> {
    let Dims { s, heads, groups, d, .. } = dims;
    let tokens = keys.len() / (groups * d);
    assert!(tokens >= s && values.len() == keys.len(), "{tokens} keys for {s} queries");
    let mut out = vec![0.0; s * heads * d];
    let mut scores = vec![0.0; tokens];
    for (i, (row, out)) in
        qkv.chunks_exact(dims.width()).zip(out.chunks_exact_mut(heads * d)).enumerate()
    {
        let end = tokens - s + i + 1;
        let first = window.map_or(0, |window| first_key(end - 1, window));
        for (head, out) in out.chunks_exact_mut(d).enumerate() {
            let q = &row[dims.query(head)..][..d];
            let column = head / (heads / groups) * d;
            let of =
                |t: usize| (first + t) * groups * d + column..(first + t) * groups * d + column + d;
            let scores = &mut scores[..end - first];
            for (t, score) in scores.iter_mut().enumerate() {
                *score = dot(q, &keys[of(t)]) * dims.scale();
            }
            let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            scores.iter_mut().for_each(|score| *score = (*score - largest).exp());
            let sum: f32 = scores.iter().sum();
            for (t, score) in scores.iter().enumerate() {
                let weight = score / sum;
                let v = &values[of(t)];
                out.iter_mut().zip(v).for_each(|(out, v)| *out += weight * v);
            }
        }
    }
    out
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0f32; LANES];
    let (a, b) = (a.chunks(LANES), b.chunks(LANES));
    for (a, b) in a.zip(b) {
        sums.iter_mut().zip(a.iter().zip(b)).for_each(|(sum, (a, b))| *sum += a * b);
    }
    sums.iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::kept;

    /// However the tokens are cut, attention to the past is that of the whole.
    #[test]
    fn it_is_the_causal_attention_of_the_whole() {
        for (heads, groups, d) in [(2, 2, 4), (4, 2, 10), (3, 1, 8)] {
            let whole = Dims { b: 1, s: 9, heads, groups, d, place: 0 };
            let width = whole.width();
            let number = |i: usize| ((i * 7919 % 1009) as f32 / 300.0 - 1.6) * 0.7;
            let qkv: Vec<f32> = (0..9 * width).map(number).collect();
            let expected = kept::attention(&qkv, whole, None);
            for cut in [vec![9], vec![4, 5], vec![1; 9], vec![6, 1, 2]] {
                let (mut keys, mut values, mut out) = (vec![], vec![], vec![]);
                let mut first = 0;
                for s in cut {
                    let new = &qkv[first * width..(first + s) * width];
                    for row in new.chunks_exact(width) {
                        keys.extend(&row[heads * d..(heads + groups) * d]);
                        values.extend(&row[(heads + groups) * d..]);
                    }
                    out.extend(attention(new, &keys, &values, Dims { s, ..whole }, None));
                    first += s;
                }
                let apart = |(a, b): (&f32, &f32)| (a - b).abs();
                let worst = out.iter().zip(&expected).map(apart).fold(0.0, f32::max);
                assert!(out.len() == expected.len() && worst < 1e-5, "{worst:e}");
            }
        }
    }
}
