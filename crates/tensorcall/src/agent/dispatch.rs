//! From what a transport reports to what happens. Runs on the transport's thread: nothing here waits.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use tensorcall_proto::ids::{Identity, Life, MessageId, Rank};
use tensorcall_proto::wire::message::{Message, Phase};

use super::burst::Burst;
use super::peers::{Gone, Peer, PeerState, Ticket, Way};
use super::serve::CallerLink;
use super::{Inner, LinkEntry};
use crate::body::Received;
use crate::clock::now;
use crate::error::Error;
use crate::transport::{Closed, Events, Inbound, Link, LinkId, Outbound};

impl Events for Inner {
    fn next_link(&self) -> LinkId {
        LinkId(self.next_link.fetch_add(1, Ordering::Relaxed))
    }

    fn accepted(&self, link: LinkId, peer: Identity, handle: Arc<dyn Link>) {
        // Before the group is known, whoever proved to be of the job may wait for it.
        if self.members.get().is_some_and(|members| !members.may_call(&peer)) {
            tracing::warn!(%peer, "connection refused: not a worker of this group, or of an earlier life");
            return handle.close(now());
        }
        self.links.lock().insert(link, LinkEntry::Accepted(peer, handle));
    }

    fn opened(&self, link: LinkId) {
        tracing::debug!(link = link.0, "link open");
    }

    fn received(&self, link: LinkId, messages: &mut Vec<Inbound>) {
        let Some(entry) = self.links.lock().get(&link).cloned() else { return messages.clear() };
        let mut burst = Burst::default();
        match entry {
            LinkEntry::Outgoing(peer) => {
                for (message, body) in messages.drain(..).map(|message| self.open_up(peer.life(), message)) {
                    if let Message::Reply(reply) = message {
                        burst.replies.push((reply, body));
                    } else {
                        self.finish_burst(&mut burst, Some(&peer));
                        self.received_answer(&peer, message);
                    }
                }
                self.finish_burst(&mut burst, Some(&peer));
            }
            LinkEntry::Accepted(peer, handle) => {
                let link = CallerLink { id: link, handle };
                for (message, body) in messages.drain(..).map(|message| self.open_up(peer.life(), message)) {
                    if let Message::Call(call) = message {
                        self.admit(&peer, &link, call, body, &mut burst);
                    } else {
                        self.finish_burst(&mut burst, None);
                        self.received_request(&peer, &link, message);
                    }
                }
                self.finish_burst(&mut burst, None);
            }
        }
    }

    fn sent(&self, link: LinkId, id: MessageId) {
        let entry = self.links.lock().get(&link).cloned();
        if let Some(LinkEntry::Outgoing(peer)) = entry {
            peer.state.lock().calls.set_phase(id, Phase::Sent);
        }
    }

    fn closed(&self, link: LinkId, why: Closed) {
        let entry = self.links.lock().remove(&link);
        match entry {
            Some(LinkEntry::Outgoing(peer)) => self.way_closed(&peer, link, why),
            Some(LinkEntry::Accepted(identity, _)) => {
                self.drop_fetches_on(link);
                self.rref_link_broken(identity.life(), link);
                match self.peer_in_life(&identity) {
                    // The process may be dead, or only this connection: finding a way to it tells.
                    Some(peer) if !self.is_closed() => self.reach(&peer),
                    Some(_) => {}
                    // It never became a member, or another life has taken its place.
                    None => self.drop_requests_of(&identity),
                }
            }
            None => {}
        }
    }

    fn tick(&self, now: Instant) {
        for peer in self.peers() {
            self.tick_peer(&peer, now);
        }
        if let Some(again) = self.pool.tick(now) {
            self.schedule(again);
        }
        self.tick_faults(now);
        self.tick_requests(now);
        self.tick_rrefs(now);
        self.tick_passes(now);
        self.tick_group(now);
    }
}

