//! The rank, stage and operation that broke a run, and why we think so.

use serde::Serialize;

use super::error::CommError;
use super::evidence::{Case, Place};
use super::folder::Run;
use super::mesh::Coords;
use super::moment::{AT_ONCE_NS, Doing, FailureMoment};
use super::record::{EndKind, Peer, Record, signal_name};
use super::waits::Root;

/// The cause of a failed run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// A rank panicked.
    Panicked,
    /// A rank ended with an error of its own.
    Failed,
    /// A process died of a signal that it caused itself.
    Crashed,
    /// Ranks called different operations.
    Mismatched,
    /// A process ended without a word.
    Killed,
    /// A process stood still.
    Frozen,
    /// All ranks of a host are gone or cannot be reached.
    HostLost,
    /// Messages between two hosts did not get through.
    LinkCut,
    /// Messages between ranks of one host did not get through.
    Lost,
    /// A rank did not come back from what it was doing.
    Stuck,
    /// A rank took so long that others ran out of time.
    Slow,
    /// Ranks waited for each other.
    Deadlock,
    /// Someone ended the run.
    Stopped,
    /// The records do not show it.
    Unknown,
}

/// The conclusion from the records of a failed run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Verdict {
    /// The run.
    pub run: String,
    /// The cause.
    pub cause: Cause,
    /// The world ranks to blame, the first one first; none where it was none of them.
    pub ranks: Vec<usize>,
    /// The hosts to blame: of a cut link, its two ends.
    pub hosts: Vec<String>,
    /// The step it was in.
    pub step: Option<u64>,
    /// The stage it was at.
    pub stage: Option<usize>,
    /// The action it was at.
    pub action: Option<String>,
    /// The operation that others waited for, or that failed.
    pub operation: Option<String>,
    /// All this in a sentence.
    pub summary: String,
    /// The reasons for it, a sentence each.
    pub reasons: Vec<String>,
}

/// Finds out who broke the run.
pub fn judge(run: &Run) -> Verdict {
    let Some(moment) = FailureMoment::first_failure(&run.records) else {
        let summary = "no record can be read".to_string();
        return Verdict { summary, ..nothing(run) };
    };
    let case = Case { run, moment };
    case.own_fault(false)
        .map(|record| faulty(&case, record))
        .or_else(|| without_a_record(&case))
        .or_else(|| frozen(&case))
        .or_else(|| cut_off(&case))
        .or_else(|| waited_for(&case))
        .or_else(|| first_reported(&case))
        .or_else(|| case.own_fault(true).map(|record| faulty(&case, record)))
        .or_else(|| stopped(&case))
        .unwrap_or_else(|| Verdict {
            summary: "the records do not tell who broke the run".into(),
            ..nothing(run)
        })
}

impl Verdict {
    /// No conclusion on `run`.
    pub fn unknown(run: String) -> Verdict {
        Verdict {
            run,
            cause: Cause::Unknown,
            ranks: Vec::new(),
            hosts: Vec::new(),
            step: None,
            stage: None,
            action: None,
            operation: None,
            summary: String::new(),
            reasons: Vec::new(),
        }
    }
}

fn nothing(run: &Run) -> Verdict {
    Verdict::unknown(run.name.clone())
}

/// A panic, a crash, an error of a rank's own.
fn faulty(case: &Case, record: &Record) -> Verdict {
    let (end, rank) = (&record.header.end, record.header.rank);
    let (cause, what) = match (&end.kind, &end.error) {
        (EndKind::Panic, _) => (Cause::Panicked, "panicked".to_string()),
        (EndKind::Signal(number), _) => {
            (Cause::Crashed, format!("died of {}", signal_name(*number)))
        }
        (_, Some(error @ CommError::Mismatch { .. })) => {
            let ranks = case.odd_ones_out(error);
            let what = match ranks.as_slice() {
                [_, _, ..] => "called different operations",
                _ => "called a different operation from the others",
            };
            return verdict(case, Cause::Mismatched, ranks, what, vec![end.text.clone()]);
        }
        _ => (Cause::Failed, "failed".to_string()),
    };
    verdict(case, cause, vec![rank], &what, vec![end.text.clone()])
}

