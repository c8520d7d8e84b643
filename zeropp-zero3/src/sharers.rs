//! The ranks that share a layer, and what they exchange where an update looks at whole parameters.

use burn::tensor::Tensor;
use zeropp_comm::groups::Groups;
use zeropp_comm::{CommResult, Communicator};

use crate::exact::ExactSum;

/// The ranks with which this one shares what it updates.
pub(crate) struct UpdateGroup<'a> {
    pub(crate) groups: &'a Groups,
    /// Whether replicas share the optimizer's work.
    pub(crate) zero1: bool,
    /// All-gathers so far.
    pub(crate) gathers: u64,
    /// Bytes that this rank has sent for them.
    pub(crate) sent_bytes: u64,
}

impl UpdateGroup<'_> {
    /// Replicas that have other parts of this rank's shard, then the ranks that have other shards.
    fn groups(&self) -> impl Iterator<Item = &dyn Communicator> + use<'_> {
        let replica = self.zero1.then_some(&self.groups.replica);
        let groups = replica.into_iter().chain([&self.groups.zero3]);
        groups.map(|group| &**group).filter(|group| group.size() > 1)
    }

    /// A layer's whole buffer, from what each rank owns of it.
    pub(crate) fn gather(&mut self, part: Tensor<1>) -> CommResult<Tensor<1>> {
        let (mut whole, mut gathers, mut sent) = (part, 0, 0);
        for group in self.groups() {
            gathers += 1;
            sent += 4 * ((group.size() - 1) * whole.dims()[0]) as u64;
            whole = group.all_gather(whole).wait()?;
        }
        self.gathers += gathers;
        self.sent_bytes += sent;
        Ok(whole)
    }

    /// Sums over all that the ranks own, from each one's part of them.
    pub(crate) fn sum(&self, mut sums: Vec<ExactSum>) -> CommResult<Vec<ExactSum>> {
        for group in self.groups() {
            let mut bytes = Vec::new();
            for sum in &sums {
                let sum = sum.to_bytes();
                bytes.extend((sum.len() as u16).to_le_bytes());
                bytes.extend(sum);
            }
            let mut totals = vec![ExactSum::default(); sums.len()];
            for bytes in group.exchange(bytes).wait()?.iter() {
                let mut rest = &bytes[..];
                for total in &mut totals {
                    let (len, after) = rest.split_first_chunk::<2>().expect("as many sums");
                    let (sum, after) = after.split_at(u16::from_le_bytes(*len).into());
                    total.add_bytes(sum).expect("every rank sends sums");
                    rest = after;
                }
            }
            sums = totals;
        }
        Ok(sums)
    }
}
