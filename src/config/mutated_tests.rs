//! Files of settings, damaged: each is read or refused.

#[path = "../../tests/common/mutate.rs"]
mod mutate;

use super::Config;

const SETTINGS: &str = "\
pp = 4\nzero3 = 2\ndp = 1\nschedule = 'zeropp'\nunit = 7\nglobal-batch = \"0.5M tokens\"
stages = [1, 1, 1, 1, 1, 1, 1, 1]\nlr = 3e-4\nmin-lr = 1e-5\nsteps = 100\nwarmup = 10\nclip = 1.0
layers = 8\nhidden = 64\nheads = 4\nseq = 128\nvocab = 300\ntied = true\nfreeze = ['wte', 'h.0']
split = [98, 2]\neval-every = 10\nprecision = \"bf16\"\nmem-limit = '24GiB'\ntimeout-s = 60.5
trace-steps = '3..7'\ntrace = 't.json'\nresume = false\nno-decay = \"norms,biases\"\n";

#[test]
fn settings_are_read_or_refused_and_what_is_read_is_written_to_the_same() {
    mutate::read_or_refused("settings", &[SETTINGS.as_bytes()], 5000, |bytes| {
        let text = std::str::from_utf8(bytes).map_err(|e| e.to_string())?;
        let config = Config::from_toml(text).map_err(|e| e.to_string())?;
        config.validate().map_err(|e| e.to_string())?;
        let written = config.to_toml().map_err(|e| e.to_string())?;
        let again = Config::from_toml(&written).map_err(|e| format!("read back: {e}"))?;
        assert_eq!(again, config, "{written}");
        config.resolved().validate().map_err(|e| e.to_string())
    });
}
