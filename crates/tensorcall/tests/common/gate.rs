//! [`Gate`]: holds functions until a test lets them go on, and tells how many have come.

use std::sync::Arc;

use tensorcall::engine::sync::{Condvar, Mutex};

use super::{SOON, deadline};

/// Cheap to clone; all clones are one gate.
#[derive(Clone, Default)]
pub(crate) struct Gate(Arc<(Mutex<State>, Condvar)>);

#[derive(Default)]
struct State {
    arrived: usize,
    /// How many may pass; all of them once it is open.
    allowed: usize,
}

impl Gate {
    /// Waits here until allowed to go on.
    pub(crate) fn pass(&self) {
        let (state, changed) = &*self.0;
        let mut state = state.lock();
        let number = state.arrived;
        state.arrived += 1;
        changed.notify_all();
        let limit = deadline(SOON * 2);
        while state.allowed <= number {
            assert!(!changed.wait_until(&mut state, limit).timed_out(), "nobody opens the gate");
        }
    }

    /// Waits until `count` have come, those that have passed included.
    pub(crate) fn await_arrivals(&self, count: usize) {
        let (state, changed) = &*self.0;
        let mut state = state.lock();
        let limit = deadline(SOON);
        while state.arrived < count {
            assert!(!changed.wait_until(&mut state, limit).timed_out(), "{} of {count} came", state.arrived);
        }
    }

    pub(crate) fn arrived(&self) -> usize {
        self.0.0.lock().arrived
    }

    /// Lets one more pass, in the order of arrival.
    pub(crate) fn admit_one(&self) {
        self.0.0.lock().allowed += 1;
        self.0.1.notify_all();
    }

    /// Lets all pass.
    pub(crate) fn open(&self) {
        self.0.0.lock().allowed = usize::MAX;
        self.0.1.notify_all();
    }
}
