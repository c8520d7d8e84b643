//! The data that ranks send to rank 0: the figures of a step, and the results of ranks in several
//! processes.

use std::marker::PhantomData;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use zeropp_comm::{AllBytes, CommResult, Communicator, Pending};
use zeropp_core::cpu_tensor::{from_vec, into_vec};
use zeropp_pipeline::timeline::{SaveSpan, Span};
use zeropp_zero3::ParamExport;

use crate::run::results::RankResult;

/// Elements of one message: 4 MiB.
const PIECE: usize = 1 << 20;
/// Tag of these messages, which no action of a schedule has.
const TAG: u64 = u64::MAX - 1;

/// A rank's result without the values it exports.
#[derive(Serialize, Deserialize)]
struct Leaf {
    spans: Vec<Span>,
    saves: Vec<SaveSpan>,
    clock_error_ns: u64,
    exported: Vec<ExportPiece>,
}

/// An export without its values.
#[derive(Serialize, Deserialize)]
struct ExportPiece {
    layer: String,
    frozen: bool,
    shard: usize,
    /// Number of values.
    len: usize,
}

/// On rank 0 what every rank says, in rank order; nothing on the others. All ranks call it.
pub(crate) fn figures<T: Serialize + DeserializeOwned>(
    world: &dyn Communicator,
    mine: &T,
) -> CommResult<Vec<T>> {
    start(world, mine).wait()
}

/// The values of all ranks, on their way to rank 0.
pub(crate) struct Gathering<T> {
    all: Pending<AllBytes>,
    is_read: bool,
    of: PhantomData<T>,
}

/// Sends what this rank says to rank 0. All ranks call it.
pub(crate) fn start<T: Serialize>(world: &dyn Communicator, mine: &T) -> Gathering<T> {
    let all = world.gather(0, serde_json::to_vec(mine).expect("plain numbers"));
    Gathering { all, is_read: world.rank() == 0, of: PhantomData }
}

impl<T: DeserializeOwned> Gathering<T> {
    /// On rank 0 what every rank said, in rank order; nothing on the others.
    ///
    /// # Errors
    /// The world's first error.
    pub(crate) fn wait(self) -> CommResult<Vec<T>> {
        let all = self.all.wait()?;
        let read = |bytes: &Vec<u8>| serde_json::from_slice(bytes).expect("written by every rank");
        Ok(if self.is_read { all.iter().map(read).collect() } else { Vec::new() })
    }
}

/// Every rank's result, in rank order, on rank 0; nothing on the others. Messages have at most
/// [`PIECE`] elements and go rank by rank, so that no buffer is as large as a model. All ranks
/// call it.
pub(crate) fn to_rank_0(
    world: &dyn Communicator,
    result: RankResult,
) -> CommResult<Vec<RankResult>> {
    let words = pack(&result);
    let lens = world.exchange((words.len() as u64).to_le_bytes().to_vec()).wait()?;
    if world.rank() > 0 {
        for piece in words.chunks(PIECE) {
            world.send(0, TAG, from_vec(piece.to_vec(), [piece.len()])).wait()?;
        }
        return Ok(Vec::new());
    }
    let mut results = vec![result];
    for (rank, len) in lens.iter().enumerate().skip(1) {
        let len =
            u64::from_le_bytes(len[..].try_into().expect("eight bytes from every rank")) as usize;
        let mut words = Vec::with_capacity(len);
        while words.len() < len {
            let piece = (len - words.len()).min(PIECE);
            let message = world.recv(rank, TAG, piece, burn::tensor::DType::F32).wait()?;
            words.extend(into_vec(message));
        }
        results.push(unpack(&words));
    }
    Ok(results)
}

/// A result as 32-bit words, whatever they stand for: engines move them and never compute.
fn pack(result: &RankResult) -> Vec<f32> {
    let exported = result.exported.iter();
    let piece = |e: &ParamExport| ExportPiece {
        layer: e.layer.clone(),
        frozen: e.frozen,
        shard: e.shard,
        len: e.values.len(),
    };
    let leaf = Leaf {
        spans: result.spans.clone(),
        saves: result.saves.clone(),
        clock_error_ns: result.clock_error_ns,
        exported: exported.map(piece).collect(),
    };
    let mut bytes = serde_json::to_vec(&leaf).expect("plain data");
    // JSON ends with a bracket, so blanks behind it do not matter.
    bytes.resize(bytes.len().next_multiple_of(4), b' ');
    let word = |bytes: &[u8]| f32::from_bits(u32::from_le_bytes(bytes.try_into().expect("four")));
    let mut words = vec![f32::from_bits((bytes.len() / 4) as u32)];
    words.extend(bytes.chunks_exact(4).map(word));
    words.extend(result.exported.iter().flat_map(|e| &e.values));
    words
}

fn unpack(words: &[f32]) -> RankResult {
    let (len, rest) = words.split_first().expect("written by pack");
    let (json, mut values) = rest.split_at(len.to_bits() as usize);
    let bytes: Vec<u8> = json.iter().flat_map(|word| word.to_bits().to_le_bytes()).collect();
    let leaf: Leaf = serde_json::from_slice(&bytes).expect("written by pack");
    let Leaf { spans, saves, clock_error_ns, exported } = leaf;
    let export = |ExportPiece { layer, frozen, shard, len }| {
        let (mine, rest) = values.split_at(len);
        values = rest;
        ParamExport { layer, frozen, shard, values: mine.to_vec() }
    };
    let exported = exported.into_iter().map(export).collect();
    RankResult { spans, saves, clock_error_ns, exported, ..RankResult::default() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zeropp_comm::threads::{ThreadsOptions, ThreadsWorld};
    use zeropp_pipeline::ir::{Action, Compute};
    use zeropp_pipeline::timeline::Lane;

    fn result(rank: usize) -> RankResult {
        let action = Action::Compute { kind: Compute::BW, stage: rank, micro_batch: 7 };
        let span = Span { lane: Lane::Compute, action, start_ns: 1, end_ns: u64::MAX };
        let save =
            SaveSpan { step: 3, in_memory: true, start_ns: 1, end_ns: 2, blocked_ns: rank as u64 };
        let values =
            (0..rank * 700_000).map(|i| f32::from_bits((i as u32).wrapping_mul(6151))).collect();
        RankResult {
            spans: vec![span; rank],
            saves: vec![save; rank],
            clock_error_ns: rank as u64,
            exported: vec![ParamExport {
                layer: "h.0 · ü".into(),
                frozen: rank % 2 == 1,
                shard: rank,
                values,
            }],
            ..RankResult::default()
        }
    }

    #[test]
    fn every_bit_arrives_on_rank_0() {
        let ranks = ThreadsWorld::new(4, ThreadsOptions::default()).communicators();
        let all: Vec<Vec<RankResult>> = std::thread::scope(|scope| {
            let run = |world: std::sync::Arc<dyn Communicator>| {
                scope.spawn(move || to_rank_0(&*world, result(world.rank())).unwrap())
            };
            let threads: Vec<_> = ranks.into_iter().map(run).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(all[1..].iter().all(Vec::is_empty));
        for (rank, got) in all[0].iter().enumerate() {
            let want = result(rank);
            assert_eq!(got.saves, want.saves);
            assert_eq!((&got.spans, got.clock_error_ns), (&want.spans, want.clock_error_ns));
            let bits = |r: &RankResult| -> Vec<u32> {
                r.exported[0].values.iter().map(|x| x.to_bits()).collect()
            };
            assert!(bits(got) == bits(&want), "rank {rank}");
            assert_eq!(got.exported[0].frozen, want.exported[0].frozen);
        }
    }
}
