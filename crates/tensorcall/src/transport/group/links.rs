//! Links with other ranks: opening and ending them, and what happens on them.

use std::sync::{Arc, Weak};

use tensorcall_proto::connection::Arrived;
use tensorcall_proto::group::{Arrival, Departures, WireLink};
use tensorcall_proto::ids::Identity;
use tensorcall_proto::wire::limits::Limits;

use super::driver::Shared;
use super::peer::{CLOSED_HERE, GroupLink, In, LinkState, News, Peer};
use crate::buffer::{Buffer, Target};
use crate::sync::MutexGuard;
use crate::transport::proving::Handshake;
use crate::transport::{Closed, Events, Inbound, Link, LinkId};

/// Why links end when a rank ends them on purpose.
pub(super) const CLOSED_THERE: &str = "connection closed by the peer";

/// Links of one rank whose handshake is not done.
const GREETING_PLACES: usize = 16;

impl Shared {
    pub(super) fn connect(&self, link: LinkId, identity: &Identity, rank: u32) -> Arc<dyn Link> {
        let wire = WireLink { opened_here: true, number: link.0 };
        let Some(peer) = self.peer(rank) else {
            let nobody = Peer::new(rank, rank, 1, Limits::default(), &self.pool);
            let dead = GroupLink::new(link, wire, &nobody, Weak::new());
            dead.end();
            self.tell_closed(link, false, cannot_connect(rank, "there is no such rank"));
            return dead;
        };
        let handle = GroupLink::new(link, wire, peer, self.this.clone());
        let mut handshake = match Handshake::to(identity, &self.credentials) {
            Ok(handshake) => Box::new(handshake),
            Err(error) => {
                handle.end();
                self.tell_closed(link, false, cannot_connect(rank, &error.to_string()));
                return handle;
            }
        };
        let mut hello = Vec::new();
        while let Some(bytes) = handshake.poll_send() {
            hello.push(bytes);
        }
        let state = LinkState { link: Arc::clone(&handle), handshake: Some(handshake) };
        {
            let mut inn = peer.inn.lock();
            inn.arrivals.expect(wire);
            inn.links.insert(wire, state);
        }
        // After that, so that whoever ends it all from now on finds the link.
        let over = peer.out.lock().over.clone();
        match over {
            None => self.say(peer, |departures| {
                for bytes in hello {
                    departures.handshake(wire, bytes);
                }
            }),
            Some(reason) => {
                let mut inn = peer.inn.lock();
                inn.arrivals.close(wire);
                let is_ours = inn.links.remove(&wire).is_some();
                drop(inn);
                if is_ours {
                    handle.end();
                    self.tell_closed(link, false, cannot_connect(rank, &reason));
                }
            }
        }
        handle
    }

    /// Ends a link when everything on it has left; for us it is over now.
    pub(super) fn close_link(&self, peer: &Peer, wire: WireLink) {
        let state = peer.inn.lock().links.get(&wire).map(|state| Arc::clone(&state.link));
        let Some(link) = state else { return };
        link.end();
        self.say(peer, |departures| departures.close(wire, CLOSED_THERE));
        self.tell(peer, News::Closed(wire, CLOSED_HERE.to_owned()));
    }

    /// Ends a link at once.
    pub(super) fn abandon(&self, peer: &Peer, wire: WireLink, reason: &str) {
        drop(self.say(peer, |departures| departures.abandon(wire, CLOSED_THERE)));
        self.tell(peer, News::Closed(wire, reason.to_owned()));
    }

    pub(super) fn tell(&self, peer: &Peer, news: News) {
        let mut inn = peer.inn.lock();
        inn.news.push_back(news);
        self.carry_out_all(peer, inn);
    }

