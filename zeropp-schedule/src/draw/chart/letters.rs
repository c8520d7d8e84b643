//! How wide a text is in a picture, about: the reader's font is not known.

/// In pixels, of letters that are `size` high. As in a wide font: too much room looks better than
/// texts that lie on each other.
pub(super) fn width(text: &str, size: f64) -> f64 {
    size * text.chars().map(ems).sum::<f64>()
}

fn ems(letter: char) -> f64 {
    match letter {
        'i' | 'j' | 'l' | '.' | ',' | ':' | ';' | '\'' | '|' | '!' | 'I' | ' ' => 0.33,
        'f' | 't' | 'r' | '(' | ')' | '[' | ']' | '-' => 0.41,
        'm' | 'w' | 'M' | 'W' | '@' | '%' => 0.98,
        '_' => 0.5,
        _ if letter.is_uppercase() => 0.74,
        // From Korean on most signs are square.
        _ if letter >= '\u{1100}' && letter != '…' => 1.0,
        _ => 0.64,
    }
}

/// `text` with its middle left out, as far as it takes to be at most `most` pixels wide: names of
/// files begin alike and end alike, so both ends stay.
pub(super) fn shortened(text: &str, size: f64, most: f64) -> String {
    if width(text, size) <= most {
        return text.into();
    }
    let letters: Vec<char> = text.chars().collect();
    let (mut head, mut tail, mut room) = (0, 0, most - width("…", size));
    while head + tail < letters.len() {
        let from_head = head <= tail;
        let next = if from_head { letters[head] } else { letters[letters.len() - 1 - tail] };
        room -= size * ems(next);
        if room < 0.0 {
            break;
        }
        *(if from_head { &mut head } else { &mut tail }) += 1;
    }
    let ends = [&letters[..head], &letters[letters.len() - tail..]];
    ends.map(|end| end.iter().collect::<String>()).join("…")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_name_keeps_both_ends_and_fits() {
        assert_eq!(shortened("loss", 12.0, 40.0), "loss");
        let long = format!("begin{}end", "-x".repeat(50));
        for most in [60.0, 200.0, 300.0] {
            let short = shortened(&long, 12.0, most);
            assert!(short.starts_with("beg") && short.ends_with("nd"), "{short}");
            assert!(short.contains('…') && width(&short, 12.0) <= most, "{short}");
        }
        assert!(width(&shortened(&"語".repeat(90), 12.0, 300.0), 12.0) > 250.0);
        assert!(width("WWW", 10.0) > width("iii", 10.0));
    }
}
