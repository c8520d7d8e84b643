//! How curves differ: by colours; where there are more curves than colours by dashes, too,
//! and layers by colours that change over the depth.

use std::f64::consts::PI;
use std::fmt::Write;

/// Okabe and Ito's colours and a violet, darker ones on light ground and lighter on dark.
const COLORS: [(&str, &str); 8] = [
    ("#0072b2", "#56b4e9"),
    ("#d55e00", "#ff8c42"),
    ("#007a59", "#3fd0a4"),
    ("#a8478a", "#e79bc8"),
    ("#8a6d00", "#f0e442"),
    ("#111111", "#ffffff"),
    ("#5b2fc9", "#a99bff"),
    ("#777777", "#999999"),
];
/// Patterns of lines; the first one is whole.
const DASHES: [&str; 5] = ["none", "5 3", "2 3", "10 3 2 3", "14 4"];
/// Of the points that a curve has instead, around 0 0.
const POINTS: [&str; 5] = [
    "M-3 0a3 3 0 1 0 6 0a3 3 0 1 0-6 0z",
    "M-3-3h6v6h-6z",
    "M0-4l4 4l-4 4l-4-4z",
    "M0-4l4 7h-8z",
    "M0 4l4-7h-8z",
];

/// Colour and pattern of a curve.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CurveStyle {
    color: Color,
    dash: usize,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Color {
    /// One of [`COLORS`].
    Of(usize),
    /// A place from 0 to 1 in a ramp of as many as there are curves.
    Ramp(f64),
}

impl CurveStyle {
    /// Of the curve at `place` of `count` that have no order.
    pub fn one_of(place: usize, count: usize) -> CurveStyle {
        if count > COLORS.len() * DASHES.len() {
            return CurveStyle::on_ramp(place, count, 0);
        }
        CurveStyle { color: Color::Of(place % COLORS.len()), dash: place / COLORS.len() }
    }

    /// Of the layer at `place` of `count`, in the run at place `run`.
    pub fn of_layer(place: usize, count: usize, run: usize) -> CurveStyle {
        if count > COLORS.len() {
            return CurveStyle::on_ramp(place, count, run);
        }
        CurveStyle { color: Color::Of(place), dash: run % DASHES.len() }
    }

    /// Neighbours have almost one colour, so their dashes differ.
    fn on_ramp(place: usize, count: usize, run: usize) -> CurveStyle {
        let part = place as f64 / (count - 1) as f64;
        CurveStyle { color: Color::Ramp(part), dash: (place + run) % DASHES.len() }
    }

    /// The attributes of an element with this colour and other classes.
    pub(super) fn colored(self, classes: &str) -> String {
        match self.color {
            Color::Of(i) => format!("class=\"{classes} c{i}\""),
            Color::Ramp(part) => format!(
                "class=\"{classes} ramp\" style=\"--l:{};--d:{}\"",
                ramp(part, 0.42, 0.6),
                ramp(part, 0.66, 0.86)
            ),
        }
    }

    /// The same of a line in this pattern.
    pub(super) fn dashed(self, classes: &str) -> String {
        self.colored(&format!("{classes} d{}", self.dash))
    }

    /// A point of a curve.
    pub(super) fn point(self, out: &mut String, x: f64, y: f64) {
        let _ = write!(
            out,
            "<path {} transform=\"translate({x:.1} {y:.1})\" d=\"{}\"/>",
            self.colored("dot"),
            POINTS[self.dash]
        );
    }
}

/// The classes that [`CurveStyle`] names, on light ground or on dark.
pub(super) fn style(dark: bool) -> String {
    let mut out = String::new();
    for (i, (light, night)) in COLORS.iter().enumerate() {
        let _ = write!(out, ".c{i}{{--c:{}}}", if dark { night } else { light });
    }
    let _ = write!(out, ".ramp{{--c:var(--{})}}", if dark { "d" } else { "l" });
    for (i, dash) in DASHES.iter().enumerate().filter(|_| !dark) {
        let _ = write!(out, ".d{i}{{stroke-dasharray:{dash}}}");
    }
    out
}

/// A colour from blue over green, yellow and red to pink, in OKLCH: as it goes on it gets lighter,
/// from `low` to `high`, for those who see fewer hues.
fn ramp(part: f64, low: f64, high: f64) -> String {
    let (lightness, hue) = (low + part * (high - low), (270.0 - 290.0 * part) / 180.0 * PI);
    let (a, b) = (0.13 * hue.cos(), 0.13 * hue.sin());
    // Björn Ottosson's matrices.
    let long = (lightness + 0.396_337_8 * a + 0.215_803_8 * b).powi(3);
    let middle = (lightness - 0.105_561_3 * a - 0.063_854_2 * b).powi(3);
    let short = (lightness - 0.089_484_2 * a - 1.291_485_5 * b).powi(3);
    let linear = [
        4.076_741_7 * long - 3.307_711_6 * middle + 0.230_969_9 * short,
        -1.268_438_0 * long + 2.609_757_4 * middle - 0.341_319_4 * short,
        -0.004_196_1 * long - 0.703_418_6 * middle + 1.707_614_7 * short,
    ];
    let hex = linear.map(|part| {
        let part = part.clamp(0.0, 1.0);
        let part =
            if part < 0.003_130_8 { 12.92 * part } else { 1.055 * part.powf(1.0 / 2.4) - 0.055 };
        format!("{:02x}", (255.0 * part).round() as u8)
    });
    format!("#{}", hex.concat())
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// Contrast of a colour with a ground, as WCAG counts it.
    fn contrast(color: &str, ground: &str) -> f64 {
        let light = |hex: &str| {
            let part = |i: usize| {
                let part = f64::from(u8::from_str_radix(&hex[i..i + 2], 16).unwrap()) / 255.0;
                if part < 0.040_45 { part / 12.92 } else { ((part + 0.055) / 1.055).powf(2.4) }
            };
            0.05 + 0.2126 * part(1) + 0.7152 * part(3) + 0.0722 * part(5)
        };
        let (a, b) = (light(color), light(ground));
        a.max(b) / a.min(b)
    }

    #[test]
    fn all_curves_of_a_picture_look_different() {
        for count in [1, 2, 8, 9, 14, 40, 41, 99] {
            let runs = (0..count).map(|i| CurveStyle::one_of(i, count).dashed(""));
            assert_eq!(runs.collect::<HashSet<_>>().len(), count, "{count} runs");
            let layers =
                |run| (0..count).map(move |i| CurveStyle::of_layer(i, count, run).dashed(""));
            let layers: HashSet<_> = (0..3).flat_map(layers).collect();
            assert_eq!(layers.len(), 3 * count, "{count} layers of 3 runs");
        }
    }

    #[test]
    fn curves_stand_out_from_both_grounds() {
        for (light, dark) in COLORS {
            assert!(contrast(light, "#ffffff") > 3.0 && contrast(dark, "#14161a") > 3.0, "{light}");
        }
        for i in 0..=50 {
            let part = f64::from(i) / 50.0;
            let (light, dark) = (ramp(part, 0.42, 0.6), ramp(part, 0.66, 0.86));
            assert!(contrast(&light, "#ffffff") > 3.0, "{light}");
            assert!(contrast(&dark, "#14161a") > 3.0, "{dark}");
        }
    }
}
