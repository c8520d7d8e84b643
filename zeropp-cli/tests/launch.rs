//! Jobs of several processes, as launchers and users start them.

mod common;

use std::collections::BTreeSet;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Stdio};

use common::{Outcome, command};

const TOKEN: &str = "a token for tests only";

/// A port that is free, and so is the next one, at least for now.
fn free_port() -> u16 {
    loop {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        if port < u16::MAX && TcpListener::bind(("127.0.0.1", port + 1)).is_ok() {
            return port;
        }
    }
}

/// Starts `zeropp` with the words of `line` and, beside this test's own, the variables of `vars`.
fn start(line: &str, vars: &[(&str, &str)]) -> Child {
    let mut command = command(Path::new("."), line);
    for variable in ["ZEROPP_TOKEN", "RANK", "WORLD_SIZE", "SLURM_PROCID"] {
        command.env_remove(variable);
    }
    command.envs(vars.iter().copied()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().expect("the command can be started")
}

fn end(child: Child) -> Outcome {
    let output = child.wait_with_output().expect("it was started");
    let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
    Outcome { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
}

fn is_refused(outcome: &Outcome, message: &str) {
    assert_eq!(outcome.code, Some(2), "{message}: {}{}", outcome.out, outcome.err);
    assert!(outcome.err.contains(message), "no {message:?} in {}", outcome.err);
    let reported = outcome.err.lines().filter(|line| !line.starts_with("waiting for "));
    assert_eq!(reported.count(), 1, "one message: {}", outcome.err);
    assert!(!outcome.err.contains(TOKEN), "the token is a secret");
}

#[test]
fn one_process_shows_its_ranks() {
    let shown = end(start("ranks --pp 2 --zero3 2 --layers 99 --lr 1", &[]));
    assert_eq!(shown.code, Some(0), "{}", shown.err);
    let head = "pp 2 x zero3 2 x dp 1: 4 ranks in 1 process on 1 machine, told by this \
                process, met over itself";
    assert_eq!(shown.out.lines().next(), Some(head));
    assert_eq!(shown.out.lines().count(), 9, "{}", shown.out);
    assert!(shown.out.ends_with("every ZeRO-3 group is inside one machine\n"));
}

#[test]
fn every_rank_over_nccl_has_a_process_of_its_own() {
    let started = start("ranks --pp 2 --zero3 2 --engine nccl", &[]);
    let own = started.id().to_string();
    let shown = end(started);
    assert_eq!((shown.code, shown.err.as_str()), (Some(0), ""));
    let head = "pp 2 x zero3 2 x dp 1: 4 ranks in 4 processes on 1 machine, told by this process, \
                met over 127.0.0.1:";
    assert!(shown.out.starts_with(head), "{}", shown.out);
    let rows = shown.out.lines().skip(3).take(4).map(|row| row.split_whitespace().collect());
    let rows: Vec<Vec<_>> = rows.collect();
    let processes: BTreeSet<_> = rows.iter().map(|row| row[4]).collect();
    assert_eq!((processes.len(), rows[0][4]), (4, own.as_str()), "{}", shown.out);
    // They have ended with the first.
    for process in processes {
        assert!(!Path::new("/proc").join(process).exists(), "process {process} is still there");
    }
}

/// The processes that a process has started.
#[cfg(target_os = "linux")]
fn started_by(process: u32) -> Vec<String> {
    let path = format!("/proc/{process}/task/{process}/children");
    let children = std::fs::read_to_string(path).unwrap_or_default();
    children.split_whitespace().map(str::to_owned).collect()
}

/// Looks at something until it is so, for 20 s at most.
#[cfg(target_os = "linux")]
fn comes(mut is_so: impl FnMut() -> bool) -> bool {
    (0..400).any(|_| {
        std::thread::sleep(std::time::Duration::from_millis(50));
        is_so()
    })
}

#[test]
#[cfg(target_os = "linux")]
fn processes_of_ranks_end_with_the_first_where_it_is_killed_before_they_meet() {
    // Both look for rank 0, which does not come.
    let line = format!(
        "ranks --pp 4 --engine nccl --nodes 2 --node-rank 1 --rendezvous 127.0.0.1:{} \
         --start-timeout-s 120",
        free_port()
    );
    let mut first = start(&line, &[]);
    let mut others = Vec::new();
    assert!(comes(|| {
        others = started_by(first.id());
        !others.is_empty()
    }));
    first.kill().expect("it waits");
    first.wait().expect("it was started");
    // One whose new parent does not ask for its end may stay as a zombie.
    let has_ended = |process: &String| {
        let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
        stat.is_empty() || stat.rsplit(')').next().is_some_and(|rest| rest.starts_with(" Z"))
    };
    assert!(comes(|| others.iter().all(has_ended)), "{others:?} are still there");
}

/// Until then the settings have fewer ranks than the job.
#[test]
fn a_process_of_another_rank_touches_no_output_before_its_run_is_planned() {
    let line = "run --dry-run --plan=a100 --gpus 2 --global-batch 4 --layers 2 --hidden 16 \
                --heads 2 --seq 8 --engine nccl --device cuda --metrics nowhere/m.jsonl";
    is_refused(&end(start(line, &[])), "metrics = nowhere/m.jsonl: cannot be written");
    let other = end(start(line, &[("ZEROPP_PART", "1@127.0.0.1:400")]));
    assert_eq!((other.code, other.out.as_str()), (Some(0), ""), "{}", other.err);
}

#[test]
fn where_rank_0_fails_before_ranks_meet_it_alone_says_why() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let line =
        format!("ranks --pp 4 --engine nccl --nodes 2 --node-rank 0 --rendezvous 127.0.0.1:{port}");
    // The other process has begun to talk to that port by then, and would go on for 5 s.
    is_refused(&end(start(&line, &[])), &format!("port {port} is in use on this machine"));
}

#[test]
fn nodes_that_are_started_by_hand_meet() {
    for (host, token) in
        [("127.0.0.1", None), ("127.0.0.1", Some(TOKEN)), ("localhost", Some(TOKEN))]
    {
        let port = free_port();
        let nodes: Vec<_> = (0..2)
            .map(|node| {
                let line = format!(
                    "ranks --pp 2 --zero3 3 --engine nccl --nodes 2 --node-rank {node} \
                     --rendezvous {host}:{port}"
                );
                let vars: Vec<_> = token.map(|token| ("ZEROPP_TOKEN", token)).into_iter().collect();
                start(&line, &vars)
            })
            .collect();
        let pids: Vec<_> = nodes.iter().map(|child| child.id().to_string()).collect();
        let outcomes: Vec<_> = nodes.into_iter().map(end).collect();
        for outcome in &outcomes {
            assert_eq!(outcome.code, Some(0), "{}", outcome.err);
        }
        assert_eq!(outcomes[1].out, "", "the first process speaks for all");
        let shown = &outcomes[0].out;
        assert!(
            shown.starts_with(&format!(
                "pp 2 x zero3 3 x dp 1: 6 ranks in 6 processes on 1 machine, told by the \
                 settings, met over {host}:{port}\n"
            )),
            "{shown}"
        );
        for (rank, (pp, zero3)) in
            [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)].iter().enumerate()
        {
            let row = shown.lines().nth(3 + rank).unwrap();
            let words: Vec<_> = row.split_whitespace().collect();
            let (pp_text, zero3_text, rank_text) =
                (pp.to_string(), zero3.to_string(), rank.to_string());
            assert_eq!(words[..4], [rank_text.as_str(), &pp_text, &zero3_text, "0"], "{shown}");
            // What was started has the first of its ranks.
            assert_eq!(words[4] == pids[*pp], *zero3 == 0, "{shown}");
        }
    }
}

