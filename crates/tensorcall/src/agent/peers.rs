//! A worker of the group: who it is, the way to it, and what is under way with it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::sync::{Condvar, Mutex};
use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};
use tensorcall_proto::ids::{ForkId, Identity, Incarnation, Life, MessageId, Rank, WorkerName};
use tensorcall_proto::in_flight::{InFlight, Window};
use tensorcall_proto::termination::TerminationMessage;
use tensorcall_proto::wire::message::Phase;

use crate::error::{Error, Result};
use crate::future::Promise;
use crate::rref::RRef;
use crate::transport::{Address, Link, LinkId, Outbound};

/// A worker and where to reach it, as its agent's [`contact`](crate::engine::Agent::contact) tells.
#[derive(Debug, Clone)]
pub struct PeerInfo {
    /// Which life of which worker.
    pub identity: Identity,
    /// Where it listens.
    pub addresses: Vec<Address>,
    /// Whether it reads plain data only, and no pickles: [`AgentConfig::plain`](crate::engine::AgentConfig::plain).
    pub plain: bool,
}

/// The text form of a contact, as published in the store.
#[derive(Debug, Serialize, Deserialize)]
struct Contact {
    incarnation: String,
    addresses: Vec<String>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    plain: bool,
}

impl PeerInfo {
    /// Reads a contact.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Usage`](crate::ErrorKind::Usage) if it is not one.
    pub fn from_contact(name: WorkerName, rank: Rank, contact: &str) -> Result<Self> {
        let invalid = |why: &dyn std::fmt::Display| {
            Error::usage(format!("contact of worker '{name}' is invalid: {why}"))
        };
        let Contact { incarnation, addresses, plain } =
            serde_json::from_str(contact).map_err(|e| invalid(&e))?;
        let incarnation = u64::from_str_radix(&incarnation, 16).map_err(|e| invalid(&e))?;
        let addresses = addresses.iter().map(|text| text.parse()).collect::<Result<_, _>>();
        let addresses = addresses.map_err(|e| invalid(&e))?;
        let identity = Identity { name, rank, incarnation: Incarnation::new(incarnation) };
        Ok(Self { identity, addresses, plain })
    }

    /// The text form.
    pub(crate) fn contact(&self) -> String {
        let contact = Contact {
            incarnation: format!("{:016x}", self.identity.incarnation.get()),
            addresses: self.addresses.iter().map(Address::to_string).collect(),
            plain: self.plain,
        };
        serde_json::to_string(&contact).unwrap_or_default()
    }
}

/// One worker of the group.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) info: PeerInfo,
    pub(crate) state: Mutex<PeerState>,
    /// A call to this peer ended: there may be room for another. All who wait are told, since they need
    /// room of different sizes and one that gave up meanwhile would keep the news from the others.
    pub(crate) room: Condvar,
}

#[derive(Debug)]
pub(crate) struct PeerState {
    pub(crate) calls: InFlight<Ticket>,
    /// Creating calls that ended before their answer came, which will tell that the owner knows the fork.
    pub(crate) given_up: FxHashMap<MessageId, ForkId>,
    /// The outgoing links, by [`Lane`].
    pub(crate) ways: [Way; 2],
    pub(crate) gone: Option<Gone>,
    /// When the connection is checked next; `None` while nothing is expected from this peer.
    pub(crate) keep_alive_at: Option<Instant>,
    /// The last termination message of each kind that was sent to this peer, oldest first. A link that
    /// breaks may have lost them; saying them again does no harm.
    pub(crate) said: Vec<TerminationMessage>,
}

/// What completes a call, and what its errors tell.
#[derive(Debug)]
pub(crate) struct Ticket {
    pub(crate) promise: Promise,
    pub(crate) function: Arc<str>,
    pub(crate) timeout: Duration,
    /// The reference that the call makes.
    pub(crate) rref: Option<RRef>,
    /// Whether the call asks for a value.
    pub(crate) fetches: bool,
}

/// The outgoing link to a peer.
#[derive(Debug)]
pub(crate) enum Way {
    None,
    /// Being made by some thread, which then sends the backlog.
    Opening {
        id: LinkId,
        backlog: Vec<Outbound>,
    },
    Link {
        id: LinkId,
        handle: Arc<dyn Link>,
    },
}

