//! Verdicts on made-up runs of four ranks: two stages on two hosts, two ranks that share each.

use proptest::prelude::*;

use super::{
    ActionEntry, Cause, CommError, Coords, End, EndKind, Entry, GroupRecord, Header, OpEntry,
    Operation, Outcome, Pause, Peer, Record, Run, Verdict, judge,
};

const S: u64 = 1_000_000_000;
/// When the made-up runs fail.
const END: u64 = 100 * S;

/// A rank that has done nothing yet and learns of the failure 1 ms after it.
fn rank(rank: usize) -> Record {
    let group = |name: String, members: &[usize]| GroupRecord {
        name,
        members: members.to_vec(),
        collectives: 0,
    };
    let (pp, zero3) = (rank / 2, rank % 2);
    let header = Header {
        format: 1,
        run: "1-a".into(),
        job: String::new(),
        rank,
        coords: Coords { pp, zero3, dp: 0 },
        mesh: Coords { pp: 2, zero3: 2, dp: 1 },
        processes: (0..4).map(|r| Peer { host: format!("node{}", r / 2), pid: 40 + r }).collect(),
        engine: "mpi".into(),
        schedule: "gpipe".into(),
        exchanged: None,
        experts: None,
        placement: vec![0, 1],
        timeout_s: 3.0,
        ahead_ns: 0,
        end: End {
            kind: EndKind::Peer,
            at_ns: END + S / 1000,
            text: "aborted".into(),
            error: None,
        },
        pauses: Vec::new(),
        groups: vec![
            group("world".into(), &[0, 1, 2, 3]),
            group(format!("zero3[{pp}]"), &[2 * pp, 2 * pp + 1]),
            group(format!("pipeline[{zero3}]"), &[zero3, zero3 + 2]),
        ],
        entries: 0,
    };
    Record { header, entries: Vec::new() }
}

impl Record {
    fn action(
        mut self,
        action: &str,
        begin_ns: u64,
        compute: Option<(u64, Option<u64>)>,
    ) -> Record {
        let stage = action[..1].parse().ok();
        self.entries.push(Entry::Action(ActionEntry {
            step: 7,
            action: action.into(),
            stage,
            micro_batch: Some(0),
            begin_ns,
            compute_ns: compute.map(|c| c.0),
            computed_ns: compute.and_then(|c| c.1),
            end_ns: compute.and_then(|c| c.1),
        }));
        self
    }

    /// An operation that the rank has waited for since `since`: until `end`, or until it failed.
    fn op(mut self, operation: Operation, group: usize, since: u64, end: Option<u64>) -> Record {
        let group = &mut self.header.groups[group];
        let number = group.collectives;
        group.collectives += 1;
        let (outcome, ended_ns) = match end {
            Some(end) => (Outcome::Done, Some(end)),
            None => (Outcome::Failed, Some(self.header.end.at_ns)),
        };
        self.entries.push(Entry::Operation(OpEntry {
            group: group.name.clone(),
            operation,
            number,
            tag: None,
            peer: None,
            buffer: Some(("f32".into(), 64)),
            issued_ns: since,
            waited_ns: Some(since),
            ended_ns,
            outcome,
        }));
        self
    }

    /// A message of stage 0's F5 or, from stage 1, its B5.
    fn message(self, operation: Operation, peer: usize, since: u64, end: Option<u64>) -> Record {
        let up = (operation == Operation::Send) == (peer >= 2);
        let tag = if up { 1 << 32 | 5 } else { 1 << 62 | 5 };
        let mut record = self.op(operation, 2, since, end);
        record.header.groups[2].collectives = 0;
        let Some(Entry::Operation(op)) = record.entries.last_mut() else { unreachable!() };
        (op.tag, op.peer, op.number) = (Some(tag), Some(peer), 0);
        if operation == Operation::Send {
            op.waited_ns = None;
        }
        record
    }

