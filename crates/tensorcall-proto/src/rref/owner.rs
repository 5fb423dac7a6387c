//! The owner's half of reference counting.

use std::collections::{HashMap, HashSet, VecDeque};

use super::RRefError;
use super::message::{RRefDesc, RRefMessage};
use super::recent::Recent;
use crate::ids::{ForkId, Life, RRefId};

/// The values that this worker owns and others refer to.
///
/// `V` is a value, cheap to clone; a creation that ended in an exception is a value too. `W` is what the
/// driver needs to go on when a value is there. A value stays while anybody has a fork of it, while
/// this worker holds it ([`Owner::hold`]), and until its creation is over.
///
/// An id that is not known yet may be waited for, forked and held: its creation was overtaken. That makes a
/// *placeholder*, which the creation fills. Creations that will never come are those of a lost worker
/// ([`Owner::handle_lost`]).
#[derive(Debug)]
pub struct Owner<V, W> {
    me: Life,
    entries: HashMap<RRefId, Entry<V, W>>,
    forks: HashMap<ForkId, Fork>,
    /// Forks that came back and whose parents have been told so, and have not answered.
    accepting: HashMap<ForkId, Life>,
    /// Values that went, for clear errors.
    freed: Recent<RRefId>,
    /// Forks that were deleted before they were known: a creation that comes late need not run.
    deleted: Recent<ForkId>,
    lost: Recent<Life>,
    /// Links that broke: a message may be given to one that did just now.
    broken: Recent<u64>,
    /// Who ever got an answer, or will.
    answered: HashSet<Life>,
    effects: VecDeque<Effect<V, W>>,
}

/// What the driver is to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect<V, W> {
    /// Send this to that life of a worker. If it cannot be sent, the life is lost, or its link broke.
    Send(Life, RRefMessage),
    /// The value that this waited for is there.
    Ready(W, V),
    /// The value that this waited for will never be.
    Failed(W, RRefError),
    /// Nobody refers to this value any more. Drop it where user code may run (MEM-2).
    Drop(V),
}

/// What a request that creates a value came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Created {
    /// Run it and call [`Owner::resolve`], or [`Owner::abandon`] if it does not run.
    New,
    /// It is here already.
    Again,
    /// Nobody wants its result any more: need not run. Nothing is kept.
    Refused,
}

/// What a lookup came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found<V> {
    /// The value.
    Ready(V),
    /// It is not there yet.
    Waiting,
    /// It will never be there.
    Gone(RRefError),
}

/// What asking for a value came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wait<V, W> {
    /// It is there.
    Ready(W, V),
    /// [`Effect::Ready`] or [`Effect::Failed`] will come.
    Waiting,
    /// It will never be there.
    Gone(W, RRefError),
}

/// How much an owner has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OwnerCounts {
    /// References, placeholders included.
    pub rrefs: usize,
    /// Forks that others hold, as far as is known.
    pub forks: usize,
    /// Messages that are not answered, forks included that this worker shared and whose receivers have not
    /// spoken. What a wave counts (TERM-1).
    pub unacknowledged: usize,
    /// Who waits for a value.
    pub waiting: usize,
}

#[derive(Debug)]
struct Entry<V, W> {
    slot: Slot<V, W>,
    holds: usize,
    forks: usize,
}

#[derive(Debug)]
enum Slot<V, W> {
    /// A placeholder: the creation has not come.
    Missing(Vec<W>),
    /// The creation is under way.
    Running(Vec<W>),
    Ready(V),
    /// There will never be a value.
    Gone(RRefError),
}

#[derive(Debug, Clone, Copy)]
struct Fork {
    rref: RRefId,
    holder: Life,
    /// Whether the holder has spoken of it, or made it.
    accepted: bool,
    /// The link that its message was given to, if this worker shared it.
    link: Option<u64>,
    /// Whether that link broke.
    is_doubtful: bool,
}

impl<V: Clone, W> Owner<V, W> {
    /// Owns nothing yet.
    pub fn new(me: Life) -> Self {
        Self {
            me,
            entries: HashMap::new(),
            forks: HashMap::new(),
            accepting: HashMap::new(),
            freed: Recent::new(),
            deleted: Recent::new(),
            lost: Recent::new(),
            broken: Recent::new(),
            answered: HashSet::new(),
            effects: VecDeque::new(),
        }
    }

