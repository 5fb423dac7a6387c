//! The writing half of a socket link: any thread may send, and writes at once what the socket takes.
//!
//! What it does not take stays in the outbox, and the reactor goes on when there is room. Reading is
//! the reactor's alone (`reactor/`).

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::fork::Fd;
use crate::sync::{Mutex, MutexGuard};
use rustix::event::epoll::EventFlags;
use tensorcall_proto::blocks::{BlockMessage, Terms};
use tensorcall_proto::connection::{Outbox, Piece};
use tensorcall_proto::ids::MessageId;
use tensorcall_proto::wire::Descriptor;
use tensorcall_proto::wire::frame::FrameHeader;
use tensorcall_proto::wire::message::Message;
use tensorcall_proto::wire::tensor::Place;

use super::reactor::{Command, Shared};
use super::sharing::{Said, Sharing};
use super::sys::{BodySegment, send_pieces};
use super::{Link, LinkId, Outbound, Sent};
use crate::body::Body;
use crate::buffer::Region;
use crate::clock::now;
use crate::held::MOST;

/// Payloads up to this size are copied behind the descriptor instead of being a piece of their own: a
/// copy of this size costs about as much as one more entry of a gather-write.
const INLINE_PAYLOAD: usize = 8 << 10;

/// Messages of no more bytes than this may wait for others.
const SMALL: u64 = 4 << 10;

/// Messages that come at intervals of less than this come fast.
const RAPID: Duration = Duration::from_micros(20);
/// If they come so fast, another thread writes many of them when it is woken for one.
const BRISK: Duration = Duration::from_micros(4);
/// How many messages in a row must come fast until others wait to be written together: one that waits is a wake-up
/// late.
const IN_ROW: u32 = 2;

/// A socket link.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) link: LinkId,
    shared: Arc<Shared>,
    out: Mutex<Out>,
    pub(crate) sharing: Arc<Sharing>,
    /// When the peer was last heard, in microseconds of the reactor's clock.
    heard: AtomicU64,
    /// When it was asked for a sign of life and had not been heard since.
    asked: AtomicU64,
}

/// What is on its way out, under one lock with what the reactor is told about it.
#[derive(Debug)]
struct Out {
    outbox: Outbox<BodySegment>,
    /// Descriptors that go with what is written next; `None` once the system lets us pass no more, since too many are
    /// on their way: then offers go without, and are declined.
    passing: Option<VecDeque<Fd>>,
    /// Set while messages may be written: after the handshake, until the end.
    socket: Option<Arc<Fd>>,
    /// The socket takes no more now; the reactor waits for room.
    blocked: bool,
    /// Nothing more is accepted.
    ended: bool,
    /// Whether messages wait for others, and who flushes them.
    holds: Holds,
    /// How many wait, if [`Holds::Caller`].
    held: usize,
    /// When the last message came that could have waited, and how many have come at short intervals.
    came_at: Option<Instant>,
    in_row: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Holds {
    Nothing,
    /// Whoever was told so, at once.
    Somebody,
    /// Who makes calls, before it waits for one or when enough wait; or else the reactor, before long.
    Caller,
}

impl Out {
    /// Who should write this message, and others that come as fast.
    fn pace(&mut self, now: Instant) -> Holds {
        let before = self.came_at.replace(now);
        let gap = before.map_or(Duration::MAX, |before| now.saturating_duration_since(before));
        self.in_row = if gap < RAPID { self.in_row.saturating_add(1) } else { 0 };
        match self.in_row {
            ..IN_ROW => Holds::Nothing,
            _ if gap < BRISK => Holds::Somebody,
            _ => Holds::Caller,
        }
    }

    fn push_blocks(&mut self, message: BlockMessage) {
        self.outbox.push(Descriptor::plain(Message::Blocks(message)), &[], Vec::new(), None);
    }
}

impl Connection {
    pub(crate) fn new(link: LinkId, shared: Arc<Shared>) -> Arc<Self> {
        let out = Out {
            outbox: Outbox::new(),
            passing: Some(VecDeque::new()),
            socket: None,
            blocked: false,
            ended: false,
            holds: Holds::Nothing,
            held: 0,
            came_at: None,
            in_row: 0,
        };
        Arc::new(Self {
            link,
            sharing: Sharing::new(&shared),
            shared,
            out: Mutex::new(out),
            heard: AtomicU64::new(0),
            asked: AtomicU64::new(0),
        })
    }

    /// The handshake is done: messages may be written to `socket`. Called by the reactor, which has it
    /// registered. `terms` are those of shared memory, if descriptors can be passed over this socket. Returns
    /// the messages that are out now.
    pub(crate) fn open(&self, socket: Arc<Fd>, terms: Option<Terms>) -> io::Result<Vec<MessageId>> {
        self.heard_now(now());
        let mut out = self.out.lock();
        out.socket = Some(socket);
        if let Some(terms) = terms {
            // Not before the socket is there: what is offered has to get out.
            self.sharing.start(terms);
        }
        self.write_out(&mut out)
    }

