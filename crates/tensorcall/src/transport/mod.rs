//! Ways to move messages between workers.
//!
//! A [`Transport`] opens [`Link`]s; a link carries whole messages in one direction of calls and its
//! answers back. The traits know no file descriptor, so that sockets, memory, a process group or an
//! encrypted stream can stand behind them. What happens is told to an [`Events`]: by a thread of the
//! transport that must not be held up.
//!
//! To add a transport, implement the two traits, say in [`Address`] how to name its end, and add a
//! line to `tests/transport_suite.rs`.

pub(crate) mod alarm;
pub(crate) mod connection;
pub mod group;
pub(crate) mod host;
pub mod memory;
pub(crate) mod proving;
pub(crate) mod reactor;
pub(crate) mod sharing;
pub(crate) mod socket;
pub(crate) mod sys;

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tensorcall_proto::connection::Arrived;
use tensorcall_proto::ids::{Identity, MessageId};
use tensorcall_proto::rref::RRefDesc;
use tensorcall_proto::wire::Descriptor;
use tensorcall_proto::wire::message::Message;
use tensorcall_proto::wire::tensor::{BufferDesc, Place};

use crate::body::{Body, Received};
use crate::buffer::Buffer;

/// Names a link within its agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkId(pub u64);

/// A message on its way out.
#[derive(Debug)]
pub struct Outbound {
    /// What is said.
    pub message: Message,
    /// Its payload and tensors. Its references are in `rrefs` by now.
    pub body: Body,
    /// The forks that it brings the receiver.
    pub rrefs: Vec<RRefDesc>,
    /// Given back by [`Events::sent`] when all has left this process.
    pub id: Option<MessageId>,
}

impl Outbound {
    /// A message without a body.
    pub fn plain(message: Message) -> Self {
        Self { message, body: Body::default(), rrefs: Vec::new(), id: None }
    }

    /// Takes the message apart: its descriptor, and the bytes that the descriptor announces.
    pub(crate) fn describe(mut self) -> (Descriptor, Vec<u8>, Vec<crate::buffer::Region>) {
        self.body.flatten();
        self.describe_pieces()
    }

    /// As [`describe`](Self::describe); what is inserted into the payload, and what follows it, stands before the
    /// buffers.
    pub(crate) fn describe_pieces(self) -> (Descriptor, Vec<u8>, Vec<crate::buffer::Region>) {
        self.describe_placed(&[])
    }

    /// As [`describe_pieces`](Self::describe_pieces), for buffers whose bytes are in shared memory by now, where
    /// `places` says so: those are no pieces.
    pub(crate) fn describe_placed(
        mut self,
        places: &[Place],
    ) -> (Descriptor, Vec<u8>, Vec<crate::buffer::Region>) {
        let payload_len = self.body.payload_len();
        let (payload, mut pieces) = self.body.take_pieces();
        let Body { tensors, buffers, .. } = self.body;
        let places = places.iter().copied().chain(std::iter::repeat(Place::Body));
        let mut descs = Vec::with_capacity(buffers.len());
        for (region, place) in buffers.into_iter().zip(places) {
            descs.push(BufferDesc { len: region.len() as u64, place });
            if place == Place::Body {
                pieces.push(region);
            }
        }
        let descriptor =
            Descriptor { message: self.message, payload_len, buffers: descs, tensors, rrefs: self.rrefs };
        (descriptor, payload, pieces)
    }
}

/// A message that has come.
#[derive(Debug)]
pub struct Inbound {
    /// What is said.
    pub message: Message,
    /// Its payload and tensors, without the references that `rrefs` describe.
    pub body: Received,
    /// The forks that it brings.
    pub rrefs: Vec<RRefDesc>,
}

impl Inbound {
    /// What a connection has put together.
    pub(crate) fn of(mut arrived: Arrived<Buffer>) -> Self {
        let body = Received {
            payload: arrived.payload,
            tensors: std::mem::take(&mut arrived.descriptor.tensors),
            buffers: arrived.buffers,
            rrefs: Vec::new(),
            autograd: None,
        };
        let Descriptor { message, rrefs, .. } = arrived.descriptor;
        Self { message, body, rrefs }
    }
}

/// What became of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sent {
    /// All of it has left this process, or is about to.
    Out,
    /// [`Events::sent`] will tell.
    Later,
    /// It waits a moment for others and counts as out. Whoever waits for its answer calls [`Link::flush`] before.
    Held,
}

impl From<bool> for Sent {
    fn from(is_out: bool) -> Self {
        if is_out { Self::Out } else { Self::Later }
    }
}

/// One way to one peer.
pub trait Link: Send + Sync + fmt::Debug {
    /// Sends a message, or keeps it until it can be sent. Never blocks. Tells whether all of it has
    /// left this process; if not, [`Events::sent`] will. On a link that is closed the message is
    /// dropped: [`Events::closed`] has said so or is about to.
    fn send(&self, message: Outbound) -> bool;

