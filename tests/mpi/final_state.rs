//! Prints a digest of what a run leaves behind, parameter by parameter: of its final weights or of
//! the first step's gradients; of those weights where programs are exchanged at every chance; or of
//! what a program asks for between steps. The same digests, the same bits.
//!
//! `final_state weights|exchanged|gradients|between 'key = value'…`, with the settings as in a TOML
//! file. Where the ranks are in several processes, rank 0's prints.

#[path = "../common/captured.rs"]
#[allow(dead_code)]
mod captured;

use zeropp::{Config, Error, NamedWeights, Trainer};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let what = args.next().unwrap_or_default();
    let settings: Vec<String> = args.collect();
    let exchanges_always = what == "exchanged";
    let config = Config { exchanges_always, ..Config::from_toml(&settings.join("\n"))? };
    // Over NCCL each rank has a process; elsewhere this starts none.
    let _processes = config.start_rank_processes()?;
    let trainer = Trainer::new(config)?;
    let (loss, state) = match what.as_str() {
        "weights" => {
            let (summary, weights) = trainer.train_to_weights(|_| ())?;
            (summary.last_loss, weights)
        }
        "exchanged" => {
            let (ended, told) = captured::capture(|| trainer.train_to_weights(|_| ()));
            let (summary, weights) = ended?;
            let count = |text| told.iter().filter(|event| event.message().contains(text)).count();
            // Rank 0's process tells of them, and has the weights.
            if !weights.is_empty() {
                eprintln!(
                    "{} tries, {} of other blocks",
                    count("order changed"),
                    count("moved in")
                );
            }
            (summary.last_loss, weights)
        }
        "gradients" => {
            let (metrics, gradients) = trainer.first_gradients()?;
            (metrics.loss, gradients)
        }
        "between" => between(&trainer)?,
        other => {
            return Err(format!("{other:?}: use weights, exchanged, gradients or between").into());
        }
    };
    if state.is_empty() {
        return Ok(());
    }
    for (name, values) in &state {
        // FNV-1a over the bits of all elements.
        let digest = values.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, value| {
            (hash ^ u64::from(value.to_bits())).wrapping_mul(0x0000_0100_0000_01b3)
        });
        println!("{name:<24} {:>8} {digest:016x}", values.len());
    }
    println!("{} parameters, loss {:016x}", state.len(), loss.to_bits());
    Ok(())
}

/// The last validation loss and weights of a run that is asked for both after every step, and to
/// save its second step. All processes ask for the same.
fn between(trainer: &Trainer) -> Result<(f64, NamedWeights), Error> {
    let mut steps = trainer.steps()?;
    let (mut loss, mut weights) = (f64::NAN, NamedWeights::new());
    while let Some(step) = steps.next().transpose()? {
        if step.step == 2 {
            steps.save()?;
        }
        weights = steps.weights()?;
        loss = steps.evaluate()?.loss;
    }
    Ok((loss, weights))
}