    /// Carries out what has happened, in order, without holding the lock. A thread that finds another one at
    /// it leaves its part to that one.
    pub(super) fn carry_out_all<'a>(&self, peer: &'a Peer, mut inn: MutexGuard<'a, In>) {
        if std::mem::replace(&mut inn.delivering, true) {
            return;
        }
        while let Some(news) = inn.news.pop_front() {
            drop(inn);
            self.carry_out(peer, news);
            inn = peer.inn.lock();
        }
        inn.delivering = false;
    }

    fn carry_out(&self, peer: &Peer, news: News) {
        match news {
            News::Came(arrival) => self.take(peer, *arrival),
            News::Damaged(error) => {
                tracing::warn!(rank = peer.rank, error, "connections closed: bytes of the peer came damaged");
                // First, so that it does not end the links that are opened because of it. What came damaged may
                // itself have been a reset.
                self.say(peer, |departures| {
                    departures.reset();
                    departures.announce_again();
                });
                self.end_links(peer, &format!("bytes of the peer came damaged: {error}"), false);
            }
            News::Lost(reason) => self.end_links(peer, &reason, false),
            News::Closed(link, reason) => self.end_link(peer, link, &reason),
        }
    }

    fn take(&self, peer: &Peer, arrival: Arrival<Buffer, Target>) {
        match arrival {
            // Started when it came.
            Arrival::Piece { .. } => {}
            Arrival::Message { link, arrived } => self.receive_message(peer, link, arrived),
            Arrival::Handshake { link, bytes } => self.greet(peer, link, &bytes),
            Arrival::Closed { link, text } => {
                drop(self.say(peer, |departures| departures.forget(link)));
                self.end_link(peer, link, &text);
            }
            Arrival::Broken { link, error } => {
                let text = format!("the other end broke the protocol: {error}");
                drop(self.say(peer, |departures| departures.abandon(link, &text)));
                tracing::warn!(rank = peer.rank, reason = %error, "connection closed: the peer broke the protocol");
                self.end_link(peer, link, &error.to_string());
            }
            Arrival::Reset => {
                // What was said since then may have begun links there.
                self.say(peer, Departures::announce_again);
                self.end_links(peer, "the peer received damaged bytes", true);
            }
            Arrival::Bye => {
                peer.inn.lock().ended = true;
                self.end_links(peer, CLOSED_THERE, false);
                // Nothing of ours will be on its way either.
                self.say(peer, Departures::bye);
                self.note_progress();
            }
        }
    }

    fn receive_message(&self, peer: &Peer, link: WireLink, arrived: Arrived<Buffer>) {
        let Some(id) = peer.inn.lock().links.get(&link).map(|state| state.link.id) else { return };
        let Some(events) = self.events.upgrade() else { return };
        events.received(id, &mut vec![Inbound::of(arrived)]);
    }

    /// Takes a handshake further.
    fn greet(&self, peer: &Peer, wire: WireLink, bytes: &[u8]) {
        let Some(events) = self.events.upgrade() else { return };
        let Some(mut handshake) = self.handshake_of(peer, wire, &*events) else { return };
        let result = handshake.feed(bytes);
        let established = handshake.done();
        if established.is_some() {
            // First, for the other rank may say something as soon as it hears of it.
            let mut inn = peer.inn.lock();
            if inn.links.contains_key(&wire) {
                inn.arrivals.open(wire);
                self.look(peer, &mut inn);
            }
        }
        self.say(peer, |departures| {
            while let Some(bytes) = handshake.poll_send() {
                departures.handshake(wire, bytes);
            }
        });
        if let Err(reason) = result {
            drop(self.say(peer, |departures| departures.abandon(wire, &reason)));
            if !wire.opened_here && !self.is_stopping() {
                let rank = peer.rank;
                tracing::warn!(rank, reason, "connection refused: it did not prove to be of this job");
            }
            return self.end_link(peer, wire, &reason);
        }
        let mut inn = peer.inn.lock();
        let Some(state) = inn.links.get_mut(&wire) else { return };
        let Some((identity, _)) = established else {
            state.handshake = Some(handshake);
            return;
        };
        let link = Arc::clone(&state.link);
        drop(inn);
        if wire.opened_here {
            events.opened(link.id);
        } else {
            // First, so that the agent knows the link when its first message comes.
            events.accepted(link.id, identity, Arc::clone(&link) as Arc<dyn Link>);
        }
        link.open(self);
    }

    /// The unfinished handshake of a link; of a new one if the other rank begins it.
    fn handshake_of(&self, peer: &Peer, wire: WireLink, events: &dyn Events) -> Option<Box<Handshake>> {
        let mut inn = peer.inn.lock();
        if let Some(state) = inn.links.get_mut(&wire) {
            return state.handshake.take();
        }
        let greeting = inn.links.values().filter(|state| state.handshake.is_some()).count();
        if wire.opened_here || self.is_stopping() || greeting >= GREETING_PLACES {
            return None;
        }
        let handshake = match Handshake::responder(&self.credentials) {
            Ok(handshake) => Box::new(handshake),
            Err(error) => {
                tracing::warn!(%error, "cannot take a connection");
                return None;
            }
        };
        let peer = self.peer(peer.rank)?;
        let link = GroupLink::new(events.next_link(), wire, peer, self.this.clone());
        inn.links.insert(wire, LinkState { link, handshake: None });
        Some(handshake)
    }

    fn end_link(&self, peer: &Peer, wire: WireLink, reason: &str) {
        let mut inn = peer.inn.lock();
        inn.arrivals.close(wire);
        let state = inn.links.remove(&wire);
        drop(inn);
        if let Some(state) = state {
            self.ended(peer, wire, &state, reason);
        }
    }

    /// Ends all links with a rank, which knows or is told.
    fn end_links(&self, peer: &Peer, reason: &str, tell: bool) {
        let links = peer.inn.lock().take_links();
        for (wire, state) in links {
            drop(self.say(peer, |departures| {
                if tell { departures.abandon(wire, reason) } else { departures.forget(wire) }
            }));
            self.ended(peer, wire, &state, reason);
        }
    }

    fn ended(&self, peer: &Peer, wire: WireLink, state: &LinkState, reason: &str) {
        state.link.end();
        if state.link.was_open() {
            self.tell_closed(state.link.id, true, reason.to_owned());
        } else if wire.opened_here {
            self.tell_closed(state.link.id, false, cannot_connect(peer.rank, reason));
        }
    }

    fn tell_closed(&self, link: LinkId, was_open: bool, reason: String) {
        if let Some(events) = self.events.upgrade() {
            events.closed(link, Closed { was_open, reason });
        }
    }
}

fn cannot_connect(rank: u32, reason: &str) -> String {
    format!("cannot connect (group:{rank}: {reason})")
}
