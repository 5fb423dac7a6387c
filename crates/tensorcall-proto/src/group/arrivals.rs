//! [`Arrivals`]: what comes from one rank, put together.

use std::collections::{HashMap, VecDeque};
use std::fmt::Debug;

use super::envelope::{self, EnvelopeError, Record, WireLink};
use super::{PIECE, is_wide};
use crate::connection::{Arrived, ConnectionError};
use crate::wire::descriptor::Descriptor;
use crate::wire::error::WireError;
use crate::wire::frame::Priority;
use crate::wire::limits::Limits;
use crate::wire::tensor::BufferDesc;

/// Messages that may be incomplete at once. A sender has few under way; but some groups are done with
/// sending long before anybody receives.
const MAX_OPEN: u32 = 1 << 14;

/// Pieces that may have been announced and not received; as with messages.
const MAX_PIECES: usize = 1 << 14;

/// Pieces that are received at once; further ones wait.
const RECEIVING: usize = super::MAX_WINDOW;

/// Gives memory for what comes.
pub trait Places {
    /// Memory of exactly the length asked for.
    type Memory: AsRef<[u8]> + AsMut<[u8]> + Debug;
    /// Such memory while pieces of it are being received.
    type Wide: Debug;
    /// A part of it that a piece is received into.
    type Target: Debug;

    /// Memory of `len` bytes, or `None` if there is none.
    fn allocate(&mut self, len: u64) -> Option<Self::Memory>;

    /// Memory of `len` bytes for pieces, or `None` if there is none.
    fn allocate_wide(&mut self, len: u64) -> Option<Self::Wide>;

    /// The next `len` bytes of `wide`, from its beginning on; `None` if there are less.
    fn carve(&mut self, wide: &mut Self::Wide, len: u64) -> Option<Self::Target>;

    /// The whole, when all of it has been received; `None` if there is no memory.
    fn close(&mut self, wide: Self::Wide) -> Option<Self::Memory>;
}

/// What has come. Links are named as this rank names them.
#[derive(Debug)]
pub enum Arrival<M, T> {
    /// Bytes of a handshake.
    Handshake {
        /// The link.
        link: WireLink,
        /// What is said.
        bytes: Vec<u8>,
    },
    /// A whole message.
    Message {
        /// The link that it is on.
        link: WireLink,
        /// The message.
        arrived: Arrived<M>,
    },
    /// A piece comes: receive it, then call [`Arrivals::landed`].
    Piece {
        /// Its number.
        number: u64,
        /// How many bytes; no more than that where nobody wants them.
        len: u64,
        /// Where they belong; `None` if nobody wants them.
        target: Option<T>,
    },
    /// A link is over, as the other rank says.
    Closed {
        /// The link.
        link: WireLink,
        /// Why.
        text: String,
    },
    /// The other rank broke the protocol on a link, which is over by that.
    Broken {
        /// The link.
        link: WireLink,
        /// How.
        error: ConnectionError,
    },
    /// An envelope to that rank came damaged: all links with it are over.
    Reset,
    /// Nothing comes after this, and nothing is on its way.
    Bye,
}

/// See the module. Fed with envelopes, in order.
#[derive(Debug)]
pub struct Arrivals<P: Places> {
    from: u32,
    to: u32,
    limits: Limits,
    places: P,
    links: HashMap<WireLink, OpenLink>,
    streams: HashMap<u32, Assembly<P>>,
    /// Pieces that are being received or wait for that: of which message.
    pieces: HashMap<u64, u32>,
    /// Those that wait.
    waiting: VecDeque<Coming<P::Target>>,
    next_piece: u64,
    open_bytes: u64,
    /// Nothing comes after the pieces that are on their way.
    bye: bool,
    events: VecDeque<Arrival<P::Memory, P::Target>>,
}

/// A link that messages are taken on.
#[derive(Debug, Default)]
struct OpenLink {
    /// Its handshake is done.
    is_open: bool,
    /// Messages that have begun and were not handed on, by priority, oldest first.
    begun: [VecDeque<u32>; 3],
    /// It is over after these messages, for this reason.
    closing: Option<String>,
}

/// A piece that comes: its number, its length and where it belongs.
type Coming<T> = (u64, u64, Option<T>);

