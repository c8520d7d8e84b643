//! Which ranks of a group form a sub-group, as all of them work it out from what each wants.

/// A sub-group wanted: its name, color and key, as sent to all ranks.
pub(super) struct SplitRequest {
    pub(super) color: usize,
    pub(super) key: usize,
    pub(super) name: String,
}

impl SplitRequest {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = (self.color as u64).to_le_bytes().to_vec();
        bytes.extend((self.key as u64).to_le_bytes());
        bytes.extend(self.name.as_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<SplitRequest> {
        let (color, rest) = bytes.split_first_chunk::<8>()?;
        let (key, name) = rest.split_first_chunk::<8>()?;
        Some(SplitRequest {
            color: u64::from_le_bytes(*color) as usize,
            key: u64::from_le_bytes(*key) as usize,
            name: String::from_utf8_lossy(name).into_owned(),
        })
    }
}

/// The number of the sub-group of `color` made by collective `sequence` of group `parent` (FNV-1a).
pub(super) fn sub_group_id(parent: u64, sequence: u64, color: u64) -> u64 {
    let bytes = [parent, sequence, color].into_iter().flat_map(u64::to_le_bytes);
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}
