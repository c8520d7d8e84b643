//! Settings that name files: where they count from, and what a run may write.

use std::fs;
use std::path::{Path, PathBuf};

use super::*;

/// A folder with some of everything that a run reads.
fn folder() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for path in ["data/a.txt", "data/sub/b.txt", "s.csv", "costs.toml", "token", "old"] {
        let path = dir.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "kept").unwrap();
    }
    fs::write(dir.path().join("c.toml"), "").unwrap();
    dir
}

fn message(config: &Config) -> String {
    config.validate().unwrap_err().to_string()
}

#[test]
fn files_are_read_and_their_names_reported() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.toml");
    fs::write(&path, "pp = 2 # stages\n").unwrap();
    assert_eq!(Config::load(&path).unwrap().pp, 2);
    fs::write(&path, "pq = 2").unwrap();
    let error = Config::load(&path).unwrap_err().to_string();
    assert!(error.contains("run.toml: line 1: unknown key `pq`; did you mean `pp`?"), "{error}");
    let error = Config::load(&dir.path().join("none.toml")).unwrap_err().to_string();
    assert!(error.contains("none.toml: ") && error.contains("cannot read"), "{error}");
    fs::write(&path, vec![b'#'; 2 << 20]).unwrap();
    let error = Config::load(&path).unwrap_err().to_string();
    assert!(error.contains("it has more than 1048576 bytes, the most that are read"), "{error}");
}

#[test]
fn paths_of_a_file_count_from_its_folder() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("sub/run.toml");
    fs::create_dir(dir.path().join("sub")).unwrap();
    let text = "data = 'a.txt'\ntrace = '/abs/t.json'\nmetrics = '-'\nflight-dir = ''\n\
                schedule = '../s.csv'\nsave = ''\ntoken-file = '../token'";
    fs::write(&path, text).unwrap();
    let config = Config::load(&path).unwrap();
    let at = |name: &str| Some(dir.path().join("sub").join(name));
    assert_eq!((config.data.clone(), config.token_file.clone()), (at("a.txt"), at("../token")));
    assert_eq!(config.schedule_file().map(Path::to_path_buf), at("../s.csv"));
    assert_eq!(config.trace.as_deref(), Some(Path::new("/abs/t.json")));
    let as_given = (config.metrics.as_deref(), config.save.as_deref());
    assert_eq!(as_given, (Some(Path::new("-")), Some(Path::new(""))), "no paths in the folder");
    assert_eq!(config.flight_dir.as_deref(), Some(Path::new("")));
    assert_eq!(config.file, Some(path.clone()));
    fs::write(&path, "recompute-out = 'host'\noptimizer-out = 'host'").unwrap();
    let config = Config::load(&path).unwrap();
    let host = || Some("host".into());
    assert_eq!((config.recompute_out, config.optimizer_out), (host(), host()));
    // What a file does not say, its folder does not change; flags count from where one is.
    fs::write(&path, "schedule = 'zb-v'").unwrap();
    let config = Config::load(&path).unwrap();
    assert_eq!((config.schedule.as_str(), config.flight_dir), ("zb-v", None));
    let flags = Table::from_iter([("data".to_string(), Value::from("b.txt"))]);
    let config = Config::load(&path).unwrap().with(flags).unwrap();
    assert_eq!((config.data, config.file), (Some("b.txt".into()), Some(path)));
}

#[test]
fn empty_paths_and_dashes_are_refused() {
    let path = |text: &str| Some(PathBuf::from(text));
    let with = |field: &str, text| {
        let mut config = Config::default();
        match field {
            "save" => config.save = path(text),
            "metrics" => config.metrics = path(text),
            "trace" => config.trace = path(text),
            "data" => config.data = path(text),
            "rendezvous:token-file" => config.token_file = path(text),
            _ => config.emulate = path(text),
        }
        message(&config)
    };
    for field in ["save", "metrics", "trace", "data", "rendezvous:token-file", "emulate"] {
        let empty = with(field, "");
        let expected = format!("{field} = \"\": the path is empty; name a file or folder, or");
        assert!(empty.starts_with(&expected), "{empty}");
        let dash = with(field, "-");
        assert!(dash.starts_with(&format!("{field} = -: ")), "{dash}");
        assert!(dash.ends_with("; name a file, or ./- for one of that name"), "{dash}");
    }
    Config { flight_dir: Some("".into()), ..Config::default() }
        .validate()
        .expect("writes no records");
}

