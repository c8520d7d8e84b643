//! How a command ends that does not end well.

/// Why a command ends early: the message for standard error, if it is not said yet, and the exit
/// code.
pub(crate) struct Failure {
    pub(crate) message: String,
    pub(crate) code: u8,
}

impl Failure {
    /// Input that would have to change; nothing was started.
    pub(crate) fn bad_input(message: impl ToString) -> Failure {
        Failure { message: message.to_string(), code: 2 }
    }

    /// A run that a signal has stopped, as it should.
    pub(crate) fn stopped_by(signal: i32) -> Failure {
        Failure { message: String::new(), code: u8::try_from(128 + signal).unwrap_or(1) }
    }

    /// A run that was started and did not end well.
    pub(crate) fn failed_run(message: impl ToString) -> Failure {
        Failure { message: message.to_string(), code: 1 }
    }
}

impl From<zeropp::Error> for Failure {
    fn from(error: zeropp::Error) -> Failure {
        if error.is_bad_input() { Failure::bad_input(error) } else { Failure::failed_run(error) }
    }
}

/// Of a command whose words did not all reach their reader.
pub(crate) fn incomplete(error: &std::io::Error) -> Failure {
    Failure::failed_run(format!("standard output cannot be written ({error}): it is incomplete"))
}
