//! Files that PyTorch 2.11 wrote (`torch_loader.py write`) read here and write back cell for cell.

use std::path::Path;

use zeropp_pipeline::{
    exchange::csv,
    ir::{Action, looping, vee},
};

/// Name, ranks, micro-batches, whether stages are placed as a V, overlapped pairs.
const FILES: [(&str, usize, usize, bool, usize); 5] = [
    ("looped_bfs", 2, 3, false, 0),
    ("interleaved_1f1b", 3, 6, false, 0),
    ("interleaved_zero_bubble", 2, 4, false, 0),
    ("zbv", 2, 4, true, 0),
    ("dualpipe_v", 2, 5, true, 11),
];

#[test]
fn what_pytorch_writes_is_read_and_written_back() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/torch_csv");
    for (name, pp, micro_batches, folded, overlaps) in FILES {
        for form in ["compute", "lowered"] {
            let path = folder.join(format!("{name}.{form}.csv"));
            let text = std::fs::read_to_string(&path).expect("a file beside the test");
            let schedule = csv::read(&text).unwrap_or_else(|e| panic!("{name}.{form}: {e}"));
            let placement = if folded { vee(pp, 2) } else { looping(pp, 2) };
            assert_eq!(schedule.placement, placement, "{name}.{form}");
            assert_eq!(schedule.units, [micro_batches], "{name}.{form}");
            let count = |of: fn(&Action) -> bool| {
                schedule.ranks.iter().flatten().filter(|a| of(a)).count()
            };
            assert_eq!(count(|a| matches!(a, Action::Overlap { .. })), overlaps, "{name}.{form}");
            let reduced = count(|a| matches!(a, Action::ReduceScatter { .. }));
            assert_eq!(reduced, if form == "lowered" { 2 * pp } else { 0 });

            // The table keeps idle cells; the schedule, written for PyTorch, all but them.
            let mut back = Vec::new();
            csv::write_table(&csv::read_table(&text).unwrap(), &mut back).unwrap();
            assert_eq!(String::from_utf8(back).unwrap(), text.replace('\r', ""), "{name}.{form}");
            let mut back = Vec::new();
            csv::write(&schedule, csv::Dialect::Torch, &mut back).unwrap();
            let back = csv::read(&String::from_utf8(back).unwrap()).unwrap();
            assert_eq!(back, schedule, "{name}.{form}");
        }
    }
}

#[test]
fn a_file_is_read_by_its_ending_and_named_in_errors() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/torch_csv");
    let read = zeropp_pipeline::exchange::read_file;
    assert_eq!(read(&folder.join("zbv.compute.csv")).unwrap().schedule.pp(), 2);
    let missing = read(&folder.join("none.csv")).unwrap_err().to_string();
    assert!(missing.contains("none.csv: "), "{missing}");
    let other = read(&folder.join("../torch_loader.py")).unwrap_err().to_string();
    assert!(other.ends_with("torch_loader.py: a schedule file ends in .csv or .json"), "{other}");
}
