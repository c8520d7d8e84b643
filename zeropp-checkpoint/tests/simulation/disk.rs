//! A disk in memory that loses, tears and refuses what a real one may.
//!
//! A crash keeps of a file what was flushed, and of what was written since any first part, torn or
//! not; of changes to names that were not flushed any of them, whatever their order. That is less
//! than what common file systems keep, and all that POSIX promises.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use zeropp_checkpoint::disk::{Disk, FolderEntry, Lock, PathKind, ReadFile, WriteFile};

use crate::rng::Rng;

type Id = usize;

/// Bugs that are planted into the calls of the code.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Planted {
    /// Files are not flushed.
    pub(crate) no_file_flush: bool,
    /// Names are not flushed.
    pub(crate) no_folder_flush: bool,
    /// Files are written where they are to be at last: nothing is renamed.
    pub(crate) no_rename: bool,
}

#[derive(Clone, Debug)]
enum Node {
    File { bytes: Vec<u8>, flushed: Option<Vec<u8>> },
    Folder(BTreeMap<OsString, Id>),
}

/// A change of names in a folder that is not flushed yet.
#[derive(Clone, Debug)]
enum Change {
    Add(Id, OsString, Id),
    Remove(Id, OsString),
    Rename(Id, OsString, OsString),
}

impl Change {
    fn folder(&self) -> Id {
        match self {
            Change::Add(folder, ..) | Change::Remove(folder, _) | Change::Rename(folder, ..) => {
                *folder
            }
        }
    }

    fn apply(&self, names: &mut HashMap<Id, BTreeMap<OsString, Id>>) {
        let folder = names.entry(self.folder()).or_default();
        match self {
            Change::Add(_, name, id) => drop(folder.insert(name.clone(), *id)),
            Change::Remove(_, name) => drop(folder.remove(name)),
            Change::Rename(_, from, to) => {
                if let Some(id) = folder.remove(from) {
                    folder.insert(to.clone(), id);
                }
            }
        }
    }
}

struct State {
    nodes: Vec<Node>,
    /// The state of the folders that a crash leaves.
    flushed: HashMap<Id, BTreeMap<OsString, Id>>,
    changes: Vec<Change>,
    locked: BTreeSet<PathBuf>,
    planted: Planted,
    /// Microseconds of virtual time, and until when there is no space.
    now: u64,
    full_until: u64,
    /// Which flush of a file, counted from now, is reported as done and is not.
    lie_in: Option<u64>,
    lied: bool,
}

/// The disk.
#[derive(Clone)]
pub(crate) struct SimDisk(Arc<Mutex<State>>);

/// The calls that a process may still make to the disk.
#[derive(Clone, Debug, Default)]
pub(crate) struct Fuse(Arc<Mutex<FuseState>>);

#[derive(Debug, Default)]
struct FuseState {
    calls: u64,
    blows_at: Option<u64>,
    /// One call that fails, and how.
    fails_at: Option<(u64, ErrorKind)>,
}

impl Fuse {
    /// The process dies after so many calls more.
    pub(crate) fn blow_after(&self, calls: u64) {
        let mut fuse = self.0.lock().unwrap();
        fuse.blows_at = Some(fuse.calls + calls);
    }

    /// One call, after so many more, fails.
    pub(crate) fn fail_after(&self, calls: u64, kind: ErrorKind) {
        let mut fuse = self.0.lock().unwrap();
        fuse.fails_at = Some((fuse.calls + calls, kind));
    }

    pub(crate) fn is_blown(&self) -> bool {
        let fuse = self.0.lock().unwrap();
        fuse.blows_at.is_some_and(|at| fuse.calls > at)
    }

    pub(crate) fn calls(&self) -> u64 {
        self.0.lock().unwrap().calls
    }

    fn call(&self) -> io::Result<()> {
        let mut fuse = self.0.lock().unwrap();
        fuse.calls += 1;
        if fuse.blows_at.is_some_and(|at| fuse.calls > at) {
            return Err(io::Error::other("the process is dead"));
        }
        match fuse.fails_at {
            Some((at, kind)) if fuse.calls == at + 1 => Err(kind.into()),
            _ => Ok(()),
        }
    }
}

/// A process's way to the disk.
#[derive(Clone)]
pub(crate) struct Handle {
    disk: SimDisk,
    pub(crate) fuse: Fuse,
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Handle")
    }
}

const ROOT: Id = 0;

impl SimDisk {
    pub(crate) fn new(planted: Planted) -> SimDisk {
        SimDisk(Arc::new(Mutex::new(State {
            nodes: vec![Node::Folder(BTreeMap::new())],
            flushed: HashMap::from([(ROOT, BTreeMap::new())]),
            changes: Vec::new(),
            locked: BTreeSet::new(),
            planted,
            now: 0,
            full_until: 0,
            lie_in: None,
            lied: false,
        })))
    }

