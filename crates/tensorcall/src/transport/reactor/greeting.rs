//! Accepting connections, and proving each other.
//!
//! Before its handshake is done a connection costs at most 4 KiB, [`GREETING_LIMIT`] and one of
//! [`GREETING_PLACES`] places. Whoever does not prove to be of this job is cut off, with one line in the
//! log, and harms nobody else (NET-2).

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::epoll::{self, EventData, EventFlags};
use tensorcall_proto::connection::Inbox;
use tensorcall_proto::ids::Identity;
use tensorcall_proto::wire::limits::Limits;

use super::driver::{Attempt, Driver, End, Socket, Stage};
use super::listener_token;
use super::reading::{Allocator, dispatch};
use crate::clock::now;
use crate::fork::Fd;
use crate::transport::connection::Connection;
use crate::transport::proving::Handshake;
use crate::transport::socket;
use crate::transport::{Events, Link, LinkId};

/// A peer must have proved itself within this time.
pub(super) const GREETING_LIMIT: Duration = Duration::from_secs(5);
/// Connections that may be unproved at once. Further ones take the place of the oldest: who is silent
/// has had his time then, and who is not needs a moment only.
const GREETING_PLACES: usize = 128;
/// Pause in accepting when the system has no descriptor or memory for a connection.
const DEAF: Duration = Duration::from_millis(500);

impl Driver {
    pub(super) fn accept(&mut self, index: usize, events: &dyn Events) {
        loop {
            let Some(listener) = self.listeners.get(index) else { return };
            match socket::accept(listener) {
                Ok(None) => return,
                Ok(Some((fd, peer))) => {
                    if self.greeting >= GREETING_PLACES {
                        self.end_oldest_greeting(events);
                    }
                    if let Err(error) = self.greet_accepted(fd, peer, events) {
                        tracing::warn!(%error, "cannot take a connection");
                    }
                }
                Err(error) => {
                    tracing::warn!(%error, "connection refused");
                    if error.kind() != io::ErrorKind::PermissionDenied {
                        // Out of descriptors perhaps: the connection that waits would wake us for ever.
                        self.listen(EventFlags::empty());
                        self.deaf_until = Some(now() + DEAF);
                        return;
                    }
                }
            }
        }
    }

    /// Whether new connections wake us.
    pub(super) fn listen(&self, interest: EventFlags) {
        for (index, listener) in self.listeners.iter().enumerate() {
            let data = EventData::new_u64(listener_token(index));
            if let Err(error) = epoll::modify(&self.shared.epoll, &listener.fd, data, interest) {
                tracing::error!(%error, "cannot change what the reactor waits for");
            }
        }
    }

    fn end_oldest_greeting(&mut self, events: &dyn Events) {
        let accepted = |socket: &Socket| matches!(socket.stage, Stage::Greeting { attempt: None, .. });
        let oldest = self.sockets.iter().filter(|(_, socket)| accepted(socket)).map(|(&link, _)| link).min();
        if let Some(link) = oldest {
            let reason = "it was silent, and too many others wait".to_owned();
            self.end(link, &End::Refused(reason), events);
        }
    }

    fn greet_accepted(&mut self, fd: Fd, peer: String, events: &dyn Events) -> io::Result<()> {
        let link = events.next_link();
        let handshake = Handshake::responder(&self.credentials)?;
        let stage = Stage::Greeting { handshake: Box::new(handshake), unsent: Vec::new(), attempt: None };
        self.register(Connection::new(link, Arc::clone(&self.shared)), fd, stage, peer, EventFlags::IN)?;
        self.greeting += 1;
        Ok(())
    }

