//! The framing of one connection: what to write next, and messages put together again.
//!
//! [`Outbox`] orders the messages that wait to be written: by priority, and large bodies in chunks,
//! so that a small call never waits behind a large tensor. [`Inbox`] takes the bytes that arrive,
//! in any split, and assembles messages in memory that the caller provides once their descriptor
//! has been checked (NET-2). Neither does I/O: the driver asks for pieces, writes them and says how
//! far it came; it may read straight into [`Inbox::target`].

use std::collections::VecDeque;

use rustc_hash::FxHashMap;

use crate::ids::MessageId;
use crate::wire::error::WireError;
use crate::wire::frame::{FrameHeader, FrameKind, HEADER_LEN, Priority};
use crate::wire::function::{Names, Slots};
use crate::wire::limits::Limits;
use crate::wire::message::Descriptor;
use crate::wire::tensor::{BufferDesc, Place};

/// Largest part of a body in one frame. Between two chunks a more urgent message may pass.
pub const CHUNK: u64 = 1 << 20;

/// Room for the descriptor of an ordinary call.
const USUAL_DESCRIPTOR: usize = 96;

/// Frames are committed to the wire while fewer bytes than this are committed.
const COMMIT_AHEAD: u64 = 64 << 10;

/// Why a connection cannot go on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectionError {
    /// The bytes are not of the wire format.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// A data frame belongs to no open message.
    #[error("frame of stream {0}, which is not open")]
    UnknownStream(u32),
    /// A message starts on a stream whose last message is incomplete.
    #[error("stream {0} is started twice")]
    StreamInUse(u32),
    /// More messages are incomplete at once than the limit allows.
    #[error("more than {limit} messages are under way at once")]
    TooManyStreams {
        /// The limit.
        limit: u32,
    },
    /// A frame brings more of a body than its message needs, or ends it too early or too late.
    #[error("frame of {found} body bytes (end: {end}) where stream {stream} needs {needed}")]
    BodyLength {
        /// The stream.
        stream: u32,
        /// Bytes that its message still needs.
        needed: u64,
        /// Bytes that the frame announces.
        found: u64,
        /// Whether the frame says that it is the last one.
        end: bool,
    },
    /// A buffer lies in shared memory that is not lent to us.
    #[error("{len} bytes at {offset} of shared segment {segment} are not lent here")]
    NotLent {
        /// The segment.
        segment: u64,
        /// First byte.
        offset: u64,
        /// Number of bytes.
        len: u64,
    },
    /// There is no memory for an announced body.
    #[error("no memory for {len} bytes of a message")]
    NoMemory {
        /// Bytes asked for.
        len: u64,
    },
}

/// A contiguous part of a body whose bytes the driver knows how to write.
pub trait Segment: Clone {
    /// Number of bytes.
    fn size(&self) -> u64;
}

/// What to write next.
#[derive(Debug, Clone, Copy)]
pub enum Piece<'a, S> {
    /// These bytes.
    Bytes(&'a [u8]),
    /// `len` bytes of `segment` from `offset`.
    Part {
        /// The body segment.
        segment: &'a S,
        /// First byte.
        offset: u64,
        /// Number of bytes.
        len: u64,
    },
}

/// Messages that wait to be written to one connection.
#[derive(Debug)]
pub struct Outbox<S> {
    queues: [VecDeque<Outgoing<S>>; 3],
    committed: VecDeque<Committed<S>>,
    committed_bytes: u64,
    waiting_bytes: u64,
    next_stream: u32,
    names: Names,
}

/// A message of which at least the last chunk is not committed yet.
#[derive(Debug)]
struct Outgoing<S> {
    id: Option<MessageId>,
    stream: u32,
    priority: Priority,
    /// Descriptor and the inline start of the body; taken by the first frame.
    head: Option<Head>,
    body: VecDeque<S>,
    /// Offset in the first segment of `body`.
    offset: u64,
    left: u64,
}

#[derive(Debug)]
struct Head {
    /// Room for the header, then the descriptor, then the inline bytes.
    bytes: Vec<u8>,
    control_len: u32,
    inline: u64,
}

/// Bytes that must be written next, in this order.
#[derive(Debug)]
enum Committed<S> {
    Bytes {
        bytes: Vec<u8>,
        written: usize,
    },
    Part {
        segment: S,
        offset: u64,
        left: u64,
    },
    /// Everything of this message has been written.
    Sent(Option<MessageId>),
}

