//! The one form in which zeropp says that an input cannot be used.

/// A setting, variable or field of a file that cannot be what it is: `field = value: problem; what
/// would work`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} = {value}: {problem}; {help}")]
pub struct FieldError {
    /// The setting's key.
    pub field: String,
    /// Its value.
    pub value: String,
    /// The problem with it.
    pub problem: String,
    /// Advice: what would work.
    pub help: String,
}

impl FieldError {
    /// Puts the four parts together.
    pub fn new(
        field: &str,
        value: impl ToString,
        problem: impl Into<String>,
        help: impl Into<String>,
    ) -> Self {
        Self {
            field: field.into(),
            value: value.to_string(),
            problem: problem.into(),
            help: help.into(),
        }
    }
}
