//! A store over TCP, as its clients see it.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{RecvFlags, SendFlags, recv, send, sockopt};
use tensorcall_proto::wire::store::{MAGIC, READY, Reply, ReplyDecoder, ReplyShape, Request, StoreLimits};

use super::{Store, StoreError};
use crate::clock::{now, pause, timespec};
use crate::fork::{Fd, Home};
use crate::sync::Mutex;
use crate::transport::{Address, socket};

/// How often it is looked whether the server is there by now.
const TRY_EVERY: Duration = Duration::from_millis(20);
/// How long the server may take to confirm that a wait is over.
const GRACE: Duration = Duration::from_secs(5);
/// A quiet server is asked for a sign of life after this, so that a wait ends when its host is gone.
const KEEPALIVE: Duration = Duration::from_secs(10);
/// What a ping of ours says.
const NONCE: u32 = 0x7463_6c6c;

/// A client of a [`StoreServer`](super::StoreServer), or of PyTorch's `TCPStore`.
///
/// Threads may use it at once: each has a connection of its own for as long as it asks for something.
#[derive(Debug)]
pub struct TcpStore {
    host: String,
    port: u16,
    /// How long the server may take for an answer.
    patience: Duration,
    limits: StoreLimits,
    idle: Mutex<Vec<Connection>>,
    home: Home,
}

impl TcpStore {
    /// Connects to the server, which may start later, for `patience` at most; so long may each answer take.
    ///
    /// # Errors
    ///
    /// [`StoreError::Unreachable`], which says what came instead.
    pub fn connect(host: &str, port: u16, patience: Duration) -> Result<Self, StoreError> {
        let (limits, home) = (StoreLimits::default(), Home::here());
        let store = Self { host: host.to_owned(), port, patience, limits, idle: Mutex::default(), home };
        let begin = now();
        let limit = begin + patience;
        let first = loop {
            match store.open(limit) {
                Ok(connection) => break connection,
                Err(error) if now() + TRY_EVERY < limit && error.is_worth_a_try() => pause(TRY_EVERY),
                Err(error) => {
                    let (place, after) = (store.place(), now() - begin);
                    return Err(StoreError::Unreachable { place, after, why: error.to_string() });
                }
            }
        };
        store.idle.lock().push(first);
        Ok(store)
    }

    /// Tells PyTorch's server, which may wait for that before it lets its own worker go on, that one more of
    /// those who were told the number of workers is here.
    pub(crate) fn announce(&self) -> Result<(), StoreError> {
        self.ask(&Request::Add(b"init/".to_vec(), 1)).map(drop)
    }

    fn place(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }

