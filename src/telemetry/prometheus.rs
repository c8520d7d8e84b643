//! The figures of the last step for Prometheus, which asks for them over HTTP: one thread serves
//! them to all callers. Nothing but GET /metrics is answered.

use std::fmt::Write as _;
use std::io;
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use zeropp_core::meter::MemoryKind;
use zeropp_core::metrics::{LayerMetrics, StepMetrics};
use zeropp_core::threads::start;

use crate::config::{Config, ConfigError};
use crate::http::{self, HttpRequest, HttpResponse};
use crate::telemetry::keys::KEYS;

/// The text format of version 0.0.4, which every Prometheus reads.
const KIND: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The figures that are shown.
#[derive(Default)]
struct Shown {
    name: String,
    /// The last step, with the last validation; none before the first.
    last: Option<StepMetrics>,
    /// Those of the last step in which layers were looked at.
    layers: Vec<LayerMetrics>,
    steps: u64,
    tokens: u64,
    scored: u64,
    skipped: u64,
    rollbacks: u64,
    save_blocked_s: f64,
}

/// A listener, for as long as this lives.
pub(crate) struct Prometheus {
    shown: Arc<Mutex<Shown>>,
    ends: Arc<AtomicBool>,
    address: std::net::SocketAddr,
}

impl Prometheus {
    /// Listens where the settings say, if they do.
    ///
    /// # Errors
    /// An address that is taken, or not this machine's.
    pub(crate) fn start(config: &Config) -> Result<Option<Prometheus>, ConfigError> {
        let Some(address) = config.prometheus_address()? else { return Ok(None) };
        let refused = |e: io::Error| {
            let problem = format!("cannot be listened on ({e})");
            let help = "use another port, or an address of this machine";
            ConfigError::value("prometheus", address, problem, help)
        };
        let listener = TcpListener::bind(address).map_err(refused)?;
        let address = listener.local_addr().map_err(refused)?;
        let shown = Shown { name: config.run_name(), ..Shown::default() };
        let shown = Arc::new(Mutex::new(shown));
        let ends = Arc::new(AtomicBool::new(false));
        let (of, until) = (shown.clone(), ends.clone());
        let serve = move || http::serve(&listener, &until, |request| answer(request, &of));
        start("prometheus", serve).map_err(refused)?;
        Ok(Some(Prometheus { shown, ends, address }))
    }

    /// From now on `step` is the last one.
    pub(crate) fn show(&self, step: &StepMetrics) {
        let mut shown = self.shown.lock();
        shown.steps += 1;
        shown.tokens += step.tokens;
        shown.scored += step.scored_tokens.unwrap_or(step.tokens);
        shown.skipped += u64::from(step.skipped);
        shown.rollbacks += u64::from(step.rolled_back);
        shown.save_blocked_s += step.save_blocked_s;
        let validated = shown.last.take().and_then(|last| last.eval);
        shown.last = Some(StepMetrics { eval: step.eval.or(validated), ..step.clone() });
        if !step.layers.is_empty() {
            shown.layers = step.layers.clone();
        }
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::SeqCst);
        let mut at = self.address;
        if at.ip().is_unspecified() {
            at.set_ip(match at {
                std::net::SocketAddr::V4(_) => std::net::Ipv4Addr::LOCALHOST.into(),
                std::net::SocketAddr::V6(_) => std::net::Ipv6Addr::LOCALHOST.into(),
            });
        }
        // Wakes the thread, which then closes the port.
        let _ = TcpStream::connect_timeout(&at, http::PATIENCE);
    }
}

/// The response to `request`.
fn answer(request: &HttpRequest, shown: &Mutex<Shown>) -> HttpResponse {
    let path = request.target.split('?').next();
    match request.method == "GET" && path == Some("/metrics") {
        true => HttpResponse { status: "200 OK", kind: KIND, body: text(&shown.lock()) },
        false => HttpResponse {
            status: "404 Not Found",
            kind: KIND,
            body: "only /metrics is served here\n".into(),
        },
    }
}

