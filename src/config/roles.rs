//! The role of a setting in a run beyond its value: whether the processes of a job may differ in
//! it, and what a resumed run makes of a change. The table of settings says both for each.

/// The part of a setting that the processes of a job must share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Across {
    /// The value: it changes numbers, or what the ranks do together.
    Same,
    /// Whether it is given: all of them take part, each with a value of its own, as a folder may
    /// have other paths on other hosts.
    Given,
    /// The content of the file or folder, wherever it is.
    Contents,
    /// Its effect on partition and program, in which rank 0's counts.
    Program,
    /// Nothing: each process has its own.
    Own,
}

/// How a run that goes on from a checkpoint treats a setting that is another now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OnResume {
    /// It refuses: no tensor's shape would show it, and the model or the data would silently be
    /// another.
    Fixed,
    /// It says so: what follows is another, perhaps on purpose.
    Reported,
    /// Nothing: any layout reads any checkpoint, and shapes are checked apart. The checkpoint keeps
    /// it.
    Kept,
    /// Nothing, and the checkpoint does not keep it: it says where and how a run is done or
    /// watched, never what it computes.
    Left,
}
