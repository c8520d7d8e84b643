//! What README.md says of the program is what the program is.

use zeropp::pipeline::schedules::KINDS;

const README: &str = include_str!("../../README.md");

/// What stands between `<!-- name: begin -->` and `<!-- name: end -->`.
fn section(name: &str) -> &'static str {
    let (begin, end) = (format!("<!-- {name}: begin -->\n"), format!("<!-- {name}: end -->"));
    let from = README.find(&begin).expect("a section begins") + begin.len();
    &README[from..][..README[from..].find(&end).expect("a section ends")]
}

#[test]
fn the_list_of_schedules_is_the_table_of_kinds() {
    let row = |kind: &zeropp::pipeline::schedules::Kind| {
        format!("| `{}` | {} |\n", kind.name, kind.about)
    };
    let rows: String = KINDS.iter().map(row).collect();
    let table = format!("\n| kind | order |\n|---|---|\n{rows}\n");
    assert_eq!(section("kinds"), table, "put this into README.md:\n{table}");
}
