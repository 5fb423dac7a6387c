//! Requests that a worker has received and not yet answered: the callee's half of every call.
//!
//! [`Serving`] knows each request by [`RequestKey`], which names one life of the caller, so that an
//! earlier life's request is never confused with a later one's and no answer goes to the wrong life
//! (LIFE-1). It decides whether a request still runs when its turn comes (its deadline may have passed,
//! it may have been cancelled, its caller may be gone) and whether an answer still has somebody to go
//! to. Every request that is admitted is answered exactly once unless its caller is gone: the caller
//! counts on it (TERM-1).

use std::time::Instant;

use rustc_hash::{FxHashMap, FxHashSet};

use crate::ids::{Incarnation, MessageId, Rank};
use crate::wire::message::Phase;

/// Requests received and not yet answered; `T` is what the driver needs to run one.
#[derive(Debug)]
pub struct Serving<T> {
    peers: FxHashMap<(Rank, Incarnation), FxHashMap<MessageId, Request<T>>>,
    /// Requests that run although their caller is gone; nobody wants their answer.
    orphans: FxHashSet<RequestKey>,
    waiting: usize,
    running: usize,
    total: u64,
}

/// Names one request of one life of a worker (LIFE-1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestKey {
    /// Who asks.
    pub peer: Rank,
    /// Which life of that worker.
    pub incarnation: Incarnation,
    /// The id that this life gave the call.
    pub id: MessageId,
}

/// A life used an id twice while the first request with it is unanswered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("request {} of rank {} is already here", .0.id, .0.peer)]
pub struct Duplicate(pub RequestKey);

/// What to do with a request whose turn has come.
#[derive(Debug, PartialEq, Eq)]
pub enum Start<T> {
    /// Run it, then call [`Serving::finish`].
    Run(T),
    /// Its deadline has passed: answer so, it counts as finished.
    Expired(T),
    /// It was cancelled or its caller is gone: nothing to do.
    Gone,
}

/// What a cancellation met.
#[derive(Debug, PartialEq, Eq)]
pub enum CancelOutcome<T> {
    /// The request had not started and never will: answer that it was cancelled.
    Waiting(T),
    /// It runs and is marked, see [`Serving::is_cancelled`]; its answer will be sent as usual.
    Running,
    /// It was answered already, or has not arrived: a cancellation may overtake a large request.
    Unknown,
}

#[derive(Debug)]
enum Request<T> {
    Waiting { deadline: Option<Instant>, token: T, told: Told },
    Running { cancelled: bool, told: Told },
}

/// What the caller knows of the phase that its request is in, see [`Serving::overdue`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Told {
    /// Nothing, and the request is new.
    Nothing,
    /// Nothing, and the request was here at the last look.
    Overdue,
    /// Everything.
    All,
}

impl<T> Serving<T> {
    /// No requests yet.
    pub fn new() -> Self {
        Self { peers: FxHashMap::default(), orphans: FxHashSet::default(), waiting: 0, running: 0, total: 0 }
    }

    /// Takes in a request that waits for its turn. `deadline` `None` never passes.
    ///
    /// # Errors
    ///
    /// [`Duplicate`] if an unanswered request has this key: the caller broke the protocol.
    pub fn admit(&mut self, key: RequestKey, deadline: Option<Instant>, token: T) -> Result<(), Duplicate> {
        let requests = self.peers.entry(key.life()).or_default();
        if requests.contains_key(&key.id) || self.orphans.contains(&key) {
            return Err(Duplicate(key));
        }
        requests.insert(key.id, Request::Waiting { deadline, token, told: Told::Nothing });
        self.waiting += 1;
        self.total += 1;
        Ok(())
    }

    /// The turn of a request has come.
    pub fn start(&mut self, key: RequestKey, now: Instant) -> Start<T> {
        let Some((token, deadline, told)) = self.take_waiting(key) else {
            return Start::Gone;
        };
        if deadline.is_some_and(|deadline| deadline <= now) {
            return Start::Expired(token);
        }
        let requests = self.peers.entry(key.life()).or_default();
        let told = if told == Told::Nothing { Told::Nothing } else { Told::Overdue };
        requests.insert(key.id, Request::Running { cancelled: false, told });
        self.running += 1;
        Start::Run(token)
    }

    /// The caller no longer wants the answer.
    pub fn cancel(&mut self, key: RequestKey) -> CancelOutcome<T> {
        if let Some((token, ..)) = self.take_waiting(key) {
            return CancelOutcome::Waiting(token);
        }
        match self.request_mut(key) {
            Some(Request::Running { cancelled, .. }) => {
                *cancelled = true;
                CancelOutcome::Running
            }
            _ => CancelOutcome::Unknown,
        }
    }

