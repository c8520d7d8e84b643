//! One set of colours for all pages and pictures, as CSS variables, on light ground and on dark.

use std::fmt::Write;

/// Name, on light ground, on dark ground.
const COLORS: [(&str, &str, &str); 7] = [
    ("back", "#fff", "#14161a"),
    ("fore", "#111", "#eee"),
    ("soft", "#555", "#b4b8bf"),
    ("line", "#ccc", "#444"),
    ("box", "#f3f3f3", "#1e2127"),
    ("idle", "#e4e4e4", "#383c44"),
    ("accent", "#0059b3", "#7ab8ff"),
];

/// The variables of what `selector` selects; they follow the reader's light or dark mode.
pub fn palette(selector: &str) -> String {
    let (mut light, mut dark) = (String::new(), String::new());
    for (name, on_light, on_dark) in COLORS {
        let _ = write!(light, "--{name}:{on_light};");
        let _ = write!(dark, "--{name}:{on_dark};");
    }
    format!("{selector}{{{light}}}@media(prefers-color-scheme:dark){{{selector}{{{dark}}}}}\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draw::{html, page, samples::gpipe, svg};

    #[test]
    fn pages_and_pictures_have_these_colours_in_both_modes() {
        let timeline = gpipe(2, 1, 2, 1);
        let (mut picture, mut whole) = (Vec::new(), Vec::new());
        svg::write(&timeline, &mut picture).unwrap();
        html::write(&timeline, &mut whole).unwrap();
        let [picture, whole] = [picture, whole].map(|text| String::from_utf8(text).unwrap());
        let chart = crate::draw::chart::svg(&[], 300.0);
        for (text, selector) in [
            (picture, ".timeline"),
            (chart, ".chart"),
            (whole, ":root"),
            (page::page("t", ""), ":root"),
        ] {
            assert!(text.contains(&palette(selector)), "{selector}");
            // No other rule depends on the mode, but for the colours of curves.
            let rest = text.replace(&palette(selector), "");
            assert!(rest.matches("prefers-color-scheme:dark){").count() <= 1, "{selector}");
            for white in ["background:#fff", "background: #fff", "ground{fill:#fff"] {
                assert!(!rest.contains(white), "{selector}: {white}");
            }
        }
    }
}