impl<S: Segment> Default for Outbox<S> {
    fn default() -> Self {
        Self::new()
    }
}

impl<S: Segment> Outbox<S> {
    /// An empty outbox.
    pub fn new() -> Self {
        Self {
            queues: Default::default(),
            committed: VecDeque::new(),
            committed_bytes: 0,
            waiting_bytes: 0,
            next_stream: 1,
            names: Names::default(),
        }
    }

    /// Queues a message. The body is `inline` followed by `body`; `id` is given back once all is written.
    pub fn push(&mut self, mut descriptor: Descriptor, inline: &[u8], body: Vec<S>, id: Option<MessageId>) {
        let left: u64 = body.iter().map(Segment::size).sum();
        let priority = descriptor.message.priority(inline.len() as u64 + left);
        self.names.shorten(&mut descriptor.message, priority);
        let mut bytes = Vec::with_capacity(HEADER_LEN + USUAL_DESCRIPTOR + inline.len());
        bytes.resize(HEADER_LEN, 0);
        descriptor.encode_into(&mut bytes);
        let control_len = u32::try_from(bytes.len() - HEADER_LEN).unwrap_or(u32::MAX);
        bytes.extend_from_slice(inline);
        let inline = inline.len() as u64;
        let stream = self.next_stream;
        self.next_stream = self.next_stream.checked_add(1).unwrap_or(1);
        self.waiting_bytes += bytes.len() as u64 + left;
        let head = Some(Head { bytes, control_len, inline });
        let message = Outgoing { id, stream, priority, head, body: body.into(), offset: 0, left };
        self.queues[priority as usize].push_back(message);
    }

    /// Queues a frame without a message (a ping or its answer), ahead of all that is not committed.
    pub fn push_signal(&mut self, header: FrameHeader) {
        self.commit_bytes(header.encode().to_vec());
    }

    /// Whether everything has been written.
    pub fn is_empty(&self) -> bool {
        self.waiting_bytes == 0 && self.committed_bytes == 0
    }

    /// Bytes that wait, frames' headers aside.
    pub fn len(&self) -> u64 {
        self.waiting_bytes + self.committed_bytes
    }

    /// The next pieces to write, in order. Call [`advance`](Self::advance) with what was written.
    pub fn pieces(&mut self) -> impl Iterator<Item = Piece<'_, S>> {
        while self.committed_bytes < COMMIT_AHEAD && self.commit_frame() {}
        self.committed.iter().filter_map(|piece| match piece {
            Committed::Bytes { bytes, written } => Some(Piece::Bytes(&bytes[*written..])),
            Committed::Part { segment, offset, left } => {
                Some(Piece::Part { segment, offset: *offset, len: *left })
            }
            Committed::Sent(_) => None,
        })
    }

    /// Takes `written` bytes off the front; calls `sent` for each message that is now out.
    pub fn advance(&mut self, written: u64, mut sent: impl FnMut(MessageId)) {
        let mut left = written;
        self.committed_bytes = self.committed_bytes.saturating_sub(written);
        while let Some(front) = self.committed.front_mut() {
            match front {
                Committed::Bytes { bytes, written } => {
                    let step = left.min((bytes.len() - *written) as u64);
                    *written += usize::try_from(step).unwrap_or(usize::MAX);
                    left -= step;
                    if *written < bytes.len() {
                        return;
                    }
                }
                Committed::Part { offset, left: part, .. } => {
                    let step = left.min(*part);
                    *offset += step;
                    *part -= step;
                    left -= step;
                    if *part > 0 {
                        return;
                    }
                }
                Committed::Sent(id) => {
                    if let Some(id) = id.take() {
                        sent(id);
                    }
                }
            }
            self.committed.pop_front();
        }
    }

    /// Moves one frame of the most urgent message to the committed bytes.
    fn commit_frame(&mut self) -> bool {
        let Some(queue) = self.queues.iter_mut().find(|queue| !queue.is_empty()) else { return false };
        let Some(mut message) = queue.pop_front() else { return false };
        let chunk = message.left.min(CHUNK);
        let end = chunk == message.left;
        let mut header = FrameHeader {
            kind: FrameKind::Data,
            end,
            priority: message.priority,
            stream: message.stream,
            control_len: 0,
            body_len: chunk,
        };
        let bytes = match message.head.take() {
            Some(mut head) => {
                header.kind = FrameKind::Message;
                header.control_len = head.control_len;
                header.body_len += head.inline;
                head.bytes[..HEADER_LEN].copy_from_slice(&header.encode());
                self.waiting_bytes -= head.bytes.len() as u64;
                head.bytes
            }
            None => header.encode().to_vec(),
        };
        self.commit_bytes(bytes);
        self.waiting_bytes -= chunk;
        self.committed_bytes += chunk;
        let mut left = chunk;
        while left > 0 {
            let Some(segment) = message.body.front() else { break };
            let part = left.min(segment.size() - message.offset);
            if part > 0 {
                self.committed.push_back(Committed::Part {
                    segment: segment.clone(),
                    offset: message.offset,
                    left: part,
                });
            }
            left -= part;
            message.offset += part;
            if message.offset == segment.size() {
                message.body.pop_front();
                message.offset = 0;
            }
        }
        message.left -= chunk;
        if end {
            self.committed.push_back(Committed::Sent(message.id));
        } else {
            self.queues[message.priority as usize].push_front(message);
        }
        true
    }

    fn commit_bytes(&mut self, bytes: Vec<u8>) {
        self.committed_bytes += bytes.len() as u64;
        self.committed.push_back(Committed::Bytes { bytes, written: 0 });
    }
}

