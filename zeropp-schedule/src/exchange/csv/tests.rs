use proptest::prelude::*;

use super::*;
use crate::exchange::samples::any_schedule;

fn text(schedule: &Schedule, dialect: Dialect) -> String {
    let mut out = Vec::new();
    write(schedule, dialect, &mut out).unwrap();
    String::from_utf8(out).unwrap()
}

/// What PyTorch 2.11 writes for two ranks, two stages and two micro-batches of 1F1B; its lines
/// end in CR LF.
const LOWERED: &str = "\
     0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD,0RESHARD\r\n\
     1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1REDUCE_GRAD,1RESHARD\r\n";

#[test]
fn a_lowered_file_reads_and_writes_back() {
    let schedule = read(LOWERED).unwrap();
    assert_eq!((schedule.placement.as_slice(), schedule.units.as_slice()), (&[0, 1][..], &[2][..]));
    let names: Vec<String> = schedule.ranks[0].iter().map(Action::to_string).collect();
    let wanted = "AG0 0F0 >A0.0 0F1 >A0.1 <G0.0 0BW0 <G0.1 0BW1 RS0 FREE0";
    assert_eq!(names.join(" "), wanted);
    for dialect in [Dialect::Zeropp, Dialect::Torch] {
        assert_eq!(text(&schedule, dialect), LOWERED.replace('\r', ""));
    }
}

#[test]
fn idle_cells_survive_in_the_table() {
    let file = ",0F0,,0I0,0W0\n\"\"\n(1F0;1B1)OVERLAP_F_B, 1F1 ,\"1B0\",\n";
    let table = read_table(file).unwrap();
    assert_eq!(table.ranks[0].iter().filter(|c| c.is_none()).count(), 2);
    assert_eq!(table.ranks[1], [None]);
    let mut out = Vec::new();
    write_table(&table, &mut out).unwrap();
    let wanted = ",0F0,,0I0,0W0\n\"\"\n(1F0;1B1)OVERLAP_F_B,1F1,1B0,\n";
    assert_eq!(String::from_utf8(out).unwrap(), wanted);
}

#[test]
fn a_v_placement_is_found() {
    let schedule = read("0F0,3F0,3B0,0B0\n,1F0,2F0,2B0,1B0\n").unwrap();
    assert_eq!(schedule.placement, [0, 1, 1, 0]);
    assert_eq!(schedule.ranks[1].len(), 4, "idle is no action");
}

#[test]
fn units_come_from_the_reductions() {
    let schedule = read("0F0,0F1,0B0,0B1,0REDUCE_GRAD,0F2,0B2,0REDUCE_GRAD\n").unwrap();
    assert_eq!(schedule.units, [2, 1]);
    assert!(!text(&schedule, Dialect::Zeropp).starts_with('#'));
    // One reduction is one unit, wherever it stands: a misplaced one is the verifier's to name.
    assert_eq!(read("0F0,0F1,0B0,0REDUCE_GRAD,0B1\n").unwrap().units, [2]);
    let header = read("#units,1,2\n0F0,0F1,0F2,0B0,0B1,0B2\n").unwrap();
    assert_eq!(header.units, [1, 2]);
    assert!(text(&header, Dialect::Zeropp).starts_with("#units,1,2\n"));
    assert!(!text(&header, Dialect::Torch).contains('#'));
}

#[test]
fn pytorch_gets_only_what_it_knows() {
    let file = "0UNSHARD,0F0,0R0,0I0,0W0,0REDUCE_GRAD,0F1,0I1,0W1,0REDUCE_GRAD,\
                0REPLICA_REDUCE,OPTIMIZER_STEP\n";
    let schedule = read(file).unwrap();
    assert_eq!(text(&schedule, Dialect::Zeropp), file);
    let wanted = "0UNSHARD,0F0,0I0,0W0,0F1,0I1,0W1,0REDUCE_GRAD\n";
    assert_eq!(text(&schedule, Dialect::Torch), wanted);
}

