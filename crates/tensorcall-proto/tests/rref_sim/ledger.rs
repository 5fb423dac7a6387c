//! What an omniscient observer knows of every reference and fork, and the invariants it can check by that.

use std::collections::{BTreeMap, BTreeSet};

use tensorcall_proto::ids::{ForkId, Life, RRefId};

use crate::network::LinkKey;

/// An invariant that does not hold.
#[derive(Debug, Clone)]
pub(crate) struct Violation {
    pub(crate) invariant: &'static str,
    pub(crate) text: String,
}

/// Every reference of a run.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    rrefs: BTreeMap<RRefId, RRef>,
    forks: BTreeMap<ForkId, Fork>,
    dead: BTreeSet<Life>,
    violation: Option<Violation>,
}

#[derive(Debug)]
struct RRef {
    owner: Life,
    /// Whether its value will never be.
    is_never: bool,
    is_made: bool,
    is_dropped: bool,
    /// Handles that the owner itself has.
    holds: usize,
    forks: Vec<ForkId>,
}

#[derive(Debug)]
struct Fork {
    rref: RRefId,
    /// What it was shared from, unless by the owner, or by its creation.
    of: Option<ForkId>,
    holder: Life,
    is_under_way: bool,
    /// The link that its message went on.
    way: Option<(LinkKey, u64)>,
    /// Handles that the holder has.
    held: usize,
    /// Whether the owner has heard of it.
    is_counted: bool,
    /// Whether whoever shared it was told that it did not arrive.
    is_given_up: bool,
}

impl Ledger {
    pub(crate) fn new_rref(&mut self, rref: RRefId, owner: Life) {
        let new =
            RRef { owner, is_never: false, is_made: false, is_dropped: false, holds: 0, forks: Vec::new() };
        self.rrefs.insert(rref, new);
    }

    /// The first fork of a reference whose creator is not its owner.
    pub(crate) fn created(&mut self, rref: RRefId, fork: ForkId, holder: Life) {
        self.add(fork, Fork::new(rref, holder));
        self.hold(fork);
    }

    /// A fork goes into a message.
    pub(crate) fn shared(&mut self, rref: RRefId, fork: ForkId, of: Option<ForkId>, to: Life) {
        let is_counted = of.is_none();
        self.add(fork, Fork { of, is_under_way: true, is_counted, ..Fork::new(rref, to) });
    }

    /// The message with a fork is sent on a link.
    pub(crate) fn sent(&mut self, fork: ForkId, link: LinkKey, generation: u64) {
        if let Some(fork) = self.forks.get_mut(&fork) {
            fork.way = Some((link, generation));
        }
    }

    /// The link that a fork went on.
    pub(crate) fn way_of(&self, fork: ForkId) -> Option<(LinkKey, u64)> {
        self.forks.get(&fork)?.way
    }

    /// The message with a fork is nowhere any more.
    pub(crate) fn landed(&mut self, fork: ForkId) {
        if let Some(fork) = self.forks.get_mut(&fork) {
            fork.is_under_way = false;
        }
    }

    pub(crate) fn hold(&mut self, fork: ForkId) {
        if let Some(fork) = self.forks.get_mut(&fork) {
            fork.held += 1;
        }
    }

    pub(crate) fn release(&mut self, fork: ForkId) {
        if let Some(fork) = self.forks.get_mut(&fork) {
            fork.held -= 1;
        }
    }

    pub(crate) fn owner_holds(&mut self, rref: RRefId) {
        if let Some(rref) = self.rrefs.get_mut(&rref) {
            rref.holds += 1;
        }
    }

    pub(crate) fn owner_releases(&mut self, rref: RRefId) {
        if let Some(rref) = self.rrefs.get_mut(&rref) {
            rref.holds -= 1;
        }
    }

    /// The owner hears of a fork.
    pub(crate) fn counted(&mut self, fork: ForkId) {
        let Some(fork) = self.forks.get_mut(&fork) else { return };
        if self.rrefs.get(&fork.rref).is_some_and(|rref| !rref.is_dropped && !rref.is_never) {
            fork.is_counted = true;
        }
    }

    /// Whoever shared a fork hears that it did not arrive.
    pub(crate) fn given_up(&mut self, fork: ForkId) {
        if let Some(fork) = self.forks.get_mut(&fork) {
            fork.is_given_up = true;
            fork.is_counted &= fork.of.is_some();
        }
    }

