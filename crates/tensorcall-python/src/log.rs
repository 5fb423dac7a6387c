//! What the Rust side has to say reaches `logging.getLogger("tensorcall")`.
//!
//! Events come up on the reactor, which must not enter Python (NET-1): they are put in a bounded queue,
//! and a thread of the pool hands them to Python. `TENSORCALL_LOG` sets the level: `error`, `warn` (the
//! default), `info`, `debug` or `trace`; `rpc/_log.py` has the logger let it through. What does not fit the queue is counted and dropped.

use std::fmt::{self, Write as _};
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};

use crossbeam_queue::ArrayQueue;
use pyo3::intern;
use pyo3::prelude::*;
use tensorcall::engine::fork::PerProcess;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::gil::inside;
use crate::{error, spawner, user_code};

/// Records that may wait for Python.
const QUEUE: usize = 1024;

static QUEUED: PerProcess<ArrayQueue<(Level, String)>> = PerProcess::new();
static INSTALLED: Once = Once::new();
static DROPPED: AtomicU64 = AtomicU64::new(0);

/// Starts to forward events; only the first time. A program that has a subscriber of its own keeps it.
pub(crate) fn install() {
    INSTALLED.call_once(|| {
        let _ = tracing::subscriber::set_global_default(Forward { level: level() });
    });
}

fn queued() -> &'static ArrayQueue<(Level, String)> {
    QUEUED.get_or_init(|| ArrayQueue::new(QUEUE))
}

#[expect(clippy::disallowed_methods, reason = "the level is this module's own setting")]
fn level() -> Level {
    std::env::var("TENSORCALL_LOG").ok().and_then(|text| text.trim().parse().ok()).unwrap_or(Level::WARN)
}

struct Forward {
    level: Level,
}

impl Subscriber for Forward {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        // This crate's own name begins with an underscore.
        let target = metadata.target().trim_start_matches('_');
        *metadata.level() <= self.level && target.starts_with("tensorcall")
    }

    fn event(&self, event: &Event<'_>) {
        let mut line = Line::default();
        event.record(&mut line);
        let queue = queued();
        let was_empty = queue.is_empty();
        if queue.push((*event.metadata().level(), line.finish())).is_err() {
            DROPPED.fetch_add(1, Ordering::Relaxed);
        } else if was_empty {
            spawner::spawn(|| inside(drain));
        }
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// The text of an event: its message, then its fields.
#[derive(Default)]
struct Line {
    message: String,
    fields: String,
}

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let _ = if field.name() == "message" {
            write!(self.message, "{value:?}")
        } else {
            write!(self.fields, " {}={value:?}", field.name())
        };
    }
}

impl Line {
    fn finish(self) -> String {
        self.message + &self.fields
    }
}

/// Hands what is queued to Python.
fn drain(py: Python<'_>) {
    if let Err(error) = try_drain(py) {
        error::show(py, error);
    }
}

fn try_drain(py: Python<'_>) -> PyResult<()> {
    let logger =
        py.import(intern!(py, "logging"))?.call_method1(intern!(py, "getLogger"), ("tensorcall",))?;
    let log = logger.getattr(intern!(py, "log"))?;
    let queue = queued();
    while let Some((level, text)) = queue.pop() {
        // "%s": the text may contain percent signs.
        user_code::call(&log, (number(level), "%s", text))?;
    }
    let dropped = DROPPED.swap(0, Ordering::Relaxed);
    if dropped > 0 {
        user_code::call(&log, (number(Level::WARN), "%s further messages were dropped", dropped))?;
    }
    Ok(())
}

/// The level as Python's `logging` counts.
fn number(level: Level) -> u8 {
    match level {
        Level::ERROR => 40,
        Level::WARN => 30,
        Level::INFO => 20,
        _ => 10,
    }
}