/// Each file with the start of its error.
#[test]
fn errors_name_row_column_and_what_was_found() {
    let big = "9".repeat(30);
    let cases = [
        ("", "row 1: an empty row"),
        ("0F0\n\n", "row 2: an empty row"),
        ("0F0\n,,\n", "row 2: a rank without an action"),
        ("0F0,0B0\n1F0,1B0x\n", "row 2, column 2: found \"1B0x\": \"x\" does not belong"),
        ("0F0,0B0 0W0\n", "row 1, column 2: found \"0B0 0W0\": \" 0W0\" does not belong"),
        ("0F0,0F0.5\n", "row 1, column 2: found \"0F0.5\": \".5\" does not belong"),
        ("0F0,0X0\n", "row 1, column 2: found \"0X0\": unknown kind \"X\"; known kinds: F, I"),
        ("0F0,0f0\n", "row 1, column 2: found \"0f0\": \"f0\" does not belong"),
        ("0F\n", "row 1, column 1: found \"0F\": F needs a micro-batch"),
        ("0F0,0UNSHARD1\n", "row 1, column 2: found \"0UNSHARD1\": UNSHARD takes no micro-batch"),
        ("F0\n", "row 1, column 1: found \"F0\": an action starts with its stage"),
        ("-1F0\n", "row 1, column 1: found \"-1F0\": an action starts with its stage"),
        ("0\n", "row 1, column 1: found \"0\": unknown kind \"\""),
        (
            &format!("{big}F0\n"),
            "row 1, column 1: found \"999999999999999999999999999999F0\": the stage is too large",
        ),
        (
            &format!("0F{big}\n"),
            "row 1, column 1: found \"0F999999999999999999999999999999\": the micro-batch is \
             too large",
        ),
        (
            "0F0,(0F1;0I0)OVERLAP_F_B\n",
            "row 1, column 2: found \"(0F1;0I0)OVERLAP_F_B\": an overlap is written like",
        ),
        ("0F0,(0F1;0B0)OVERLAP_F_B7\n", "row 1, column 2: found"),
        ("0F0,(0F1;(0F1;0B0)OVERLAP_F_B)OVERLAP_F_B\n", "row 1, column 2: found"),
        ("0F0,\"0B0\n", "row 1, column 2: found \"\\\"0B0\""),
        ("0F0\n0B0\n", "row 2, column 1: stage 0 is computed here and in row 1"),
        ("0F0\n2F0\n", "no rank computes stage 1, but one computes 2"),
        (
            "0F0,0F18446744073709551615\n",
            "no rank computes micro-batch 1, but one computes 18446744073709551615",
        ),
        ("0UNSHARD\n", "no rank computes anything"),
        ("0F0,,1UNSHARD\n", "row 1, column 3: 1UNSHARD: stage 1 of 1"),
        ("0F0,0SEND_F1\n", "row 1, column 2: 0SEND_F1: micro-batch 1 of 1"),
        ("#units,2\n0F0\n", "row 1: units [2] do not sum to the 1 micro-batches"),
        ("#units,0,1\n0F0\n", "row 1: units: found \"0\""),
        ("#units\n0F0\n", "row 1: units: none given"),
        ("#kind,a\n0F0\n", "row 1: found \"kind,a\" after #"),
        ("0F0\n#units,1\n", "row 2: a line that starts with #"),
        (
            "0F0,0F1,0B0,0REDUCE_GRAD,0REDUCE_GRAD,0B1\n",
            "stage 0 reduces after the micro-batches []",
        ),
        (
            "0F0,0B0,0REDUCE_GRAD,0F1,0B1,0REDUCE_GRAD\n1F0,1F1,1B0,1B1,1REDUCE_GRAD\n",
            "stage 1 reduces in units of [2], stage 0 of [1, 1]",
        ),
    ];
    for (file, start) in cases {
        let error = read(file).expect_err(file).to_string();
        assert!(error.starts_with(start), "{file:?} gives {error:?}, not {start:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 300,
        failure_persistence: None,
        ..Default::default()
    })]

    #[test]
    fn any_schedule_survives(schedule in prop_oneof![any_schedule(false), any_schedule(true)]) {
        prop_assert_eq!(&read(&text(&schedule, Dialect::Zeropp)).unwrap(), &schedule);
    }

    /// PyTorch's dialect keeps everything of a schedule that PyTorch could have written.
    #[test]
    fn a_compute_only_schedule_survives_pytorch(mut schedule in any_schedule(true)) {
        schedule.units = vec![schedule.micro_batches()];
        prop_assert_eq!(&read(&text(&schedule, Dialect::Torch)).unwrap(), &schedule);
    }

    #[test]
    fn any_text_is_read_or_refused(
        file in "([0-9]{1,20}|[FIWBR]|SEND_F|UNSHARD|REDUCE_GRAD|OVERLAP_F_B|\
            #units|[(),;\"\r\n #é]){0,60}",
    ) {
        if let Ok(schedule) = read(&file) {
            prop_assert_eq!(read(&text(&schedule, Dialect::Zeropp)).unwrap(), schedule);
        }
    }

    #[test]
    fn a_good_file_with_one_byte_changed_is_read_or_refused(
        schedule in any_schedule(false), at in any::<prop::sample::Index>(), byte in 0u8..128,
    ) {
        let mut file = text(&schedule, Dialect::Zeropp).into_bytes();
        let at = at.index(file.len());
        file[at] = byte;
        let file = String::from_utf8(file).unwrap();
        if let Ok(schedule) = read(&file) {
            prop_assert_eq!(read(&text(&schedule, Dialect::Zeropp)).unwrap(), schedule);
        }
    }
}