#[test]
fn launchers_are_understood() {
    let port = free_port();
    let (text, place) = (port.to_string(), format!("127.0.0.1:{}", port + 1));
    let torchrun = |rank: &'static str| {
        vec![
            ("RANK", rank),
            ("WORLD_SIZE", "2"),
            ("LOCAL_RANK", rank),
            ("LOCAL_WORLD_SIZE", "2"),
            ("MASTER_ADDR", "some-name-that-is-not-asked-for"),
            ("MASTER_PORT", &text),
            ("TORCHELASTIC_RUN_ID", "run7"),
        ]
    };
    let line = "ranks --pp 2 --zero3 2 --engine nccl";
    let other = start(line, &torchrun("1"));
    let shown = end(start(line, &torchrun("0")));
    assert_eq!((shown.code, end(other).code), (Some(0), Some(0)), "{}", shown.err);
    let head = format!(
        "4 ranks in 4 processes on 1 machine, told by torchrun, met over {place}, job run7\n"
    );
    assert!(shown.out.contains(&head), "{}", shown.out);

    let srun = |rank: &'static str| {
        vec![
            ("SLURM_PROCID", rank),
            ("SLURM_STEP_NUM_TASKS", "2"),
            ("SLURM_JOB_ID", "12"),
            ("ZEROPP_TOKEN", TOKEN),
        ]
    };
    let line = format!("{line} --nodes 2 --rendezvous 127.0.0.1:{}", free_port());
    let other = start(&line, &srun("1"));
    let shown = end(start(&line, &srun("0")));
    assert_eq!((shown.code, end(other).code), (Some(0), Some(0)), "{}", shown.err);
    assert!(shown.out.contains("told by Slurm, met over 127.0.0.1:"), "{}", shown.out);
}