    /// `holder` asks this worker to create a value, and holds `fork` of it.
    pub fn create(&mut self, rref: RRefId, fork: ForkId, holder: Life) -> Created {
        let was_deleted = self.deleted.contains(&fork);
        let is_wanted = match self.entries.get(&rref) {
            // Others may have forks of it, whatever became of the first one.
            Some(_) => true,
            None => !(self.lost.contains(&holder) || was_deleted || self.freed.contains(&rref)),
        };
        if !is_wanted {
            return Created::Refused;
        }
        let entry = self.entries.entry(rref).or_insert_with(Entry::placeholder);
        let Slot::Missing(waiters) = &mut entry.slot else { return Created::Again };
        entry.slot = Slot::Running(std::mem::take(waiters));
        if !was_deleted && !self.lost.contains(&holder) {
            self.register(fork, Fork::accepted(rref, holder));
            self.answered.insert(holder);
        }
        Created::New
    }

    /// This worker creates a value on itself, which comes later, and holds it.
    pub fn create_pending(&mut self, rref: RRefId) {
        let entry = self.entries.entry(rref).or_insert_with(Entry::placeholder);
        if let Slot::Missing(waiters) = &mut entry.slot {
            entry.slot = Slot::Running(std::mem::take(waiters));
        }
        entry.holds += 1;
    }

    /// This worker has a value, and holds it: [`Owner::release`] it when it is shared. A value that went may
    /// be entered anew.
    pub fn create_local(&mut self, rref: RRefId, value: V) {
        self.freed.remove(&rref);
        let entry = self.entries.entry(rref).or_insert_with(Entry::placeholder);
        entry.holds += 1;
        self.fill(rref, value);
    }

    /// A creation is over: those who wait get the value.
    pub fn resolve(&mut self, rref: RRefId, value: V) {
        if matches!(self.entries.get(&rref), Some(Entry { slot: Slot::Running(_), .. })) {
            self.fill(rref, value);
            self.sweep(rref);
        } else {
            self.effects.push_back(Effect::Drop(value));
        }
    }

    /// A creation will not run: it expired, was cancelled, or its caller is gone.
    pub fn abandon(&mut self, rref: RRefId) {
        if matches!(self.entries.get(&rref), Some(Entry { slot: Slot::Running(_), .. })) {
            self.give_up(rref, RRefError::NeverCreated);
            self.sweep(rref);
        }
    }

    /// What there is under an id. Changes nothing.
    pub fn lookup(&self, rref: RRefId) -> Found<V> {
        match self.entries.get(&rref).map(|entry| &entry.slot) {
            Some(Slot::Ready(value)) => Found::Ready(value.clone()),
            Some(Slot::Missing(_) | Slot::Running(_)) => Found::Waiting,
            Some(Slot::Gone(error)) => Found::Gone(*error),
            None => self.why_absent(rref).map_or(Found::Waiting, Found::Gone),
        }
    }

    /// Asks for a value, and waits if it is not there yet.
    pub fn wait(&mut self, rref: RRefId, waiter: W) -> Wait<V, W> {
        if let Some(error) = self.why_absent(rref) {
            return Wait::Gone(waiter, error);
        }
        let entry = self.entries.entry(rref).or_insert_with(Entry::placeholder);
        match &mut entry.slot {
            Slot::Ready(value) => Wait::Ready(waiter, value.clone()),
            Slot::Gone(error) => Wait::Gone(waiter, *error),
            Slot::Missing(waiters) | Slot::Running(waiters) => {
                waiters.push(waiter);
                Wait::Waiting
            }
        }
    }

    /// Those who wait for `rref` and are picked by `which` wait no longer; they are returned.
    pub fn cancel_wait(&mut self, rref: RRefId, mut which: impl FnMut(&W) -> bool) -> Vec<W> {
        let Some(Entry { slot: Slot::Missing(waiters) | Slot::Running(waiters), .. }) =
            self.entries.get_mut(&rref)
        else {
            return Vec::new();
        };
        let (cancelled, kept) = std::mem::take(waiters).into_iter().partition(|waiter| which(waiter));
        *waiters = kept;
        self.sweep(rref);
        cancelled
    }

