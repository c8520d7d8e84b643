//! Megatron's files of ids: what they hold, and what is refused.

use std::path::{Path, PathBuf};

use proptest::prelude::*;
use zeropp_data::choices::{Order, Tokenizer};
use zeropp_data::tokens::{Dataset, Hidden, LOSS_MASK_MAGIC, Sampler, SplitPart};

/// An index: type of an id, lengths, first bytes, boundaries of documents.
struct Index {
    magic: &'static [u8],
    version: u64,
    kind: u8,
    counts: (u64, u64),
    lengths: Vec<i32>,
    pointers: Vec<i64>,
    documents: Vec<i64>,
    more: Vec<u8>,
}

impl Index {
    /// Of documents of these lengths, each one sequence, of ids of `width` bytes.
    fn of(lengths: &[i32], kind: u8, width: i64) -> Index {
        let mut end = 0;
        let pointers = lengths.iter().map(|n| {
            end += i64::from(*n) * width;
            end - i64::from(*n) * width
        });
        let n = lengths.len() as u64;
        Index {
            magic: b"MMIDIDX\0\0",
            version: 1,
            kind,
            counts: (n, n + 1),
            pointers: pointers.collect(),
            lengths: lengths.into(),
            documents: (0..=n as i64).collect(),
            more: Vec::new(),
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut out = self.magic.to_vec();
        out.extend(self.version.to_le_bytes());
        out.push(self.kind);
        out.extend([self.counts.0.to_le_bytes(), self.counts.1.to_le_bytes()].concat());
        out.extend(self.lengths.iter().flat_map(|n| n.to_le_bytes()));
        out.extend(self.pointers.iter().chain(&self.documents).flat_map(|n| n.to_le_bytes()));
        out.extend(&self.more);
        out
    }
}

fn pair(dir: &Path, ids: &[u8], index: &[u8]) -> PathBuf {
    std::fs::write(dir.join("c.bin"), ids).unwrap();
    std::fs::write(dir.join("c.idx"), index).unwrap();
    dir.join("c.bin")
}

fn u16s(ids: impl Iterator<Item = u16>) -> Vec<u8> {
    ids.flat_map(u16::to_le_bytes).collect()
}

#[test]
fn ids_of_both_widths_are_read_by_any_of_the_three_names() {
    let dir = tempfile::tempdir().unwrap();
    for (kind, width) in [(8u8, 2usize), (4, 4), (1, 1)] {
        let ids: Vec<u8> =
            (0..20u32).flat_map(|i| (i * 7).to_le_bytes()[..width].to_vec()).collect();
        let mut index = Index::of(&[8, 0, 12], kind, width as i64);
        for modes in [0, 3] {
            index.more = vec![0; modes];
            let bin = pair(dir.path(), &ids, &index.bytes());
            for path in [bin.clone(), bin.with_extension("idx"), bin.with_extension("")] {
                let data = Dataset::open(&path, Tokenizer::Bytes).unwrap();
                assert_eq!((data.len(), data.vocabulary()), (20, 134));
                let sampler = Sampler::new(0, Order::Sequential, 4, 1);
                let (inputs, _) = sampler.sample(&data, 1, 0).unwrap();
                assert_eq!(inputs, [28, 35, 42, 49]);
            }
        }
    }
}

#[test]
fn a_sample_knows_where_its_documents_begin() {
    let dir = tempfile::tempdir().unwrap();
    let ids = u16s(0..20);
    let bin = pair(dir.path(), &ids, &Index::of(&[3, 5, 4, 8], 8, 2).bytes());
    let data = Dataset::open(&bin, Tokenizer::Bytes).unwrap();
    let starts = |data: &Dataset, seq, step| {
        Sampler::new(0, Order::Sequential, seq, 1).document_starts(data, step, 0)
    };
    assert_eq!(starts(&data, 10, 0), [0, 3, 8]);
    assert_eq!(starts(&data, 10, 1), [2]);
    assert_eq!(starts(&data, 15, 1), [5, 8, 13], "after the last token comes the first");
    assert_eq!(starts(&Dataset::from_bytes(vec![0; 50]), 10, 1), [0usize; 0]);
    // A split cuts between documents: 70 % of 20 tokens are 14, in the document from 12 on.
    let part = |part| Dataset::open(&bin, Tokenizer::Bytes).unwrap().split(7, 3, part);
    let (training, validation) = (part(SplitPart::Training), part(SplitPart::Validation));
    assert_eq!((training.len(), validation.len()), (12, 8));
    assert_eq!(starts(&validation, 4, 0), [0]);
    let sampler = Sampler::new(0, Order::Sequential, 4, 1);
    assert_eq!(sampler.sample(&validation, 0, 0).unwrap().0, [12, 13, 14, 15]);
}

/// A first document longer than its share is cut, and a share of all leaves no document out.
#[test]
fn a_split_finds_something_for_each_share() {
    let dir = tempfile::tempdir().unwrap();
    for (lengths, shares, expected) in [
        (vec![20], (50, 50), (10, 10)),
        (vec![15, 5], (1, 1), (10, 10)),
        (vec![5, 15], (1, 1), (5, 15)),
        (vec![5, 15], (1, 0), (20, 0)),
        (vec![5, 15], (0, 1), (0, 20)),
        (vec![0, 5, 15], (1, 3), (5, 15)),
    ] {
        let bin = pair(dir.path(), &u16s(0..20), &Index::of(&lengths, 8, 2).bytes());
        let part = |part| {
            let data = Dataset::open(&bin, Tokenizer::Bytes).unwrap();
            data.split(shares.0, shares.1, part).len()
        };
        let found = (part(SplitPart::Training), part(SplitPart::Validation));
        assert_eq!(found, expected, "{lengths:?}, {shares:?}");
    }
}

#[test]
fn the_index_is_of_the_fingerprint() {
    let dir = tempfile::tempdir().unwrap();
    let of = |lengths: &[i32]| {
        let bin = pair(dir.path(), &u16s(0..20), &Index::of(lengths, 8, 2).bytes());
        Dataset::open(&bin, Tokenizer::Bytes).unwrap().fingerprint().clone()
    };
    let then = of(&[3, 17]);
    assert_eq!(of(&[3, 17]), then);
    assert!(of(&[4, 16]).change_since(&then).unwrap().contains("another content"));
}

/// With and without an index, and no mask where there is none.
#[test]
fn a_mask_beside_a_file_of_ids_is_taken() {
    let dir = tempfile::tempdir().unwrap();
    let bin = dir.path().join("c.bin");
    std::fs::write(&bin, u16s(0..20)).unwrap();
    let open = || Dataset::open(&bin, Tokenizer::U16);
    assert!(!open().unwrap().has_loss_mask());
    let mask = |tokens: u64| [LOSS_MASK_MAGIC, tokens.to_le_bytes().as_slice(), &[0; 3]].concat();
    std::fs::write(bin.with_extension("mask"), mask(20)).unwrap();
    assert!(open().unwrap().has_loss_mask());
    std::fs::write(bin.with_extension("mask"), mask(21)).unwrap();
    let error = open().unwrap_err().to_string();
    assert!(error.contains("a mask of 21 tokens, and the file beside it has 20"), "{error}");
}

#[test]
fn bytes_and_ids_are_distinguished() {
    let dir = tempfile::tempdir().unwrap();
    let bin = pair(dir.path(), &u16s(0..20), &Index::of(&[20], 8, 2).bytes());
    let ids = Dataset::open(&bin, Tokenizer::Bytes).unwrap();
    let text = Dataset::from_bytes(vec![65; 20]);
    assert_eq!((ids.is_bytes(), text.is_bytes()), (false, true));
    let [bytes, others] = [text.origin().to_owned(), ids.origin().to_owned()];
    let mixed = Dataset::mixed(vec![(ids.clone(), 1.0), (text.clone(), 2.0)]);
    assert_eq!(mixed.unlike(), Some([bytes.as_str(), others.as_str()]));
    for one in [ids, text] {
        assert_eq!(Dataset::mixed(vec![(one.clone(), 1.0), (one, 1.0)]).unlike(), None);
    }
    assert!(Dataset::is_indexed(&dir.path().join("c")) && !Dataset::is_indexed(dir.path()));
}

#[test]
fn damaged_indices_are_refused_by_name() {
    let ids = u16s(0..20);
    let good = || Index::of(&[3, 5, 4, 8], 8, 2);
    let change = |f: fn(&mut Index)| {
        let mut index = good();
        f(&mut index);
        index.bytes()
    };
    let cut = |n: usize| good().bytes()[..n].to_vec();
    for (message, index) in [
        ("it is not a Megatron index", change(|i| i.magic = b"MMIDIDX\0\x01")),
        ("it is not a Megatron index", cut(33)),
        ("it is not a Megatron index", Vec::new()),
        ("its version is 2", change(|i| i.version = 2)),
        ("its ids have the type 6", change(|i| i.kind = 6)),
        ("which 121 bytes cannot be; was it truncated?", cut(121)),
        ("its header says 1152921504606846976 sequences", change(|i| i.counts.0 = 1 << 60)),
        ("its header says 4 sequences and 18446744073709551615", {
            change(|i| i.counts.1 = u64::MAX)
        }),
        ("9221120237041090560 sequences", change(|i| i.counts.0 = f64::NAN.to_bits())),
        ("sequence 1 has 5 ids from byte 2 on, and 6 is next", change(|i| i.pointers[1] = 2)),
        ("sequence 2 has -4 ids", change(|i| i.lengths[2] = -4)),
        (
            "its ids take 4294967306 bytes",
            change(|i| {
                i.lengths = vec![i32::MAX, 3, 3, 0];
                i.pointers = vec![0, 4294967294, 4294967300, 4294967306];
            }),
        ),
        ("its ids take 42 bytes, and the .bin has 40", change(|i| i.lengths[3] = 9)),
        ("document 2 begins with sequence 0, after 1", change(|i| i.documents[2] = 0)),
        ("document 4 begins with sequence 9", change(|i| i.documents[4] = 9)),
        ("document 0 begins with sequence 1", change(|i| i.documents[0] = 1)),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let bin = pair(dir.path(), &ids, &index);
        let error = Dataset::open(&bin, Tokenizer::Bytes).unwrap_err().to_string();
        assert!(error.contains("c.idx: ") && error.contains(message), "{message}: {error}");
    }
    let dir = tempfile::tempdir().unwrap();
    let bin = pair(dir.path(), &ids, &good().bytes());
    let error = Dataset::open(&bin, Tokenizer::U32).unwrap_err().to_string();
    assert!(error.contains("its index says tokenizer = u16"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Any change of any bytes is read or refused, and nothing panics or runs over.
    #[test]
    fn changed_indices_are_read_or_refused(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..5),
        cut: prop::sample::Index, is_cut: bool,
    ) {
        let mut index = Index::of(&[3, 5, 4, 8], 8, 2).bytes();
        for (at, value) in changes {
            let at = at.index(index.len());
            index[at] = value;
        }
        if is_cut {
            index.truncate(cut.index(index.len()));
        }
        let dir = tempfile::tempdir().unwrap();
        let bin = pair(dir.path(), &u16s(0..20), &index);
        if let Ok(data) = Dataset::open(&bin, Tokenizer::Bytes) {
            let sampler = Sampler::new(0, Order::Random, 4, 1);
            for step in 0..20 {
                let _ = sampler.sample(&data, step, 0);
                let _ = sampler.document_starts(&data, step, 0);
            }
        }
    }
}

/// Before, a name that led to nothing or to no file counted as none, and every token was scored.
#[test]
#[cfg(unix)]
fn a_mask_or_an_index_that_is_no_file_is_refused_by_its_name() {
    let index = Index::of(&[2, 2], 8, 2).bytes();
    let ids = u16s(0..4);
    for (name, kind) in [("mask", "loss mask"), ("idx", "index")] {
        type Make<'a> = &'a dyn Fn(&Path);
        let make: [(&str, Make); 3] = [
            ("No such file", &|at| std::os::unix::fs::symlink("nowhere", at).unwrap()),
            ("a pipe (FIFO)", &|at| {
                let made = std::process::Command::new("mkfifo").arg(at).status();
                assert!(made.unwrap().success());
            }),
            ("a folder", &|at| std::fs::create_dir(at).unwrap()),
        ];
        for (problem, make) in make {
            let dir = tempfile::tempdir().unwrap();
            let bin = pair(dir.path(), &ids, &index);
            let at = bin.with_extension(name);
            let _ = std::fs::remove_file(&at);
            make(&at);
            let error = Dataset::open(&bin, Tokenizer::U16).unwrap_err().to_string();
            let begins = format!("data = {}: the {kind} cannot be read (", at.display());
            assert!(error.starts_with(&begins) && error.contains(problem), "{error}");
            assert!(error.contains("restore it, or remove it"), "{error}");
        }
    }
}

#[test]
fn data_of_which_no_token_is_scored_is_refused_and_what_is_beside_it_is_said() {
    let dir = tempfile::tempdir().unwrap();
    let index = Index::of(&[1, 1, 2], 8, 2).bytes();
    let bin = pair(dir.path(), &u16s([7, 7, 7, 8].into_iter()), &index);
    let masked = |bits: u8| {
        let mask = [LOSS_MASK_MAGIC.as_slice(), &4u64.to_le_bytes(), &[bits]].concat();
        std::fs::write(bin.with_extension("mask"), mask).unwrap();
        Dataset::open(&bin, Tokenizer::U16).unwrap()
    };
    let by_mask = Hidden { by_loss_mask: true, ..Hidden::default() };
    let both = Hidden { documents: true, ..by_mask };
    let by_end = Hidden { end: Some(7), ..both };
    let all = Hidden::default();
    for (bits, hidden, works) in [
        (0b0000, all, true),
        (0b0000, by_mask, false),
        // The first token of all is no target.
        (0b0001, by_mask, false),
        (0b0010, by_mask, true),
        // First tokens of documents are not scored.
        (0b0111, both, false),
        (0b1000, both, true),
        (0b1111, by_end, false),
    ] {
        let checked = masked(bits).require_scored(hidden);
        assert_eq!(checked.is_ok(), works, "{bits:04b} {hidden:?}");
        if let Err(error) = checked {
            let (error, origin) = (error.to_string(), bin.display());
            let begins = format!("data = {origin}: none of its tokens is scored: ");
            assert!(error.starts_with(&begins), "{error}");
        }
    }
    let said = |by_loss_mask| masked(1).beside(by_loss_mask).collect::<Vec<_>>().concat();
    let origin = bin.display();
    assert_eq!(
        said(true),
        format!(
            "data = {origin}: its .idx has 3 documents, and its .mask says which tokens are scored"
        )
    );
    assert!(said(false).contains("its .mask is not used"));
    std::fs::remove_file(bin.with_extension("mask")).unwrap();
    assert!(said_of(&bin).contains("it has no .mask: every token is scored"));
    std::fs::remove_file(bin.with_extension("idx")).unwrap();
    assert!(said_of(&bin).contains("it has no .idx"));
    assert_eq!(Dataset::from_bytes(vec![1; 9]).beside(true).count(), 0);
}

fn said_of(bin: &Path) -> String {
    Dataset::open(bin, Tokenizer::U16).unwrap().beside(true).collect()
}
