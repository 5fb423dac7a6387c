//! Handles that are dropped, and what else is told to nobody who waits.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crossbeam_queue::SegQueue;
use tensorcall_proto::ids::{ForkId, RRefId};

use super::State;
use crate::agent::Inner;
use crate::clock::now;

/// How long a dropped handle, or an answer that nobody waits for, may wait for others: many make one
/// wake-up, and none comes between a call and its answer.
const GATHER: Duration = Duration::from_millis(1);

/// Handles that were dropped and whose machines have not been told.
///
/// Pushing is lock-free, and the first of a bunch has the reactor wake up a little later. So a handle may be
/// dropped by a finalizer, under any lock, on any thread.
#[derive(Default)]
pub(super) struct Releases {
    pub(super) queue: SegQueue<Release>,
    /// The reactor will look.
    pub(super) asked: AtomicBool,
}

/// A handle is gone.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Release {
    /// One of another worker's value.
    Fork(ForkId),
    /// One of a value in this worker's table.
    Hold(RRefId),
}

impl Inner {
    /// Notes that a handle was dropped. Takes no lock and never waits.
    pub(crate) fn release(&self, release: Release) {
        if !self.home.is_here() {
            return;
        }
        let releases = &self.rrefs.releases;
        releases.queue.push(release);
        if self.is_closed() {
            // The reactor looks no more.
            if let Some(mut state) = self.rrefs.state.try_lock() {
                state.take_releases(releases);
                let (_, dropped) = state.take_effects();
                drop(state);
                drop(dropped);
            }
        } else {
            self.look_soon();
        }
    }

    /// Has the reactor look after a while, if it is not about to.
    pub(super) fn look_soon(&self) {
        if !self.rrefs.releases.asked.swap(true, Ordering::SeqCst) {
            self.schedule(now() + GATHER);
        }
    }

    /// Tells the machines of handles that were dropped.
    pub(super) fn drain_releases(&self) {
        if !self.rrefs.releases.queue.is_empty() {
            self.with_rrefs(|state| state.take_releases(&self.rrefs.releases));
        }
    }

    /// Deadlines of held requests, and handles that were dropped.
    pub(in crate::agent) fn tick_rrefs(&self, now: Instant) {
        if self.rrefs.releases.asked.swap(false, Ordering::SeqCst) {
            self.drain_releases();
            let unhurried = std::mem::take(&mut self.rrefs.state.lock().unhurried);
            self.send_rrefs(unhurried);
        }
        self.expire_held(now);
    }
}

impl State {
    pub(super) fn take_releases(&mut self, releases: &Releases) {
        while let Some(release) = releases.queue.pop() {
            self.activity += 1;
            match release {
                Release::Fork(fork) => {
                    self.failures.remove(&fork);
                    self.user.release(fork);
                }
                Release::Hold(rref) => {
                    self.failures.remove(&ForkId {
                        creator: rref.creator,
                        incarnation: rref.incarnation,
                        local: rref.local,
                    });
                    self.owner.release(rref);
                }
            }
        }
    }
}
