//! From where a job is to meet to the store, the rank and the number of workers.
//!
//! A [`Rendezvous`] comes from an URL, or from what the program's launcher has set
//! ([`Rendezvous::from_env`]):
//!
//! | URL | the workers meet |
//! |---|---|
//! | `env://` | where `MASTER_ADDR` and `MASTER_PORT` say, or what the launcher sets implies |
//! | `tcp://HOST:PORT` | there; the worker of rank 0 hosts the store |
//! | `file:///PATH` | in that file, which must not be left from an earlier job |
//!
//! `?rank=R&world_size=N` may follow. All of them mean the same to the Python package, so that workers of both
//! languages meet. What launchers are understood to set:
//!
//! | launcher | rank, world size | where to meet, unless `MASTER_ADDR` says | port, unless `MASTER_PORT` says |
//! |---|---|---|---|
//! | torchrun, or by hand | `RANK`, `WORLD_SIZE` | | |
//! | Open MPI | `OMPI_COMM_WORLD_RANK`, `OMPI_COMM_WORLD_SIZE` | loopback, if `OMPI_COMM_WORLD_LOCAL_SIZE` is all | from `PMIX_NAMESPACE` |
//! | MPICH, Intel MPI | `PMI_RANK`, `PMI_SIZE` | loopback, if `MPI_LOCALNRANKS` is all | |
//! | Slurm | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS` or `SLURM_NTASKS` | the first of `SLURM_STEP_NODELIST` or `SLURM_JOB_NODELIST`, loopback for one node | from `SLURM_JOB_ID` and `SLURM_STEP_ID` |
//!
//! ```
//! use std::time::Duration;
//! use tensorcall::rendezvous::Rendezvous;
//!
//! // As torchrun, srun or mpirun would have it: Rendezvous::from_env(Duration::from_secs(60))?
//! let path = std::env::temp_dir().join(format!("meeting-{}", std::process::id()));
//! let meeting = Rendezvous::at(&format!("file://{}", path.display()), Some(0), Some(1), Duration::from_secs(60))?;
//! assert_eq!((meeting.rank(), meeting.world_size()), (0, Some(1)));
//! # Ok::<(), tensorcall::Error>(())
//! ```
//!
//! The first row whose rank is set counts. Torchrun hosts the store itself where it says so by
//! `TORCHELASTIC_USE_AGENT_STORE`; then no worker does.

mod launcher;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use tensorcall_proto::ids::Rank;

use crate::config;
use crate::error::{Error, Result};
use crate::store::{FileStore, Store, StoreServer, TcpStore};
use crate::transport::host::means_loopback;

/// Workers wait so long for each other even if calls may take less.
pub(crate) const MIN_PATIENCE: Duration = Duration::from_secs(5);

/// As long as a store can count.
const FOR_EVER: Duration = Duration::from_millis(i32::MAX as u64);

/// Where the workers of a job meet, and which of them this one is. Keep it as long as the job lasts: it hosts
/// the store if this worker does. It may be used again, for a group after the one that met there.
#[derive(Debug)]
pub struct Rendezvous {
    store: Arc<dyn Store>,
    rank: Rank,
    world_size: Option<u32>,
    host: Option<String>,
    file: Option<PathBuf>,
    joined: AtomicU32,
    /// After the store, which is a client of it.
    _server: Option<StoreServer>,
}

impl Rendezvous {
    /// As the launcher says: torchrun, Slurm, Open MPI or MPICH; see the [module](self).
    ///
    /// `timeout` is the limit for calls, by default 60 s: the store has that long to be there, and no less than 5 s.
    /// [`Duration::ZERO`] means no limit.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Usage`](crate::ErrorKind::Usage), which says what is missing;
    /// [`ErrorKind::Io`](crate::ErrorKind::Io) if there is no store, or it cannot be hosted here.
    pub fn from_env(timeout: Duration) -> Result<Self> {
        Self::at("env://", None, None, timeout)
    }

    /// At `url`, see the [module](self). What is not given as argument comes from the URL, or from what the launcher
    /// says.
    ///
    /// # Errors
    ///
    /// As [`Rendezvous::from_env`].
    pub fn at(url: &str, rank: Option<u32>, world_size: Option<u32>, timeout: Duration) -> Result<Self> {
        Self::find(url, rank, Size::Given(world_size), timeout, &config::variable)
    }

    /// As [`Rendezvous::at`], for a [dynamic](crate::AgentBuilder::dynamic) group, which has no number of workers.
    ///
    /// # Errors
    ///
    /// As [`Rendezvous::from_env`].
    pub fn at_dynamic(url: &str, rank: Option<u32>, timeout: Duration) -> Result<Self> {
        Self::find(url, rank, Size::Open, timeout, &config::variable)
    }

