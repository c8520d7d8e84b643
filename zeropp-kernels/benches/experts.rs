//! CPU time of experts beside that of a dense MLP of the same active size, F, B and W of a
//! micro-batch on one core, in rounds side by side: `cargo bench -p zeropp-kernels --bench experts
//! [-- ROUNDS [TOKENS]]`. Weights are packed before, as once a unit.

use half::bf16;
use rustix::time::{ClockId, clock_gettime};
use zeropp_kernels::activation::{swiglu, swiglu_backward};
use zeropp_kernels::bf16::convert::narrow;
use zeropp_kernels::bf16::{self as halves, Mat, Packed};
use zeropp_kernels::experts::{
    Element, Rows, WeightedChoice, add_weight_gradients, backward, forward,
};
use zeropp_kernels::gemm::{self, MatRef};
use zeropp_kernels::routing::{Routing, Score, route};
use zeropp_kernels::tokens::blocks;

#[global_allocator]
static ALLOCATOR: zeropp_allocator::Allocator =
    zeropp_allocator::Allocator::new(|_| std::process::abort());

const HIDDEN: usize = 512;
/// The inner size of what a token is multiplied with.
const ACTIVE: usize = 2048;

/// Seconds of this thread's CPU.
fn seconds() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

fn timed(f: impl FnOnce()) -> f64 {
    let start = seconds();
    f();
    seconds() - start
}

fn numbers(n: usize, seed: u32) -> Vec<f32> {
    let bits = |i: usize| (i as u32 ^ seed.wrapping_mul(97)).wrapping_mul(2_654_435_761);
    (0..n).map(|i| (bits(i) ^ bits(i) >> 15) as f32 / u32::MAX as f32 - 0.5).collect()
}

/// What a benchmark needs of elements beside what experts do.
trait Bench: Element {
    type Kept;
    fn rounded(values: Vec<f32>) -> Vec<Self>;
    fn kept(matrix: Vec<Self>, sizes: [usize; 2], turned: bool) -> Self::Kept;
    fn factor(kept: &Self::Kept) -> Self::Factor<'_>;
    fn fresh(rows: usize, a: &[Self], b: Self::Factor<'_>) -> Vec<Self>;
    fn add_by_blocks(dw: &mut [f32], left: &[Self], right: &[Self], sizes: [usize; 3]);
}

impl Bench for f32 {
    type Kept = (Vec<f32>, [usize; 2], bool);
    fn rounded(values: Vec<f32>) -> Vec<f32> {
        values
    }
    fn kept(matrix: Vec<f32>, sizes: [usize; 2], turned: bool) -> Self::Kept {
        (matrix, sizes, turned)
    }
    fn factor((matrix, [rows, columns], turned): &Self::Kept) -> MatRef<'_> {
        let m = MatRef::new(matrix, *rows, *columns);
        if *turned { m.t() } else { m }
    }
    fn fresh(rows: usize, a: &[f32], b: MatRef<'_>) -> Vec<f32> {
        gemm::product(1.0, MatRef::new(a, rows, a.len() / rows), b)
    }
    fn add_by_blocks(dw: &mut [f32], left: &[f32], right: &[f32], [n, a, b]: [usize; 3]) {
        let (left, right) = (MatRef::new(left, n, a), MatRef::new(right, n, b));
        gemm::add_by_blocks(dw, left, right, blocks(n).rev());
    }
}

impl Bench for bf16 {
    type Kept = Packed;
    fn rounded(values: Vec<f32>) -> Vec<bf16> {
        narrow(&values)
    }
    fn kept(matrix: Vec<bf16>, [rows, columns]: [usize; 2], turned: bool) -> Packed {
        let m = Mat::new(&matrix, rows, columns);
        Packed::new(if turned { m.t() } else { m })
    }
    fn factor(kept: &Packed) -> &Packed {
        kept
    }
    fn fresh(rows: usize, a: &[bf16], b: &Packed) -> Vec<bf16> {
        halves::product(Mat::new(a, rows, a.len() / rows), b, None)
    }
    fn add_by_blocks(dw: &mut [f32], left: &[bf16], right: &[bf16], [n, a, b]: [usize; 3]) {
        let (left, right) = (Mat::new(left, n, a), Mat::new(right, n, b));
        halves::add_by_blocks(dw, left, right, blocks(n).rev());
    }
}

/// Gate, up and down of some MLPs of inner size f: for F, and turned for B.
struct Maps<E: Bench> {
    forward: [Vec<E::Kept>; 3],
    backward: [Vec<E::Kept>; 3],
    gradients: [Vec<f32>; 3],
    f: usize,
}

impl<E: Bench> Maps<E> {
    fn new(count: usize, f: usize) -> Maps<E> {
        let sizes = [[HIDDEN, f], [HIDDEN, f], [f, HIDDEN]];
        let of = |turned| {
            sizes.map(|sizes| {
                let one = |i| {
                    let values = E::rounded(numbers(sizes[0] * sizes[1], i as u32));
                    E::kept(values, sizes, turned)
                };
                (0..count).map(one).collect()
            })
        };
        let gradients = sizes.map(|[a, b]| vec![0.0; count * a * b]);
        Maps { forward: of(false), backward: of(true), gradients, f }
    }

