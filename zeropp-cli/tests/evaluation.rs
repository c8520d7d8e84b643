//! `zeropp run --eval-every`, `zeropp eval` and `zeropp generate`, as a person calls them.

mod common;

use std::io::Read;
use std::path::Path;
use std::process::Stdio;

use common::zeropp;
use serde_json::Value;

const TRAIN: &str = "run --layers 2 --hidden 16 --heads 2 --seq 16 --unit 3 --micro-batches 6 \
                     --steps 6 --data text --split 9,1";

fn text(dir: &Path) {
    let text: String = (0..900).map(|i| format!("{} ", i * 7919 % 311)).collect();
    std::fs::write(dir.join("text"), text).unwrap();
    std::fs::write(dir.join("kept"), "one two three four five six ".repeat(20)).unwrap();
}

/// The number after `before` in `text`.
fn after<'a>(text: &'a str, before: &str) -> &'a str {
    let found = text.split(before).nth(1).unwrap_or_else(|| panic!("{before} in:\n{text}"));
    found.split_whitespace().next().unwrap()
}

#[test]
fn a_validation_loss_is_reported_in_lines_in_metrics_and_in_the_summary() {
    let dir = tempfile::tempdir().unwrap();
    text(dir.path());
    let line = format!("{TRAIN} --pp 2 --eval-every 4 --metrics m.jsonl");
    let planned = zeropp(dir.path(), &format!("{line} --dry-run"));
    let said = "every 4 steps and at the end";
    assert!(planned.out.contains(said) && planned.out.contains("1 all-gathers"), "{}", planned.out);
    let run = zeropp(dir.path(), &line);
    assert_eq!(run.code, Some(0), "{}", run.err);
    let reported: Vec<&str> = run.out.lines().filter(|l| l.contains("validation loss")).collect();
    assert_eq!(reported.len(), 3, "two evaluations and the summary:\n{}", run.out);
    assert!(
        reported[0].starts_with("step 4/6  validation loss ")
            && reported[0].contains("bits a byte")
    );
    assert!(reported[1].starts_with("step 6/6  validation loss "));
    assert!(reported[2].contains("after step 6"), "{}", reported[2]);
    let lines = std::fs::read_to_string(dir.path().join("m.jsonl")).unwrap();
    let lines = lines.lines().skip(1);
    let lines: Vec<Value> = lines.map(|l| serde_json::from_str(l).unwrap()).collect();
    for (i, line) in lines.iter().enumerate() {
        assert_eq!(line.get("eval").is_some(), [4, 6].contains(&(i + 1)), "step {}", i + 1);
    }
    let eval = &lines[5]["eval"];
    let (loss, perplexity) = (eval["loss"].as_f64().unwrap(), eval["perplexity"].as_f64().unwrap());
    assert!((perplexity.ln() - loss).abs() < 1e-9, "{eval}");
    assert_eq!(after(reported[1], "validation loss "), format!("{loss:.4}"));
}

/// However often it is started again.
#[test]
fn a_run_that_was_out_of_patience_trains_no_more() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    text(at);
    // So high a rate makes the loss rise soon.
    let line = format!(
        "{} --pp 2 --save c --eval-every 2 --lr 0.05 --decay constant --warmup 0 --patience 2 \
         --log-every 1 --resume",
        TRAIN.replace("--steps 6", "--steps 2000")
    );
    let first = zeropp(at, &line);
    assert_eq!(first.code, Some(0), "{}", first.err);
    let end = after(&first.out, "ended after step ").to_string();
    let saved = || {
        let names = std::fs::read_dir(at.join("c")).unwrap();
        let mut names: Vec<_> = names.map(|e| e.unwrap().file_name()).collect();
        names.sort();
        names
    };
    let before = saved();
    for _ in 0..2 {
        let again = zeropp(at, &line);
        assert_eq!((again.code, again.err.as_str()), (Some(0), ""), "{}", again.out);
        let why = format!(
            ": {end} of 2000 steps are done; nothing is left to do: 2 validation losses in a row \
             were no lower (a larger eval-every:patience goes on)\n"
        );
        assert!(again.out.ends_with(&why) && again.out.lines().count() == 1, "{}", again.out);
        assert_eq!(saved(), before);
    }
    let steps = end.parse::<u64>().unwrap() + 1;
    let more = line.replace("--patience 2", "--patience 9");
    let more = zeropp(at, &more.replace("--steps 2000", &format!("--steps {steps}")));
    assert_eq!(more.code, Some(0), "{}", more.err);
    assert!(more.out.contains(&format!("step {steps}/{steps}")), "{}", more.out);
}

