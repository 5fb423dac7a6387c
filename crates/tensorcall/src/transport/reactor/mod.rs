//! The I/O thread of an agent: readiness in, connections driven, deadlines fired.
//!
//! It never runs code of users, never attaches to Python and never waits but for events (NET-1).
//!
//! - `mod.rs`: the handle that other threads hold, and what they share with the thread
//! - `driver.rs`: the thread's loop, and the life of a connection
//! - `greeting.rs`: accepting, and proving each other
//! - `reading.rs`: from bytes to messages

mod driver;
mod greeting;
mod reading;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::thread::{JoinHandle, ThreadId};
use std::time::{Duration, Instant};

use crate::fork::Fd;
use crate::sync::Mutex;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{EventfdFlags, eventfd};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use tensorcall_proto::blocks::Terms;
use tensorcall_proto::ids::Identity;
use tensorcall_proto::wire::limits::Limits;

use self::driver::Driver;
use self::reading::SCRATCH;
use super::alarm::Alarm;
use super::connection::Connection;
use super::host;
use super::proving::Credentials;
use super::socket::ListenSocket;
use super::{Address, Events, Link, LinkId, Transport};
use crate::buffer::BufferPool;
use crate::clock::now;
use crate::error::{Error, Result};
use crate::spin::Spin;

const WAKE: u64 = 0;
const TIMER: u64 = u64::MAX - 1;

/// So long messages wait that whoever made them was to send.
const LATER: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000 };

/// What other threads use of the reactor.
#[derive(Debug)]
pub(crate) struct Shared {
    epoll: Fd,
    wake: Fd,
    /// When the reactor writes what others have not.
    timer: Fd,
    commands: Mutex<Vec<Command>>,
    /// Some connection has blocks to give back.
    returns: AtomicBool,
    /// The reactor's own, from its start on.
    thread: OnceLock<ThreadId>,
    /// Connections with messages that wait for the reactor to write them.
    held: Mutex<Vec<LinkId>>,
    holds: AtomicBool,
    /// Connections with messages that others are to write, and the reactor when the timer ends.
    held_long: Mutex<Vec<LinkId>>,
    /// The reactor moves much data, which may take a while.
    in_bulk: AtomicBool,
    /// The reactor has nothing to do and looks for what comes next.
    polls: AtomicBool,
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

    pub(crate) fn set_interest(&self, link: LinkId, socket: &Fd, interest: EventFlags) -> io::Result<()> {
        Ok(epoll::modify(&self.epoll, socket, EventData::new_u64(link_token(link)), interest)?)
    }

    /// Whether this is the thread of the reactor, which others wait for.
    pub(crate) fn is_here(&self) -> bool {
        self.thread.get() == Some(&std::thread::current().id())
    }

    /// Some connection has blocks to give back. Takes no lock: it may be said anywhere.
    pub(crate) fn tell_returns(&self) {
        if !self.returns.swap(true, Ordering::AcqRel) {
            self.wake();
        }
    }

    /// Whether the reactor is about to look for what [`flush_soon`](Self::flush_soon) tells it.
    pub(crate) fn is_at_work(&self) -> bool {
        !self.in_bulk.load(Ordering::Relaxed) && !self.polls.load(Ordering::Relaxed) && self.alarm.is_awake()
    }

    /// Messages wait on this connection for the reactor.
    pub(crate) fn flush_soon(&self, link: LinkId) {
        self.held.lock().push(link);
        self.holds.store(true, Ordering::Release);
        if !self.alarm.looks_again() {
            self.wake();
        }
    }

    /// As [`flush_soon`](Self::flush_soon), but that has [some time](LATER): others may do it before.
    pub(crate) fn flush_later(&self, link: LinkId) {
        let mut held = self.held_long.lock();
        held.push(link);
        // A timer that was set for another one stays as it is: it ends in time for both.
        if held.len() == 1 && self.set_timer().is_err() {
            held.clear();
            drop(held);
            self.flush_soon(link);
        }
    }

    fn set_timer(&self) -> Result<(), rustix::io::Errno> {
        let once = Timespec { tv_sec: 0, tv_nsec: 0 };
        let time = Itimerspec { it_interval: once, it_value: LATER };
        timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &time).map(drop)
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
    #[expect(clippy::too_many_arguments, reason = "each is another part of the agent")]
    pub(crate) fn start(
        events: Weak<dyn Events>,
        alarm: Arc<Alarm>,
        credentials: Credentials,
        listeners: Vec<ListenSocket>,
        limits: Limits,
        terms: Terms,
        pool: Arc<BufferPool>,
        busy_poll: Duration,
    ) -> Result<Self> {
        let what = |error: rustix::io::Errno| Error::io("cannot start the reactor", error);
        let shared = Arc::new(Shared {
            epoll: Fd::open(|| epoll::create(epoll::CreateFlags::CLOEXEC)).map_err(what)?,
            wake: Fd::open(|| eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)).map_err(what)?,
            timer: Fd::open(|| {
                timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)
            })
            .map_err(what)?,
            commands: Mutex::default(),
            returns: AtomicBool::new(false),
            thread: OnceLock::new(),
            held: Mutex::default(),
            holds: AtomicBool::new(false),
            held_long: Mutex::default(),
            in_bulk: AtomicBool::new(false),
            polls: AtomicBool::new(false),
            alarm,
            base: now(),
        });
        epoll::add(&shared.epoll, &shared.wake, EventData::new_u64(WAKE), EventFlags::IN).map_err(what)?;
        epoll::add(&shared.epoll, &shared.timer, EventData::new_u64(TIMER), EventFlags::IN).map_err(what)?;
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
            terms,
            pool,
            sockets: HashMap::new(),
            greeting: 0,
            deaf_until: None,
            scratch: vec![0; SCRATCH],
            spin: Spin::NEW,
            busy_poll,
            busy_until: None,
            arrived: Vec::new(),
            messages: 0,
            stop: None,
        };
        let thread = std::thread::Builder::new().name("tensorcall-io".to_owned()).spawn(move || driver.run());
        let thread = thread.map_err(|error| Error::io("cannot start the reactor", error))?;
        let _ = shared.thread.set(thread.thread().id());
        Ok(Self { shared, addresses, host: host::host_id(), thread: Mutex::new(Some(thread)) })
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
            Address::Memory(_) | Address::Group(_) => false,
        }
    }

    fn connect(&self, link: LinkId, peer: &Identity, mut candidates: Vec<Address>) -> Arc<dyn Link> {
        candidates.retain(|address| self.reaches(peer, address));
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
