//! Lists of operations for state machines: any bytes are a list. Used by the tests of `tensorcall-proto`
//! as well, so it uses nothing but that crate.

use std::collections::BTreeSet;

use tensorcall_proto::ids::{ForkId, Incarnation, Life, RRefId, Rank};
use tensorcall_proto::rref::{
    Created, Found, NewRRef, Owner, OwnerCounts, OwnerEffect, RRefDesc, RRefMessage, Received, User,
    UserCounts, UserEffect,
};

/// An owner and two users share references, lose links and each other. Each byte is an operation and what it
/// is about. A value goes when nobody has it, and not before; in the end nothing is left.
pub fn rref(data: &[u8]) {
    let mut bench = Bench::new();
    for &byte in data.iter().take(MOST_OPERATIONS) {
        bench.operate(byte >> 5, usize::from(byte & 31));
    }
    bench.end();
}

/// Longer lists find nothing that shorter ones do not.
const MOST_OPERATIONS: usize = 400;

/// Worker 0 owns all values; all three may hold references.
struct Bench {
    owner: Owner<RRefId, u8>,
    users: [User<u8>; 3],
    wire: Vec<Parcel>,
    /// The model: who has a handle of what.
    handles: Vec<Handle>,
    made: BTreeSet<RRefId>,
    dropped: BTreeSet<RRefId>,
    lost: [bool; 3],
    /// Numbers the link between two workers, whichever of them there is now.
    links: [u64; 9],
    ids: u64,
}

#[derive(Clone, Copy)]
struct Parcel {
    from: usize,
    to: usize,
    body: Body,
}

#[derive(Clone, Copy)]
enum Body {
    Create(NewRRef),
    Created(NewRRef, bool),
    Share(RRefDesc),
    Said(RRefMessage),
}

#[derive(Clone, Copy)]
struct Handle {
    worker: usize,
    rref: RRefId,
    /// `None` at the owner.
    fork: Option<ForkId>,
}

impl Bench {
    fn new() -> Self {
        Self {
            owner: Owner::new(life(0)),
            users: [0, 1, 2].map(|worker| User::new(life(worker))),
            wire: Vec::new(),
            handles: Vec::new(),
            made: BTreeSet::new(),
            dropped: BTreeSet::new(),
            lost: [false; 3],
            links: [0; 9],
            ids: 0,
        }
    }

    fn operate(&mut self, operation: u8, about: usize) {
        match operation {
            0 => self.create(about),
            1 => self.share(about),
            2 => self.release(about),
            3 | 4 if about < self.wire.len() => {
                let parcel = self.wire.swap_remove(about);
                self.deliver(parcel);
            }
            5 => {
                if let Some(&parcel) = self.wire.get(about)
                    && matches!(parcel.body, Body::Said(_))
                {
                    self.deliver(parcel);
                }
            }
            6 => self.break_link(about % 3, about / 3 % 3),
            7 => self.misfortune(about),
            _ => {}
        }
        self.settle();
    }

    fn create(&mut self, about: usize) {
        let worker = about % 3;
        let rref = RRefId::new(life(worker), self.next_id());
        if self.lost[worker] {
            return;
        }
        if worker == 0 {
            self.owner.create_local(rref, rref);
            self.made.insert(rref);
            return self.handles.push(Handle { worker, rref, fork: None });
        }
        let new = NewRRef { rref, fork: ForkId::new(life(worker), self.next_id()) };
        self.users[worker].create(new, life(0));
        self.handles.push(Handle { worker, rref, fork: Some(new.fork) });
        self.send(worker, 0, Body::Create(new));
    }

    /// Shares one handle with another worker, or with the same.
    fn share(&mut self, about: usize) {
        let Some(&Handle { worker, rref, fork }) = self.handles.get(about / 3) else { return };
        let to = about % 3;
        let new = ForkId::new(life(worker), self.next_id());
        let shared = match fork {
            Some(fork) => self.users[worker].fork_out(fork, new, life(to)),
            None => self.owner.fork_out(rref, new, life(to)),
        };
        if let Ok(desc) = shared {
            let link = self.link(worker, to);
            self.users[worker].sent(new, link);
            self.owner.sent(new, link);
            self.send(worker, to, Body::Share(desc));
        }
    }

    fn release(&mut self, about: usize) {
        if about < self.handles.len() {
            let handle = self.handles.swap_remove(about);
            match handle.fork {
                Some(fork) => self.users[handle.worker].release(fork),
                None => self.owner.release(handle.rref),
            }
        }
    }

    /// A creation is given up by its caller, or, seldom, a user is lost.
    fn misfortune(&mut self, about: usize) {
        if about == 31 {
            return self.lose(1 + self.handles.len() % 2);
        }
        if let Some(&Handle { worker, fork: Some(fork), .. }) = self.handles.get(about) {
            self.users[worker].creation_failed(fork);
        }
    }