#[test]
fn a_checkpoint_and_the_folder_of_it_are_measured_alike() {
    let dir = tempfile::tempdir().unwrap();
    text(dir.path());
    let trained = zeropp(dir.path(), &format!("{TRAIN} --save saved"));
    assert_eq!(trained.code, Some(0), "{}", trained.err);
    let exported = zeropp(dir.path(), "export saved -o folder");
    assert_eq!(exported.code, Some(0), "{}", exported.err);
    let loss = |line: &str| {
        let measured = zeropp(dir.path(), line);
        assert_eq!(measured.code, Some(0), "{line}: {}", measured.err);
        measured.out
    };
    let one = loss("eval saved --data kept");
    let number = after(&one, "validation loss ");
    assert!(one.contains("bits a byte"), "{one}");
    let mesh = loss("eval saved/step-000006 --data kept --pp 2 --zero3 2");
    assert_eq!(after(&mesh, "validation loss "), number);
    let json = |flags: &str| -> Value {
        serde_json::from_str(&loss(&format!("eval saved --data kept --json{flags}"))).unwrap()
    };
    let (whole, mesh) = (json(""), json(" --pp 2 --zero3 2"));
    for key in ["loss", "perplexity", "bits_per_byte", "tokens"] {
        assert_eq!(whole[key], mesh[key], "all digits on any mesh");
    }
    assert_eq!(format!("{:.4}", whole["loss"].as_f64().unwrap()), number);
    assert!(whole["loss"].to_string().len() > 12 && whole.get("best").is_none(), "{whole}");
    // Of its help: 2 x pp x zero3 x dp x micro-batch-size samples a batch.
    for (flags, samples) in [("", 2), (" --pp 2 --zero3 2", 8), (" --micro-batch-size 3", 6)] {
        let some = json(&format!(" --eval-steps 1{flags}"));
        assert_eq!(some["tokens"], 16 * samples, "{flags}");
    }
    // The same bytes as a file of ids.
    let ids: Vec<u8> = std::fs::read(dir.path().join("kept")).unwrap();
    let ids: Vec<u8> = ids.into_iter().flat_map(|b| [b, 0]).collect();
    std::fs::write(dir.path().join("ids.bin"), ids).unwrap();
    let folder = loss("eval folder --data ids.bin --tokenizer u16 --seq 16");
    assert_eq!(after(&folder, "validation loss "), number);
    // A folder of as many ids as there are bytes is one of bytes; of others that has to be said.
    let bytes = loss("eval folder --data kept --seq 16");
    assert_eq!(after(&bytes, "validation loss "), number);
    let wide = zeropp(dir.path(), &format!("{TRAIN} --vocab 300 --save wide"));
    assert_eq!(wide.code, Some(0), "{}", wide.err);
    assert_eq!(zeropp(dir.path(), "export wide -o wider").code, Some(0));
    loss("eval wider --data kept --seq 16 --tokenizer bytes");

    for (line, part) in [
        ("eval wider --data kept", "the tokens of this model are not bytes"),
        ("generate saved --prompt x --seed 3", "seed = 3: nothing is drawn, as temperature is 0"),
        ("generate saved --prompt x --top-k 2", "top-k = 2: nothing is drawn"),
        ("eval nowhere --data kept", "nowhere: is no checkpoint, no folder with a config.json"),
        ("eval saved --data none", "none: cannot be read"),
        ("eval saved --data kept --seq 17", "17"),
        ("generate nowhere --prompt x", "nowhere: is no checkpoint, no folder with a config.json"),
        ("generate saved --prompt x --top-p 2", "use more than 0, up to 1"),
    ] {
        let refused = zeropp(dir.path(), line);
        assert_eq!(refused.code, Some(2), "{line}: {}{}", refused.out, refused.err);
        assert!(refused.err.contains(part), "{line}: {}", refused.err);
    }
}

/// Tokens that the run hides of its samples are hidden of those that it is measured on later.
#[test]
fn a_checkpoint_is_measured_with_the_masks_of_its_run() {
    let dir = tempfile::tempdir().unwrap();
    text(dir.path());
    let run = "run --layers 2 --hidden 16 --heads 2 --seq 16 --unit 3 --micro-batches 6 --steps 3 \
               --data text --eval-data kept --eval-every 3 --eval-steps 0 --document-mask \
               --document-end 32 --save saved";
    let run = zeropp(dir.path(), run);
    assert_eq!(run.code, Some(0), "{}", run.err);
    let loss = |flags: &str| {
        let measured = zeropp(dir.path(), &format!("eval saved --data kept{flags}"));
        assert_eq!(measured.code, Some(0), "{flags}: {}", measured.err);
        after(&measured.out, "validation loss ").to_owned()
    };
    assert_eq!(loss(""), after(&run.out, "validation loss "));
    assert_ne!(loss(" --document-mask=false"), loss(""));
}

