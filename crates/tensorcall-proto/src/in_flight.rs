//! Requests that wait for a reply: the caller's half of every call.
//!
//! [`InFlight`] holds the calls made to one life of one peer. It gives each an id and a deadline and
//! reports its outcome once: whoever takes a call's token out (by reply, deadline, cancellation or
//! loss of the peer) completes it, and nobody else can (CALL-1). It also keeps the window that holds
//! back new calls when the peer has enough to do. It has no socket and reads no clock; the caller
//! passes `now`.
//!
//! A call that ended before its answer came (deadline, cancellation) is *abandoned*: its token is gone
//! and its answer, should one come, is counted as late. The peer still owes that answer, so it stays in
//! [`InFlight::unanswered`], which is what a worker reports in a wave (TERM-1): a request that nobody
//! waits for any more can still arrive somewhere and start work.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Instant;

use rustc_hash::{FxHashMap, FxHashSet};

use crate::ids::MessageId;
use crate::wire::message::Phase;

/// Calls to one peer that are not answered yet; `T` is what the driver needs to complete one.
#[derive(Debug)]
pub struct InFlight<T> {
    window: Window,
    calls: FxHashMap<MessageId, Call<T>>,
    /// Calls that are over for their caller but still owed an answer by the peer.
    abandoned: FxHashSet<MessageId>,
    /// Earliest first. Entries of finished calls stay until they surface or a rebuild drops them.
    deadlines: BinaryHeap<Reverse<(Instant, MessageId)>>,
    /// How many of `calls` have a deadline: the entries of `deadlines` that are not stale.
    timed: usize,
    bytes: u64,
    started: u64,
    late: u64,
}

/// How much may be unfinished towards one peer before new calls are held back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// Calls at a time.
    pub max_calls: usize,
    /// Bytes of requests at a time. A larger request goes alone.
    pub max_bytes: u64,
}

/// A call whose deadline passed before its reply came.
#[derive(Debug)]
pub struct Expired<T> {
    /// The call.
    pub id: MessageId,
    /// What completes it.
    pub token: T,
    /// How far it had come.
    pub phase: Phase,
}

#[derive(Debug)]
struct Call<T> {
    token: T,
    deadline: Option<Instant>,
    bytes: u64,
    phase: Phase,
}

impl<T> InFlight<T> {
    /// No calls yet.
    pub fn new(window: Window) -> Self {
        Self {
            window,
            calls: FxHashMap::default(),
            abandoned: FxHashSet::default(),
            deadlines: BinaryHeap::new(),
            timed: 0,
            bytes: 0,
            started: 0,
            late: 0,
        }
    }

    /// Starts a call of `bytes` bytes, in phase [`Phase::Queued`], and returns its id.
    ///
    /// `nested` says that the call is issued from inside a call that this worker runs; holding such a
    /// call back could make two workers wait for each other, so it is never refused. `deadline` `None`
    /// waits for ever.
    ///
    /// # Errors
    ///
    /// Gives the token back when the window is full.
    pub fn try_start(
        &mut self,
        deadline: Option<Instant>,
        bytes: u64,
        nested: bool,
        token: T,
    ) -> Result<MessageId, T> {
        if !nested && !self.has_room(bytes) {
            return Err(token);
        }
        self.started += 1;
        let id = MessageId::new(self.started);
        if let Some(deadline) = deadline {
            self.deadlines.push(Reverse((deadline, id)));
            self.timed += 1;
        }
        self.bytes = self.bytes.saturating_add(bytes);
        self.calls.insert(id, Call { token, deadline, bytes, phase: Phase::Queued });
        Ok(id)
    }

    /// Whether a call of `bytes` bytes that is not nested would be started now.
    pub fn has_room(&self, bytes: u64) -> bool {
        self.calls.is_empty()
            || (self.calls.len() < self.window.max_calls
                && self.bytes.saturating_add(bytes) <= self.window.max_bytes)
    }

    /// Notes how far a call has come. Ignored when the call is over.
    pub fn set_phase(&mut self, id: MessageId, phase: Phase) {
        if let Some(call) = self.calls.get_mut(&id) {
            call.phase = phase;
        }
    }

    /// How far a call has come; `None` when it is over.
    pub fn phase(&self, id: MessageId) -> Option<Phase> {
        self.calls.get(&id).map(|call| call.phase)
    }

    /// The answer to `id` came, or it is certain that none will (the request never left).
    ///
    /// Whoever gets the token completes the call (CALL-1). `None` means that it was completed before,
    /// which is counted in [`InFlight::late`], or that there never was such a call.
    pub fn finish(&mut self, id: MessageId) -> Option<T> {
        let call = self.remove(id);
        if call.is_none() {
            self.late += 1;
            self.abandoned.remove(&id);
        }
        call.map(|call| call.token)
    }

    /// Ends a call for its caller, who no longer waits for the answer that the peer still owes.
    ///
    /// Whoever gets the token completes the call (CALL-1); `None` means that it was completed before.
    pub fn abandon(&mut self, id: MessageId) -> Option<T> {
        let call = self.remove(id)?;
        self.abandoned.insert(id);
        Some(call.token)
    }