/// The figures in Prometheus's words: base units, and `_total` for what only grows.
fn text(shown: &Shown) -> String {
    let run = label(&shown.name);
    let mut out = String::new();
    let mut tell = |name: &str, kind: &str, about: &str, value: f64| {
        let _ = write!(
            out,
            "# HELP zeropp_{name} {about}\n# TYPE zeropp_{name} {kind}\n\
             zeropp_{name}{{run=\"{run}\"}} {}\n",
            digits(value)
        );
    };
    tell("steps_total", "counter", "Steps done by this process.", shown.steps as f64);
    tell("tokens_total", "counter", "Tokens trained on by this process.", shown.tokens as f64);
    tell("scored_tokens_total", "counter", "Those that were scored.", shown.scored as f64);
    tell(
        "skipped_steps_total",
        "counter",
        "Steps whose gradient was not finite.",
        shown.skipped as f64,
    );
    tell(
        "rollbacks_total",
        "counter",
        "Steps whose early update was taken back.",
        shown.rollbacks as f64,
    );
    tell(
        "save_blocked_seconds_total",
        "counter",
        "Time that saving kept a rank from its work.",
        shown.save_blocked_s,
    );
    let Some(last) = &shown.last else { return out };
    for key in KEYS {
        let missing = if key.is_in_every_step { Some(f64::NAN) } else { None };
        if let (Some((name, about)), Some(value)) = (key.gauge, (key.of)(last).or(missing)) {
            tell(name, "gauge", about, value);
        }
    }
    out.push_str("# HELP zeropp_peak_bytes Largest memory of a rank in the last step, by kind.\n");
    out.push_str("# TYPE zeropp_peak_bytes gauge\n");
    let held = |kind: &MemoryKind| kind.is_in_memory() || last.peak_bytes.get(*kind) > 0;
    for kind in MemoryKind::ALL.into_iter().filter(held) {
        let (what, bytes) = (kind.name().replace(' ', "_"), last.peak_bytes.get(kind));
        let _ = writeln!(out, "zeropp_peak_bytes{{run=\"{run}\",kind=\"{what}\"}} {bytes}");
    }
    write_layers(&mut out, &run, &shown.layers);
    out
}

/// The figures of layers, by a label of their own.
fn write_layers(out: &mut String, run: &str, layers: &[LayerMetrics]) {
    type Figure = fn(&LayerMetrics) -> Option<f64>;
    let figures: [(&str, &str, Figure); 3] = [
        ("grad_norm", "Gradient norm of a layer.", |layer| layer.grad_norm),
        ("update_ratio", "Norm of a layer's update over that of its weights.", |layer| {
            layer.update_ratio
        }),
        ("activation_rms", "Root mean square of a layer's output.", |layer| layer.activation_rms),
    ];
    for (name, about, of) in figures.iter().filter(|_| !layers.is_empty()) {
        let _ = writeln!(out, "# HELP zeropp_layer_{name} {about}");
        let _ = writeln!(out, "# TYPE zeropp_layer_{name} gauge");
        for (layer, value) in layers.iter().filter_map(|layer| Some((layer, of(layer)?))) {
            let (layer, value) = (label(&layer.name), digits(value));
            let _ = writeln!(out, "zeropp_layer_{name}{{run=\"{run}\",layer=\"{layer}\"}} {value}");
        }
    }
}

fn digits(value: f64) -> String {
    match value {
        x if x.is_nan() => "NaN".into(),
        x if x.is_infinite() => (if x > 0.0 { "+Inf" } else { "-Inf" }).into(),
        x => x.to_string(),
    }
}