    /// The socket has room again. Returns the messages that are out now.
    pub(crate) fn writable(&self) -> io::Result<Vec<MessageId>> {
        self.write_out(&mut self.out.lock())
    }

    /// Accepts no more messages and forgets those that wait.
    pub(crate) fn end(&self) {
        let mut out = self.out.lock();
        out.ended = true;
        out.socket = None;
        let outbox = std::mem::take(&mut out.outbox);
        let passing = std::mem::take(&mut out.passing);
        drop(out);
        // Regions may belong to Python: their owners' drop must not run under our lock.
        drop((outbox, passing));
        self.sharing.end();
    }

    /// Whether nothing waits to be written.
    pub(crate) fn is_flushed(&self) -> bool {
        self.out.lock().outbox.is_empty()
    }

    pub(crate) fn heard_now(&self, now: Instant) {
        self.heard.store(self.shared.micros(now), Ordering::Relaxed);
    }

    /// Answers a ping.
    pub(crate) fn pong(&self, mark: u32) -> io::Result<()> {
        self.signal(FrameHeader::pong(mark))
    }

    fn signal(&self, header: FrameHeader) -> io::Result<()> {
        let mut out = self.out.lock();
        if out.ended || out.socket.is_none() {
            return Ok(());
        }
        out.outbox.push_signal(header);
        if out.blocked { Ok(()) } else { self.write_out(&mut out).map(|_| ()) }
    }

    /// Tells the peer about shared memory. If that is not possible, the connection ends as soon as what the peer
    /// said last is read.
    pub(crate) fn say(&self, said: Vec<Said>) {
        if said.is_empty() {
            return;
        }
        let mut out = self.out.lock();
        if out.ended || out.socket.is_none() {
            return;
        }
        for (message, fd) in said {
            // It goes with the next bytes that are written, which are the message's or come before it.
            if let Some(passing) = &mut out.passing {
                passing.extend(fd);
            }
            out.push_blocks(message);
        }
        if !out.blocked
            && let Err(error) = self.write_out(&mut out)
        {
            self.give_up(out, &error);
        }
    }

    /// Tells the peer which of its blocks are free.
    pub(crate) fn say_returns(&self) {
        self.say(self.sharing.returns().into_iter().map(|message| (message, None)).collect());
    }

    /// Writes until all is out or the socket takes no more; keeps the reactor's interest in step.
    fn write_out(&self, out: &mut Out) -> io::Result<Vec<MessageId>> {
        let mut sent = Vec::new();
        (out.holds, out.held) = (Holds::Nothing, 0);
        let Some(socket) = out.socket.clone() else { return Ok(sent) };
        let mut full = false;
        while !full && !out.outbox.is_empty() {
            let passing = out.passing.as_ref();
            let passed = passing.and_then(VecDeque::front).map(AsFd::as_fd);
            let with_one = passed.is_some();
            // One descriptor goes with one write. The bytes of its offer are still to be written, so if more
            // descriptors wait, a byte for each of them is there.
            let limit = if passing.is_some_and(|passing| passing.len() > 1) { 1 } else { u64::MAX };
            match send_pieces(socket.as_fd(), first_bytes(out.outbox.pieces(), limit), passed) {
                Ok(count) => {
                    out.outbox.advance(count, |id| sent.push(id));
                    // Of what it takes in part, the descriptor goes first.
                    if let Some(passing) = out.passing.as_mut().filter(|_| with_one) {
                        passing.pop_front();
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => full = true,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if with_one && error.raw_os_error() == Some(libc::ETOOMANYREFS) => {
                    tracing::info!("too many descriptors are on their way; tensors go through sockets");
                    out.passing = None;
                }
                Err(error) => return Err(error),
            }
        }
        if full != out.blocked {
            out.blocked = full;
            let interest = if full { EventFlags::IN | EventFlags::OUT } else { EventFlags::IN };
            self.shared.set_interest(self.link, &socket, interest)?;
        }
        Ok(sent)
    }

    /// Queues a message. Tells whether it may be written now.
    fn queue(&self, out: &mut Out, message: Described, id: Option<MessageId>) -> bool {
        if out.ended {
            return false;
        }
        // Before the message: who gets an answer may send again at once, and then has the block for it.
        for message in self.sharing.returns() {
            out.push_blocks(message);
        }
        let (descriptor, inline, body) = message;
        out.outbox.push(descriptor, &inline, body, id);
        !out.blocked && out.socket.is_some()
    }

    /// Writes what is queued; tells whether the message that was queued last, of this id, is out.
    fn write_message(&self, mut out: MutexGuard<'_, Out>, id: Option<MessageId>) -> bool {
        match self.write_out(&mut out) {
            Ok(sent) => id.is_none_or(|id| sent.contains(&id)),
            Err(error) => {
                self.give_up(out, &error);
                false
            }
        }
    }

    /// Gives up a socket that cannot be written to.
    fn give_up(&self, mut out: MutexGuard<'_, Out>, error: &io::Error) {
        out.socket = None;
        drop(out);
        self.fail(&error.to_string());
    }

    /// Makes the segments that were missed, unless others wait for this thread: then the next that sends does.
    fn make_segments(&self) {
        if self.shared.is_here() {
            return;
        }
        self.say(self.sharing.make());
    }

    fn fail(&self, reason: &str) {
        self.shared.command(Command::Fail(self.link, reason.to_owned()));
    }
}

/// Whether a message may wait for others.
fn is_small(message: &Outbound) -> bool {
    message.body.len() <= SMALL
}

/// A descriptor, the start of the body, and the rest of it.
type Described = (Descriptor, Vec<u8>, Vec<BodySegment>);

fn describe(message: Outbound, places: &[Place]) -> Described {
    let (descriptor, payload, buffers) = message.describe_placed(places);
    let inline = payload.len() <= INLINE_PAYLOAD;
    if inline && buffers.is_empty() {
        return (descriptor, payload, Vec::new());
    }
    let (inline, apart) =
        if inline { (payload, None) } else { (Vec::new(), Some(Region::from_vec(payload))) };
    (descriptor, inline, apart.into_iter().chain(buffers).map(BodySegment).collect())
}

/// The first `limit` bytes of `pieces`.
fn first_bytes<'a>(
    pieces: impl Iterator<Item = Piece<'a, BodySegment>>,
    limit: u64,
) -> impl Iterator<Item = Piece<'a, BodySegment>> {
    pieces.scan(limit, |left, piece| {
        let piece = match piece {
            Piece::Bytes(bytes) => {
                Piece::Bytes(&bytes[..bytes.len().min(usize::try_from(*left).unwrap_or(usize::MAX))])
            }
            Piece::Part { segment, offset, len } => Piece::Part { segment, offset, len: len.min(*left) },
        };
        let taken = match piece {
            Piece::Bytes(bytes) => bytes.len() as u64,
            Piece::Part { len, .. } => len,
        };
        *left -= taken;
        (taken > 0).then_some(piece)
    })
}

impl Link for Connection {
    fn send(&self, message: Outbound) -> bool {
        let id = message.id;
        // The bytes are copied here and now: nobody waits for this thread.
        let (places, missing) = self.sharing.place(&message.body.buffers, now());
        let message = describe(message, &places);
        let mut out = self.out.lock();
        if !self.queue(&mut out, message, id) {
            return false;
        }
        let sent = self.write_message(out, id);
        if missing {
            self.make_segments();
        }
        sent
    }