    fn open(&self, limit: Instant) -> Result<Connection, Failure> {
        let addresses = (self.host.as_str(), self.port).to_socket_addrs();
        let addresses = addresses.map_err(|error| Failure::Unknown(error.to_string()))?;
        let mut last = Failure::Unknown("the host has no address".to_owned());
        for address in addresses {
            match Connection::open(address, limit) {
                Ok(connection) => return Ok(connection),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    fn take(&self) -> Result<Connection, StoreError> {
        if !self.home.is_here() {
            return Err(StoreError::Forked);
        }
        let idle = self.idle.lock().pop();
        idle.map_or_else(|| self.open(now() + self.patience).map_err(|error| self.lost(&error)), Ok)
    }

    fn ask(&self, request: &Request) -> Result<Reply, StoreError> {
        // The server would only hang up.
        match request {
            Request::Set(key, value) | Request::Append(key, value) | Request::CompareSet(key, _, value) => {
                fits(key, self.limits.max_key)?;
                fits(value, self.limits.max_value)?;
            }
            Request::Get(key) | Request::Add(key, _) | Request::Delete(key) => {
                fits(key, self.limits.max_key)?;
            }
            _ => {}
        }
        let mut connection = self.take()?;
        let limit = Some(now() + self.patience);
        let reply = connection.ask(request, limit).map_err(|error| self.lost(&error))?;
        // One that failed is not used again: what comes on it may be the answer to something else.
        self.idle.lock().push(connection);
        Ok(reply)
    }

    fn lost(&self, why: &Failure) -> StoreError {
        StoreError::Lost { place: self.place(), why: why.to_string() }
    }

    fn unexpected<R>(&self) -> Result<R, StoreError> {
        Err(StoreError::Lost { place: self.place(), why: "it answers something else".to_owned() })
    }

    fn number(&self, request: &Request) -> Result<i64, StoreError> {
        match self.ask(request)? {
            Reply::Number(number) => Ok(number),
            _ => self.unexpected(),
        }
    }

    fn value(&self, request: &Request) -> Result<Vec<u8>, StoreError> {
        match self.ask(request)? {
            Reply::Value(value) => Ok(value),
            _ => self.unexpected(),
        }
    }

    fn flag(&self, request: &Request) -> Result<bool, StoreError> {
        match self.ask(request)? {
            Reply::Flag(flag) => Ok(flag == READY),
            _ => self.unexpected(),
        }
    }
}

impl Store for TcpStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), StoreError> {
        self.ask(&Request::Set(wire_key(key), value.into())).map(drop)
    }

    fn get(&self, key: &str) -> Result<Option<Vec<u8>>, StoreError> {
        let value = self.value(&Request::Get(wire_key(key)))?;
        // A missing key looks like an empty value.
        if value.is_empty() && !self.check(&[key])? {
            return Ok(None);
        }
        Ok(Some(value))
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>, StoreError> {
        self.value(&Request::CompareSet(wire_key(key), expected.into(), desired.into()))
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64, StoreError> {
        self.number(&Request::Add(wire_key(key), delta))
    }

    fn append(&self, key: &str, more: &[u8]) -> Result<(), StoreError> {
        self.ask(&Request::Append(wire_key(key), more.into())).map(drop)
    }

    fn check(&self, keys: &[&str]) -> Result<bool, StoreError> {
        self.flag(&Request::Check(wire_keys(keys)))
    }

    fn wait(&self, keys: &[&str], limit: Option<Instant>) -> Result<(), StoreError> {
        let mut connection = self.take()?;
        let came = connection.wait(wire_keys(keys), limit).map_err(|error| self.lost(&error))?;
        self.idle.lock().push(connection);
        if came { Ok(()) } else { Err(StoreError::timeout(keys)) }
    }

    fn delete(&self, key: &str) -> Result<bool, StoreError> {
        Ok(self.number(&Request::Delete(wire_key(key)))? > 0)
    }

    fn multi_get(&self, keys: &[&str]) -> Result<Vec<Vec<u8>>, StoreError> {
        match self.ask(&Request::MultiGet(wire_keys(keys)))? {
            Reply::Values(values) => Ok(values),
            _ => self.unexpected(),
        }
    }
}

fn fits(text: &[u8], limit: usize) -> Result<(), StoreError> {
    if text.len() <= limit { Ok(()) } else { Err(StoreError::TooLong { len: text.len(), limit }) }
}

/// PyTorch's client writes keys so.
fn wire_key(key: &str) -> Vec<u8> {
    format!("/{key}").into_bytes()
}

fn wire_keys(keys: &[&str]) -> Vec<Vec<u8>> {
    keys.iter().map(|key| wire_key(key)).collect()
}

/// Why a connection is of no use.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error("{0}")]
    Unknown(String),
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("it takes connections, but does not answer as a store does")]
    Silent,
    #[error("it closed the connection")]
    Closed,
    #[error("it does not speak as a store does: {0}")]
    Strange(String),
}

impl Failure {
    /// Whether the store may be there a moment later.
    fn is_worth_a_try(&self) -> bool {
        !matches!(self, Self::Silent | Self::Strange(_))
    }
}

/// One connection to a server, past its beginning.
#[derive(Debug)]
struct Connection {
    fd: Fd,
    /// What has come and belongs to the next reply.
    inbox: Vec<u8>,
}

impl Connection {
    fn open(address: SocketAddr, limit: Instant) -> Result<Self, Failure> {
        let fd = socket::start_connect(&Address::Tcp(address))?;
        let mut connection = Self { fd, inbox: Vec::new() };
        if !connection.ready(PollFlags::OUT, Some(limit))? {
            return Err(io::Error::from(io::ErrorKind::TimedOut).into());
        }
        socket::connect_result(&connection.fd)?;
        keep_alive(&connection.fd);
        let mut hello = Vec::new();
        Request::Validate(MAGIC).encode(&mut hello);
        Request::Ping(NONCE).encode(&mut hello);
        connection.send(&hello, Some(limit))?;
        match connection.receive(ReplyShape::Nonce, Some(limit))? {
            Some(Reply::Nonce(NONCE)) => Ok(connection),
            Some(_) => Err(Failure::Strange("a wrong answer to a ping".to_owned())),
            None => Err(Failure::Silent),
        }
    }

