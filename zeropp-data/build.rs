//! Gathers the text that `zeropp run` trains on when it is given no data: this crate's own
//! sources, in the order of their paths, with a line feed between files.

use std::path::{Path, PathBuf};
use std::{env, fs, io};

fn main() -> io::Result<()> {
    println!("cargo::rerun-if-changed=src");
    println!("cargo::rerun-if-changed=build.rs");
    let mut files = Vec::new();
    collect(Path::new("src"), &mut files)?;
    files.sort();
    let mut text = Vec::new();
    for file in files {
        text.extend(fs::read(file)?);
        text.push(b'\n');
    }
    let out = env::var_os("OUT_DIR").expect("set by cargo");
    fs::write(Path::new(&out).join("builtin.txt"), text)
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            collect(&path, files)?;
        } else if path.extension().is_some_and(|e| e == "rs") {
            files.push(path);
        }
    }
    Ok(())
}