    pub(crate) fn handle(&self) -> Handle {
        Handle { disk: self.clone(), fuse: Fuse::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    pub(crate) fn set_time(&self, now: u64) {
        self.state().now = now;
    }

    pub(crate) fn pass(&self, time: u64) {
        self.state().now += time;
    }

    pub(crate) fn fill_until(&self, time: u64) {
        self.state().full_until = time;
    }

    pub(crate) fn lie_in(&self, flushes: u64) {
        self.state().lie_in = Some(flushes);
    }

    /// Whether a flush was reported as done and was not.
    pub(crate) fn has_lied(&self) -> bool {
        self.state().lied
    }

    /// The machine loses its power.
    pub(crate) fn crash(&self, rng: &mut Rng) {
        let mut s = self.state();
        let s = &mut *s;
        let mut left = s.flushed.clone();
        for change in std::mem::take(&mut s.changes) {
            if rng.once_in(2) {
                change.apply(&mut left);
            }
        }
        for (id, node) in s.nodes.iter_mut().enumerate() {
            match node {
                Node::Folder(names) => *names = left.get(&id).cloned().unwrap_or_default(),
                Node::File { bytes, flushed } => {
                    let kept = flushed.clone().unwrap_or_default();
                    let more = bytes.len().saturating_sub(kept.len()) as u64;
                    let upto = kept.len() + rng.below(more + 1) as usize;
                    let mut torn = bytes[..upto.min(bytes.len())].to_vec();
                    torn[..kept.len().min(upto)].copy_from_slice(&kept[..kept.len().min(upto)]);
                    if upto > kept.len() && rng.once_in(2) {
                        let at = kept.len() + rng.below((upto - kept.len()) as u64) as usize;
                        torn[at..].fill(0);
                    }
                    *bytes = torn.clone();
                    *flushed = Some(torn);
                }
            }
        }
        s.flushed = left;
        s.locked.clear();
    }
}

impl State {
    fn path(&self, path: &Path) -> PathBuf {
        let hidden = |name: &str| name.strip_prefix(".step-").map(|rest| rest[..6].to_owned());
        if !self.planted.no_rename {
            return path.to_path_buf();
        }
        let part = |part: &OsStr| match part.to_str().filter(|name| name.ends_with(".tmp")) {
            Some(name) => OsString::from(hidden(name).map_or(name.into(), |n| format!("step-{n}"))),
            None => part.to_owned(),
        };
        path.iter().map(part).collect()
    }

    fn find(&self, path: &Path) -> io::Result<Id> {
        let mut at = ROOT;
        for part in self.path(path).iter().filter(|part| *part != "/" && *part != ".") {
            match &self.nodes[at] {
                Node::Folder(names) => {
                    at = *names.get(part).ok_or(io::Error::from(ErrorKind::NotFound))?;
                }
                Node::File { .. } => return Err(ErrorKind::NotADirectory.into()),
            }
        }
        Ok(at)
    }

    /// The folder that has the path, and its name there.
    fn place(&self, path: &Path) -> io::Result<(Id, OsString)> {
        let path = self.path(path);
        let folder = self.find(path.parent().expect("not the root"))?;
        Ok((folder, path.file_name().expect("a name").to_owned()))
    }

    fn names(&mut self, folder: Id) -> &mut BTreeMap<OsString, Id> {
        match &mut self.nodes[folder] {
            Node::Folder(names) => names,
            Node::File { .. } => panic!("a folder"),
        }
    }

    fn space(&self) -> io::Result<()> {
        match self.now < self.full_until {
            true => Err(ErrorKind::StorageFull.into()),
            false => Ok(()),
        }
    }

    fn add(&mut self, path: &Path, node: Node) -> io::Result<Id> {
        self.space()?;
        let (folder, name) = self.place(path)?;
        if self.names(folder).contains_key(&name) {
            return Err(ErrorKind::AlreadyExists.into());
        }
        self.nodes.push(node);
        let id = self.nodes.len() - 1;
        self.names(folder).insert(name.clone(), id);
        self.changes.push(Change::Add(folder, name, id));
        Ok(id)
    }

    fn remove(&mut self, path: &Path) -> io::Result<()> {
        if self.planted.no_rename && self.path(path) != path {
            return Ok(());
        }
        let (folder, name) = self.place(path)?;
        self.names(folder).remove(&name).ok_or(io::Error::from(ErrorKind::NotFound))?;
        self.changes.push(Change::Remove(folder, name));
        Ok(())
    }
}

struct Writing(Handle, Id);
struct Reading(Handle, Vec<u8>, u64);

impl Write for Writing {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.0.fuse.call()?;
        let mut s = self.0.disk.state();
        s.space()?;
        // As systems may: not all at once.
        let n = data.len().min(1 + data.len() * 2 / 3);
        if let Node::File { bytes, .. } = &mut s.nodes[self.1] {
            bytes.extend(&data[..n]);
        }
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl WriteFile for Writing {
    fn sync(&mut self) -> io::Result<()> {
        self.0.fuse.call()?;
        let mut s = self.0.disk.state();
        s.space()?;
        let lies = s.lie_in == Some(0);
        s.lie_in = s.lie_in.and_then(|n| n.checked_sub(1));
        s.lied |= lies;
        if !lies
            && !s.planted.no_file_flush
            && let Node::File { bytes, flushed } = &mut s.nodes[self.1]
        {
            *flushed = Some(bytes.clone());
        }
        Ok(())
    }
}

impl Read for Reading {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        self.0.fuse.call()?;
        let rest = &self.1[(self.2 as usize).min(self.1.len())..];
        let n = rest.len().min(out.len());
        out[..n].copy_from_slice(&rest[..n]);
        self.2 += n as u64;
        Ok(n)
    }
}

impl Seek for Reading {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        if let SeekFrom::Start(at) = to {
            self.2 = at;
        }
        Ok(self.2)
    }
}

impl ReadFile for Reading {}

struct Locked(SimDisk, PathBuf);

impl fmt::Debug for Locked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Locked")
    }
}

