//! Messages under way and everything else that is going to happen, in order of virtual time.

use std::cmp::{Ordering, Reverse};
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::fmt;

use tensorcall_proto::ids::{Incarnation, MessageId, Rank};
use tensorcall_proto::serving::RequestKey;
use tensorcall_proto::termination::TerminationMessage;

use crate::ledger::Uid;
use crate::rng::Rng;
use crate::scenario::{Order, Scenario};

/// One life of one worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Life {
    pub(crate) rank: Rank,
    pub(crate) incarnation: Incarnation,
}

#[derive(Debug, Clone)]
pub(crate) struct Packet {
    pub(crate) from: Life,
    pub(crate) to: Life,
    pub(crate) body: Body,
}

#[derive(Debug, Clone)]
pub(crate) enum Body {
    Call { id: MessageId, uid: Uid, fuel: u64, timeout: Option<u64> },
    Reply { id: MessageId, uid: Uid },
    Cancel { id: MessageId },
    Termination(TerminationMessage),
    Goodbye,
}

#[derive(Debug, Clone)]
pub(crate) enum Event {
    Deliver(Packet),
    /// `at` notices that its connection to `about` is gone.
    Notice {
        at: Life,
        about: Life,
    },
    Timer {
        at: Life,
    },
    /// A function has computed for a while.
    Computed {
        at: Life,
        key: RequestKey,
    },
    /// A callback of a finished call gets its turn.
    Callback {
        at: Life,
        fuel: u64,
    },
    /// A worker's own program makes a call.
    Root {
        at: Life,
        fuel: u64,
    },
    UserCancel {
        at: Life,
        peer: Rank,
        id: MessageId,
    },
    /// A worker's own program calls sync or shutdown.
    Arrive {
        at: Life,
    },
    Crash {
        at: Life,
    },
    Restart {
        rank: Rank,
    },
    /// Two workers lose each other.
    Cut {
        one: Life,
        other: Life,
    },
    /// `at` hears of another life of a worker.
    Roster {
        at: Life,
        about: Life,
    },
}

/// The queue of events.
#[derive(Debug)]
pub(crate) struct Network {
    pub(crate) now: u64,
    queue: BinaryHeap<Reverse<Entry>>,
    events: u64,
    /// When the last message between two workers, of one priority, arrives.
    last: BTreeMap<(Life, Life, bool), u64>,
    connected: BTreeSet<(Life, Life)>,
    /// Termination messages sent, for the O(N) check.
    pub(crate) termination_messages: u64,
}

#[derive(Debug)]
struct Entry {
    at: u64,
    number: u64,
    event: Event,
}

impl Network {
    pub(crate) fn new() -> Self {
        Self {
            now: 0,
            queue: BinaryHeap::new(),
            events: 0,
            last: BTreeMap::new(),
            connected: BTreeSet::new(),
            termination_messages: 0,
        }
    }

    pub(crate) fn at(&mut self, at: u64, event: Event) {
        self.events += 1;
        self.queue.push(Reverse(Entry { at: at.max(self.now), number: self.events, event }));
    }

    pub(crate) fn after(&mut self, delay: u64, event: Event) {
        self.at(self.now + delay, event);
    }

    /// The next event; time moves to it.
    pub(crate) fn pop(&mut self) -> Option<Event> {
        let Reverse(entry) = self.queue.pop()?;
        self.now = entry.at;
        Some(entry.event)
    }

    pub(crate) fn send(&mut self, rng: &mut Rng, scenario: &Scenario, packet: Packet) {
        self.connect(packet.from, packet.to);
        if matches!(packet.body, Body::Termination(_)) {
            self.termination_messages += 1;
        }
        if packet.body.may_repeat() && rng.chance(scenario.duplicates) {
            let copy = packet.clone();
            let at = self.arrival(rng, scenario, &copy) + rng.below(20 * scenario.delay);
            self.at(at, Event::Deliver(copy));
        }
        let at = self.arrival(rng, scenario, &packet);
        self.at(at, Event::Deliver(packet));
    }

    pub(crate) fn connect(&mut self, one: Life, other: Life) {
        self.connected.insert((one.min(other), one.max(other)));
    }

    pub(crate) fn peers_of(&self, life: Life) -> Vec<Life> {
        let connected = self.connected.iter().filter(|&&(one, other)| one == life || other == life);
        connected.map(|&(one, other)| if one == life { other } else { one }).collect()
    }

    /// Messages under way.
    pub(crate) fn in_transit(&self) -> impl Iterator<Item = &Packet> {
        self.queue.iter().filter_map(|Reverse(entry)| match &entry.event {
            Event::Deliver(packet) => Some(packet),
            _ => None,
        })
    }

    fn arrival(&mut self, rng: &mut Rng, scenario: &Scenario, packet: &Packet) -> u64 {
        let slow = if rng.chance(scenario.stragglers) { rng.between(1, 50) } else { 1 };
        let at = self.now + rng.between(1, scenario.delay) * slow;
        let is_control = match scenario.order {
            Order::Lost => return at,
            Order::Kept => false,
            Order::KeptByPriority => !matches!(packet.body, Body::Call { .. } | Body::Reply { .. }),
        };
        let last = self.last.entry((packet.from, packet.to, is_control)).or_default();
        *last = at.max(*last + 1);
        *last
    }
}

impl Body {
    fn may_repeat(&self) -> bool {
        matches!(self, Self::Reply { .. } | Self::Termination(_))
    }

    /// Whether it will start something. A reply ends something, which its receiver still counts, unless
    /// a copy of it came first.
    pub(crate) fn is_work(&self) -> bool {
        matches!(self, Self::Call { .. })
    }
}

impl fmt::Display for Life {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}#{}", self.rank, self.incarnation)
    }
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Entry {}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Entry {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}
