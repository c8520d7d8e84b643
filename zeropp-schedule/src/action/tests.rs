use std::collections::HashSet;

use super::*;
use crate::exchange::{parse, spell};

fn place(names: Names) -> Operand {
    match names {
        Names::Nothing => Operand::Nothing,
        Names::Stage => Operand::Stage(3),
        Names::MicroBatch => Operand::MicroBatch(3, 17),
        Names::Peer => Operand::Peer(3, 17, 2),
        Names::Pair => Operand::Pair((3, 17), (10, 4)),
    }
}

#[test]
fn every_row_is_the_row_of_one_action() {
    for (number, row) in ACTIONS.iter().enumerate() {
        assert_eq!(row.kind as usize, number);
        let place = place(row.names);
        let action = Action::new(row.kind, place).expect("its row says what it names");
        assert_eq!(action.parts(), (row.kind, place));
        for other in [Names::Nothing, Names::Stage, Names::MicroBatch, Names::Pair] {
            let made = Action::new(row.kind, self::place(other));
            assert_eq!(made.is_some(), other == row.names, "{:?} of {other:?}", row.kind);
        }
    }
}

#[test]
fn no_two_actions_are_spelled_alike_and_files_are_read_back() {
    let mut spelled = HashSet::new();
    for row in ACTIONS {
        let action = Action::new(row.kind, place(row.names)).unwrap();
        assert!(spelled.insert(action.to_string()), "{action}");
        assert_eq!(parse(&spell(&action)), Ok(action));
    }
}

#[test]
fn every_spelling_is_in_the_documented_table() {
    let documented = include_str!("../exchange/mod.rs");
    for row in ACTIONS {
        let action = spell(&Action::new(row.kind, place(row.names)).unwrap());
        let shown = action.replace("17", "1").replace("3", "0");
        let shown = if row.names == Names::Pair { row.file.to_string() } else { shown };
        let line = documented
            .lines()
            .find(|line| line.starts_with("//! |") && line.contains('`') && line.contains(&shown));
        let line = line.unwrap_or_else(|| panic!("{shown} is not in the table"));
        assert_eq!(line.contains("zeropp only"), row.torch == Torch::Unknown, "{line}");
    }
}
