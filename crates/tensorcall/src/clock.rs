//! The one door to the clock.

use std::time::{Duration, Instant};

use rustix::event::{Timespec, poll};

/// The present moment of the monotonic clock.
#[expect(clippy::disallowed_methods, reason = "this is the door")]
pub(crate) fn now() -> Instant {
    Instant::now()
}

/// Lets some time pass, for those who have to look again since nobody tells them. A signal may end it early.
pub(crate) fn pause(time: Duration) {
    // Not by parking the thread, which would take the tokens of others.
    let _ = poll(&mut [], Some(&timespec(time)));
}

/// A span of time as system calls take it.
pub(crate) fn timespec(time: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: time.subsec_nanos().into(),
    }
}