    /// Ends every call whose deadline is not after `now`, earliest first. Their answers are still owed.
    pub fn expire(&mut self, now: Instant) -> Vec<Expired<T>> {
        let mut expired = Vec::new();
        while let Some(&Reverse((deadline, id))) = self.deadlines.peek() {
            if deadline > now {
                break;
            }
            self.deadlines.pop();
            if let Some(call) = self.calls.remove(&id) {
                self.timed -= 1;
                self.bytes = self.bytes.saturating_sub(call.bytes);
                self.abandoned.insert(id);
                expired.push(Expired { id, token: call.token, phase: call.phase });
            }
        }
        self.drop_stale_deadlines();
        expired
    }

    /// The peer is gone: ends every call, oldest first, and forgets the answers that it owed.
    pub fn fail_all(&mut self) -> Vec<(MessageId, T, Phase)> {
        let mut failed: Vec<_> = self.calls.drain().map(|(id, call)| (id, call.token, call.phase)).collect();
        failed.sort_unstable_by_key(|&(id, ..)| id);
        self.abandoned.clear();
        self.deadlines.clear();
        self.timed = 0;
        self.bytes = 0;
        failed
    }

    /// When [`InFlight::expire`] has something to do next.
    pub fn next_deadline(&self) -> Option<Instant> {
        // The top is never stale: see `drop_stale_deadlines`.
        self.deadlines.peek().map(|&Reverse((deadline, _))| deadline)
    }

    /// Calls that are not over for their caller.
    pub fn len(&self) -> usize {
        self.calls.len()
    }

    /// Whether no caller waits.
    pub fn is_empty(&self) -> bool {
        self.calls.is_empty()
    }

    /// Answers that the peer owes: calls under way and abandoned ones. What a wave counts (TERM-1).
    pub fn unanswered(&self) -> usize {
        self.calls.len() + self.abandoned.len()
    }

    /// Bytes of the requests under way.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Calls ever started.
    pub fn started(&self) -> u64 {
        self.started
    }

    /// Answers that came when their call was over, or to no call at all.
    pub fn late(&self) -> u64 {
        self.late
    }

    fn remove(&mut self, id: MessageId) -> Option<Call<T>> {
        let call = self.calls.remove(&id)?;
        self.bytes = self.bytes.saturating_sub(call.bytes);
        if call.deadline.is_some() {
            self.timed -= 1;
            self.drop_stale_deadlines();
        }
        Some(call)
    }

    /// Keeps the top of the heap live, so that nobody wakes for a call that is over, and the heap no
    /// larger than twice what is live, so that many short calls with long deadlines cost no memory.
    /// Both are amortised: an entry is dropped once.
    fn drop_stale_deadlines(&mut self) {
        if self.deadlines.len() > 2 * self.timed + SPARE_DEADLINES {
            let calls = &self.calls;
            self.deadlines.retain(|Reverse((_, id))| calls.contains_key(id));
        }
        while let Some(Reverse((_, id))) = self.deadlines.peek() {
            if self.calls.contains_key(id) {
                break;
            }
            self.deadlines.pop();
        }
    }
}

