//! Files that PyTorch 2.11 wrote (`torch_loader.py write`) read here and write back cell for cell.

use std::path::{Path, PathBuf};

use zeropp_schedule::{
    exchange::csv,
    ir::{Action, looping, vee},
};

/// Name, ranks, micro-batches, whether stages are placed as a V, overlapped pairs.
const FILES: [(&str, usize, usize, bool, usize); 5] = [
    ("looped_bfs", 2, 3, false, 0),
    ("interleaved_1f1b", 3, 6, false, 0),
    ("interleaved_zero_bubble", 2, 4, false, 0),
    ("zbv", 2, 4, true, 0),
    ("dualpipe_v", 2, 5, true, 10),
];

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/torch_csv")
}

#[test]
fn pytorch_csv_round_trips() {
    for (name, pp, micro_batches, folded, overlaps) in FILES {
        for form in ["compute", "lowered"] {
            let file = format!("{name}.{form}.csv");
            let text = std::fs::read_to_string(folder().join(&file)).expect("beside the test");
            let schedule = csv::read(&text).unwrap_or_else(|e| panic!("{file}: {e}"));
            let placement = if folded { vee(pp, 2) } else { looping(pp, 2) };
            assert_eq!(schedule.placement, placement, "{file}");
            assert_eq!(schedule.units, [micro_batches], "{file}");
            let count =
                |of: fn(&Action) -> bool| schedule.ranks.iter().flatten().filter(|a| of(a)).count();
            assert_eq!(count(|a| matches!(a, Action::Overlap { .. })), overlaps, "{file}");
            let reduced = count(|a| matches!(a, Action::ReduceScatter { .. }));
            assert_eq!(reduced, if form == "lowered" { 2 * pp } else { 0 }, "{file}");

            // The table keeps idle cells too; the schedule keeps every action.
            let mut table = Vec::new();
            csv::write_table(&csv::read_table(&text).unwrap(), &mut table).unwrap();
            assert_eq!(String::from_utf8(table).unwrap(), text.replace('\r', ""), "{file}");
            let mut back = Vec::new();
            csv::write(&schedule, csv::Dialect::Torch, &mut back).unwrap();
            let back = csv::read(&String::from_utf8(back).unwrap()).unwrap();
            assert_eq!(back, schedule, "{file}");
        }
    }
}