    fn hold(&self, message: Outbound) -> bool {
        if !is_small(&message) {
            self.send(message);
            return false;
        }
        let (id, message) = (message.id, describe(message, &[]));
        let mut out = self.out.lock();
        if !self.queue(&mut out, message, id) || out.holds == Holds::Somebody {
            return false;
        }
        out.holds = Holds::Somebody;
        true
    }

    fn flush(&self) {
        let mut out = self.out.lock();
        if out.holds != Holds::Nothing
            && let Err(error) = self.write_out(&mut out)
        {
            self.give_up(out, &error);
        }
    }

    fn send_along(&self, message: Outbound) -> Sent {
        if !is_small(&message) {
            return self.send(message).into();
        }
        let (id, message) = (message.id, describe(message, &[]));
        let mut out = self.out.lock();
        let (pace, before) = (out.pace(now()), out.holds);
        let holds = match before {
            Holds::Nothing if pace == Holds::Nothing && self.shared.is_at_work() => Holds::Somebody,
            Holds::Nothing => pace,
            Holds::Somebody | Holds::Caller => before,
        };
        if !self.queue(&mut out, message, if holds == Holds::Nothing { id } else { None }) {
            return Sent::Later;
        }
        out.held += 1;
        if holds == Holds::Nothing || (holds == Holds::Caller && out.held >= MOST) {
            return self.write_message(out, id).into();
        }
        out.holds = holds;
        drop(out);
        match (before, holds) {
            (Holds::Nothing, Holds::Caller) => {
                self.shared.flush_later(self.link);
                Sent::Held
            }
            (Holds::Nothing, _) => {
                self.shared.flush_soon(self.link);
                Sent::Out
            }
            _ => Sent::Out,
        }
    }

    fn has_room_for(&self, body: &Body) -> bool {
        self.sharing.has_room_for(&body.buffers, now())
    }

    fn make_room(&self) {
        self.make_segments();
    }

    fn keep_alive(&self, now: Instant, limit: Duration) {
        let (heard, asked) = (self.heard.load(Ordering::Relaxed), self.asked.load(Ordering::Relaxed));
        let now = self.shared.micros(now);
        if asked > heard {
            if Duration::from_micros(now.saturating_sub(asked)) >= limit {
                self.fail(&format!("no sign of life for {} s", limit.as_secs_f64()));
            }
            return;
        }
        self.asked.store(now.max(heard + 1), Ordering::Relaxed);
        if let Err(error) = self.signal(FrameHeader::ping(0)) {
            self.fail(&error.to_string());
        }
    }

    fn close(&self, limit: Instant) {
        self.shared.command(Command::Close(self.link, limit));
    }
}
