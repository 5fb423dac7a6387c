//! The user's half of reference counting.

use std::collections::{HashMap, HashSet, VecDeque};

use super::RRefError;
use super::message::{NewRRef, RRefDesc, RRefMessage};
use super::recent::Recent;
use crate::ids::{ForkId, Life, RRefId};

/// The forks that this worker holds of values that others own, and the children that it shared.
///
/// `W` is what the driver needs to go on when forks are confirmed, [`User::when_confirmed`].
///
/// A fork is *held* from [`User::create`] or [`User::receive`] until [`User::release`]. It stays here until
/// the owner has confirmed it and all its children are accepted, and then it is deleted. A fork id is
/// used once: it never comes back.
#[derive(Debug)]
pub struct User<W> {
    me: Life,
    forks: HashMap<ForkId, Fork>,
    /// Forks that were shared and that stand on one of `forks` until their holder says that the owner
    /// knows them.
    children: HashMap<ForkId, Child>,
    /// Forks whose parents have been told that the owner knows them, and have not answered.
    accepting: HashMap<ForkId, Life>,
    /// Forks whose owners have been told that they came from them, and have not answered.
    arrived: HashMap<ForkId, (RRefId, Life)>,
    /// Forks that the owner has been told of deleting, and has not answered.
    deleting: HashMap<ForkId, Life>,
    waits: HashMap<u64, Waiting<W>>,
    next_wait: u64,
    /// Forks that were here once.
    ended: Recent<ForkId>,
    lost: Recent<Life>,
    /// Links that broke: a message may be given to one that did just now.
    broken: Recent<u64>,
    /// Who ever got an answer.
    answered: HashSet<Life>,
    effects: VecDeque<Effect<W>>,
    /// Messages to this worker itself.
    to_self: VecDeque<RRefMessage>,
}

/// What the driver is to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect<W> {
    /// Send this to that life of a worker. If it cannot be sent, the life is lost, or its link broke.
    Send(Life, RRefMessage),
    /// All forks that this waited for are confirmed.
    Confirmed(W),
    /// This fork, which this waited for, is of no use; the others may be.
    Unconfirmed(W, ForkId, RRefError),
}

/// What the arrival of a fork came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Received {
    /// It is held. Perhaps it is of no use, see [`User::standing`].
    New,
    /// It was held, and is now held once more.
    Again,
    /// It was here before and has been given back. It is not held.
    Ended,
}

/// How a fork stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Standing {
    /// The reference.
    pub rref: RRefId,
    /// Who has the value.
    pub owner: Life,
    /// Whether the owner has confirmed the fork.
    pub confirmed: bool,
    /// Why it is of no use, if it is not.
    pub error: Option<RRefError>,
}

/// How much a user has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct UserCounts {
    /// Forks that are here, released or not.
    pub users: usize,
    /// Those among them that the owner has not confirmed and may yet: not those whose creation failed.
    pub pending_users: usize,
    /// Forks that were shared and are not accepted.
    pub pending_children: usize,
    /// Messages that are not answered, waits for [`RRefMessage::Accept`] included. What a wave counts
    /// (TERM-1), together with [`OwnerCounts::unacknowledged`](super::OwnerCounts::unacknowledged).
    pub unacknowledged: usize,
}

#[derive(Debug)]
struct Fork {
    rref: RRefId,
    owner: Life,
    /// How often it is held.
    holds: usize,
    stage: Stage,
    error: Option<RRefError>,
    /// Whom to tell when the owner knows it.
    parent: Option<Life>,
    children: usize,
    waits: Vec<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// The call that creates it is not answered.
    Creating,
    /// The owner has been told of it and has not answered.
    Asking,
    Confirmed,
    /// The owner knows nothing of it and need not be told of its end.
    Unfounded,
}

#[derive(Debug, Clone, Copy)]
struct Child {
    of: ForkId,
    to: Life,
    /// The link that its message was given to.
    link: Option<u64>,
    /// Whether that link broke.
    is_doubtful: bool,
}

#[derive(Debug)]
struct Waiting<W> {
    token: W,
    missing: usize,
}

