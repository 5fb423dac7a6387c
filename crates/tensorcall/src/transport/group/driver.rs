//! The threads' work: sending, receiving, and what becomes of it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use tensorcall_proto::group::{
    Arrival, Departures, ENVELOPE, ENVELOPE_TAG, Envelope, PieceOut, WireLink, piece_tag,
};
use tensorcall_proto::ids::{Identity, MessageId};
use tensorcall_proto::wire::Descriptor;
use tensorcall_proto::wire::limits::Limits;

use super::peer::{CLOSED_HERE, GroupLink, In, LinkState, News, Peer};
use super::threads::Threads;
use super::{GroupError, ProcessGroup};
use crate::body::Received;
use crate::buffer::{BufferPool, Landing, Region, Target};
use crate::sync::{Condvar, Mutex, MutexGuard};
use crate::transport::proving::{Credentials, Handshake};
use crate::transport::sys::BodySegment;
use crate::transport::{Closed, Events, Inbound, Link, LinkId};

/// Why links of ours end when a rank ends them on purpose.
const CLOSED_THERE: &str = "connection closed by the peer";

/// Links of one rank whose handshake is not done.
const GREETING_PLACES: usize = 16;

/// What all threads of the transport use.
pub(super) struct Shared {
    this: Weak<Self>,
    pub(super) group: Arc<dyn ProcessGroup>,
    events: Weak<dyn Events>,
    credentials: Credentials,
    pool: Arc<BufferPool>,
    /// By rank; `None` in our own place.
    peers: Vec<Option<Arc<Peer>>>,
    pub(super) threads: Arc<Threads>,
    stopping: AtomicBool,
    /// Told when something has left or ended, while stopping.
    progress: (Mutex<()>, Condvar),
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("group", &self.group).finish_non_exhaustive()
    }
}

impl Shared {
    pub(super) fn new(
        group: Arc<dyn ProcessGroup>,
        events: Weak<dyn Events>,
        credentials: Credentials,
        window: usize,
        limits: Limits,
        pool: Arc<BufferPool>,
    ) -> Arc<Self> {
        let me = group.rank();
        let peer = |rank| (rank != me).then(|| Peer::new(me, rank, window, limits, &pool));
        let peers = (0..group.size()).map(peer).collect();
        let threads = Threads::new(Arc::clone(&group));
        Arc::new_cyclic(|this| Self {
            this: this.clone(),
            group,
            events,
            credentials,
            pool,
            peers,
            threads,
            stopping: AtomicBool::new(false),
            progress: Default::default(),
        })
    }

    /// The rank, unless it is our own or there is none.
    pub(super) fn peer(&self, rank: u32) -> Option<&Arc<Peer>> {
        self.peers.get(usize::try_from(rank).ok()?)?.as_ref()
    }

    fn others(&self) -> impl Iterator<Item = &Arc<Peer>> {
        self.peers.iter().flatten()
    }

    fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// Has `task` done on a thread.
    fn run(&self, task: impl FnOnce(&Arc<Self>) + Send + 'static) {
        let Some(this) = self.this.upgrade() else { return };
        self.threads.run(Box::new(move || task(&this)));
    }

    pub(super) fn start_receiving(&self) {
        let sources: Vec<_> = if !self.group.receives_from_any() {
            self.others().map(|peer| Some(peer.rank)).collect()
        } else if self.others().next().is_some() {
            vec![None]
        } else {
            Vec::new()
        };
        for source in sources {
            self.run(move |this| this.receive_envelopes(source));
        }
    }