/// A model that a file describes is found from any folder, and in one that was moved.
#[test]
fn a_model_of_a_file_is_found_again() {
    let dir = tempfile::tempdir().unwrap();
    let (project, moved) = (dir.path().join("project"), dir.path().join("moved"));
    std::fs::create_dir(&project).unwrap();
    text(&project);
    let works = |at: &Path, line: &str| {
        let done = zeropp(at, line);
        assert_eq!(done.code, Some(0), "{line}: {}", done.err);
        done.out
    };
    works(&project, &format!("{TRAIN} --save first"));
    works(&project, "export first -o base");
    let train = "run --model base/ --init-from base --data text --seq 16 --micro-batches 2 \
                 --virtual 1 --save saved --resume";
    works(&project, &format!("{train} --steps 2"));
    let reported = |at: &Path, line: &str| after(&works(at, line), "validation loss ").to_owned();
    let loss = reported(&project, "eval saved --data kept");
    assert_eq!(reported(dir.path(), "eval project/saved --data project/kept"), loss);
    std::fs::rename(&project, &moved).unwrap();
    assert_eq!(reported(&moved, "eval saved --data kept"), loss);
    works(&moved, &format!("{train} --steps 3"));
}

#[test]
fn tokens_of_one_kind_are_not_measured_on_those_of_another() {
    let dir = tempfile::tempdir().unwrap();
    text(dir.path());
    let ids: Vec<u8> = (0..2000u16).flat_map(|i| (i % 300).to_le_bytes()).collect();
    std::fs::write(dir.path().join("ids.bin"), ids).unwrap();
    let index = [
        b"MMIDIDX\0\0".as_slice(),
        &1u64.to_le_bytes(),
        &[8],
        &1u64.to_le_bytes(),
        &2u64.to_le_bytes(),
        &2000i32.to_le_bytes(),
        &[0i64, 0, 1].map(i64::to_le_bytes).concat(),
    ];
    std::fs::write(dir.path().join("ids.idx"), index.concat()).unwrap();
    let sizes = "--layers 2 --hidden 16 --heads 2 --seq 16 --steps 1";
    for (flags, part) in [
        ("--data ids.bin --eval-data kept --eval-every 1", "its tokens are bytes, and those of"),
        ("--data kept --eval-data ids.bin --eval-every 1", "its tokens are token ids, and those"),
        ("--data ids.bin=1 --data kept=1", "kept has bytes and ids.bin token ids"),
    ] {
        let refused = zeropp(dir.path(), &format!("run {sizes} {flags} --vocab 300"));
        assert_eq!(refused.code, Some(2), "{flags}: {}", refused.err);
        assert!(refused.err.contains(part), "{flags}: {}", refused.err);
    }
    // A checkpoint knows what its index said that the tokens are, and hides what can be hidden.
    let train = format!("run {sizes} --data ids.bin --document-mask --save saved");
    assert_eq!(zeropp(dir.path(), &train).code, Some(0));
    let of_bytes = zeropp(dir.path(), "eval saved --data kept");
    assert_ne!(of_bytes.code, Some(0), "{}", of_bytes.out);
    assert!(
        of_bytes.err.contains("if u16 is not what the file was written as"),
        "{}",
        of_bytes.err
    );
    let known = zeropp(dir.path(), "eval saved --data ids.bin");
    assert_eq!((known.code, known.err.contains("does not say")), (Some(0), false), "{}", known.err);
    std::fs::remove_file(dir.path().join("ids.idx")).unwrap();
    let unknown = zeropp(dir.path(), "eval saved --data ids.bin");
    let said = "ids.bin does not say where documents begin, so none are kept apart";
    assert_eq!((unknown.code, unknown.err.contains(said)), (Some(0), true), "{}", unknown.err);
}

#[test]
fn a_checkpoint_writes_the_same_text_again() {
    let dir = tempfile::tempdir().unwrap();
    text(dir.path());
    let trained = zeropp(dir.path(), &format!("{TRAIN} --lr 1e-2 --save saved"));
    assert_eq!(trained.code, Some(0), "{}", trained.err);
    let write = |line: &str| {
        let written = zeropp(dir.path(), line);
        assert_eq!(written.code, Some(0), "{line}: {}", written.err);
        written.out
    };
    let line = "generate saved --prompt 12 --max-tokens 9";
    let greedy = write(line);
    assert!(greedy.starts_with("12"), "{greedy}");
    assert_eq!(write(line), greedy);
    assert_eq!(write(&format!("{line} --temperature 1 --top-k 1")), greedy);
    let drawn = write(&format!("{line} --temperature 1 --seed 1"));
    assert_eq!(write(&format!("{line} --temperature 1 --seed 1")), drawn);
    assert_ne!(write(&format!("{line} --temperature 1 --seed 2")), drawn);
}

