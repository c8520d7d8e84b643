//! This machine's name.

/// The name of this machine, whole: two machines may differ in what follows the first dot alone.
#[cfg(unix)]
pub fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// The name of this machine.
#[cfg(not(unix))]
pub fn host_name() -> String {
    std::env::var("COMPUTERNAME").unwrap_or_else(|_| "this machine".into())
}
