//! The threads' work: sending and receiving, until it all ends.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use tensorcall_proto::group::{
    Arrival, Departures, ENVELOPE, ENVELOPE_TAG, Envelope, PieceOut, WireLink, piece_tag,
};
use tensorcall_proto::ids::MessageId;
use tensorcall_proto::wire::limits::Limits;

use super::links::CLOSED_THERE;
use super::peer::{CLOSED_HERE, In, News, Peer};
use super::threads::Threads;
use super::{GroupError, ProcessGroup};
use crate::buffer::{Buffer, BufferPool, Landing, Region, Target};
use crate::sync::{Condvar, Mutex};
use crate::transport::proving::Credentials;
use crate::transport::sys::BodySegment;
use crate::transport::{Events, LinkId};

/// What all threads of the transport use.
pub(super) struct Shared {
    pub(super) this: Weak<Self>,
    pub(super) group: Arc<dyn ProcessGroup>,
    pub(super) events: Weak<dyn Events>,
    pub(super) credentials: Credentials,
    pub(super) pool: Arc<BufferPool>,
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

    pub(super) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// Has `task` done on a thread.
    fn run(&self, task: impl FnOnce(&Arc<Self>) + Send + 'static) {
        let Some(this) = self.this.upgrade() else { return };
        self.threads.run(Box::new(move || task(&this)));
    }

    fn run_for(&self, peer: &Peer, task: impl FnOnce(&Arc<Self>, &Peer) + Send + 'static) {
        let rank = peer.rank;
        self.run(move |this| {
            if let Some(peer) = this.peer(rank) {
                task(this, peer);
            }
        });
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
                Ok((from, bytes)) => {
                    // A group that names a rank which does not exist is not believed.
                    if let Some(peer) = self.peer(from) {
                        self.arrived(peer, bytes.as_ref());
                    }
                }
                Err(error) => {
                    let lost = self.others().filter(|peer| source.is_none_or(|rank| rank == peer.rank));
                    return lost.for_each(|peer| self.lose(peer, &error));
                }
            }
        }
    }

    /// Receives up to `len` bytes into memory of our own.
    fn receive(&self, source: Option<u32>, tag: u32, len: usize) -> Result<(u32, Buffer), GroupError> {
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
    pub(super) fn look(&self, peer: &Peer, inn: &mut In) {
        while let Some(arrival) = inn.arrivals.poll() {
            if let Arrival::Piece { number, len, target } = arrival {
                self.run_for(peer, move |this, peer| this.receive_piece(peer, number, len, target));
            } else {
                inn.news.push_back(News::Came(Box::new(arrival)));
            }
        }
    }

    /// Receives a piece, wanted or not.
    fn receive_piece(&self, peer: &Peer, number: u64, len: u64, target: Option<Target>) {
        let (source, tag) = (Some(peer.rank), piece_tag(number));
        let result = if let Some(target) = target {
            self.group.receive(source, tag, target).map(drop)
        } else {
            let len = usize::try_from(len).unwrap_or(usize::MAX);
            self.receive(source, tag, len).map(drop)
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
            self.run_for(peer, move |this, peer| this.send_envelopes(peer));
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
                self.run_for(peer, move |this, peer| this.send_piece(peer, &piece));
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

    pub(super) fn note_progress(&self) {
        if self.is_stopping() {
            drop(self.progress.0.lock());
            self.progress.1.notify_all();
        }
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

    /// Sends what is queued, and tells those ranks with which there was something that it is over, until
    /// they say the same or `limit`. False if that was done before.
    pub(super) fn say_goodbye(&self, limit: Instant) -> bool {
        if self.stopping.swap(true, Ordering::AcqRel) {
            return false;
        }
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
                break;
            }
        }
        true
    }

    /// Says nothing more to anybody, and drops what was to be said.
    pub(super) fn end_all(&self) {
        for peer in self.others() {
            let mut out = peer.out.lock();
            out.over.get_or_insert_with(|| CLOSED_HERE.to_owned());
            let rest = std::mem::replace(&mut out.departures, Departures::new(0, peer.rank, 1));
            drop(out);
            drop(rest);
        }
    }
}