impl<W> User<W> {
    /// Holds nothing yet.
    pub fn new(me: Life) -> Self {
        Self {
            me,
            forks: HashMap::new(),
            children: HashMap::new(),
            accepting: HashMap::new(),
            arrived: HashMap::new(),
            deleting: HashMap::new(),
            waits: HashMap::new(),
            next_wait: 0,
            ended: Recent::new(),
            lost: Recent::new(),
            broken: Recent::new(),
            answered: HashSet::new(),
            effects: VecDeque::new(),
            to_self: VecDeque::new(),
        }
    }

    /// This worker is about to ask `owner` to create a value, and holds the first fork of it.
    pub fn create(&mut self, new: NewRRef, owner: Life) {
        self.forks.entry(new.fork).or_insert(Fork::new(new.rref, owner, Stage::Creating));
    }

    /// The creating call was answered, in time or late: the owner counts the fork, whether the function
    /// returned or raised.
    pub fn creation_done(&mut self, fork: ForkId, owner: Life) {
        if self.forks.contains_key(&fork) {
            self.confirm(fork, owner);
        } else {
            // Given up and deleted, perhaps before the owner had heard of it.
            self.delete_again(fork, owner);
        }
    }

    /// The creating call failed: the owner may know the fork or not, and this worker neither fetches nor
    /// shares it any more. [`User::creation_done`] may follow.
    pub fn creation_failed(&mut self, fork: ForkId) {
        if let Some(known) = self.forks.get_mut(&fork)
            && known.stage == Stage::Creating
        {
            self.fail(fork, RRefError::CreationFailed);
            self.sweep(fork);
        }
    }

    /// A reference arrives in a message of `from`, owned by a third worker or by `from`, and is held.
    ///
    /// What this worker owns itself is for [`Owner::received_back`](super::Owner::received_back).
    pub fn receive(&mut self, desc: RRefDesc, from: Life) -> Received {
        let RRefDesc { rref, owner, fork } = desc;
        if let Some(known) = self.forks.get_mut(&fork) {
            known.holds += 1;
            return Received::Again;
        }
        if self.deleting.contains_key(&fork) || self.ended.contains(&fork) {
            return Received::Ended;
        }
        let mut held = Fork::new(rref, owner, Stage::Asking);
        held.parent = Some(from);
        if from == owner {
            // It counts already; all the same the owner is to know that it arrived.
            held.stage = Stage::Confirmed;
            held.parent = None;
        }
        self.forks.insert(fork, held);
        if self.lost.contains(&owner) {
            self.lose_owner(fork);
        } else {
            if from == owner {
                self.arrived.insert(fork, (rref, owner));
            }
            self.send(owner, RRefMessage::Fork { rref, fork });
        }
        Received::New
    }

    /// This worker shares the fork `of`, which it holds, with `to`, in a message that is about to be sent.
    ///
    /// # Errors
    ///
    /// Says why it cannot.
    pub fn fork_out(&mut self, of: ForkId, fork: ForkId, to: Life) -> Result<RRefDesc, RRefError> {
        let Some(known) = self.forks.get_mut(&of).filter(|known| known.holds > 0) else {
            return Err(RRefError::Deleted);
        };
        if let Some(error) = known.error {
            return Err(error);
        }
        let desc = RRefDesc { rref: known.rref, owner: known.owner, fork };
        let child = Child { of, to, link: None, is_doubtful: false };
        if !self.lost.contains(&to) && self.children.insert(fork, child).is_none() {
            known.children += 1;
        }
        Ok(desc)
    }

    /// The message with a fork that was shared goes on this link, which has a number of its own for ever. May be
    /// told before or after, and though the link has broken meanwhile.
    pub fn sent(&mut self, fork: ForkId, link: u64) {
        let Some(child) = self.children.get_mut(&fork) else { return };
        child.link = Some(link);
        if self.broken.contains(&link) {
            child.is_doubtful = true;
            let to = child.to;
            self.send(to, RRefMessage::Rescind { fork });
        }
    }

    /// The message with this fork was given to no link: one that was shared, or one that was to be created.
    pub fn unsent(&mut self, fork: ForkId) {
        self.drop_child(fork);
        if let Some(known) = self.forks.get_mut(&fork)
            && known.stage == Stage::Creating
        {
            known.stage = Stage::Unfounded;
            self.fail(fork, RRefError::CreationFailed);
            self.sweep(fork);
        }
    }

    /// This worker holds a fork once less. May be called at any time, and for a fork that is not here.
    pub fn release(&mut self, fork: ForkId) {
        if let Some(known) = self.forks.get_mut(&fork) {
            known.holds = known.holds.saturating_sub(1);
            self.sweep(fork);
        }
    }

