//! What attention and the loss may see: documents kept apart, and tokens that are not scored.

use std::path::{Path, PathBuf};

use crate::common::{assert_same_bits, llama, run, text_file, tiny};
use zeropp::config::{Order, Precision, Recompute, Tokenizer};
use zeropp::data::LOSS_MASK_MAGIC;
use zeropp::{Config, NamedWeights, SampleError, Samples, StepMetrics, Trainer};

/// A small run of which every line of its text is a document.
fn by_lines(data: &Path) -> Config {
    Config {
        data: Some(data.into()),
        layers: 4,
        seq: 24,
        steps: 4,
        document_mask: true,
        document_end: Some(usize::from(b'\n')),
        ..tiny()
    }
}

#[test]
fn documents_have_the_same_bits_in_every_layout() {
    let dir = tempfile::tempdir().unwrap();
    let text = text_file(&dir, 4000);
    for precision in [Precision::Fp32, Precision::Bf16] {
        let base = Config { precision, ..llama(by_lines(&text)) };
        let reference = run(base.clone());
        let open = run(Config { document_mask: false, document_end: None, ..base.clone() });
        assert_ne!(reference.steps[0].loss.to_bits(), open.steps[0].loss.to_bits());
        let others = [
            Config { pp: 2, virtual_stages: Some(2), ..base.clone() },
            Config { pp: 4, recompute: Recompute::Full, ..base.clone() },
            Config { threads: Some(3), recompute: Recompute::Selective, ..base.clone() },
            Config { pp: 2, prefetch: 2, ..base.clone() },
        ];
        for config in others {
            let what = format!("{precision} pp {} {}", config.pp, config.recompute);
            assert_same_bits(&reference, &run(config), &what);
        }
    }
    let base = Config { unit: Some(6), ..by_lines(&text) };
    let reference = run(base.clone());
    for (schedule, pp) in [("gpipe", 2), ("1f1b", 4)] {
        let config = Config { schedule: schedule.into(), unit: None, pp, ..base.clone() };
        assert_same_bits(&reference, &run(config), schedule);
    }
    // Measured memory is what is predicted, wherever documents begin.
    for config in [base.clone(), Config { precision: Precision::Bf16, pp: 2, ..base }] {
        let summary = run(config).summary;
        assert_eq!(summary.peak_bytes, summary.predicted_bytes);
    }
}

/// The rule of a validation loss holds for scored tokens, too: the same bits on any mesh.
#[test]
fn a_validation_loss_of_documents_is_the_same_on_any_mesh() {
    let dir = tempfile::tempdir().unwrap();
    let text = text_file(&dir, 4000);
    let split = Some("9,1".into());
    let base = Config { split, eval_every: 1, eval_steps: 0, ..by_lines(&text) };
    let loss = |config: Config| Trainer::new(config).unwrap().evaluate().unwrap().loss.to_bits();
    let one = loss(base.clone());
    assert_eq!(one, loss(Config { pp: 2, zero3: 2, micro_batches: Some(3), ..base.clone() }));
    assert_ne!(one, loss(Config { document_mask: false, document_end: None, ..base }));
}

/// Samples that are these.
struct Given(Vec<Vec<u32>>);

impl Samples for Given {
    fn name(&self) -> &str {
        "given"
    }
    fn vocabulary(&self) -> usize {
        64
    }
    fn sample(&self, n: u64, tokens: usize) -> Result<Vec<u32>, SampleError> {
        let sample = self.0[n as usize % self.0.len()].clone();
        Ok(sample.into_iter().cycle().take(tokens).collect())
    }
}

fn gradients(config: Config, samples: Vec<Vec<u32>>) -> (StepMetrics, NamedWeights) {
    let builder = Trainer::builder(config).data(Given(samples));
    builder.build().unwrap().first_gradients().unwrap()
}

/// Largest difference over the largest value.
fn relative(a: &[f32], b: &[f64]) -> f64 {
    let scale = b.iter().fold(0.0, |m: f64, x| m.max(x.abs()));
    a.iter().zip(b).fold(0.0, |m: f64, (x, y)| m.max((f64::from(*x) - y).abs())) / scale
}