    fn ends(mut self, kind: EndKind, at_ns: u64, error: Option<CommError>) -> Record {
        let text = error.as_ref().map_or("its own words".into(), CommError::to_string);
        for entry in &mut self.entries {
            if let Entry::Operation(op) = entry
                && op.outcome == Outcome::Failed
            {
                op.ended_ns = Some(at_ns);
            }
        }
        self.header.end = End { kind, at_ns, text, error };
        self
    }

    fn times_out(self, missing: &[usize]) -> Record {
        let error = CommError::Timeout {
            group: "pipeline[0]".into(),
            operation: "recv".into(),
            sequence: 5,
            after_s: 3.0,
            missing: missing.to_vec(),
        };
        self.ends(EndKind::Timeout, END, Some(error))
    }
}

fn verdict(mut records: Vec<Record>) -> Verdict {
    for record in &mut records {
        record.header.entries = record.entries.len();
    }
    judge(&Run { name: "1-a".into(), records, ..Run::default() })
}

fn check(found: &Verdict, cause: Cause, ranks: &[usize], parts: &[&str]) {
    assert_eq!((found.cause, found.ranks.as_slice()), (cause, ranks), "{found:#?}");
    let all = format!("{}\n{}", found.summary, found.reasons.join("\n"));
    parts.iter().for_each(|part| assert!(all.contains(part), "{part} not in: {all}"));
}

/// Ranks 0 and 1 wait for the gradients of 2 and 3; 3 waits for 2 to join a reduction.
fn waiting_for_rank_2() -> Vec<Record> {
    let since = END - 3 * S;
    vec![
        rank(0).action("0B5", since, None).message(Operation::Recv, 2, since, None),
        rank(1).action("0B5", since, None).message(Operation::Recv, 3, since, None),
        rank(2).action("1B5", since, Some((since, None))),
        rank(3).action("1B5", since, None).op(Operation::ReduceScatter, 1, since, None),
    ]
}

#[test]
fn a_panic_is_the_cause_whatever_came_after() {
    let mut records = waiting_for_rank_2();
    records[2] = records[2].clone().ends(EndKind::Panic, END, None);
    records[0] = records[0].clone().ends(EndKind::Panic, END + 5 * S, None);
    let found = verdict(records);
    check(&found, Cause::Panicked, &[2], &["its own words", "stage 1", "action 1B5", "node1"]);
    assert_eq!((found.step, found.stage, found.action.as_deref()), (Some(7), Some(1), Some("1B5")));
}

#[test]
fn a_rank_that_computes_for_ever_is_at_the_end_of_every_chain() {
    let mut records = waiting_for_rank_2();
    records[1] = records[1].clone().times_out(&[3]);
    let found = verdict(records);
    check(
        &found,
        Cause::Stuck,
        &[2],
        &["computing for 3.0 s", "3 ranks waited", "rank 0 had waited"],
    );
    assert!(found.operation.unwrap().contains("what 1B5 gives, from rank 2"));
}

#[test]
fn a_rank_without_a_record_was_killed_or_frozen() {
    let mut records = waiting_for_rank_2();
    records.remove(2);
    for record in &mut records {
        *record = record.clone().ends(EndKind::Signal(15), END, None);
    }
    let killed = verdict(records.clone());
    check(&killed, Cause::Killed, &[2], &["left no record", "stage 1", "step 7", "the launcher"]);
    // Another that could not write is not to blame, for no rank waited for it.
    let two = verdict(records[..2].to_vec());
    assert_eq!((two.cause, two.ranks[0]), (Cause::Killed, 2));

    records[0] = records[0].clone().times_out(&[2]);
    check(&verdict(records), Cause::Frozen, &[2], &["rank 2 has not arrived"]);
}

#[test]
fn a_host_without_records_is_lost() {
    let mut records = waiting_for_rank_2();
    records.truncate(2);
    records[0] = records[0].clone().times_out(&[2]);
    check(&verdict(records), Cause::HostLost, &[2, 3], &["node1", "link"]);
}