    /// In a store that is there already: one that this program has made, for instance in memory. Without a number of
    /// workers the group is [dynamic](crate::AgentBuilder::dynamic).
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Usage`](crate::ErrorKind::Usage) for a rank out of range.
    pub fn in_store(store: Arc<dyn Store>, rank: u32, world_size: Option<u32>) -> Result<Self> {
        let rank = checked(rank, world_size)?;
        Ok(Self { store, rank, world_size, host: None, file: None, joined: AtomicU32::new(0), _server: None })
    }

    /// This worker's rank.
    pub fn rank(&self) -> u32 {
        self.rank.get().into()
    }

    /// This worker's rank, as messages have it.
    pub(crate) fn checked_rank(&self) -> Rank {
        self.rank
    }

    /// How many workers there are; `None` in a dynamic group.
    pub fn world_size(&self) -> Option<u32> {
        self.world_size
    }

    /// The store.
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    /// The host where the workers meet, if it is said: each listens on the address that leads there.
    pub fn host(&self) -> Option<&str> {
        self.host.as_deref()
    }

    /// The file in which the workers meet, if it is one.
    pub(crate) fn file(&self) -> Option<&PathBuf> {
        self.file.as_ref()
    }

    /// Counts the groups that this worker joins here, from 0.
    pub(crate) fn next_group(&self) -> u32 {
        self.joined.fetch_add(1, Ordering::Relaxed)
    }

    fn find(
        url: &str,
        rank: Option<u32>,
        size: Size,
        timeout: Duration,
        look: launcher::Look<'_>,
    ) -> Result<Self> {
        let url = Url::parse(url)?;
        let (their_rank, their_size) = launcher::rank_and_size(look)?;
        let rank = rank.or(url.rank).or(their_rank).ok_or_else(|| Error::usage(launcher::NO_RANK))?;
        let world_size = match size {
            Size::Open => None,
            Size::Given(size) => {
                let size = size.or(url.world_size).or(their_size);
                Some(size.ok_or_else(|| Error::usage(launcher::NO_SIZE))?)
            }
        };
        checked(rank, world_size)?;
        let patience = patience(timeout).unwrap_or(FOR_EVER);
        let (host, port) = match url.place {
            Place::File(path) => {
                let store = Arc::new(FileStore::open(&path, world_size)?);
                return Ok(Self { file: Some(path), ..Self::in_store(store, rank, world_size)? });
            }
            Place::Tcp(host, port) => (host, port),
            Place::Env => launcher::meeting_place(look)?,
        };
        let hosts = rank == 0 && !launcher::hosts_store(look, &host, port);
        let server = if hosts { Some(host_store(&host, port)?) } else { None };
        let port = server.as_ref().map_or(port, |server| server.address().port());
        let client = TcpStore::connect(&host, port, patience)?;
        if !hosts && world_size.is_some() {
            client.announce()?;
        }
        let met = Self::in_store(Arc::new(client), rank, world_size)?;
        Ok(Self { host: Some(host), _server: server, ..met })
    }
}

/// How many workers there are.
#[derive(Debug, Clone, Copy)]
enum Size {
    /// So many, or as many as URL or launcher say.
    Given(Option<u32>),
    /// Nobody knows.
    Open,
}

/// How long workers wait for each other when calls may take `timeout`; `None` is for ever.
pub(crate) fn patience(timeout: Duration) -> Option<Duration> {
    (!timeout.is_zero()).then(|| timeout.max(MIN_PATIENCE))
}

fn checked(rank: u32, world_size: Option<u32>) -> Result<Rank> {
    if let Some(size) = world_size.filter(|size| rank >= *size) {
        return Err(Error::usage(format!(
            "rank must be from 0 to world_size - 1: got rank {rank} with world_size {size}"
        )));
    }
    Rank::new(rank).ok_or_else(|| Error::usage(format!("rank {rank} is out of range")))
}

/// Hosts the store where others look for it. Others may know this host by other addresses than it does itself, so
/// only a name that means loopback to everybody is taken as it is.
fn host_store(host: &str, port: u16) -> Result<StoreServer> {
    if !means_loopback(host) {
        let everywhere = SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), port);
        return match StoreServer::listen(everywhere) {
            Err(_) if !has_ipv6() => StoreServer::listen(SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), port)),
            server => server,
        };
    }
    let addresses = (host, port).to_socket_addrs();
    let addresses = addresses.map_err(|error| Error::io(&format!("cannot resolve {host:?}"), error))?;
    let mut result = Err(Error::usage(format!("{host:?} has no address")));
    for address in addresses {
        let is_any = address.ip().is_loopback() || host.parse::<IpAddr>().is_ok();
        result = StoreServer::listen(if is_any {
            address
        } else {
            SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port)
        });
        if result.is_ok() {
            break;
        }
    }
    result
}

fn has_ipv6() -> bool {
    std::net::TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).is_ok()
}

#[derive(Debug, PartialEq, Eq)]
struct Url {
    place: Place,
    rank: Option<u32>,
    world_size: Option<u32>,
}

#[derive(Debug, PartialEq, Eq)]
enum Place {
    Env,
    Tcp(String, u16),
    File(PathBuf),
}

impl Url {
    fn parse(text: &str) -> Result<Self> {
        let wrong = |why: &str| {
            Error::usage(format!(
                "{text:?} is no place to meet ({why}): it is env://, tcp://HOST:PORT or file:///PATH"
            ))
        };
        let (scheme, rest) = text.split_once("://").ok_or_else(|| wrong("it has no scheme"))?;
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let place = match scheme {
            "env" => Place::Env,
            "tcp" => {
                let place =
                    rest.trim_end_matches('/').rsplit_once(':').ok_or_else(|| wrong("it has no port"))?;
                let host = place.0.trim_start_matches('[').trim_end_matches(']');
                let port = place.1.parse().map_err(|_| wrong("its port is no number"))?;
                if host.is_empty() {
                    return Err(wrong("it has no host"));
                }
                Place::Tcp(host.to_owned(), port)
            }
            "file" => {
                let path = rest.find('/').map(|start| &rest[start..]).filter(|path| path.len() > 1);
                Place::File(path.ok_or_else(|| wrong("it has no path"))?.into())
            }
            _ => return Err(wrong("its scheme is unknown")),
        };
        let mut url = Self { place, rank: None, world_size: None };
        for (key, value) in query.split('&').filter_map(|pair| pair.split_once('=')) {
            let number = || value.parse().map_err(|_| wrong(&format!("its {key} is no number")));
            match key {
                "rank" => url.rank = Some(number()?),
                "world_size" => url.world_size = Some(number()?),
                _ => {}
            }
        }
        Ok(url)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_secs(20);

    fn tcp(host: &str, port: u16) -> Place {
        Place::Tcp(host.to_owned(), port)
    }

    #[test]
    fn urls_say_where_and_perhaps_who() {
        for (text, place, rank, world_size) in [
            ("env://", Place::Env, None, None),
            ("env://?rank=1", Place::Env, Some(1), None),
            ("tcp://host:5", tcp("host", 5), None, None),
            ("tcp://[::1]:5/?rank=2&world_size=3", tcp("::1", 5), Some(2), Some(3)),
            ("file:///a/b c", Place::File("/a/b c".into()), None, None),
            ("file://localhost/a?rank=0", Place::File("/a".into()), Some(0), None),
        ] {
            assert_eq!(Url::parse(text).unwrap(), Url { place, rank, world_size }, "{text}");
        }
        for text in ["", "tcp", "tcp://host", "tcp://host:x", "tcp://:5", "file://", "file:///", "udp://h:1"]
        {
            assert!(Url::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn rank_0_hosts_the_store_and_the_others_find_it() {
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("tcp://{}", free.local_addr().unwrap());
        drop(free);

        let first = Rendezvous::at(&url, Some(0), Some(2), SOON).unwrap();
        let second = Rendezvous::at(&url, Some(1), Some(2), SOON).unwrap();

        first.store().set("k", b"v").unwrap();
        assert_eq!(second.store().get("k"), Ok(Some(b"v".to_vec())));
        assert_eq!((second.rank(), second.world_size()), (1, Some(2)));
        assert_eq!(second.host(), Some("127.0.0.1"));
        assert_eq!([second.next_group(), second.next_group()], [0, 1]);
    }

    #[test]
    fn where_the_launcher_hosts_the_store_nobody_else_does() {
        let server = StoreServer::listen(([127, 0, 0, 1], 0).into()).unwrap();
        let port = server.address().port().to_string();
        let look = |name: &str| match name {
            "MASTER_ADDR" => Some("127.0.0.1".to_owned()),
            "MASTER_PORT" => Some(port.clone()),
            "RANK" => Some("0".to_owned()),
            "WORLD_SIZE" => Some("1".to_owned()),
            "TORCHELASTIC_USE_AGENT_STORE" => Some("True".to_owned()),
            _ => None,
        };

        let met = Rendezvous::find("env://", None, Size::Given(None), SOON, &look).unwrap();

        // As PyTorch's client does, for those who wait until all have come.
        let bare = TcpStore::connect("127.0.0.1", server.address().port(), SOON).unwrap();
        assert_eq!(met.rank(), 0);
        drop(bare);
    }

    #[test]
    fn who_is_missing_or_out_of_range_is_said() {
        let nothing = |_: &str| None;
        let find = |url: &str, rank, size| {
            Rendezvous::find(url, rank, Size::Given(size), SOON, &nothing).unwrap_err().to_string()
        };

        assert!(find("env://", None, Some(2)).contains("RANK"));
        assert!(find("tcp://127.0.0.1:1", Some(0), None).contains("WORLD_SIZE"));
        assert!(find("env://", Some(0), Some(1)).contains("MASTER_ADDR"));
        assert!(find("tcp://127.0.0.1:1", Some(2), Some(2)).contains("got rank 2 with world_size 2"));
    }

    #[test]
    fn a_dynamic_group_has_no_size() {
        let store = Arc::new(crate::store::MemoryStore::new());

        let met = Rendezvous::in_store(store, 7, None).unwrap();

        assert_eq!((met.rank(), met.world_size()), (7, None));
        assert_eq!(patience(Duration::ZERO), None);
        assert_eq!(patience(Duration::from_secs(1)), Some(MIN_PATIENCE));
    }
}
