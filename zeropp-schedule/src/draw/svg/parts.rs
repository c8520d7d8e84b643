//! Text and small shapes of an SVG picture.

use std::io::{self, Write};

use crate::action::Texture;
use crate::draw::{
    escape,
    style::{LOOKS, hex, shaded},
};

pub(super) fn fill(style: usize, shade: u32) -> String {
    match LOOKS[style].texture {
        Texture::Solid => hex(shaded(LOOKS[style].color, f64::from(shade) / 1000.0)),
        _ => format!("url(#p{style}-{shade})"),
    }
}

/// The attribute of an element in this colour, the same in light and in dark.
pub(super) fn paint(color: &str) -> String {
    format!("fill=\"{color}\"")
}

pub(super) fn swatch(
    out: &mut impl Write,
    x: f64,
    y: f64,
    height: f64,
    paint: &str,
) -> io::Result<()> {
    writeln!(out, "<rect x=\"{x}\" y=\"{y}\" width=\"12\" height=\"{height}\" {paint}/>")
}

/// Writes a swatch's caption and returns where the next swatch goes.
pub(super) fn caption(out: &mut impl Write, x: f64, y: f64, text: &str) -> io::Result<f64> {
    writeln!(out, "<text x=\"{}\" y=\"{}\">{}</text>", x + 17.0, y + 10.0, escape(text))?;
    Ok(x + 17.0 + 6.3 * text.chars().count() as f64 + 14.0)
}

/// The smallest 1, 2 or 5 times a power of ten ns that gives at most `ticks` steps.
pub(super) fn tick_step(range_ns: u64, ticks: u64) -> u64 {
    let mut step = 1u64;
    loop {
        for factor in [1, 2, 5] {
            let step = step.saturating_mul(factor);
            if range_ns / step <= ticks.max(1) {
                return step;
            }
        }
        step = step.saturating_mul(10);
    }
}

/// A time on the axis, in the unit and with the decimals that the step needs.
pub(super) fn tick_text(ns: u64, step: u64) -> String {
    let (unit, size) = match step {
        0..1_000 => ("ns", 1),
        1_000..1_000_000 => ("µs", 1_000),
        1_000_000..1_000_000_000 => ("ms", 1_000_000),
        _ => ("s", 1_000_000_000),
    };
    format!("{} {unit}", ns / size)
}

/// A name short enough for the margin.
pub(super) fn clip(name: &str) -> String {
    const LENGTH_MAX: usize = 32;
    match name.char_indices().nth(LENGTH_MAX) {
        Some((end, _)) => format!("{}…", &name[..end]),
        None => name.into(),
    }
}
