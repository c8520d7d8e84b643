//! Libraries that will not do.

use zeropp_comm::nccl::NcclOptions;
use zeropp_comm::rendezvous::Local;
use zeropp_core::device::LibrarySearch;

use super::*;

/// The error of a world that cannot start with this library.
fn refused(file: impl Into<std::ffi::OsString>) -> String {
    let search = LibrarySearch { only: Some(file.into()), ..LibrarySearch::default() };
    let options = NcclOptions { search, ..patient() };
    let started = rank(options, (0, 1), &Local::default(), Arc::new(Host::new()), |_, _| ());
    started.expect_err("the library is no good").to_string()
}

#[test]
fn a_library_that_is_too_old_is_refused_with_the_reason() {
    let text = refused(host::build("old", &["-DVERSION=21304"]));
    assert!(text.contains("is NCCL 2.13.4, and 2.14.0 or newer is needed: the calls of"), "{text}");
    let text = refused(host::build("ancient", &["-DVERSION=2708"]));
    assert!(text.contains("is NCCL 2.7.8, and 2.14.0"), "{text}");
}

#[test]
fn a_library_without_a_function_is_refused() {
    let text = refused(host::build("partial", &["-DNO_SEND"]));
    assert!(text.ends_with("(NCCL 2.27.3): it has no function ncclSend"), "{text}");
}

#[test]
fn another_library_and_none_are_refused() {
    let text = refused("libc.so.6");
    assert!(text.ends_with("libc.so.6 is not NCCL: no ncclGetVersion"), "{text}");
    let text = refused("/nowhere/libnccl.so.2");
    assert!(text.contains("/nowhere/libnccl.so.2: ") && text.contains("ZEROPP_NCCL_LIB"), "{text}");
}

#[test]
fn the_version_is_reported() {
    let device = Arc::new(Host::new());
    let world = NcclWorld::start(patient(), 0, 1, device, &Local::default()).unwrap();
    assert_eq!((world.version(), world.rank(), world.failed_rank()), ("2.27.3", 0, None));
}
