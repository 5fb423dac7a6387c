//! A socket in the hands of a test: says whatever the test wants, the handshake among it.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddress, UnixListener, UnixStream};
use std::time::Duration;

use tensorcall::engine::PeerInfo;
use tensorcall::engine::proto::handshake::{Expect, Initiator, Responder, Role};
use tensorcall::engine::proto::ids::{Identity, Incarnation, MessageId, WorkerName};
use tensorcall::engine::proto::wire::frame::{FrameHeader, FrameKind, HEADER_LEN, Priority};
use tensorcall::engine::proto::wire::message::{Call, Encoding, FunctionRef, Message};
use tensorcall::engine::proto::wire::{Descriptor, Limits};
use tensorcall::engine::transport::Address;

use super::{Kind, SOON, rank};

/// What the agents of [`super::config`] share.
pub(crate) const JOB: &str = "test";
pub(crate) const SECRET: &[u8] = b"secret";

/// A connection. Reads and writes end after [`SOON`].
pub(crate) enum Wire {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Wire {
    pub(crate) fn dial(address: &Address) -> Self {
        let wire = match address {
            Address::Tcp(address) => Self::Tcp(TcpStream::connect(address).unwrap()),
            Address::Unix { name, .. } => {
                let address = UnixAddress::from_abstract_name(name).unwrap();
                Self::Unix(UnixStream::connect_addr(&address).unwrap())
            }
            Address::Memory(_) | Address::Group(_) => panic!("no socket is there"),
        };
        wire.set_limit(SOON);
        wire
    }

    pub(crate) fn set_limit(&self, limit: Duration) {
        match self {
            Self::Tcp(stream) => {
                stream.set_nodelay(true).unwrap();
                stream.set_read_timeout(Some(limit)).and_then(|()| stream.set_write_timeout(Some(limit)))
            }
            Self::Unix(stream) => {
                stream.set_read_timeout(Some(limit)).and_then(|()| stream.set_write_timeout(Some(limit)))
            }
        }
        .unwrap();
    }

    /// Proves to the agent at the other end to be `me`. Also returns all that was said here.
    pub(crate) fn introduce(&mut self, me: Identity, secret: &[u8], job: &str) -> Result<Vec<u8>, String> {
        self.introduce_to(me, secret, job, Expect { rank: rank(0), incarnation: None })
    }

    pub(crate) fn introduce_to(
        &mut self,
        me: Identity,
        secret: &[u8],
        job: &str,
        expect: Expect,
    ) -> Result<Vec<u8>, String> {
        let mut side = Initiator::new(secret, job, me, expect, Role::Calls, random());
        let mut said = Vec::new();
        loop {
            while let Some(bytes) = side.poll_send() {
                said.extend_from_slice(&bytes);
                self.write_all(&bytes).map_err(|error| error.to_string())?;
            }
            if side.done().is_some() {
                return Ok(said);
            }
            let mut buffer = [0; 512];
            match self.read(&mut buffer).map_err(|error| error.to_string())? {
                0 => return Err(side.closed().to_string()),
                count => side.feed(&buffer[..count]).map_err(|error| error.to_string())?,
            }
        }
    }

    /// The other half: lets an agent prove itself to `me`.
    pub(crate) fn welcome(&mut self, me: Identity) -> Result<Identity, String> {
        let mut side = Responder::new(SECRET, JOB, me, random());
        let mut buffer = [0; 512];
        loop {
            let count = self.read(&mut buffer).map_err(|error| error.to_string())?;
            let fed = if count == 0 { Err(side.closed()) } else { side.feed(&buffer[..count]) };
            fed.map_err(|error| error.to_string())?;
            let done = side.done();
            while let Some(bytes) = side.poll_send() {
                self.write_all(&bytes).map_err(|error| error.to_string())?;
            }
            if let Some(established) = done {
                assert!(established.leftover.is_empty(), "an initiator waits for the welcome");
                return Ok(established.peer);
            }
        }
    }

    /// Whether the other end closes the connection within [`SOON`], whatever it says before.
    pub(crate) fn is_closed_soon(&mut self) -> bool {
        let mut buffer = [0; 4096];
        loop {
            match self.read(&mut buffer) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return true,
                Err(_) => return false,
            }
        }
    }

    /// The header of the next frame; what follows it is read and dropped.
    pub(crate) fn next_frame(&mut self) -> io::Result<FrameHeader> {
        let mut header = [0; HEADER_LEN];
        self.read_exact(&mut header)?;
        let header = FrameHeader::decode(&header, &Limits::default()).unwrap();
        let rest = u64::from(header.control_len) + header.body_len;
        io::copy(&mut Read::by_ref(self).take(rest), &mut io::sink())?;
        Ok(header)
    }
}

impl Read for Wire {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.read(buffer),
            Self::Unix(stream) => stream.read(buffer),
        }
    }
}

impl Write for Wire {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.write(bytes),
            Self::Unix(stream) => stream.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A listening socket.
pub(crate) enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl Listener {
    /// Listens; the address is one that agents on this host can use, because it is like that of `like`.
    pub(crate) fn new(kind: Kind, like: &PeerInfo) -> (Self, Address) {
        match kind {
            Kind::Tcp => {
                let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
                let address = Address::Tcp(listener.local_addr().unwrap());
                (Self::Tcp(listener), address)
            }
            Kind::Unix => {
                let name =
                    format!("tensorcall-test-{:016x}", u64::from_le_bytes(random()[..8].try_into().unwrap()));
                let listener =
                    UnixListener::bind_addr(&UnixAddress::from_abstract_name(&name).unwrap()).unwrap();
                let host = like.addresses.iter().find_map(|address| match address {
                    Address::Unix { host, .. } => Some(host.clone()),
                    _ => None,
                });
                (Self::Unix(listener), Address::Unix { host: host.unwrap(), name })
            }
            Kind::Memory | Kind::Group { .. } => panic!("no socket is there"),
        }
    }

    /// The next connection.
    pub(crate) fn accept(&self) -> Wire {
        let wire = match self {
            Self::Tcp(listener) => Wire::Tcp(listener.accept().unwrap().0),
            Self::Unix(listener) => Wire::Unix(listener.accept().unwrap().0),
        };
        wire.set_limit(SOON);
        wire
    }
}

/// Somebody of the name and rank of worker `number`, in a life of its own.
pub(crate) fn identity(number: u32) -> Identity {
    let name = WorkerName::parse(&format!("worker{number}")).unwrap();
    Identity { name, rank: rank(number), incarnation: Incarnation::new(0xbad) }
}

/// A frame that brings a whole message without a body.
pub(crate) fn frame(control: &[u8], body_len: u64, end: bool) -> Vec<u8> {
    let header = FrameHeader {
        kind: FrameKind::Message,
        end,
        priority: Priority::Normal,
        stream: 1,
        control_len: u32::try_from(control.len()).unwrap(),
        body_len,
    };
    [&header.encode(), control].concat()
}

/// The message that a descriptor announces, with none of its body.
pub(crate) fn announced(descriptor: &Descriptor, body_len: u64) -> Vec<u8> {
    frame(&descriptor.encode(), body_len, false)
}

/// A call of `function` with arguments of no meaning, as plain as can be.
pub(crate) fn plain_call(id: u64, function: &str) -> Message {
    Message::Call(Call {
        id: MessageId::new(id),
        function: FunctionRef::Name(function.into()),
        encoding: Encoding::Bytes,
        timeout_us: None,
        nested: false,
        plain: false,
        autograd: None,
        creates: None,
    })
}

pub(crate) fn random() -> [u8; 32] {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).unwrap();
    bytes
}
