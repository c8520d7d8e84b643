//! A rank's state while the run's stages are cut anew (ADR 106): copied in memory as a checkpoint
//! would have it, sent to the ranks that have its blocks from then on, and read there as a
//! checkpoint is.

use burn::tensor::{DType, Device};
use zeropp_checkpoint::moves::{HeldWords, Move, StateSpan, Wanted, moves};
use zeropp_checkpoint::{Checked, StateSource};
use zeropp_comm::{CommResult, Communicator};
use zeropp_core::cpu_tensor::{from_vec, into_vec};
use zeropp_core::device::{on, take_to_read};
use zeropp_pipeline::executor::ModelWorker;
use zeropp_plan::bytes::MOVED_BYTES;
use zeropp_zero3::checkpoint::{StateToWrite, read_from};
use zeropp_zero3::{Optimizer, ShardedStage};

use crate::error::RankError;

/// Most words of one message.
const PIECE: usize = MOVED_BYTES as usize / 4;
/// Tag of these messages, which no action of a schedule has.
const TAG: u64 = u64::MAX - 2;

/// The part of the run's state that a rank owns, on its way to others.
pub(crate) struct Leaving {
    held: HeldWords,
    updates: u64,
}

impl Leaving {
    /// Takes it out of a rank's `worker`, which has none any more.
    pub(crate) fn of(worker: &mut ModelWorker) -> Leaving {
        let updates = worker.optimizer().updates();
        let state = StateToWrite::of(worker.sharded(), worker.optimizer());
        let mut held = state.map(|state| state.copied()).unwrap_or_default();
        worker.sharded().iter().for_each(|stage| stage.copy_frozen(&mut held));
        held.sort();
        worker.forget();
        Leaving { held, updates }
    }

    /// Brings `stages` and `optimizer`, which are other ones than before and on `device`, to the
    /// state that all ranks had together; how many bytes went from rank to rank. All ranks call it.
    ///
    /// # Errors
    /// Ranks that do not have the state together, which they say alike; the world's first.
    pub(crate) fn arrive(
        self,
        world: &dyn Communicator,
        device: &Device,
        stages: &mut [ShardedStage],
        optimizer: &mut Optimizer,
    ) -> Result<u64, RankError> {
        let mut wanted = Wanted::default();
        read(&mut wanted, self.updates, stages, optimizer)?;
        let mine = serde_json::to_vec(&(self.held.spans(), wanted.0)).expect("plain data");
        let all = world.exchange(mine).wait()?;
        let spans = |bytes: &Vec<u8>| serde_json::from_slice(bytes).expect("written by a rank");
        let (have, want): (Vec<_>, Vec<_>) = all.iter().map(spans).unzip();
        let moves = moves(&have, &want).map_err(|why| wrong(&why))?;
        let mut hasher = blake3::Hasher::new();
        hasher.update(&serde_json::to_vec(&moves).expect("plain data"));
        hasher.update(&self.updates.to_le_bytes());
        let digests = world.exchange(hasher.finalize().as_bytes().to_vec()).wait()?;
        if digests.iter().any(|digest| *digest != digests[0]) {
            return Err(wrong("ranks differ in what is to be moved"));
        }
        let mut got = sent(world, device, &self.held, &moves)?;
        drop(self.held);
        read(&mut got, self.updates, stages, optimizer)?;
        Ok(moves.iter().filter(|m| m.from != m.to).map(|m| 4 * m.span.words as u64).sum())
    }
}

/// Reads all that these stages have from `source`: what trains, what follows it, and what does not.
fn read(
    source: &mut impl StateSource,
    updates: u64,
    stages: &mut [ShardedStage],
    optimizer: &mut Optimizer,
) -> Checked<()> {
    read_from(source, updates, stages, optimizer)?;
    stages.iter_mut().try_for_each(|stage| stage.take_frozen(source))
}

fn wrong(why: &str) -> RankError {
    RankError::Program(format!("stages cannot be cut anew: {why}"))
}

