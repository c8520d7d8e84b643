//! One step of all ranks by their programs.

use zeropp_schedule::ir::{Action, Compute, Message, Task};

use crate::plan::Bug;
use crate::rank::{Health, MessageKey, mix};
use crate::run::{Sim, Stop};

/// The least time of an operation, in microseconds; a message takes as long on its way.
const LATENCY: u64 = 20;
/// Kinds of meetings.
const GATHER: u8 = 0;
const REDUCE: u8 = 1;
const REPLICAS: u8 = 2;
const UPDATE: u8 = 3;

/// How far a rank came.
#[derive(PartialEq)]
enum Act {
    Moved,
    Waits,
}

impl Sim<'_> {
    pub(crate) fn step(&mut self, step: u64) -> Result<(), Stop> {
        let now = self.now;
        self.ranks.iter_mut().for_each(|rank| rank.begin_step(now));
        self.met.clear();
        while self.ranks.iter().any(|r| r.at < self.plan.program.ranks[r.p].len()) {
            let mut order: Vec<usize> = (0..self.ranks.len()).collect();
            order.sort_by_key(|r| self.ranks[*r].time);
            let mut moved = false;
            for rank in order {
                if self.advance(rank, step)? == Act::Moved {
                    moved = true;
                    break;
                }
            }
            if !moved {
                self.stalled()?;
            }
        }
        self.now = self.ranks.iter().map(|rank| rank.time).max().unwrap_or(now);
        self.check_samples(step)
    }

    /// No rank can go on: something is late, or a rank is gone.
    fn stalled(&mut self) -> Result<(), Stop> {
        let late = self.net.flush();
        let late = late.map_err(|how| Stop::Failed(format!("lost a rank: {how}")))?;
        if !late.is_empty() {
            for (to, key, value) in late {
                self.deliver(to, key, value);
            }
            return Ok(());
        }
        let is = |health| self.ranks.iter().position(|rank| rank.health == health);
        let waits = is(Health::Well).or(is(Health::Slow));
        if let Some(gone) = is(Health::Gone).filter(|_| waits.is_none()) {
            let why = self.received[self.process(gone)].first();
            return Err(Stop::Failed(why.expect("it has said so itself")));
        }
        match is(Health::Hung).or(is(Health::Gone)) {
            Some(rank) => Err(Stop::Failed(format!("rank {rank} does not answer: timeout"))),
            None => Err(Stop::Broken("all ranks wait, and none has failed".into())),
        }
    }

    fn advance(&mut self, r: usize, step: u64) -> Result<Act, Stop> {
        // A rank that is gone notifies no other.
        if matches!(self.ranks[r].health, Health::Hung | Health::Gone) {
            return Ok(Act::Waits);
        }
        let process = self.process(r);
        if let Some(why) = self.received[process].first() {
            return Err(Stop::Failed(why));
        }
        let rank = &self.ranks[r];
        let Some(action) = self.plan.program.ranks[rank.p].get(rank.at).copied() else {
            return Ok(Act::Waits);
        };
        let acted = match action {
            Action::Recv { .. } | Action::Free { .. } | Action::Retire { .. } => Act::Moved,
            Action::Send { message, stage, micro_batch } => {
                self.send(r, (message, stage, micro_batch));
                Act::Moved
            }
            Action::AllGather { stage } => self.gather(r, stage),
            Action::ReduceScatter { stage } => self.reduce(r, stage),
            Action::ReplicaReduce { stage } => self.replicas(r, stage),
            Action::OptimizerStep => self.update(r, step)?,
            Action::SendHead { .. }
            | Action::RecvHead { .. }
            | Action::Out { .. }
            | Action::Gone { .. }
            | Action::In { .. }
            | Action::Validate => unreachable!("not in these programs"),
            Action::Compute { .. } | Action::Overlap { .. } => {
                let ready = action.computes().all(|task| self.is_ready(r, task));
                if !ready {
                    return Ok(Act::Waits);
                }
                action.computes().for_each(|task| self.compute(r, step, task));
                Act::Moved
            }
        };
        if acted == Act::Moved {
            let rank = &mut self.ranks[r];
            rank.at += 1;
            rank.time += if rank.health == Health::Slow { 10 * LATENCY } else { LATENCY };
            self.now = self.now.max(rank.time);
            self.strike()?;
            self.pump()?;
        }
        Ok(acted)
    }

    /// The message that a compute needs from another stage.
    fn needs(&self, Task { kind, stage, micro_batch: i }: Task) -> Option<MessageKey> {
        let last = self.plan.program.placement.len() - 1;
        match kind {
            Compute::F if stage > 0 => Some((Message::Activation, stage, i)),
            Compute::B | Compute::BW if stage < last => Some((Message::Gradient, stage, i)),
            _ => None,
        }
    }

    fn is_ready(&self, r: usize, task: Task) -> bool {
        let Some(key) = self.needs(task) else { return true };
        let inbox = &self.ranks[r].inbox;
        inbox.contains_key(&key) || self.plan.bug == Bug::Echo && self.any_of(r, key).is_some()
    }

    /// Without the echo check whatever comes first is taken for what is waited for.
    fn any_of(&self, r: usize, (message, stage, _): MessageKey) -> Option<MessageKey> {
        let fits = |key: &&MessageKey| key.0 == message && key.1 == stage;
        self.ranks[r].inbox.keys().filter(fits).min_by_key(|key| key.2).copied()
    }

    fn take(&mut self, r: usize, task: Task) -> Option<u64> {
        let key = self.needs(task)?;
        let key = match self.plan.bug {
            Bug::Echo => self.any_of(r, key)?,
            _ => key,
        };
        self.ranks[r].inbox.remove(&key)
    }

    fn compute(&mut self, r: usize, step: u64, task: Task) {
        let Task { kind, stage, micro_batch: i } = task;
        let came = self.take(r, task);
        let (world, seed) = (self.plan.zero3, self.plan.seed);
        let rank = &mut self.ranks[r];
        let weights = rank.weights.get(&stage).copied().unwrap_or(0);
        let sample = mix(mix(seed, step), (rank.k * world + rank.d) as u64 * 1000 + i as u64);
        match kind {
            Compute::F => {
                let input = came.unwrap_or(sample);
                rank.inputs.insert((stage, i), input);
                rank.made.insert((Message::Activation, stage, i), mix(input, weights));
            }
            Compute::B | Compute::BW => {
                let input = rank.inputs[&(stage, i)];
                let dy = came.unwrap_or(mix(input, weights));
                rank.made.insert((Message::Gradient, stage, i), mix(dy, weights));
                rank.stashed.insert((stage, i), mix(dy, input));
                if kind == Compute::BW {
                    self.weigh(r, stage, i);
                }
            }
            Compute::W => self.weigh(r, stage, i),
            Compute::R => {}
        }
        self.hand_on(r, task);
    }

    fn weigh(&mut self, r: usize, stage: usize, i: usize) {
        let rank = &mut self.ranks[r];
        let stashed = rank.stashed[&(stage, i)];
        let gradient = rank.gradients.entry(stage).or_insert(1);
        *gradient = mix(*gradient, stashed);
        rank.samples.push((stage, i));
    }

    /// Neighbouring stages on one rank hand over without a message.
    fn hand_on(&mut self, r: usize, Task { kind, stage, micro_batch: i }: Task) {
        let placement = &self.plan.program.placement;
        let (message, to) = match kind {
            Compute::F => (Message::Activation, Some(stage + 1)),
            Compute::B | Compute::BW => (Message::Gradient, stage.checked_sub(1)),
            _ => return,
        };
        let Some(to) = to.filter(|to| placement.get(*to) == Some(&placement[stage])) else {
            return;
        };
        let value = self.ranks[r].made[&(message, stage, i)];
        self.ranks[r].inbox.insert((message, to, i), value);
    }

    fn send(&mut self, r: usize, (message, stage, i): MessageKey) {
        let to_stage = match message {
            Message::Activation => stage + 1,
            Message::Gradient => stage - 1,
        };
        let value = self.ranks[r].made[&(message, stage, i)];
        let p = self.plan.program.placement[to_stage];
        let (d, k) = (self.ranks[r].d, self.ranks[r].k);
        let same = |rank: &crate::rank::Rank| (rank.p, rank.d, rank.k) == (p, d, k);
        let to = self.ranks.iter().position(same).expect("of the mesh");
        let key = (message, to_stage, i);
        if self.process(r) == self.process(to) {
            return self.deliver(to, key, value);
        }
        match self.net.send((r, to), key, value) {
            Ok(came) => came.into_iter().for_each(|(key, value)| self.deliver(to, key, value)),
            Err(how) => self.fail(r, &how),
        }
    }

    fn deliver(&mut self, to: usize, key: MessageKey, value: u64) {
        let mut key = key;
        // What is there already is another one, to who does not look.
        while self.plan.bug == Bug::Echo && self.ranks[to].inbox.contains_key(&key) {
            key.2 += 1;
        }
        self.ranks[to].inbox.insert(key, value);
    }

    /// Brings `value` to a meeting of so many; all values in rank order, once all are there.
    fn meet(
        &mut self,
        r: usize,
        (kind, stage, group, size): (u8, usize, usize, usize),
        value: u64,
    ) -> Option<Vec<u64>> {
        let nth = *self.ranks[r].met.entry((kind, stage)).or_insert(0);
        let all = self.met.entry((kind, stage, group, nth)).or_default();
        all.insert(r, (value, self.ranks[r].time));
        if all.len() < size {
            return None;
        }
        let time = all.values().map(|(_, time)| *time).max().unwrap_or(0);
        let values = all.values().map(|(value, _)| *value).collect();
        let rank = &mut self.ranks[r];
        *rank.met.get_mut(&(kind, stage)).expect("above") += 1;
        rank.time = rank.time.max(time + LATENCY);
        Some(values)
    }

    fn gather(&mut self, r: usize, stage: usize) -> Act {
        let (group, value) = (self.ranks[r].k, self.ranks[r].shard(stage));
        let Some(all) = self.meet(r, (GATHER, stage, group, self.plan.zero3), value) else {
            return Act::Waits;
        };
        self.ranks[r].weights.insert(stage, all.into_iter().fold(3, mix));
        Act::Moved
    }

    fn reduce(&mut self, r: usize, stage: usize) -> Act {
        let group = self.ranks[r].k;
        let value = self.ranks[r].gradients.get(&stage).copied().unwrap_or(1);
        let Some(all) = self.meet(r, (REDUCE, stage, group, self.plan.zero3), value) else {
            return Act::Waits;
        };
        let rank = &mut self.ranks[r];
        rank.gradients.remove(&stage);
        let reduced = rank.reduced.entry(stage).or_insert(5);
        *reduced = all.into_iter().fold(*reduced, mix);
        Act::Moved
    }

    fn replicas(&mut self, r: usize, stage: usize) -> Act {
        let (group, value) = (self.ranks[r].d, self.ranks[r].reduced[&stage]);
        let Some(all) = self.meet(r, (REPLICAS, stage, group, self.plan.dp), value) else {
            return Act::Waits;
        };
        self.ranks[r].reduced.insert(stage, all.into_iter().fold(11, mix));
        Act::Moved
    }

    fn update(&mut self, r: usize, step: u64) -> Result<Act, Stop> {
        let value = self.ranks[r].reduced.values().fold(13, |all, x| mix(all, *x));
        let size = self.ranks.len();
        let Some(all) = self.meet(r, (UPDATE, 0, 0, size), value) else { return Ok(Act::Waits) };
        let norm = all.into_iter().fold(17, mix);
        self.learned.norms.insert(step, norm);
        // The state is still being written.
        let written = self.saves.as_ref().and_then(|saves| saves.written_at());
        if let Some(at) = written.filter(|_| self.plan.bug != Bug::HoldBack) {
            self.now = self.now.max(at);
            self.ranks[r].time = self.ranks[r].time.max(at);
            self.pump()?;
        }
        self.ranks[r].update(norm);
        Ok(Act::Moved)
    }

    /// Every sample is in the gradients of every stage once.
    fn check_samples(&mut self, step: u64) -> Result<(), Stop> {
        let micro_batches = self.plan.program.micro_batches();
        for rank in &mut self.ranks {
            rank.samples.sort_unstable();
            let stages = rank.shards.keys();
            let once: Vec<_> =
                stages.flat_map(|s| (0..micro_batches).map(move |i| (*s, i))).collect();
            if rank.samples != once {
                return Err(Stop::Broken(format!("step {step}: samples are lost or doubled")));
            }
        }
        Ok(())
    }
}
