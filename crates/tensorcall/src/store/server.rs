//! A store over TCP, as its server sees it.
//!
//! One thread serves all clients; what they ask for is `proto::store`'s business. Who sends what no client of
//! a store sends, or wants too much, is closed, and nobody else is harmed (NET-2): a client that does not read
//! its replies is not read from either, one that says nothing at first has its place for a limited time, and the
//! store has a limit for its size. Whoever can connect may read and change everything, as with
//! PyTorch's server: the protocol knows no secret.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{EventfdFlags, eventfd};
use rustix::net::{RecvFlags, SendFlags, recv, send};
use tensorcall_proto::store::{ClientId, Table};
use tensorcall_proto::wire::store::{RequestDecoder, StoreLimits};

use crate::clock::{now, timespec};
use crate::error::{Error, ErrorKind, Result};
use crate::fork::{Fd, Home};
use crate::sync::Mutex;
use crate::transport::{Address, socket};

/// Bytes that the store may hold.
const MAX_SIZE: usize = 256 << 20;
/// Clients that may be connected.
const MAX_CLIENTS: usize = 16 << 10;
/// How long a connection may take to say that it is a client's.
const GREETING_LIMIT: Duration = Duration::from_secs(10);
/// A client with more replies than this that it did not read is not read from.
const MAX_UNREAD: usize = 1 << 20;
/// How long nobody is accepted when the system has no descriptors left.
const DEAF_TIME: Duration = Duration::from_millis(100);
const SCRATCH: usize = 64 << 10;

const WAKE: u64 = 0;
const LISTENER: u64 = 1;
const FIRST_CLIENT: u64 = 2;

/// The server of a [`TcpStore`](super::TcpStore), or of PyTorch's `TCPStore`. Ends when it is dropped.
#[derive(Debug)]
pub struct StoreServer {
    address: SocketAddr,
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
    home: Home,
}

#[derive(Debug)]
struct Shared {
    epoll: Fd,
    wake: Fd,
    stop: AtomicBool,
}

