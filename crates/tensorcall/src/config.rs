//! What an agent can be told, and where the environment is read.

use std::num::NonZeroUsize;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use tensorcall_proto::ids::{Rank, WorkerName};
use tensorcall_proto::wire::limits::Limits;

use crate::agent::Faults;
use crate::error::{Error, Result};
use crate::transport::host::{Listening, Wishes};

/// Longest time of busy polling.
const LONGEST_POLL: Duration = Duration::from_secs(1);

/// How an agent behaves. [`AgentConfig::new`] gives the defaults named here.
#[derive(Debug, Clone)]
pub struct AgentConfig {
    /// This worker's name.
    pub name: WorkerName,
    /// This worker's rank.
    pub rank: Rank,
    /// Names the job: workers of other jobs are turned away at the handshake. At most 256 bytes.
    pub job: String,
    /// What members of the job share and others do not know. Empty by default, which
    /// [`Agent::start`](crate::engine::Agent::start) refuses: it would prove nothing.
    pub secret: Vec<u8>,
    /// Functions of other workers that run at once; those that wait in a call of their own do not
    /// count. Default 16.
    pub num_worker_threads: NonZeroUsize,
    /// Most threads that run functions, waiting ones included. Beyond it, with all of them waiting,
    /// a request fails with [`ErrorKind::PoolExhausted`](crate::ErrorKind::PoolExhausted). Default 1024.
    pub max_threads: usize,
    /// Most calls to one worker that may be unanswered; a further call that does not come from inside
    /// a running function waits for one to end. Default 65 536.
    pub max_outstanding_calls: usize,
    /// Most bytes of such calls. Default 4 GiB.
    pub max_outstanding_bytes: u64,
    /// A quiet connection with unanswered calls is asked for a sign of life this often. Default 1 s.
    pub keepalive: Duration,
    /// A peer that gives no sign of life for this long, while asked for one, is lost. Default 15 s.
    pub silence_limit: Duration,
    /// Idle memory kept for receiving large tensors. Default 512 MiB.
    pub max_idle_memory: usize,
    /// Memory that is shared with each worker on the same host to send it large tensors, most of it. It is made
    /// when it is needed; what finds no room in it goes through sockets. 0 for none. Default 512 MiB.
    pub max_shared_memory: usize,
    /// Shared memory that was not needed for this long is given up. Default 10 s.
    pub shared_memory_idle: Duration,
    /// For workers with processors to spare: how long a thread that waits for an answer, the I/O thread after a
    /// message, and a thread of the pool after a function, go on looking for what comes next before they sleep.
    /// At most 1 s. Default zero: only short looks that adapt.
    pub busy_poll: Duration,
    /// Host of the rendezvous: the agent listens on the address that routes to it, or, if this very host
    /// has its name for a loopback address, on the one that leads out. `None` means loopback.
    pub rendezvous_host: Option<String>,
    /// Address, or name of this host, to listen on instead.
    pub listen_address: Option<String>,
    /// Interface to listen on instead; an address goes first.
    pub listen_interface: Option<String>,
    /// Whether workers on the same host use TCP too, and not the faster ways there are within a host.
    /// Default no.
    pub tcp_only: bool,
    /// Whether this worker reads plain data only, and no pickles: what answers its calls is a
    /// [`Value`](tensorcall_proto::wire::Value), and others know that its functions need such arguments.
    /// Default false.
    pub plain: bool,
    /// Over a process group, most pieces of large tensors on their way to one worker at once, each with a
    /// thread of its own here and there. Default 4.
    pub group_threads: NonZeroUsize,
    /// What is accepted from peers.
    pub limits: Limits,
    /// What happens to messages on their way out, in tests. Default none.
    pub faults: Option<Arc<dyn Faults>>,
}

impl AgentConfig {
    /// The defaults.
    pub fn new(name: WorkerName, rank: Rank) -> Self {
        Self {
            name,
            rank,
            job: String::new(),
            secret: Vec::new(),
            num_worker_threads: const { NonZeroUsize::new(16).unwrap() },
            max_threads: 1024,
            max_outstanding_calls: 1 << 16,
            max_outstanding_bytes: 4 << 30,
            keepalive: Duration::from_secs(1),
            silence_limit: Duration::from_secs(15),
            max_idle_memory: 512 << 20,
            max_shared_memory: 512 << 20,
            shared_memory_idle: Duration::from_secs(10),
            busy_poll: Duration::ZERO,
            rendezvous_host: None,
            listen_address: None,
            listen_interface: None,
            tcp_only: false,
            plain: false,
            group_threads: const { NonZeroUsize::new(4).unwrap() },
            limits: Limits::default(),
            faults: None,
        }
    }