/// A message that is not complete.
#[derive(Debug)]
struct Assembly<P: Places> {
    link: WireLink,
    control: Vec<u8>,
    control_len: usize,
    /// Narrow bytes that have not come.
    narrow_left: u64,
    /// Known when the whole descriptor is there.
    descriptor: Option<Descriptor>,
    /// The payload, then the buffers.
    parts: Vec<Part<P>>,
    /// The narrow part that is being filled, and how far.
    filling: (usize, usize),
    /// The wide part that is being announced.
    announcing: usize,
    pieces: usize,
    size: u64,
}

#[derive(Debug)]
enum Part<P: Places> {
    Narrow(P::Memory),
    /// With the number of bytes that have not been announced.
    Wide(P::Wide, u64),
}

impl<P: Places> Arrivals<P> {
    /// Takes what rank `from` sends to rank `to`, with memory from `places`, and nothing beyond `limits`.
    pub fn new(from: u32, to: u32, limits: Limits, places: P) -> Self {
        Self {
            from,
            to,
            limits,
            places,
            links: HashMap::new(),
            streams: HashMap::new(),
            pieces: HashMap::new(),
            waiting: VecDeque::new(),
            next_piece: 0,
            open_bytes: 0,
            bye: false,
            events: VecDeque::new(),
        }
    }

    /// The next thing that came.
    pub fn poll(&mut self) -> Option<Arrival<P::Memory, P::Target>> {
        self.events.pop_front()
    }

    /// This rank begins the handshake of a link. What comes on it is kept until the link is
    /// [open](Self::open): the other rank may say it in the envelope that ends the handshake.
    pub fn expect(&mut self, link: WireLink) {
        self.links.entry(link).or_default();
    }

    /// The handshake of this link is done: messages on it are handed on from now on.
    pub fn open(&mut self, link: WireLink) {
        self.links.entry(link).or_default().is_open = true;
        self.deliver(link);
    }

    /// A link is over. What comes on it is dropped.
    pub fn close(&mut self, link: WireLink) {
        self.links.remove(&link);
        let open_bytes = &mut self.open_bytes;
        self.streams.retain(|_, assembly| {
            let stays = assembly.link != link;
            *open_bytes -= if stays { 0 } else { assembly.size };
            stays
        });
    }

