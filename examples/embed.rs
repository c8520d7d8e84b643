//! zeropp within a program that has a `tracing` subscriber of its own: what a run tells goes where
//! the program's other events go, and a span of the program is around all of it.
//!
//! `cargo run --release --example embed`
//!
//! Beside zeropp it depends on
//! ```toml
//! tracing = { version = "0.1", default-features = false, features = ["std"] }
//! [dependencies.tracing-subscriber]
//! version = "0.3"
//! default-features = false
//! features = ["std", "fmt", "json"]
//! ```

use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use zeropp::{Config, RUN_EVENTS, Trainer};

fn main() -> Result<(), zeropp::Error> {
    // JSON lines with the time, the spans and the fields of each event. Without the progress of
    // runs only what goes wrong would be left: `.with_target(RUN_EVENTS, LevelFilter::OFF)`.
    let wanted = tracing_subscriber::filter::Targets::new()
        .with_target("zeropp", tracing::Level::WARN)
        .with_target(RUN_EVENTS, tracing::Level::INFO);
    let lines = tracing_subscriber::fmt::layer().json().with_writer(std::io::stdout);
    tracing_subscriber::registry().with(wanted).with(lines).init();

    for lr in [1e-3, 3e-3] {
        let _trial = tracing::info_span!(target: RUN_EVENTS, "trial", lr).entered();
        let config = Config { pp: 2, layers: 4, steps: 5, lr, ..Config::default() };
        Trainer::new(config)?.train(|_| ())?;
    }
    Ok(())
}
