//! The I/O thread of an agent: readiness in, connections driven, deadlines fired.
//!
//! It never runs code of users, never attaches to Python and never waits but in `epoll_wait` (NET-1).
//! It accepts and opens connections, drives their handshakes, reads, and writes what senders could not
//! write themselves. Before the handshake is done a connection costs at most 4 KiB, [`GREETING_LIMIT`]
//! and one of [`GREETING_PLACES`] places; whatever arrives that is not the protocol closes the
//! connection, is logged once and harms nobody else (NET-2).

use std::collections::{HashMap, VecDeque};
use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use tensorcall_proto::connection::{Allocate, Arrival, Inbox};
use tensorcall_proto::handshake::{Expect, Initiator, Responder, Role};
use tensorcall_proto::ids::Identity;
use tensorcall_proto::wire::limits::Limits;

use super::alarm::Alarm;
use super::connection::Connection;
use super::socket::{self, ListenSocket};
use super::{Address, Closed, Events, Link, LinkId, Transport};
use crate::body::Received;
use crate::buffer::{Buffer, BufferPool};
use crate::clock::now;
use crate::error::{Error, Result};

/// A peer must have proved itself within this time.
const GREETING_LIMIT: Duration = Duration::from_secs(5);
/// Connections that may be unproved at once. Further ones take the place of the oldest: who is silent
/// has had his time then, and who is not needs a moment only.
const GREETING_PLACES: usize = 128;
/// Pause in accepting when the system has no descriptor or memory for a connection.
const DEAF: Duration = Duration::from_millis(500);
/// Bytes read at a time, unless they go straight into a message's memory.
const SCRATCH: usize = 128 << 10;
/// Bytes read from one connection before others get their turn.
const TURN: usize = 8 << 20;
/// Bodies with at least this much to come are read straight into place.
const DIRECT: usize = 16 << 10;

/// Shorter times are waited for exactly.
const COARSE: Duration = Duration::from_millis(5);

const WAKE: u64 = 0;

/// Who we are and what proves it.
pub(crate) struct Credentials {
    pub(crate) me: Identity,
    pub(crate) job: String,
    pub(crate) secret: Vec<u8>,
}

/// What other threads use of the reactor.
#[derive(Debug)]
pub(crate) struct Shared {
    epoll: OwnedFd,
    wake: OwnedFd,
    commands: Mutex<Vec<Command>>,
    alarm: Arc<Alarm>,
    base: Instant,
}

/// What other threads ask of the reactor.
#[derive(Debug)]
pub(crate) enum Command {
    Connect(Arc<Connection>, Identity, VecDeque<Address>),
    Close(LinkId, Instant),
    Fail(LinkId, String),
    Stop(Instant),
}

impl Shared {
    pub(crate) fn command(&self, command: Command) {
        self.commands.lock().push(command);
        self.wake();
    }

    pub(crate) fn micros(&self, time: Instant) -> u64 {
        u64::try_from(time.saturating_duration_since(self.base).as_micros()).unwrap_or(u64::MAX)
    }

    pub(crate) fn set_interest(
        &self,
        link: LinkId,
        socket: &OwnedFd,
        interest: EventFlags,
    ) -> io::Result<()> {
        Ok(epoll::modify(&self.epoll, socket, EventData::new_u64(link_token(link)), interest)?)
    }

    fn wake(&self) {
        // A full counter means that the reactor is being woken already.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }
}

/// The handle of an agent's reactor; also its transport for TCP and Unix sockets.
#[derive(Debug)]
pub(crate) struct Reactor {
    shared: Arc<Shared>,
    addresses: Vec<Address>,
    host: String,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Reactor {
    /// Starts the thread. It tells `events` what happens, and ends when nobody holds that any more.
    pub(crate) fn start(
        events: Weak<dyn Events>,
        alarm: Arc<Alarm>,
        credentials: Credentials,
        listeners: Vec<ListenSocket>,
        limits: Limits,
        pool: Arc<BufferPool>,
    ) -> Result<Self> {
        let what = |error: rustix::io::Errno| Error::io("cannot start the reactor", error);
        let shared = Arc::new(Shared {
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC).map_err(what)?,
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(what)?,
            commands: Mutex::default(),
            alarm,
            base: now(),
        });
        epoll::add(&shared.epoll, &shared.wake, EventData::new_u64(WAKE), EventFlags::IN).map_err(what)?;
        for (index, listener) in listeners.iter().enumerate() {
            let data = EventData::new_u64(listener_token(index));
            epoll::add(&shared.epoll, &listener.fd, data, EventFlags::IN).map_err(what)?;
        }
        let addresses = listeners.iter().map(|listener| listener.address.clone()).collect();
        let driver = Driver {
            shared: Arc::clone(&shared),
            events,
            credentials,
            listeners,
            limits,
            pool,
            sockets: HashMap::new(),
            greeting: 0,
            deaf_until: None,
            scratch: vec![0; SCRATCH],
            stop: None,
        };
        let thread = std::thread::Builder::new().name("tensorcall-io".to_owned()).spawn(move || driver.run());
        let thread = thread.map_err(|error| Error::io("cannot start the reactor", error))?;
        Ok(Self { shared, addresses, host: socket::host_id(), thread: Mutex::new(Some(thread)) })
    }

