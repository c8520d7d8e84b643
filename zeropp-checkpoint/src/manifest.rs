//! `manifest.json`: what a checkpoint consists of, protected by its own digest.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};
use zeropp_data::tokens::{Fingerprint, Position};

use crate::error::{Checked, damaged};
use crate::kept::StateTensor;

/// Name of the file that makes a folder a checkpoint.
pub const MANIFEST: &str = "manifest.json";
/// The longest one that is read: a hundred bytes for each piece of each parameter.
pub(crate) const MANIFEST_BYTES_MAX: u64 = 256 << 20;
/// The format's name and version, as this build writes it.
const FORMAT: &str = "zeropp-training-state";
const VERSION: u32 = 1;

/// The beginning of the file; 64 hexadecimal digits follow, then [`AFTER_DIGEST`]. The digest is
/// that of all bytes after these lines, so that no byte of the file can change unseen.
const BEFORE_DIGEST: &str = "{\n  \"digest\": \"";
const AFTER_DIGEST: &str = "\",\n";
const DIGEST_DIGITS: usize = 64;

/// The table of a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    format: String,
    version: u32,
    /// Steps done.
    pub step: u64,
    /// Updates done: steps without those skipped because a gradient was not finite.
    pub updates: u64,
    /// Number of token ids of the model.
    pub vocabulary: usize,
    /// The run's settings by key, each as in a TOML file.
    pub settings: BTreeMap<String, String>,
    /// The data that the run was trained on; earlier versions did not keep it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<Fingerprint>,
    /// The validation loss after the step in nats a token, where it was measured: as text, which
    /// reads back to the same bits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    validation_loss: Option<String>,
    /// Where the parameters are that the run did not train, where there are any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<Base>,
    /// The lowest validation loss of the run so far, as text, and how many came since.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    plateau: Option<(String, u64)>,
    /// The samples that the run has taken; earlier versions took as many in each step as their
    /// settings say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub position: Option<Position>,
    /// The learning rate of the step, as text, which reads back to the same bits; earlier versions
    /// did not keep it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    learning_rate: Option<String>,
    /// The program that took the place of the planned one, where one did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<SavedProgram>,
    /// Every file by name.
    pub files: BTreeMap<String, FileRecord>,
    /// Every parameter by name.
    pub parameters: BTreeMap<String, SavedParameter>,
}

/// A program that took the place of a run's planned one, and was better.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedProgram {
    /// How many had taken the place of their predecessor by then, it included.
    pub number: u64,
    /// Nanoseconds of a step with it, as measured.
    pub step_ns: u64,
    /// It, as files of schedules have it.
    pub text: String,
    /// Blocks of each of its stages, where the run may cut them anew.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blocks: Option<Vec<usize>>,
}

/// Where the parameters are that a run did not train, and no checkpoint of it has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Base {
    /// The weights that the run began with; none where these are the seed's or the program's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// The fingerprint that distinguishes them from others.
    pub fingerprint: String,
}

/// The size and digest that a file must have.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileRecord {
    /// Its size.
    pub bytes: u64,
    /// BLAKE3 digest of all of it, in hexadecimal.
    pub blake3: String,
}

/// Where a parameter is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedParameter {
    /// Dimensions.
    pub shape: Vec<usize>,
    /// The tensors that the optimizer keeps of it; earlier versions knew AdamW's alone, and say
    /// none.
    #[serde(default = "of_adamw", skip_serializing_if = "is_of_adamw")]
    pub kept: Vec<StateTensor>,
    /// Pieces in order of their offsets; together all elements, once.
    pub pieces: Vec<Piece>,
}

fn of_adamw() -> Vec<StateTensor> {
    ["exp_avg", "exp_avg_sq"].map(StateTensor::per_element).to_vec()
}

fn is_of_adamw(kept: &Vec<StateTensor>) -> bool {
    *kept == of_adamw()
}

/// Elements `offset..offset + len` of a parameter in row-major order.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Piece {
    /// First element.
    pub offset: usize,
    /// Number of elements.
    pub len: usize,
    /// The file that has them.
    pub file: String,
}

/// How a run's validation loss has gone.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Plateau {
    /// The lowest loss so far, in nats a token.
    pub lowest: f64,
    /// How many were measured since, none of which was lower.
    pub since: u64,
}

impl Manifest {
    /// A manifest with no files and parameters yet.
    pub fn new(
        step: u64,
        updates: u64,
        vocabulary: usize,
        settings: BTreeMap<String, String>,
    ) -> Self {
        Self {
            format: FORMAT.into(),
            version: VERSION,
            step,
            updates,
            vocabulary,
            settings,
            data: None,
            validation_loss: None,
            base: None,
            plateau: None,
            position: None,
            learning_rate: None,
            program: None,
            files: BTreeMap::new(),
            parameters: BTreeMap::new(),
        }
    }

    /// The validation loss after the step in nats a token, where it was measured and is finite.
    pub fn validation_loss(&self) -> Option<f64> {
        self.validation_loss.as_ref()?.parse().ok().filter(|loss: &f64| loss.is_finite())
    }

