//! The flags for samples that are cut into slices.

use clap::builder::PossibleValuesParser;
use clap::{Arg, ArgMatches};
use zeropp::pipeline::costs::SliceCut;
use zeropp::pipeline::ir::SAMPLE_TOKENS_MAX;

use crate::values::whole;

/// How samples are cut into slices.
#[derive(Clone, Debug)]
pub(super) struct SliceArgs {
    /// Slices of a sample.
    pub(super) number: usize,
    pub(super) cut: SliceCut,
    /// Tokens of a sample.
    pub(super) tokens: u64,
    /// The share of pairs of tokens in the time of F, and of B.
    pub(super) pairs: [f64; 2],
}

impl SliceArgs {
    /// The values of the flags of [`slice_args`].
    pub(super) fn new(matches: &ArgMatches) -> Option<SliceArgs> {
        let number = *matches.get_one::<usize>("slices")?;
        let cut = matches.get_one::<String>("slice-cut").map(String::as_str);
        Some(SliceArgs {
            number,
            cut: match cut {
                Some("tokens") => SliceCut::Tokens,
                _ => SliceCut::Work,
            },
            tokens: *matches.get_one("sample-tokens").expect("has a default"),
            pairs: matches.get_one("slice-pairs").copied().unwrap_or_default(),
        })
    }
}

/// The flags for samples in slices, which `kinds` have.
pub(super) fn slice_args(kinds: &str) -> [Arg; 4] {
    let slices = Arg::new("slices")
        .long("slices")
        .value_name("N")
        .value_parser(whole::<usize>(1))
        .help("Slices that every sample is cut into")
        .long_help(format!(
            "Slices that every sample is cut into, along its sequence: a micro-batch of the \
             schedule is a slice then. --micro-batches and --unit count samples, of which costs \
             and memory are, too. For {kinds}. Peaks of memory leave out keys and \
             values that later slices need, and their gradients; those of runs \
             (--schedule KIND:slices=N) have them."
        ));
    let cut = Arg::new("slice-cut")
        .long("slice-cut")
        .value_name("WHAT")
        .requires("slices")
        .default_value(SliceCut::NAMES[0])
        .value_parser(PossibleValuesParser::new(SliceCut::NAMES))
        .help("What slices have the same of");
    let tokens = Arg::new("sample-tokens")
        .long("sample-tokens")
        .value_name("T")
        .requires("slices")
        .default_value("32768")
        .value_parser(sample_tokens)
        .help("Tokens of a sample, which is cut at multiples of 256");
    let pairs = Arg::new("slice-pairs")
        .long("slice-pairs")
        .value_name("F[,B]")
        .requires("slices")
        .value_parser(shares)
        .help("Share of F and of B, 0 to 1, that grows by pairs of tokens [default: 0]")
        .long_help(
            "Share of F and of B, 0 to 1, that grows by pairs of tokens, as attention does: of a \
             sample's whole time. The rest of it, and W, grows by tokens. One number is for both. \
             [default: 0]",
        );
    [slices, cut, tokens, pairs]
}

fn sample_tokens(text: &str) -> Result<u64, String> {
    let tokens = whole(1)(text).ok().filter(|tokens| *tokens <= SAMPLE_TOKENS_MAX);
    tokens.ok_or_else(|| format!("expected a whole number, 1 to {SAMPLE_TOKENS_MAX}"))
}

fn shares(text: &str) -> Result<[f64; 2], String> {
    let share = |text: &str| text.parse().ok().filter(|share| (0.0..=1.0).contains(share));
    let (f, b) = text.split_once(',').unwrap_or((text, text));
    share(f).zip(share(b)).map(|(f, b)| [f, b]).ok_or_else(|| {
        "expected F or F,B, each a share of the time, a number between 0 and 1".into()
    })
}