/// Does this rank's part of `moves` with what it has, by messages from `device`; what it then has
/// of the new state. All ranks call it: in each round a rank sends to one and gets from one, piece
/// by piece, so that it holds no more of it twice than a piece. All issue the messages of a round
/// in one order, by pieces and by ranks that send (ADR 31).
fn sent(
    world: &dyn Communicator,
    device: &Device,
    held: &HeldWords,
    moves: &[Move],
) -> CommResult<HeldWords> {
    let (n, me) = (world.size(), world.rank());
    let mut got = HeldWords::default();
    let words = |span: &StateSpan| {
        let mut values = vec![0.0; span.words];
        held.copy(&span.tensor, span.start, &mut values);
        values
    };
    for span in pieces(moves, me, me) {
        let values = words(&span);
        got.add(span.tensor, span.start, values);
    }
    for round in 1..n {
        let (to, from) = ((me + round) % n, (me + n - round) % n);
        let (mut leaving, mut arriving) = (pieces(moves, me, to), pieces(moves, from, me));
        loop {
            let (out, into) = (leaving.next(), arriving.next());
            if out.is_none() && into.is_none() {
                break;
            }
            let send = |out: StateSpan| {
                let values = words(&out);
                let len = values.len();
                world.send(to, TAG, on(device, from_vec(values, [len])))
            };
            let receive = |into: &StateSpan| world.recv(from, TAG, into.words, DType::F32);
            let (sent, received) = if me < from {
                let sent = out.map(send);
                (sent, into.as_ref().map(receive))
            } else {
                let received = into.as_ref().map(receive);
                (out.map(send), received)
            };
            if let Some((StateSpan { tensor, start, .. }, received)) = into.zip(received) {
                got.add(tensor, start, into_vec(take_to_read(received.wait()?)));
            }
            if let Some(sent) = sent {
                sent.wait()?;
            }
        }
    }
    got.sort();
    Ok(got)
}

/// The messages that bring the words of these moves from one rank to another.
fn pieces(moves: &[Move], from: usize, to: usize) -> impl Iterator<Item = StateSpan> {
    let between = moves.iter().filter(move |m| (m.from, m.to) == (from, to));
    between.flat_map(|Move { span, .. }| {
        (span.start..span.end()).step_by(PIECE).map(|start| StateSpan {
            tensor: span.tensor.clone(),
            start,
            words: PIECE.min(span.end() - start),
        })
    })
}

#[cfg(test)]
mod tests {
    use zeropp_comm::threads::{ThreadsOptions, ThreadsWorld};

    use super::*;

    /// Every word arrives where it is wanted, whatever its bits, and ranks send as many bytes as
    /// the moves say: also more than a message has.
    #[test]
    fn bytes_sent_are_those_planned_and_every_bit_arrives() {
        let words = 3 * PIECE + 77;
        let bits = |i: usize| (i as u32).wrapping_mul(2_654_435_761);
        let span = |start, words| StateSpan { tensor: "w".into(), start, words };
        let cut = [0, 500_000, 500_001, words];
        let have: Vec<Vec<StateSpan>> =
            cut.windows(2).map(|w| vec![span(w[0], w[1] - w[0])]).collect();
        let want = vec![vec![span(words - 9, 9)], vec![span(0, words)], vec![span(7, 2 * PIECE)]];
        let all = moves(&have, &want).expect("all is there");
        let worlds = ThreadsWorld::new(3, ThreadsOptions::default()).communicators();
        std::thread::scope(|scope| {
            for (rank, world) in worlds.into_iter().enumerate() {
                let (all, have, want) = (&all, &have[rank], &want[rank]);
                scope.spawn(move || {
                    let mut held = HeldWords::default();
                    for StateSpan { start, words, .. } in have {
                        let values = (*start..start + words).map(|i| f32::from_bits(bits(i)));
                        held.add("w".into(), *start, values.collect());
                    }
                    let got = sent(&*world, &Device::flex(), &held, all).expect("all arrive");
                    for StateSpan { start, words, .. } in want {
                        let mut out = vec![0.0; *words];
                        got.copy("w", *start, &mut out);
                        assert!(out.iter().zip(*start..).all(|(x, i)| x.to_bits() == bits(i)));
                    }
                    let mine = all.iter().filter(|m| m.from == rank && m.to != rank);
                    let planned: u64 = mine.map(|m| 4 * m.span.words as u64).sum();
                    assert_eq!(world.stats().send.bytes, planned, "rank {rank}");
                });
            }
        });
    }
}