/// Gives memory for the bodies of messages.
pub trait Allocate {
    /// Memory of exactly the length asked for.
    type Memory: AsRef<[u8]> + AsMut<[u8]>;

    /// Memory of `len` bytes, or `None` if there is none.
    fn allocate(&mut self, len: u64) -> Option<Self::Memory>;

    /// The `len` bytes at `offset` of a segment that the peer shares, which are then the message's alone;
    /// `None` if they are not lent to us. Only asked for where [`Limits::blocks`] is set.
    fn borrow(&mut self, segment: u64, offset: u64, len: u64) -> Option<Self::Memory> {
        let _ = (segment, offset, len);
        None
    }
}

/// What has arrived.
#[derive(Debug)]
pub enum Arrival<M> {
    /// A whole message.
    Message(Arrived<M>),
    /// The peer asks whether we are there; the answer repeats the mark.
    Ping(u32),
    /// The peer answers the ping with this mark.
    Pong(u32),
}

/// A whole message: its checked descriptor and its body, each part in memory of its own.
#[derive(Debug)]
pub struct Arrived<M> {
    /// The descriptor.
    pub descriptor: Descriptor,
    /// The payload.
    pub payload: M,
    /// The buffers that the descriptor announced, in order.
    pub buffers: Vec<M>,
}

/// Puts the messages of one connection together.
#[derive(Debug)]
pub struct Inbox<A: Allocate> {
    limits: Limits,
    allocator: A,
    state: State,
    /// Messages that come in more than one frame.
    streams: FxHashMap<u32, Assembly<A::Memory>>,
    /// The message that comes in the present frame, if that is its only one.
    single: Option<Assembly<A::Memory>>,
    open_bytes: u64,
    slots: Slots,
    arrivals: VecDeque<Arrival<A::Memory>>,
}

#[derive(Debug)]
enum State {
    Header { bytes: [u8; HEADER_LEN], have: usize },
    Control { header: FrameHeader, bytes: Vec<u8> },
    Body { stream: u32, left: u64, end: bool },
}

/// A message whose body is still arriving.
#[derive(Debug)]
struct Assembly<M> {
    descriptor: Descriptor,
    payload: M,
    buffers: Vec<Part<M>>,
    /// How many parts are filled: the payload, then the buffers.
    filled: usize,
    /// How much of the next one is.
    offset: usize,
    left: u64,
    size: u64,
}

#[derive(Debug)]
enum Part<M> {
    /// Its bytes come with the body.
    Body(M),
    /// Its bytes are in place.
    Block(M),
}

impl<M: AsRef<[u8]>> Part<M> {
    /// Bytes that come with the body.
    fn body_len(&self) -> usize {
        match self {
            Self::Body(memory) => memory.as_ref().len(),
            Self::Block(_) => 0,
        }
    }