    /// This worker holds nothing any more, whatever handles there are. Forks go as they are confirmed.
    pub fn delete_all(&mut self) {
        for fork in self.sorted(|_| true) {
            if let Some(known) = self.forks.get_mut(&fork) {
                known.holds = 0;
                self.sweep(fork);
            }
        }
    }

    /// Gives `waiter` back if all of these forks are confirmed; else [`Effect::Confirmed`] or
    /// [`Effect::Unconfirmed`] will come, once.
    pub fn when_confirmed(&mut self, forks: &[ForkId], waiter: W) -> Option<W> {
        for &fork in forks {
            let known = self.forks.get(&fork);
            if let Some(error) = known.map_or(Some(RRefError::Deleted), |known| known.error) {
                self.effects.push_back(Effect::Unconfirmed(waiter, fork, error));
                return None;
            }
        }
        let mut missing = 0;
        for fork in forks {
            if let Some(known) = self.forks.get_mut(fork)
                && known.stage != Stage::Confirmed
            {
                known.waits.push(self.next_wait);
                missing += 1;
            }
        }
        if missing == 0 {
            return Some(waiter);
        }
        self.waits.insert(self.next_wait, Waiting { token: waiter, missing });
        self.next_wait += 1;
        None
    }

    /// A worker said something. Whether that was all; else the [`Owner`](super::Owner) is to be told too.
    pub fn handle_message(&mut self, from: Life, message: RRefMessage) -> bool {
        match message {
            RRefMessage::Known { fork, alive } => self.handle_known(from, fork, alive),
            RRefMessage::Deleted { fork } => {
                if self.deleting.get(&fork) == Some(&from) {
                    self.deleting.remove(&fork);
                }
            }
            RRefMessage::Rescind { fork } => self.handle_rescind(from, fork),
            RRefMessage::Accept { fork } => {
                self.drop_child_of(fork, from);
                self.answer(from, RRefMessage::Accepted { fork });
            }
            RRefMessage::Unknown { fork } => return self.drop_child_of(fork, from),
            RRefMessage::Accepted { fork } => {
                let is_here = self.accepting.get(&fork) == Some(&from);
                if is_here {
                    self.accepting.remove(&fork);
                }
                return is_here;
            }
            RRefMessage::AskAgain => {
                self.ask_again(from);
                return false;
            }
            RRefMessage::Fork { .. } | RRefMessage::Delete { .. } => return false,
        }
        true
    }

    /// A life of a worker is lost for ever: what it owned is gone, what it shared needs no thanks, and what
    /// was shared with it is dropped.
    pub fn handle_lost(&mut self, life: Life) {
        self.lost.insert(life);
        self.answered.remove(&life);
        self.accepting.retain(|_, parent| *parent != life);
        self.arrived.retain(|_, (_, owner)| *owner != life);
        self.deleting.retain(|_, owner| *owner != life);
        for child in self.children_of(life) {
            self.drop_child(child);
        }
        for known in self.forks.values_mut().filter(|known| known.parent == Some(life)) {
            known.parent = None;
        }
        for fork in self.sorted(|known| known.owner == life) {
            self.lose_owner(fork);
        }
    }

    /// A link with a life of a worker broke: what was sent on it may be lost.
    ///
    /// Says again what is not answered, and asks for the children that went on that link. To be called at both
    /// ends, after all that was read from the link has been handled, and when the worker can be sent to
    /// again.
    pub fn handle_link_broken(&mut self, life: Life, link: u64) {
        self.broken.insert(link);
        for child in self.children.values_mut() {
            child.is_doubtful |= child.to == life && child.link == Some(link);
        }
        if self.answered.contains(&life) {
            self.send(life, RRefMessage::AskAgain);
        }
        self.ask_again(life);
    }

    /// What the driver is to do next.
    pub fn poll_effect(&mut self) -> Option<Effect<W>> {
        while let Some(message) = self.to_self.pop_front() {
            self.handle_message(self.me, message);
        }
        self.effects.pop_front()
    }

    /// How a fork stands; `None` if it is not here (any more).
    pub fn standing(&self, fork: ForkId) -> Option<Standing> {
        self.forks.get(&fork).map(|known| Standing {
            rref: known.rref,
            owner: known.owner,
            confirmed: known.stage == Stage::Confirmed,
            error: known.error.or((known.holds == 0).then_some(RRefError::Deleted)),
        })
    }