    /// Takes envelopes from one rank, or from all, until the group is aborted or the rank is lost.
    fn receive_envelopes(&self, source: Option<u32>) {
        loop {
            let result = self.receive(source, ENVELOPE_TAG, ENVELOPE);
            if self.is_stopping() && result.is_err() {
                return;
            }
            match result {
                Ok((from, bytes)) => match self.peer(from) {
                    Some(peer) => self.arrived(peer, bytes.as_ref()),
                    None => tracing::warn!(from, "a message of a rank that does not exist was dropped"),
                },
                Err(error) => {
                    let lost = self.others().filter(|peer| source.is_none_or(|rank| rank == peer.rank));
                    return lost.for_each(|peer| self.lose(peer, &error));
                }
            }
        }
    }

    /// Receives up to `len` bytes into memory of our own.
    fn receive(
        &self,
        source: Option<u32>,
        tag: u32,
        len: usize,
    ) -> Result<(u32, crate::buffer::Buffer), GroupError> {
        let no_memory = || GroupError(format!("no memory for {len} bytes"));
        let mut landing = Landing::new(self.pool.take(len).map_err(|_| no_memory())?);
        let target = landing.carve(len).ok_or_else(no_memory)?;
        let from = self.group.receive(source, tag, target)?;
        Ok((from, landing.finish().map_err(|_| no_memory())?))
    }

    fn arrived(&self, peer: &Peer, bytes: &[u8]) {
        let mut inn = peer.inn.lock();
        inn.used = true;
        let result = inn.arrivals.feed(bytes);
        self.look(peer, &mut inn);
        if let Err(error) = result {
            inn.news.push_back(News::Damaged(error.to_string()));
        }
        self.carry_out_all(peer, inn);
    }

    /// Starts to receive pieces, and takes the rest of what came to the news.
    fn look(&self, peer: &Peer, inn: &mut In) {
        while let Some(arrival) = inn.arrivals.poll() {
            if let Arrival::Piece { number, len, target } = arrival {
                let rank = peer.rank;
                self.run(move |this| {
                    if let Some(peer) = this.peer(rank) {
                        this.receive_piece(peer, number, len, target);
                    }
                });
            } else {
                inn.news.push_back(News::Came(arrival));
            }
        }
    }

    /// Receives a piece, wanted or not.
    fn receive_piece(&self, peer: &Peer, number: u64, len: u64, target: Option<Target>) {
        let (source, tag) = (Some(peer.rank), piece_tag(number));
        let result = match target {
            Some(target) => self.group.receive(source, tag, target).map(drop),
            None => {
                let len = usize::try_from(len).unwrap_or(usize::MAX);
                self.receive(source, tag, len).map(drop)
            }
        };
        if let Err(error) = result {
            return self.lose(peer, &error);
        }
        let mut inn = peer.inn.lock();
        inn.arrivals.landed(number);
        self.look(peer, &mut inn);
        self.carry_out_all(peer, inn);
    }

    /// Says something to a rank, soon; nothing if it is lost.
    pub(super) fn say<R: Default>(
        &self,
        peer: &Peer,
        say: impl FnOnce(&mut Departures<BodySegment>) -> R,
    ) -> R {
        let mut out = peer.out.lock();
        if out.over.is_some() {
            drop(out);
            // What it would have said is dropped with it, without the lock.
            drop(say);
            return R::default();
        }
        let result = say(&mut out.departures);
        out.used = true;
        let start = !std::mem::replace(&mut out.sending, true);
        drop(out);
        if start {
            let rank = peer.rank;
            self.run(move |this| {
                if let Some(peer) = this.peer(rank) {
                    this.send_envelopes(peer);
                }
            });
        }
        result
    }

    /// Sends envelopes until there are none. Whoever calls this has set `sending`.
    fn send_envelopes(&self, peer: &Peer) {
        loop {
            let mut out = peer.out.lock();
            let Some(Envelope { bytes, finishes }) = out.departures.poll_envelope() else {
                out.sending = false;
                drop(out);
                return self.note_progress();
            };
            let mut pieces = Vec::new();
            while let Some(piece) = out.departures.poll_piece() {
                pieces.push(piece);
            }
            drop(out);
            for piece in pieces {
                let rank = peer.rank;
                self.run(move |this| {
                    if let Some(peer) = this.peer(rank) {
                        this.send_piece(peer, &piece);
                    }
                });
            }
            if let Err(error) = self.group.send(peer.rank, ENVELOPE_TAG, &Region::from_vec(bytes)) {
                return self.lose(peer, &error);
            }
            let mut sent = Vec::new();
            peer.out.lock().departures.envelope_sent(&finishes, |link, id| sent.push((link, id)));
            self.tell_sent(sent);
        }
    }

