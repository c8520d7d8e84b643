//! Numbers and signatures in the frames that the engines of several processes send beside the data.

use burn::tensor::DType;

use super::signature::{Operation, Signature};

/// Element types that buffers may have; a type's place is its number on the wire.
const KINDS: [DType; 12] = [
    DType::F32,
    DType::BF16,
    DType::F16,
    DType::F64,
    DType::I64,
    DType::I32,
    DType::I16,
    DType::I8,
    DType::U64,
    DType::U32,
    DType::U16,
    DType::U8,
];

const OPERATIONS: [Operation; 10] = [
    Operation::AllGather,
    Operation::ReduceScatter,
    Operation::AllReduce,
    Operation::Broadcast,
    Operation::Exchange,
    Operation::Barrier,
    Operation::Split,
    Operation::Send,
    Operation::Recv,
    Operation::Gather,
];

/// Whether buffers of this type can travel.
pub(super) fn can_send(kind: DType) -> bool {
    KINDS.contains(&kind)
}

/// Appends a number.
pub(super) fn put(out: &mut Vec<u8>, number: u64) {
    out.extend_from_slice(&number.to_le_bytes());
}

/// Appends numbers.
pub(super) fn put_all(out: &mut Vec<u8>, numbers: &[u64]) {
    numbers.iter().for_each(|number| put(out, *number));
}

/// Takes a number off the front.
pub(super) fn get(rest: &mut &[u8]) -> Option<u64> {
    let (bytes, tail) = rest.split_first_chunk::<8>()?;
    *rest = tail;
    Some(u64::from_le_bytes(*bytes))
}

/// Operation, type and length, root; 255 and the largest number stand for none.
pub(super) fn put_signature(out: &mut Vec<u8>, signature: &Signature) {
    let place = |i: Option<usize>| i.map_or(255, |i| i as u8);
    let (kind, len) = signature.buffer.map_or((None, 0), |(k, len)| (Some(k), len));
    out.push(place(OPERATIONS.iter().position(|o| *o == signature.operation)));
    out.push(place(kind.and_then(|kind| KINDS.iter().position(|k| *k == kind))));
    put(out, len as u64);
    put(out, signature.root.map_or(u64::MAX, |root| root as u64));
}

/// Takes off what [`put_signature`] appended.
pub(super) fn get_signature(rest: &mut &[u8]) -> Option<Signature> {
    let ([operation, kind], tail) = rest.split_first_chunk::<2>()?;
    *rest = tail;
    let (len, root) = (get(rest)? as usize, get(rest)?);
    let operation = *OPERATIONS.get(usize::from(*operation))?;
    let buffer = KINDS.get(usize::from(*kind)).map(|kind| (*kind, len));
    Some(Signature { operation, buffer, root: (root != u64::MAX).then_some(root as usize) })
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Any signature.
    pub(crate) fn signatures() -> impl Strategy<Value = Signature> {
        let buffer = proptest::option::of((0..KINDS.len(), any::<u32>()));
        (0..OPERATIONS.len(), buffer, proptest::option::of(0usize..9)).prop_map(|(o, b, root)| {
            let buffer = b.map(|(kind, len)| (KINDS[kind], len as usize));
            Signature { operation: OPERATIONS[o], buffer, root }
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

        #[test]
        fn signatures_survive_the_wire(signature in signatures()) {
            let mut bytes = Vec::new();
            put_signature(&mut bytes, &signature);
            let mut rest = bytes.as_slice();
            prop_assert_eq!(get_signature(&mut rest), Some(signature));
            prop_assert!(rest.is_empty());
        }
    }
}