    /// Takes an envelope. Those before a damaged record have been taken when there is an error.
    ///
    /// # Errors
    ///
    /// If it is none, or damaged: then all links with that rank are over.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<(), EnvelopeError> {
        for record in envelope::read(bytes, self.from, self.to)? {
            self.take(&record?)?;
        }
        Ok(())
    }

    /// A piece has been received, or dropped where nobody wanted it.
    pub fn landed(&mut self, number: u64) {
        let Some(stream) = self.pieces.remove(&number) else { return };
        if let Some(assembly) = self.streams.get_mut(&stream) {
            assembly.pieces -= 1;
            let link = assembly.link;
            self.deliver(link);
        }
        if let Some((number, len, target)) = self.waiting.pop_front() {
            self.events.push_back(Arrival::Piece { number, len, target });
        }
        self.end_if_bye();
    }

    fn end_if_bye(&mut self) {
        if self.bye && self.pieces.is_empty() {
            self.bye = false;
            self.events.push_back(Arrival::Bye);
        }
    }

    fn take(&mut self, record: &Record<'_>) -> Result<(), EnvelopeError> {
        match *record {
            Record::Handshake { link, bytes } => {
                let bytes = bytes.to_vec();
                self.events.push_back(Arrival::Handshake { link: link.mirrored(), bytes });
            }
            Record::Begin { link, stream, priority, control_len, narrow_len, bytes } => {
                let link = link.mirrored();
                if self.links.contains_key(&link) {
                    let result = self.begin(link, stream, priority, control_len, narrow_len);
                    let result = result.and_then(|()| self.fill(stream, bytes));
                    self.or_broken(link, result);
                }
            }
            Record::More { stream, bytes } => {
                if let Some(assembly) = self.streams.get(&stream) {
                    let link = assembly.link;
                    let result = self.fill(stream, bytes);
                    self.or_broken(link, result);
                }
            }
            Record::Piece { stream, number, len } => return self.announce(stream, number, len),
            Record::Close { link, at_once, text } => self.end(link.mirrored(), at_once, text),
            Record::Reset => self.events.push_back(Arrival::Reset),
            Record::Bye => {
                self.bye = true;
                self.end_if_bye();
            }
        }
        Ok(())
    }

    fn begin(
        &mut self,
        link: WireLink,
        stream: u32,
        priority: Priority,
        control_len: u32,
        narrow_len: u64,
    ) -> Result<(), ConnectionError> {
        if stream == 0 || self.streams.contains_key(&stream) {
            return Err(ConnectionError::StreamInUse(stream));
        }
        if self.streams.len() >= MAX_OPEN as usize {
            return Err(ConnectionError::TooManyStreams { limit: MAX_OPEN });
        }
        if control_len > self.limits.max_control {
            let len = control_len.into();
            return Err(WireError::ControlTooLarge { len, limit: self.limits.max_control }.into());
        }
        let assembly = Assembly {
            link,
            control: Vec::with_capacity(control_len.min(4096) as usize),
            control_len: control_len as usize,
            narrow_left: narrow_len,
            descriptor: None,
            parts: Vec::new(),
            filling: (0, 0),
            announcing: 0,
            pieces: 0,
            size: 0,
        };
        self.streams.insert(stream, assembly);
        if let Some(open) = self.links.get_mut(&link) {
            open.begun[priority as usize].push_back(stream);
        }
        Ok(())
    }

    /// Takes narrow bytes of a message.
    fn fill(&mut self, stream: u32, mut bytes: &[u8]) -> Result<(), ConnectionError> {
        let Some(assembly) = self.streams.get_mut(&stream) else { return Ok(()) };
        assembly.narrow_left =
            assembly.narrow_left.checked_sub(bytes.len() as u64).ok_or(ConnectionError::BodyLength {
                stream,
                needed: assembly.narrow_left,
                found: bytes.len() as u64,
                end: false,
            })?;
        if assembly.descriptor.is_none() {
            let count = bytes.len().min(assembly.control_len - assembly.control.len());
            assembly.control.extend_from_slice(&bytes[..count]);
            bytes = &bytes[count..];
            if assembly.control.len() < assembly.control_len {
                return Ok(());
            }
            let needed = assembly.narrow_left + bytes.len() as u64;
            self.describe(stream, needed)?;
        }
        let Some(assembly) = self.streams.get_mut(&stream) else { return Ok(()) };
        while !bytes.is_empty() {
            let target = assembly.narrow_target();
            let count = bytes.len().min(target.len());
            if count == 0 {
                break;
            }
            target[..count].copy_from_slice(&bytes[..count]);
            assembly.filling.1 += count;
            bytes = &bytes[count..];
        }
        let link = assembly.link;
        self.deliver(link);
        Ok(())
    }

    /// The descriptor is there, and `narrow` narrow bytes are to follow: makes room for the body.
    fn describe(&mut self, stream: u32, narrow: u64) -> Result<(), ConnectionError> {
        let Some(assembly) = self.streams.get_mut(&stream) else { return Ok(()) };
        let descriptor = Descriptor::decode(&assembly.control, &self.limits)?;
        let size = descriptor.body_len()?;
        let open = self.open_bytes.saturating_add(size);
        if open > self.limits.max_message {
            return Err(WireError::BodyTooLarge { len: open, limit: self.limits.max_message }.into());
        }
        let buffers = descriptor.buffers.iter().map(BufferDesc::body_len);
        let lens = std::iter::once(descriptor.payload_len).chain(buffers);
        let expected: u64 = lens.clone().filter(|&len| !is_wide(len)).sum();
        if expected != narrow {
            return Err(ConnectionError::BodyLength { stream, needed: expected, found: narrow, end: true });
        }
        for len in lens {
            let part = if is_wide(len) {
                self.places.allocate_wide(len).map(|wide| Part::Wide(wide, len))
            } else {
                self.places.allocate(len).map(Part::Narrow)
            };
            assembly.parts.push(part.ok_or(ConnectionError::NoMemory { len })?);
        }
        assembly.control = Vec::new();
        assembly.descriptor = Some(descriptor);
        assembly.size = size;
        self.open_bytes = open;
        Ok(())
    }

    fn announce(&mut self, stream: u32, number: u64, len: u64) -> Result<(), EnvelopeError> {
        let Some(missed) = number.checked_sub(self.next_piece) else {
            // It is on its way or has come; only whoever announced it did not know.
            return Ok(());
        };
        let room = MAX_PIECES.saturating_sub(self.pieces.len()) as u64;
        if len == 0 || len > PIECE || missed >= room || number == u64::MAX {
            return Err(EnvelopeError::Piece { number, len });
        }
        // Announced in an envelope that came damaged, and sent all the same, maybe long ago: they are not to
        // be taken for later pieces of their tags.
        for number in self.next_piece..number {
            self.expect_piece(0, number, PIECE, None);
        }
        self.next_piece = number + 1;
        let mut target = None;
        if let Some(assembly) = self.streams.get_mut(&stream) {
            let link = assembly.link;
            target = assembly.carve(&mut self.places, len);
            if target.is_none() {
                let error = ConnectionError::BodyLength { stream, needed: 0, found: len, end: false };
                self.or_broken(link, Err(error));
            }
        }
        self.expect_piece(stream, number, len, target);
        Ok(())
    }

    /// Has a piece received, now or when others have come.
    fn expect_piece(&mut self, stream: u32, number: u64, len: u64, target: Option<P::Target>) {
        self.pieces.insert(number, stream);
        if self.pieces.len() > RECEIVING {
            self.waiting.push_back((number, len, target));
        } else {
            self.events.push_back(Arrival::Piece { number, len, target });
        }
    }

    fn end(&mut self, link: WireLink, at_once: bool, text: &str) {
        let Some(open) = self.links.get_mut(&link).filter(|_| !at_once) else {
            self.close(link);
            return self.events.push_back(Arrival::Closed { link, text: text.to_owned() });
        };
        open.closing = Some(text.to_owned());
        self.deliver(link);
    }

    fn or_broken(&mut self, link: WireLink, result: Result<(), ConnectionError>) {
        if let Err(error) = result {
            self.close(link);
            self.events.push_back(Arrival::Broken { link, error });
        }
    }

    /// Hands on the messages of a link that are complete, in order, and its end.
    fn deliver(&mut self, link: WireLink) {
        let Some(open) = self.links.get_mut(&link).filter(|open| open.is_open) else { return };
        let mut failed = None;
        for queue in &mut open.begun {
            while let Some(&stream) = queue.front() {
                if self.streams.get(&stream).is_some_and(|assembly| !assembly.is_complete()) {
                    break;
                }
                queue.pop_front();
                let Some(assembly) = self.streams.remove(&stream) else { continue };
                self.open_bytes -= assembly.size;
                match assembly.finish(&mut self.places) {
                    Ok(arrived) => self.events.push_back(Arrival::Message { link, arrived }),
                    Err(error) => failed = Some(error),
                }
            }
        }
        let is_over = open.begun.iter().all(VecDeque::is_empty);
        if let Some(error) = failed {
            self.or_broken(link, Err(error));
        } else if is_over && let Some(text) = open.closing.take() {
            self.close(link);
            self.events.push_back(Arrival::Closed { link, text });
        }
    }
}