impl Inner {
    /// The peer with this identity, if it is that life of it (LIFE-1).
    pub(super) fn peer_in_life(&self, identity: &Identity) -> Option<Arc<Peer>> {
        let peer = self.members.get()?.get(identity.rank)?;
        (peer.info.identity == *identity).then_some(peer)
    }

    /// What a message says and brings.
    fn open_up(&self, from: Life, message: Inbound) -> (Message, Received) {
        let Inbound { message, mut body, rrefs } = message;
        if !rrefs.is_empty() {
            // Whatever becomes of the message, these are references of this worker from now on.
            body.rrefs = self.receive_rrefs(from, rrefs);
        }
        (message, body)
    }

    /// A message on a link that we call on, and no reply.
    fn received_answer(&self, peer: &Arc<Peer>, message: Message) {
        match message {
            Message::Progress { id, phase } => peer.state.lock().calls.set_phase(id, phase),
            Message::Termination(message) => self.group_message(&peer.info.identity, message),
            Message::RRef(message) => self.rref_message(peer.life(), message, None),
            Message::Goodbye { .. } => self.peer_left(peer, true),
            Message::Reply(_) => {}
            Message::Call(_) | Message::Cancel { .. } | Message::Blocks(_) => {
                tracing::warn!(peer = %peer.info.identity, kind = "request", "request on a link of ours ignored");
            }
        }
    }

    /// A message on a link that a peer calls on, and no call.
    fn received_request(&self, peer: &Identity, link: &CallerLink, message: Message) {
        match message {
            Message::Cancel { id } => self.cancel_request(peer, &*link.handle, id),
            Message::Termination(message) => self.group_message(peer, message),
            Message::RRef(message) => self.rref_message(peer.life(), message, Some(link)),
            Message::Goodbye { .. } => {
                if let Some(peer) = self.peer_in_life(peer) {
                    self.peer_left(&peer, false);
                }
            }
            Message::Call(_) => {}
            Message::Reply(_) | Message::Progress { .. } | Message::Blocks(_) => {
                tracing::warn!(%peer, kind = "answer", "answer on a link of a peer ignored");
            }
        }
    }

    /// Our link to a peer is gone: its calls fail, and another try tells whether the peer is lost.
    fn way_closed(&self, peer: &Arc<Peer>, link: LinkId, why: Closed) {
        let mut state = peer.state.lock();
        if !state.drop_way(link) {
            return;
        }
        let gone = state.gone.clone().unwrap_or(Gone::Lost(why.reason));
        let failed = self.take_all(&mut state);
        let lost = state.gone.is_none() && !why.was_open && !self.is_closed();
        if lost {
            state.gone = Some(gone.clone());
        }
        let known = state.gone.is_some();
        drop(state);
        // Those that went by another link may wait there for a value that this one was to bring.
        let waiting = failed.iter().filter(|(_, ticket, _)| ticket.fetches).map(|(id, ..)| *id);
        let waiting: Vec<_> = if known { Vec::new() } else { waiting.collect() };
        self.fail(peer, failed, &gone);
        if lost {
            tracing::info!(peer = %peer.info.identity, ?gone, "peer lost");
            self.peer_gone(peer, false);
        } else if !known && !self.is_closed() {
            self.rref_link_broken(peer.life(), link);
            self.reach_again(peer);
            for id in waiting {
                self.post(peer, Outbound::plain(Message::Cancel { id }));
            }
        }
        self.became_idle();
    }

    /// A peer said goodbye: on the link that we call on, or on the one that it calls on. Only after the
    /// former no answer can come any more; after the latter some may still be on their way.
    fn peer_left(&self, peer: &Arc<Peer>, on_our_link: bool) {
        let mut state = peer.state.lock();
        let news = state.gone.is_none();
        let gone = state.gone.get_or_insert(Gone::Left).clone();
        let over = on_our_link || state.ways.iter().all(|way| matches!(way, Way::None));
        let failed = over.then(|| self.take_all(&mut state));
        drop(state);
        match failed {
            Some(failed) => self.fail(peer, failed, &gone),
            None => {
                peer.room.notify_all();
            }
        }
        if news {
            self.peer_gone(peer, true);
        }
        self.became_idle();
    }