/// Ranks that left no record.
fn without_a_record(case: &Case) -> Option<Verdict> {
    let gone = case.gone();
    if gone.is_empty() {
        return None;
    }
    let hosts = |ranks: &[usize]| {
        let mut hosts: Vec<String> = ranks.iter().map(|r| case.process(*r).host).collect();
        hosts.sort();
        hosts.dedup();
        hosts
    };
    let here: Vec<usize> = case.moment.records().map(|(rank, _)| rank).collect();
    let lost_hosts = hosts(&gone);
    let timed_out = case.first_timeout();
    let mut reasons = vec![format!("{} left no record", ranks_text(&gone))];
    if timed_out.is_some() && !lost_hosts.iter().any(|host| hosts(&here).contains(host)) {
        reasons.push("the others waited for them in vain".into());
        let what = "is gone, or the link to it is cut: none of its ranks left a record";
        return Some(Verdict {
            hosts: lost_hosts.clone(),
            summary: format!("host {} {what}", lost_hosts.join(", ")),
            ..verdict(case, Cause::HostLost, gone, what, reasons)
        });
    }
    // Of several, those that others waited for; the rest was ended before it could write.
    let mut ranks: Vec<usize> = Vec::new();
    for (root, _) in case.roots() {
        // A damaged record may name a rank that there never was.
        if let Root::Gone(_, rank) = root
            && gone.contains(&rank)
            && !ranks.contains(&rank)
        {
            ranks.push(rank);
        }
    }
    let process = ranks.first().map(|rank| case.process(*rank));
    if let Some(process) = process {
        ranks = gone.iter().copied().filter(|rank| case.process(*rank) == process).collect();
    } else {
        ranks = gone;
    }
    let (cause, what) = match timed_out {
        Some(record) => {
            reasons.push(format!("rank {}: {}", record.header.rank, record.header.end.text));
            (Cause::Frozen, "was frozen, or died unnoticed")
        }
        None => {
            let signals = case.ended(|kind| matches!(kind, EndKind::Signal(_)));
            if !signals.is_empty() {
                let n = signals.len();
                reasons.push(format!("the launcher then ended {n} others, which had no fault"));
            }
            (Cause::Killed, "was killed, or crashed")
        }
    };
    Some(verdict(case, cause, ranks, what, reasons))
}

/// Processes that stood still and were woken to be ended.
fn frozen(case: &Case) -> Option<Verdict> {
    let frozen = case.frozen();
    let (first, ns) = *frozen.first()?;
    let process = case.process(first);
    let ranks = frozen.iter().map(|(rank, _)| *rank).filter(|r| case.process(*r) == process);
    let reasons = vec![format!("nothing of its process ran for {}", seconds(ns))];
    Some(verdict(case, Cause::Frozen, ranks.collect(), "was frozen", reasons))
}

/// Messages that were sent and never came.
fn cut_off(case: &Case) -> Option<Verdict> {
    let lost = case.lost();
    let host = |rank: usize| case.process(rank).host;
    let between = lost.iter().find(|(from, to, _)| host(*from) != host(*to));
    let (from, to, ns) = *between.or(lost.first())?;
    let hosts = [host(from), host(to)];
    let apart = hosts[0] != hosts[1];
    let many = lost.iter().filter(|(a, b, _)| (host(*a) != host(*b)) == apart);
    let reasons = many
        .filter_map(|(from, to, ns)| {
            let Some(Doing::Waiting(op)) = case.moment.doing(*to) else { return None };
            let (what, time) = (op.describe(), seconds(*ns));
            Some(format!(
                "rank {to} waited for {what}; rank {from} had done its part {time} before"
            ))
        })
        .collect();
    let what = format!("does not get through to rank {to}");
    let cause = if apart { Cause::LinkCut } else { Cause::Lost };
    let found = verdict(case, cause, vec![from, to], &what, reasons);
    let Some(Doing::Waiting(op)) = case.moment.doing(to) else { return Some(found) };
    let operation = Some(op.describe());
    let summary = if apart {
        format!(
            "the link between hosts {} and {} is cut or too slow: for {} nothing came from rank \
             {from} to rank {to}",
            hosts[0],
            hosts[1],
            seconds(ns)
        )
    } else {
        found.summary.clone()
    };
    Some(Verdict {
        hosts: if apart { hosts.to_vec() } else { Vec::new() },
        operation,
        summary,
        ..found
    })
}

