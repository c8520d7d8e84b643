//! Trains as CONFIG.toml says until RANK panics or stalls, MS milliseconds after the start:
//! `saboteur CONFIG.toml panic|stall RANK MS`. For `tests/campaign/run`.

#[path = "../common/saboteur.rs"]
mod saboteur;

use std::process::ExitCode;
use std::time::Duration;

use saboteur::Fault;
use zeropp::model::gpt;
use zeropp::{Config, Trainer};

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [file, what, rank, ms] = words.as_slice() else {
        eprintln!("usage: saboteur CONFIG.toml panic|stall RANK MS");
        return ExitCode::from(2);
    };
    let act: fn() = match what.as_str() {
        "panic" => || panic!("sabotage"),
        _ => || std::thread::sleep(Duration::from_secs(3600)),
    };
    let rank: usize = rank.parse().expect("a rank");
    let ms: u64 = ms.parse().expect("milliseconds");
    let config = Config::load(file.as_ref()).expect("a good configuration");
    // Later than any run: it happens by the clock.
    let fault = Fault::new(rank, i64::MAX, act);
    let model = fault.hidden_in(gpt::build(config.gpt_shape(256)));
    let trainer = Trainer::builder(config).model(model).build().expect("a good configuration");
    zeropp::stop_on_signals(&trainer).expect("signals can be caught");
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(ms));
        fault.now();
        while fault.happened().is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let (block, kind) = fault.happened().expect("looked at");
        eprintln!("sabotage in {kind} of {block}");
    });
    match trainer.train(|s| println!("step {}/", s.step)) {
        Ok(_) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
