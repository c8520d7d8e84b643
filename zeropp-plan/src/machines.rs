//! The machines that are known by name, from public figures.

use zeropp_data::files::toml_keys;
use zeropp_schedule::costs::{Machine, Table};

use crate::PlanError;

/// Names and files of costs.
const MACHINES: [(&str, &str); 4] = [
    ("a100", include_str!("../machines/a100.toml")),
    ("a800", include_str!("../machines/a800.toml")),
    ("h100", include_str!("../machines/h100.toml")),
    ("h200", include_str!("../machines/h200.toml")),
];

/// The file of the machine with this name, whatever its case.
pub fn file(name: &str) -> Option<&'static str> {
    MACHINES.iter().find(|(known, _)| known.eq_ignore_ascii_case(name)).map(|(_, text)| *text)
}

/// The names, in words.
pub fn names() -> String {
    MACHINES.map(|(name, _)| name).join(", ")
}

/// The machine of a file with this text in TOML.
///
/// # Errors
/// A rate that is missing or does not work, with the name of the file.
pub fn read(name: &str, text: &str) -> Result<Machine, PlanError> {
    let table = toml_keys(text).and_then(|keys| Table::of_keys(keys).map_err(|e| e.to_string()));
    of_table(name, table)
}

/// The machine that a file's table is about, where reading it left one.
///
/// # Errors
/// As [`read`].
pub fn of_table(name: &str, table: Result<Table, String>) -> Result<Machine, PlanError> {
    let machine = table.and_then(|table| table.machine().map_err(|e| e.to_string()));
    machine.map_err(|said| {
        // What is no file of costs at all does not say what would be one.
        let works = match said.contains("; ") || said.contains("is missing") {
            true => "",
            false => "; use a file such as `zeropp measure -o machine.toml` writes",
        };
        PlanError::new(format!("machine = {name}: {}{works}", said.trim_end()))
    })
}

/// The machine that is known by this name.
///
/// # Errors
/// A name that is not known.
pub fn named(name: &str) -> Result<Machine, PlanError> {
    match file(name) {
        Some(text) => read(name, text),
        None => Err(PlanError::new(format!(
            "machine = {name}: neither a file nor one of {}; name a file of costs with rates",
            names()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A line of the A100's file put in another's place, and what is said of it.
    #[test]
    fn a_rate_that_is_missing_or_none_is_one_clear_message() {
        let good = file("A100").unwrap();
        read("mine.toml", good).unwrap();
        for key in ["flops_per_s", "memory_bytes", "zero3_bytes_per_s", "per_node", "bytes_per_s"] {
            let line = good.lines().find(|l| l.starts_with(&format!("{key} "))).unwrap();
            for value in ["-1", "nan", "0", "inf", "\"fast\""] {
                let wrong = good.replace(line, &format!("{key} = {value}"));
                let said = read("mine.toml", &wrong).unwrap_err().to_string();
                assert!(said.starts_with("machine = mine.toml: ") && said.contains(key), "{said}");
                assert!(!said.contains('\n') || value == "\"fast\"", "{said}");
            }
            // A node without a size has eight, messages without a rate that of sums over replicas.
            if matches!(key, "per_node" | "bytes_per_s") {
                continue;
            }
            let said = read("mine.toml", &good.replace(line, "")).unwrap_err();
            assert!(said.to_string().contains(&format!("{key} is missing")), "{said}");
        }
    }
}