    fn into_memory(self) -> M {
        match self {
            Self::Body(memory) | Self::Block(memory) => memory,
        }
    }
}

impl<M: AsRef<[u8]> + AsMut<[u8]>> Assembly<M> {
    /// Bytes that come with the body for the part that is being filled; `None` if all are filled.
    fn part_len(&self) -> Option<usize> {
        match self.filled.checked_sub(1) {
            None => Some(self.payload.as_ref().len()),
            Some(buffer) => self.buffers.get(buffer).map(Part::body_len),
        }
    }

    /// The rest of the part that is being filled.
    fn target(&mut self) -> &mut [u8] {
        while self.part_len() == Some(self.offset) {
            self.filled += 1;
            self.offset = 0;
        }
        let memory = match self.filled.checked_sub(1) {
            None => &mut self.payload,
            Some(buffer) => match self.buffers.get_mut(buffer) {
                Some(Part::Body(memory)) => memory,
                Some(Part::Block(_)) | None => return &mut [],
            },
        };
        &mut memory.as_mut()[self.offset..]
    }

    fn advance(&mut self, count: usize) {
        self.offset += count;
        self.left -= count as u64;
    }
}

const START: State = State::Header { bytes: [0; HEADER_LEN], have: 0 };

impl<A: Allocate> Inbox<A> {
    /// An inbox that takes memory from `allocator` and accepts nothing beyond `limits`.
    pub fn new(limits: Limits, allocator: A) -> Self {
        Self {
            limits,
            allocator,
            state: START,
            streams: FxHashMap::default(),
            single: None,
            open_bytes: 0,
            slots: Slots::default(),
            arrivals: VecDeque::new(),
        }
    }

    /// The next arrival, oldest first.
    pub fn poll(&mut self) -> Option<Arrival<A::Memory>> {
        self.arrivals.pop_front()
    }

    /// Whether the bytes so far end between two frames and no message is incomplete.
    pub fn is_idle(&self) -> bool {
        matches!(self.state, State::Header { have: 0, .. }) && self.streams.is_empty()
    }

    /// Takes bytes as they arrived.
    ///
    /// # Errors
    ///
    /// If they are not what a correct peer would send. The connection is of no further use then.
    pub fn feed(&mut self, mut bytes: &[u8]) -> Result<(), ConnectionError> {
        while !bytes.is_empty() {
            let used = self.step(bytes)?;
            bytes = &bytes[used..];
        }
        Ok(())
    }

    /// Where the next bytes of a body belong, if they do: read into it and call [`filled`](Self::filled).
    pub fn target(&mut self) -> Option<&mut [u8]> {
        let State::Body { stream, left, .. } = self.state else { return None };
        let target = self.arriving(stream)?.target();
        let len = target.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        Some(&mut target[..len])
    }

    /// Says that the first `count` bytes of [`target`](Self::target) have been read.
    ///
    /// # Errors
    ///
    /// As [`feed`](Self::feed).
    pub fn filled(&mut self, count: usize) -> Result<(), ConnectionError> {
        let State::Body { stream, left, end } = &mut self.state else { return Ok(()) };
        let (stream, end) = (*stream, *end);
        *left -= count as u64;
        let done = *left == 0;
        if let Some(assembly) = self.arriving(stream) {
            assembly.advance(count);
        }
        if done { self.end_of_frame(stream, end) } else { Ok(()) }
    }

    /// The message that the present frame, of `stream`, is part of.
    fn arriving(&mut self, stream: u32) -> Option<&mut Assembly<A::Memory>> {
        match &mut self.single {
            None => self.streams.get_mut(&stream),
            single => single.as_mut(),
        }
    }

    /// Uses some of `bytes` (at least one) and returns how many.
    fn step(&mut self, bytes: &[u8]) -> Result<usize, ConnectionError> {
        match &mut self.state {
            State::Header { bytes: header, have } => {
                let used = bytes.len().min(HEADER_LEN - *have);
                header[*have..*have + used].copy_from_slice(&bytes[..used]);
                *have += used;
                if *have == HEADER_LEN {
                    let header = FrameHeader::decode(header, &self.limits)?;
                    self.start_of_frame(header)?;
                }
                Ok(used)
            }
            State::Control { header, bytes: control } => {
                let used = bytes.len().min(header.control_len as usize - control.len());
                control.extend_from_slice(&bytes[..used]);
                if control.len() == header.control_len as usize {
                    let (header, control) = (*header, std::mem::take(control));
                    self.start_of_message(header, &control)?;
                }
                Ok(used)
            }
            State::Body { .. } => {
                let target = self.target().unwrap_or_default();
                let used = bytes.len().min(target.len());
                target[..used].copy_from_slice(&bytes[..used]);
                self.filled(used)?;
                Ok(used)
            }
        }
    }