/// Stale entries that are not worth a rebuild.
const SPARE_DEADLINES: usize = 64;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const WINDOW: Window = Window { max_calls: 2, max_bytes: 100 };

    #[expect(clippy::disallowed_methods, reason = "any instant will do")]
    fn now() -> Instant {
        Instant::now()
    }

    fn millis(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    #[test]
    fn ids_start_at_one_and_are_never_used_again() {
        let mut calls = InFlight::new(WINDOW);

        let first = calls.try_start(None, 1, false, "a").unwrap();
        calls.finish(first);
        let second = calls.try_start(None, 1, false, "b").unwrap();

        assert_eq!((first.get(), second.get()), (1, 2));
        assert_eq!(calls.started(), 2);
    }

    #[test]
    fn a_call_completes_once() {
        let mut calls = InFlight::new(WINDOW);
        let id = calls.try_start(None, 1, false, "a").unwrap();

        assert_eq!(calls.finish(id), Some("a"));
        assert_eq!(calls.finish(id), None);
        assert_eq!(calls.abandon(id), None);
        assert!(calls.fail_all().is_empty());
        assert_eq!(calls.late(), 1);
    }

    #[test]
    fn late_reply_after_timeout_is_dropped_and_counted() {
        let now = now();
        let mut calls = InFlight::new(WINDOW);
        let id = calls.try_start(Some(now + millis(5)), 1, false, "a").unwrap();
        calls.set_phase(id, Phase::Running);

        let expired = calls.expire(now + millis(5));

        assert_eq!(expired.len(), 1);
        assert_eq!((expired[0].id, expired[0].token, expired[0].phase), (id, "a", Phase::Running));
        assert_eq!(calls.finish(id), None);
        assert_eq!(calls.late(), 1);
    }

    #[test]
    fn an_abandoned_call_is_owed_an_answer_until_it_comes_or_the_peer_is_gone() {
        let mut calls = InFlight::new(WINDOW);
        let first = calls.try_start(None, 1, false, "a").unwrap();
        let second = calls.try_start(None, 1, false, "b").unwrap();

        assert_eq!(calls.abandon(first), Some("a"));
        assert_eq!(calls.abandon(second), Some("b"));
        assert_eq!((calls.len(), calls.unanswered()), (0, 2));

        calls.finish(first);
        assert_eq!(calls.unanswered(), 1);
        assert!(calls.fail_all().is_empty());
        assert_eq!(calls.unanswered(), 0);
    }

    #[test]
    fn calls_expire_in_the_order_of_their_deadlines() {
        let now = now();
        let mut calls = InFlight::new(Window { max_calls: 10, max_bytes: 100 });
        for (after, name) in [(30, "c"), (10, "a"), (20, "b"), (40, "d")] {
            calls.try_start(Some(now + millis(after)), 1, false, name).unwrap();
        }

        assert_eq!(calls.next_deadline(), Some(now + millis(10)));
        let names: Vec<_> = calls.expire(now + millis(30)).into_iter().map(|call| call.token).collect();

        assert_eq!(names, ["a", "b", "c"]);
        assert_eq!(calls.next_deadline(), Some(now + millis(40)));
    }

    #[test]
    fn nobody_wakes_for_a_call_that_is_over() {
        let now = now();
        let mut calls = InFlight::new(WINDOW);
        let soon = calls.try_start(Some(now + millis(1)), 1, false, "a").unwrap();
        calls.try_start(Some(now + millis(9)), 1, false, "b").unwrap();

        calls.finish(soon);

        assert_eq!(calls.next_deadline(), Some(now + millis(9)));
    }

    #[test]
    fn deadlines_of_finished_calls_take_no_memory() {
        let now = now();
        let mut calls = InFlight::new(Window { max_calls: 10, max_bytes: 100_000 });
        calls.try_start(Some(now), 1, false, 0).unwrap();

        for number in 1..10_000 {
            let id = calls.try_start(Some(now + millis(number)), 1, false, number).unwrap();
            calls.finish(id);
        }

        assert!(calls.deadlines.len() <= 2 * calls.len() + SPARE_DEADLINES + 1, "{}", calls.deadlines.len());
    }

    #[test]
    fn the_window_counts_calls_and_bytes() {
        let mut calls = InFlight::new(WINDOW);

        assert!(calls.try_start(None, 60, false, "a").is_ok());
        assert_eq!(calls.try_start(None, 60, false, "b"), Err("b"));
        assert!(calls.try_start(None, 40, false, "c").is_ok());
        assert_eq!(calls.try_start(None, 0, false, "d"), Err("d"));
        assert_eq!((calls.len(), calls.bytes()), (2, 100));
    }

    #[test]
    fn a_call_larger_than_the_window_goes_alone() {
        let mut calls = InFlight::new(WINDOW);

        let large = calls.try_start(None, 1_000, false, "large").unwrap();
        assert_eq!(calls.try_start(None, 1, false, "small"), Err("small"));

        calls.finish(large);
        assert!(calls.try_start(None, 1, false, "small").is_ok());
        assert_eq!(calls.try_start(None, 1_000, false, "large"), Err("large"));
    }

    #[test]
    fn a_nested_call_is_never_held_back() {
        let mut calls = InFlight::new(WINDOW);
        for _ in 0..5 {
            assert!(calls.try_start(None, 1_000, true, "nested").is_ok());
        }

        assert!(!calls.has_room(1));
    }

    #[test]
    fn every_way_to_end_a_call_makes_room() {
        let now = now();
        let mut calls = InFlight::new(Window { max_calls: 1, max_bytes: 100 });

        let id = calls.try_start(None, 1, false, "finished").unwrap();
        calls.finish(id);
        let id = calls.try_start(None, 1, false, "abandoned").unwrap();
        calls.abandon(id);
        calls.try_start(Some(now), 1, false, "expired").unwrap();
        calls.expire(now);
        calls.try_start(None, 1, false, "failed").unwrap();
        calls.fail_all();

        assert!(calls.has_room(1));
        assert_eq!((calls.len(), calls.bytes()), (0, 0));
    }

    #[test]
    fn a_loss_fails_all_calls_oldest_first_with_their_phases() {
        let mut calls = InFlight::new(Window { max_calls: 10, max_bytes: 100 });
        for name in ["a", "b", "c"] {
            calls.try_start(None, 1, false, name).unwrap();
        }
        calls.set_phase(MessageId::new(2), Phase::Sent);

        let failed = calls.fail_all();

        let expected = [(1, "a", Phase::Queued), (2, "b", Phase::Sent), (3, "c", Phase::Queued)];
        assert_eq!(failed, expected.map(|(id, name, phase)| (MessageId::new(id), name, phase)));
    }
}
