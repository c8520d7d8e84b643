//! The machines that are known by name, from public figures.

use zeropp_schedule::costs::{Form, Machine, Table};

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

/// The machine of a file with this text.
///
/// # Errors
/// A rate that is missing or does not work, with the name of the file.
pub fn read(name: &str, text: &str, form: Form) -> Result<Machine, PlanError> {
    let table = Table::read(text, form).and_then(|table| table.machine());
    table.map_err(|e| PlanError::new(format!("machine = {name}: {e}")))
}

/// The machine that is known by this name.
///
/// # Errors
/// A name that is not known.
pub fn named(name: &str) -> Result<Machine, PlanError> {
    match file(name) {
        Some(text) => read(name, text, Form::Toml),
        None => Err(PlanError::new(format!(
            "machine = {name}: neither a file nor one of {}; name a file of costs with rates",
            names()
        ))),
    }
}