fn label(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::http::tests::ask;

    fn started() -> Prometheus {
        let name = Some("a \"run\"".into());
        let config = Config { prometheus: Some("0".into()), run_name: name, ..Config::default() };
        Prometheus::start(&config).unwrap().unwrap()
    }

    #[test]
    fn the_last_step_is_served_and_nothing_else() {
        let prometheus = started();
        let step = StepMetrics { step: 7, loss: f64::NAN, tokens: 64, ..StepMetrics::default() };
        let layers = vec![LayerMetrics {
            name: "h.0".into(),
            update_ratio: Some(0.5),
            ..Default::default()
        }];
        prometheus.show(&StepMetrics { step: 6, tokens: 64, layers, ..StepMetrics::default() });
        prometheus.show(&step);
        let reported = ask(prometheus.address, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
        assert!(reported.starts_with("HTTP/1.1 200 OK\r\n"), "{reported}");
        for line in [
            "zeropp_step{run=\"a \\\"run\\\"\"} 7",
            "zeropp_tokens_total{run=\"a \\\"run\\\"\"} 128",
            "zeropp_loss{run=\"a \\\"run\\\"\"} NaN",
            "zeropp_peak_bytes{run=\"a \\\"run\\\"\",kind=\"parameter_shard\"} 0",
            "zeropp_layer_update_ratio{run=\"a \\\"run\\\"\",layer=\"h.0\"} 0.5",
        ] {
            assert!(reported.lines().any(|l| l == line), "{line} in:\n{reported}");
        }
        assert!(
            !reported.contains("zeropp_layer_grad_norm{"),
            "of a layer in which nothing trains"
        );
        for other in ["GET / HTTP/1.1", "GET /metricsx HTTP/1.1", "POST /metrics HTTP/1.1"] {
            let reported = ask(prometheus.address, &format!("{other}\r\n\r\n"));
            assert!(
                reported.starts_with("HTTP/1.1 404") && !reported.contains("zeropp_"),
                "{reported}"
            );
        }
    }

    #[test]
    fn figures_that_are_not_finite_are_shown_as_they_are_and_a_validation_stays() {
        let mut shown = Shown::default();
        let show = |step: StepMetrics, shown: Shown| {
            let prometheus = started();
            *prometheus.shown.lock() = shown;
            prometheus.show(&step);
            std::mem::take(&mut *prometheus.shown.lock())
        };
        let has = |shown: &Shown, line: &str| text(shown).lines().any(|found| found == line);
        shown = show(StepMetrics { grad_norm: f64::INFINITY, ..Default::default() }, shown);
        assert!(has(&shown, "zeropp_grad_norm{run=\"\"} +Inf"), "{}", text(&shown));
        assert!(!text(&shown).contains("eval_loss"), "there was no validation");
        let eval = zeropp_core::metrics::Evaluation { loss: 2.5, ..Default::default() };
        shown = show(StepMetrics { eval: Some(eval), ..Default::default() }, shown);
        shown = show(StepMetrics { scored_tokens: Some(0), ..Default::default() }, shown);
        assert!(has(&shown, "zeropp_eval_loss{run=\"\"} 2.5"), "{}", text(&shown));
        assert!(has(&shown, "zeropp_loss{run=\"\"} NaN"), "of no tokens: {}", text(&shown));
    }

    #[test]
    fn silent_callers_keep_no_scrape_waiting_and_the_port_is_closed_at_the_end() {
        let prometheus = started();
        let at = prometheus.address;
        let silent: Vec<_> = (0..100).map(|_| TcpStream::connect(at).unwrap()).collect();
        let begin = Instant::now();
        assert!(ask(at, "GET /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 200"));
        assert!(begin.elapsed() < Duration::from_secs(2), "{:?}", begin.elapsed());
        drop(prometheus);
        let deadline = Instant::now() + Duration::from_secs(6);
        while TcpListener::bind(at).is_err() {
            assert!(Instant::now() < deadline, "still listening");
            std::thread::sleep(Duration::from_millis(10));
        }
        drop(silent);
    }

    #[test]
    fn an_address_that_is_taken_is_named() {
        let first = started();
        let config = Config { prometheus: Some(first.address.to_string()), ..Config::default() };
        let error = Prometheus::start(&config).map(drop).unwrap_err().to_string();
        assert!(
            error.starts_with(&format!("prometheus = {}: cannot be listened on", first.address))
        );
        for (text, fine) in [("9400", true), ("[::1]:9400", true), ("host:1", false), ("", false)] {
            let config = Config { prometheus: Some(text.into()), ..Config::default() };
            assert_eq!(config.prometheus_address().is_ok(), fine, "{text}");
        }
    }
}
