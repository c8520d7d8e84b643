//! All paths that this machine has against the definition of the order, bit by bit.

use std::time::{SystemTime, UNIX_EPOCH};

use half::bf16;

use super::convert::{down, flush, up};
use super::*;

/// Numbers of a generator that starts elsewhere each time; the seed stands in every message.
struct Random(u64);

impl Random {
    fn fresh() -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        Self(now.as_nanos() as u64)
    }

    fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_041);
        (self.0 >> 33) as u32
    }

    fn below(&mut self, n: usize) -> usize {
        self.next() as usize % n
    }

    fn number(&mut self, kind: Kind) -> bf16 {
        let (sign, mantissa) = ((self.next() & 1) << 15, self.next() & 127);
        let exponent = match kind {
            Kind::Usual => 120 + self.next() % 16,
            Kind::Tiny => [0, 1 + self.next() % 80][self.below(2)],
            Kind::Any if self.below(40) == 0 => 255,
            Kind::Any => self.next() % 255,
            Kind::Zeros if self.below(2) == 0 => return bf16::from_bits(sign as u16),
            Kind::Zeros => 60 + self.next() % 4,
        };
        // Of the last exponent infinities only, and now and then a NaN.
        let mantissa = if exponent == 255 && self.below(20) > 0 { 0 } else { mantissa };
        bf16::from_bits((sign | exponent << 7 | mantissa) as u16)
    }

    fn numbers(&mut self, n: usize, kind: Kind) -> Vec<bf16> {
        (0..n).map(|_| self.number(kind)).collect()
    }
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Usual,
    /// Denormal numbers, and those whose products are.
    Tiny,
    /// Every exponent, infinities and NaNs.
    Any,
    /// Zeros of both signs among numbers whose products are near the smallest.
    Zeros,
}

const KINDS: [Kind; 4] = [Kind::Usual, Kind::Tiny, Kind::Any, Kind::Zeros];

fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
}

/// The order, written down with the fused multiply-add of the standard library.
fn defined(a: &[bf16], b: &[bf16], c: f32) -> f32 {
    let mut c = c;
    for (a, b) in a.chunks(32).zip(b.chunks(32)) {
        let mut chains = [0.0_f32; 2];
        // Padding counts: −0 and a product of zeros is +0.
        for i in 0..32 {
            let [a, b] = [a, b].map(|x| x.get(i).map_or(0.0, |x| flush(up(*x))));
            chains[i % 2] = flush(a.mul_add(b, chains[i % 2]));
        }
        c = flush(flush(c) + flush(chains[0] + chains[1]));
    }
    c
}

struct Case {
    what: String,
    sizes: (usize, usize, usize),
    turned: (bool, bool),
    strides: (usize, usize, usize),
    a: Vec<bf16>,
    b: Vec<bf16>,
    bias: Vec<bf16>,
    c: Vec<f32>,
}

impl Case {
    fn random(random: &mut Random, round: usize) -> Self {
        let kind = KINDS[round % KINDS.len()];
        let turned = (random.below(2) == 0, random.below(2) == 0);
        let pad = random.below(3);
        let (m, n) = (1 + random.below(75), 1 + random.below(75));
        let k = if random.below(2) == 0 { 1 + random.below(200) } else { 32 * random.below(6) };
        let what = format!("{m} × {k} × {n}, {kind:?}, turned {turned:?}, seed {}", random.0);
        let (wa, wb) = (if turned.0 { m } else { k } + pad, if turned.1 { k } else { n } + pad);
        let (ha, hb) = (if turned.0 { k } else { m }, if turned.1 { n } else { k });
        let c = (0..m * (n + pad)).map(|_| up(random.number(kind)) * 1.01).collect();
        Self {
            what,
            sizes: (m, k, n),
            turned,
            strides: (wa, wb, n + pad),
            a: random.numbers(ha * wa, kind),
            b: random.numbers(hb * wb, kind),
            bias: random.numbers(n, kind),
            c,
        }
    }

    fn views(&self) -> (Mat<'_>, Mat<'_>) {
        let (m, k, n) = self.sizes;
        let view = |data, rows, cols, stride, turned| match turned {
            true => Mat::strided(data, cols, rows, stride).t(),
            false => Mat::strided(data, rows, cols, stride),
        };
        let a = view(&self.a, m, k, self.strides.0, self.turned.0);
        (a, view(&self.b, k, n, self.strides.1, self.turned.1))
    }