    /// Lets the environment change what it names: `TENSORCALL_MAX_THREADS`,
    /// `TENSORCALL_MAX_OUTSTANDING_CALLS`, `TENSORCALL_MAX_OUTSTANDING_BYTES`,
    /// `TENSORCALL_SILENCE_LIMIT` (seconds), `TENSORCALL_MAX_IDLE_MEMORY` and `TENSORCALL_MAX_SHARED_MEMORY`
    /// (bytes), `TENSORCALL_BUSY_POLL` (microseconds), `TENSORCALL_TCP_ONLY` (1),
    /// `TENSORCALL_ADDR` and `TENSORCALL_IFACE`, or else `TP_SOCKET_IFNAME`, which programs for PyTorch set.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Usage`](crate::ErrorKind::Usage) if a value is not a number, or too large.
    pub fn with_environment(mut self) -> Result<Self> {
        set(&mut self.max_threads, "TENSORCALL_MAX_THREADS")?;
        set(&mut self.max_outstanding_calls, "TENSORCALL_MAX_OUTSTANDING_CALLS")?;
        set(&mut self.max_outstanding_bytes, "TENSORCALL_MAX_OUTSTANDING_BYTES")?;
        set(&mut self.max_idle_memory, "TENSORCALL_MAX_IDLE_MEMORY")?;
        set(&mut self.max_shared_memory, "TENSORCALL_MAX_SHARED_MEMORY")?;
        let mut busy = self.busy_poll.as_micros();
        set(&mut busy, "TENSORCALL_BUSY_POLL")?;
        self.busy_poll = busy_poll(busy).ok_or_else(|| {
            Error::usage(format!(
                "environment variable TENSORCALL_BUSY_POLL must be at most {} microseconds, but is {busy}",
                LONGEST_POLL.as_micros()
            ))
        })?;
        let mut silence = self.silence_limit.as_secs_f64();
        set(&mut silence, "TENSORCALL_SILENCE_LIMIT")?;
        self.silence_limit = Duration::try_from_secs_f64(silence).map_err(|_| {
            Error::usage(format!(
                "environment variable TENSORCALL_SILENCE_LIMIT must be a time, but is {silence}"
            ))
        })?;
        // A peer needs time for an answer.
        self.keepalive = self.keepalive.min(self.silence_limit / 3);
        let mut tcp_only = u8::from(self.tcp_only);
        set(&mut tcp_only, "TENSORCALL_TCP_ONLY")?;
        self.tcp_only = tcp_only != 0;
        self.listen_address = variable("TENSORCALL_ADDR").or(self.listen_address);
        let interface = variable("TENSORCALL_IFACE").or_else(|| variable("TP_SOCKET_IFNAME"));
        self.listen_interface = interface.or(self.listen_interface);
        Ok(self)
    }

    /// Whether an agent can be like this.
    pub(crate) fn check(&self) -> Result<()> {
        if self.busy_poll > LONGEST_POLL {
            let text = format!("busy_poll must be at most {LONGEST_POLL:?}, but is {:?}", self.busy_poll);
            return Err(Error::usage(text));
        }
        Ok(())
    }

    /// Where an agent with this configuration listens, and why there.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Usage`](crate::ErrorKind::Usage) or [`ErrorKind::Io`](crate::ErrorKind::Io) if there is
    /// no such address, interface or route.
    pub fn listening(&self) -> Result<Listening> {
        let wishes = Wishes {
            address: self.listen_address.as_deref(),
            interface: self.listen_interface.as_deref(),
            rendezvous: self.rendezvous_host.as_deref(),
        };
        wishes.choose()
    }
}

/// The job's secret, if the environment has it: `TENSORCALL_SECRET`, or the content of the file that
/// `TENSORCALL_SECRET_FILE` names.
pub(crate) fn given_secret() -> Result<Option<Vec<u8>>> {
    if let Some(secret) = variable("TENSORCALL_SECRET") {
        return Ok(Some(secret.into_bytes()));
    }
    let Some(path) = variable("TENSORCALL_SECRET_FILE") else { return Ok(None) };
    let content = std::fs::read(&path);
    let content =
        content.map_err(|error| Error::io(&format!("cannot read the secret file {path}"), error))?;
    let secret = content.trim_ascii();
    if secret.is_empty() {
        return Err(Error::usage(format!("the secret file {path} is empty")));
    }
    Ok(Some(secret.to_vec()))
}

/// A time of busy polling, unless it is too long.
fn busy_poll(micros: u128) -> Option<Duration> {
    let time = Duration::from_micros(u64::try_from(micros).ok()?);
    (time <= LONGEST_POLL).then_some(time)
}

fn set<T: FromStr>(target: &mut T, name: &str) -> Result<()> {
    if let Some(text) = variable(name) {
        *target = text.trim().parse().map_err(|_| {
            Error::usage(format!("environment variable {name} must be a number, but is {text:?}"))
        })?;
    }
    Ok(())
}

#[expect(clippy::disallowed_methods, reason = "the one place that reads the environment")]
pub(crate) fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|text| !text.is_empty())
}