#[test]
fn a_process_that_stood_still_is_named_though_it_was_woken() {
    let mut records = waiting_for_rank_2();
    records[0] = records[0].clone().times_out(&[2]);
    let pause = Pause { from_ns: END - 3 * S, to_ns: END + S };
    records[2].header.pauses.push(pause);
    records[2].header.end.at_ns = END + S;
    check(
        &verdict(records.clone()),
        Cause::Frozen,
        &[2],
        &["nothing of its process ran for 4.0 s"],
    );
    // A machine that slept took all of them along.
    for record in &mut records {
        record.header.pauses = vec![pause];
    }
    check(&verdict(records), Cause::Stuck, &[2], &[]);
}

/// Rank 0 has sent what rank 2 waits for; the same for 1 and 3. Nothing comes through.
fn cut() -> Vec<Record> {
    let since = END - 3 * S;
    let pair = |low: usize| {
        let high = low + 2;
        let sends = |r: usize, peer| rank(r).message(Operation::Send, peer, since, Some(since));
        [
            sends(low, high).message(Operation::Recv, high, since, None),
            rank(high).message(Operation::Recv, low, since - S / 100, None),
        ]
    };
    let ([a, c], [b, d]) = (pair(0), pair(1));
    vec![a, b, c, d]
}

#[test]
fn a_cut_link_is_between_hosts() {
    let mut records = cut();
    records[0] = records[0].clone().times_out(&[2, 3]);
    records[2] = records[2].clone().ends(EndKind::Signal(15), END - S / 10, None);
    let found = verdict(records);
    check(&found, Cause::LinkCut, &[0, 2], &["node0 and node1", "had done its part"]);
    assert_eq!(found.hosts, ["node0", "node1"]);
}

#[test]
fn clocks_that_differ_change_nothing() {
    let shift = |record: &mut Record, ns: u64| {
        record.header.ahead_ns = ns as i64;
        record.header.end.at_ns += ns;
        for entry in &mut record.entries {
            let Entry::Operation(op) = entry else { continue };
            op.issued_ns += ns;
            op.waited_ns = op.waited_ns.map(|t| t + ns);
            op.ended_ns = op.ended_ns.map(|t| t + ns);
        }
    };
    let mut records = cut();
    records[0] = records[0].clone().times_out(&[2, 3]);
    let before = verdict(records.clone());
    records[2..].iter_mut().for_each(|record| shift(record, 3600 * S));
    assert_eq!(verdict(records), before);
}

#[test]
fn a_rank_that_panics_is_seen_by_its_own_clock() {
    // It began its action a moment ago, and its clock is thought to be ahead, or behind.
    for ahead in [-20_000_000, 0, 20_000_000] {
        let mut records = waiting_for_rank_2();
        records[2] = rank(2)
            .action("1F5", END - S / 2000, Some((END - S / 2000, Some(END - S / 4000))))
            .action("1B5", END - S / 4000, Some((END - S / 4000, None)))
            .action("1F6", END + S / 4000, Some((END + S / 4000, None)))
            .ends(EndKind::Panic, END, None);
        records[2].header.ahead_ns = ahead;
        let found = verdict(records);
        check(&found, Cause::Panicked, &[2], &["action 1B5"]);
    }
}

#[test]
fn a_message_on_its_way_for_a_moment_is_not_lost() {
    let mut records = cut();
    for record in &mut records {
        for entry in &mut record.entries {
            let Entry::Operation(op) = entry else { continue };
            op.issued_ns += 3 * S - S / 20;
            op.waited_ns = op.waited_ns.map(|t| t + 3 * S - S / 20);
        }
        *record = record.clone().ends(EndKind::Signal(2), END, None);
    }
    check(&verdict(records), Cause::Stopped, &[], &["SIGINT", "from outside"]);
}

#[test]
fn one_rank_ended_before_the_others_is_named() {
    let mut records = waiting_for_rank_2();
    for (i, record) in records.iter_mut().enumerate() {
        let at = END + if i == 3 { 0 } else { S };
        *record = record.clone().ends(EndKind::Signal(15), at, None);
    }
    check(&verdict(records), Cause::Stopped, &[3], &["SIGTERM", "1.0 s later"]);
}