/// Advice where nothing is wrong but the time.
const MORE_TIME: &str = "where a step takes that long, a larger timeout-s helps";

/// The rank at the end of all waiting.
fn waited_for(case: &Case) -> Option<Verdict> {
    let timeout = case.first_timeout()?;
    let reason = format!("rank {}: {}", timeout.header.rank, timeout.header.end.text);
    let timeout_ns = (timeout.header.timeout_s * 1e9) as u64;
    for (root, votes) in case.roots() {
        let rank = match root {
            Root::Busy(rank) => rank,
            Root::Circle(ranks) => {
                let what = "waited for each other";
                return Some(verdict(case, Cause::Deadlock, ranks, what, vec![reason]));
            }
            Root::Gone(..) | Root::Lost(..) => continue,
        };
        let ns = case.moment.doing_for_ns(rank);
        if ns < timeout_ns / 2
            && let Some((slow, action, ns)) = case.longest_computation(timeout_ns)
            && ns >= timeout_ns / 4
        {
            let what = format!("took {} for one action", seconds(ns));
            let reasons = vec![reason, MORE_TIME.into()];
            let found = verdict(case, Cause::Slow, vec![slow], &what, reasons);
            return Some(placed(found, Place::of(action), case, &what));
        }
        let doing = match case.moment.doing(rank) {
            Some(Doing::Computing(_)) => "was computing",
            _ => "did not go on",
        };
        let what = format!("{doing} for {}", seconds(ns));
        let waited =
            format!("{votes} {} for it", if votes == 1 { "rank waited" } else { "ranks waited" });
        let mut reasons = vec![waited, reason];
        if doing == "was computing" {
            reasons.push(MORE_TIME.into());
        }
        return Some(verdict(case, Cause::Stuck, vec![rank], &what, reasons));
    }
    None
}

/// The rank that an error names.
fn first_reported(case: &Case) -> Option<Verdict> {
    // An echo of another rank's error names no other culprit.
    let errors = case.run.records.iter();
    let errors = errors.filter(|r| r.header.end.error.as_ref().is_some_and(|e| !e.is_echo()));
    let record = errors.min_by_key(|r| super::moment::common(&r.header, r.header.end.at_ns))?;
    let reasons = vec![format!("rank {}: {}", record.header.rank, record.header.end.text)];
    match record.header.end.error.as_ref()? {
        CommError::PeerLost { rank, .. } => {
            Some(verdict(case, Cause::Killed, vec![*rank], "left the run", reasons))
        }
        CommError::Timeout { missing, .. } if !missing.is_empty() => {
            Some(verdict(case, Cause::Stuck, missing.clone(), "did not come", reasons))
        }
        CommError::Backend { .. } => {
            let rank = record.header.rank;
            Some(verdict(case, Cause::Failed, vec![rank], "had an error of its engine", reasons))
        }
        _ => None,
    }
}

