//! `zeropp version`: what this program was built from, and what it can use here.

use clap::Command;
use zeropp_core::kernels::bf16::requested;

use crate::failure::Failure;
use crate::figures::say;

const ABOUT: &str = "Show the version, the commit, and the engines and devices it was built with";

/// `zeropp version` has no flags.
pub(crate) fn command() -> Command {
    Command::new("version").about(ABOUT)
}

/// The version and the commit.
pub(crate) fn short() -> &'static str {
    const SHORT: &str = concat!(env!("CARGO_PKG_VERSION"), " (", env!("ZEROPP_COMMIT"), ")");
    if env!("ZEROPP_COMMIT").is_empty() { env!("CARGO_PKG_VERSION") } else { SHORT }
}

/// Prints them, and what was built in.
pub(crate) fn run() -> Result<(), Failure> {
    say(text());
    Ok(())
}

/// Those of `parts` that are built in.
fn built_in(parts: &[(&str, bool)]) -> String {
    let names: Vec<&str> =
        parts.iter().filter(|(_, is_in)| *is_in).map(|(name, _)| *name).collect();
    if names.is_empty() { "none".into() } else { names.join(", ") }
}

fn text() -> String {
    let (mpi, cuda) = (cfg!(feature = "mpi"), cfg!(feature = "cuda"));
    let (wgpu, persist) = (cfg!(feature = "wgpu"), cfg!(feature = "persist"));
    let features = [("mpi", mpi), ("cuda", cuda), ("wgpu", wgpu), ("persist", persist)];
    format!(
        "zeropp    {}\n\
         target    {}\n\
         features  {}\n\
         engines   {}\n\
         devices   {}\n\
         CPU path  {} here; {} for products in bf16",
        short(),
        env!("ZEROPP_TARGET"),
        built_in(&features),
        built_in(&[("threads", true), ("mpi", mpi), ("nccl", cuda)]),
        built_in(&[("cpu", true), ("cuda", cuda), ("wgpu", wgpu)]),
        zeropp_core::kernels::cpu_path(),
        bf16_path(),
    )
}

/// The path of bf16 products, or what is wrong with the one that was asked for.
fn bf16_path() -> String {
    match requested() {
        Ok(isa) => isa.name().into(),
        Err(e) => format!("{} = {} ({})", e.variable, e.value, e.problem),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_lists_built_in_features() {
        let text = text();
        assert!(text.starts_with(&format!("zeropp    {}", env!("CARGO_PKG_VERSION"))), "{text}");
        assert!(text.contains("engines   threads") && text.contains("devices   cpu"), "{text}");
        assert_eq!(built_in(&[("a", false), ("b", false)]), "none");
        let known = ["AVX-512", "AVX2", "NEON", "scalar"];
        assert!(known.contains(&zeropp_core::kernels::cpu_path()));
        assert!(text.ends_with(&format!("; {} for products in bf16", bf16_path())), "{text}");
    }
}
