//! What workers say to each other about references: the way there, and what comes.

use std::sync::Arc;

use tensorcall_proto::ids::Life;
use tensorcall_proto::rref::{RRefDesc, RRefMessage};
use tensorcall_proto::wire::message::Message;

use super::{Act, State};
use crate::agent::peers::{Peer, Way};
use crate::agent::serve::CallerLink;
use crate::agent::{Inner, LinkEntry};
use crate::transport::{Link, LinkId, Outbound};

impl Inner {
    /// Sends a message about references; false if that life of a worker is not there any more.
    pub(super) fn send_rref(&self, to: Life, message: RRefMessage, via: Option<(Life, &CallerLink)>) -> bool {
        if self.is_closed() {
            // Who leaves says so, and that says it all.
            return true;
        }
        let mut outbound = Outbound::plain(Message::RRef(message));
        if self.fault_line.is_some()
            && let Some(peer) = self.members.get().and_then(|members| members.get(to.rank))
            && peer.life() == to
        {
            match self.hurt(&peer, outbound, 0) {
                Some(unhurt) => outbound = unhurt,
                None => return true,
            }
        }
        if let Some((_, link)) = via.filter(|(life, _)| *life == to) {
            link.handle.send(outbound);
            return true;
        }
        let Some(peer) = self.member(to) else { return self.send_to_stranger(to, message, outbound) };
        let state = peer.state.lock();
        if state.gone.is_some() {
            return false;
        }
        let has_way = !matches!(state.ways[0], Way::None);
        drop(state);
        // A worker that only answers others needs no link of its own.
        let link = if has_way { None } else { self.latest_link_of(to) };
        match link {
            Some(link) => link.send(outbound),
            None => self.post_now(&peer, outbound),
        };
        true
    }

    fn member(&self, life: Life) -> Option<Arc<Peer>> {
        self.members.get()?.get(life.rank).filter(|peer| peer.life() == life)
    }

    /// Sends a message to a worker that calls before it is known to be a member, or keeps it until it is;
    /// false if it will never be.
    fn send_to_stranger(&self, to: Life, message: RRefMessage, outbound: Outbound) -> bool {
        if !self.members.get().is_none_or(|members| members.may_come(to)) {
            return false;
        }
        if let Some(link) = self.latest_link_of(to) {
            link.send(outbound);
            return true;
        }
        let mut state = self.rrefs.state.lock();
        // Under the lock, so that `admitted_rrefs` finds what is left to it.
        let is_member = self.member(to).is_some();
        if !is_member {
            state.early.push((to, message));
        }
        drop(state);
        !is_member || self.send_rref(to, message, None)
    }

    /// The link that a worker calls on, if it does: the youngest, since older ones may be broken.
    fn latest_link_of(&self, life: Life) -> Option<Arc<dyn Link>> {
        let links = self.links.lock();
        let of_life = links.iter().filter_map(|(id, entry)| match entry {
            LinkEntry::Accepted(peer, link) if peer.life() == life => Some((id, link)),
            _ => None,
        });
        of_life.max_by_key(|(id, _)| **id).map(|(_, link)| Arc::clone(link))
    }

    /// The group is known, or a worker has joined it.
    pub(in crate::agent) fn admitted_rrefs(&self) {
        let early = std::mem::take(&mut self.rrefs.state.lock().early);
        self.send_rrefs(early);
    }

    pub(super) fn send_rrefs(&self, messages: Vec<(Life, RRefMessage)>) {
        for (to, message) in messages {
            if !self.send_rref(to, message, None) {
                self.rref_lost(to);
            }
        }
    }

    /// A worker said something about references, over a link that it calls on or over ours.
    pub(in crate::agent) fn rref_message(&self, from: Life, message: RRefMessage, via: Option<&CallerLink>) {
        self.with_rrefs_via(via.map(|link| (from, link)), |state| {
            state.activity += 1;
            if !state.user.handle_message(from, message) {
                state.owner.handle_message(from, message);
            }
        });
        self.became_idle();
    }

    /// These forks are in a request that takes this link of ours. Called with the peer's state locked: so it
    /// is not known yet that the link broke, if it did, and nothing follows now.
    pub(in crate::agent) fn forks_take(&self, link: LinkId, forks: &[RRefDesc]) {
        if !forks.is_empty() {
            self.rrefs.state.lock().sent(link, forks);
        }
    }

    /// These forks are in a reply that takes this link.
    pub(in crate::agent) fn forks_return(&self, link: LinkId, forks: &[RRefDesc]) {
        if !forks.is_empty() {
            self.with_rrefs(|state| state.sent(link, forks));
        }
    }

    /// A link with a worker broke: what was said on it may be lost.
    pub(in crate::agent) fn rref_link_broken(&self, life: Life, link: LinkId) {
        if !self.is_closed() {
            self.with_rrefs(|state| {
                state.user.handle_link_broken(life, link.0);
                state.owner.handle_link_broken(life, link.0);
            });
        }
    }

    /// A worker leaves in good order.
    pub(in crate::agent) fn rref_left(&self, life: Life) {
        self.rrefs.state.lock().note_left(life);
        self.rref_lost(life);
    }

    /// A life of a worker is gone for ever.
    pub(in crate::agent) fn rref_lost(&self, life: Life) {
        self.with_rrefs(|state| {
            state.user.handle_lost(life);
            state.owner.handle_lost(life);
        });
        self.became_idle();
    }
}

impl State {
    fn sent(&mut self, link: LinkId, forks: &[RRefDesc]) {
        for desc in forks {
            self.user.sent(desc.fork, link.0);
            self.owner.sent(desc.fork, link.0);
        }
    }

    /// What is to be sent now. Nobody waits for the rest.
    pub(super) fn sends(&mut self, to: Life, message: RRefMessage) -> Option<Act> {
        self.activity += 1;
        match message {
            RRefMessage::Accept { .. } | RRefMessage::Accepted { .. } | RRefMessage::Deleted { .. } => {
                self.unhurried.push((to, message));
                None
            }
            _ => Some(Act::Send(to, message)),
        }
    }
}
