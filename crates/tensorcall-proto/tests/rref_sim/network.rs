//! Messages under way, links that break, and everything else that is going to happen.
//!
//! Two workers have two links, one opened by each. When a link breaks, what is under way on it may be lost
//! or not, what is still sent into it is lost, and either end notices in its own time; an end that has
//! noticed reads nothing of the old link and sends on a new one.

use std::cmp::{Ordering, Reverse};
use std::collections::{BTreeMap, BinaryHeap};

use tensorcall_proto::ids::{Life, RRefId, Rank};
use tensorcall_proto::rref::{NewRRef, RRefDesc, RRefMessage};

use crate::rng::Rng;
use crate::scenario::Scenario;

/// Names the link that the first of two workers opened to the second.
pub(crate) type LinkKey = (Life, Life);

#[derive(Debug, Clone)]
pub(crate) struct Packet {
    pub(crate) from: Life,
    pub(crate) to: Life,
    pub(crate) link: LinkKey,
    /// Which link of that name.
    pub(crate) generation: u64,
    pub(crate) body: Body,
}

#[derive(Debug, Clone)]
pub(crate) enum Body {
    Call { id: u64, what: What, rrefs: Vec<RRefDesc> },
    Reply { id: u64, outcome: Outcome, rrefs: Vec<RRefDesc> },
    RRef(RRefMessage),
}

/// What a call asks for.
#[derive(Debug, Clone, Copy)]
pub(crate) enum What {
    Run,
    Create(NewRRef),
    Fetch(RRefId),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    Done,
    NotRun,
    /// The value of a fetch is gone.
    Gone,
}

#[derive(Debug, Clone)]
pub(crate) enum Event {
    Deliver(Packet),
    /// A program does something.
    Act {
        at: Life,
    },
    /// A program drops all that it has, and wants nothing more.
    Quit {
        at: Life,
    },
    /// A function is done.
    Ran {
        at: Life,
        run: u64,
    },
    /// A value that a worker makes on itself is done.
    Made {
        at: Life,
        rref: RRefId,
    },
    /// A caller waits no longer.
    Timeout {
        at: Life,
        call: u64,
    },
    /// Whoever waits for a value waits no longer.
    Expire {
        at: Life,
        rref: RRefId,
        run: u64,
    },
    Cut {
        one: Rank,
        other: Rank,
    },
    /// `at` notices that a link is gone.
    Broken {
        at: Life,
        link: LinkKey,
        generation: u64,
    },
    Crash {
        rank: Rank,
    },
    Restart {
        rank: Rank,
    },
    /// `at` notices that a life is over.
    Lost {
        at: Life,
        about: Life,
    },
    /// `at` hears of a life.
    Met {
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
    links: BTreeMap<LinkKey, Link>,
}

#[derive(Debug)]
struct Link {
    number: u64,
    /// Generations below this one are broken.
    broken_below: u64,
    /// The generation that each end uses: who opened it, who accepted it.
    at_end: [u64; 2],
}

#[derive(Debug)]
struct Entry {
    at: u64,
    number: u64,
    event: Event,
}

impl Network {
    pub(crate) fn new() -> Self {
        Self { now: 0, queue: BinaryHeap::new(), events: 0, links: BTreeMap::new() }
    }

    pub(crate) fn after(&mut self, delay: u64, event: Event) {
        self.events += 1;
        self.queue.push(Reverse(Entry { at: self.now + delay, number: self.events, event }));
    }

    /// The next event; time moves to it.
    pub(crate) fn pop(&mut self) -> Option<Event> {
        let Reverse(entry) = self.queue.pop()?;
        self.now = entry.at;
        Some(entry.event)
    }

    /// The generation of a link that `end` sends on.
    pub(crate) fn generation(&mut self, link: LinkKey, end: Life) -> u64 {
        self.link(link).at_end[usize::from(link.1 == end)]
    }

    /// What the machines call a link of one generation.
    pub(crate) fn number(&mut self, link: LinkKey, generation: u64) -> u64 {
        1_000 * self.link(link).number + generation
    }

    /// Whether what was sent on a link may be lost.
    pub(crate) fn is_broken(&mut self, link: LinkKey, generation: u64) -> bool {
        generation < self.link(link).broken_below
    }

    fn link(&mut self, key: LinkKey) -> &mut Link {
        let number = self.links.len() as u64;
        self.links.entry(key).or_insert(Link { number, broken_below: 0, at_end: [0; 2] })
    }

    /// Sends a message. Gives it back if it is lost at once.
    #[must_use = "what is lost is nowhere any more"]
    pub(crate) fn send(&mut self, rng: &mut Rng, scenario: &Scenario, packet: Packet) -> Option<Packet> {
        if self.is_broken(packet.link, packet.generation) {
            return Some(packet);
        }
        if matches!(packet.body, Body::RRef(_)) && rng.chance(scenario.duplicates) {
            let delay = delay(rng, scenario) + rng.below(20 * scenario.delay);
            self.after(delay, Event::Deliver(packet.clone()));
        }
        let delay = delay(rng, scenario);
        self.after(delay, Event::Deliver(packet));
        None
    }

    /// Whether a message that is due arrives.
    pub(crate) fn arrives(&mut self, rng: &mut Rng, packet: &Packet) -> bool {
        let used = self.generation(packet.link, packet.to);
        let is_broken = self.is_broken(packet.link, packet.generation);
        packet.generation >= used && !(is_broken && rng.chance(50))
    }

    /// Breaks a link, which its ends notice.
    pub(crate) fn cut(&mut self, rng: &mut Rng, scenario: &Scenario, key: LinkKey) {
        let link = self.link(key);
        let generation = link.at_end[0].max(link.at_end[1]);
        link.broken_below = generation + 1;
        for at in [key.0, key.1] {
            let delay = rng.between(1, scenario.notice);
            self.after(delay, Event::Broken { at, link: key, generation });
        }
    }

    /// An end notices that a link is gone, and those before it. Returns the numbers that are news.
    pub(crate) fn notice(&mut self, key: LinkKey, end: Life, generation: u64) -> Vec<u64> {
        let used = &mut self.link(key).at_end[usize::from(key.1 == end)];
        let news = *used..=generation;
        *used = (*used).max(generation + 1);
        news.map(|generation| self.number(key, generation)).collect()
    }
}

fn delay(rng: &mut Rng, scenario: &Scenario) -> u64 {
    let slow = if rng.chance(scenario.stragglers) { rng.between(1, 50) } else { 1 };
    rng.between(1, scenario.delay) * slow
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
