//! Locks that a fork leaves alone (FORK-1).
//!
//! Each is a word of its own that the kernel waits on, so a forked child that never touches its parent's
//! locks has nothing of them. `parking_lot` would not do: it keeps all threads that wait for anything in
//! one table, and in a child that table leads to threads that are not there and to memory that new
//! threads get. A panic elsewhere does not make a lock unusable: what it guards is changed in whole steps.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{self, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use crate::clock::now;

/// Mutual exclusion around a value.
#[derive(Debug, Default)]
pub struct Mutex<T>(sync::Mutex<T>);

/// Access to the value of a [`Mutex`], which it holds.
#[derive(Debug)]
pub struct MutexGuard<'a, T> {
    /// `None` only while a [`Condvar`] waits, which borrows the guard.
    held: Option<sync::MutexGuard<'a, T>>,
}

/// Waiting for what another thread changes under a [`Mutex`]. To notify when nobody waits costs nothing, so whoever
/// notifies must have changed something under the lock, or hold it.
#[derive(Debug, Default)]
pub struct Condvar {
    condvar: sync::Condvar,
    /// Threads that wait. Each is counted under the lock, before it lets go of that.
    waiting: AtomicUsize,
}

/// How a wait with a limit ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WaitTimeoutResult(bool);

impl<T> Mutex<T> {
    /// A lock that nobody holds.
    pub const fn new(value: T) -> Self {
        Self(sync::Mutex::new(value))
    }

    /// Waits until nobody else holds it.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        MutexGuard { held: Some(self.0.lock().unwrap_or_else(PoisonError::into_inner)) }
    }

    /// Takes it if nobody holds it.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        match self.0.try_lock() {
            Ok(held) => Some(MutexGuard { held: Some(held) }),
            Err(TryLockError::Poisoned(poisoned)) => Some(MutexGuard { held: Some(poisoned.into_inner()) }),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// The value of a lock that nobody else can have.
    pub fn get_mut(&mut self) -> &mut T {
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner)
    }

    /// The value.
    pub fn into_inner(self) -> T {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    #[expect(clippy::expect_used, reason = "taken only while a wait borrows the guard")]
    fn deref(&self) -> &T {
        self.held.as_ref().expect("a guard holds its lock")
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    #[expect(clippy::expect_used, reason = "taken only while a wait borrows the guard")]
    fn deref_mut(&mut self) -> &mut T {
        self.held.as_mut().expect("a guard holds its lock")
    }
}

impl Condvar {
    /// Nobody waits.
    pub const fn new() -> Self {
        Self { condvar: sync::Condvar::new(), waiting: AtomicUsize::new(0) }
    }

    /// Lets go of the lock until somebody notifies. May return without that.
    pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        if let Some(held) = guard.held.take() {
            self.waiting.fetch_add(1, Ordering::Relaxed);
            guard.held = Some(self.condvar.wait(held).unwrap_or_else(PoisonError::into_inner));
            self.waiting.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// As [`wait`](Self::wait), for `limit` at most.
    pub fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, limit: Duration) -> WaitTimeoutResult {
        let Some(held) = guard.held.take() else { return WaitTimeoutResult(false) };
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let (held, result) = self.condvar.wait_timeout(held, limit).unwrap_or_else(PoisonError::into_inner);
        guard.held = Some(held);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        WaitTimeoutResult(result.timed_out())
    }

    /// As [`wait`](Self::wait), until `limit` at most.
    pub fn wait_until<T>(&self, guard: &mut MutexGuard<'_, T>, limit: Instant) -> WaitTimeoutResult {
        self.wait_for(guard, limit.saturating_duration_since(now()))
    }

    /// Wakes one thread that waits.
    pub fn notify_one(&self) {
        if self.waiting.load(Ordering::Relaxed) > 0 {
            self.condvar.notify_one();
        }
    }

    /// Wakes all threads that wait.
    pub fn notify_all(&self) {
        if self.waiting.load(Ordering::Relaxed) > 0 {
            self.condvar.notify_all();
        }
    }
}

impl WaitTimeoutResult {
    /// Whether the limit had come.
    pub fn timed_out(self) -> bool {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn a_wait_gives_the_lock_away_and_has_it_again() {
        let shared = Arc::new((Mutex::new(0), Condvar::new()));
        let mut value = shared.0.lock();
        let other = std::thread::spawn({
            let shared = Arc::clone(&shared);
            move || {
                *shared.0.lock() += 1;
                shared.1.notify_all();
            }
        });

        let limit = now() + Duration::from_secs(20);
        while *value == 0 && !shared.1.wait_until(&mut value, limit).timed_out() {}

        assert_eq!(*value, 1);
        assert!(shared.0.try_lock().is_none());
        drop(value);
        other.join().unwrap();
        assert!(shared.0.try_lock().is_some());
    }

    #[test]
    fn a_panic_under_the_lock_does_not_close_it_for_others() {
        let lock = Arc::new(Mutex::new(7));
        let panics = std::thread::spawn({
            let lock = Arc::clone(&lock);
            move || {
                let _held = lock.lock();
                panic!("planted");
            }
        });

        assert!(panics.join().is_err());

        assert_eq!(*lock.lock(), 7);
        assert_eq!(*lock.try_lock().unwrap(), 7);
    }
}