impl<P: Places> Assembly<P> {
    fn is_complete(&self) -> bool {
        let announced = |part: &Part<P>| !matches!(part, Part::Wide(_, left) if *left > 0);
        self.descriptor.is_some()
            && self.narrow_left == 0
            && self.pieces == 0
            && self.parts.iter().skip(self.announcing).all(announced)
    }

    /// The rest of the narrow part that is being filled.
    fn narrow_target(&mut self) -> &mut [u8] {
        let (index, offset) = &mut self.filling;
        while let Some(part) = self.parts.get(*index) {
            match part {
                Part::Narrow(memory) if *offset < memory.as_ref().len() => break,
                _ => (*index, *offset) = (*index + 1, 0),
            }
        }
        match self.parts.get_mut(*index) {
            Some(Part::Narrow(memory)) => &mut memory.as_mut()[*offset..],
            _ => &mut [],
        }
    }

    /// The next `len` bytes of the wide parts.
    fn carve(&mut self, places: &mut P, len: u64) -> Option<P::Target> {
        loop {
            match self.parts.get_mut(self.announcing)? {
                Part::Wide(wide, left) if *left > 0 => {
                    *left = left.checked_sub(len)?;
                    self.pieces += 1;
                    return places.carve(wide, len);
                }
                _ => self.announcing += 1,
            }
        }
    }

    fn finish(self, places: &mut P) -> Result<Arrived<P::Memory>, ConnectionError> {
        let no_memory = ConnectionError::NoMemory { len: self.size };
        let whole = |part| match part {
            Part::Narrow(memory) => Some(memory),
            Part::Wide(wide, _) => places.close(wide),
        };
        let parts: Option<Vec<_>> = self.parts.into_iter().map(whole).collect();
        let mut parts = parts.ok_or(no_memory.clone())?.into_iter();
        let (Some(descriptor), Some(payload)) = (self.descriptor, parts.next()) else {
            return Err(no_memory);
        };
        Ok(Arrived { descriptor, payload, buffers: parts.collect() })
    }
}
