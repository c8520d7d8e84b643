//! `zeropp generate`: text that a model writes.

use std::io::Write;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::{Command as Process, Stdio};
use std::time::{Duration, Instant};

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use zeropp::config::{Config, Tokenizer};
use zeropp::{Generator, Sampling, belongings_of, config_of};
use zeropp_core::files::escaped;

use crate::args::{ema, trained_model};
use crate::failure::Failure;
use crate::tokenize::{absent, program};
use crate::values::whole;
use crate::{stderr, stdout};

/// How often is shown what is written.
const LOOK: Duration = Duration::from_millis(200);

const ABOUT: &str = "Write text with a model\n\n\
Takes a checkpoint of any layout, a Hugging Face folder or a GGUF file, and runs it on one rank, \
in fp32 on the CPU, keeping the keys and values of all tokens. The same command writes the same \
text. The text ends at the model's end-of-text token (eos), or where the model can take no more \
tokens.";

const EXAMPLES: &str = "\
Examples:
  zeropp generate checkpoints --prompt 'Once upon a time'          the likeliest text
  zeropp generate checkpoints --prompt 'fn ' --temperature 0.8 --top-k 50 --seed 7
  zeropp generate SmolLM2 --prompt 'The capital of France is' --max-tokens 20

A model of bytes needs no tokenizer. Any other uses the tokenizer.json of its folder, of the \
folder that its run began with, or beside its GGUF file, through the program zeropp-tokenize.
Exit codes: 0 written, 2 bad input.";

/// The arguments of `zeropp generate`.
pub(crate) fn command() -> Command {
    let number = |name: &'static str, default: &'static str, help: &'static str| {
        Arg::new(name).long(name).value_name("N").default_value(default).help(help)
    };
    Command::new("generate")
        .about("Write text with a model")
        .long_about(ABOUT)
        .after_help(EXAMPLES)
        .arg(trained_model())
        .arg(ema())
        .arg(
            Arg::new("prompt")
                .long("prompt")
                .value_name("TEXT")
                .required(true)
                .help("What the text begins with"),
        )
        .arg(number("max-tokens", "64", "The most tokens to write").value_parser(most_tokens))
        .arg(
            number("temperature", "0", "What logits are divided by; 0 takes the likeliest token")
                .value_parser(temperature),
        )
        .arg(
            number("top-k", "0", "Draw from the N likeliest tokens only; 0 from all")
                .value_parser(whole::<usize>(0)),
        )
        .arg(
            number(
                "top-p",
                "1",
                "Draw from the likeliest tokens that together have this probability",
            )
            .value_parser(probability),
        )
        .arg(number("seed", "0", "Seed of the random draws").value_parser(whole::<u64>(0)))
        .arg(
            Arg::new("tokenizer")
                .long("tokenizer")
                .value_parser(value_parser!(PathBuf))
                .value_name("FILE")
                .help("The model's tokenizer.json [default: that of its folder]"),
        )
        .arg(
            Arg::new("no-special-tokens")
                .long("no-special-tokens")
                .action(ArgAction::SetTrue)
                .help("Begin with the prompt alone, without the tokenizer's tokens, as <s>"),
        )
}

/// The most tokens of a text: more than any model takes, and hours of writing.
const TOKENS_MAX: usize = 1 << 20;

fn most_tokens(text: &str) -> Result<usize, String> {
    let number = whole::<usize>(0)(text)?;
    let fits = Some(number).filter(|n| *n <= TOKENS_MAX);
    fits.ok_or_else(|| format!("expected a whole number, at most {TOKENS_MAX}"))
}

fn temperature(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|t: &f64| t.is_finite() && *t >= 0.0);
    number.ok_or_else(|| "expected 0, or more to draw, such as 0.8".into())
}

fn probability(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|p: &f64| *p > 0.0 && *p <= 1.0);
    number.ok_or_else(|| "expected more than 0, up to 1".into())
}