#[test]
fn a_slow_rank_is_not_a_stuck_one() {
    let since = END - 3 * S;
    let records = vec![
        rank(0).message(Operation::Recv, 2, since, None).times_out(&[2]),
        rank(1).message(Operation::Recv, 3, since, None),
        // Only a moment ago it got what rank 3 took so long for.
        rank(2).action("1B6", END - S / 50, Some((END - S / 50, None))),
        rank(3).action("1B5", since, Some((since, Some(END - S / 40)))).action(
            "1B6",
            END - S / 50,
            Some((END - S / 50, None)),
        ),
    ];
    let found = verdict(records);
    check(&found, Cause::Slow, &[3], &["took 3.0 s for one action"]);
    assert_eq!(found.action.as_deref(), Some("1B5"));
}

#[test]
fn ranks_that_wait_for_each_other() {
    let since = END - 3 * S;
    let records = vec![
        rank(0).message(Operation::Recv, 2, since, None).times_out(&[2]),
        rank(1).message(Operation::Recv, 3, since, None),
        rank(2).message(Operation::Recv, 0, since, None),
        rank(3).message(Operation::Recv, 1, since, None),
    ];
    let found = verdict(records);
    assert_eq!(found.cause, Cause::Deadlock, "{found:#?}");
    assert!(found.ranks == [0, 2] || found.ranks == [1, 3], "{found:#?}");
}

#[test]
fn the_odd_one_out_called_something_else() {
    let mut records: Vec<Record> =
        (0..4).map(|r| rank(r).op(Operation::AllReduce, 0, END - S / 2, None)).collect();
    let Entry::Operation(op) = &mut records[1].entries[0] else { unreachable!() };
    op.buffer = Some(("f32".into(), 32));
    let error = CommError::Mismatch {
        group: "world".into(),
        sequence: 0,
        rank: 3,
        mine: "all_reduce of 64 f32".into(),
        peer: 1,
        theirs: "all_reduce of 32 f32".into(),
    };
    records[3] = records[3].clone().ends(EndKind::Error, END, Some(error));
    check(&verdict(records), Cause::Mismatched, &[1], &["all_reduce of 32 f32"]);
}

#[test]
fn nothing_to_go_by_is_said() {
    let found = verdict(Vec::new());
    assert_eq!((found.cause, found.summary.as_str()), (Cause::Unknown, "no record can be read"));
    let found = verdict((0..4).map(rank).collect());
    assert_eq!(found.cause, Cause::Unknown);
}

fn text(record: &Record) -> Vec<u8> {
    let mut record = record.clone();
    record.header.entries = record.entries.len();
    let mut text = Vec::new();
    record.write(&mut text).unwrap();
    text
}

#[test]
fn a_cut_file_gives_what_is_there_and_says_so() {
    let whole = text(&waiting_for_rank_2()[0]);
    let (record, problem) = Record::read(&whole).unwrap();
    assert_eq!((text(&record), problem), (whole.clone(), None));
    let (part, problem) = Record::read(&whole[..whole.len() - 20]).unwrap();
    assert_eq!(part.entries.len(), 1);
    assert!(problem.unwrap().contains("line 3"));
    let lines = whole.split_inclusive(|b| *b == b'\n').take(2).collect::<Vec<_>>().concat();
    assert_eq!(Record::read(&lines).unwrap().1.unwrap(), "ends after 1 of 2 entries");
    assert!(Record::read(&whole[..50]).unwrap_err().contains("line 1"));
    assert!(Record::read(b"").is_err());
}

