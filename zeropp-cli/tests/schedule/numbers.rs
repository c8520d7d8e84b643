//! Every number of the commands that plan, typed wrong in every usual way.

use super::common::zeropp;

/// Words that are typed by mistake where a number is wanted.
const BAD: [&str; 7] = ["-1", "nan", "inf", "0", "1000000000000", "abc", ""];
/// Flags that write files or say how to speak.
const NO_NUMBERS: [&str; 6] = ["--out", "--costs", "--against", "--machine", "--model", "--data"];

/// The flags that the help of a command shows with a value.
fn flags(command: &str) -> Vec<String> {
    let got = zeropp(".".as_ref(), &format!("{command} --help"));
    assert_eq!(got.code, Some(0), "{}", got.err);
    let flag = |line: &str| {
        let line = line.trim_start();
        let line =
            line.split_once(", --").map_or(line, |(_, long)| &line[line.len() - long.len() - 2..]);
        let (flag, rest) = line.split_once([' ', '['])?;
        (flag.starts_with("--") && rest.contains('<')).then(|| flag.to_string())
    };
    got.out.lines().filter_map(flag).filter(|f| !NO_NUMBERS.contains(&f.as_str())).collect()
}

/// A value either works or ends the command with one message that has the flag in it.
#[test]
fn a_number_that_does_not_work_is_one_message_with_its_flag() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("a.csv"), "0F0,0B0\n").unwrap();
    let small = "--layers 4 --hidden 32 --heads 2 --seq 16 --vocab 64";
    let mut refused = 0;
    for (command, line) in [
        ("schedule", "schedule --pp 2 --micro-batches 4".to_string()),
        ("compare", "compare a.csv a.csv".to_string()),
        ("plan", format!("plan --cpu --gpus 2 --global-batch 8 {small}")),
        ("playground", "playground -o page.html".to_string()),
    ] {
        let flags = flags(command);
        assert!(!flags.is_empty(), "{command}");
        for flag in &flags {
            for bad in BAD {
                // What stands in the line already is given again.
                let base: Vec<&str> = line.split(' ').collect();
                let at = base.iter().position(|word| word == flag);
                let kept = base.iter().enumerate();
                let kept = kept.filter(|(i, _)| at.is_none_or(|at| *i != at && *i != at + 1));
                let kept: Vec<&str> = kept.map(|(_, word)| *word).collect();
                let line = format!("{} {flag}={bad}", kept.join(" "));
                let got = zeropp(dir.path(), &line);
                // One of a layer's costs alone lacks the layers, whatever it is, and so on.
                let lacks = got.err.contains("required arguments were not provided");
                if got.code == Some(0) || lacks {
                    continue;
                }
                assert_eq!(got.code, Some(2), "{line}: {}{}", got.out, got.err);
                assert!(got.err.starts_with("error: "), "{line}: {}", got.err);
                assert_eq!(got.err.matches("error: ").count(), 1, "{line}: {}", got.err);
                let name = flag.trim_start_matches('-');
                assert!(got.err.replace('_', "-").contains(name), "{line}: {}", got.err);
                assert!(!got.err.contains("invalid value"), "{line}: {}", got.err);
                assert!(got.err.contains("; "), "{line}: {}", got.err);
                refused += 1;
            }
        }
    }
    assert!(refused > 200, "{refused}");
}