    /// This worker holds a reference of its own, once for each call, unless it is gone.
    pub fn hold(&mut self, rref: RRefId) -> Found<V> {
        if let Some(error) = self.why_absent(rref) {
            return Found::Gone(error);
        }
        let entry = self.entries.entry(rref).or_insert_with(Entry::placeholder);
        if let Slot::Gone(error) = entry.slot {
            return Found::Gone(error);
        }
        entry.holds += 1;
        self.lookup(rref)
    }

    /// This worker holds a reference once less.
    pub fn release(&mut self, rref: RRefId) {
        if let Some(entry) = self.entries.get_mut(&rref) {
            entry.holds = entry.holds.saturating_sub(1);
            self.sweep(rref);
        }
    }

    /// This worker shares a reference of its own with `to`, in a message that is about to be sent.
    ///
    /// # Errors
    ///
    /// Says why there is nothing to share.
    pub fn fork_out(&mut self, rref: RRefId, fork: ForkId, to: Life) -> Result<RRefDesc, RRefError> {
        match self.entries.get(&rref).map(|entry| &entry.slot) {
            None => return Err(self.why_absent(rref).unwrap_or(RRefError::Freed)),
            Some(Slot::Gone(error)) => return Err(*error),
            Some(_) => {}
        }
        if !self.lost.contains(&to) {
            self.register(fork, Fork { accepted: false, ..Fork::accepted(rref, to) });
        }
        Ok(RRefDesc { rref, owner: self.me, fork })
    }

    /// The message with a fork that was shared goes on this link, as
    /// [`User::sent`](super::User::sent).
    pub fn sent(&mut self, fork: ForkId, link: u64) {
        let Some(known) = self.forks.get_mut(&fork).filter(|known| !known.accepted) else { return };
        known.link = Some(link);
        if self.broken.contains(&link) {
            known.is_doubtful = true;
            let to = known.holder;
            self.send(to, RRefMessage::Rescind { fork });
        }
    }

    /// The message with this fork was given to no link.
    pub fn unsent(&mut self, fork: ForkId) {
        if self.forks.get(&fork).is_some_and(|known| !known.accepted) {
            self.unregister(fork);
        }
    }

    /// A reference of this worker's own arrives in a message of `from`: it is held, once for each arrival,
    /// unless it is gone.
    pub fn received_back(&mut self, desc: RRefDesc, from: Life) -> Found<V> {
        let found = if desc.owner == self.me {
            self.hold(desc.rref)
        } else {
            Found::Gone(RRefError::OwnerLost(desc.owner))
        };
        if from == self.me {
            self.unsent(desc.fork);
        } else if !self.lost.contains(&from) {
            self.accepting.insert(desc.fork, from);
            self.send(from, RRefMessage::Accept { fork: desc.fork });
        }
        found
    }

    /// A worker said something that is for an owner, or that the [`User`](super::User) did not want.
    pub fn handle_message(&mut self, from: Life, message: RRefMessage) {
        if self.lost.contains(&from) {
            return;
        }
        match message {
            RRefMessage::Fork { rref, fork } => self.handle_fork(from, rref, fork),
            RRefMessage::Delete { fork } => self.handle_delete(from, fork),
            RRefMessage::Unknown { fork } => {
                if self.forks.get(&fork).is_some_and(|known| known.holder == from) {
                    self.unsent(fork);
                }
            }
            RRefMessage::Accepted { fork } => {
                if self.accepting.get(&fork) == Some(&from) {
                    self.accepting.remove(&fork);
                }
            }
            RRefMessage::AskAgain => self.ask_again(from),
            // For a user: perhaps late, to the one that it was.
            RRefMessage::Known { .. }
            | RRefMessage::Accept { .. }
            | RRefMessage::Deleted { .. }
            | RRefMessage::Rescind { .. } => {}
        }
    }

