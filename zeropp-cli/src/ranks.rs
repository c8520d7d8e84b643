//! `zeropp ranks`: did the launcher start what was meant?

use clap::{ArgMatches, Command};
use zeropp::Launched;
use zeropp::config::OptionInfo;

use crate::args;
use crate::failure::Failure;
use crate::figures::{count, say, table};

const ABOUT: &str = "Show which rank runs where, as it was launched\n\n\
Takes the settings of `zeropp run` and is started in the same way, by the same launcher. The \
processes meet as they would for a run, over MPI or at the rendezvous, and the first one prints \
the machine, the process and the mesh coordinates of every rank. Nothing is trained. It reports \
ranks that are missing and processes that were started for different jobs.";

const EXAMPLES: &str = "\
Examples:
  mpirun -np 4 zeropp ranks --pp 2 --zero3 2 --engine mpi
  srun --ntasks-per-node 1 zeropp ranks --pp 2 --zero3 8 --engine nccl --rendezvous node0:29400
  On each of two machines, with the same secret in ZEROPP_TOKEN; --node-rank 1 on the second:
      zeropp ranks --pp 2 --zero3 8 --engine nccl --nodes 2 --node-rank 0 --rendezvous node0:29400

Exit codes: 0 all ranks are there, 2 they are not, or the settings and the launcher contradict each
other.";

/// The flags of `zeropp ranks`: all of `run`, so that its command line can be tried as it is; the
/// help has those that matter here.
pub(crate) fn command() -> Command {
    let matters = |option: &OptionInfo| {
        ["Mesh", "Launch"].contains(&option.heading)
            || ["engine", "timeout-s"].contains(&option.key)
    };
    args::with_settings(Command::new("ranks"), matters)
        .about("Show which rank runs where, as it was launched")
        .long_about(ABOUT)
        .after_help(EXAMPLES)
}

/// Meets the other processes; the first one prints who is there.
pub(crate) fn run(matches: &ArgMatches) -> Result<(), Failure> {
    let config = args::settings(matches)?;
    let _others = config.start_rank_processes()?;
    let launched = zeropp::launched(&config)?;
    if launched.process == 0 {
        say(text(&launched));
    }
    Ok(())
}

fn text(job: &Launched) -> String {
    let world = job.mesh.world();
    let mut hosts: Vec<_> = job.members.iter().map(|m| m.host.as_str()).collect();
    hosts.sort_unstable();
    hosts.dedup();
    let mut head = format!(
        "{}: {} in {} on {}, told by {}, met over {}",
        job.mesh,
        count(world, "rank"),
        processes(job.members.len()),
        count(hosts.len(), "machine"),
        job.source,
        job.place
    );
    let id = &job.members[0].job;
    if !id.is_empty() {
        head.push_str(&format!(", job {id}"));
    }
    let mut rows =
        vec![["rank", "pp", "zero3", "dp", "process", "machine"].map(String::from).to_vec()];
    for rank in 0..world {
        let (at, member) = (job.mesh.coords(rank), job.member(rank));
        let numbers = [rank, at.pp, at.zero3, at.dp, member.pid as usize];
        let host = [member.host.clone()].into_iter();
        rows.push(numbers.iter().map(usize::to_string).chain(host).collect());
    }
    let mut text = format!("{head}\n\n{}\n\n", table(&rows));
    match job.spread() {
        None => text.push_str("every ZeRO-3 group is inside one machine"),
        Some(warning) => text.push_str(&format!("warning: {warning}")),
    }
    text
}

fn processes(n: usize) -> String {
    if n == 1 { "1 process".into() } else { format!("{n} processes") }
}