    /// As [`send`](Self::send), but a small message may wait for others that are about to follow, until
    /// [`flush`](Self::flush). Tells whether to call that: of those that wait only the first one says so.
    fn hold(&self, message: Outbound) -> bool {
        self.send(message);
        false
    }

    /// Sends what waits for others.
    fn flush(&self) {}

    /// As [`send`](Self::send), for one of many: a small message may be left to a thread of the transport.
    fn send_along(&self, message: Outbound) -> Sent {
        self.send(message).into()
    }

    /// Whether this link has shared memory for most of the large buffers of `body` now, so that the lesser part would
    /// have to be sent.
    fn has_room_for(&self, body: &Body) -> bool {
        let _ = body;
        false
    }

    /// Shares more memory with the peer, if too little was there lately. That may take as long as a copy of it: call
    /// it without a lock, and not on a thread that others wait for.
    fn make_room(&self) {}

    /// Asks the peer for a sign of life if it has been quiet since the last call, and closes the link
    /// if it has been quiet for longer than `limit` in spite of that.
    fn keep_alive(&self, now: Instant, limit: Duration);

    /// Sends what is queued, until `limit` at the latest, then closes the link.
    fn close(&self, limit: Instant);
}

/// Opens links to addresses of one kind.
pub trait Transport: Send + Sync + fmt::Debug {
    /// Where this worker can be reached by this transport.
    fn addresses(&self) -> Vec<Address>;

    /// Whether this transport can try to reach `peer` at `address`.
    fn reaches(&self, peer: &Identity, address: &Address) -> bool;

    /// Starts to open a link to `peer`, trying `candidates` in order, and returns at once. What is
    /// sent meanwhile is kept. Then comes [`Events::opened`] or [`Events::closed`].
    fn connect(&self, link: LinkId, peer: &Identity, candidates: Vec<Address>) -> Arc<dyn Link>;

    /// Sends what is queued, until `limit` at the latest, then closes all links and stops.
    fn stop(&self, limit: Instant);
}

/// Hears what happens on links. Calls must return quickly and never wait (NET-1).
pub trait Events: Send + Sync {
    /// A number for a link that a peer opens.
    fn next_link(&self) -> LinkId;

    /// A peer has opened a link to us; it proved who it is.
    fn accepted(&self, link: LinkId, peer: Identity, handle: Arc<dyn Link>);

    /// A link of ours is open: the peer proved who it is.
    fn opened(&self, link: LinkId);

    /// Messages came, in this order. Takes all of them.
    fn received(&self, link: LinkId, messages: &mut Vec<Inbound>);

    /// All bytes of the message with this id have left this process, later than in [`Link::send`].
    fn sent(&self, link: LinkId, id: MessageId);

    /// A link is gone, or could not be opened.
    fn closed(&self, link: LinkId, why: Closed);

    /// The time has come that was asked for.
    fn tick(&self, now: Instant);
}

/// Why a link is gone.
#[derive(Debug, Clone)]
pub struct Closed {
    /// Whether it had been open.
    pub was_open: bool,
    /// The reason, for people.
    pub reason: String,
}

/// Where a worker listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// TCP over IPv4 or IPv6.
    Tcp(SocketAddr),
    /// An abstract Unix socket, which exists in one network namespace of one host only.
    Unix {
        /// Names the host and its namespace.
        host: String,
        /// Name of the socket, without the leading zero byte.
        name: String,
    },
    /// An endpoint of [`memory`].
    Memory(u64),
    /// A rank of the [process group](group) that the workers share.
    Group(u32),
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => write!(f, "tcp:{address}"),
            Self::Unix { host, name } => write!(f, "unix:{host}/{name}"),
            Self::Memory(number) => write!(f, "memory:{number}"),
            Self::Group(rank) => write!(f, "group:{rank}"),
        }
    }
}

/// A text that is no address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not an address (tcp:HOST:PORT, unix:HOST/NAME, memory:NUMBER or group:RANK)")]
pub struct InvalidAddress(String);

impl FromStr for Address {
    type Err = InvalidAddress;

    fn from_str(text: &str) -> Result<Self, InvalidAddress> {
        let invalid = || InvalidAddress(text.to_owned());
        match text.split_once(':').ok_or_else(invalid)? {
            ("tcp", rest) => rest.parse().map(Self::Tcp).map_err(|_| invalid()),
            ("unix", rest) => {
                let (host, name) = rest.split_once('/').ok_or_else(invalid)?;
                Ok(Self::Unix { host: host.to_owned(), name: name.to_owned() })
            }
            ("memory", rest) => rest.parse().map(Self::Memory).map_err(|_| invalid()),
            ("group", rest) => rest.parse().map(Self::Group).map_err(|_| invalid()),
            _ => Err(invalid()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_reads_as_it_is_written() {
        for text in ["tcp:127.0.0.1:80", "tcp:[::1]:9", "unix:3f-40265/tensorcall-1", "memory:7", "group:3"] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
        for text in ["", "tcp:", "tcp:host:1", "unix:x", "memory:-1", "group:", "ib:0"] {
            assert!(text.parse::<Address>().is_err(), "{text}");
        }
    }
}
