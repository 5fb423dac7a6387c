//! A process group within one process, for tests: it does what groups do at their worst.
//!
//! Sending waits for the receiver, as with large messages everywhere. On request messages take time, come
//! damaged, or a rank is gone.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::{GroupError, ProcessGroup};
use crate::buffer::{Region, Target};
use crate::clock::now;
use crate::sync::{Condvar, Mutex, MutexGuard};

/// What the ranks of a [`MemoryGroup`] have in common, and what goes wrong between them.
pub struct Fabric {
    size: u32,
    any_source: bool,
    state: Mutex<State>,
    changed: Condvar,
}

/// Changes a message on its way: from rank, to rank, tag, bytes.
type Tamper = Box<dyn FnMut(u32, u32, u32, &mut Vec<u8>) + Send>;

#[derive(Default)]
struct State {
    posted: VecDeque<Posted>,
    /// Numbers of messages that were taken, for their senders.
    taken: HashSet<u64>,
    next: u64,
    delay: Duration,
    tamper: Option<Tamper>,
    lost: HashSet<u32>,
    aborted: HashSet<u32>,
    /// What ranks said in collective calls, by the number of the call.
    rounds: HashMap<u64, Round>,
}

#[derive(Default)]
struct Round {
    said: HashMap<u32, Vec<u8>>,
    heard: u32,
}

struct Posted {
    number: u64,
    from: u32,
    to: u32,
    tag: u32,
    bytes: Region,
    ready: Instant,
}

/// One rank.
pub struct MemoryGroup {
    fabric: Arc<Fabric>,
    rank: u32,
    round: AtomicU64,
}

impl Fabric {
    /// As many ranks as `size`. Without `any_source` they receive from one another by rank only.
    pub fn new(size: u32, any_source: bool) -> Arc<Self> {
        Arc::new(Self { size, any_source, state: Mutex::default(), changed: Condvar::new() })
    }

    /// One of the ranks.
    pub fn member(self: &Arc<Self>, rank: u32) -> Arc<MemoryGroup> {
        Arc::new(MemoryGroup { fabric: Arc::clone(self), rank, round: AtomicU64::new(0) })
    }

    /// From now on every message takes this long.
    pub fn delay(&self, delay: Duration) {
        self.state.lock().delay = delay;
    }

    /// From now on every message is shown to `tamper`, with its source, destination and tag, before it
    /// arrives.
    pub fn tamper(&self, tamper: impl FnMut(u32, u32, u32, &mut Vec<u8>) + Send + 'static) {
        self.state.lock().tamper = Some(Box::new(tamper));
    }

    /// A rank is gone without a word.
    pub fn lose(&self, rank: u32) {
        self.state.lock().lost.insert(rank);
        self.changed.notify_all();
    }

    fn wait(&self, state: &mut MutexGuard<'_, State>, limit: Option<Instant>) -> bool {
        match limit {
            None => {
                self.changed.wait(state);
                true
            }
            Some(limit) => !self.changed.wait_until(state, limit).timed_out(),
        }
    }
}

impl State {
    /// Why `rank` can do nothing with `other`.
    fn trouble(&self, rank: u32, other: Option<u32>) -> Option<GroupError> {
        if self.aborted.contains(&rank) {
            return Some(GroupError("the group was aborted".to_owned()));
        }
        if self.lost.contains(&rank) {
            return Some(GroupError("this rank is cut off".to_owned()));
        }
        let other = other.filter(|other| self.lost.contains(other) || self.aborted.contains(other))?;
        Some(GroupError(format!("connection closed by rank {other}")))
    }

    /// Which of the messages posted to `to` is to be received; `Err` says when one will be.
    fn find(&self, to: u32, from: Option<u32>, tag: u32) -> Result<usize, Option<Instant>> {
        let (now, mut seen, mut soonest) = (now(), HashSet::new(), None);
        for (place, message) in self.posted.iter().enumerate() {
            let matches =
                message.to == to && message.tag == tag && from.is_none_or(|from| from == message.from);
            if !matches || !seen.insert(message.from) {
                continue;
            }
            if message.ready <= now {
                return Ok(place);
            }
            soonest = [soonest, Some(message.ready)].into_iter().flatten().min();
        }
        Err(soonest)
    }
}