    pub(super) fn start_greeting(&mut self, link: LinkId) -> Result<(), End> {
        let Some(socket) = self.sockets.get_mut(&link) else { return Ok(()) };
        let me = self.credentials.me.clone();
        let placeholder = Stage::Connecting(Attempt { peer: me, rest: VecDeque::new(), tried: Vec::new() });
        let Stage::Connecting(attempt) = std::mem::replace(&mut socket.stage, placeholder) else {
            return Ok(());
        };
        let handshake = Handshake::to(&attempt.peer, &self.credentials)?;
        socket.stage =
            Stage::Greeting { handshake: Box::new(handshake), unsent: Vec::new(), attempt: Some(attempt) };
        self.shared.set_interest(link, &socket.fd, EventFlags::IN)?;
        Ok(())
    }

    /// Reads and answers as far as the handshake goes; opens the link when it is done.
    pub(super) fn greet(&mut self, link: LinkId, events: &dyn Events) -> Result<(), End> {
        let Some(socket) = self.sockets.get_mut(&link) else { return Ok(()) };
        let Stage::Greeting { handshake, unsent, .. } = &mut socket.stage else { return Ok(()) };
        let mut buffer = [0; 1024];
        loop {
            let established = handshake.done();
            while let Some(bytes) = handshake.poll_send() {
                unsent.extend_from_slice(&bytes);
            }
            write_some(&socket.fd, unsent)?;
            if let Some((peer, leftover)) = established {
                if unsent.is_empty() {
                    return self.opened(link, peer, &leftover, events);
                }
                // Messages of a few hundred bytes on a fresh socket: this does not happen.
                return Err(End::Gone("the socket takes no handshake".to_owned()));
            }
            match rustix::io::read(&socket.fd, &mut buffer) {
                Ok(0) => return Err(End::Gone(handshake.closed())),
                Ok(count) => {
                    let result = handshake.feed(&buffer[..count]);
                    if let Err(reason) = result {
                        // Tell the peer why, if the protocol has words for it.
                        while let Some(bytes) = handshake.poll_send() {
                            unsent.extend_from_slice(&bytes);
                        }
                        let _ = write_some(&socket.fd, unsent);
                        return Err(End::Refused(reason));
                    }
                }
                Err(rustix::io::Errno::AGAIN) => return Ok(()),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn opened(
        &mut self,
        link: LinkId,
        peer: Identity,
        leftover: &[u8],
        events: &dyn Events,
    ) -> Result<(), End> {
        let Some(socket) = self.sockets.get_mut(&link) else { return Ok(()) };
        socket.shares = self.terms.max_bytes > 0 && socket::passes_descriptors(&socket.fd);
        let limits = Limits { blocks: socket.shares, ..self.limits };
        let sharing = Arc::clone(&socket.connection.sharing);
        let inbox = Inbox::new(limits, Allocator { pool: Arc::clone(&self.pool), sharing });
        let before = std::mem::replace(&mut socket.stage, Stage::Open(Box::new(inbox)));
        let accepted = matches!(before, Stage::Greeting { attempt: None, .. });
        socket.deadline = None;
        socket.peer = peer.to_string();
        if accepted {
            self.greeting -= 1;
            // First, so that the agent knows the link when its first message comes.
            events.accepted(link, peer, Arc::clone(&socket.connection) as Arc<dyn Link>);
        } else {
            events.opened(link);
        }
        let terms = socket.shares.then_some(self.terms);
        for id in socket.connection.open(Arc::clone(&socket.fd), terms)? {
            events.sent(link, id);
        }
        let Stage::Open(inbox) = &mut socket.stage else { return Ok(()) };
        inbox.feed(leftover).map_err(|error| End::Refused(error.to_string()))?;
        dispatch(link, inbox, &socket.connection, &mut self.arrived, events).map(|_| ())
    }
}

/// Writes what the socket takes and drops it from `unsent`.
fn write_some(fd: &Fd, unsent: &mut Vec<u8>) -> io::Result<()> {
    while !unsent.is_empty() {
        match rustix::net::send(fd.as_fd(), unsent, rustix::net::SendFlags::NOSIGNAL) {
            Ok(count) => drop(unsent.drain(..count)),
            Err(rustix::io::Errno::AGAIN) => return Ok(()),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}
