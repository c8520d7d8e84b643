//! A rank of a tiny model whose numbers show every order: what a stage computes, sums and keeps is
//! mixed so that anything lost, doubled or exchanged changes all that follows.

use std::collections::{BTreeMap, HashMap};

use zeropp_schedule::ir::Message;

use crate::files::Part;

/// Elements of a stage's shard.
pub(crate) const SHARD: usize = 3;
/// States are whole numbers below this, which f32 has exactly.
const BELOW: u64 = 1 << 24;

/// A message: which, for which stage, and of which micro-batch.
pub(crate) type MessageKey = (Message, usize, usize);

pub(crate) fn mix(a: u64, b: u64) -> u64 {
    let x = (a ^ b.rotate_left(29)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (x ^ (x >> 31)).wrapping_mul(0xD6E8_FEB8_6659_FD93)
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Health {
    Well,
    Slow,
    /// It does nothing any more, and no other rank knows.
    Hung,
    /// It has failed.
    Gone,
}

#[derive(Clone, Debug)]
pub(crate) struct Rank {
    pub(crate) p: usize,
    pub(crate) d: usize,
    pub(crate) k: usize,
    pub(crate) health: Health,
    /// Its shard of each stage that it has.
    pub(crate) shards: BTreeMap<usize, [u64; SHARD]>,
    /// Steps behind it.
    pub(crate) step: u64,
    // Of the step under way:
    pub(crate) at: usize,
    pub(crate) time: u64,
    pub(crate) weights: HashMap<usize, u64>,
    pub(crate) inbox: HashMap<MessageKey, u64>,
    pub(crate) made: HashMap<MessageKey, u64>,
    pub(crate) inputs: HashMap<(usize, usize), u64>,
    pub(crate) stashed: HashMap<(usize, usize), u64>,
    pub(crate) gradients: HashMap<usize, u64>,
    pub(crate) reduced: BTreeMap<usize, u64>,
    /// How often it took part in an operation of this kind and stage.
    pub(crate) met: HashMap<(u8, usize), usize>,
    /// Micro-batches whose gradients are in, by stage.
    pub(crate) samples: Vec<(usize, usize)>,
}

impl Rank {
    pub(crate) fn new((p, d, k): (usize, usize, usize), placement: &[usize]) -> Rank {
        let mine = placement.iter().enumerate().filter(|(_, rank)| **rank == p);
        let first = |(stage, _): (usize, &usize)| {
            let element = |e| mix(stage as u64, (d * SHARD + e) as u64) % BELOW;
            (stage, std::array::from_fn(element))
        };
        Rank {
            p,
            d,
            k,
            health: Health::Well,
            shards: mine.map(first).collect(),
            step: 0,
            at: 0,
            time: 0,
            weights: HashMap::new(),
            inbox: HashMap::new(),
            made: HashMap::new(),
            inputs: HashMap::new(),
            stashed: HashMap::new(),
            gradients: HashMap::new(),
            reduced: BTreeMap::new(),
            met: HashMap::new(),
            samples: Vec::new(),
        }
    }

    pub(crate) fn begin_step(&mut self, time: u64) {
        let fresh = Rank::new((self.p, self.d, self.k), &[]);
        *self = Rank {
            shards: std::mem::take(&mut self.shards),
            health: self.health.clone(),
            step: self.step,
            time,
            ..fresh
        };
    }

    pub(crate) fn shard(&self, stage: usize) -> u64 {
        self.shards[&stage].iter().fold(7, |all, x| mix(all, *x))
    }

    pub(crate) fn update(&mut self, norm: u64) {
        for (stage, shard) in &mut self.shards {
            for (e, x) in shard.iter_mut().enumerate() {
                *x = mix(mix(*x, norm), self.reduced[stage].wrapping_add(e as u64)) % BELOW;
            }
        }
        self.step += 1;
    }

    /// The parts of a checkpoint that it writes: none where another replica does.
    pub(crate) fn parts(&self, zero3: usize) -> Vec<Part> {
        let part = |(stage, shard): (&usize, &[u64; SHARD])| Part {
            name: format!("stage.{stage:03}"),
            whole: zero3 * SHARD,
            offset: self.d * SHARD,
            values: shard.iter().map(|x| *x as f32).collect(),
        };
        if self.k > 0 { Vec::new() } else { self.shards.iter().map(part).collect() }
    }

    /// Takes its part of what a checkpoint has.
    pub(crate) fn load(&mut self, step: u64, all: &[(String, Vec<f32>)]) {
        for (stage, shard) in &mut self.shards {
            let name = format!("stage.{stage:03}");
            let whole = &all.iter().find(|(n, _)| *n == name).expect("of this model").1;
            *shard = std::array::from_fn(|e| whole[self.d * SHARD + e] as u64);
        }
        self.step = step;
    }
}
