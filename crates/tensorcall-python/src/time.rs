//! Times as Python gives them: seconds, as floats.

use std::time::{Duration, Instant};

/// Longer times are for ever, for a clock that counts in nanoseconds.
const LONGEST: f64 = 1e9;

/// The present moment.
#[expect(clippy::disallowed_methods, reason = "the extension's one door to the clock")]
pub(crate) fn now() -> Instant {
    Instant::now()
}

/// `seconds` from now; at once if that is negative or no number.
pub(crate) fn after(seconds: f64) -> Instant {
    now() + duration(seconds)
}

/// A time limit in seconds, where 0 means none.
pub(crate) fn limit(seconds: f64) -> Option<Duration> {
    (seconds != 0.0).then(|| duration(seconds))
}

/// As long as that; nothing if it is negative or no number.
pub(crate) fn duration(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds.clamp(0.0, LONGEST)).unwrap_or_default()
}