/// A record comes from another machine; what is printed of it must not command the terminal, nor
/// may a name forge a line of the report.
#[test]
fn texts_of_a_record_are_escaped() {
    let mut record = rank(0).action("0F0", END - S, None);
    record.header.processes[1].host = "node\u{1b}[2J\nerror: forged".into();
    record.header.end.text = "two\nlines \u{9b}31m".into();
    let (read, problem) = Record::read(&text(&record)).unwrap();
    assert_eq!(problem, None);
    assert_eq!(read.header.processes[1].host, "node\\u001b[2J\\u000aerror: forged");
    assert_eq!(read.header.end.text, "two\nlines \\u009b31m");
    assert_eq!(read.entries, record.entries);
}

/// Before, a FIFO that is named like a record was waited for.
#[test]
#[cfg(unix)]
fn a_pipe_among_the_records_is_reported_and_not_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("1-a-rank0000.jsonl"), text(&rank(0))).unwrap();
    let fifo = dir.path().join("1-a-rank0001.jsonl");
    assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let run = Run::read(&[dir.path().into()], None).unwrap();
    assert_eq!((run.records.len(), run.unknown.as_slice()), (1, [1].as_slice()));
    assert!(run.damaged[0].ends_with("it is a pipe (FIFO), not a regular file"), "{run:?}");
}

#[test]
fn a_folder_may_hold_other_runs_and_rubbish() {
    let dir = tempfile::tempdir().unwrap();
    let put = |name: &str, text: &[u8]| std::fs::write(dir.path().join(name), text).unwrap();
    let folders = [dir.path().to_path_buf()];
    put("notes.txt", b"hello");
    let error = Run::read(&folders, None).unwrap_err().to_string();
    assert!(error.contains("no records of a failed run"), "{error}");
    for (at, record) in waiting_for_rank_2().iter_mut().enumerate() {
        for run in ["9-old", "10-new"] {
            record.header.run = run.into();
            put(&Record::file_name(run, at), &text(record));
        }
    }
    put(&Record::file_name("10-new", 3), b"{\"format\":7");
    put(".10-new-rank0002.jsonl.77", b"half a fi");
    let run = Run::read(&folders, None).unwrap();
    assert_eq!((run.name.as_str(), run.records.len()), ("10-new", 3));
    assert_eq!((run.others.as_slice(), run.damaged.len()), (["9-old".to_string()].as_slice(), 1));
    assert_eq!(Run::read(&folders, Some("9-old")).unwrap().records.len(), 4);
    let error = Run::read(&folders, Some("8")).unwrap_err().to_string();
    assert!(error.contains("run = 8") && error.contains("9-old, 10-new"), "{error}");
    let nowhere = [dir.path().join("none")];
    assert!(Run::read(&nowhere, None).unwrap_err().to_string().contains("cannot be read"));
}

/// Before, each was a run of its own, and the one that was read accused the three others.
#[test]
fn processes_that_fail_before_they_have_met_are_of_one_run() {
    let dir = tempfile::tempdir().unwrap();
    let put = |run: &str, at: usize, job: &str, end_s: u64| {
        let mut record = rank(at);
        record.header.run = run.into();
        record.header.job = job.into();
        record.header.processes = vec![Peer::default(); 4];
        record.header.processes[at] = Peer { host: "node0".into(), pid: 40 + at as u32 };
        let text_of_end = format!("no thread for rank {at}");
        let at_ns = end_s * S + at as u64;
        record.header.end = End { kind: EndKind::Error, at_ns, text: text_of_end, error: None };
        std::fs::write(dir.path().join(Record::file_name(run, at)), text(&record)).unwrap();
    };
    // A try before, another job at the same time, and this one, whose rank 2 left nothing.
    (0..4).for_each(|at| put(&format!("50-{at}"), at, "job 7", 60));
    put("100-a", 2, "job 8", 120);
    for (run, at) in [("100-b", 0), ("101-a", 1), ("102-c", 3)] {
        put(run, at, "job 7", 103);
    }
    let run = Run::read(&[dir.path().into()], None).unwrap();
    let ranks: Vec<usize> = run.records.iter().map(|record| record.header.rank).collect();
    assert_eq!((run.name.as_str(), ranks), ("102-c", vec![0, 1, 3]));
    assert_eq!(run.others, ["50-0", "50-1", "50-2", "50-3", "100-a"]);
    let pids: Vec<u32> = run.records[0].header.processes.iter().map(|peer| peer.pid).collect();
    assert_eq!(pids, [40, 41, 0, 43]);
    let verdict = judge(&run);
    assert_eq!((verdict.cause, verdict.ranks), (Cause::Failed, vec![0]));
    assert_eq!(verdict.reasons, ["no thread for rank 0"]);
    let first = Run::read(&[dir.path().into()], Some("50-2")).unwrap();
    assert_eq!((first.records.len(), first.others.len()), (4, 4));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

    /// What a run's process judges in memory is what `why` reads from files, wherever they lie.
    #[test]
    fn records_in_memory_and_in_files_give_the_same_verdict(
        ends in prop::collection::vec((0u8..6, 0usize..4, 0u64..4_000), 4),
        at_work in prop::collection::vec(0u8..4, 4),
        apart in any::<bool>(),
    ) {
        check_files(&ends, &at_work, apart);
    }

    #[test]
    fn any_damage_is_read_and_judged_without_a_panic(
        cuts in proptest::collection::vec((0usize..4, 0.0f64..1.0, any::<u8>()), 0..6),
    ) {
        check_damage(cuts);
    }
}