    /// Keeps the validation loss after the step.
    pub(crate) fn set_validation_loss(&mut self, loss: Option<f64>) {
        self.validation_loss = loss.map(|loss| loss.to_string());
    }

    /// How the run's validation loss has gone, where it was measured.
    pub fn plateau(&self) -> Option<Plateau> {
        let (lowest, since) = self.plateau.as_ref()?;
        let lowest = lowest.parse().ok().filter(|loss: &f64| loss.is_finite())?;
        Some(Plateau { lowest, since: *since })
    }

    /// Keeps how the run's validation loss has gone.
    pub(crate) fn set_plateau(&mut self, plateau: Option<Plateau>) {
        self.plateau = plateau.map(|Plateau { lowest, since }| (lowest.to_string(), since));
    }

    /// The learning rate of the step, where it was kept.
    pub fn learning_rate(&self) -> Option<f64> {
        self.learning_rate.as_ref()?.parse().ok()
    }

    /// Keeps the learning rate of the step.
    pub(crate) fn set_learning_rate(&mut self, rate: Option<f64>) {
        self.learning_rate = rate.map(|rate| rate.to_string());
    }

    /// Puts every parameter's pieces in order, once all are entered.
    pub(crate) fn sort_pieces(&mut self) {
        self.parameters.values_mut().for_each(|p| p.pieces.sort_unstable());
    }

    /// The file's content.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let text = serde_json::to_string_pretty(self).expect("names and numbers");
        let body = format!("{}\n", text.strip_prefix("{\n").expect("a JSON object"));
        let digest = blake3::hash(body.as_bytes()).to_hex();
        format!("{BEFORE_DIGEST}{digest}{AFTER_DIGEST}{body}").into_bytes()
    }

    /// Reads what [`to_bytes`](Self::to_bytes) wrote.
    ///
    /// # Errors
    /// Any byte that differs; a version this build does not know; pieces that do not make up
    /// their parameters. `path` is for the message.
    pub(crate) fn from_bytes(bytes: &[u8], path: &Path) -> Checked<Manifest> {
        let body = protected(bytes)
            .ok_or_else(|| damaged(path, "its content does not match the digest at its top"))?;
        let text = ["{\n".as_bytes(), body].concat();
        let bad = |e: serde_json::Error| damaged(path, format!("it is not a manifest ({e})"));
        // The version first: another one may have other fields.
        let head: FormatHeader = serde_json::from_slice(&text).map_err(bad)?;
        if (head.format.as_str(), head.version) != (FORMAT, VERSION) {
            let found = format!("{} version {}", head.format, head.version);
            let problem = format!("it is {found}, and this build reads {FORMAT} version {VERSION}");
            return Err(damaged(path, problem));
        }
        let manifest: Manifest = serde_json::from_slice(&text).map_err(bad)?;
        manifest.check().map_err(|problem| damaged(path, problem))?;
        Ok(manifest)
    }

    fn check(&self) -> Result<(), String> {
        for (name, parameter) in &self.parameters {
            if let Some(kept) = parameter.kept.iter().find(|kept| !kept.is_possible()) {
                return Err(format!("{:?}, kept of {name}, is no name or no tensor", kept.name));
            }
        }
        for name in self.files.keys() {
            let plain = !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\\']);
            if !plain {
                return Err(format!("{name:?} is not the name of a file beside it"));
            }
        }
        self.parameters.iter().try_for_each(|(name, p)| self.check_pieces(name, p))
    }

    fn check_pieces(&self, name: &str, parameter: &SavedParameter) -> Result<(), String> {
        let mut end = 0usize;
        for piece in &parameter.pieces {
            if !self.files.contains_key(&piece.file) {
                return Err(format!(
                    "{name} has a piece in {}, which it does not list",
                    piece.file
                ));
            }
            let next = end.checked_add(piece.len).filter(|_| piece.offset == end && piece.len > 0);
            end = next.ok_or_else(|| {
                format!("the pieces of {name} do not follow each other at element {end}")
            })?;
        }
        let elements = parameter.shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d));
        if elements == Some(end) {
            return Ok(());
        }
        Err(format!(
            "the pieces of {name} end at element {end}, its shape is {:?}",
            parameter.shape
        ))
    }
}

#[derive(Deserialize)]
struct FormatHeader {
    format: String,
    version: u32,
}

