//! TensorBoard's event files: records of the form of TFRecord, each an `Event` in Protocol Buffers.
//!
//! Of the messages only the fields that scalars need are written, by hand: a double, an integer and
//! texts take a dozen lines, a library for Protocol Buffers thousands (ADR 45).

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use zeropp_core::files::open_kept;
use zeropp_core::metrics::{LayerMetrics, RunHeader, StepMetrics};

use super::keys::KEYS;
use super::out::Out;
use super::step_writer::StepWriter;

/// The version that the first event of a file has.
const VERSION: &[u8] = b"brain.Event:2";
/// Added to a rotated checksum, so that one of a text with checksums in it is no constant.
const MASK: u32 = 0xa282_ead8;

// Fields of `Event`, `Summary`, `Summary.Value` and `SessionLog`.
const EVENT_WALL_TIME: u32 = 1;
const EVENT_STEP: u32 = 2;
const EVENT_FILE_VERSION: u32 = 3;
const EVENT_SUMMARY: u32 = 5;
const EVENT_SESSION_LOG: u32 = 7;
const SUMMARY_VALUE: u32 = 1;
const VALUE_TAG: u32 = 1;
const VALUE_SIMPLE: u32 = 2;
const SESSION_STATUS: u32 = 1;
const SESSION_START: u64 = 1;

/// A file of events.
pub(super) struct EventFile(BufWriter<Out>);

/// Begins a new file in `folder`, which is made where it is missing. A run that goes on has one of
/// its own; its first event tells TensorBoard to drop what files before it have of the steps that
/// come again.
///
/// # Errors
/// The folder or the file cannot be made.
pub(super) fn create(folder: &Path, run: &RunHeader) -> io::Result<(PathBuf, File)> {
    fs::create_dir_all(folder)?;
    // TensorBoard reads files in the order of their names.
    let name = format!(
        "events.out.tfevents.{:010}.{:03}.{}.zeropp",
        run.wall_time as u64,
        (run.wall_time.fract() * 1e3) as u64,
        std::process::id()
    );
    let path = folder.join(name);
    let file = open_kept(&path, |_| Ok(0))?;
    Ok((path, file))
}

impl EventFile {
    /// Writes to `out`.
    pub(super) fn to(out: Out) -> EventFile {
        EventFile(BufWriter::new(out))
    }

    /// Length and its checksum, `data` and its.
    fn record(&mut self, data: &[u8]) -> io::Result<()> {
        let length = (data.len() as u64).to_le_bytes();
        self.0.write_all(&length)?;
        self.0.write_all(&masked(&length).to_le_bytes())?;
        self.0.write_all(data)?;
        self.0.write_all(&masked(data).to_le_bytes())
    }
}

impl StepWriter for EventFile {
    fn begin(&mut self, run: &RunHeader) -> io::Result<()> {
        let mut first = ProtoMessage::default();
        first.double(EVENT_WALL_TIME, run.wall_time);
        first.bytes(EVENT_FILE_VERSION, VERSION);
        self.record(&first.0)?;
        let mut session = ProtoMessage::default();
        session.integer(SESSION_STATUS, SESSION_START);
        let mut start = ProtoMessage::default();
        start.double(EVENT_WALL_TIME, run.wall_time);
        start.integer(EVENT_STEP, run.resumed_step.map_or(0, |step| step + 1));
        start.bytes(EVENT_SESSION_LOG, &session.0);
        self.record(&start.0)?;
        self.0.flush()
    }

    fn write(&mut self, step: &StepMetrics) -> io::Result<()> {
        let mut event = ProtoMessage::default();
        event.double(EVENT_WALL_TIME, step.wall_time);
        event.integer(EVENT_STEP, step.step);
        let mut summary = ProtoMessage::default();
        for (tag, value) in scalars(step) {
            let mut one = ProtoMessage::default();
            one.bytes(VALUE_TAG, tag.as_bytes());
            one.float(VALUE_SIMPLE, value as f32);
            summary.bytes(SUMMARY_VALUE, &one.0);
        }
        event.bytes(EVENT_SUMMARY, &summary.0);
        self.record(&event.0)?;
        self.0.flush()
    }
}

/// The figures of a step and of its layers, by tag.
fn scalars(m: &StepMetrics) -> Vec<(String, f64)> {
    let of_step = KEYS.iter().filter_map(|key| Some((key.tag?.to_owned(), (key.of)(m)?)));
    let of_layer = |layer: &LayerMetrics| {
        let scalar =
            |group: &str, value: Option<f64>| Some((format!("{group}/{}", layer.name), value?));
        [
            scalar("layer_grad_norm", layer.grad_norm),
            scalar("layer_update_ratio", layer.update_ratio),
            scalar("layer_activation_rms", layer.activation_rms),
        ]
    };
    of_step.chain(m.layers.iter().flat_map(of_layer).flatten()).collect()
}

/// A message of Protocol Buffers on its way.
#[derive(Default)]
struct ProtoMessage(Vec<u8>);

impl ProtoMessage {
    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    fn key(&mut self, field: u32, wire_type: u32) {
        self.varint(u64::from(field << 3 | wire_type));
    }

    fn integer(&mut self, field: u32, value: u64) {
        self.key(field, 0);
        self.varint(value);
    }

    fn double(&mut self, field: u32, value: f64) {
        self.key(field, 1);
        self.0.extend(value.to_le_bytes());
    }

    fn bytes(&mut self, field: u32, value: &[u8]) {
        self.key(field, 2);
        self.varint(value.len() as u64);
        self.0.extend(value);
    }

