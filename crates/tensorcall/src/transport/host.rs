//! This host: its name among hosts, and where on it to listen.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};

use super::sys;
use crate::error::{Error, Result};

/// Addresses for documentation (RFC 5737, RFC 3849): nobody has them, and the route to them is the default one.
const ELSEWHERE: [IpAddr; 2] =
    [IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)), IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1))];

/// Names this host and network namespace: abstract Unix sockets are visible within exactly that.
pub(crate) fn host_id() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let namespace = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
    let namespace: String = namespace.to_string_lossy().chars().filter(char::is_ascii_digit).collect();
    format!("{}.{namespace}", boot.trim())
}

/// What decides where to listen; the first that is given counts.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Wishes<'a> {
    /// An address or a name of this host.
    pub(crate) address: Option<&'a str>,
    /// An interface.
    pub(crate) interface: Option<&'a str>,
    /// Where the workers meet.
    pub(crate) rendezvous: Option<&'a str>,
}

/// Where to listen, and which rule says so.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listening {
    /// The address.
    pub ip: IpAddr,
    /// Why this one, for people.
    pub why: String,
}

impl Listening {
    fn new(ip: IpAddr, why: impl Into<String>) -> Self {
        Self { ip, why: why.into() }
    }
}

impl Wishes<'_> {
    /// # Errors
    ///
    /// A name that nobody knows, an interface without an address, or no route to the rendezvous.
    pub(crate) fn choose(self) -> Result<Listening> {
        if let Some(text) = self.address {
            let address = resolve(text)?.first().map(SocketAddr::ip);
            let ip = address.ok_or_else(|| Error::usage(format!("{text:?} has no address")))?;
            return Ok(Listening::new(ip, format!("the address that was asked for, {text}")));
        }
        if let Some(name) = self.interface {
            return of_interface(name);
        }
        match self.rendezvous {
            Some(host) => towards(host),
            None => Ok(Listening::new(
                Ipv4Addr::LOCALHOST.into(),
                "loopback, since the workers meet on no other host",
            )),
        }
    }
}

fn of_interface(name: &str) -> Result<Listening> {
    let what = format!("cannot listen on the interface {name:?}");
    let addresses = sys::addresses_of(Some(name)).map_err(|error| Error::io(&what, error))?;
    let found = addresses.into_iter().filter(|ip| !is_link_local(*ip)).min_by_key(IpAddr::is_ipv6);
    let ip = found.ok_or_else(|| Error::usage(format!("{what}: there is none, or it has no address")))?;
    Ok(Listening::new(ip, format!("the address of the interface that was asked for, {name}")))
}

/// What is valid on one link alone says nothing to others.
fn is_link_local(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(_) => false,
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    }
}

fn towards(host: &str) -> Result<Listening> {
    let mut last = Error::usage(format!("the rendezvous host {host:?} has no address"));
    for address in resolve(host)? {
        match route_to(address) {
            Ok(ip) if ip.is_loopback() && !means_loopback(host) => return Ok(beyond_loopback(host, ip)),
            Ok(ip) => {
                return Ok(Listening::new(
                    ip,
                    format!("the local address that routes to {host}, where the workers meet"),
                ));
            }
            Err(error) => last = Error::io(&format!("no route to {host:?}, where the workers meet"), error),
        }
    }
    Err(last)
}

/// Whether somebody who writes this has loopback in mind.
pub(crate) fn means_loopback(host: &str) -> bool {
    host.parse::<IpAddr>().is_ok() || host == "localhost" || host.ends_with(".localhost")
}

/// Many a host has its own name for a loopback address: that is where the workers meet, and they may come from
/// other hosts, where the name means something else.
fn beyond_loopback(host: &str, loopback: IpAddr) -> Listening {
    let outward = ELSEWHERE.iter().find_map(|&ip| route_to(SocketAddr::new(ip, 1)).ok());
    // Without a default route there may be a network all the same.
    let reaches_others = |ip: &IpAddr| !ip.is_loopback() && !is_link_local(*ip);
    let any = || sys::addresses_of(None).ok()?.into_iter().find(reaches_others);
    match outward.filter(reaches_others).or_else(any) {
        Some(ip) => Listening::new(
            ip,
            format!("the local address that leads out, since {host} is this host ({loopback})"),
        ),
        None => {
            Listening::new(loopback, format!("loopback, as {host} is, since this host has no other address"))
        }
    }
}

fn resolve(host: &str) -> Result<Vec<SocketAddr>> {
    let addresses = (host, 1).to_socket_addrs();
    addresses.map(Iterator::collect).map_err(|e| Error::io(&format!("cannot resolve {host:?}"), e))
}

/// The local address that packets to `to` leave from. Sends nothing.
fn route_to(to: SocketAddr) -> io::Result<IpAddr> {
    let any: SocketAddr = if to.is_ipv4() { ([0, 0, 0, 0], 0).into() } else { ([0u16; 8], 0).into() };
    let probe = UdpSocket::bind(any)?;
    probe.connect(to)?;
    Ok(probe.local_addr()?.ip())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meeting_at(host: &str) -> Wishes<'_> {
        Wishes { rendezvous: Some(host), ..Wishes::default() }
    }

    #[test]
    fn the_listening_address_is_the_one_that_routes_to_the_rendezvous() {
        let loopback = IpAddr::from([127, 0, 0, 1]);

        assert_eq!(Wishes::default().choose().unwrap().ip, loopback);
        assert_eq!(meeting_at("127.0.0.1").choose().unwrap().ip, loopback);
        assert!(meeting_at("localhost").choose().unwrap().ip.is_loopback());
    }

    /// LOG row 40.
    #[test]
    fn an_address_goes_before_an_interface_and_that_before_the_rendezvous() {
        let all = Wishes { address: Some("127.0.0.5"), interface: Some("lo"), rendezvous: Some("127.0.0.9") };

        assert_eq!(all.choose().unwrap().ip, IpAddr::from([127, 0, 0, 5]));
        assert_eq!(Wishes { address: None, ..all }.choose().unwrap().ip, IpAddr::from([127, 0, 0, 1]));
    }

    #[test]
    fn what_does_not_exist_is_an_error_that_names_it() {
        let unknown = Wishes { address: Some("no such host"), ..Wishes::default() };
        let missing = Wishes { interface: Some("nothing0"), ..Wishes::default() };

        for (wishes, name) in
            [(unknown, "no such host"), (missing, "nothing0"), (meeting_at("no-host"), "no-host")]
        {
            let error = wishes.choose().unwrap_err();
            assert!(error.to_string().contains(name), "{error}");
        }
    }

    /// LOG row 39.
    #[test]
    fn a_name_that_happens_to_be_loopback_is_listened_for_where_others_can_come() {
        let chosen = beyond_loopback("this-host", IpAddr::from([127, 0, 1, 1]));

        assert!(chosen.why.contains("this-host"), "{chosen:?}");
        let others = sys::addresses_of(None).unwrap();
        let has_network = others.iter().any(|ip| !ip.is_loopback() && !is_link_local(*ip));
        assert_eq!(!chosen.ip.is_loopback(), has_network, "{chosen:?}");
    }
}