impl Lock for Locked {
    fn say(&self, _: &str) -> io::Result<()> {
        Ok(())
    }

    fn is_at(&self, _path: &Path) -> io::Result<bool> {
        Ok(true)
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        self.0.state().locked.remove(&self.1);
    }
}

impl Disk for Handle {
    fn create_folder(&self, path: &Path) -> io::Result<()> {
        self.fuse.call()?;
        self.disk.state().add(path, Node::Folder(BTreeMap::new())).map(drop)
    }

    fn create_file(&self, path: &Path) -> io::Result<Box<dyn WriteFile>> {
        self.fuse.call()?;
        let node = Node::File { bytes: Vec::new(), flushed: None };
        let id = self.disk.state().add(path, node)?;
        Ok(Box::new(Writing(self.clone(), id)))
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn ReadFile>> {
        self.fuse.call()?;
        let s = self.disk.state();
        match &s.nodes[s.find(path)?] {
            Node::File { bytes, .. } => Ok(Box::new(Reading(self.clone(), bytes.clone(), 0))),
            Node::Folder(_) => Err(ErrorKind::IsADirectory.into()),
        }
    }

    fn list(&self, folder: &Path) -> io::Result<Vec<FolderEntry>> {
        self.fuse.call()?;
        let s = self.disk.state();
        let Node::Folder(names) = &s.nodes[s.find(folder)?] else {
            return Err(ErrorKind::NotADirectory.into());
        };
        let is_folder = |id: &Id| matches!(s.nodes[*id], Node::Folder(_));
        Ok(names
            .iter()
            .map(|(n, id)| FolderEntry { name: n.clone(), is_folder: is_folder(id) })
            .collect())
    }

    fn look(&self, path: &Path) -> io::Result<PathKind> {
        self.fuse.call()?;
        let s = self.disk.state();
        Ok(match &s.nodes[s.find(path)?] {
            Node::File { bytes, .. } => PathKind::File(bytes.len() as u64),
            Node::Folder(_) => PathKind::Folder,
        })
    }

    fn is_taken(&self, path: &Path) -> bool {
        self.disk.state().find(path).is_ok()
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.fuse.call()?;
        let mut s = self.disk.state();
        let ((folder, old), (_, new)) = (s.place(from)?, s.place(to)?);
        if old == new {
            return Ok(());
        }
        let names = s.names(folder);
        if names.contains_key(&new) {
            return Err(ErrorKind::DirectoryNotEmpty.into());
        }
        let id = names.remove(&old).ok_or(io::Error::from(ErrorKind::NotFound))?;
        names.insert(new.clone(), id);
        s.changes.push(Change::Rename(folder, old, new));
        Ok(())
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.fuse.call()?;
        self.disk.state().remove(path)
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        // One call for each name, as the system's.
        for entry in self.list(path)? {
            let inside = path.join(entry.name);
            match entry.is_folder {
                true => self.remove_folder(&inside)?,
                false => self.remove_file(&inside)?,
            }
        }
        self.remove_file(path)
    }

    fn sync_folder(&self, folder: &Path) -> io::Result<()> {
        self.fuse.call()?;
        let mut s = self.disk.state();
        let s = &mut *s;
        let id = s.find(folder)?;
        if s.planted.no_folder_flush {
            return Ok(());
        }
        let here = |change: &mut Change| change.folder() == id;
        for change in s.changes.extract_if(.., here) {
            change.apply(&mut s.flushed);
        }
        Ok(())
    }

    fn lock(&self, path: &Path, make: bool) -> io::Result<Box<dyn Lock>> {
        self.fuse.call()?;
        let mut s = self.disk.state();
        if s.find(path).is_err() {
            if !make {
                return Err(ErrorKind::NotFound.into());
            }
            s.add(path, Node::File { bytes: Vec::new(), flushed: None })?;
        }
        if !s.locked.insert(path.to_path_buf()) {
            return Err(ErrorKind::WouldBlock.into());
        }
        Ok(Box::new(Locked(self.disk.clone(), path.to_path_buf())))
    }
}