    fn float(&mut self, field: u32, value: f32) {
        self.key(field, 5);
        self.0.extend(value.to_le_bytes());
    }
}

/// TFRecord's checksum: CRC-32C, rotated and masked.
fn masked(data: &[u8]) -> u32 {
    crc32c(data).rotate_right(15).wrapping_add(MASK)
}

/// CRC-32C (Castagnoli), bit by bit: a step's record has some hundred bytes.
fn crc32c(data: &[u8]) -> u32 {
    !data.iter().fold(!0u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            (crc >> 1) ^ (0x82f6_3b78 & (crc & 1).wrapping_neg())
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The fields of a message: number, and what it holds.
    fn fields(mut data: &[u8]) -> Vec<(u64, Vec<u8>)> {
        fn varint(data: &mut &[u8]) -> u64 {
            let mut value = 0;
            for place in 0.. {
                let byte = data[0];
                *data = &data[1..];
                value |= u64::from(byte & 0x7f) << (7 * place);
                if byte < 0x80 {
                    break;
                }
            }
            value
        }
        let mut found = Vec::new();
        while !data.is_empty() {
            let key = varint(&mut data);
            let length = match key & 7 {
                0 => {
                    found.push((key >> 3, varint(&mut data).to_le_bytes().to_vec()));
                    continue;
                }
                1 => 8,
                5 => 4,
                2 => varint(&mut data) as usize,
                other => panic!("wire type {other}"),
            };
            let (value, rest) = data.split_at(length);
            found.push((key >> 3, value.to_vec()));
            data = rest;
        }
        found
    }

    /// The events of a file, each with its checksums looked at.
    fn events(mut data: &[u8]) -> Vec<Vec<(u64, Vec<u8>)>> {
        let mut found = Vec::new();
        while !data.is_empty() {
            let (head, rest) = data.split_at(12);
            let length = u64::from_le_bytes(head[..8].try_into().unwrap()) as usize;
            assert_eq!(masked(&head[..8]).to_le_bytes(), head[8..]);
            assert_eq!(masked(&rest[..length]).to_le_bytes(), rest[length..length + 4]);
            found.push(fields(&rest[..length]));
            data = &rest[length + 4..];
        }
        found
    }

    #[test]
    fn checksums_are_those_of_the_standard() {
        // RFC 3720, B.4; and the one that TensorFlow's files begin with, whose first record has 24
        // bytes.
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(masked(&24u64.to_le_bytes()), 0x224b_7fa3);
    }

    #[test]
    fn events_read_back() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("a/b");
        let run =
            RunHeader { wall_time: 1e9 + 0.5, resumed_step: Some(300), ..RunHeader::default() };
        let (path, file) = create(&folder, &run).unwrap();
        let mut file = EventFile::to(Out::new(file));
        assert!(path.file_name().unwrap().to_str().unwrap().contains("tfevents.1000000000.500"));
        let layer = LayerMetrics { name: "h.0".into(), grad_norm: Some(0.5), ..Default::default() };
        let step = StepMetrics { step: 301, wall_time: 1e9 + 2.0, loss: 2.5, ..Default::default() };
        let step = StepMetrics { layers: vec![layer], ..step };
        file.begin(&run).unwrap();
        file.write(&step).unwrap();
        let all = events(&fs::read(&path).unwrap());
        let of = |event: usize, field: u32| {
            let found = all[event].iter().find(|(number, _)| *number == u64::from(field));
            found.unwrap().1.clone()
        };
        assert_eq!((all.len(), of(0, EVENT_FILE_VERSION)), (3, VERSION.to_vec()));
        assert_eq!(of(1, EVENT_STEP), 301u64.to_le_bytes(), "what comes again is dropped");
        assert_eq!(fields(&of(1, EVENT_SESSION_LOG)), [(1, 1u64.to_le_bytes().to_vec())]);
        assert_eq!(of(2, EVENT_WALL_TIME), (1e9 + 2.0f64).to_le_bytes());
        let values = fields(&of(2, EVENT_SUMMARY));
        let values: Vec<_> = values.iter().map(|(_, value)| fields(value)).collect();
        let loss = values.iter().find(|value| value[0].1 == b"loss/train").unwrap();
        assert_eq!(loss[1], (u64::from(VALUE_SIMPLE), 2.5f32.to_le_bytes().to_vec()));
        let layer = values.iter().find(|value| value[0].1 == b"layer_grad_norm/h.0").unwrap();
        assert_eq!(layer[1], (u64::from(VALUE_SIMPLE), 0.5f32.to_le_bytes().to_vec()));
        assert_eq!(values.len(), scalars(&step).len());
    }

    #[test]
    fn every_step_has_a_point_of_every_figure_whatever_its_value() {
        let of = |step: &StepMetrics, tag: &str| {
            let found = scalars(step).into_iter().find(|(name, _)| name == tag);
            found.map(|(_, value)| value)
        };
        let step = StepMetrics { grad_norm: f64::INFINITY, ..StepMetrics::default() };
        for tag in ["train/skipped", "train/rolled_back", "speed/save_blocked_s"] {
            assert_eq!(of(&step, tag), Some(0.0), "{tag}");
        }
        assert_eq!(of(&step, "train/grad_norm"), Some(f64::INFINITY));
        let step = StepMetrics { skipped: true, loss: f64::NAN, ..step };
        assert_eq!(of(&step, "train/skipped"), Some(1.0));
        assert!(of(&step, "loss/train").unwrap().is_nan());
        // What is not there has none.
        let step = StepMetrics { scored_tokens: Some(0), ..step };
        assert_eq!([of(&step, "loss/train"), of(&step, "loss/validation")], [None; 2]);
    }
}
