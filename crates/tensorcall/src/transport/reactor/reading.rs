//! From the bytes of a connection to messages.

use std::io::IoSliceMut;
use std::sync::Arc;

use tensorcall_proto::connection::{Allocate, Arrival, ConnectionError, Inbox};

use super::driver::{Driver, End, Stage};
use crate::buffer::{Buffer, BufferPool};
use crate::clock::now;
use crate::fork::Fd;
use crate::transport::connection::Connection;
use crate::transport::{Events, Inbound, LinkId};

/// Bytes read at a time, unless they go straight into a message's memory.
pub(super) const SCRATCH: usize = 128 << 10;
/// Bytes read from one connection before others get their turn.
const TURN: usize = 8 << 20;
/// Bodies with at least this much to come are read straight into place.
const DIRECT: usize = 16 << 10;

pub(super) struct Allocator(pub(super) Arc<BufferPool>);

impl std::fmt::Debug for Allocator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Allocator")
    }
}

impl Allocate for Allocator {
    type Memory = Buffer;

    fn allocate(&mut self, len: u64) -> Option<Buffer> {
        self.0.take(usize::try_from(len).ok()?).ok()
    }
}

impl Driver {
    /// Reads what is there, up to a turn's worth.
    pub(super) fn read(&mut self, link: LinkId, events: &dyn Events) -> Result<(), End> {
        let Some(socket) = self.sockets.get_mut(&link) else { return Ok(()) };
        let Stage::Open(inbox) = &mut socket.stage else { return Ok(()) };
        let mut turn = TURN;
        socket.connection.heard_now(now());
        while turn > 0 {
            let (count, asked) = match read_into(&socket.fd, inbox, &mut self.scratch) {
                Ok(Ok(read)) => read,
                Ok(Err(error)) => return Err(End::Refused(error.to_string())),
                Err(rustix::io::Errno::AGAIN) => break,
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            };
            if count == 0 {
                return Err(End::Gone("connection closed by the peer".to_owned()));
            }
            self.messages += dispatch(link, inbox, &socket.connection, events)?;
            turn = turn.saturating_sub(count);
            if count < asked {
                break;
            }
        }
        Ok(())
    }
}

/// Hands on what has arrived; returns how many messages that was.
pub(super) fn dispatch(
    link: LinkId,
    inbox: &mut Inbox<Allocator>,
    connection: &Connection,
    events: &dyn Events,
) -> Result<u32, End> {
    let mut messages = 0;
    while let Some(arrival) = inbox.poll() {
        match arrival {
            Arrival::Message(arrived) => {
                messages += 1;
                events.received(link, Inbound::of(arrived));
            }
            Arrival::Ping(mark) => connection.pong(mark)?,
            Arrival::Pong(_) => {}
        }
    }
    Ok(messages)
}

type ReadResult = Result<(usize, usize), ConnectionError>;

/// Reads once, straight into a message's memory where much of it is to come. Returns how much came and
/// how much could have come.
fn read_into(
    fd: &Fd,
    inbox: &mut Inbox<Allocator>,
    scratch: &mut [u8],
) -> Result<ReadResult, rustix::io::Errno> {
    let room = scratch.len();
    let Some(target) = inbox.target().filter(|target| target.len() >= DIRECT) else {
        let count = rustix::io::read(fd, &mut *scratch)?;
        return Ok(inbox.feed(&scratch[..count]).map(|()| (count, room)));
    };
    let direct = target.len();
    let count = rustix::io::readv(fd, &mut [IoSliceMut::new(target), IoSliceMut::new(scratch)])?;
    let result =
        inbox.filled(count.min(direct)).and_then(|()| inbox.feed(&scratch[..count.saturating_sub(direct)]));
    Ok(result.map(|()| (count, direct + room)))
}
