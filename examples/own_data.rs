//! Data of one's own: any rank asks for any sample by its number and gets the same answer, so no
//! file, no order of reading and no mesh is in it. Here sums to be learnt, `12+34=46;`.
//!
//! `cargo run --release --example own_data`

use zeropp::{Config, SampleError, Samples, Trainer};

struct Sums;

impl Samples for Sums {
    fn name(&self) -> &str {
        "sums of two numbers"
    }

    fn vocabulary(&self) -> usize {
        128
    }

    fn sample(&self, n: u64, tokens: usize) -> Result<Vec<u32>, SampleError> {
        let mut text = String::new();
        let mut i = n.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        while text.len() < tokens {
            i = i.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let (a, b) = ((i >> 33) % 50, (i >> 48) % 50);
            text += &format!("{a}+{b}={};", a + b);
        }
        Ok(text.bytes().take(tokens).map(u32::from).collect())
    }
}

fn main() -> Result<(), zeropp::Error> {
    let config = Config { pp: 2, zero3: 2, layers: 4, seq: 32, steps: 40, ..Config::default() };
    let summary = Trainer::builder(config)
        .data(Sums)
        .build()?
        .train(|step| println!("step {:2}  loss {:.4}", step.step, step.loss))?;
    assert!(summary.last_loss < summary.first_loss);
    Ok(())
}
