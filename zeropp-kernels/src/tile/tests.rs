use super::*;

fn values(n: usize, seed: u32) -> Vec<f32> {
    let hash = |i: usize| (i as u32 ^ seed).wrapping_mul(2_654_435_761).rotate_left(13);
    (0..n).map(|i| hash(i) as f32 / u32::MAX as f32 - 0.5).collect()
}

/// Those that this CPU has, the portable ones first.
fn all() -> Vec<&'static Kernels> {
    let mut all = vec![&PORTABLE, kernels()];
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        all.push(&x86::NARROW);
    }
    all
}

/// Any number of rows and terms, both ways that rows lie, set or added: within rounding of the
/// definition by plain arithmetic, and to one result by fused multiply-adds of any width.
#[test]
fn every_kernel_agrees_with_the_definition() {
    let a = values(RUN * ROW, 1);
    let b = values(RUN * PANEL, 2);
    for (rows, terms) in [(1, 0), (1, 1), (2, 17), (13, 64), (14, 256), (29, 100)] {
        for (left, add) in [(Left::Plain, false), (Left::Transposed, true)] {
            let x = |i: usize, t: usize| match left {
                Left::Plain => a[i * ROW + t],
                Left::Transposed => a[t * ROW + i],
            };
            let old = values(rows * (PANEL + 5), 3);
            let mut results = all().into_iter().map(|kernels| {
                let mut c = old.clone();
                let tile = Tile { c: &mut c, stride: PANEL + 5, rows, add, scale: 0.5 };
                // SAFETY: `all` has asked for the instructions.
                unsafe { multiply_by(kernels, tile, terms, &a, left, &b) };
                for (i, (c, old)) in c.iter().zip(&old).enumerate() {
                    let (i, j) = (i / (PANEL + 5), i % (PANEL + 5));
                    let term = |t| f64::from(x(i, t)) * f64::from(b[t * PANEL + j]);
                    let want = match j {
                        PANEL.. => f64::from(*old),
                        _ if add => f64::from(*old) + 0.5 * (0..terms).map(term).sum::<f64>(),
                        _ => 0.5 * (0..terms).map(term).sum::<f64>(),
                    };
                    assert!((f64::from(*c) - want).abs() < 1e-5, "{rows} {terms} {i} {j}");
                }
                c.iter().map(|c| c.to_bits()).collect::<Vec<_>>()
            });
            let _portable = results.next();
            let best = results.next();
            assert!(results.all(|bits| Some(&bits) == best.as_ref()), "{rows} {terms} {left:?}");
        }
    }
}

#[test]
fn squares_are_transposed() {
    let from = values(SQUARE * 40, 1);
    for kernels in all() {
        let mut to = vec![0.0; SQUARE * PANEL];
        // SAFETY: both hold a square, and `all` has asked for the instructions.
        unsafe { (kernels.transpose)(to.as_mut_ptr(), from.as_ptr(), 40) };
        for (i, j) in (0..SQUARE).flat_map(|i| (0..SQUARE).map(move |j| (i, j))) {
            assert_eq!(to[j * PANEL + i], from[i * 40 + j]);
        }
    }
}

#[test]
#[should_panic(expected = "a tile within its matrix")]
fn short_slices_are_refused() {
    let tile = Tile { c: &mut [0.0; 40], stride: PANEL, rows: 2, add: false, scale: 1.0 };
    multiply(tile, 1, &[0.0; 1000], Left::Plain, &[0.0; 1000]);
}