    /// Makes the reactor look at its alarm.
    pub(crate) fn wake(&self) {
        self.shared.wake();
    }
}

impl Transport for Reactor {
    fn addresses(&self) -> Vec<Address> {
        self.addresses.clone()
    }

    fn reaches(&self, _peer: &Identity, address: &Address) -> bool {
        match address {
            Address::Tcp(_) => true,
            Address::Unix { host, .. } => *host == self.host,
            Address::Memory(_) => false,
        }
    }

    fn connect(&self, link: LinkId, peer: &Identity, mut candidates: Vec<Address>) -> Arc<dyn Link> {
        candidates.retain(|address| self.reaches(peer, address));
        // The local socket first: it is the fastest and proves that the host is this one.
        candidates.sort_by_key(|address| !matches!(address, Address::Unix { .. }));
        let connection = Connection::new(link, Arc::clone(&self.shared));
        self.shared.command(Command::Connect(Arc::clone(&connection), peer.clone(), candidates.into()));
        connection
    }

    fn stop(&self, limit: Instant) {
        self.shared.command(Command::Stop(limit));
        let thread = self.thread.lock().take();
        if let Some(thread) = thread
            && thread.thread().id() != std::thread::current().id()
            && thread.join().is_err()
        {
            tracing::error!("the reactor panicked");
        }
    }
}

/// The state of the thread itself.
struct Driver {
    shared: Arc<Shared>,
    events: Weak<dyn Events>,
    credentials: Credentials,
    listeners: Vec<ListenSocket>,
    limits: Limits,
    pool: Arc<BufferPool>,
    sockets: HashMap<LinkId, Socket>,
    /// How many accepted connections have not proved themselves.
    greeting: usize,
    /// No connections are accepted until then, because the system could not give us one.
    deaf_until: Option<Instant>,
    scratch: Vec<u8>,
    stop: Option<Instant>,
}

/// One connection as the reactor sees it.
struct Socket {
    connection: Arc<Connection>,
    fd: Arc<OwnedFd>,
    stage: Stage,
    /// Whom we talk to, for logs.
    peer: String,
    /// When to give up on the present stage, or on flushing while closing.
    deadline: Option<Instant>,
    closing: bool,
}

enum Stage {
    /// Waiting for the connect to be decided.
    Connecting(Attempt),
    /// Proving each other. `Attempt` is that of the connecting side.
    Greeting {
        handshake: Handshake,
        unsent: Vec<u8>,
        attempt: Option<Attempt>,
    },
    Open(Inbox<Allocator>),
}

/// What is left to try if this address fails.
struct Attempt {
    peer: Identity,
    rest: VecDeque<Address>,
    tried: Vec<String>,
}

enum Handshake {
    Initiator(Initiator),
    Responder(Responder),
}

struct Allocator(Arc<BufferPool>);

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

/// Why a connection ends.
enum End {
    /// The peer closed it, or the system lost it.
    Gone(String),
    /// The peer broke the protocol or failed to prove itself.
    Refused(String),
}

impl From<io::Error> for End {
    fn from(error: io::Error) -> Self {
        Self::Gone(error.to_string())
    }
}

impl From<rustix::io::Errno> for End {
    fn from(error: rustix::io::Errno) -> Self {
        io::Error::from(error).into()
    }
}

impl Driver {
    fn run(mut self) {
        let mut ready = Vec::with_capacity(256);
        loop {
            let Some(events) = self.events.upgrade() else { return };
            self.obey(&*events);
            let now = now();
            self.expire(now, &*events);
            if self.shared.alarm.take_due(now) {
                events.tick(now);
            }
            if self.stop.is_some_and(|limit| self.sockets.is_empty() || now >= limit) {
                for socket in std::mem::take(&mut self.sockets).into_values() {
                    socket.connection.end();
                }
                return;
            }
            // Others must be able to end the agent while we sleep.
            drop(events);
            if let Err(error) = self.sleep(&mut ready) {
                tracing::error!(%error, "epoll failed; this agent is lost");
                return;
            }
            let Some(events) = self.events.upgrade() else { return };
            for event in ready.drain(..) {
                self.handle(event, &*events);
            }
        }
    }