    /// Seconds of F, B and W as one dense MLP.
    fn dense(&mut self, x: &[E], dy: &[E], n: usize) -> [f64; 3] {
        let (h, f) = (HIDDEN, self.f);
        let [mut gate, mut up, mut y, mut inner] = [(); 4].map(|()| Vec::new());
        let [g, u, d] = self.forward.each_ref().map(|maps| E::factor(&maps[0]));
        let of_f = timed(|| {
            (gate, up) = (E::fresh(n, x, g), E::fresh(n, x, u));
            inner = swiglu(&gate, &up);
            y = E::fresh(n, &inner, d);
        });
        let [g, u, d] = self.backward.each_ref().map(|maps| E::factor(&maps[0]));
        let [mut dup, mut dgate, mut dx] = [(); 3].map(|()| Vec::new());
        let of_b = timed(|| {
            dup = E::fresh(n, dy, d);
            dgate = swiglu_backward(&mut dup, &gate, &up);
            dx = E::fresh(n, &dgate, g);
            let more = E::fresh(n, &dup, u);
            dx.iter_mut().zip(&more).for_each(|(x, more)| *x = E::down(x.up() + more.up()));
        });
        let [dg, du, dd] = &mut self.gradients;
        let of_w = timed(|| {
            E::add_by_blocks(dg, x, &dgate, [n, h, f]);
            E::add_by_blocks(du, x, &dup, [n, h, f]);
            E::add_by_blocks(dd, &inner, dy, [n, f, h]);
        });
        std::hint::black_box((y, dx));
        [of_f, of_b, of_w]
    }

    /// The same of experts, k of which each token goes to, with the choice.
    fn experts(&mut self, x: &[E], dy: &[E], logits: &[f32], k: usize) -> [f64; 3] {
        let (h, f, experts) = (HIDDEN, self.f, self.forward[0].len());
        let routing = Routing { experts, chosen: k, divided: true, score: Score::Softmax };
        let [g, u, d] = self.forward.each_ref().map(|maps| factors::<E>(maps));
        let mut made = None;
        let of_f = timed(|| {
            let (w, choice, _) = route(&mut logits.to_vec(), None, routing);
            let routed = WeightedChoice { choice: &choice, weights: &w };
            let forward = forward(x, routed, &g, &u, Some(&d), [h, f]);
            made = Some((forward, w, choice));
        });
        let (forward, w, choice) = made.expect("made above");
        let [g, u, d] = self.backward.each_ref().map(|maps| factors::<E>(maps));
        let mut made = None;
        let of_b = timed(|| {
            let routed = WeightedChoice { choice: &choice, weights: &w };
            made = Some(backward(dy, routed, [&forward.gate, &forward.up], &g, &u, &d, [h, f]));
        });
        let back = made.expect("made above");
        let [dg, du, dd] = &mut self.gradients;
        let of_w = timed(|| {
            let rows = [&back.dgate, &back.dup].map(|rows| Rows::OfRows(&rows[..]));
            add_weight_gradients([dg, du], Rows::OfTokens(x), rows, &choice, [h, f]);
            let (inner, dy) = (Rows::OfRows(&back.inner[..]), Rows::OfTokens(dy));
            add_weight_gradients([dd], inner, [dy], &choice, [f, h]);
        });
        std::hint::black_box((forward.y, back.dx));
        [of_f, of_b, of_w]
    }
}

fn factors<E: Bench>(kept: &[E::Kept]) -> Vec<E::Factor<'_>> {
    kept.iter().map(E::factor).collect()
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}

fn compare<E: Bench>(what: &str, [experts, k]: [usize; 2], [rounds, n]: [usize; 2]) {
    let [x, dy] = [4, 5].map(|seed| E::rounded(numbers(n * HIDDEN, seed)));
    // Some experts get more tokens than others, as in training.
    let wide = numbers(n * experts, 6).into_iter().enumerate();
    let logits: Vec<f32> = wide.map(|(i, x)| 3.0 * x + (i % experts % 4) as f32 / 4.0).collect();
    let mut dense = Maps::<E>::new(1, ACTIVE);
    let mut sparse = Maps::<E>::new(experts, ACTIVE / k);
    let mut ratios: [Vec<f64>; 4] = Default::default();
    let mut blocks = Vec::new();
    let mut times: [Vec<f64>; 2] = Default::default();
    for round in 0..=rounds {
        let one = dense.dense(&x, &dy, n);
        let other = sparse.experts(&x, &dy, &logits, k);
        if round == 0 {
            continue;
        }
        (0..3).for_each(|i| ratios[i].push(one[i] / other[i]));
        let [one, other] = [one, other].map(|of| of.iter().sum::<f64>());
        times[0].push(one * 1e3);
        times[1].push(other * 1e3);
        ratios[3].push(one / other);
        // Attention, a quarter of a block's FLOP, takes as long in both.
        blocks.push((one / 0.75) / (one / 0.75 - one + other));
    }
    let [f, b, w, all] = ratios.map(median);
    let (block, [dense, own]) = (median(blocks), times.map(median));
    println!(
        "{what} {experts:>3} experts, {k} of {}: dense over experts F {f:.2} B {b:.2} W {w:.2}, \
         MLP {all:.2}, block {block:.2}; {dense:.0} and {own:.0} ms",
        ACTIVE / k
    );
}

fn main() {
    let given: Vec<usize> = std::env::args().filter_map(|arg| arg.parse().ok()).collect();
    let rounds = given.first().copied().unwrap_or(15);
    let tokens = given.get(1).copied().unwrap_or(2048);
    for shape in [[8, 2], [64, 8], [128, 8]] {
        compare::<f32>("fp32", shape, [rounds, tokens]);
        compare::<bf16>("bf16", shape, [rounds, tokens]);
    }
}
