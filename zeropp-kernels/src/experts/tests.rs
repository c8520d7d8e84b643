use super::*;
use crate::bf16::convert::{narrow, widen};
use crate::routing::{Routing, Score, route};
use crate::threads::Threads;

/// Tokens, hidden size, inner size.
const SIZES: [usize; 3] = [70, 24, 40];

fn numbers(n: usize, seed: u32) -> Vec<f32> {
    let bits = |i: usize| (i as u32 ^ seed.wrapping_mul(97)).wrapping_mul(2_654_435_761);
    // What bf16 can hold, so that both types begin with the same numbers.
    let value = |i: usize| (bits(i) ^ bits(i) >> 15) as f32 / u32::MAX as f32 - 0.5;
    widen(&narrow(&(0..n).map(value).collect::<Vec<_>>()))
}

/// Inputs, weights of experts and routing of one case.
struct Case {
    x: Vec<f32>,
    dy: Vec<f32>,
    w: Vec<f32>,
    choice: ChosenExperts,
    /// gate, up and down of all experts.
    maps: [Vec<f32>; 3],
}

/// What is compared: y, dx, dw, and the gradients of gate, up and down.
type Results = [Vec<f32>; 6];

impl Case {
    fn new(experts: usize, chosen: usize, logit: impl Fn(usize, usize) -> f32) -> Case {
        let [n, h, f] = SIZES;
        let mut logits: Vec<f32> =
            (0..n * experts).map(|i| logit(i / experts, i % experts)).collect();
        let routing = Routing { experts, chosen, divided: true, score: Score::Softmax };
        let (w, choice, _) = route(&mut logits, None, routing);
        let maps = [1, 2, 3].map(|seed| numbers(experts * h * f, seed));
        Case { x: numbers(n * h, 4), dy: numbers(n * h, 5), w, choice, maps }
    }

    /// Spread, all to the same experts, one without a token.
    fn all() -> Vec<Case> {
        let spread = numbers(SIZES[0] * 8, 9);
        vec![
            Case::new(8, 2, |token, expert| 5.0 * spread[token * 8 + expert]),
            Case::new(5, 3, |_, expert| expert as f32),
            Case::new(4, 1, |token, expert| f32::from(u8::from(expert == token % 3))),
        ]
    }

    /// A loop over tokens and their experts, in double precision.
    fn naive(&self) -> Results {
        let ([n, h, f], k) = (SIZES, self.choice.chosen());
        let wide = |v: &[f32]| v.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
        let [x, dy, w] = [&self.x, &self.dy, &self.w].map(|v| wide(v));
        let maps = self.maps.each_ref().map(|v| wide(v));
        let mut sums = [n * h, n * h, n * k].map(|n| vec![0.0; n]);
        let mut grads = maps.each_ref().map(|map| vec![0.0; map.len()]);
        for (t, i) in (0..n).flat_map(|t| (0..k).map(move |i| (t, i))) {
            let first = self.choice.experts_of(t)[i] as usize * h * f;
            let (x, dy, w) = (&x[t * h..][..h], &dy[t * h..][..h], w[t * k + i]);
            for c in 0..f {
                let into = |map: &[f64]| (0..h).map(|r| x[r] * map[first + r * f + c]).sum::<f64>();
                let (gate, up) = (into(&maps[0]), into(&maps[1]));
                let s = 1.0 / (1.0 + (-gate).exp());
                let inner = gate * s * up;
                let down = |r: usize| first + c * h + r;
                let d: f64 = (0..h).map(|r| dy[r] * maps[2][down(r)]).sum();
                sums[2][t * k + i] += d * inner;
                let (dup, dgate) = (w * d * gate * s, w * d * up * (s + gate * s * (1.0 - s)));
                for r in 0..h {
                    sums[0][t * h + r] += w * inner * maps[2][down(r)];
                    let at = first + r * f + c;
                    sums[1][t * h + r] += dgate * maps[0][at] + dup * maps[1][at];
                    grads[0][at] += x[r] * dgate;
                    grads[1][at] += x[r] * dup;
                    grads[2][down(r)] += w * inner * dy[r];
                }
            }
        }
        let ([y, dx, dw], [gate, up, down]) = (sums, grads);
        [y, dx, dw, gate, up, down].map(|v| v.iter().map(|x| *x as f32).collect())
    }