/// Writes the text.
pub(crate) fn run(matches: &ArgMatches) -> Result<(), Failure> {
    let prompt = matches.get_one::<String>("prompt").expect("required");
    let folder = matches.get_one::<PathBuf>("model").expect("required");
    let of = |name: &str| *matches.get_one::<f64>(name).expect("has a default");
    let count = |name: &str| *matches.get_one::<usize>(name).expect("has a default");
    let sampling = Sampling {
        temperature: of("temperature"),
        top_k: count("top-k"),
        top_p: of("top-p"),
        seed: *matches.get_one::<u64>("seed").expect("has a default"),
    };
    if sampling.temperature == 0.0 {
        let typed = |name: &&str| matches.value_source(name) == Some(ValueSource::CommandLine);
        if let Some(name) = ["top-k", "top-p", "seed"].into_iter().find(typed) {
            return Err(Failure::bad_input(format!(
                "{name} = {}: nothing is drawn, as temperature is 0; set temperature, such as 0.8",
                matches.get_raw(name).into_iter().flatten().next().unwrap_or_default().display()
            )));
        }
    }
    let config = Config { init_ema: matches.get_flag("ema"), ..config_of(folder)? };
    let words = Vocabulary::find(matches.get_one::<PathBuf>("tokenizer"), folder, &config)?;
    let words = match words {
        Vocabulary::File { path, .. } => {
            Vocabulary::File { path, special: !matches.get_flag("no-special-tokens") }
        }
        bytes => bytes,
    };
    // What is there already is shown, to a terminal and into a pipe: the rest may take long.
    let mut shown = String::new();
    let most = count("max-tokens");
    let mut generator = Generator::new(&config)?;
    let GeneratedText { text, end } =
        written(&mut generator, &words, prompt, most, &sampling, |text| {
            let Some(new) = text.strip_prefix(&*shown) else { return };
            stdout::print(escaped(new).as_bytes());
            shown.push_str(new);
        })?;
    // Where a tokenizer has made other text of more tokens, that stands below what was shown.
    let rest = text.strip_prefix(&*shown).map_or_else(|| format!("\n{text}"), str::to_owned);
    stdout::print(format!("{}\n", escaped(&rest)).as_bytes());
    if let Some(why) = end {
        stderr::tell(&why);
    }
    Ok(())
}

/// Text that a model has written.
pub(crate) struct GeneratedText {
    /// The prompt, and what follows it.
    pub(crate) text: String,
    /// Why it has fewer tokens than were asked for, in words.
    pub(crate) end: Option<String>,
}

/// `prompt`, and up to `most` tokens that the model writes behind it. While it writes,
/// `so_far` sees now and then what will stay the beginning of it.
pub(crate) fn written(
    generator: &mut Generator,
    words: &Vocabulary,
    prompt: &str,
    most: usize,
    sampling: &Sampling,
    mut so_far: impl FnMut(&str),
) -> Result<GeneratedText, Failure> {
    let ids = words.ids(prompt)?;
    let ends = generator.ends().to_vec();
    let (mut seen, mut next) = (Vec::new(), Instant::now() + LOOK);
    let until_the_end = |id: u32| {
        if ends.contains(&id) {
            return ControlFlow::Break(());
        }
        seen.push(id);
        let begin = Instant::now();
        // A text that cannot be written now is an error in the end.
        if begin >= next
            && let Ok(text) = words.text_behind(&ids, &seen)
        {
            // The last character may not be whole.
            so_far(&format!("{prompt}{}", text.trim_end_matches(char::REPLACEMENT_CHARACTER)));
            // To tell it may take a program, which is not to take more time than the model.
            next = Instant::now() + LOOK.max(10 * begin.elapsed());
        }
        ControlFlow::Continue(())
    };
    let mut written = generator.generate(&ids, most, sampling, until_the_end)?;
    let end = written.pop_if(|id| ends.contains(id));
    let text = format!("{prompt}{}", words.text_behind(&ids, &written)?);
    let end = (end.is_some() || written.len() < most)
        .then(|| early_end(end, generator.positions(), ids.len(), written.len(), most));
    Ok(GeneratedText { text, end })
}

