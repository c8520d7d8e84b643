//! The page as one file: its HTML with styles, script and program inside.

use zeropp_schedule::draw::palette;

const HTML: &str = include_str!("../page/index.html");
const STYLE: &str = include_str!("../page/style.css");
/// In the order in which they build on each other.
const SCRIPTS: [&str; 6] = [
    include_str!("../page/program.js"),
    include_str!("../page/state.js"),
    include_str!("../page/chart.js"),
    include_str!("../page/table.js"),
    include_str!("../page/edit.js"),
    include_str!("../page/main.js"),
];
/// Compressed, by gzip; browsers unpack it.
const PROGRAM: &[u8] = include_bytes!("../page/playground.wasm.gz");

/// The whole page, which asks for nothing else.
pub fn page() -> String {
    let style = palette(":root") + STYLE;
    let scripts = SCRIPTS.join("\n");
    let page = HTML.replace("/*style*/", &style).replace("/*script*/", &scripts);
    page.replace("/*version*/", env!("CARGO_PKG_VERSION")).replace("/*program*/", &base64(PROGRAM))
}

/// The standard alphabet, padded.
fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let bits = chunk.iter().fold(0u32, |bits, b| bits << 8 | u32::from(*b));
        let bits = bits << (8 * (3 - chunk.len()));
        for i in 0..4 {
            let letter = LETTERS[(bits >> (18 - 6 * i) & 63) as usize];
            text.push(if i <= chunk.len() { char::from(letter) } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_is_whole_and_small_and_asks_for_nothing() {
        let page = page();
        for place in ["/*style*/", "/*script*/", "/*program*/", "/*version*/"] {
            assert!(!page.contains(place), "{place} is left");
        }
        assert!(PROGRAM.len() <= 345_000, "the program has {} bytes packed", PROGRAM.len());
        assert!(page.len() <= 600 << 10, "the page has {} bytes", page.len());
        for far in ["src=\"http", "href=\"http", "fetch(\"http", "@import", "url(http"] {
            assert!(!page.contains(far), "{far}");
        }
    }

    #[test]
    fn base64_is_the_usual_one() {
        for (bytes, text) in [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foobar", "Zm9vYmFy")] {
            assert_eq!(base64(bytes.as_bytes()), text);
        }
    }
}