#[test]
fn outputs_are_tried_and_left_as_they_were() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str| Some(dir.path().join(name));
    let with = |metrics, trace| Config { metrics, trace, ..Config::default() };

    with(file("m.jsonl"), file("t.json")).validate().unwrap();
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 0, "probes are removed");

    fs::write(dir.path().join("old"), "kept").unwrap();
    with(file("old"), None).validate().unwrap();
    assert_eq!(fs::read_to_string(dir.path().join("old")).unwrap(), "kept");

    let cases = [
        (with(file("no/m.jsonl"), None), "metrics = ", "create the folder"),
        (with(None, file("no/t.json")), "trace = ", "create the folder"),
        (with(Some(dir.path().into()), None), "metrics = ", "it is a folder"),
        (with(file("same"), file("same")), "metrics = ", "is the file or folder of `trace` too"),
    ];
    for (config, start, fragment) in cases {
        let error = message(&config);
        assert!(error.starts_with(start) && error.contains(fragment), "{error}");
    }
    assert!(!dir.path().join("same").exists(), "a probe is removed after a clash too");
}

/// Every way to overwrite what a run reads, or one output with another. Before, only equal paths
/// of data, metrics and trace were seen; the others replaced the file, with exit code 0.
#[test]
#[cfg(unix)]
fn nothing_that_is_read_is_written() {
    let dir = folder();
    let at = |name: &str| dir.path().join(name);
    std::os::unix::fs::symlink("data/a.txt", at("soft")).unwrap();
    fs::hard_link(at("data/sub/b.txt"), at("hard")).unwrap();
    std::os::unix::fs::symlink("new", at("to-new")).unwrap();
    std::os::unix::fs::symlink("data", at("link")).unwrap();
    fs::create_dir(at("ckpt")).unwrap();
    let files: Vec<PathBuf> = files_of(dir.path());
    let base = || Config {
        file: Some(at("c.toml")),
        data: Some(at("data")),
        schedule: at("s.csv").to_str().unwrap().into(),
        token_file: Some(at("token")),
        save: Some(at("ckpt")),
        flight_dir: Some(at("failed")),
        ..Config::default()
    };
    base().validate().expect("in nobody's way");
    let metrics = |name: &str| Config { metrics: Some(at(name)), ..base() };
    let cases = [
        (metrics("c.toml"), "is the file of the configuration too and would overwrite it"),
        (metrics("data/a.txt"), "data/a.txt of `data` and would overwrite it"),
        (metrics("soft"), "data/a.txt of `data` and would overwrite it"),
        (metrics("hard"), "data/sub/b.txt of `data` and would overwrite it"),
        (metrics("link/sub/new"), "lies in the folder of `data`"),
        (metrics("s.csv"), "is the file of `schedule` too and would overwrite it"),
        (metrics("./data/../s.csv"), "is the file of `schedule` too"),
        (metrics("token"), "is the file of `token-file` too"),
        (metrics("ckpt/.lock"), "belongs to the checkpoints of save = "),
        (Config { trace: Some(at("to-new")), ..metrics("new") }, "of `trace` too"),
        (Config { metrics: None, trace: Some(at("s.csv")), ..base() }, "of `schedule` too"),
        (Config { emulate: Some(at("costs.toml")), ..metrics("costs.toml") }, "of `emulate` too"),
        (Config { data: Some(at("old")), ..metrics("old") }, "of `data` too"),
        (Config { save: Some(at("data")), ..base() }, "lies in the folder of `data`"),
        (Config { save: Some(at("data/ckpt")), ..base() }, "lies in the folder of `data`"),
        (Config { flight_dir: Some(at("link/f")), ..base() }, "lies in the folder of `data`"),
        (
            Config { flight_dir: Some(at("ckpt")), ..base() },
            "is the file or folder of `flight-dir` too",
        ),
        (
            Config { flight_dir: Some(at("ckpt/step-000001")), ..base() },
            "belongs to the checkpoints",
        ),
        (Config { data: Some(at("ckpt/step-000002/x")), ..base() }, "belongs to the checkpoints"),
    ];
    for (config, fragment) in cases {
        let error = message(&config);
        assert!(error.contains(fragment) && error.ends_with("; choose another"), "{error}");
        assert_eq!(files_of(dir.path()), files, "{error}");
    }
    for (name, text) in [("data/a.txt", "kept"), ("s.csv", "kept"), ("hard", "kept")] {
        assert_eq!(fs::read_to_string(at(name)).unwrap(), text, "{name}");
    }
    for fine in ["ckpt/m.jsonl", "data/.m.jsonl", "ckpt/step-metrics", "/dev/null"] {
        metrics(fine).validate().expect(fine);
    }
    let nowhere = Some(PathBuf::from("/dev/null"));
    Config { metrics: nowhere.clone(), trace: nowhere, ..base() }.validate().expect("both away");
}

