//! A short look around before sleeping.
//!
//! Waking a thread on an idle processor costs 35 to 50 us where the kernel halts idle processors, more
//! than a whole small call. So a thread that expects something soon first looks for it for a moment,
//! and offers its processor to others between looks: where caller and callee share one, they go on as
//! if it slept. A thread whose looks were in vain gives them up for a while, so that waits that take
//! long cost what they did before.

use std::time::{Duration, Instant};

use crate::clock::now;

/// How long one look takes at most.
const LOOK: Duration = Duration::from_micros(50);
/// If offering the processor took longer than this, others have work for it: the looks are in their way.
const CONTENDED: Duration = Duration::from_micros(200);
/// Looks to leave out then.
const STAND_BACK: u32 = 128;
/// After this many looks in vain, in powers of two, the next ones are left out.
const LONGEST_REST: u32 = 8;

/// Looks of a busy poll in a row, after which others may have the processor.
const ROW: u32 = 8;

/// Looks on and on until `there`, which is told the time, says yes or `until` has come; tells which. For those
/// who were told that there are processors to spare.
pub(crate) fn poll(until: Instant, mut there: impl FnMut(Instant) -> bool) -> bool {
    loop {
        for _ in 0..ROW {
            let time = now();
            if there(time) {
                return true;
            }
            if time >= until {
                return false;
            }
            std::hint::spin_loop();
        }
        std::thread::yield_now();
    }
}

/// Remembers whether looking has been worth it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Spin {
    /// Looks in vain in a row.
    vain: u32,
    /// Looks to leave out, unless something comes soon.
    rest: u32,
    /// Looks to leave out whatever comes.
    stand_back: u32,
}

impl Spin {
    /// Looks at once.
    pub(crate) const NEW: Self = Self { vain: 0, rest: 0, stand_back: 0 };

    /// Looks until `there` says yes or the moment is over; tells which. `until` may cut it short.
    pub(crate) fn look(&mut self, until: Option<Instant>, mut there: impl FnMut() -> bool) -> bool {
        if self.rest > 0 || self.stand_back > 0 {
            self.rest = self.rest.saturating_sub(1);
            self.stand_back = self.stand_back.saturating_sub(1);
            return false;
        }
        let mut time = now();
        let end = until.map_or(time + LOOK, |until| until.min(time + LOOK));
        loop {
            if there() {
                self.vain = 0;
                return true;
            }
            if time >= end || self.stand_back > 0 {
                break;
            }
            std::thread::yield_now();
            let before = std::mem::replace(&mut time, now());
            if time.saturating_duration_since(before) > CONTENDED {
                self.stand_back = STAND_BACK;
            }
        }
        self.vain = (self.vain + 1).min(LONGEST_REST);
        self.rest = (1 << self.vain) - 1;
        false
    }

    /// What was waited for came soon after all: the next look is worth it.
    pub(crate) fn encourage(&mut self, waited: Duration) {
        if waited < 4 * LOOK {
            (self.vain, self.rest) = (0, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_poll_ends_when_it_finds_something_or_its_time_is_over() {
        let start = now();
        let mut looks = 0;
        let third = |_| {
            looks += 1;
            looks == 3
        };

        assert!(poll(start + Duration::from_mins(1), third));
        assert_eq!(looks, 3);

        let end = now() + Duration::from_micros(200);
        assert!(!poll(end, |_| false));
        assert!(now() >= end);
        // What is there counts also when no time is left.
        assert!(poll(start, |_| true));
    }

    #[test]
    fn a_look_that_finds_something_ends_at_once_and_is_repeated() {
        let mut spin = Spin::NEW;
        for _ in 0..100 {
            assert!(spin.look(None, || true));
        }
    }

    #[test]
    fn looks_in_vain_become_rare_until_encouraged() {
        let mut spin = Spin::NEW;
        let mut looks = 0;
        for _ in 0..1000 {
            let mut looked = false;
            spin.look(None, || {
                looked = true;
                false
            });
            looks += u32::from(looked);
        }
        assert!(looks < 20, "{looks}");

        // On a busy machine it stands back as well, and encouragement does not change that.
        spin.stand_back = 0;
        spin.encourage(LOOK);

        assert!(spin.look(None, || true));
    }
}