    /// How much there is.
    pub fn counts(&self) -> UserCounts {
        let asking = self.forks.values().filter(|known| known.stage == Stage::Asking).count();
        let creating = |known: &&Fork| known.stage == Stage::Creating && known.error.is_none();
        UserCounts {
            users: self.forks.len(),
            pending_users: asking + self.forks.values().filter(creating).count(),
            pending_children: self.children.len(),
            unacknowledged: asking
                + self.children.len()
                + self.accepting.len()
                + self.arrived.len()
                + self.deleting.len(),
        }
    }

    /// The forks that are here, in no order: what a leak report tells.
    pub fn forks(&self) -> impl Iterator<Item = (RRefId, ForkId, Life)> + '_ {
        self.forks.iter().map(|(&fork, known)| (known.rref, fork, known.owner))
    }

    fn ask_again(&mut self, life: Life) {
        for fork in self.sorted(|known| known.owner == life && known.stage == Stage::Asking) {
            if let Some(&Fork { rref, .. }) = self.forks.get(&fork) {
                self.send(life, RRefMessage::Fork { rref, fork });
            }
        }
        let arrived = self.arrived.iter().filter(|&(_, &(_, owner))| owner == life);
        let arrived = arrived.map(|(&fork, &(rref, _))| RRefMessage::Fork { rref, fork });
        let accepting = self.accepting.iter().filter(|&(_, parent)| *parent == life);
        let accepting = accepting.map(|(&fork, _)| RRefMessage::Accept { fork });
        let deleting = self.deleting.iter().filter(|&(_, owner)| *owner == life);
        let deleting = deleting.map(|(&fork, _)| RRefMessage::Delete { fork });
        let mut again: Vec<RRefMessage> = arrived.chain(accepting).chain(deleting).collect();
        again.sort_unstable();
        for message in again {
            self.send(life, message);
        }
        for fork in self.children_of(life) {
            if self.children.get(&fork).is_some_and(|child| child.is_doubtful) {
                self.send(life, RRefMessage::Rescind { fork });
            }
        }
    }

    fn handle_known(&mut self, from: Life, fork: ForkId, alive: bool) {
        if self.arrived.get(&fork).is_some_and(|&(_, owner)| owner == from) {
            self.arrived.remove(&fork);
        }
        let Some(known) = self.forks.get_mut(&fork) else {
            // The owner counts a fork that is no more: a message that was late or said twice. Even while a
            // delete is under way, it may be older than the count.
            if alive {
                self.delete_again(fork, from);
            }
            return;
        };
        if known.owner != from {
            return;
        }
        if alive {
            self.confirm(fork, from);
            self.sweep(fork);
        } else {
            known.stage = Stage::Unfounded;
            self.fail(fork, RRefError::Freed);
            self.accept(fork);
            self.sweep(fork);
        }
    }

    fn handle_rescind(&mut self, from: Life, fork: ForkId) {
        match self.forks.get_mut(&fork) {
            Some(known) if known.stage == Stage::Asking => known.parent = Some(from),
            Some(&mut Fork { rref, owner, .. }) if owner == from => {
                self.arrived.insert(fork, (rref, owner));
                self.send(from, RRefMessage::Fork { rref, fork });
            }
            Some(_) => self.thank(fork, from),
            // Never came, or was given back, which the owner knows. If it comes late, the owner is asked.
            None => self.answer(from, RRefMessage::Unknown { fork }),
        }
    }

    fn confirm(&mut self, fork: ForkId, owner: Life) {
        let Some(known) = self.forks.get_mut(&fork).filter(|known| known.owner == owner) else { return };
        if known.stage != Stage::Confirmed {
            known.stage = Stage::Confirmed;
            for wait in std::mem::take(&mut known.waits) {
                self.fulfil(wait);
            }
            self.accept(fork);
            self.sweep(fork);
        }
    }

    /// Tells the parent, if there is one to tell, that it need not stand by any longer.
    fn accept(&mut self, fork: ForkId) {
        if let Some(known) = self.forks.get_mut(&fork)
            && let Some(parent) = known.parent.take()
        {
            self.thank(fork, parent);
        }
    }

    fn thank(&mut self, fork: ForkId, parent: Life) {
        if parent != self.me && !self.lost.contains(&parent) {
            self.accepting.insert(fork, parent);
        }
        self.send(parent, RRefMessage::Accept { fork });
    }

    fn lose_owner(&mut self, fork: ForkId) {
        if let Some(known) = self.forks.get_mut(&fork) {
            known.stage = Stage::Unfounded;
            let owner = known.owner;
            self.fail(fork, RRefError::OwnerLost(owner));
            self.accept(fork);
            self.sweep(fork);
        }
    }

    fn fail(&mut self, fork: ForkId, error: RRefError) {
        let Some(known) = self.forks.get_mut(&fork) else { return };
        known.error.get_or_insert(error);
        for wait in std::mem::take(&mut known.waits) {
            if let Some(Waiting { token, .. }) = self.waits.remove(&wait) {
                self.effects.push_back(Effect::Unconfirmed(token, fork, error));
            }
        }
    }

    fn fulfil(&mut self, wait: u64) {
        let Some(waiting) = self.waits.get_mut(&wait) else { return };
        waiting.missing -= 1;
        if waiting.missing == 0
            && let Some(Waiting { token, .. }) = self.waits.remove(&wait)
        {
            self.effects.push_back(Effect::Confirmed(token));
        }
    }

    /// Whether there is such a child.
    fn drop_child_of(&mut self, fork: ForkId, holder: Life) -> bool {
        match self.children.get(&fork) {
            Some(child) if child.to == holder => self.drop_child(fork),
            Some(_) => {}
            None => return false,
        }
        true
    }

    fn drop_child(&mut self, child: ForkId) {
        let Some(Child { of, .. }) = self.children.remove(&child) else { return };
        if let Some(known) = self.forks.get_mut(&of) {
            known.children -= 1;
            self.sweep(of);
        }
    }

    /// Ends a fork that is not held, if the owner knows it and all its children (RREF-1).
    fn sweep(&mut self, fork: ForkId) {
        let Some(&Fork { owner, holds: 0, children: 0, stage, error, .. }) = self.forks.get(&fork) else {
            return;
        };
        let is_over = match stage {
            // What came from the owner is deleted when that knows that it arrived, lest one overtake the other.
            Stage::Confirmed => !self.arrived.contains_key(&fork),
            Stage::Unfounded => true,
            // Given up: the answer may never come.
            Stage::Creating => error.is_some(),
            Stage::Asking => false,
        };
        if !is_over {
            return;
        }
        self.forks.remove(&fork);
        self.ended.insert(fork);
        if stage != Stage::Unfounded {
            self.delete(fork, owner);
        }
    }

    fn delete(&mut self, fork: ForkId, owner: Life) {
        if !self.lost.contains(&owner) {
            self.deleting.insert(fork, owner);
            self.send(owner, RRefMessage::Delete { fork });
        }
    }

    /// Answers a count of a fork that is no more. An answer to an earlier delete may be taken for one to this,
    /// so whether it arrives is not known.
    fn delete_again(&mut self, fork: ForkId, owner: Life) {
        self.delete(fork, owner);
        if !self.lost.contains(&owner) {
            self.answered.insert(owner);
        }
    }

    fn children_of(&self, life: Life) -> Vec<ForkId> {
        let shared = self.children.iter().filter(|(_, child)| child.to == life);
        let mut forks: Vec<ForkId> = shared.map(|(&fork, _)| fork).collect();
        forks.sort_unstable();
        forks
    }

    fn sorted(&self, which: impl Fn(&Fork) -> bool) -> Vec<ForkId> {
        let picked = self.forks.iter().filter(|&(_, known)| which(known));
        let mut forks: Vec<ForkId> = picked.map(|(&fork, _)| fork).collect();
        forks.sort_unstable();
        forks
    }

    /// Sends what is not answered in turn.
    fn answer(&mut self, to: Life, message: RRefMessage) {
        if to != self.me && !self.lost.contains(&to) {
            self.answered.insert(to);
        }
        self.send(to, message);
    }

    fn send(&mut self, to: Life, message: RRefMessage) {
        if to == self.me {
            self.to_self.push_back(message);
        } else if !self.lost.contains(&to) {
            self.effects.push_back(Effect::Send(to, message));
        }
    }
}

impl Fork {
    fn new(rref: RRefId, owner: Life, stage: Stage) -> Self {
        Self { rref, owner, holds: 1, stage, error: None, parent: None, children: 0, waits: Vec::new() }
    }
}
