//! The elements of tensors as they are read:
//! `cargo run --release -p zeropp-weights --example dump -- PATH` writes for each tensor its name
//! and shape as a line of JSON to standard output, then its f32.

use std::io::{BufWriter, Write, stdout};

use zeropp_weights::Weights;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args_os().nth(1).ok_or("name weights")?;
    let weights = Weights::open(path.as_ref())?;
    let mut out = BufWriter::new(stdout().lock());
    for tensor in weights.tensors() {
        writeln!(out, "{}", serde_json::json!([tensor.name, tensor.shape]))?;
        let mut values = vec![0.0; tensor.elements()];
        weights.read(tensor, 0, &mut values)?;
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        out.write_all(&bytes)?;
    }
    Ok(out.flush()?)
}