    fn send_piece(&self, peer: &Peer, piece: &PieceOut<BodySegment>) {
        let PieceOut { number, segment: BodySegment(region), offset, len } = piece;
        let part = usize::try_from(*offset).ok().zip(usize::try_from(*len).ok());
        let result = match part.and_then(|(offset, len)| region.part(offset, len)) {
            Some(part) => self.group.send(peer.rank, piece_tag(*number), &part),
            None => Err(GroupError("a piece outside its segment".to_owned())),
        };
        if let Err(error) = result {
            return self.lose(peer, &error);
        }
        let mut sent = Vec::new();
        let mut out = peer.out.lock();
        out.departures.piece_sent(*number, |link, id| sent.push((link, id)));
        let start = !std::mem::replace(&mut out.sending, true);
        drop(out);
        self.tell_sent(sent);
        if start {
            // There may be a place for the next piece.
            self.send_envelopes(peer);
        }
    }

    fn tell_sent(&self, sent: Vec<(WireLink, MessageId)>) {
        let Some(events) = self.events.upgrade() else { return };
        for (link, id) in sent.into_iter().filter(|(link, _)| link.opened_here) {
            events.sent(LinkId(link.number), id);
        }
    }

    fn note_progress(&self) {
        if self.is_stopping() {
            drop(self.progress.0.lock());
            self.progress.1.notify_all();
        }
    }

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
        peer.inn.lock().links.insert(wire, state);
        // After that, so that whoever ends it all from now on finds the link.
        let over = peer.out.lock().over.clone();
        match over {
            None => self.say(peer, |departures| {
                hello.into_iter().for_each(|bytes| departures.handshake(wire, bytes));
            }),
            Some(reason) => {
                if peer.inn.lock().links.remove(&wire).is_some() {
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

    /// A rank is lost, whatever the call was that noticed.
    fn lose(&self, peer: &Peer, error: &GroupError) {
        let first = error.0.lines().next().unwrap_or_default();
        let has_left = peer.inn.lock().ended || self.is_stopping();
        let reason = if has_left {
            CLOSED_THERE.to_owned()
        } else {
            format!("the process group has lost rank {}: {first}", peer.rank)
        };
        let mut out = peer.out.lock();
        if out.over.is_some() {
            return;
        }
        if !has_left {
            tracing::info!(rank = peer.rank, reason = first, "a rank of the process group is lost");
        }
        out.over = Some(reason.clone());
        out.sending = false;
        let rest = std::mem::replace(&mut out.departures, Departures::new(0, peer.rank, 1));
        drop(out);
        drop(rest);
        self.tell(peer, News::Lost(reason));
        self.note_progress();
    }

    fn tell(&self, peer: &Peer, news: News) {
        let mut inn = peer.inn.lock();
        inn.news.push_back(news);
        self.carry_out_all(peer, inn);
    }

    /// Carries out what has happened, in order, without holding the lock. A thread that finds another one at
    /// it leaves its part to that one.
    fn carry_out_all<'a>(&self, peer: &'a Peer, mut inn: MutexGuard<'a, In>) {
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
            // Started when it came.
            News::Came(Arrival::Piece { .. }) => {}
            News::Came(Arrival::Message { link, mut arrived }) => {
                let Some(id) = peer.inn.lock().links.get(&link).map(|state| state.link.id) else { return };
                let Some(events) = self.events.upgrade() else { return };
                let body = Received {
                    payload: arrived.payload,
                    tensors: std::mem::take(&mut arrived.descriptor.tensors),
                    buffers: arrived.buffers,
                    rrefs: Vec::new(),
                    autograd: None,
                };
                let Descriptor { message, rrefs, .. } = arrived.descriptor;
                events.received(id, Inbound { message, body, rrefs });
            }
            News::Came(Arrival::Handshake { link, bytes }) => self.greet(peer, link, &bytes),
            News::Came(Arrival::Closed { link, text }) => {
                drop(self.say(peer, |departures| departures.forget(link)));
                self.end_link(peer, link, &text);
            }
            News::Came(Arrival::Broken { link, error }) => {
                let text = format!("the other end broke the protocol: {error}");
                drop(self.say(peer, |departures| departures.abandon(link, &text)));
                tracing::warn!(rank = peer.rank, reason = %error, "connection closed: the peer broke the protocol");
                self.end_link(peer, link, &error.to_string());
            }
            News::Came(Arrival::Reset) => {
                // What was said since then may have begun links there.
                self.say(peer, Departures::announce_again);
                self.end_links(peer, "the peer received damaged bytes", true);
            }
            News::Damaged(error) => {
                tracing::warn!(rank = peer.rank, error, "connections closed: bytes of the peer came damaged");
                // First, so that it does not end the links that are opened because of it.
                self.say(peer, Departures::reset);
                self.end_links(peer, &format!("bytes of the peer came damaged: {error}"), false);
            }
            News::Came(Arrival::Bye) => {
                peer.inn.lock().ended = true;
                self.end_links(peer, CLOSED_THERE, false);
                // Nothing of ours will be on its way either.
                self.say(peer, Departures::bye);
                self.note_progress();
            }
            News::Lost(reason) => self.end_links(peer, &reason, false),
            News::Closed(link, reason) => self.end_link(peer, link, &reason),
        }
    }

    /// Takes a handshake further.
    fn greet(&self, peer: &Peer, wire: WireLink, bytes: &[u8]) {
        let Some(events) = self.events.upgrade() else { return };
        let Some(mut handshake) = self.handshake_of(peer, wire, &*events) else { return };
        let result = handshake.feed(bytes);
        let mut answers = Vec::new();
        let established = handshake.done();
        while let Some(bytes) = handshake.poll_send() {
            answers.push(bytes);
        }
        self.say(peer, |departures| {
            answers.into_iter().for_each(|bytes| departures.handshake(wire, bytes));
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
        inn.arrivals.open(wire);
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
            drop(self.say(peer, |departures| match tell {
                true => departures.abandon(wire, reason),
                false => departures.forget(wire),
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

    /// Sends what is queued, and tells those ranks with which there was something that it is over, until
    /// they say the same or `limit`.
    pub(super) fn say_goodbye(&self, limit: Instant) {
        self.stopping.store(true, Ordering::Release);
        for peer in self.others() {
            let links = peer.inn.lock().take_links();
            for (wire, state) in links {
                state.link.end();
                self.say(peer, |departures| departures.close(wire, CLOSED_THERE));
            }
            let used = peer.out.lock().used || peer.inn.lock().used;
            if used {
                self.say(peer, Departures::bye);
            }
        }
        let is_over = |peer: &Arc<Peer>| {
            let out = peer.out.lock();
            let (over, flushed, used) = (out.over.is_some(), out.is_flushed(), out.used);
            drop(out);
            let inn = peer.inn.lock();
            over || (flushed && (inn.ended || !(used || inn.used)))
        };
        let mut held = self.progress.0.lock();
        while !self.others().all(is_over) {
            if self.progress.1.wait_until(&mut held, limit).timed_out() {
                return;
            }
        }
    }
}

fn cannot_connect(rank: u32, reason: &str) -> String {
    format!("cannot connect (group:{rank}: {reason})")
}