    fn deliver(&mut self, Parcel { from, to, body }: Parcel) {
        match body {
            Body::Create(new) => {
                let created = self.owner.create(new.rref, new.fork, life(from));
                if created == Created::New {
                    self.made.insert(new.rref);
                    self.owner.resolve(new.rref, new.rref);
                }
                self.send(0, from, Body::Created(new, created == Created::New));
            }
            Body::Created(new, true) => self.users[to].creation_done(new.fork, life(0)),
            Body::Created(new, false) => self.users[to].creation_failed(new.fork),
            Body::Share(desc) if to == 0 => {
                if !matches!(self.owner.received_back(desc, life(from)), Found::Gone(_)) {
                    self.handles.push(Handle { worker: 0, rref: desc.rref, fork: None });
                }
            }
            Body::Share(desc) => {
                assert_eq!(self.users[to].receive(desc, life(from)), Received::New);
                self.handles.push(Handle { worker: to, rref: desc.rref, fork: Some(desc.fork) });
            }
            Body::Said(message) => {
                if !self.users[to].handle_message(life(from), message) && to == 0 {
                    self.owner.handle_message(life(from), message);
                }
            }
        }
    }

    /// All that is under way between two workers is lost, and both notice at once.
    fn break_link(&mut self, one: usize, other: usize) {
        if one == other || self.lost[one] || self.lost[other] {
            return;
        }
        let (lost, kept) = std::mem::take(&mut self.wire).into_iter().partition(|parcel: &Parcel| {
            (parcel.from, parcel.to) == (one, other) || (parcel.from, parcel.to) == (other, one)
        });
        self.wire = kept;
        for parcel in lost {
            match parcel.body {
                Body::Create(new) => self.users[parcel.from].creation_failed(new.fork),
                Body::Created(new, _) => self.users[parcel.to].creation_failed(new.fork),
                Body::Share(_) | Body::Said(_) => {}
            }
        }
        let link = self.link(one, other);
        for (at, peer) in [(one, other), (other, one)] {
            self.users[at].handle_link_broken(life(peer), link);
            if at == 0 {
                self.owner.handle_link_broken(life(peer), link);
            }
        }
        self.links[3 * one.min(other) + one.max(other)] += 1;
    }

    fn lose(&mut self, worker: usize) {
        self.lost[worker] = true;
        self.wire.retain(|parcel| parcel.from != worker && parcel.to != worker);
        self.handles.retain(|handle| handle.worker != worker);
        for user in &mut self.users {
            user.handle_lost(life(worker));
        }
        self.owner.handle_lost(life(worker));
    }

    fn settle(&mut self) {
        while let Some(effect) = self.owner.poll_effect() {
            match effect {
                OwnerEffect::Send(to, message) => self.send(0, index(to), Body::Said(message)),
                OwnerEffect::Drop(rref) => {
                    assert!(self.dropped.insert(rref), "{rref} is dropped again");
                    // A lost worker vouches for nobody: the documented limit.
                    assert!(
                        self.lost.contains(&true) || !self.is_wanted(rref),
                        "{rref} is dropped too early"
                    );
                }
                OwnerEffect::Ready(..) | OwnerEffect::Failed(..) => {}
            }
        }
        for from in 0..3 {
            while let Some(effect) = self.users[from].poll_effect() {
                if let UserEffect::Send(to, message) = effect
                    && !self.lost[from]
                {
                    self.send(from, index(to), Body::Said(message));
                }
            }
        }
    }

    /// The model: a value is wanted while somebody has a handle, or is about to.
    fn is_wanted(&self, rref: RRefId) -> bool {
        let is_coming = |parcel: &Parcel| matches!(parcel.body, Body::Share(desc) if desc.rref == rref);
        self.handles.iter().any(|handle| handle.rref == rref) || self.wire.iter().any(is_coming)
    }

    /// Everything arrives, everybody drops what they have, and that arrives too.
    fn end(mut self) {
        while !(self.wire.is_empty() && self.handles.is_empty()) {
            self.release(0);
            self.settle();
            if let Some(parcel) = self.wire.pop() {
                self.deliver(parcel);
            }
            self.settle();
        }
        assert_eq!(self.owner.counts(), OwnerCounts::default());
        for (user, _) in self.users.iter().zip(self.lost).filter(|(_, is_lost)| !is_lost) {
            assert_eq!(user.counts(), UserCounts::default());
        }
        assert_eq!(self.made, self.dropped);
    }

    fn send(&mut self, from: usize, to: usize, body: Body) {
        if !self.lost[to] {
            self.wire.push(Parcel { from, to, body });
        }
    }

    fn link(&self, one: usize, other: usize) -> u64 {
        let pair = 3 * one.min(other) + one.max(other);
        pair as u64 + 100 * self.links[pair]
    }

    fn next_id(&mut self) -> u64 {
        self.ids += 1;
        self.ids
    }
}

fn life(worker: usize) -> Life {
    let rank = u32::try_from(worker).ok().and_then(Rank::new).expect("a small rank");
    Life { rank, incarnation: Incarnation::new(1) }
}

fn index(life: Life) -> usize {
    usize::from(life.rank.get())
}
