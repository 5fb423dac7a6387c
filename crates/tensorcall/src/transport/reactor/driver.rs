//! The thread's loop, and the life of a connection from the first try to the end.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tensorcall_proto::blocks::Terms;
use tensorcall_proto::connection::Inbox;
use tensorcall_proto::ids::Identity;
use tensorcall_proto::wire::limits::Limits;

use super::greeting::GREETING_LIMIT;
use super::reading::Allocator;
use super::{Command, Shared, TIMER, WAKE, link_token, listener_index, token_link};
use crate::buffer::BufferPool;
use crate::clock::now;
use crate::fork::Fd;
use crate::spin::{self, Spin};
use crate::transport::connection::Connection;
use crate::transport::proving::{Credentials, Handshake};
use crate::transport::sharing::LOOK_EVERY;
use crate::transport::socket::{self, ListenSocket};
use crate::transport::{Address, Closed, Events, Inbound, Link, LinkId};

/// Shorter times are waited for exactly.
const COARSE: Duration = Duration::from_millis(5);

/// The state of the thread itself.
pub(super) struct Driver {
    pub(super) shared: Arc<Shared>,
    pub(super) events: Weak<dyn Events>,
    pub(super) credentials: Credentials,
    pub(super) listeners: Vec<ListenSocket>,
    pub(super) limits: Limits,
    /// How much memory is shared with each peer on this host; none if it is zero.
    pub(super) terms: Terms,
    pub(super) pool: Arc<BufferPool>,
    pub(super) sockets: HashMap<LinkId, Socket>,
    /// How many accepted connections have not proved themselves.
    pub(super) greeting: usize,
    /// No connections are accepted until then, because the system could not give us one.
    pub(super) deaf_until: Option<Instant>,
    pub(super) scratch: Vec<u8>,
    pub(super) spin: Spin,
    /// How long to look busily after messages came.
    pub(super) busy_poll: Duration,
    pub(super) busy_until: Option<Instant>,
    /// Messages that came together; empty between calls, kept for its memory.
    pub(super) arrived: Vec<Inbound>,
    /// Messages read since the last sleep.
    pub(super) messages: u32,
    pub(super) stop: Option<Instant>,
}

/// One connection as the reactor sees it.
pub(super) struct Socket {
    pub(super) connection: Arc<Connection>,
    pub(super) fd: Arc<Fd>,
    pub(super) stage: Stage,
    /// Whom we talk to, for logs.
    pub(super) peer: String,
    /// When to give up on the present stage, or on flushing while closing.
    pub(super) deadline: Option<Instant>,
    pub(super) closing: bool,
    /// Whether memory may be shared over it.
    pub(super) shares: bool,
    /// When its shared memory is looked after.
    pub(super) look_at: Option<Instant>,
}

pub(super) enum Stage {
    /// Waiting for the connect to be decided.
    Connecting(Attempt),
    /// Proving each other. `Attempt` is that of the connecting side.
    Greeting {
        handshake: Box<Handshake>,
        unsent: Vec<u8>,
        attempt: Option<Attempt>,
    },
    Open(Box<Inbox<Allocator>>),
}

/// What is left to try if this address fails.
pub(super) struct Attempt {
    pub(super) peer: Identity,
    pub(super) rest: VecDeque<Address>,
    pub(super) tried: Vec<String>,
}

