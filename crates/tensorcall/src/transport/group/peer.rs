//! Another rank, and the links with it.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use tensorcall_proto::group::{Arrival, Arrivals, Departures, Parcel, Places, WireLink, is_wide};
use tensorcall_proto::wire::limits::Limits;
use tensorcall_proto::wire::message::Message;

use super::driver::Shared;
use crate::buffer::{Buffer, BufferPool, Landing, Region, Target};
use crate::clock::now;
use crate::sync::Mutex;
use crate::transport::proving::Handshake;
use crate::transport::sys::BodySegment;
use crate::transport::{Link, LinkId, Outbound};

/// A link must be open within so many times the limit of silence.
const OPENING: u32 = 4;

/// Another rank. The two halves are never locked at once; a link's gate may be while the first one is.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) rank: u32,
    pub(super) out: Mutex<Out>,
    pub(super) inn: Mutex<In>,
}

/// What goes to the rank.
#[derive(Debug)]
pub(super) struct Out {
    pub(super) departures: Departures<BodySegment>,
    /// Some thread is sending envelopes, and looks for more when one is out.
    pub(super) sending: bool,
    /// Something was said to the rank.
    pub(super) used: bool,
    /// Nothing more is sent, for this reason.
    pub(super) over: Option<String>,
}

/// What comes from the rank.
pub(super) struct In {
    pub(super) arrivals: Arrivals<Memories>,
    pub(super) links: HashMap<WireLink, LinkState>,
    /// What has happened, in order; carried out by one thread at a time.
    pub(super) news: VecDeque<News>,
    pub(super) delivering: bool,
    /// Something came from the rank.
    pub(super) used: bool,
    /// The rank has said that nothing more comes.
    pub(super) ended: bool,
}

impl std::fmt::Debug for In {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("In").field("links", &self.links.len()).finish_non_exhaustive()
    }
}

/// What has happened between this rank and another.
#[derive(Debug)]
pub(super) enum News {
    Came(Box<Arrival<Buffer, Target>>),
    /// What came was damaged.
    Damaged(String),
    /// The rank is lost.
    Lost(String),
    /// A link was closed here.
    Closed(WireLink, String),
}

pub(super) struct LinkState {
    pub(super) link: Arc<GroupLink>,
    /// `None` when it is done.
    pub(super) handshake: Option<Box<Handshake>>,
}

impl Peer {
    pub(super) fn new(
        me: u32,
        rank: u32,
        window: usize,
        limits: Limits,
        pool: &Arc<BufferPool>,
    ) -> Arc<Self> {
        let out =
            Out { departures: Departures::new(me, rank, window), sending: false, used: false, over: None };
        let arrivals = Arrivals::new(rank, me, limits, Memories(Arc::clone(pool)));
        let inn = In {
            arrivals,
            links: HashMap::new(),
            news: VecDeque::new(),
            delivering: false,
            used: false,
            ended: false,
        };
        Arc::new(Self { rank, out: Mutex::new(out), inn: Mutex::new(inn) })
    }
}

impl Out {
    /// Whether everything has left, or nothing will.
    pub(super) fn is_flushed(&self) -> bool {
        self.over.is_some() || (self.departures.is_empty() && !self.sending)
    }
}

impl In {
    /// Takes all links away.
    pub(super) fn take_links(&mut self) -> Vec<(WireLink, LinkState)> {
        let links: Vec<_> = self.links.drain().collect();
        for (wire, _) in &links {
            self.arrivals.close(*wire);
        }
        links
    }
}

/// Memory for what comes.
#[derive(Debug)]
pub(super) struct Memories(Arc<BufferPool>);

impl Places for Memories {
    type Memory = Buffer;
    type Wide = Landing;
    type Target = Target;

    fn allocate(&mut self, len: u64) -> Option<Buffer> {
        self.0.take(usize::try_from(len).ok()?).ok()
    }

    fn allocate_wide(&mut self, len: u64) -> Option<Landing> {
        self.allocate(len).map(Landing::new)
    }

    fn carve(&mut self, wide: &mut Landing, len: u64) -> Option<Target> {
        wide.carve(usize::try_from(len).ok()?)
    }

    fn close(&mut self, wide: Landing) -> Option<Buffer> {
        wide.finish().ok()
    }
}