impl ProcessGroup for MemoryGroup {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn size(&self) -> u32 {
        self.fabric.size
    }

    fn receives_from_any(&self) -> bool {
        self.fabric.any_source
    }

    fn send(&self, to: u32, tag: u32, bytes: &Region) -> Result<(), GroupError> {
        let mut state = self.fabric.state.lock();
        let number = state.next;
        state.next += 1;
        let ready = now() + state.delay;
        if state.trouble(self.rank, Some(to)).is_none() {
            let bytes = bytes.clone();
            state.posted.push_back(Posted { number, from: self.rank, to, tag, bytes, ready });
            self.fabric.changed.notify_all();
        }
        loop {
            if state.taken.remove(&number) {
                return Ok(());
            }
            if let Some(trouble) = state.trouble(self.rank, Some(to)) {
                let place = state.posted.iter().position(|message| message.number == number);
                let posted = place.and_then(|place| state.posted.remove(place));
                drop(state);
                drop(posted);
                return Err(trouble);
            }
            self.fabric.wait(&mut state, None);
        }
    }

    fn receive(&self, from: Option<u32>, tag: u32, mut target: Target) -> Result<u32, GroupError> {
        let mut state = self.fabric.state.lock();
        let message = loop {
            match state.find(self.rank, from, tag) {
                Ok(place) => {
                    if let Some(message) = state.posted.remove(place) {
                        break message;
                    }
                }
                Err(soonest) => {
                    if let Some(trouble) = state.trouble(self.rank, from) {
                        return Err(trouble);
                    }
                    self.fabric.wait(&mut state, soonest);
                }
            }
        };
        let Posted { number, from, mut bytes, .. } = message;
        if let Some(tamper) = &mut state.tamper {
            let mut copy = vec![0; bytes.len()];
            bytes.copy_to(&mut copy);
            tamper(from, self.rank, tag, &mut copy);
            bytes = Region::from_vec(copy);
        }
        drop(state);
        let fits = bytes.len() <= target.len();
        if fits {
            target.fill(&bytes);
        }
        drop((target, bytes));
        self.fabric.state.lock().taken.insert(number);
        self.fabric.changed.notify_all();
        if fits { Ok(from) } else { Err(GroupError(format!("a message of rank {from} is too long"))) }
    }

    fn all_gather(&self, bytes: &[u8], limit: Instant) -> Result<Vec<Vec<u8>>, GroupError> {
        let round = self.round.fetch_add(1, Ordering::Relaxed);
        let size = self.fabric.size;
        let mut state = self.fabric.state.lock();
        state.rounds.entry(round).or_default().said.insert(self.rank, bytes.to_vec());
        self.fabric.changed.notify_all();
        loop {
            if let Some(trouble) = state.trouble(self.rank, None) {
                return Err(trouble);
            }
            let all = state.rounds.entry(round).or_default();
            if all.said.len() == size as usize {
                all.heard += 1;
                let said = (0..size).filter_map(|rank| all.said.get(&rank).cloned()).collect();
                if all.heard == size {
                    state.rounds.remove(&round);
                }
                return Ok(said);
            }
            if !self.fabric.wait(&mut state, Some(limit)) {
                return Err(GroupError("not all ranks came in time".to_owned()));
            }
        }
    }

    fn barrier(&self, limit: Instant) -> Result<(), GroupError> {
        self.all_gather(&[], limit).map(drop)
    }

    fn abort(&self) {
        self.fabric.state.lock().aborted.insert(self.rank);
        self.fabric.changed.notify_all();
    }
}

impl fmt::Debug for MemoryGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {}", self.rank, self.fabric.size)
    }
}

impl fmt::Debug for Fabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fabric").field("size", &self.size).finish_non_exhaustive()
    }
}
