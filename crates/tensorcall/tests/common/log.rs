//! What the library logs while a test listens.

use std::fmt::{self, Write};
use std::sync::{Condvar, Mutex, MutexGuard, Once, PoisonError};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use super::SOON;

static EVENTS: Mutex<Vec<String>> = Mutex::new(Vec::new());
static LOGGED: Condvar = Condvar::new();
static ALONE: Mutex<()> = Mutex::new(());

/// Warnings and errors since this was made. There is one at a time, so tests that listen take turns.
pub(crate) struct Log(#[expect(dead_code, reason = "held")] MutexGuard<'static, ()>);

impl Log {
    pub(crate) fn listen() -> Self {
        static INSTALL: Once = Once::new();
        INSTALL.call_once(|| tracing::subscriber::set_global_default(Collector).unwrap());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        EVENTS.lock().unwrap().clear();
        Self(alone)
    }

    /// The next event, which may have been logged already.
    #[expect(clippy::unused_self, reason = "only who listens may ask")]
    pub(crate) fn next(&self) -> String {
        let events = EVENTS.lock().unwrap();
        let (mut events, _) = LOGGED.wait_timeout_while(events, SOON, |events| events.is_empty()).unwrap();
        assert!(!events.is_empty(), "nothing was logged in time");
        events.remove(0)
    }

    /// What was logged since the last time this was asked.
    #[expect(clippy::unused_self, reason = "only who listens may ask")]
    pub(crate) fn take(&self) -> Vec<String> {
        std::mem::take(&mut EVENTS.lock().unwrap())
    }
}

struct Collector;

impl Subscriber for Collector {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN
    }

    fn event(&self, event: &Event<'_>) {
        let mut text = Text(String::new());
        event.record(&mut text);
        EVENTS.lock().unwrap().push(text.0);
        LOGGED.notify_all();
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        write!(self.0, "{}={value:?} ", field.name()).unwrap();
    }
}