/// Why a connection ends.
pub(super) enum End {
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
    pub(super) fn run(mut self) {
        let mut ready = Vec::with_capacity(256);
        loop {
            let Some(events) = self.events.upgrade() else { return };
            self.obey(&*events);
            self.flush_held(&*events);
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

    fn sleep(&mut self, ready: &mut Vec<epoll::Event>) -> io::Result<()> {
        let shared = Arc::clone(&self.shared);
        let look = || shared.holds.load(Ordering::Relaxed) || look_into(&shared, ready);
        // Where messages come in bunches, sleeping lets the next bunch gather; one alone, or a call that makes
        // a value and the fetch of it, may be of a conversation in which each side waits for the other.
        let messages = std::mem::take(&mut self.messages);
        if !self.busy_poll.is_zero() {
            if self.poll_busily(messages > 0, ready) {
                return Ok(());
            }
        } else if messages <= 2 && self.spin.look(None, look) {
            return Ok(());
        }
        let start = now();
        let until = self.shared.alarm.go_to_sleep(self.next_deadline());
        let mut timeout = until.map(|until| until.saturating_duration_since(now()));
        if self.shared.holds.load(Ordering::Relaxed) {
            timeout = Some(Duration::ZERO);
        }
        if let Some(brief) = timeout.filter(|timeout| *timeout < COARSE && !timeout.is_zero()) {
            // `epoll_wait` counts in milliseconds, rounded up; `ppoll` does not.
            let brief = Timespec::try_from(brief).ok();
            let _ = poll(&mut [PollFd::new(&self.shared.epoll, PollFlags::IN)], brief.as_ref());
            timeout = Some(Duration::ZERO);
        }
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        let result = epoll::wait(&self.shared.epoll, rustix::buffer::spare_capacity(ready), timeout.as_ref());
        self.shared.alarm.awake();
        if result.is_ok_and(|count| count > 0) {
            self.spin.encourage(now().saturating_duration_since(start));
        }
        match result {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Looks for events, or for a reason not to sleep, until it is the time that busy looking ends or something
    /// has its deadline; tells whether it found any. That time begins anew if messages `came`.
    fn poll_busily(&mut self, came: bool, ready: &mut Vec<epoll::Event>) -> bool {
        if came {
            self.busy_until = Some(now() + self.busy_poll);
        }
        let Some(end) = self.busy_until else { return false };
        let until = self.next_deadline().map_or(end, |deadline| deadline.min(end));
        let shared = Arc::clone(&self.shared);
        // Whoever sends meanwhile writes for itself.
        shared.polls.store(true, Ordering::Relaxed);
        let found = spin::poll(until, |time| {
            // Nobody wakes this thread for the alarm before it says that it sleeps.
            shared.holds.load(Ordering::Relaxed) || shared.alarm.is_due(time) || look_into(&shared, ready)
        });
        shared.polls.store(false, Ordering::Relaxed);
        if !found && until == end {
            self.busy_until = None;
        }
        found
    }

    fn next_deadline(&self) -> Option<Instant> {
        let deadlines = self.sockets.values().flat_map(|socket| [socket.deadline, socket.look_at]).flatten();
        deadlines.chain(self.stop).chain(self.deaf_until).min()
    }

    /// Does what other threads asked for.
    fn obey(&mut self, events: &dyn Events) {
        let commands = std::mem::take(&mut *self.shared.commands.lock());
        for command in commands {
            match command {
                Command::Connect(connection, peer, rest) => {
                    self.connect(&connection, Attempt { peer, rest, tried: Vec::new() }, events);
                }
                Command::Close(link, limit) => self.start_close(link, limit, events),
                Command::Fail(link, reason) => {
                    // The peer may have said goodbye before the connection failed.
                    let end = self.read(link, events).err().unwrap_or(End::Gone(reason));
                    self.end(link, &end, events);
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

    /// Writes what others have left to this thread.
    fn flush_held(&mut self, events: &dyn Events) {
        self.shared.in_bulk.store(false, Ordering::Relaxed);
        if !self.shared.holds.swap(false, Ordering::AcqRel) {
            return;
        }
        let links = std::mem::take(&mut *self.shared.held.lock());
        self.flush(links, events);
    }

    fn flush(&mut self, links: Vec<LinkId>, events: &dyn Events) {
        for link in links {
            let Some(socket) = self.sockets.get(&link) else { continue };
            socket.connection.flush();
            self.end_if_flushed(link, events);
        }
    }

    /// Ends a connection that is closing and has nothing more to write.
    fn end_if_flushed(&mut self, link: LinkId, events: &dyn Events) {
        let socket = self.sockets.get(&link);
        if socket.is_some_and(|socket| socket.closing && socket.connection.is_flushed()) {
            self.end(link, &End::Gone("closed here".to_owned()), events);
        }
    }

    fn start_close(&mut self, link: LinkId, limit: Instant, events: &dyn Events) {
        let Some(socket) = self.sockets.get_mut(&link) else { return };
        socket.closing = true;
        socket.deadline = Some(limit);
        if !matches!(socket.stage, Stage::Open(_)) || socket.connection.is_flushed() {
            self.end(link, &End::Gone("closed here".to_owned()), events);
        }
    }

    fn expire(&mut self, now: Instant, events: &dyn Events) {
        if self.deaf_until.is_some_and(|until| until <= now) {
            self.deaf_until = None;
            self.listen(EventFlags::IN);
        }
        self.look_after_shared(now);
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
            self.end(link, &reason, events);
        }
    }

    /// Takes back what is idle, and gives back what waits for that, where it is time.
    fn look_after_shared(&mut self, now: Instant) {
        for socket in self.sockets.values_mut().filter(|socket| socket.look_at.is_some_and(|at| at <= now)) {
            socket.connection.say(socket.connection.sharing.look(now));
            socket.look_at = socket.connection.sharing.is_used().then(|| now + LOOK_EVERY);
        }
    }

    /// Tells all peers which blocks are free.
    fn give_back(&self) {
        self.sockets
            .values()
            .filter(|socket| socket.shares)
            .for_each(|socket| socket.connection.say_returns());
    }

    fn handle(&mut self, event: epoll::Event, events: &dyn Events) {
        let token = event.data.u64();
        if token == WAKE {
            let mut count = [0; 8];
            let _ = rustix::io::read(&self.shared.wake, &mut count);
            if self.shared.returns.swap(false, Ordering::AcqRel) {
                self.give_back();
            }
        } else if token == TIMER {
            let _ = rustix::io::read(&self.shared.timer, &mut [0; 8]);
            let links = std::mem::take(&mut *self.shared.held_long.lock());
            self.flush(links, events);
        } else if let Some(index) = listener_index(token) {
            self.accept(index, events);
        } else {
            let link = token_link(token);
            let flags = event.flags;
            if let Err(end) = self.drive(link, flags, events) {
                self.end(link, &end, events);
            }
        }
    }

    pub(super) fn register(
        &mut self,
        connection: Arc<Connection>,
        fd: Fd,
        stage: Stage,
        peer: String,
        interest: EventFlags,
    ) -> io::Result<()> {
        let link = connection.link;
        epoll::add(&self.shared.epoll, &fd, EventData::new_u64(link_token(link)), interest)?;
        let deadline = Some(now() + GREETING_LIMIT);
        let socket = Socket {
            connection,
            fd: Arc::new(fd),
            stage,
            peer,
            deadline,
            closing: false,
            shares: false,
            look_at: None,
        };
        self.sockets.insert(link, socket);
        Ok(())
    }

    /// Tries the next address; tells `events` if there is none.
    fn connect(&mut self, connection: &Arc<Connection>, mut attempt: Attempt, events: &dyn Events) {
        while let Some(address) = attempt.rest.pop_front() {
            attempt.tried.push(format!("{address}: "));
            let result = socket::start_connect(&address).and_then(|fd| {
                let again = Attempt {
                    peer: attempt.peer.clone(),
                    rest: attempt.rest.clone(),
                    tried: attempt.tried.clone(),
                };
                let stage = Stage::Connecting(again);
                self.register(Arc::clone(connection), fd, stage, attempt.peer.to_string(), EventFlags::OUT)
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

    /// Forgets a connection and tells whom it concerns; an unopened one of ours tries its next address.
    pub(super) fn end(&mut self, link: LinkId, end: &End, events: &dyn Events) {
        let Some(socket) = self.sockets.remove(&link) else { return };
        let _ = epoll::delete(&self.shared.epoll, &socket.fd);
        let reason = match end {
            End::Gone(reason) | End::Refused(reason) => reason.clone(),
        };
        match socket.stage {
            Stage::Connecting(mut attempt) | Stage::Greeting { attempt: Some(mut attempt), .. } => {
                note_failure(&mut attempt, &reason);
                if socket.closing {
                    attempt.rest.clear();
                }
                self.connect(&socket.connection, attempt, events);
            }
            Stage::Greeting { attempt: None, handshake, .. } => {
                self.greeting -= 1;
                socket.connection.end();
                if self.stop.is_some() {
                    return;
                }
                if matches!(end, End::Gone(_)) && handshake.knows_job() {
                    tracing::info!(
                        from = socket.peer,
                        reason,
                        "a worker went away in the middle of its handshake"
                    );
                } else {
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

/// Takes the events that are there; tells whether there are any. An error is left to the wait, which reports it.
fn look_into(shared: &Shared, ready: &mut Vec<epoll::Event>) -> bool {
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    let room = rustix::buffer::spare_capacity(ready);
    epoll::wait(&shared.epoll, room, Some(&at_once)).is_ok_and(|count| count > 0)
}

fn note_failure(attempt: &mut Attempt, reason: &str) {
    if let Some(last) = attempt.tried.last_mut() {
        last.push_str(reason);
    }
}