/// What a link is for. Within a host, small messages go over a Unix socket and large ones over TCP: each
/// is the faster of the two at that (ADR 13). Elsewhere there is one link for both.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lane {
    Talk,
    Bulk,
}

impl Way {
    fn id(&self) -> Option<LinkId> {
        match self {
            Self::None => None,
            Self::Opening { id, .. } | Self::Link { id, .. } => Some(*id),
        }
    }

    pub(crate) fn handle(&self) -> Option<Arc<dyn Link>> {
        match self {
            Self::Link { handle, .. } => Some(Arc::clone(handle)),
            _ => None,
        }
    }
}

/// Why a peer takes no part any more.
#[derive(Debug, Clone)]
pub(crate) enum Gone {
    /// It shut down and said so.
    Left,
    /// It cannot be reached, for this reason.
    Lost(String),
}

impl Peer {
    pub(super) fn new(info: PeerInfo, window: Window) -> Self {
        let calls = InFlight::new(window);
        let state = PeerState {
            calls,
            given_up: FxHashMap::default(),
            ways: [Way::None, Way::None],
            gone: None,
            keep_alive_at: None,
            said: Vec::new(),
        };
        Self { info, state: Mutex::new(state), room: Condvar::new() }
    }

    pub(crate) fn name(&self) -> &WorkerName {
        &self.info.identity.name
    }

    pub(crate) fn rank(&self) -> Rank {
        self.info.identity.rank
    }

    pub(crate) fn life(&self) -> Life {
        let Identity { rank, incarnation, .. } = self.info.identity;
        Life { rank, incarnation }
    }

    /// The error of a call to this peer that has come as far as `phase`.
    pub(crate) fn error(&self, gone: &Gone, function: &str, phase: Phase) -> Error {
        match gone {
            Gone::Left => Error::peer_left(self.name(), self.rank()),
            Gone::Lost(why) => Error::peer_lost(self.name(), self.rank(), why, function, phase),
        }
    }
}

impl PeerState {
    /// Notes a termination message in the place of an earlier one of its kind.
    pub(crate) fn says(&mut self, message: &TerminationMessage) {
        let kind = std::mem::discriminant(message);
        self.said.retain(|said| std::mem::discriminant(said) != kind);
        self.said.push(message.clone());
    }

    /// A call is over for its caller, but its answer may still come.
    pub(crate) fn gives_up(&mut self, call: MessageId, ticket: &Ticket) {
        if let Some(rref) = ticket.rref.as_ref().filter(|rref| !rref.is_owner()) {
            self.given_up.insert(call, rref.fork_id());
        }
    }

    /// Forgets the way that is this link, if one is.
    pub(crate) fn drop_way(&mut self, link: LinkId) -> bool {
        let way = self.ways.iter_mut().find(|way| way.id() == Some(link));
        way.map(|way| *way = Way::None).is_some()
    }

    /// The links that are open or about to be.
    pub(crate) fn links(&self) -> Vec<Arc<dyn Link>> {
        self.ways.iter().filter_map(Way::handle).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_contact_reads_as_it_is_written() {
        let identity = Identity {
            name: WorkerName::parse("worker1").unwrap(),
            rank: Rank::new(1).unwrap(),
            incarnation: Incarnation::new(0xfeed),
        };
        let addresses = vec!["tcp:127.0.0.1:80".parse().unwrap(), "unix:h/n".parse().unwrap()];
        let info = PeerInfo { identity: identity.clone(), addresses: addresses.clone(), plain: true };

        let read = PeerInfo::from_contact(identity.name.clone(), identity.rank, &info.contact()).unwrap();

        assert_eq!(read.identity, identity);
        assert_eq!(read.addresses, addresses);
        assert!(read.plain);
    }

    #[test]
    fn a_contact_that_is_none_is_an_error_that_names_the_worker() {
        let name = WorkerName::parse("worker1").unwrap();
        for text in [
            "",
            "{}",
            r#"{"incarnation": "x", "addresses": []}"#,
            r#"{"incarnation": "1", "addresses": ["?"]}"#,
        ] {
            let error = PeerInfo::from_contact(name.clone(), Rank::new(1).unwrap(), text).unwrap_err();
            assert!(error.to_string().contains("worker1"), "{error}");
        }
    }
}