    /// A life of a worker is lost for ever: it holds nothing any more, and creates nothing.
    pub fn handle_lost(&mut self, life: Life) {
        self.lost.insert(life);
        self.answered.remove(&life);
        self.accepting.retain(|_, parent| *parent != life);
        for fork in self.forks_of(life) {
            self.unregister(fork);
        }
        let mut never: Vec<RRefId> = self
            .entries
            .iter()
            .filter(|(rref, entry)| rref.life() == life && matches!(entry.slot, Slot::Missing(_)))
            .map(|(&rref, _)| rref)
            .collect();
        never.sort_unstable();
        for rref in never {
            self.give_up(rref, RRefError::NeverCreated);
            self.sweep(rref);
        }
    }

    /// A link with a life of a worker broke: what was sent on it may be lost.
    ///
    /// Tells the worker which forks of it are counted, and asks for those that went on that link. To be called
    /// together with [`User::handle_link_broken`](super::User::handle_link_broken), which see.
    pub fn handle_link_broken(&mut self, life: Life, link: u64) {
        self.broken.insert(link);
        for known in self.forks.values_mut() {
            known.is_doubtful |= !known.accepted && known.holder == life && known.link == Some(link);
        }
        if self.answered.contains(&life) {
            self.send(life, RRefMessage::AskAgain);
        }
        self.ask_again(life);
    }

    /// What the driver is to do next.
    pub fn poll_effect(&mut self) -> Option<Effect<V, W>> {
        self.effects.pop_front()
    }

    /// How much there is.
    pub fn counts(&self) -> OwnerCounts {
        let waiting = |entry: &Entry<V, W>| match &entry.slot {
            Slot::Missing(waiters) | Slot::Running(waiters) => waiters.len(),
            Slot::Ready(_) | Slot::Gone(_) => 0,
        };
        OwnerCounts {
            rrefs: self.entries.len(),
            forks: self.forks.len(),
            unacknowledged: self.accepting.len() + self.forks.values().filter(|fork| !fork.accepted).count(),
            waiting: self.entries.values().map(waiting).sum(),
        }
    }

    /// How many references others have, too, or wait for their creation.
    pub fn shared(&self) -> usize {
        let forked: HashSet<RRefId> = self.forks.values().map(|fork| fork.rref).collect();
        let is_running = |entry: &Entry<V, W>| matches!(entry.slot, Slot::Missing(_) | Slot::Running(_));
        self.entries.iter().filter(|(rref, entry)| is_running(entry) || forked.contains(rref)).count()
    }