    /// The reply to `request`; one without a reply is followed by a ping, so that it has been done when this
    /// returns.
    fn ask(&mut self, request: &Request, limit: Option<Instant>) -> Result<Reply, Failure> {
        let mut bytes = Vec::new();
        request.encode(&mut bytes);
        let shape = request.reply_shape().unwrap_or_else(|| {
            Request::Ping(NONCE).encode(&mut bytes);
            ReplyShape::Nonce
        });
        self.send(&bytes, limit)?;
        self.receive(shape, limit)?.ok_or(Failure::Silent)
    }

    /// Whether all keys came before `limit`.
    fn wait(&mut self, keys: Vec<Vec<u8>>, limit: Option<Instant>) -> Result<bool, Failure> {
        let mut bytes = Vec::new();
        Request::Wait(keys).encode(&mut bytes);
        self.send(&bytes, Some(now() + GRACE))?;
        match self.receive(ReplyShape::Flag, limit)? {
            Some(Reply::Flag(flag)) => Ok(flag == READY),
            Some(_) => Err(Failure::Strange("a wrong answer to a wait".to_owned())),
            None => self.give_up(),
        }
    }

    /// Ends a wait whose limit has come; tells whether the keys came meanwhile.
    fn give_up(&mut self) -> Result<bool, Failure> {
        let limit = Some(now() + GRACE);
        let came = match self.ask(&Request::CancelWait, limit)? {
            Reply::Flag(READY) => true,
            _ => return Ok(false),
        };
        // That was the answer to the wait; the other one is still to come.
        self.receive(ReplyShape::Flag, limit)?.ok_or(Failure::Silent)?;
        Ok(came)
    }

    fn send(&mut self, mut bytes: &[u8], limit: Option<Instant>) -> Result<(), Failure> {
        while !bytes.is_empty() {
            match send(&self.fd, bytes, SendFlags::NOSIGNAL) {
                Ok(count) => bytes = &bytes[count..],
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => {
                    if !self.ready(PollFlags::OUT, limit)? {
                        return Err(Failure::Silent);
                    }
                }
                Err(error) => return Err(io::Error::from(error).into()),
            }
        }
        Ok(())
    }

    /// The next reply, unless it does not come in time.
    fn receive(&mut self, shape: ReplyShape, limit: Option<Instant>) -> Result<Option<Reply>, Failure> {
        let mut decoder = ReplyDecoder::new(shape, StoreLimits::default());
        let mut buffer = std::mem::take(&mut self.inbox);
        let mut started = false;
        loop {
            let mut rest = &buffer[..];
            started |= !rest.is_empty();
            let reply = decoder.next(&mut rest).map_err(|error| Failure::Strange(error.to_string()))?;
            if let Some(reply) = reply {
                self.inbox = rest.to_vec();
                return Ok(Some(reply));
            }
            buffer.resize(16 << 10, 0);
            let count = loop {
                match recv(&self.fd, &mut buffer[..], RecvFlags::empty()) {
                    Ok((0, _)) => return Err(Failure::Closed),
                    Ok((count, _)) => break count,
                    Err(rustix::io::Errno::INTR) => {}
                    Err(rustix::io::Errno::AGAIN) => {
                        if !self.ready(PollFlags::IN, limit)? {
                            // Half of a reply cannot be left in the connection.
                            return if started { Err(Failure::Silent) } else { Ok(None) };
                        }
                    }
                    Err(error) => return Err(io::Error::from(error).into()),
                }
            };
            buffer.truncate(count);
        }
    }

    /// Waits until the socket is ready, and tells whether it is before `limit`.
    fn ready(&self, what: PollFlags, limit: Option<Instant>) -> io::Result<bool> {
        loop {
            let left = limit.map(|limit| limit.saturating_duration_since(now()));
            let timeout = left.map(timespec);
            match poll(&mut [PollFd::new(&self.fd, what)], timeout.as_ref()) {
                Ok(0) => return Ok(false),
                Ok(_) => return Ok(true),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

fn keep_alive(fd: &Fd) {
    let set = sockopt::set_socket_keepalive(fd, true)
        .and_then(|()| sockopt::set_tcp_keepidle(fd, KEEPALIVE))
        .and_then(|()| sockopt::set_tcp_keepintvl(fd, KEEPALIVE / 3))
        .and_then(|()| sockopt::set_tcp_keepcnt(fd, 3));
    if let Err(error) = set {
        tracing::debug!(%error, "a store whose host goes away will not be noticed");
    }
}
