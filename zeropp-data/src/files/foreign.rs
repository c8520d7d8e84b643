//! Files that are no text, by their names and their first bytes.

use std::path::Path;

/// A kind of file that is not read as text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ForeignFile {
    /// Its kind.
    pub what: &'static str,
    /// The way that would work.
    pub help: &'static str,
}

const LINES: &str = "turn it into tokens with zeropp tokenize";
const OBJECTS: &str = "write its texts as .jsonl, an object a line, for zeropp tokenize";
const PACKED: &str = "decompress it, or give zeropp tokenize its lines as .jsonl.zst";
const OTHER: &str = "leave it out, or take the text out of it";

/// By the end of the name, in lower case.
const NAMES: [(&[&str], &str, &str); 8] = [
    (&[".jsonl", ".ndjson"], "lines of JSON", LINES),
    (&[".jsonl.zst", ".ndjson.zst"], "compressed lines of JSON", LINES),
    (&[".parquet"], "parquet", LINES),
    (&[".json"], "JSON", OBJECTS),
    (&[".csv", ".tsv"], "a table", OBJECTS),
    (&[".gz", ".tgz", ".xz", ".bz2", ".zip", ".7z", ".zst", ".lz4", ".tar"], "compressed", PACKED),
    (&[".png", ".jpg", ".jpeg", ".gif", ".webp", ".mp3", ".wav", ".mp4"], "no text", OTHER),
    (&[".pdf", ".docx", ".xlsx", ".pptx", ".epub"], "a document with a layout, no text", OTHER),
];

/// By the first bytes.
const MAGIC: [(&[u8], &str, &str); 20] = [
    (b"\x1f\x8b", "compressed by gzip", PACKED),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd", PACKED),
    (b"\xfd7zXZ\0", "compressed by xz", PACKED),
    (b"BZh91AY", "compressed by bzip2", PACKED),
    (b"7z\xbc\xaf\x27\x1c", "compressed by 7z", PACKED),
    (b"PK\x03\x04", "a zip archive", PACKED),
    (b"\x89PNG", "a PNG picture", OTHER),
    (b"\xff\xd8\xff", "a JPEG picture", OTHER),
    (b"GIF8", "a GIF picture", OTHER),
    (b"%PDF-", "a PDF", OTHER),
    (b"PAR1", "parquet", LINES),
    (b"\x7fELF", "a program", OTHER),
    (b"SQLite format 3\0", "a database", OTHER),
    (b"\x93NUMPY", "an array of NumPy's", OTHER),
    (b"GGUF", "weights in GGUF", OTHER),
    (b"\x89HDF\r\n", "HDF5", OTHER),
    (b"ARROW1\0", "a table of Arrow's", OBJECTS),
    (b"\xff\xfe", "text in UTF-16", "convert it to UTF-8"),
    (b"\xfe\xff", "text in UTF-16", "convert it to UTF-8"),
    (b"version https://git-lfs", "a pointer of Git LFS and not the file", "get it by git lfs pull"),
];

/// Kind of a file that is no text by its name or the bytes it begins with.
pub fn foreign(path: &Path, first: &[u8]) -> Option<ForeignFile> {
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
    let by_bytes = MAGIC.iter().find(|(magic, ..)| first.starts_with(magic));
    let by_bytes = by_bytes.map(|(_, what, help)| ForeignFile { what, help });
    let ends = |ends: &[&str]| ends.iter().any(|end| name.ends_with(end));
    let by_name = NAMES.iter().find(|(names, ..)| ends(names));
    by_bytes.or(by_name.map(|(_, what, help)| ForeignFile { what, help }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_are_no_text_are_known_by_name_or_first_bytes() {
        for (name, first, what) in [
            ("a.JSONL", &b"{}"[..], "lines of JSON"),
            ("a.jsonl.zst", b"", "compressed lines of JSON"),
            ("a.json", b"[", "JSON"),
            ("a.csv", b"a,b", "a table"),
            ("a.tar", b"", "compressed"),
            ("a.txt", b"\x1f\x8b\x08", "compressed by gzip"),
            ("a", b"\x89PNG\r\n", "a PNG picture"),
            ("a.txt", b"\xff\xfea\0", "text in UTF-16"),
            ("a.txt", b"version https://git-lfs.github.com/spec/v1", "a pointer of Git LFS"),
        ] {
            let found = foreign(Path::new(name), first).expect(name);
            assert!(found.what.starts_with(what), "{name}: {found:?}");
        }
        for (name, first) in [("a.txt", &b"PK"[..]), ("json", b"{"), ("a.md", b""), ("a.rs", b"G")]
        {
            assert_eq!(foreign(Path::new(name), first), None, "{name}");
        }
    }
}
