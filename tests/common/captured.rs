//! What runs tell through `tracing`, kept for a test.

use std::fmt::Debug;
use std::sync::{Arc, Mutex, OnceLock};

use tracing::Dispatch;
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;

/// An event: its level, its target, the spans around it from the outermost on, and its fields.
#[derive(Clone, Debug)]
pub(crate) struct CapturedEvent {
    pub(crate) level: tracing::Level,
    pub(crate) target: String,
    pub(crate) spans: Vec<&'static str>,
    pub(crate) fields: Vec<(&'static str, String)>,
}

impl CapturedEvent {
    pub(crate) fn field(&self, name: &str) -> &str {
        self.fields.iter().find(|(n, _)| *n == name).map_or("", |(_, value)| value)
    }

    pub(crate) fn message(&self) -> &str {
        self.field("message")
    }
}

/// Does `work`, and returns with its result what was told meanwhile.
pub(crate) fn capture<T>(work: impl FnOnce() -> T) -> (T, Vec<CapturedEvent>) {
    // While there is just one subscriber, `tracing` asks that of the thread which comes to an event
    // first whether anybody listens, and remembers the answer: a test beside this one has none.
    static SECOND: OnceLock<Dispatch> = OnceLock::new();
    SECOND.get_or_init(|| Dispatch::new(tracing_subscriber::registry()));
    let ear = Ear::default();
    let all = tracing_subscriber::registry().with(ear.clone());
    let done = tracing::subscriber::with_default(all, work);
    let captured = ear.0.lock().unwrap().clone();
    (done, captured)
}

/// Does `work`, and returns with its result what it warned of.
pub(crate) fn warnings<T>(work: impl FnOnce() -> T) -> (T, Vec<String>) {
    let (done, captured) = capture(work);
    let warnings = captured.iter().filter(|event| event.level == tracing::Level::WARN);
    (done, warnings.map(|event| event.message().to_string()).collect())
}

#[derive(Clone, Default)]
struct Ear(Arc<Mutex<Vec<CapturedEvent>>>);

impl<S: tracing::Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Ear {
    fn on_event(&self, event: &tracing::Event<'_>, context: Context<'_, S>) {
        let scope = context.event_scope(event).into_iter().flat_map(|scope| scope.from_root());
        let mut captured = CapturedEvent {
            level: *event.metadata().level(),
            target: event.metadata().target().to_string(),
            spans: scope.map(|span| span.name()).collect(),
            fields: Vec::new(),
        };
        event.record(&mut |field: &tracing::field::Field, value: &dyn Debug| {
            captured.fields.push((field.name(), format!("{value:?}")));
        });
        self.0.lock().unwrap().push(captured);
    }
}