    /// Everything that the products give, by one path: set, added, rounded with and without bias,
    /// and rounded into rows.
    fn on(&self, isa: Isa) -> (Vec<f32>, Vec<f32>, [Vec<bf16>; 3]) {
        force(Some(isa));
        let ((a, b), stride) = (self.views(), self.strides.2);
        let b = Packed::new(b);
        let (mut set, mut added) = (self.c.clone(), self.c.clone());
        product_set(&mut set, stride, a, &b);
        add_product(&mut added, stride, a, &b);
        let mut rows = vec![bf16::ONE; self.c.len()];
        product_into(&mut rows, stride, a, &b, None);
        let halves = [product(a, &b, None), product(a, &b, Some(&self.bias)), rows];
        force(None);
        (set, added, halves)
    }

    fn agrees(&self, isa: Isa) {
        let ((m, k, n), stride) = (self.sizes, self.strides.2);
        let (a, b) = self.views();
        let (set, added, [plain, biased, rows]) = self.on(isa);
        let equal = |got: bf16, want: f32| same(up(got), up(down(want)));
        for (i, j) in (0..m).flat_map(|i| (0..stride).map(move |j| (i, j))) {
            let (at, what) = (i * stride + j, format!("{}: ({i}, {j}) on {isa:?}", self.what));
            if j >= n {
                assert!(same(set[at], self.c[at]) && same(added[at], self.c[at]), "{what}");
                assert_eq!(rows[at], bf16::ONE, "{what}");
                continue;
            }
            let row: Vec<_> = (0..k).map(|l| a.at(i, l)).collect();
            let column: Vec<_> = (0..k).map(|l| b.at(l, j)).collect();
            let want = defined(&row, &column, 0.0);
            assert!(same(set[at], want), "{what}: {:e}, not {want:e}", set[at]);
            let (got, want_added) = (added[at], defined(&row, &column, self.c[at]));
            assert!(same(got, want_added), "{what}: {:e} + {want:e} = {got:e}", self.c[at]);
            assert!(equal(plain[i * n + j], want) && equal(rows[at], want), "{what}: rounded");
            assert!(equal(biased[i * n + j], want + up(self.bias[j])), "{what}: biased");
        }
    }
}

#[test]
fn all_paths_give_the_bits_of_the_definition() {
    let mut random = Random::fresh();
    for round in 0..120 {
        let case = Case::random(&mut random, round);
        available().iter().for_each(|isa| case.agrees(*isa));
    }
}

/// Sizes of several blocks of rows, and rows that lie in place.
#[test]
fn large_products_agree_between_paths() {
    let mut random = Random::fresh();
    for (m, k, n) in [(600, 96, 64), (300, 1056, 40)] {
        let case = Case {
            what: String::new(),
            sizes: (m, k, n),
            turned: (false, false),
            strides: (k, n, n),
            a: random.numbers(m * k, Kind::Usual),
            b: random.numbers(k * n, Kind::Usual),
            bias: random.numbers(n, Kind::Usual),
            c: vec![1.5; m * n],
        };
        let want = case.on(Isa::Scalar);
        available().iter().for_each(|isa| assert!(case.on(*isa) == want, "{isa:?}"));
    }
}

/// A thread may flush denormals, or round otherwise, for itself: its products are the same, and its
/// state is what it was.
#[cfg(target_arch = "x86_64")]
#[test]
fn the_state_of_the_thread_neither_matters_nor_changes() {
    let control = || {
        let mut value = 0_u32;
        // SAFETY: reads the control register into a number.
        unsafe { std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut value) };
        value
    };
    let set = |value: u32| {
        // SAFETY: every value tried is a valid one, and the first is put back.
        unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const value) };
    };
    let mut random = Random::fresh();
    let case = Case::random(&mut random, 1);
    let before = control();
    for isa in available() {
        let want = case.on(*isa);
        // Flags of past exceptions are kept too.
        for state in [0x9fc0, 0x1fbf, 0x1f80] {
            set(state);
            let (got, after) = (case.on(*isa), control());
            set(before);
            assert_eq!(after & !0x3f, state & !0x3f, "{isa:?}");
            assert!(got.0.iter().zip(&want.0).all(|(a, b)| same(*a, *b)), "{isa:?}");
        }
    }
}

#[test]
fn mismatched_shapes_are_refused() {
    let refused = |f: fn()| std::panic::catch_unwind(f).is_err();
    assert!(refused(|| _ = Mat::new(&[bf16::ONE; 5], 2, 3)));
    assert!(refused(|| {
        let x = [bf16::ONE; 6];
        product(Mat::new(&x, 2, 3), &Packed::new(Mat::new(&x, 2, 3)), None);
    }));
    assert!(refused(|| {
        let x = [bf16::ONE; 6];
        product_set(&mut [0.0; 3], 2, Mat::new(&x, 2, 3), &Packed::new(Mat::new(&x, 3, 2)));
    }));
}