    fn run<E: Element>(
        &self,
        cast: impl Fn(&[f32]) -> Vec<E>,
        factors: [[Vec<E::Factor<'_>>; 3]; 2],
    ) -> Results {
        let [_, h, f] = SIZES;
        let [[gate, up, down], turned] = &factors;
        let (x, dy, choice) = (cast(&self.x), cast(&self.dy), &self.choice);
        let routed = WeightedChoice { choice, weights: &self.w };
        let made = forward(&x, routed, gate, up, Some(down), [h, f]);
        let again = forward(&x, routed, gate, up, None, [h, f]);
        assert!(again.y.is_empty() && up_of(&again.gate) == up_of(&made.gate));
        let [gate, up, down] = turned;
        let back = backward(&dy, routed, [&made.gate, &made.up], gate, up, down, [h, f]);
        // Onto what is there already.
        let mut grads = self.maps.each_ref().map(|map| vec![1.0; map.len()]);
        let rows = [&back.dgate, &back.dup].map(|rows| Rows::OfRows(&rows[..]));
        let (inner, tokens) = (Rows::OfRows(&back.inner[..]), Rows::OfTokens(&dy[..]));
        let [gate, up, down] = grads.each_mut().map(|grad| &mut grad[..]);
        add_weight_gradients([gate, up], Rows::OfTokens(&x), rows, choice, [h, f]);
        add_weight_gradients([down], inner, [tokens], choice, [f, h]);
        let [gate, up, down] = grads.map(|grad| grad.iter().map(|x| x - 1.0).collect());
        [up_of(&made.y), up_of(&back.dx), back.dw, gate, up, down]
    }

    fn floats(&self) -> Results {
        let [_, h, f] = SIZES;
        let [gate, up, down] = &self.maps;
        let both = [false, true].map(|turned| {
            let of = |map, sizes| factors(map, sizes, turned);
            [of(gate, [h, f]), of(up, [h, f]), of(down, [f, h])]
        });
        self.run::<f32>(<[f32]>::to_vec, both)
    }

    fn halves(&self) -> Results {
        let [_, h, f] = SIZES;
        let sizes = [[h, f], [h, f], [f, h]];
        let packed = [false, true].map(|turned| {
            [0, 1, 2].map(|i| {
                let [r, c] = sizes[i];
                let pack = |m: &[f32]| {
                    let m = narrow(m);
                    let m = Mat::new(&m, r, c);
                    Packed::new(if turned { m.t() } else { m })
                };
                self.maps[i].chunks(r * c).map(pack).collect::<Vec<_>>()
            })
        });
        let factors = packed.each_ref().map(|side| side.each_ref().map(|all| all.iter().collect()));
        self.run::<bf16>(narrow, factors)
    }
}

fn factors(map: &[f32], [r, c]: [usize; 2], turned: bool) -> Vec<MatRef<'_>> {
    let factor = |m| {
        let m = MatRef::new(m, r, c);
        if turned { m.t() } else { m }
    };
    map.chunks(r * c).map(factor).collect()
}

fn up_of<E: Number>(v: &[E]) -> Vec<f32> {
    v.iter().map(|x| x.up()).collect()
}

fn assert_near(found: &Results, wanted: &Results, tolerance: f32) {
    for (i, (found, wanted)) in found.iter().zip(wanted).enumerate() {
        let largest = wanted.iter().fold(0f32, |most, x| most.max(x.abs()));
        assert_eq!(found.len(), wanted.len());
        for (found, wanted) in found.iter().zip(wanted) {
            let off = (found - wanted).abs();
            assert!(off <= tolerance * largest, "{i}: {found} instead of {wanted} of {largest}");
        }
    }
}

#[test]
fn experts_agree_with_a_loop_over_tokens() {
    for case in Case::all() {
        let wanted = case.naive();
        assert_near(&case.floats(), &wanted, 1e-5);
        // Several results on the way are rounded to 8 bits.
        assert_near(&case.halves(), &wanted, 2e-2);
    }
}

#[test]
fn threads_change_no_bit_of_experts() {
    for case in Case::all() {
        let alone = [case.floats(), case.halves()];
        for count in [2, 3] {
            let _installed = Threads::new(count, false).install();
            assert!([case.floats(), case.halves()] == alone, "{count} threads");
        }
    }
}

#[test]
fn bf16_experts_have_the_same_bits_on_every_path() {
    let case = Case::all().remove(0);
    let paths = halves::available();
    let of = |isa| {
        halves::force(Some(isa));
        let _installed = Threads::new(2, false).install();
        let found = case.halves();
        halves::force(None);
        found
    };
    let first = of(Isa::Scalar);
    for isa in paths {
        assert!(of(*isa) == first, "{isa:?}");
    }
}
