//! What a script has written: figures as JSON, and the numbers of tensors in a file beside it.

use std::path::Path;

use serde::de::DeserializeOwned;

/// The numbers of a file, in their order.
pub(crate) struct Numbers(std::vec::IntoIter<f32>);

impl Numbers {
    /// Of 32-bit floats, the lowest byte first.
    pub(crate) fn of(bytes: &[u8]) -> Self {
        let number = |b: &[u8]| f32::from_le_bytes(b.try_into().unwrap());
        Self(bytes.chunks_exact(4).map(number).collect::<Vec<_>>().into_iter())
    }

    /// The next `n`.
    pub(crate) fn take(&mut self, n: usize) -> Vec<f32> {
        let taken: Vec<f32> = self.0.by_ref().take(n).collect();
        assert_eq!(taken.len(), n, "the file has fewer numbers than its figures say");
        taken
    }

    /// Fails where some have not been taken.
    pub(crate) fn end(mut self) {
        assert_eq!(self.0.next(), None, "the file has more numbers than its figures say");
    }
}

/// The figures of `tests/fixtures/families/<name>.json`, and the numbers beside them.
pub(crate) fn read<F: DeserializeOwned>(name: &str) -> (F, Numbers) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/families");
    let file = |kind: &str| std::fs::read(folder.join(format!("{name}.{kind}"))).unwrap();
    (serde_json::from_slice(&file("json")).unwrap(), Numbers::of(&file("bin")))
}
