//! Where NVIDIA's libraries are looked for that are loaded at run time, and not needed to build.

use std::error::Error;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use libloading::Library;

/// Where to look for a library.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LibrarySearch {
    /// The only file or name to try, if the user named one.
    pub only: Option<OsString>,
    /// Names that the system's loader looks up, the newest first.
    pub names: Vec<OsString>,
    /// Folders of libraries, tried after the names, by the first of these.
    pub folders: Vec<PathBuf>,
}

impl LibrarySearch {
    /// What the environment `variable` names alone, where it is set; else `names`, then `folders`,
    /// and the folder `in_packages` of the environments and installations of Python that there are.
    pub fn from_env(
        variable: &str,
        names: &[&str],
        folders: Vec<PathBuf>,
        in_packages: &str,
    ) -> LibrarySearch {
        let set = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        let prefixes = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(set);
        let home = set("HOME").map(|home| PathBuf::from(home).join(".local"));
        let installed = ["/usr/local", "/usr"].map(PathBuf::from);
        let paths = set("PYTHONPATH").unwrap_or_default();
        let mut packages: Vec<PathBuf> = std::env::split_paths(&paths).collect();
        for prefix in prefixes.map(PathBuf::from).chain(home).chain(installed) {
            packages.extend(python_packages(&prefix));
        }
        let packages = packages.into_iter().map(|folder| folder.join(in_packages));
        LibrarySearch {
            only: set(variable),
            names: names.iter().map(OsString::from).collect(),
            folders: folders.into_iter().chain(packages).filter(|f| f.is_dir()).collect(),
        }
    }

    fn candidates(&self) -> Vec<OsString> {
        if let Some(only) = &self.only {
            return vec![only.clone()];
        }
        let name = self.names.first();
        let files = self.folders.iter().zip(name.into_iter().cycle());
        let files = files.map(|(folder, name)| folder.join(name).into());
        self.names.iter().cloned().chain(files).collect()
    }

    /// Loads the first library that is found, and says by which name.
    ///
    /// # Errors
    /// Everything that was tried, and what the loader said to each.
    pub fn open(&self) -> Result<(Library, String), String> {
        let mut tried = Vec::new();
        for name in self.candidates() {
            let text = name.to_string_lossy().into_owned();
            // SAFETY: the initialisers of NVIDIA's libraries are as harmless as those of any
            // system library; a file that the user names is trusted as a program's is.
            match unsafe { Library::new(&name) } {
                Ok(library) => return Ok((library, text)),
                Err(error) => {
                    // The loader's own words are behind the error.
                    let words = error.source().map_or(error.to_string(), ToString::to_string);
                    tried.push(format!("{text}: {words}"));
                }
            }
        }
        Err(tried.join("; "))
    }
}

/// Declares `Functions`, a struct of a library's functions by their names there, and how they are
/// found in a loaded library; the error names the first that it lacks.
#[doc(hidden)]
#[macro_export]
macro_rules! library_functions {
    ($($field:ident = $name:literal: fn($($arg:ty),* $(,)?) -> $result:ty;)*) => {
        pub(super) struct Functions {
            $(pub(super) $field: unsafe extern "C" fn($($arg),*) -> $result,)*
        }

        impl Functions {
            pub(super) fn find(library: &Library) -> Result<Functions, String> {
                Ok(Functions {$(
                    // SAFETY: the type is the library's own declaration of the function.
                    $field: *unsafe { library.get(concat!($name, "\0").as_bytes()) }
                        .map_err(|_| format!("it has no function {}", $name))?,
                )*})
            }
        }
    };
}

/// The folders under `prefix/lib/python3.*` that hold packages.
fn python_packages(prefix: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(prefix.join("lib")).into_iter().flatten().flatten();
    let pythons = entries.map(|entry| entry.path()).filter(|path| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("python3"))
    });
    let mut found: Vec<PathBuf> = pythons
        .flat_map(|python| [python.join("site-packages"), python.join("dist-packages")])
        .filter(|packages| packages.is_dir())
        .collect();
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_tried_is_named_with_the_loader_s_words() {
        let folder = tempfile::tempdir().unwrap();
        let search = LibrarySearch {
            names: vec!["libnccl-of-nobody.so".into()],
            folders: vec![folder.path().into()],
            ..LibrarySearch::default()
        };
        let text = search.open().err().unwrap();
        let file = folder.path().join("libnccl-of-nobody.so");
        assert!(text.starts_with("libnccl-of-nobody.so: "), "{text}");
        assert_eq!(text.matches("cannot open shared object file").count(), 2, "{text}");
        assert!(text.contains(&*file.to_string_lossy()), "{text}");
        let only = LibrarySearch { only: Some("/nowhere/libnccl.so".into()), ..search };
        let text = only.open().err().unwrap();
        assert!(text.starts_with("/nowhere/libnccl.so: ") && !text.contains("nobody"), "{text}");
    }

    #[test]
    fn python_s_packages_are_found_under_a_prefix() {
        let prefix = tempfile::tempdir().unwrap();
        let packages = prefix.path().join("lib/python3.11/site-packages");
        std::fs::create_dir_all(&packages).unwrap();
        std::fs::create_dir_all(prefix.path().join("lib/perl5/site-packages")).unwrap();
        assert_eq!(python_packages(prefix.path()), [packages]);
    }
}