/// Files beside the data, in the folder of a model, or read and written by the program around the
/// run.
#[test]
fn nothing_that_is_read_beside_the_settings_is_written() {
    let dir = folder();
    let at = |name: &str| dir.path().join(name);
    for name in [
        "mg.bin",
        "mg.idx",
        "machine.toml",
        "init/model.safetensors",
        "init/step-2/m.json",
        "init/log",
    ] {
        fs::create_dir_all(at(name).parent().unwrap()).unwrap();
        fs::write(at(name), "kept").unwrap();
    }
    let files = files_of(dir.path());
    let base = |metrics: &str| Config {
        data: Some(at("mg.bin")),
        init_from: Some(at("init")),
        metrics: Some(at(metrics)),
        ..Config::default()
    };
    let cases = [
        ("mg.idx", "is the file of `data` too and would overwrite it"),
        ("init/model.safetensors", "is a file of the model in the folder of `init-from`"),
        ("init/step-2/m.json", "is a file of the model in the folder of `init-from`"),
    ];
    for (metrics, fragment) in cases {
        let error = message(&base(metrics));
        assert!(error.contains(fragment) && error.ends_with("; choose another"), "{error}");
    }
    base("init/new.jsonl").validate().expect("a new file replaces nothing");
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink("../linked", at("init/tokenizer.json")).unwrap();
        fs::write(at("linked"), "kept").unwrap();
        let error = message(&base("linked"));
        assert!(error.contains("is a file of the model"), "{error}");
        fs::remove_file(at("init/tokenizer.json")).unwrap();
        fs::remove_file(at("linked")).unwrap();
    }
    base("init/log").validate().expect("what a first start wrote does not stop the second");
    let of_step = Config { init_from: Some(at("init/step-2")), ..base("init/step-2/m.json") };
    assert!(message(&of_step).contains("is a file of the model"));
    let described = serde_json::json!({
        "model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 512,
        "vocab_size": 256, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
    });
    fs::write(at("config.json"), described.to_string()).unwrap();
    let model = at("config.json").display().to_string();
    let beside = Config { metrics: Some(at("old")), ..Config::for_model(&model).unwrap() };
    beside.validate().expect("a run may be started again beside the description of its model");
    fs::remove_file(at("config.json")).unwrap();

    let machine = at("machine.toml");
    let error = base("machine.toml").check_files(&[("plan", &machine)], &[]).unwrap_err();
    assert!(error.to_string().contains("is the file of `plan` too"), "{error}");
    for input in ["mg.bin", "mg.idx", "init/model.safetensors"] {
        let error = base("new.jsonl").check_files(&[], &[("dry-run", &at(input))]).unwrap_err();
        assert!(error.to_string().starts_with("dry-run = "), "{error}");
    }
    let (page, metrics) = (at("page.html"), at("new.jsonl"));
    let error = base("new.jsonl").check_files(&[], &[("dry-run", &metrics)]).unwrap_err();
    assert!(error.to_string().contains("is the file or folder of `dry-run` too"), "{error}");
    base("new.jsonl").check_files(&[("plan", &machine)], &[("dry-run", &page)]).unwrap();
    assert_eq!(files_of(dir.path()), files);
}

/// Opening a pipe to write would wait for its reader.
#[test]
#[cfg(unix)]
fn an_output_may_be_a_pipe_and_is_not_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let fifo = dir.path().join("fifo");
    assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    Config { metrics: Some(fifo), ..Config::default() }.validate().unwrap();
}

/// All that lies below `dir`, links as they are.
fn files_of(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![dir.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
            match entry.file_type().unwrap().is_dir() {
                true => folders.push(entry.path()),
                false => found.push(entry.path()),
            }
        }
    }
    found.sort();
    found
}

#[test]
fn derived_values_are_printed_as_comments() {
    let config = Config::from_toml("pp = 2\nlr = 0.5").unwrap();
    let text = config.to_toml_beside(Some(&config.resolved())).unwrap();
    for line in ["pp = 2", "lr = 0.5", "# min-lr = 0.05", "# unit = 3", "# warmup = 4"] {
        assert!(text.lines().any(|l| l == line), "{line} is not in:\n{text}");
    }
    assert_eq!(Config::from_toml(&text).unwrap(), config, "nothing of it is frozen");
}

#[test]
fn derived_values_can_all_be_taken_up() {
    for toml in ["", "pp = 2\nzero3 = 2\noptimizer = 'lion:beta2=0.9'\nsave = 'x'"] {
        let config = Config::from_toml(toml).unwrap();
        let text = config.to_toml_beside(Some(&config.resolved())).unwrap();
        let set = |line: &str| match line.strip_prefix("# ") {
            Some(rest) if rest.contains(" = ") => format!("{rest}\n"),
            _ => format!("{line}\n"),
        };
        let taken: String = text.lines().map(set).collect();
        let taken = Config::from_toml(&taken).unwrap_or_else(|e| panic!("{e}\n{taken}"));
        assert_eq!(taken.resolved(), config.resolved());
    }
}

#[test]
fn settings_can_be_taken_back() {
    let config = Config::from_toml("save = 'x'\nsave-every = 3\npp = 2").unwrap();
    let without = config.without(&["save", "save-every"]).unwrap();
    assert_eq!(without, Config::from_toml("pp = 2").unwrap());
}