/// The loss and the gradients of documents that are packed into samples are those of the same
/// documents, each a sample of its own, with as much weight as it has tokens.
#[test]
fn packed_documents_give_what_they_give_alone() {
    let document = |first: u32, n: usize| -> Vec<u32> {
        (0..n as u32 - 1).map(|i| (first + i * i * 7) % 63 + 1).chain([0]).collect()
    };
    let documents = [document(3, 5), document(20, 8), document(41, 7), document(7, 6)];
    let packed =
        [[&documents[0][..], &documents[1]].concat(), [&documents[2][..], &documents[3]].concat()];
    let base = llama(Config { layers: 4, hidden: 32, heads: 4, pp: 2, ..tiny() });
    let one = |seq: usize| Config { seq, unit: Some(1), micro_batches: Some(1), ..base.clone() };
    // One more token, the first of a document that is not scored.
    let packed: Vec<Vec<u32>> = packed.into_iter().map(|ids| [ids, vec![9]].concat()).collect();
    let whole = Config {
        micro_batches: Some(2),
        unit: Some(2),
        document_mask: true,
        document_end: Some(0),
        ..one(13)
    };
    let (together, sums) = gradients(whole, packed);
    let scored: usize = documents.iter().map(|ids| ids.len() - 1).sum();
    let (mut loss, mut expected) = (0.0, std::collections::BTreeMap::<String, Vec<f64>>::new());
    for ids in documents {
        let weight = (ids.len() - 1) as f64 / scored as f64;
        let (metrics, alone) = gradients(one(ids.len() - 1), vec![ids]);
        loss += weight * metrics.loss;
        for (name, alone) in alone {
            let sum = expected.entry(name).or_insert_with(|| vec![0.0; alone.len()]);
            sum.iter_mut().zip(&alone).for_each(|(sum, g)| *sum += weight * f64::from(*g));
        }
    }
    assert!((together.loss - loss).abs() < 1e-6 * loss, "{} and {loss}", together.loss);
    for (name, sum) in &sums {
        let error = relative(sum, &expected[name]);
        assert!(error <= 2e-6, "{name}: {error:e}");
    }
}

/// A file of 16-bit ids, one document, with a loss mask.
pub(crate) fn masked(dir: &Path, ids: &[u16], marked: impl Fn(usize) -> bool) -> PathBuf {
    let n = ids.len();
    let bin = dir.join("x.bin");
    std::fs::write(&bin, ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<_>>()).unwrap();
    let mut index = b"MMIDIDX\0\0".to_vec();
    index.extend(1u64.to_le_bytes());
    index.push(8);
    index.extend([1u64.to_le_bytes(), 2u64.to_le_bytes()].concat());
    index.extend((n as i32).to_le_bytes());
    index.extend([0i64, 0, 1].iter().flat_map(|n| n.to_le_bytes()));
    std::fs::write(dir.join("x.idx"), index).unwrap();
    let mut mask = [LOSS_MASK_MAGIC.as_slice(), &(n as u64).to_le_bytes()].concat();
    mask.extend((0..n.div_ceil(8)).map(|byte| {
        let bit = |i: usize| u8::from(byte * 8 + i < n && marked(byte * 8 + i)) << i;
        (0..8).map(bit).sum::<u8>()
    }));
    std::fs::write(dir.join("x.mask"), mask).unwrap();
    bin
}

/// The loss is the mean over the scored tokens of the whole step, however unevenly they lie: so two
/// masks that share all tokens between them make the loss and the gradients of all, each with as
/// much weight as it has tokens, and where samples are makes no difference but in rounding.
#[test]
fn masks_that_complete_each_other_make_the_whole() {
    let dir = tempfile::tempdir().unwrap();
    let ids: Vec<u16> = (0..200u16)
        .map(|i| (i.wrapping_mul(i).wrapping_mul(31).wrapping_add(i * 7)) % 64)
        .collect();
    // Few in some samples, all in others, none in the second micro-batch.
    let is_marked = |i: usize| !(10..20).contains(&i) && (i % 7 < 2 || (40..60).contains(&i));
    let base = Config {
        layers: 2,
        seq: 9,
        vocab: Some(64),
        tokenizer: Tokenizer::U16,
        order: Order::Sequential,
        micro_batches: Some(8),
        unit: Some(4),
        ..tiny()
    };
    let first = |config: Config| Trainer::new(config).unwrap().first_gradients().unwrap();
    let of = |marked: &dyn Fn(usize) -> bool, config: Config| {
        let data = Some(masked(dir.path(), &ids, marked));
        first(Config { data, ..config })
    };
    let scored = (1..=72).filter(|i| is_marked(*i)).count() as f64 / 72.0;
    let (a, one) = of(&is_marked, base.clone());
    let (b, other) = of(&|i| !is_marked(i), base.clone());
    let (all, whole) = of(&is_marked, Config { loss_mask: false, ..base.clone() });
    let sum = scored * a.loss + (1.0 - scored) * b.loss;
    assert!((sum - all.loss).abs() < 1e-6 * all.loss, "{sum} and {}", all.loss);
    for (name, whole) in &whole {
        let sum = one[name].iter().zip(&other[name]);
        let sum: Vec<f64> =
            sum.map(|(x, y)| scored * f64::from(*x) + (1.0 - scored) * f64::from(*y)).collect();
        let error = relative(whole, &sum);
        assert!(error <= 2e-6, "{name}: {error:e}");
    }
    for (pp, zero3, dp) in [(2, 1, 1), (1, 2, 1), (2, 2, 2), (1, 1, 4)] {
        let micro_batches = Some(8 / zero3 / dp);
        let config = Config { pp, zero3, dp, micro_batches, unit: Some(1), ..base.clone() };
        let (metrics, gradients) = of(&is_marked, config);
        assert!((metrics.loss - a.loss).abs() < 1e-6 * a.loss, "{} {}", metrics.loss, a.loss);
        for (name, g) in &gradients {
            let one: Vec<f64> = one[name].iter().map(|x| f64::from(*x)).collect();
            assert!(relative(g, &one) <= 2e-6, "{name} on {pp} x {zero3} x {dp}");
        }
    }
}