impl StoreServer {
    /// Starts a server that listens at `address`; port 0 lets the system choose one.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Io`] if it cannot listen there, for instance since somebody else does.
    pub fn listen(address: SocketAddr) -> Result<Self> {
        let what = |error: rustix::io::Errno| Error::io("cannot start the store", error);
        let listener = socket::listen_tcp(address)?;
        let Address::Tcp(address) = listener.address else {
            return Err(Error::new(ErrorKind::Io, "the store listens on no address"));
        };
        let shared = Arc::new(Shared {
            epoll: Fd::open(|| epoll::create(epoll::CreateFlags::CLOEXEC)).map_err(what)?,
            wake: Fd::open(|| eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)).map_err(what)?,
            stop: AtomicBool::new(false),
        });
        epoll::add(&shared.epoll, &shared.wake, EventData::new_u64(WAKE), EventFlags::IN).map_err(what)?;
        epoll::add(&shared.epoll, &listener.fd, EventData::new_u64(LISTENER), EventFlags::IN)
            .map_err(what)?;
        let driver = Driver {
            shared: Arc::clone(&shared),
            listener,
            table: Table::new(MAX_SIZE),
            clients: HashMap::new(),
            strangers: HashMap::new(),
            todo: Vec::new(),
            next: FIRST_CLIENT,
            deaf_until: None,
            scratch: vec![0; SCRATCH],
        };
        let thread = std::thread::Builder::new().name("tensorcall-store".to_owned());
        let thread = thread.spawn(move || driver.run());
        let thread = thread.map_err(|error| Error::io("cannot start the store", error))?;
        Ok(Self { address, shared, thread: Mutex::new(Some(thread)), home: Home::here() })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for StoreServer {
    fn drop(&mut self) {
        let Some(thread) = self.thread.get_mut().take() else { return };
        if !self.home.is_here() {
            // The thread is the parent's (FORK-1).
            std::mem::forget(thread);
            return;
        }
        self.shared.stop.store(true, Ordering::Release);
        let _ = rustix::io::write(&self.shared.wake, &1u64.to_ne_bytes());
        if thread.join().is_err() {
            tracing::error!("the thread of the store panicked");
        }
    }
}

/// The server's thread.
struct Driver {
    shared: Arc<Shared>,
    listener: socket::ListenSocket,
    table: Table,
    clients: HashMap<u64, Client>,
    /// Clients that have not said what a client says first, and since when.
    strangers: HashMap<u64, Instant>,
    /// Clients whose requests can be looked at.
    todo: Vec<u64>,
    next: u64,
    deaf_until: Option<Instant>,
    scratch: Vec<u8>,
}

struct Client {
    fd: Fd,
    from: String,
    decoder: RequestDecoder,
    /// What has come and waits for earlier replies to be read.
    inbox: Vec<u8>,
    /// Replies, and how much of them has been sent.
    outbox: Vec<u8>,
    sent: usize,
    interest: EventFlags,
}

impl Driver {
    fn run(mut self) {
        let mut ready = Vec::with_capacity(256);
        while !self.shared.stop.load(Ordering::Acquire) {
            let timeout = self.next_look().map(|at| timespec(at.saturating_duration_since(now())));
            match epoll::wait(
                &self.shared.epoll,
                rustix::buffer::spare_capacity(&mut ready),
                timeout.as_ref(),
            ) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(%error, "epoll failed; the store in this process is lost");
                    return;
                }
            }
            for event in ready.drain(..) {
                match event.data.u64() {
                    WAKE => {}
                    LISTENER => self.accept(),
                    client => self.serve(client, event.flags),
                }
            }
            self.look();
        }
    }

    /// When there is something to do although nothing happens.
    fn next_look(&self) -> Option<Instant> {
        let greeting = self.strangers.values().min().map(|since| *since + GREETING_LIMIT);
        greeting.into_iter().chain(self.deaf_until).min()
    }

    fn look(&mut self) {
        let time = now();
        if self.deaf_until.is_some_and(|until| until <= time) {
            self.deaf_until = None;
            self.listen(EventFlags::IN);
        }
        let late = |since: &Instant| *since + GREETING_LIMIT <= time;
        let late: Vec<_> =
            self.strangers.iter().filter(|(_, since)| late(since)).map(|(client, _)| *client).collect();
        for client in late {
            self.drop_client(client, &"it did not say what a client says first");
        }
    }

    fn listen(&self, interest: EventFlags) {
        let data = EventData::new_u64(LISTENER);
        if let Err(error) = epoll::modify(&self.shared.epoll, &self.listener.fd, data, interest) {
            tracing::error!(%error, "the store accepts nobody any more");
        }
    }

    fn accept(&mut self) {
        loop {
            match socket::accept(&self.listener) {
                Ok(None) => return,
                Ok(Some(_)) if self.clients.len() >= MAX_CLIENTS => {
                    tracing::warn!("the store has {MAX_CLIENTS} clients and takes no more");
                }
                Ok(Some((fd, from))) => self.add_client(fd, from),
                Err(error) => {
                    let fatal = error.raw_os_error().map(rustix::io::Errno::from_raw_os_error);
                    tracing::warn!(%error, "the store cannot accept a connection");
                    if matches!(fatal, Some(rustix::io::Errno::MFILE | rustix::io::Errno::NFILE)) {
                        self.deaf_until = Some(now() + DEAF_TIME);
                        return self.listen(EventFlags::empty());
                    }
                }
            }
        }
    }

    fn add_client(&mut self, fd: Fd, from: String) {
        let number = self.next;
        self.next += 1;
        let interest = EventFlags::IN;
        if let Err(error) = epoll::add(&self.shared.epoll, &fd, EventData::new_u64(number), interest) {
            tracing::warn!(%error, "the store cannot serve a client");
            return;
        }
        let decoder = RequestDecoder::new(StoreLimits::default());
        let client = Client { fd, from, decoder, inbox: Vec::new(), outbox: Vec::new(), sent: 0, interest };
        self.clients.insert(number, client);
        self.strangers.insert(number, now());
    }

    fn serve(&mut self, number: u64, flags: EventFlags) {
        if flags.intersects(EventFlags::IN | EventFlags::HUP | EventFlags::ERR) {
            let Some(client) = self.clients.get_mut(&number) else { return };
            match client.read(&mut self.scratch) {
                Ok(true) => {}
                Ok(false) => return self.remove_client(number),
                Err(error) => return self.drop_client(number, &error),
            }
        }
        self.todo.push(number);
        while let Some(number) = self.todo.pop() {
            self.answer(number);
        }
    }

    /// Does what a client has asked for, as far as it reads the replies.
    fn answer(&mut self, number: u64) {
        let Some(client) = self.clients.get_mut(&number) else { return };
        let inbox = std::mem::take(&mut client.inbox);
        let mut input = &inbox[..];
        let id = ClientId(number);
        loop {
            let Some(client) = self.clients.get_mut(&number) else { return };
            if client.is_full() {
                client.inbox = input.to_vec();
                break;
            }
            let request = match client.decoder.next(&mut input) {
                Ok(Some(request)) => request,
                Ok(None) => break,
                Err(error) => return self.drop_client(number, &error),
            };
            if let Err(fault) = self.table.handle(id, request) {
                return self.drop_client(number, &fault);
            }
            if self.table.is_valid(id) {
                self.strangers.remove(&number);
            }
            self.pass_replies_on(number);
        }
        self.flush(number);
    }

    /// Puts replies into the outboxes of those whom they are for, and sends those of all but `busy`.
    fn pass_replies_on(&mut self, busy: u64) {
        while let Some((ClientId(to), reply)) = self.table.poll_reply() {
            let Some(client) = self.clients.get_mut(&to) else { continue };
            reply.encode(&mut client.outbox);
            if to != busy {
                self.flush(to);
            }
        }
    }

    fn flush(&mut self, number: u64) {
        let Some(client) = self.clients.get_mut(&number) else { return };
        let was_full = client.is_full();
        if let Err(error) = client.write() {
            return self.drop_client(number, &error);
        }
        let wanted = client.wanted();
        if wanted != client.interest {
            client.interest = wanted;
            let data = EventData::new_u64(number);
            if let Err(error) = epoll::modify(&self.shared.epoll, &client.fd, data, wanted) {
                return self.drop_client(number, &error);
            }
        }
        if was_full && !client.is_full() && !client.inbox.is_empty() {
            self.todo.push(number);
        }
    }

    /// A client breaks the rules, or its connection does.
    fn drop_client(&mut self, number: u64, why: &dyn std::fmt::Display) {
        if let Some(client) = self.clients.get(&number) {
            tracing::info!(from = client.from, %why, "the store closes a connection");
        }
        self.remove_client(number);
    }

    fn remove_client(&mut self, number: u64) {
        self.strangers.remove(&number);
        if let Some(client) = self.clients.remove(&number) {
            let _ = epoll::delete(&self.shared.epoll, &client.fd);
        }
        self.table.handle_gone(ClientId(number));
    }
}