    fn start_of_frame(&mut self, header: FrameHeader) -> Result<(), ConnectionError> {
        self.state = START;
        match header.kind {
            FrameKind::Ping => self.arrivals.push_back(Arrival::Ping(header.stream)),
            FrameKind::Pong => self.arrivals.push_back(Arrival::Pong(header.stream)),
            FrameKind::Data => {
                let assembly =
                    self.streams.get(&header.stream).ok_or(ConnectionError::UnknownStream(header.stream))?;
                return self.expect_body(header, assembly.left);
            }
            FrameKind::Message => {
                if self.streams.contains_key(&header.stream) {
                    return Err(ConnectionError::StreamInUse(header.stream));
                }
                if self.streams.len() >= self.limits.max_open_streams as usize {
                    return Err(ConnectionError::TooManyStreams { limit: self.limits.max_open_streams });
                }
                let room = header.control_len.min(4096) as usize;
                self.state = State::Control { header, bytes: Vec::with_capacity(room) };
            }
        }
        Ok(())
    }

    fn start_of_message(&mut self, header: FrameHeader, control: &[u8]) -> Result<(), ConnectionError> {
        let mut descriptor = Descriptor::decode(control, &self.limits)?;
        self.slots.lengthen(&mut descriptor.message)?;
        let size = descriptor.body_len()?;
        let open = self.open_bytes.saturating_add(size);
        if open > self.limits.max_message {
            return Err(WireError::BodyTooLarge { len: open, limit: self.limits.max_message }.into());
        }
        let payload = self.allocate(descriptor.payload_len)?;
        let mut buffers = Vec::with_capacity(descriptor.buffers.len());
        for &BufferDesc { len, place } in &descriptor.buffers {
            buffers.push(match place {
                Place::Body => Part::Body(self.allocate(len)?),
                Place::Block { segment, offset } => {
                    let memory = self.allocator.borrow(segment, offset, len);
                    Part::Block(memory.ok_or(ConnectionError::NotLent { segment, offset, len })?)
                }
            });
        }
        let assembly = Assembly { descriptor, payload, buffers, filled: 0, offset: 0, left: size, size };
        self.open_bytes = open;
        if header.end {
            self.single = Some(assembly);
        } else {
            self.streams.insert(header.stream, assembly);
        }
        self.expect_body(header, size)
    }

    fn allocate(&mut self, len: u64) -> Result<A::Memory, ConnectionError> {
        self.allocator.allocate(len).ok_or(ConnectionError::NoMemory { len })
    }

    /// Goes on with the body bytes of a frame, of which its message still needs `needed`.
    fn expect_body(&mut self, header: FrameHeader, needed: u64) -> Result<(), ConnectionError> {
        let FrameHeader { stream, body_len: left, end, .. } = header;
        if left > needed || end != (left == needed) {
            return Err(ConnectionError::BodyLength { stream, needed, found: left, end });
        }
        if left == 0 {
            return self.end_of_frame(stream, end);
        }
        self.state = State::Body { stream, left, end };
        Ok(())
    }

    fn end_of_frame(&mut self, stream: u32, end: bool) -> Result<(), ConnectionError> {
        self.state = START;
        if !end {
            return Ok(());
        }
        let single = self.single.take();
        let assembly = single.or_else(|| self.streams.remove(&stream));
        let assembly = assembly.ok_or(ConnectionError::UnknownStream(stream))?;
        self.open_bytes -= assembly.size;
        let Assembly { descriptor, payload, buffers, .. } = assembly;
        let buffers = buffers.into_iter().map(Part::into_memory).collect();
        self.arrivals.push_back(Arrival::Message(Arrived { descriptor, payload, buffers }));
        Ok(())
    }
}
