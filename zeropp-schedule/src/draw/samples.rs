//! Timelines for the tests: GPipe order on any number of ranks, run by a small clock.

use std::collections::HashMap;

use proptest::prelude::*;

use crate::{
    action::{ACTIONS, Names, Operand},
    ir::{Action, Compute, Message, looping},
    timeline::{Lane, MemoryPoint, MemoryUnit, RankTimeline, SaveSpan, Span, Timeline},
};

/// Durations, ns.
const F: u64 = 1_000_001;
const B: u64 = 1_200_017;
const W: u64 = 800_300;
const SEND: u64 = 150_007;

/// `groups` pipelines of `pp` ranks that run `steps` steps of `m` micro-batches: F of all, then B
/// and W of all, with their messages, a gather before, and a reduction and a step after.
pub(crate) fn gpipe(pp: usize, groups: usize, m: usize, steps: usize) -> Timeline {
    let mut ranks = Vec::new();
    for group in 0..groups {
        let mut clock = SampleClock { pp, ..SampleClock::default() };
        clock.ranks = (0..pp)
            .map(|p| RankTimeline {
                name: format!("pp {p} · zero3 {group}"),
                pp: p,
                group,
                ..Default::default()
            })
            .collect();
        clock.now = vec![0; pp];
        for step in 0..steps {
            clock.step(step, m);
        }
        ranks.extend(clock.ranks);
    }
    // Grouped by pipeline rank, as a run lists them.
    ranks.sort_by_key(|r| (r.pp, r.group));
    let title = format!("gpipe \"{pp}\" × {m}");
    Timeline { title, placement: looping(pp, 1), ranks, ..Timeline::default() }
}

#[derive(Default)]
struct SampleClock {
    pp: usize,
    now: Vec<u64>,
    ranks: Vec<RankTimeline>,
    arrived: HashMap<(Message, usize, usize, usize), u64>,
}

impl SampleClock {
    fn step(&mut self, step: usize, m: usize) {
        for p in 0..self.pp {
            let gather = Action::AllGather { stage: p };
            self.communicate(p, gather, self.now[p], SEND);
            for i in 0..m {
                let ready = self.receive(p, p.checked_sub(1), Message::Activation, i, step);
                self.compute(p, Compute::F, i, ready, F);
                self.memory(p, 2);
                if p + 1 < self.pp {
                    self.send(p, Message::Activation, i, step);
                }
            }
        }
        for p in (0..self.pp).rev() {
            for i in 0..m {
                let next = Some(p + 1).filter(|next| *next < self.pp);
                let ready = self.receive(p, next, Message::Gradient, i, step);
                self.compute(p, Compute::B, i, ready, B);
                if p > 0 {
                    self.send(p, Message::Gradient, i, step);
                }
                self.compute(p, Compute::W, i, 0, W);
                self.memory(p, -2);
            }
            let end = self.now[p];
            self.communicate(p, Action::Free { stage: p }, end, 0);
            self.communicate(p, Action::ReduceScatter { stage: p }, end, 2 * SEND);
            let step = Span {
                lane: Lane::Compute,
                action: Action::OptimizerStep,
                start_ns: end + 2 * SEND,
                end_ns: end + 3 * SEND,
            };
            self.ranks[p].spans.push(step);
            self.now[p] = step.end_ns;
        }
    }

    fn compute(&mut self, p: usize, kind: Compute, i: usize, ready: u64, duration: u64) {
        let start_ns = self.now[p].max(ready);
        self.now[p] = start_ns + duration;
        let action = Action::compute(kind, p, i);
        self.ranks[p].spans.push(Span {
            lane: Lane::Compute,
            action,
            start_ns,
            end_ns: start_ns + duration,
        });
    }

    fn communicate(&mut self, p: usize, action: Action, start_ns: u64, duration: u64) {
        let span =
            Span { lane: Lane::Communication, action, start_ns, end_ns: start_ns + duration };
        self.ranks[p].spans.push(span);
    }

    fn send(&mut self, stage: usize, message: Message, micro_batch: usize, step: usize) {
        let start = self.now[stage];
        self.communicate(stage, Action::Send { message, stage, micro_batch }, start, SEND);
        self.arrived.insert((message, stage, micro_batch, step), start + SEND);
    }

    /// Posts the receive and returns when the message is there.
    fn receive(
        &mut self,
        stage: usize,
        from: Option<usize>,
        message: Message,
        micro_batch: usize,
        step: usize,
    ) -> u64 {
        let Some(from) = from else { return 0 };
        let there = self.arrived[&(message, from, micro_batch, step)];
        let start = self.now[stage].min(there);
        self.communicate(stage, Action::Recv { message, stage, micro_batch }, start, there - start);
        there
    }

    fn memory(&mut self, p: usize, change: i64) {
        let at_ns = self.now[p];
        let memory = &mut self.ranks[p].memory;
        let bytes =
            memory.last().map_or(0, |m| m.bytes).checked_add_signed(change).expect("not below 0");
        memory.push(MemoryPoint { at_ns, bytes });
    }
}

/// Any timeline at all, sensible or not: spans that overlap, repeat or end before they start.
pub(super) fn any_timeline() -> impl Strategy<Value = Timeline> {
    let rank = (
        0usize..3,
        prop::collection::vec(any_span(), 0..40),
        prop::collection::vec((0u64..5000, 0u64..9), 0..5),
        prop::collection::vec((0u64..5000, 0u64..900, any::<bool>()), 0..4),
    )
        .prop_map(|(group, spans, memory, saves)| RankTimeline {
            name: "\"<rank>&\\".into(),
            pp: 0,
            group,
            spans,
            memory: memory.into_iter().map(|(at_ns, bytes)| MemoryPoint { at_ns, bytes }).collect(),
            saves: saves
                .into_iter()
                .map(|(start_ns, ns, in_memory)| SaveSpan {
                    step: start_ns % 7,
                    in_memory,
                    start_ns,
                    end_ns: start_ns + ns,
                    blocked_ns: ns / 3,
                })
                .collect(),
        });
    prop::collection::vec(rank, 0..4).prop_map(|ranks| Timeline {
        title: "</script> & \"any\"".into(),
        facts: vec!["</script> <a & \"fact\">".into()],
        memory_unit: MemoryUnit::Bytes,
        placement: vec![0, 0],
        ranks,
    })
}

fn any_span() -> impl Strategy<Value = Span> {
    (any_action(4, 4), 0u64..5000, 0u64..900).prop_map(|(action, start_ns, length)| Span {
        lane: action.lane(),
        action,
        start_ns,
        end_ns: start_ns + length,
    })
}

/// Any action on stages and micro-batches below the given numbers.
pub(crate) fn any_action(stages: usize, micro_batches: usize) -> impl Strategy<Value = Action> {
    let place = (0..stages, 0..micro_batches);
    let rows: Vec<_> = ACTIONS.iter().collect();
    (prop::sample::select(rows), place.clone(), place).prop_map(|(row, one, other)| {
        let place = match row.names {
            Names::Nothing => Operand::Nothing,
            Names::Stage => Operand::Stage(one.0),
            Names::MicroBatch => Operand::MicroBatch(one.0, one.1),
            Names::Peer => Operand::Peer(one.0, one.1, other.0),
            Names::Pair => Operand::Pair(one, other),
        };
        Action::new(row.kind, place).expect("its row says what it names")
    })
}