    /// Whether a running request was cancelled, or its caller is gone.
    pub fn is_cancelled(&self, key: RequestKey) -> bool {
        let request = self.peers.get(&key.life()).and_then(|requests| requests.get(&key.id));
        matches!(request, Some(Request::Running { cancelled: true, .. })) || self.orphans.contains(&key)
    }

    /// The requests that were here at the last look already and whose phase their callers do not know,
    /// with that phase. To be called at regular intervals, and the callers told: so only requests that
    /// take longer than an interval cost a message.
    pub fn overdue(&mut self) -> Vec<(RequestKey, Phase)> {
        let mut overdue = Vec::new();
        for (&(peer, incarnation), requests) in &mut self.peers {
            for (&id, request) in requests {
                let (told, phase) = match request {
                    Request::Waiting { told, .. } => (told, Phase::Waiting),
                    Request::Running { told, .. } => (told, Phase::Running),
                };
                *told = match *told {
                    Told::Nothing => Told::Overdue,
                    Told::Overdue => {
                        overdue.push((RequestKey { peer, incarnation, id }, phase));
                        Told::All
                    }
                    Told::All => Told::All,
                };
            }
        }
        overdue
    }

    /// A running request ended. Whether its answer is to be sent: `false` means that the caller is
    /// gone, or that this request is not running (it was finished before).
    pub fn finish(&mut self, key: RequestKey) -> bool {
        if self.orphans.remove(&key) {
            self.running -= 1;
            return false;
        }
        if !matches!(self.request_mut(key), Some(Request::Running { .. })) {
            return false;
        }
        self.remove(key);
        self.running -= 1;
        true
    }

    /// One life of a peer is gone: its waiting requests are dropped and returned, the answers of its
    /// running ones will be discarded. A later life of the same rank is not touched (LIFE-1).
    pub fn peer_lost(&mut self, peer: Rank, incarnation: Incarnation) -> Vec<(RequestKey, T)> {
        let requests = self.peers.remove(&(peer, incarnation)).unwrap_or_default();
        let mut dropped = Vec::new();
        for (id, request) in requests {
            let key = RequestKey { peer, incarnation, id };
            match request {
                Request::Waiting { token, .. } => dropped.push((key, token)),
                Request::Running { .. } => {
                    self.orphans.insert(key);
                }
            }
        }
        self.waiting -= dropped.len();
        dropped.sort_unstable_by_key(|&(key, _)| key);
        dropped
    }

    /// Requests that wait or run, those without a caller included. What a wave counts (TERM-1).
    pub fn len(&self) -> usize {
        self.waiting + self.running
    }

    /// Whether nothing waits or runs.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Requests that wait for their turn.
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// Requests that run, those without a caller included.
    pub fn running(&self) -> usize {
        self.running
    }

    /// Requests ever admitted.
    pub fn total(&self) -> u64 {
        self.total
    }

    fn take_waiting(&mut self, key: RequestKey) -> Option<(T, Option<Instant>, Told)> {
        if !matches!(self.request_mut(key), Some(Request::Waiting { .. })) {
            return None;
        }
        match self.remove(key) {
            Some(Request::Waiting { deadline, token, told }) => {
                self.waiting -= 1;
                Some((token, deadline, told))
            }
            _ => None,
        }
    }

    fn request_mut(&mut self, key: RequestKey) -> Option<&mut Request<T>> {
        self.peers.get_mut(&key.life())?.get_mut(&key.id)
    }

    fn remove(&mut self, key: RequestKey) -> Option<Request<T>> {
        self.peers.get_mut(&key.life())?.remove(&key.id)
    }
}

