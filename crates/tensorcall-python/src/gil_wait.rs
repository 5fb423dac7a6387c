//! How long requests wait for the interpreter lock, measured if asked for.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use crate::time;

static MEASURING: AtomicBool = AtomicBool::new(false);
static WAITS: AtomicU64 = AtomicU64::new(0);
static MICROSECONDS: AtomicU64 = AtomicU64::new(0);

/// Whether to measure from now on.
pub(crate) fn measure(flag: bool) {
    MEASURING.store(flag, Ordering::Relaxed);
}

/// To be called before a request enters Python; give the answer to [`end`].
pub(crate) fn begin() -> Option<Instant> {
    MEASURING.load(Ordering::Relaxed).then(time::now)
}

/// To be called when it is inside.
pub(crate) fn end(begin: Option<Instant>) {
    if let Some(begin) = begin {
        let waited = time::now().saturating_duration_since(begin).as_micros();
        MICROSECONDS.fetch_add(u64::try_from(waited).unwrap_or(u64::MAX), Ordering::Relaxed);
        WAITS.fetch_add(1, Ordering::Relaxed);
    }
}

/// The average wait so far, in microseconds.
pub(crate) fn average() -> u64 {
    MICROSECONDS.load(Ordering::Relaxed) / WAITS.load(Ordering::Relaxed).max(1)
}