    /// The references that there are, in no order.
    pub fn rrefs(&self) -> impl Iterator<Item = RRefId> + '_ {
        self.entries.keys().copied()
    }

    /// The forks that others hold and who holds them, in no order: what a leak report tells.
    pub fn forks(&self) -> impl Iterator<Item = (RRefId, ForkId, Life)> + '_ {
        self.forks.iter().map(|(&fork, known)| (known.rref, fork, known.holder))
    }

    fn ask_again(&mut self, life: Life) {
        let accepting = self.accepting.iter().filter(|&(_, parent)| *parent == life);
        let mut accepting: Vec<ForkId> = accepting.map(|(&fork, _)| fork).collect();
        accepting.sort_unstable();
        for fork in accepting {
            self.send(life, RRefMessage::Accept { fork });
        }
        for fork in self.forks_of(life) {
            match self.forks.get(&fork) {
                Some(Fork { accepted: true, .. }) => {
                    self.answer(life, RRefMessage::Known { fork, alive: true });
                }
                Some(Fork { is_doubtful: true, .. }) => self.send(life, RRefMessage::Rescind { fork }),
                _ => {}
            }
        }
    }

    fn handle_fork(&mut self, from: Life, rref: RRefId, fork: ForkId) {
        if let Some(known) = self.forks.get_mut(&fork) {
            if known.holder == from {
                known.accepted = true;
                self.answer(from, RRefMessage::Known { fork, alive: true });
            }
            return;
        }
        let is_gone = match self.entries.get(&rref) {
            Some(entry) => matches!(entry.slot, Slot::Gone(_)),
            None => self.why_absent(rref).is_some(),
        };
        if !is_gone {
            self.entries.entry(rref).or_insert_with(Entry::placeholder);
            self.register(fork, Fork::accepted(rref, from));
        }
        self.answer(from, RRefMessage::Known { fork, alive: !is_gone });
    }

    fn handle_delete(&mut self, from: Life, fork: ForkId) {
        match self.forks.get(&fork) {
            Some(known) if known.holder == from => self.unregister(fork),
            Some(_) => return,
            None => self.deleted.insert(fork),
        }
        self.answer(from, RRefMessage::Deleted { fork });
    }

    /// Why there is no entry for an id, if none is to come.
    fn why_absent(&self, rref: RRefId) -> Option<RRefError> {
        if self.entries.contains_key(&rref) {
            None
        } else if rref.life() == self.me || self.freed.contains(&rref) {
            Some(RRefError::Freed)
        } else if self.lost.contains(&rref.life()) {
            Some(RRefError::NeverCreated)
        } else {
            None
        }
    }

    fn register(&mut self, fork: ForkId, known: Fork) {
        if !self.forks.contains_key(&fork)
            && let Some(entry) = self.entries.get_mut(&known.rref)
        {
            entry.forks += 1;
            self.forks.insert(fork, known);
        }
    }

    fn unregister(&mut self, fork: ForkId) {
        let Some(Fork { rref, .. }) = self.forks.remove(&fork) else { return };
        if let Some(entry) = self.entries.get_mut(&rref) {
            entry.forks -= 1;
            self.sweep(rref);
        }
    }

    fn forks_of(&self, holder: Life) -> Vec<ForkId> {
        let held = self.forks.iter().filter(|(_, known)| known.holder == holder);
        let mut forks: Vec<ForkId> = held.map(|(&fork, _)| fork).collect();
        forks.sort_unstable();
        forks
    }

    /// Puts a value in, for those who wait.
    fn fill(&mut self, rref: RRefId, value: V) {
        let Some(entry) = self.entries.get_mut(&rref) else { return };
        match &mut entry.slot {
            Slot::Missing(waiters) | Slot::Running(waiters) => {
                let ready = std::mem::take(waiters).into_iter();
                self.effects.extend(ready.map(|waiter| Effect::Ready(waiter, value.clone())));
                entry.slot = Slot::Ready(value);
            }
            Slot::Ready(_) | Slot::Gone(_) => self.effects.push_back(Effect::Drop(value)),
        }
    }

    /// There will be no value: tells those who wait and those who have a fork.
    fn give_up(&mut self, rref: RRefId, error: RRefError) {
        let Some(entry) = self.entries.get_mut(&rref) else { return };
        if let Slot::Missing(waiters) | Slot::Running(waiters) = &mut entry.slot {
            let failed = std::mem::take(waiters).into_iter();
            self.effects.extend(failed.map(|waiter| Effect::Failed(waiter, error)));
            entry.slot = Slot::Gone(error);
        }
    }

    /// Drops what nobody refers to.
    fn sweep(&mut self, rref: RRefId) {
        let Some(Entry { slot, holds: 0, forks: 0 }) = self.entries.get(&rref) else { return };
        match slot {
            Slot::Running(_) => {}
            Slot::Missing(waiters) if !waiters.is_empty() => {}
            Slot::Missing(_) => {
                self.entries.remove(&rref);
            }
            Slot::Ready(_) | Slot::Gone(_) => {
                let entry = self.entries.remove(&rref);
                self.freed.insert(rref);
                if let Some(Entry { slot: Slot::Ready(value), .. }) = entry {
                    self.effects.push_back(Effect::Drop(value));
                }
            }
        }
    }

    /// Sends what is not answered in turn.
    fn answer(&mut self, to: Life, message: RRefMessage) {
        if !self.lost.contains(&to) {
            self.answered.insert(to);
        }
        self.send(to, message);
    }

    fn send(&mut self, to: Life, message: RRefMessage) {
        if !self.lost.contains(&to) {
            self.effects.push_back(Effect::Send(to, message));
        }
    }
}

impl Fork {
    fn accepted(rref: RRefId, holder: Life) -> Self {
        Self { rref, holder, accepted: true, link: None, is_doubtful: false }
    }
}

impl<V, W> Entry<V, W> {
    fn placeholder() -> Self {
        Self { slot: Slot::Missing(Vec::new()), holds: 0, forks: 0 }
    }
}