/// One link with another rank.
#[derive(Debug)]
pub(super) struct GroupLink {
    pub(super) id: LinkId,
    pub(super) wire: WireLink,
    peer: Arc<Peer>,
    shared: Weak<Shared>,
    gate: Mutex<Gate>,
    was_open: AtomicBool,
}

#[derive(Debug)]
enum Gate {
    /// The handshake is not done: what is sent is kept.
    Shut {
        since: Instant,
        kept: Vec<Parcel<BodySegment>>,
    },
    Open,
    Ended,
}

impl GroupLink {
    pub(super) fn new(id: LinkId, wire: WireLink, peer: &Arc<Peer>, shared: Weak<Shared>) -> Arc<Self> {
        let gate = Mutex::new(Gate::Shut { since: now(), kept: Vec::new() });
        let was_open = AtomicBool::new(false);
        Arc::new(Self { id, wire, peer: Arc::clone(peer), shared, gate, was_open })
    }

    /// Whether its handshake was done.
    pub(super) fn was_open(&self) -> bool {
        self.was_open.load(Ordering::Acquire)
    }

    /// The handshake is done.
    pub(super) fn open(&self, shared: &Shared) {
        let mut gate = self.gate.lock();
        if let Gate::Shut { kept, .. } = &mut *gate {
            let kept = std::mem::take(kept);
            *gate = Gate::Open;
            self.was_open.store(true, Ordering::Release);
            shared.say(&self.peer, |departures| kept.into_iter().for_each(|parcel| departures.push(parcel)));
        }
    }

    /// Accepts nothing more.
    pub(super) fn end(&self) {
        let before = std::mem::replace(&mut *self.gate.lock(), Gate::Ended);
        // Regions may belong to Python: their owners' drop must not run under our lock.
        drop(before);
    }

    fn parcel(&self, message: Outbound) -> Parcel<BodySegment> {
        let id = message.id;
        let after = if let Message::Cancel { id } = message.message { Some(id) } else { None };
        let (descriptor, payload, buffers) = message.describe();
        let mut narrow = descriptor.encode();
        let control_len = u32::try_from(narrow.len()).unwrap_or(u32::MAX);
        let mut wide = Vec::new();
        if is_wide(payload.len() as u64) {
            wide.push(BodySegment(Region::from_vec(payload)));
        } else {
            narrow.extend_from_slice(&payload);
        }
        for region in buffers {
            if is_wide(region.len() as u64) {
                wide.push(BodySegment(region));
            } else {
                let start = narrow.len();
                narrow.resize(start + region.len(), 0);
                region.copy_to(&mut narrow[start..]);
            }
        }
        let priority = descriptor.priority();
        Parcel { link: self.wire, id, priority, after, narrow, control_len, wide }
    }
}

impl Link for GroupLink {
    fn send(&self, message: Outbound) -> bool {
        let Some(shared) = self.shared.upgrade() else { return false };
        let parcel = self.parcel(message);
        let mut gate = self.gate.lock();
        match &mut *gate {
            Gate::Shut { kept, .. } => kept.push(parcel),
            // Under the gate's lock, so that nothing overtakes what was kept.
            Gate::Open => shared.say(&self.peer, |departures| departures.push(parcel)),
            Gate::Ended => {
                drop(gate);
                drop(parcel);
            }
        }
        false
    }

    /// That a rank is lost, the group tells. One that computes for long may well be silent, where the group's
    /// calls need the interpreter. Only a link that does not open ends here.
    fn keep_alive(&self, now: Instant, limit: Duration) {
        let Gate::Shut { since, .. } = *self.gate.lock() else { return };
        if now.saturating_duration_since(since) >= limit * OPENING
            && let Some(shared) = self.shared.upgrade()
        {
            shared.abandon(&self.peer, self.wire, "no answer in time");
        }
    }

    fn close(&self, limit: Instant) {
        let Some(shared) = self.shared.upgrade() else { return };
        if limit <= now() {
            return shared.abandon(&self.peer, self.wire, CLOSED_HERE);
        }
        shared.close_link(&self.peer, self.wire);
    }
}

/// Why a link is gone that was closed on purpose.
pub(super) const CLOSED_HERE: &str = "closed here";