/// Before, such data trained to a loss of 0, and a step without a scored token was a loss of 0.
#[test]
fn data_without_a_scored_token_is_refused_and_metrics_count_what_is_scored() {
    let dir = tempfile::tempdir().unwrap();
    let ids: Vec<u16> = (0..200u16).map(|i| i * 7 % 64).collect();
    let of = |marked: &dyn Fn(usize) -> bool| Config {
        data: Some(masked(dir.path(), &ids, marked)),
        layers: 2,
        seq: 9,
        vocab: Some(64),
        tokenizer: Tokenizer::U16,
        order: Order::Sequential,
        steps: 2,
        pp: 2,
        micro_batches: Some(4),
        unit: Some(4),
        ..tiny()
    };
    let error = Trainer::new(of(&|_| false)).err().unwrap();
    assert!(error.is_bad_input());
    let error = error.to_string();
    let said = "none of its tokens is scored: its .mask marks none that may be";
    assert!(error.contains(said) && error.contains("set loss-mask = false"), "{error}");
    // Tokens 1 to 36 are the first step's targets, 37 to 72 the second's.
    let trained = crate::common::run(of(&|i| (5..15).contains(&i)));
    let scored: Vec<_> = trained.steps.iter().map(|step| step.scored_tokens).collect();
    assert_eq!(scored, [Some(10), Some(0)]);
    let [first, second] = [&trained.steps[0], &trained.steps[1]];
    assert_eq!((first.tokens, first.measured_loss()), (36, Some(first.loss)));
    assert_eq!((second.measured_loss(), second.grad_norm), (None, 0.0));
    assert_eq!(trained.summary.last_loss.to_bits(), first.loss.to_bits());
}

#[test]
fn document_masks_need_known_documents() {
    let dir = tempfile::tempdir().unwrap();
    let text = text_file(&dir, 4000);
    let base = by_lines(&text);
    for (config, message) in [
        (Config { document_end: None, ..base.clone() }, "does not say where documents begin"),
        (Config { document_mask: false, ..base.clone() }, "document-mask is false"),
        (Config { document_end: Some(1 << 30), ..base }, "is too large for a token id"),
    ] {
        let error = Trainer::new(config).err().expect("refused").to_string();
        assert!(error.contains("document-") && error.contains(message), "{error}");
    }
}

/// A tiny Mistral whose window is shorter than its samples.
const SLIDING: &str = r#"{"model_type": "mistral", "hidden_size": 16, "num_hidden_layers": 4,
    "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 24, "vocab_size": 256,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "hidden_act": "silu", "sliding_window": 9, "tie_word_embeddings": false}"#;

/// Gradients and logits are held against transformers' in families.rs; here, that no layout changes
/// a bit, with documents too, and that the memory is what is predicted.
#[test]
fn a_window_has_the_same_bits_in_every_layout() {
    let dir = tempfile::tempdir().unwrap();
    let (text, model) = (text_file(&dir, 4000), dir.path().join("config.json"));
    std::fs::write(&model, SLIDING).unwrap();
    let sliding = format!("model = {:?}\nlayers = 4\nseq = 24", model.to_str().unwrap());
    let toml = dir.path().join("run.toml");
    std::fs::write(&toml, sliding).unwrap();
    let loaded = Config::load(&toml).unwrap();
    for precision in [Precision::Fp32, Precision::Bf16] {
        for document_mask in [false, true] {
            let document_end = document_mask.then_some(usize::from(b'\n'));
            let base = Config {
                data: Some(text.clone()),
                unit: Some(3),
                micro_batches: Some(3),
                virtual_stages: Some(1),
                steps: 2,
                lr: 3e-3,
                warmup: Some(0),
                precision,
                document_mask,
                document_end,
                ..loaded.clone()
            };
            let reference = run(base.clone());
            assert_eq!(reference.summary.peak_bytes, reference.summary.predicted_bytes);
            let others = [
                Config { pp: 2, recompute: Recompute::Full, ..base.clone() },
                Config { pp: 2, virtual_stages: Some(2), threads: Some(3), ..base },
            ];
            for config in others {
                let what = format!("{precision} pp {} {document_mask}", config.pp);
                assert_same_bits(&reference, &run(config), &what);
            }
        }
    }
}
