//! From the bytes of a connection to messages.

use std::io::IoSliceMut;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tensorcall_proto::connection::{Allocate, Arrival, Inbox};
use tensorcall_proto::wire::message::Message;

use super::Shared;
use super::driver::{Driver, End, Stage};
use crate::buffer::{Buffer, BufferPool};
use crate::clock::now;
use crate::fork::Fd;
use crate::transport::connection::Connection;
use crate::transport::sharing::{LOOK_EVERY, Sharing};
use crate::transport::{Events, Inbound, LinkId, sys};

/// Bytes read at a time, unless they go straight into a message's memory.
pub(super) const SCRATCH: usize = 128 << 10;
/// Bytes read from one connection before others get their turn.
const TURN: usize = 8 << 20;
/// Bodies with at least this much to come are read straight into place.
const DIRECT: usize = 16 << 10;

pub(super) struct Allocator {
    pub(super) pool: Arc<BufferPool>,
    pub(super) sharing: Arc<Sharing>,
}

impl std::fmt::Debug for Allocator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Allocator")
    }
}

impl Allocate for Allocator {
    type Memory = Buffer;

    fn allocate(&mut self, len: u64) -> Option<Buffer> {
        self.pool.take(usize::try_from(len).ok()?).ok()
    }

    fn borrow(&mut self, segment: u64, offset: u64, len: u64) -> Option<Buffer> {
        self.sharing.borrow(segment, offset, len)
    }
}

impl Driver {
    /// Reads what is there, up to a turn's worth.
    pub(super) fn read(&mut self, link: LinkId, events: &dyn Events) -> Result<(), End> {
        let Some(socket) = self.sockets.get_mut(&link) else { return Ok(()) };
        let Stage::Open(inbox) = &mut socket.stage else { return Ok(()) };
        let mut turn = TURN;
        let now = now();
        socket.connection.heard_now(now);
        let sharing = socket.shares.then_some(&*socket.connection.sharing);
        while turn > 0 {
            let (count, asked) = match read_into(&socket.fd, inbox, &mut self.scratch, sharing, &self.shared)
            {
                Ok(Ok(read)) => read,
                Ok(Err(reason)) => return Err(End::Refused(reason)),
                Err(rustix::io::Errno::AGAIN) => break,
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            };
            if count == 0 {
                return Err(End::Gone("connection closed by the peer".to_owned()));
            }
            self.messages += dispatch(link, inbox, &socket.connection, &mut self.arrived, events)?;
            turn = turn.saturating_sub(count);
            if count < asked {
                break;
            }
        }
        if let Some(sharing) = sharing {
            socket.connection.say_returns();
            if socket.look_at.is_none() && sharing.is_used() {
                socket.look_at = Some(now + LOOK_EVERY);
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
    messages: &mut Vec<Inbound>,
    events: &dyn Events,
) -> Result<u32, End> {
    let collected = collect(inbox, connection, messages);
    let count = u32::try_from(messages.len()).unwrap_or(u32::MAX);
    if count > 0 {
        events.received(link, messages);
    }
    collected.map(|()| count)
}

/// Takes the messages that are there, and sees to what concerns the connection alone.
fn collect(
    inbox: &mut Inbox<Allocator>,
    connection: &Connection,
    messages: &mut Vec<Inbound>,
) -> Result<(), End> {
    while let Some(arrival) = inbox.poll() {
        match arrival {
            Arrival::Message(arrived) => {
                let inbound = Inbound::of(arrived);
                if let Message::Blocks(message) = inbound.message {
                    let said = connection.sharing.handle(message, now()).map_err(End::Refused)?;
                    connection.say(said);
                } else {
                    messages.push(inbound);
                }
            }
            Arrival::Ping(mark) => connection.pong(mark)?,
            Arrival::Pong(_) => {}
        }
    }
    Ok(())
}

type ReadResult = Result<(usize, usize), String>;

/// Reads once, straight into a message's memory where much of it is to come. Returns how much came and
/// how much could have come.
fn read_into(
    fd: &Fd,
    inbox: &mut Inbox<Allocator>,
    scratch: &mut [u8],
    sharing: Option<&Sharing>,
    shared: &Shared,
) -> Result<ReadResult, rustix::io::Errno> {
    let room = scratch.len();
    let (mut direct, mut targets) = (0, [IoSliceMut::new(&mut []), IoSliceMut::new(scratch)]);
    if let Some(target) = inbox.target().filter(|target| target.len() >= DIRECT) {
        direct = target.len();
        shared.in_bulk.store(true, Ordering::Relaxed);
        targets[0] = IoSliceMut::new(target);
    }
    let targets = if direct > 0 { &mut targets[..] } else { &mut targets[1..] };
    let count = match sharing {
        None => rustix::io::readv(fd, targets)?,
        Some(sharing) => {
            let ((count, lost), passed) = Fd::receive(|| sys::receive(fd.as_fd(), targets))?;
            if lost {
                sharing.lost();
            } else if !passed.is_empty()
                && let Err(reason) = sharing.passed(passed)
            {
                return Ok(Err(reason));
            }
            count
        }
    };
    let filled = if direct > 0 { inbox.filled(count.min(direct)) } else { Ok(()) };
    let result = filled.and_then(|()| inbox.feed(&scratch[..count.saturating_sub(direct)]));
    Ok(result.map(|()| (count, direct + room)).map_err(|error| error.to_string()))
}
