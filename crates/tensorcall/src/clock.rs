//! The one door to the clock.

use std::time::Instant;

/// The present moment of the monotonic clock.
#[expect(clippy::disallowed_methods, reason = "this is the door")]
pub(crate) fn now() -> Instant {
    Instant::now()
}
