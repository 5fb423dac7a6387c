//! A store over TCP, as its server sees it.
//!
//! One thread serves all clients; what they ask for is `proto::store`'s business. Who sends what no client of
//! a store sends, or wants too much, is closed, and nobody else is harmed (NET-2): a client that does not read
//! its replies is not read from either, one that says nothing at first has its place for a limited time, the
//! store has a limit for its size, and so has what is kept for all clients together: parts of requests, and replies
//! that are not read. Beyond it the client with the most of that is closed. Whoever can connect may read and change everything, as with
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
/// Bytes that may be on their way, from and to all clients together.
const MAX_ON_THE_WAY: usize = 512 << 20;
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
        Self::listen_within(address, MAX_ON_THE_WAY)
    }

    fn listen_within(address: SocketAddr, max_on_the_way: usize) -> Result<Self> {
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
            on_the_way: 0,
            max_on_the_way,
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
    /// Bytes, of all clients, as [`Client::on_the_way`] says.
    on_the_way: usize,
    max_on_the_way: usize,
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
    /// What was last counted to be on the way.
    counted: usize,
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
        let (inbox, outbox) = (Vec::new(), Vec::new());
        let client = Client { fd, from, decoder, inbox, outbox, sent: 0, counted: 0, interest };
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
        self.count(number);
    }

    /// Notes what is on the way from and to a client. If that is too much in all, those with the most have to go.
    fn count(&mut self, number: u64) {
        let Some(client) = self.clients.get_mut(&number) else { return };
        let (before, after) = (client.counted, client.on_the_way());
        client.counted = after;
        self.on_the_way = self.on_the_way - before + after;
        while self.on_the_way > self.max_on_the_way {
            let most = self.clients.iter().max_by_key(|(_, client)| client.counted);
            let Some(number) = most.map(|(number, _)| *number) else { return };
            self.drop_client(number, &"more is on the way than may be, and most of it here");
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
            self.on_the_way -= client.counted;
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

    /// Bytes of requests that have not come whole or not been looked at, and of replies that have not been sent.
    fn on_the_way(&self) -> usize {
        self.decoder.kept() + self.inbox.len() + self.outbox.len() - self.sent
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

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpStream;

    use tensorcall_proto::wire::store::{MAGIC, Request};

    use super::*;
    use crate::store::{Store, TcpStore};

    const SOON: Duration = Duration::from_secs(20);
    const LIMIT: usize = 8 << 20;

    fn hello(server: &StoreServer) -> TcpStream {
        let stream = TcpStream::connect(server.address()).unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        stream.set_write_timeout(Some(SOON)).unwrap();
        say(&stream, &Request::Validate(MAGIC));
        stream
    }

    fn say(mut stream: &TcpStream, request: &Request) {
        let mut bytes = Vec::new();
        request.encode(&mut bytes);
        stream.write_all(&bytes).unwrap();
    }

    fn store(server: &StoreServer) -> TcpStore {
        TcpStore::connect("127.0.0.1", server.address().port(), SOON).unwrap()
    }

    #[test]
    fn who_asks_for_much_and_reads_nothing_is_closed_and_harms_nobody() {
        let server = StoreServer::listen_within(([127, 0, 0, 1], 0).into(), LIMIT).unwrap();
        let store = store(&server);
        store.set("big", &vec![1; 1 << 20]).unwrap();
        let mut greedy = hello(&server);

        // Some of it fits into what the system has for a connection.
        say(&greedy, &Request::MultiGet(vec![b"/big".to_vec(); 60]));

        assert_eq!(store.add("n", 1), Ok(1));
        match greedy.read_to_end(&mut Vec::new()) {
            Ok(len) => assert!(len < 60 << 20),
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::ConnectionReset),
        }
        assert_eq!(store.get("big").unwrap().map(|value| value.len()), Some(1 << 20));
    }

    #[test]
    fn those_who_send_much_and_never_all_are_closed_the_largest_first() {
        let server = StoreServer::listen_within(([127, 0, 0, 1], 0).into(), LIMIT).unwrap();
        let store = store(&server);
        let begin = |_| {
            let mut stream = hello(&server);
            let mut bytes = Vec::new();
            Request::Set(b"/never".to_vec(), vec![1; 4 << 20]).encode(&mut bytes);
            // A connection that is closed meanwhile says so here.
            let _ = stream.write_all(&bytes[..3 << 20]);
            stream
        };

        let streams: Vec<TcpStream> = (0..8).map(begin).collect();

        assert_eq!(store.add("n", 1), Ok(1));
        let is_closed = |mut stream: &TcpStream| {
            stream.set_read_timeout(Some(Duration::from_millis(10))).unwrap();
            !matches!(stream.read(&mut [0]), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
        };
        let limit = now() + SOON;
        let mut closed = 0;
        while closed < 6 {
            assert!(now() < limit, "only {closed} are closed");
            closed = streams.iter().filter(|stream| is_closed(stream)).count();
        }
        assert!(closed < 8, "also those for whom there is room");
        assert_eq!(store.get("never"), Ok(None));
    }
}