impl Client {
    /// Takes in what there is; false when the client has closed the connection.
    fn read(&mut self, scratch: &mut [u8]) -> io::Result<bool> {
        if !self.inbox.is_empty() {
            return Ok(true);
        }
        match recv(&self.fd, &mut *scratch, RecvFlags::empty()) {
            Ok((0, _)) => Ok(false),
            Ok((count, _)) => {
                self.inbox.extend_from_slice(&scratch[..count]);
                Ok(true)
            }
            Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => Ok(true),
            Err(error) => Err(error.into()),
        }
    }

    fn write(&mut self) -> io::Result<()> {
        while self.sent < self.outbox.len() {
            match send(&self.fd, &self.outbox[self.sent..], SendFlags::NOSIGNAL) {
                Ok(count) => self.sent += count,
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
        self.outbox.clear();
        self.outbox.shrink_to(SCRATCH);
        self.sent = 0;
        Ok(())
    }

    fn is_full(&self) -> bool {
        self.outbox.len() - self.sent > MAX_UNREAD
    }

    fn wanted(&self) -> EventFlags {
        let mut wanted = EventFlags::empty();
        wanted.set(EventFlags::OUT, self.sent < self.outbox.len());
        wanted.set(EventFlags::IN, !self.is_full());
        wanted
    }
}