/// The bytes after the digest, if it is theirs.
fn protected(bytes: &[u8]) -> Option<&[u8]> {
    let rest = bytes.strip_prefix(BEFORE_DIGEST.as_bytes())?;
    let (digest, rest) = rest.split_at_checked(DIGEST_DIGITS)?;
    let body = rest.strip_prefix(AFTER_DIGEST.as_bytes())?;
    (digest == blake3::hash(body).to_hex().as_bytes()).then_some(body)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Manifest {
        let mut m =
            Manifest::new(7, 6, 256, BTreeMap::from([("lr".to_string(), "0.003".to_string())]));
        for file in ["a", "b"] {
            m.files.insert(file.into(), FileRecord { bytes: 9, blake3: "00".into() });
        }
        let piece = |offset, len, file: &str| Piece { offset, len, file: file.into() };
        let pieces = vec![piece(0, 4, "a"), piece(4, 2, "b")];
        m.parameters
            .insert("w".into(), SavedParameter { shape: vec![2, 3], kept: of_adamw(), pieces });
        m
    }

    fn read(m: &Manifest) -> Result<Manifest, String> {
        Manifest::from_bytes(&m.to_bytes(), Path::new("m")).map_err(|e| e.to_string())
    }

    #[test]
    fn reads_back_and_is_plain_json() {
        let m = sample();
        assert_eq!(read(&m).unwrap(), m);
        let json: serde_json::Value = serde_json::from_slice(&m.to_bytes()).unwrap();
        assert_eq!((json["step"].as_u64(), json["updates"].as_u64()), (Some(7), Some(6)));
        // As earlier versions wrote it, without what the data was, and AdamW's moments unnamed.
        assert!(json.get("data").is_none() && m.data.is_none());
        assert!(json["parameters"]["w"].get("kept").is_none());
        let data = Some(Fingerprint { bytes: 9, samples_blake3: "ab".into() });
        let with_data = Manifest { data, ..m };
        assert_eq!(read(&with_data).unwrap(), with_data);
    }

    /// A later version may keep something that changes what the rest means.
    #[test]
    fn a_field_that_is_not_known_is_refused_by_name() {
        let text = String::from_utf8(sample().to_bytes()).unwrap();
        let body = text.split_once(AFTER_DIGEST).unwrap().1;
        for (from, to) in [
            ("  \"step\"", "  \"turned\": 1,\n  \"step\""),
            ("\"offset\": 0", "\"turned\": 1, \"offset\": 0"),
            ("\"bytes\": 9", "\"turned\": 1, \"bytes\": 9"),
            ("\"shape\"", "\"turned\": 1, \"shape\""),
        ] {
            let body = body.replacen(from, to, 1);
            let digest = blake3::hash(body.as_bytes()).to_hex();
            let bytes = format!("{BEFORE_DIGEST}{digest}{AFTER_DIGEST}{body}");
            let error = Manifest::from_bytes(bytes.as_bytes(), Path::new("m")).unwrap_err();
            assert!(error.to_string().contains("unknown field `turned`"), "{from}: {error}");
        }
    }

    #[test]
    fn the_place_in_the_data_the_learning_rate_and_the_program_are_kept() {
        let mut m = sample();
        let before: serde_json::Value = serde_json::from_slice(&m.to_bytes()).unwrap();
        assert!(before.get("position").is_none() && before.get("learning_rate").is_none());
        assert!(before.get("program").is_none());
        let position = Position::after(40, 64).and(24, 32);
        m.position = Some(position.clone());
        m.set_learning_rate(Some(1.0 / 3e4));
        let (text, blocks) = ("{\"format\": 1}".into(), Some(vec![3, 5]));
        let program = SavedProgram { number: 2, step_ns: u64::MAX, text, blocks };
        m.program = Some(program.clone());
        let back = read(&m).unwrap();
        assert_eq!((back.learning_rate(), back.position), (Some(1.0 / 3e4), Some(position)));
        assert_eq!(back.program, Some(program));
    }

    #[test]
    fn any_changed_missing_or_added_byte_is_seen() {
        let good = sample().to_bytes();
        let refused = |bytes: &[u8]| Manifest::from_bytes(bytes, Path::new("m")).is_err();
        for at in 0..good.len() {
            for bit in 0..8 {
                let mut bad = good.clone();
                bad[at] ^= 1 << bit;
                assert!(refused(&bad), "byte {at} bit {bit}");
            }
            assert!(refused(&good[..at]), "cut to {at}");
        }
        assert!(refused(&[good.as_slice(), b"\n"].concat()));
    }

    #[test]
    fn contents_that_contradict_themselves_are_refused() {
        let change = |f: fn(&mut Manifest)| {
            let mut m = sample();
            f(&mut m);
            read(&m).unwrap_err()
        };
        for (message, error) in [
            ("version 2, and this build reads", change(|m| m.version = 2)),
            ("not the name of a file", {
                change(|m| {
                    let record = m.files["a"].clone();
                    m.files.insert("../a".into(), record);
                })
            }),
            ("which it does not list", change(|m| drop(m.files.remove("b")))),
            (
                "end at element 6, its shape is [2, 4]",
                change(|m| m.parameters.get_mut("w").unwrap().shape = vec![2, 4]),
            ),
            (
                "do not follow each other at element 4",
                change(|m| m.parameters.get_mut("w").unwrap().pieces[1].offset = 3),
            ),
            ("end at element 4", change(|m| drop(m.parameters.get_mut("w").unwrap().pieces.pop()))),
            (
                "do not follow each other at element 4",
                change(|m| m.parameters.get_mut("w").unwrap().pieces[1].len = usize::MAX),
            ),
        ] {
            assert!(error.contains(message), "{message:?} is not in: {error}");
        }
    }
}
