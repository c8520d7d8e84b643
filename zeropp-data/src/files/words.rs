//! Numbers of bytes for people.

/// Bytes with a binary unit: `1.50 MiB`.
pub fn in_words(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut x = bytes as f64;
    let mut unit = 0;
    while x >= 1023.5 && unit + 1 < units.len() {
        x /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{x:.2} {}", units[unit]) }
}