    /// A creation will not run.
    pub(crate) fn never(&mut self, rref: RRefId) {
        if let Some(rref) = self.rrefs.get_mut(&rref) {
            rref.is_never = true;
        }
    }

    /// A value is there.
    pub(crate) fn made(&mut self, rref: RRefId) {
        if let Some(rref) = self.rrefs.get_mut(&rref) {
            rref.is_made = true;
        }
    }

    pub(crate) fn died(&mut self, life: Life) {
        self.dead.insert(life);
    }

    /// The owner drops a value: nobody may have it, or be about to.
    pub(crate) fn dropped(&mut self, rref: RRefId) {
        let Some(known) = self.rrefs.get_mut(&rref) else { return };
        known.is_dropped = true;
        let holds = known.holds;
        if holds > 0 {
            self.breaks("early free", || format!("{rref} is dropped while its owner holds it {holds} times"));
        }
        let forks = self.rrefs.get(&rref).map(|known| known.forks.clone()).unwrap_or_default();
        for fork in forks {
            let is_live = self.forks.get(&fork).is_some_and(|known| {
                (known.held > 0 || known.is_under_way) && !self.dead.contains(&known.holder)
            });
            if is_live && !self.is_unprotected(fork) {
                let text = format!("{rref} is dropped while there is {fork}: {:?}", self.forks.get(&fork));
                self.breaks("early free", || text);
            }
        }
    }

    /// A holder is told that there is no value for a fork: there must be a reason.
    pub(crate) fn check_gone(&mut self, fork: ForkId) {
        let Some(known) = self.forks.get(&fork) else { return };
        if !self.is_unprotected(fork) && !self.is_excused(known.rref) {
            let text = format!("{fork} is gone without a reason: {known:?}");
            self.breaks("early free", || text);
        }
    }

    /// An owner is told that there is no value for what it holds itself.
    pub(crate) fn check_own_gone(&mut self, rref: RRefId) {
        if !self.is_excused(rref) {
            self.breaks("early free", || format!("{rref} is gone while its owner holds it"));
        }
    }

    /// A function begins to run with this fork.
    pub(crate) fn check_confirmed(&mut self, fork: ForkId) {
        let Some(known) = self.forks.get(&fork) else { return };
        if !known.is_counted && !known.is_given_up && !self.is_excused(known.rref) {
            let text = format!("a function runs with {fork}: {known:?}");
            self.breaks("confirmed before run", || text);
        }
    }

    pub(crate) fn breaks(&mut self, invariant: &'static str, text: impl FnOnce() -> String) {
        if self.violation.is_none() {
            self.violation = Some(Violation { invariant, text: text() });
        }
    }

    pub(crate) fn violation(&self) -> Option<&Violation> {
        self.violation.as_ref()
    }

    pub(crate) fn len(&self) -> (usize, usize) {
        (self.rrefs.len(), self.forks.len())
    }

    /// Whether there may be no value for other reasons than that nobody wants it.
    fn is_excused(&self, rref: RRefId) -> bool {
        let Some(known) = self.rrefs.get(&rref) else { return true };
        known.is_never
            || self.dead.contains(&known.owner)
            || (!known.is_made && self.dead.contains(&rref.life()))
    }

    /// The documented limit: the owner has not heard of a fork, and whoever vouches for it is dead or was
    /// told that it did not arrive.
    fn is_unprotected(&self, fork: ForkId) -> bool {
        let mut next = Some(fork);
        while let Some(known) = next.and_then(|fork| self.forks.get(&fork)) {
            if known.is_counted {
                return false;
            }
            let voucher = known.of.and_then(|of| self.forks.get(&of));
            if known.is_given_up || voucher.is_some_and(|voucher| self.dead.contains(&voucher.holder)) {
                return true;
            }
            next = known.of;
        }
        false
    }

    fn add(&mut self, id: ForkId, fork: Fork) {
        if let Some(rref) = self.rrefs.get_mut(&fork.rref) {
            rref.forks.push(id);
        }
        self.forks.insert(id, fork);
    }
}

impl Fork {
    fn new(rref: RRefId, holder: Life) -> Self {
        Self {
            rref,
            of: None,
            holder,
            is_under_way: false,
            way: None,
            held: 0,
            is_counted: false,
            is_given_up: false,
        }
    }
}