    /// Takes all calls to a peer, in sight of the waves until [`fail`](Self::fail) has completed them.
    fn take_all(&self, state: &mut PeerState) -> Vec<(MessageId, Ticket, Phase)> {
        self.completing.fetch_add(1, Ordering::SeqCst);
        state.given_up.clear();
        state.calls.fail_all()
    }

    fn fail(&self, peer: &Peer, calls: Vec<(MessageId, Ticket, Phase)>, gone: &Gone) {
        for (_, ticket, phase) in calls {
            let error = peer.error(gone, &ticket.function, phase);
            self.settle(ticket, Err(error));
        }
        peer.room.notify_all();
        self.completing.fetch_sub(1, Ordering::SeqCst);
    }

    /// The group agreed that a peer is lost, whatever we saw of it.
    pub(super) fn declare_lost(&self, rank: Rank) {
        if let Ok(peer) = self.peer(rank) {
            self.lose(&peer, "the group has lost it");
        }
    }

    /// A peer takes no part any more, for the reason `why`.
    pub(super) fn lose(&self, peer: &Arc<Peer>, why: &str) {
        let mut state = peer.state.lock();
        if state.gone.is_some() {
            return;
        }
        let gone = Gone::Lost(why.to_owned());
        state.gone = Some(gone.clone());
        let failed = self.take_all(&mut state);
        let links = state.links();
        state.ways = [Way::None, Way::None];
        drop(state);
        for link in links {
            link.close(now());
        }
        self.fail(peer, failed, &gone);
        self.drop_requests_of(&peer.info.identity);
        self.rref_lost(peer.life());
        self.autograd_lost(peer);
    }

    /// What a peer asked for is no longer wanted, and waves do without it.
    fn peer_gone(&self, peer: &Peer, left: bool) {
        self.drop_requests_of(&peer.info.identity);
        if left {
            self.rref_left(peer.life());
        } else {
            self.rref_lost(peer.life());
        }
        self.autograd_lost(peer);
        self.group_gone(peer.rank(), left);
    }

    fn drop_requests_of(&self, peer: &Identity) {
        let dropped = self.serving.lock().peer_lost(peer.rank, peer.incarnation);
        self.cancels.tell_all_of(peer.rank, peer.incarnation);
        if !dropped.is_empty() {
            tracing::info!(%peer, count = dropped.len(), "requests dropped");
            let keys: Vec<_> = dropped.into_iter().map(|(key, ())| key).collect();
            self.forget_held(&keys);
        }
    }

    /// Deadlines of calls to a peer, and whether it is still there.
    fn tick_peer(&self, peer: &Arc<Peer>, now: Instant) {
        let mut state = peer.state.lock();
        let expired = state.calls.expire(now);
        for call in &expired {
            state.gives_up(call.id, &call.token);
        }
        let mut check = Vec::new();
        if state.keep_alive_at.is_some_and(|at| at <= now) {
            let expects = state.calls.unanswered() > 0 || self.group.is_waiting();
            state.keep_alive_at = expects.then(|| now + self.config.keepalive);
            if expects {
                check = state.links();
            }
        }
        let next = state.calls.next_deadline().into_iter().chain(state.keep_alive_at).min();
        drop(state);
        if let Some(next) = next {
            self.schedule(next);
        }
        for link in check {
            link.keep_alive(now, self.config.silence_limit);
        }
        for call in expired {
            let error = Error::timeout(peer.name(), &call.token.function, call.token.timeout, call.phase);
            self.complete(|| Some((call.token, Err(error))));
            peer.room.notify_all();
        }
    }
}
