//! This machine's name.

/// The name of this machine, without what follows its first dot.
#[cfg(unix)]
pub fn host_name() -> String {
    let system = rustix::system::uname();
    let name = system.nodename().to_string_lossy();
    name.split('.').next().unwrap_or_default().to_string()
}

/// The name of this machine.
#[cfg(not(unix))]
pub fn host_name() -> String {
    std::env::var("COMPUTERNAME").unwrap_or_else(|_| "this machine".into())
}