impl<T> Default for Serving<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl RequestKey {
    fn life(self) -> (Rank, Incarnation) {
        (self.peer, self.incarnation)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[expect(clippy::disallowed_methods, reason = "any instant will do")]
    fn now() -> Instant {
        Instant::now()
    }

    fn key(incarnation: u64, id: u64) -> RequestKey {
        let peer = Rank::new(3).unwrap();
        RequestKey { peer, incarnation: Incarnation::new(incarnation), id: MessageId::new(id) }
    }

    #[test]
    fn a_request_waits_runs_and_is_answered() {
        let mut serving = Serving::new();
        serving.admit(key(1, 1), None, "f").unwrap();
        assert_eq!((serving.waiting(), serving.running()), (1, 0));

        assert_eq!(serving.start(key(1, 1), now()), Start::Run("f"));
        assert_eq!((serving.waiting(), serving.running()), (0, 1));

        assert!(serving.finish(key(1, 1)));
        assert_eq!((serving.len(), serving.total()), (0, 1));
    }

    #[test]
    fn an_id_that_is_in_use_is_refused() {
        let mut serving = Serving::new();
        serving.admit(key(1, 1), None, "f").unwrap();

        assert_eq!(serving.admit(key(1, 1), None, "g"), Err(Duplicate(key(1, 1))));
        assert_eq!(serving.start(key(1, 1), now()), Start::Run("f"));
        assert_eq!(serving.admit(key(1, 1), None, "g"), Err(Duplicate(key(1, 1))));
    }

    #[test]
    fn equal_ids_of_two_lives_are_two_requests() {
        let mut serving = Serving::new();
        serving.admit(key(1, 1), None, "old").unwrap();
        serving.start(key(1, 1), now());
        serving.peer_lost(key(1, 1).peer, Incarnation::new(1));

        serving.admit(key(2, 1), None, "new").unwrap();

        assert_eq!(serving.start(key(2, 1), now()), Start::Run("new"));
        assert!(!serving.finish(key(1, 1)), "nobody waits for the old life's answer");
        assert!(serving.finish(key(2, 1)));
        assert!(serving.is_empty());
    }

    #[test]
    fn an_expired_request_does_not_run() {
        let now = now();
        let mut serving = Serving::new();
        serving.admit(key(1, 1), Some(now), "late").unwrap();
        serving.admit(key(1, 2), Some(now + Duration::from_millis(1)), "in time").unwrap();

        assert_eq!(serving.start(key(1, 1), now), Start::Expired("late"));
        assert_eq!(serving.start(key(1, 2), now), Start::Run("in time"));
        assert_eq!(serving.len(), 1);
    }

    #[test]
    fn cancelling_a_waiting_request_removes_it() {
        let mut serving = Serving::new();
        serving.admit(key(1, 1), None, "f").unwrap();

        assert_eq!(serving.cancel(key(1, 1)), CancelOutcome::Waiting("f"));
        assert_eq!(serving.cancel(key(1, 1)), CancelOutcome::Unknown);
        assert_eq!(serving.start(key(1, 1), now()), Start::Gone);
        assert!(serving.is_empty());
    }

    #[test]
    fn cancelling_a_running_request_marks_it_and_its_answer_is_sent() {
        let mut serving = Serving::new();
        serving.admit(key(1, 1), None, "f").unwrap();
        serving.start(key(1, 1), now());
        assert!(!serving.is_cancelled(key(1, 1)));

        assert_eq!(serving.cancel(key(1, 1)), CancelOutcome::Running);

        assert!(serving.is_cancelled(key(1, 1)));
        assert!(serving.finish(key(1, 1)));
    }

    #[test]
    fn a_lost_peers_waiting_requests_are_dropped_and_running_ones_have_no_answer() {
        let mut serving = Serving::new();
        for id in 1..=3 {
            serving.admit(key(1, id), None, id).unwrap();
        }
        serving.start(key(1, 2), now());

        let dropped = serving.peer_lost(key(1, 1).peer, Incarnation::new(1));

        assert_eq!(dropped, [(key(1, 1), 1), (key(1, 3), 3)]);
        assert_eq!(serving.start(key(1, 3), now()), Start::Gone);
        assert_eq!(serving.len(), 1, "a running function still counts");
        assert!(serving.is_cancelled(key(1, 2)));
        assert!(!serving.finish(key(1, 2)));
        assert!(serving.is_empty());
    }

    #[test]
    fn the_caller_of_a_slow_request_is_told_its_phase_once() {
        let mut serving = Serving::new();
        serving.admit(key(1, 1), None, "f").unwrap();
        assert_eq!(serving.overdue(), [], "it is new");

        assert_eq!(serving.overdue(), [(key(1, 1), Phase::Waiting)]);
        assert_eq!(serving.overdue(), []);

        serving.start(key(1, 1), now());
        assert_eq!(serving.overdue(), [(key(1, 1), Phase::Running)]);
        assert_eq!(serving.overdue(), []);
    }

    #[test]
    fn an_answer_is_sent_once() {
        let mut serving = Serving::new();
        serving.admit(key(1, 1), None, "f").unwrap();
        assert!(!serving.finish(key(1, 1)), "it does not run yet");
        serving.start(key(1, 1), now());

        assert!(serving.finish(key(1, 1)));
        assert!(!serving.finish(key(1, 1)));
    }
}