/// Why a text ends before it has the `most` tokens of its limit: at a token that ends it, or where
/// the model has no more positions.
fn early_end(
    end: Option<u32>,
    positions: Option<usize>,
    prompt: usize,
    written: usize,
    most: usize,
) -> String {
    let why = match (end, positions) {
        (Some(id), _) => format!("the model ended it with its end-of-text token (id {id})"),
        (None, Some(n)) => format!(
            "the model has {n} positions, which the prompt's {prompt} tokens and these fill; a \
             model trained with a larger seq writes longer texts"
        ),
        (None, None) => "it was cut off".into(),
    };
    format!("ended after {written} of at most {most} tokens: {why}")
}

/// How text becomes token ids and back.
pub(crate) enum Vocabulary {
    Bytes,
    /// By a tokenizer's file, with the special tokens that it adds to a text, or without.
    File {
        path: PathBuf,
        special: bool,
    },
}

impl Vocabulary {
    /// That of the model in `folder`, which has these settings, or will have.
    pub(crate) fn find(
        given: Option<&PathBuf>,
        folder: &Path,
        config: &Config,
    ) -> Result<Vocabulary, Failure> {
        if let Some(path) = given {
            return Ok(Vocabulary::File { path: path.clone(), special: true });
        }
        let places = belongings_of(folder, config);
        let mut files = places.iter().map(|place| place.join("tokenizer.json"));
        if let Some(path) = files.find(|path| path.is_file()) {
            return Ok(Vocabulary::File { path, special: true });
        }
        match (config.tokenizer, config.vocab) {
            (Tokenizer::Bytes, Some(256) | None) => Ok(Vocabulary::Bytes),
            _ => Err(Failure::bad_input(format!(
                "{}: its tokens are not bytes, and there is no tokenizer.json in it; name one with \
                 --tokenizer",
                folder.display()
            ))),
        }
    }

    fn ids(&self, text: &str) -> Result<Vec<u32>, Failure> {
        match self {
            Vocabulary::Bytes => Ok(text.bytes().map(u32::from).collect()),
            Vocabulary::File { path, special } => {
                let plain = (!special).then_some("--no-special-tokens");
                let args: Vec<&str> = ["--encode"].into_iter().chain(plain).collect();
                let ids = call(path, &args, text)?;
                let read = ids.split_whitespace().map(str::parse).collect::<Result<_, _>>();
                read.map_err(|e| Failure::failed_run(format!("zeropp-tokenize: no ids ({e})")))
            }
        }
    }

    /// The text of `written` behind that of `prompt`: together, since a tokenizer whose tokens have
    /// the blanks before words drops the first blank of a text.
    fn text_behind(&self, prompt: &[u32], written: &[u32]) -> Result<String, Failure> {
        match self {
            Vocabulary::Bytes => {
                let bytes: Vec<u8> = written.iter().map(|id| *id as u8).collect();
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }
            Vocabulary::File { path, .. } => {
                let ids: Vec<String> = prompt.iter().chain(written).map(u32::to_string).collect();
                let behind = prompt.len().to_string();
                call(path, &["--decode", "--behind", &behind], &ids.join(" "))
            }
        }
    }
}

/// Output of the tokenizer's program for `input`.
fn call(tokenizer: &Path, args: &[&str], input: &str) -> Result<String, Failure> {
    let mut process = Process::new(program());
    process.arg("--tokenizer").arg(tokenizer).args(args);
    process.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = process.spawn().map_err(|e| absent(&e))?;
    let mut stdin = child.stdin.take().expect("piped");
    // One that has ended early says why on standard error.
    let _ = stdin.write_all(input.as_bytes());
    drop(stdin);
    let output = child.wait_with_output().map_err(|e| absent(&e))?;
    if !output.status.success() {
        let code = output.status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1);
        return Err(Failure { message: String::new(), code });
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_early_end_is_the_model_s_token_or_its_last_position() {
        let by_token = early_end(Some(2), Some(64), 3, 5, 20);
        let begins = "ended after 5 of at most 20 tokens: the model ended it with its end-of-text";
        assert!(by_token.starts_with(begins) && by_token.ends_with("(id 2)"), "{by_token}");
        let full = early_end(None, Some(64), 6, 59, 150);
        assert!(full.contains("the model has 64 positions, which the prompt's 6 tokens"), "{full}");
    }
}