#[test]
fn launch_errors_are_reported_once_with_code_2() {
    type Variables = &'static [(&'static str, &'static str)];
    let two = "--pp 2 --engine nccl --nodes 2";
    let meet = "--rendezvous 127.0.0.1:9";
    let mpirun: Variables = &[("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "2")];
    let torchrun: Variables =
        &[("RANK", "0"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "1")];
    let cases: Vec<(String, Variables, &str)> = vec![
        (
            "ranks --pp 2 --nodes 2".into(),
            &[],
            "nodes = 2: engine threads has all ranks in one process",
        ),
        (format!("ranks {two}"), &[], "rendezvous = (none): 2 nodes have to meet"),
        (format!("ranks {two} {meet}"), &[], "nodes = 2: no launcher says which of the 2 this is"),
        (
            format!("ranks {two} {meet} --node-rank 2"),
            &[],
            "node-rank = 2: there are 2 nodes; use 0 to 1",
        ),
        (
            format!("ranks {two} --rendezvous node0 --node-rank 0"),
            &[],
            "rendezvous = node0: has no port",
        ),
        (
            format!("ranks {two} --rendezvous 192.0.2.1:9 --node-rank 0"),
            &[],
            "192.0.2.1 is beyond this machine, and there is no token; set ZEROPP_TOKEN",
        ),
        (
            format!("ranks {two} {meet} --node-rank 0"),
            &[("ZEROPP_TOKEN", "short")],
            "ZEROPP_TOKEN = (hidden): has 5 characters of the 16 needed",
        ),
        (
            format!("ranks {two} {meet} --node-rank 0 --token-file none"),
            &[],
            "rendezvous:token-file = none: cannot be read",
        ),
        (
            format!("ranks {two} {meet} --node-rank 0"),
            torchrun,
            "the configuration says node-rank = 0, nodes = 2, but torchrun says process 0 of 4",
        ),
        (
            "ranks --engine nccl".into(),
            &[("RANK", "0"), ("WORLD_SIZE", "2"), ("PMI_RANK", "1"), ("PMI_SIZE", "2")],
            "torchrun says RANK = 0, WORLD_SIZE = 2, but PMI says PMI_RANK = 1, PMI_SIZE = 2",
        ),
        ("run --pp 2".into(), mpirun, "Open MPI started 2 processes, and each would run all ranks"),
        (
            "ranks --pp 2 --engine mpi --rendezvous a:1".into(),
            &[],
            "rendezvous = a:1: processes of engine mpi find each other without it; leave it out",
        ),
        #[cfg(not(feature = "mpi"))]
        ("ranks --pp 2 --engine mpi".into(), &[], "engine = mpi: is not in this build"),
    ];
    for (line, vars, message) in cases {
        is_refused(&end(start(&line, vars)), message);
    }
}

#[test]
fn wrong_tokens_missing_ranks_and_two_jobs_are_distinguished() {
    let port = free_port();
    let ranks = |pp: usize, node: usize, more: &str, token: &str| {
        let line = format!(
            "ranks --pp {pp} --engine nccl --nodes {pp} --node-rank {node} \
             --rendezvous 127.0.0.1:{port} {more}"
        );
        start(&line, &[("ZEROPP_TOKEN", token)])
    };
    // A job of three that lacks its last rank, for a while.
    let patient = "--start-timeout-s 8";
    let first = ranks(3, 0, patient, TOKEN);
    let second = ranks(3, 1, patient, TOKEN);
    let wrong = end(ranks(3, 2, patient, "another token that is wrong"));
    is_refused(
        &wrong,
        "refused: its token differs; use rank 0's ZEROPP_TOKEN or rendezvous:token-file",
    );
    let busy = end(ranks(2, 0, patient, TOKEN));
    is_refused(&busy, &format!("port {port} is in use on this machine, perhaps by another job"));
    let stray = end(ranks(2, 1, patient, TOKEN));
    is_refused(
        &stray,
        "refused: rank 0 was started for pp 3 x zero3 1 x dp 1 (3 ranks), this process for pp 2 x",
    );
    // Of the same rank twice, the later one is refused.
    let again = ranks(3, 1, patient, TOKEN);
    let (mut came, mut refused) = (end(second), end(again));
    if came.err.contains("refused: rank 1 is taken") {
        std::mem::swap(&mut came, &mut refused);
    }
    is_refused(&refused, "refused: rank 1 is taken by process ");
    let first = end(first);
    // Rank 0 has reported it all the while.
    let waits = first.err.lines().next().unwrap();
    assert!(waits.starts_with("waiting for rank 2 of 3 at 127.0.0.1:"), "{waits}");
    assert!(waits.contains("(5 of 8 s); here: rank 0 on "), "{waits}");
    for outcome in [first, came] {
        is_refused(&outcome, "rank 2 did not come within 8 s (of 3; ");
        assert!(outcome.err.contains("refused: 127.0.0.1: its token differs"), "{}", outcome.err);
    }
    // And where it was never there.
    let alone = end(ranks(2, 1, "--start-timeout-s 0.5", TOKEN));
    is_refused(&alone, "rank 0 cannot be reached within");
}