/// Rank 0 waited for rank 2, whose number the damage makes one that there never was, and rank 1
/// left nothing.
#[test]
fn a_damaged_record_that_names_no_rank_of_the_run_is_judged() {
    check_damage(vec![(0, 0.8833699648685971, 55), (1, 0.0, 0)]);
}

/// Changes a byte of a file, or cuts it there, and judges what can be read: no panic, and words.
fn check_files(ends: &[(u8, usize, u64)], at_work: &[u8], apart: bool) {
    let record = |(r, (kind, other, ms)): (usize, &(u8, usize, u64))| {
        let record = match at_work[r] {
            0 => rank(r).action("1F0", END - 5 * S, Some((END - 5 * S, None))),
            1 => rank(r).op(Operation::AllReduce, 0, END - 3 * S, None),
            2 => rank(r).message(Operation::Recv, (r + 2) % 4, END - 3 * S, None),
            _ => rank(r),
        };
        let at_ns = END + ms * 1_000_000;
        let aborted = CommError::Aborted { rank: *other, reason: "it failed".into() };
        match kind {
            0 => record.times_out(&[*other]),
            1 => record.ends(EndKind::Panic, at_ns, None),
            2 => record.ends(EndKind::Error, at_ns, None),
            3 => record.ends(EndKind::Peer, at_ns, Some(aborted)),
            _ => record.ends(EndKind::AtWork, at_ns, None),
        }
    };
    let mut records: Vec<Record> = ends.iter().enumerate().map(record).collect();
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    for record in &mut records {
        record.header.entries = record.entries.len();
        let r = record.header.rank;
        let folder = folders[usize::from(apart && r >= 2)].path();
        std::fs::write(folder.join(Record::file_name("1-a", r)), text(record)).unwrap();
    }
    let paths = folders.each_ref().map(|folder| folder.path().to_path_buf());
    let read = judge(&Run::read(&paths, None).unwrap());
    let here = judge(&Run { name: "1-a".into(), records, ..Run::default() });
    assert_eq!(here, read);
}

fn check_damage(cuts: Vec<(usize, f64, u8)>) {
    let mut files: Vec<Vec<u8>> = cut().iter().map(text).collect();
    for (file, at, byte) in cuts {
        let at = (files[file].len() as f64 * at) as usize;
        if byte % 2 == 0 {
            files[file].truncate(at);
        } else if let Some(old) = files[file].get_mut(at) {
            *old = byte;
        }
    }
    let records = files.iter().filter_map(|file| Some(Record::read(file).ok()?.0)).collect();
    let run = Run { name: "1-a".into(), records, ..Run::default() };
    let found = judge(&run);
    assert!(!found.summary.is_empty());
}
