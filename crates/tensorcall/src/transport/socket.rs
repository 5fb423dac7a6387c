//! TCP and Unix sockets: making, listening, accepting.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;

use rustix::net::{
    AddressFamily, SocketAddrAny, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect,
    getsockname, listen, socket_with, sockopt,
};

use super::Address;
use super::host::host_id;
use crate::error::{Error, Result};
use crate::fork::Fd;

/// Connections that wait to be accepted.
const BACKLOG: i32 = 1024;

/// A socket that accepts connections.
#[derive(Debug)]
pub(crate) struct ListenSocket {
    pub(crate) fd: Fd,
    pub(crate) address: Address,
}

/// Listens on `at`; port 0 lets the system choose one. On the unspecified IPv6 address also for IPv4.
pub(crate) fn listen_tcp(at: SocketAddr) -> Result<ListenSocket> {
    let what = |error| {
        let (ip, port) = (at.ip(), at.port());
        Error::io(
            &if port == 0 { format!("cannot listen on {ip}") } else { format!("cannot listen on {at}") },
            error,
        )
    };
    let family = if at.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let fd = new_socket(family).map_err(what)?;
    if at.port() != 0 {
        // Connections that a former listener had do not keep the port.
        sockopt::set_socket_reuseaddr(&fd, true).map_err(|e| what(e.into()))?;
    }
    if at.is_ipv6() && at.ip().is_unspecified() {
        sockopt::set_ipv6_v6only(&fd, false).map_err(|e| what(e.into()))?;
    }
    bind(&fd, &at).map_err(|e| what(e.into()))?;
    listen(&fd, BACKLOG).map_err(|e| what(e.into()))?;
    let bound = getsockname(&fd).map_err(|e| what(e.into()))?;
    let address = SocketAddr::try_from(bound).map_err(|e| what(e.into()))?;
    Ok(ListenSocket { fd, address: Address::Tcp(address) })
}

/// Listens on the abstract Unix socket `name`.
pub(crate) fn listen_unix(name: &str) -> Result<ListenSocket> {
    let what =
        |error: rustix::io::Errno| Error::io(&format!("cannot listen on the Unix socket {name:?}"), error);
    let fd = new_socket(AddressFamily::UNIX).map_err(|e| Error::io("cannot make a Unix socket", e))?;
    bind(&fd, &SocketAddrUnix::new_abstract_name(name.as_bytes()).map_err(what)?).map_err(what)?;
    listen(&fd, BACKLOG).map_err(what)?;
    Ok(ListenSocket { fd, address: Address::Unix { host: host_id(), name: name.to_owned() } })
}

/// Whether descriptors can be passed over this socket: its other end is on this host.
pub(crate) fn passes_descriptors(fd: &Fd) -> bool {
    sockopt::socket_domain(fd).is_ok_and(|family| family == AddressFamily::UNIX)
}

/// Starts to connect without blocking. The socket becomes writable when it is decided.
pub(crate) fn start_connect(address: &Address) -> io::Result<Fd> {
    let (fd, result) = match address {
        Address::Tcp(to) => {
            let family = if to.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
            let fd = new_socket(family)?;
            tune(&fd);
            let result = connect(&fd, to);
            (fd, result)
        }
        Address::Unix { name, .. } => {
            let fd = new_socket(AddressFamily::UNIX)?;
            let result = connect(&fd, &SocketAddrUnix::new_abstract_name(name.as_bytes())?);
            (fd, result)
        }
        Address::Memory(_) | Address::Group(_) => return Err(io::ErrorKind::Unsupported.into()),
    };
    match result {
        Ok(()) | Err(rustix::io::Errno::INPROGRESS) => Ok(fd),
        Err(error) => Err(error.into()),
    }
}

/// How a started connect came out.
pub(crate) fn connect_result(fd: &Fd) -> io::Result<()> {
    match sockopt::socket_error(fd)? {
        Ok(()) => {
            tune_if_local(fd);
            Ok(())
        }
        Err(error) => Err(error.into()),
    }
}

/// Within one host there is no network to be fair to. Congestion control that paces (bbr) moves a third
/// of what plain reno does there: 16 MiB took 6.4 ms over a Unix socket, 7 ms over TCP with bbr and
/// 2.3 ms with reno (ADR 13). Where reno is not allowed, the system's choice stays.
fn tune_if_local(fd: &Fd) {
    let ip = |address: SocketAddrAny| SocketAddr::try_from(address).map(|address| address.ip()).ok();
    let here = getsockname(fd).ok().and_then(ip);
    let there = rustix::net::getpeername(fd).ok().flatten().and_then(ip);
    if here.is_some()
        && here == there
        && let Err(error) = sockopt::set_tcp_congestion(fd, "reno")
    {
        tracing::debug!(%error, "cannot choose the congestion control of a local connection");
    }
}

/// Takes the next waiting connection and says where it comes from; `None` if there is none.
///
/// # Errors
///
/// When the connection is refused because of its uid, or accepting failed.
pub(crate) fn accept(socket: &ListenSocket) -> io::Result<Option<(Fd, String)>> {
    let fd = match Fd::open(|| accept_with(&socket.fd, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC)) {
        Ok(fd) => fd,
        Err(rustix::io::Errno::AGAIN) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    if let Address::Unix { .. } = socket.address {
        let peer = sockopt::socket_peercred(&fd)?;
        if peer.uid != rustix::process::geteuid() {
            let text = format!(
                "process {} of user {} is not of this user",
                peer.pid.as_raw_nonzero(),
                peer.uid.as_raw()
            );
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
        }
        return Ok(Some((fd, format!("local process {}", peer.pid.as_raw_nonzero()))));
    }
    tune(&fd);
    tune_if_local(&fd);
    let from = rustix::net::getpeername(&fd)?;
    let from = from.map_or_else(|| "an unnamed address".to_owned(), describe);
    Ok(Some((fd, from)))
}

fn describe(address: SocketAddrAny) -> String {
    SocketAddr::try_from(address)
        .map_or_else(|_| "an unknown address".to_owned(), |address| address.to_string())
}

fn new_socket(family: AddressFamily) -> io::Result<Fd> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    Ok(Fd::open(|| socket_with(family, SocketType::STREAM, flags, None))?)
}

/// Small messages leave at once.
fn tune(fd: impl AsFd) {
    if let Err(error) = sockopt::set_tcp_nodelay(fd, true) {
        tracing::debug!(%error, "cannot set TCP_NODELAY");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_connection_says_so() {
        let gone = Address::Unix { host: host_id(), name: "tensorcall-test-nobody-listens".to_owned() };

        assert_eq!(start_connect(&gone).unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
    }
}