/// No rank failed: the run was ended from outside.
fn stopped(case: &Case) -> Option<Verdict> {
    let signals = case.ended(|kind| matches!(kind, EndKind::Signal(_)));
    let at = |r: &Record| super::moment::common(&r.header, r.header.end.at_ns);
    let first = *signals.iter().min_by_key(|r| at(r))?;
    let EndKind::Signal(number) = first.header.end.kind else { return None };
    let name = signal_name(number);
    let process = case.process(first.header.rank);
    let others = signals.iter().filter(|r| case.process(r.header.rank) != process);
    let next = others.map(|r| at(r)).min().unwrap_or(u64::MAX);
    if (at(first) + AT_ONCE_NS..u64::MAX).contains(&next) {
        let ranks = signals.iter().map(|r| r.header.rank);
        let ranks = ranks.filter(|rank| case.process(*rank) == process).collect();
        let reason = format!("the others were ended {} later", seconds(next - at(first)));
        let what = format!("was ended from outside, with {name}");
        return Some(verdict(case, Cause::Stopped, ranks, &what, vec![reason]));
    }
    let mut reasons = vec![format!("rank {} was the first to get it", first.header.rank)];
    let longest = case.moment.records().map(|(rank, _)| rank);
    if let Some((rank, root)) = longest
        .filter_map(|rank| Some((rank, case.moment.roots_of(rank).into_iter().next()?)))
        .max_by_key(|(rank, _)| case.moment.doing_for_ns(*rank))
        && let Root::Busy(busy) = root
    {
        let (waited, did) = (case.moment.doing_for_ns(rank), case.moment.doing_for_ns(busy));
        reasons.push(format!(
            "at that moment rank {rank} had waited for {}; rank {busy} had been at it for {}",
            seconds(waited),
            seconds(did)
        ));
    }
    Some(Verdict {
        summary: format!("the run was ended from outside, with {name}"),
        ..verdict(case, Cause::Stopped, Vec::new(), "", reasons)
    })
}

/// A verdict on `ranks`, with where they were and what others waited for.
fn verdict(
    case: &Case,
    cause: Cause,
    ranks: Vec<usize>,
    what: &str,
    reasons: Vec<String>,
) -> Verdict {
    let mut found = Verdict { cause, reasons, ..nothing(case.run) };
    let Some(rank) = ranks.first().copied() else { return found };
    found.hosts = vec![case.process(rank).host];
    if let Some((waiter, op)) = case.awaited(rank) {
        found.operation = Some(op.describe());
        found.reasons.push(format!(
            "rank {waiter} had waited {} for {}",
            seconds(case.moment.doing_for_ns(waiter)),
            op.describe()
        ));
    } else if let Some(Doing::Waiting(op)) = case.moment.doing(rank) {
        found.operation = Some(op.describe());
    }
    found.ranks = ranks;
    let place = case.place(rank);
    placed(found, place, case, what)
}

fn placed(found: Verdict, place: Place, case: &Case, what: &str) -> Verdict {
    let who: Vec<String> = found.ranks.iter().map(|rank| who(case, *rank)).collect();
    let known = case.moment.action(found.ranks[0]).is_some();
    let mut at: Vec<String> = Vec::new();
    at.extend(place.step.map(|step| format!("step {step}")));
    at.extend(place.stage.map(|stage| format!("stage {stage}")));
    at.extend(place.action.as_ref().map(|action| format!("action {action}")));
    let place_text = match (at.is_empty(), known) {
        (true, _) => String::new(),
        (false, true) => format!(" ({})", at.join(", ")),
        (false, false) => format!(" (by what others know: {})", at.join(", ")),
    };
    let Place { step, stage, action } = place;
    let summary = format!("{} {what}{place_text}", who.join(" and "));
    Verdict { step, stage, action, summary, ..found }
}

fn who(case: &Case, rank: usize) -> String {
    let process = case.process(rank);
    let Coords { pp, zero3, dp } = case.coords(rank);
    let Peer { host, pid } = process;
    // Where ranks are threads whose records name no process.
    let of = if host.is_empty() { String::new() } else { format!("; process {pid} on {host}") };
    format!("rank {rank} (pp {pp}, zero3 {zero3}, dp {dp}{of})")
}

fn ranks_text(ranks: &[usize]) -> String {
    let all: Vec<String> = ranks.iter().map(usize::to_string).collect();
    format!("{} {}", if all.len() == 1 { "rank" } else { "ranks" }, all.join(", "))
}

fn seconds(ns: u64) -> String {
    let s = ns as f64 / 1e9;
    if s < 0.1 { format!("{:.1} ms", s * 1e3) } else { format!("{s:.1} s") }
}