    fn sleep(&self, ready: &mut Vec<epoll::Event>) -> io::Result<()> {
        let until = self.shared.alarm.go_to_sleep(self.next_deadline());
        let mut timeout = until.map(|until| until.saturating_duration_since(now()));
        if let Some(brief) = timeout.filter(|timeout| *timeout < COARSE && !timeout.is_zero()) {
            // `epoll_wait` counts in milliseconds, rounded up; `ppoll` does not.
            let brief = Timespec::try_from(brief).ok();
            let _ = poll(&mut [PollFd::new(&self.shared.epoll, PollFlags::IN)], brief.as_ref());
            timeout = Some(Duration::ZERO);
        }
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        let result = epoll::wait(&self.shared.epoll, rustix::buffer::spare_capacity(ready), timeout.as_ref());
        self.shared.alarm.awake();
        match result {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn next_deadline(&self) -> Option<Instant> {
        let deadlines = self.sockets.values().filter_map(|socket| socket.deadline);
        deadlines.chain(self.stop).chain(self.deaf_until).min()
    }

    /// Does what other threads asked for.
    fn obey(&mut self, events: &dyn Events) {
        let commands = std::mem::take(&mut *self.shared.commands.lock());
        for command in commands {
            match command {
                Command::Connect(connection, peer, rest) => {
                    self.connect(connection, Attempt { peer, rest, tried: Vec::new() }, events);
                }
                Command::Close(link, limit) => self.start_close(link, limit, events),
                Command::Fail(link, reason) => {
                    // The peer may have said goodbye before the connection failed.
                    let end = self.read(link, events).err().unwrap_or(End::Gone(reason));
                    self.end(link, end, events);
                }
                Command::Stop(limit) => {
                    self.stop = Some(limit);
                    self.listeners.clear();
                    let links: Vec<_> = self.sockets.keys().copied().collect();
                    for link in links {
                        self.start_close(link, limit, events);
                    }
                }
            }
        }
    }

    fn start_close(&mut self, link: LinkId, limit: Instant, events: &dyn Events) {
        let Some(socket) = self.sockets.get_mut(&link) else { return };
        socket.closing = true;
        socket.deadline = Some(limit);
        if !matches!(socket.stage, Stage::Open(_)) || socket.connection.is_flushed() {
            self.end(link, End::Gone("closed here".to_owned()), events);
        }
    }

    fn expire(&mut self, now: Instant, events: &dyn Events) {
        if self.deaf_until.is_some_and(|until| until <= now) {
            self.deaf_until = None;
            self.listen(EventFlags::IN);
        }
        let late: Vec<_> = self
            .sockets
            .iter()
            .filter(|(_, socket)| socket.deadline.is_some_and(|deadline| deadline <= now))
            .map(|(&link, _)| link)
            .collect();
        for link in late {
            let reason = match self.sockets.get(&link).map(|socket| &socket.stage) {
                Some(Stage::Connecting(_)) => End::Gone("no answer in time".to_owned()),
                Some(Stage::Greeting { .. }) => End::Refused("handshake not finished in time".to_owned()),
                _ => End::Gone("closed here before all was sent".to_owned()),
            };
            self.end(link, reason, events);
        }
    }

    fn handle(&mut self, event: epoll::Event, events: &dyn Events) {
        let token = event.data.u64();
        if token == WAKE {
            let mut count = [0; 8];
            let _ = rustix::io::read(&self.shared.wake, &mut count);
        } else if let Some(index) = listener_index(token) {
            self.accept(index, events);
        } else {
            let link = token_link(token);
            let flags = event.flags;
            if let Err(end) = self.drive(link, flags, events) {
                self.end(link, end, events);
            }
        }
    }

    fn accept(&mut self, index: usize, events: &dyn Events) {
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
    fn listen(&self, interest: EventFlags) {
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
            self.end(link, End::Refused(reason), events);
        }
    }

    fn greet_accepted(&mut self, fd: OwnedFd, peer: String, events: &dyn Events) -> io::Result<()> {
        let link = events.next_link();
        let Credentials { me, job, secret } = &self.credentials;
        let handshake = Handshake::Responder(Responder::new(secret, job, me.clone(), nonce()?));
        let stage = Stage::Greeting { handshake, unsent: Vec::new(), attempt: None };
        self.register(Connection::new(link, Arc::clone(&self.shared)), fd, stage, peer, EventFlags::IN)?;
        self.greeting += 1;
        Ok(())
    }

    fn register(
        &mut self,
        connection: Arc<Connection>,
        fd: OwnedFd,
        stage: Stage,
        peer: String,
        interest: EventFlags,
    ) -> io::Result<()> {
        let link = connection.link;
        epoll::add(&self.shared.epoll, &fd, EventData::new_u64(link_token(link)), interest)?;
        let deadline = Some(now() + GREETING_LIMIT);
        let socket = Socket { connection, fd: Arc::new(fd), stage, peer, deadline, closing: false };
        self.sockets.insert(link, socket);
        Ok(())
    }

    /// Tries the next address; tells `events` if there is none.
    fn connect(&mut self, connection: Arc<Connection>, mut attempt: Attempt, events: &dyn Events) {
        while let Some(address) = attempt.rest.pop_front() {
            attempt.tried.push(format!("{address}: "));
            let result = socket::start_connect(&address).and_then(|fd| {
                let again = Attempt {
                    peer: attempt.peer.clone(),
                    rest: attempt.rest.clone(),
                    tried: attempt.tried.clone(),
                };
                let stage = Stage::Connecting(again);
                self.register(Arc::clone(&connection), fd, stage, attempt.peer.to_string(), EventFlags::OUT)
            });
            match result {
                Ok(()) => return,
                Err(error) => note_failure(&mut attempt, &error.to_string()),
            }
        }
        connection.end();
        let tried = if attempt.tried.is_empty() { "no address".to_owned() } else { attempt.tried.join(", ") };
        let reason = format!("cannot connect ({tried})");
        events.closed(connection.link, Closed { was_open: false, reason });
    }

    /// Takes a socket further, as far as it goes now.
    fn drive(&mut self, link: LinkId, flags: EventFlags, events: &dyn Events) -> Result<(), End> {
        let Some(socket) = self.sockets.get_mut(&link) else { return Ok(()) };
        if let Stage::Connecting(_) = socket.stage {
            socket::connect_result(&socket.fd)?;
            self.start_greeting(link)?;
        }
        let Some(socket) = self.sockets.get_mut(&link) else { return Ok(()) };
        if let Stage::Greeting { .. } = socket.stage {
            return self.greet(link, events);
        }
        if flags.contains(EventFlags::OUT) {
            for id in socket.connection.writable()? {
                events.sent(link, id);
            }
            if socket.closing && socket.connection.is_flushed() {
                return Err(End::Gone("closed here".to_owned()));
            }
        }
        if flags.intersects(EventFlags::IN | EventFlags::HUP | EventFlags::ERR) {
            return self.read(link, events);
        }
        Ok(())
    }

    fn start_greeting(&mut self, link: LinkId) -> Result<(), End> {
        let Some(socket) = self.sockets.get_mut(&link) else { return Ok(()) };
        let Credentials { me, job, secret } = &self.credentials;
        let placeholder =
            Stage::Connecting(Attempt { peer: me.clone(), rest: VecDeque::new(), tried: Vec::new() });
        let Stage::Connecting(attempt) = std::mem::replace(&mut socket.stage, placeholder) else {
            return Ok(());
        };
        let expect = Expect { rank: attempt.peer.rank, incarnation: Some(attempt.peer.incarnation) };
        let initiator = Initiator::new(secret, job, me.clone(), expect, Role::Calls, nonce()?);
        socket.stage = Stage::Greeting {
            handshake: Handshake::Initiator(initiator),
            unsent: Vec::new(),
            attempt: Some(attempt),
        };
        self.shared.set_interest(link, &socket.fd, EventFlags::IN)?;
        Ok(())
    }

    /// Reads and answers as far as the handshake goes; opens the link when it is done.
    fn greet(&mut self, link: LinkId, events: &dyn Events) -> Result<(), End> {
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
        let inbox = Inbox::new(self.limits, Allocator(Arc::clone(&self.pool)));
        let before = std::mem::replace(&mut socket.stage, Stage::Open(inbox));
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
        for id in socket.connection.open(Arc::clone(&socket.fd))? {
            events.sent(link, id);
        }
        let Stage::Open(inbox) = &mut socket.stage else { return Ok(()) };
        inbox.feed(leftover).map_err(|error| End::Refused(error.to_string()))?;
        dispatch(link, inbox, &socket.connection, events)
    }

    /// Reads what is there, up to a turn's worth.
    fn read(&mut self, link: LinkId, events: &dyn Events) -> Result<(), End> {
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
            dispatch(link, inbox, &socket.connection, events)?;
            turn = turn.saturating_sub(count);
            if count < asked {
                break;
            }
        }
        Ok(())
    }

    /// Forgets a connection and tells whom it concerns; an unopened one of ours tries its next address.
    fn end(&mut self, link: LinkId, end: End, events: &dyn Events) {
        let Some(socket) = self.sockets.remove(&link) else { return };
        let _ = epoll::delete(&self.shared.epoll, &socket.fd);
        let reason = match &end {
            End::Gone(reason) | End::Refused(reason) => reason.clone(),
        };
        match socket.stage {
            Stage::Connecting(mut attempt) | Stage::Greeting { attempt: Some(mut attempt), .. } => {
                note_failure(&mut attempt, &reason);
                if socket.closing {
                    attempt.rest.clear();
                }
                self.connect(socket.connection, attempt, events);
            }
            Stage::Greeting { attempt: None, .. } => {
                self.greeting -= 1;
                socket.connection.end();
                if self.stop.is_none() {
                    tracing::warn!(
                        from = socket.peer,
                        reason,
                        "connection refused: it did not prove to be of this job"
                    );
                }
            }
            Stage::Open(_) => {
                if let End::Refused(_) = end {
                    tracing::warn!(
                        peer = socket.peer,
                        reason,
                        "connection closed: the peer broke the protocol"
                    );
                }
                socket.connection.end();
                events.closed(link, Closed { was_open: true, reason });
            }
        }
    }
}

/// Hands on what has arrived.
fn dispatch(
    link: LinkId,
    inbox: &mut Inbox<Allocator>,
    connection: &Connection,
    events: &dyn Events,
) -> Result<(), End> {
    while let Some(arrival) = inbox.poll() {
        match arrival {
            Arrival::Message(arrived) => {
                let body = Received {
                    payload: arrived.payload,
                    tensors: arrived.descriptor.tensors,
                    buffers: arrived.buffers,
                };
                events.received(link, arrived.descriptor.message, body);
            }
            Arrival::Ping(mark) => connection.pong(mark)?,
            Arrival::Pong(_) => {}
        }
    }
    Ok(())
}

type ReadResult = std::result::Result<(usize, usize), tensorcall_proto::connection::ConnectionError>;

/// Reads once, straight into a message's memory where much of it is to come. Returns how much came and
/// how much could have come.
fn read_into(
    fd: &OwnedFd,
    inbox: &mut Inbox<Allocator>,
    scratch: &mut [u8],
) -> std::result::Result<ReadResult, rustix::io::Errno> {
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

/// Writes what the socket takes and drops it from `unsent`.
fn write_some(fd: &OwnedFd, unsent: &mut Vec<u8>) -> io::Result<()> {
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

fn note_failure(attempt: &mut Attempt, reason: &str) {
    if let Some(last) = attempt.tried.last_mut() {
        last.push_str(reason);
    }
}

fn nonce() -> io::Result<[u8; 32]> {
    let mut nonce = [0; 32];
    getrandom::fill(&mut nonce).map_err(io::Error::other)?;
    Ok(nonce)
}

const fn link_token(link: LinkId) -> u64 {
    link.0 << 1 | 1
}

const fn token_link(token: u64) -> LinkId {
    LinkId(token >> 1)
}

const fn listener_token(index: usize) -> u64 {
    (index as u64 + 1) << 1
}

fn listener_index(token: u64) -> Option<usize> {
    (token & 1 == 0 && token > 0).then(|| usize::try_from((token >> 1) - 1).unwrap_or(usize::MAX))
}

impl Handshake {
    fn feed(&mut self, bytes: &[u8]) -> std::result::Result<(), String> {
        match self {
            Self::Initiator(side) => side.feed(bytes).map_err(|error| error.to_string()),
            Self::Responder(side) => side.feed(bytes).map_err(|error| error.to_string()),
        }
    }

    /// What it means that the peer closes the connection now.
    fn closed(&self) -> String {
        match self {
            Self::Initiator(side) => side.closed().to_string(),
            Self::Responder(side) => side.closed().to_string(),
        }
    }

    fn poll_send(&mut self) -> Option<Vec<u8>> {
        match self {
            Self::Initiator(side) => side.poll_send(),
            Self::Responder(side) => side.poll_send(),
        }
    }

    fn done(&mut self) -> Option<(Identity, Vec<u8>)> {
        let established = match self {
            Self::Initiator(side) => side.done(),
            Self::Responder(side) => side.done(),
        };
        established.map(|established| (established.peer, established.leftover))
    }
}