/// Before, a text ended without a word where the model had no more positions.
#[test]
fn a_text_that_ends_before_its_limit_says_why() {
    let dir = tempfile::tempdir().unwrap();
    let line = "run --layers 2 --hidden 16 --heads 2 --seq 8 --steps 1 --save saved";
    assert_eq!(zeropp(dir.path(), line).code, Some(0));
    let all = zeropp(dir.path(), "generate saved --prompt 12 --max-tokens 7");
    assert_eq!((all.code, all.err.as_str()), (Some(0), ""));
    let cut = zeropp(dir.path(), "generate saved --prompt 12 --max-tokens 150");
    assert_eq!((cut.code, cut.out.as_str()), (Some(0), all.out.as_str()));
    let why = "ended after 7 of at most 150 tokens: the model has 8 positions, which the prompt's \
               2 tokens and these fill";
    assert!(cut.err.starts_with(why), "{}", cut.err);
}

/// Before, a pipe got nothing before the end.
#[test]
fn a_text_is_shown_while_it_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let line = "run --layers 8 --hidden 256 --heads 8 --seq 256 --micro-batches 1 --steps 1 \
                --save saved";
    let trained = zeropp(dir.path(), line);
    assert_eq!(trained.code, Some(0), "{}", trained.err);
    let mut writes = common::command(dir.path(), "generate saved --prompt 12 --max-tokens 250");
    let mut child = writes.stdout(Stdio::piped()).spawn().unwrap();
    let mut out = child.stdout.take().unwrap();
    let mut first = vec![0; 64 << 10];
    let n = out.read(&mut first).unwrap();
    let mut rest = Vec::new();
    out.read_to_end(&mut rest).unwrap();
    assert!(child.wait().unwrap().success());
    assert!(first.starts_with(b"12") && !rest.is_empty(), "{n} bytes came first, and no more");
    assert!(rest.ends_with(b"\n"));
}

/// Before, the whole text was measured, that the model was trained on included.
#[test]
fn of_data_that_the_run_split_the_part_kept_for_validation_is_measured_unless_another_is_named() {
    let dir = tempfile::tempdir().unwrap();
    text(dir.path());
    let trained =
        zeropp(dir.path(), &format!("{TRAIN} --save saved --eval-every 6 --eval-steps 0"));
    assert_eq!(trained.code, Some(0), "{}", trained.err);
    let reported = after(&trained.out, "validation loss ").to_owned();
    let bytes = std::fs::read(dir.path().join("text")).unwrap().len();
    let measure = |flags: &str| {
        let got = zeropp(dir.path(), &format!("eval saved --json --data {flags}"));
        assert_eq!(got.code, Some(0), "{flags}: {}", got.err);
        let value: Value = serde_json::from_str(&got.out).unwrap();
        let on = value["measured_on"].as_str().unwrap().to_owned();
        assert!(got.err.contains(&format!("measured on {on}")), "{}", got.err);
        (on, value["tokens"].as_u64().unwrap() as usize, value["loss"].as_f64().unwrap())
    };
    let cut = bytes * 9 / 10;
    let (on, tokens, loss) = measure("text");
    assert_eq!(on, "the part of text that is kept for validation (the run's split 9,1)");
    assert_eq!(
        (tokens, format!("{loss:.4}")),
        (bytes - cut - 1, reported),
        "as the run measured it"
    );
    let (on, tokens, _) = measure("text --part training");
    assert_eq!(on, "the part of text that is trained on (the run's split 9,1)");
    assert_eq!(tokens, cut - 1);
    let (on, tokens, _) = measure("text --part all");
    assert_eq!((on.as_str(), tokens), ("all of text", bytes - 1));
    let (on, tokens, _) = measure("text --split 1,1");
    assert_eq!(on, "the part of text that is kept for validation (split 1,1)");
    assert_eq!(tokens, bytes - bytes / 2 - 1);
    let (on, _, _) = measure("kept");
    assert_eq!(on, "all of kept", "it is not what the run split");
    let refused = zeropp(dir.path(), "eval saved --data kept --part training");
    assert_eq!(refused.code, Some(2), "{}", refused.err);
    assert!(
        refused.err.contains("part = training: kept is not known to be split"),
        "{}",
        refused.err
    );
}

#[test]
fn eval_prints_the_notes_of_run() {
    let dir = tempfile::tempdir().unwrap();
    text(dir.path());
    let trained = zeropp(dir.path(), &format!("{TRAIN} --save saved"));
    assert_eq!(trained.code, Some(0), "{}", trained.err);
    let ids: Vec<u8> = (0..400u16).flat_map(|i| (i % 200).to_le_bytes()).collect();
    std::fs::write(dir.path().join("ids.bin"), ids).unwrap();
    let got = zeropp(dir.path(), "eval saved --data ids.bin");
    assert_eq!(got.code, Some(0), "{}", got.err);
    assert!(got.err.contains("note: data = ids.bin: looks like token ids"), "{}", got.err);
}
