//! [`AgentBuilder`]: from a name and some functions to an agent.

use std::fmt;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use tensorcall_proto::ids::{Rank, WorkerName};

use super::agent::{Agent, Shared, limited};
use super::function::Function;
use super::handler::NativeHandler;
use super::states::{Functions, States};
use crate::agent::{Agent as EngineAgent, PeerInfo};
use crate::autograd::{Contexts, LocalEngine};
use crate::config::AgentConfig;
use crate::error::{Error, Result};
use crate::membership::{self, Joining};
use crate::rendezvous::Rendezvous;
use crate::transport::group::ProcessGroup;
use crate::transport::memory::Hub;

/// Builds an [`Agent`]: who it is, where workers meet, what others can call.
///
/// ```
/// use tensorcall::Agent;
///
/// fn add(a: f64, b: f64) -> f64 {
///     a + b
/// }
///
/// let workers = Agent::start_together([
///     Agent::builder("caller"),
///     Agent::builder("adder").function("add", add),
/// ])?;
/// let sum: f64 = workers[0].call_blocking("adder", "add", (1.0, 2.0))?;
/// assert_eq!(sum, 3.0);
/// # Ok::<(), tensorcall::Error>(())
/// ```
#[must_use = "a builder does nothing before it starts an agent"]
pub struct AgentBuilder {
    name: String,
    rank: Option<u32>,
    world_size: Option<u32>,
    dynamic: bool,
    meeting: Option<Meeting>,
    /// Through which alone it is reached, if it does not listen.
    hub: Option<Arc<Hub>>,
    timeout: Option<Duration>,
    functions: Functions,
    states: States,
    options: Vec<SetOption>,
    /// Makes what computes gradients.
    local_engine: Option<MakeEngine>,
}

/// Where workers meet.
enum Meeting {
    Url(String),
    Known(Arc<Rendezvous>),
    Group(Arc<dyn ProcessGroup>),
}

type SetOption = Box<dyn FnOnce(&mut AgentConfig) + Send>;
type MakeEngine = fn(&Arc<Contexts>) -> Arc<dyn LocalEngine>;

/// How long calls may take unless told otherwise.
const TIMEOUT: Duration = Duration::from_mins(1);
/// Stands for no limit where one is needed.
const FOREVER: Duration = Duration::from_hours(24 * 365);

impl AgentBuilder {
    pub(super) fn new(name: String) -> Self {
        Self {
            name,
            rank: None,
            world_size: None,
            dynamic: false,
            meeting: None,
            hub: None,
            timeout: Some(TIMEOUT),
            functions: Functions::default(),
            states: States::default(),
            options: Vec::new(),
            local_engine: None,
        }
    }

    /// Where the workers meet: `env://`, `tcp://HOST:PORT`, of which the worker of rank 0 hosts the store, or
    /// `file:///PATH`. Workers in Python meet there too. Rank and number of workers that are not said otherwise
    /// are those that the launcher set; see [`rendezvous`](crate::rendezvous).
    pub fn rendezvous(mut self, url: impl Into<String>) -> Self {
        self.meeting = Some(Meeting::Url(url.into()));
        self
    }

    /// The workers meet where the launcher says: torchrun, Slurm, Open MPI, or whoever sets `RANK`, `WORLD_SIZE`,
    /// `MASTER_ADDR` and `MASTER_PORT`. The same as [`rendezvous`](Self::rendezvous) at `env://`.
    pub fn from_env(self) -> Self {
        self.rendezvous("env://")
    }

    /// The workers meet where others of this process do, or did before; rank and number of workers are those
    /// of `rendezvous`, and whether the group is [dynamic](Self::dynamic) is too.
    pub fn meet_at(mut self, rendezvous: Arc<Rendezvous>) -> Self {
        self.meeting = Some(Meeting::Known(rendezvous));
        self
    }

    /// See [`over_group`](crate::engine::over_group).
    pub(crate) fn process_group(mut self, group: Arc<dyn ProcessGroup>) -> Self {
        self.meeting = Some(Meeting::Group(group));
        self
    }

    /// See [`over_hub`](crate::engine::over_hub).
    pub(crate) fn hub(mut self, hub: Arc<Hub>) -> Self {
        self.hub = Some(hub);
        self
    }

    /// This worker's rank, from 0.
    pub fn rank(mut self, rank: u32) -> Self {
        self.rank = Some(rank);
        self
    }

    /// How many workers there are.
    pub fn world_size(mut self, world_size: u32) -> Self {
        self.world_size = Some(world_size);
        self
    }

    /// Workers join and leave at run time; how many there are is not fixed.
    pub fn dynamic(mut self) -> Self {
        self.dynamic = true;
        self
    }

    /// Lets other workers call `function` by `name`; see [`Function`] for what that may be. A function of
    /// the same name is replaced.
    pub fn function<M: 'static>(mut self, name: impl Into<String>, function: impl Function<M>) -> Self {
        self.functions.insert(name.into(), function);
        self
    }

    /// State for functions that take [`State<T>`](crate::State), one of each type. Each call gets a clone.
    pub fn state<T: Clone + Send + Sync + 'static>(mut self, state: T) -> Self {
        self.states.insert(state);
        self
    }

    /// How long calls may take, and joining. Zero means without limit. Default 60 s.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = limited(timeout);
        self
    }

    /// Functions of others that run at once; those that wait for a call of their own do not count. Default
    /// 16, at least 1.
    pub fn threads(self, threads: usize) -> Self {
        self.option(move |config| {
            config.num_worker_threads = NonZeroUsize::new(threads).unwrap_or(NonZeroUsize::MIN);
        })
    }

    /// What the workers of this job share and others do not know. Without it the first worker publishes a
    /// random one where the workers meet.
    pub fn secret(self, secret: impl Into<Vec<u8>>) -> Self {
        let secret = secret.into();
        self.option(move |config| config.secret = secret)
    }

    /// Address, or name of this host, to listen on, instead of the one that routes to where workers meet.
    pub fn listen_address(self, address: impl Into<String>) -> Self {
        let address = address.into();
        self.option(move |config| config.listen_address = Some(address))
    }

    /// A worker that gives no sign of life for this long, while asked for one, is lost. Default 15 s.
    pub fn silence_limit(self, limit: Duration) -> Self {
        self.option(move |config| {
            config.silence_limit = limit;
            config.keepalive = config.keepalive.min(limit / 3);
        })
    }

    /// For workers with processors to spare: how long those who wait, and the threads that serve, go on looking for
    /// what comes next before they sleep. At most 1 s. Default zero, or what `TENSORCALL_BUSY_POLL` says.
    pub fn busy_poll(self, time: Duration) -> Self {
        self.option(move |config| config.busy_poll = time)
    }

    /// Lets this worker take part in backward passes, with candle; see [`Context`](crate::Context).
    #[cfg(feature = "candle")]
    pub fn candle(mut self) -> Self {
        self.local_engine = Some(crate::candle::engine);
        self
    }

    fn option(mut self, set: impl FnOnce(&mut AgentConfig) + Send + 'static) -> Self {
        self.options.push(Box::new(set));
        self
    }

    /// Meets the other workers and starts the agent. Returns when every worker can be called; in a
    /// [dynamic](Self::dynamic) group, when every member can call this one.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Usage`](crate::ErrorKind::Usage) says what is missing, or which name or rank is there twice;
    /// [`ErrorKind::Timeout`](crate::ErrorKind::Timeout) names the ranks that did not come;
    /// [`ErrorKind::Io`](crate::ErrorKind::Io) if the store, or an address to listen on, is not to be had.
    pub fn start(mut self) -> Result<Agent> {
        // First of all: who makes such a mistake keeps nobody waiting.
        self.check()?;
        let timeout = self.timeout.unwrap_or(Duration::ZERO);
        let rendezvous = match self.meeting.take() {
            Some(Meeting::Known(rendezvous)) => {
                self.check_against(&rendezvous)?;
                rendezvous
            }
            Some(Meeting::Group(group)) => return self.start_over(group),
            Some(Meeting::Url(url)) if self.dynamic => {
                Arc::new(Rendezvous::at_dynamic(&url, self.rank, timeout)?)
            }
            Some(Meeting::Url(url)) => Arc::new(Rendezvous::at(&url, self.rank, self.world_size, timeout)?),
            None => {
                let text = format!(
                    "where does worker '{}' meet the others? Give its builder a rendezvous, or call from_env()",
                    self.name
                );
                return Err(Error::usage(text));
            }
        };
        let hub = self.hub.take();
        let (config, handler) = self.prepare(rendezvous.rank())?;
        let shared = Arc::clone(&handler.shared);
        let roster = Arc::clone(&shared.roster);
        let start = &|config, handler| match &hub {
            Some(hub) => EngineAgent::start_in_memory(config, handler, hub),
            None => EngineAgent::start(config, handler),
        };
        let member = membership::join(&rendezvous, Joining { config, handler, roster, timeout, start })?;
        Ok(Agent::member(member, shared, rendezvous))
    }

    fn start_over(self, group: Arc<dyn ProcessGroup>) -> Result<Agent> {
        let (rank, size) = (group.rank(), group.size());
        if self.dynamic
            || self.rank.is_some_and(|own| own != rank)
            || self.world_size.is_some_and(|own| own != size)
        {
            let text = format!(
                "worker '{}' is rank {rank} of the {size} of its process group, and they stay as they are; its builder \
                 says otherwise",
                self.name
            );
            return Err(Error::usage(text));
        }
        let limit = self.timeout.unwrap_or(FOREVER);
        let (config, handler) = self.prepare(rank)?;
        let shared = Arc::clone(&handler.shared);
        let engine = EngineAgent::start_over_group(config, handler, group)?;
        engine.meet(limit)?;
        Ok(Agent::new(engine, shared))
    }

    /// What can be known to be wrong without meeting anybody.
    fn check(&self) -> Result<WorkerName> {
        self.functions.check(&self.states)?;
        let invalid = |error| Error::usage(format!("worker name {:?} is invalid: {error}", self.name));
        WorkerName::parse(&self.name).map_err(invalid)
    }

    /// Whether what was said of rank and size is what holds where the workers meet.
    fn check_against(&self, rendezvous: &Rendezvous) -> Result<()> {
        let (rank, size) = (rendezvous.rank(), rendezvous.world_size());
        let agrees = self.rank.is_none_or(|own| own == rank)
            && self.world_size.is_none_or(|own| Some(own) == size)
            && !(self.dynamic && size.is_some());
        if agrees {
            return Ok(());
        }
        let group = size.map_or_else(|| "a dynamic group".to_owned(), |size| format!("{size} workers"));
        let text = format!(
            "worker '{}' meets others as rank {rank} of {group}; its builder says otherwise",
            self.name
        );
        Err(Error::usage(text))
    }

    /// What an engine agent needs to start; `rank` is that of this worker.
    fn prepare(self, rank: u32) -> Result<(AgentConfig, Arc<NativeHandler>)> {
        let name = self.check()?;
        let rank = Rank::new(rank).ok_or_else(|| Error::usage(format!("rank {rank} is too large")))?;
        let mut config = AgentConfig::new(name, rank).with_environment()?;
        config.plain = true;
        for set in self.options {
            set(&mut config);
        }
        let (timeout, limits) = (self.timeout, config.limits);
        let contexts = self.local_engine.map(|_| Contexts::new());
        let local_engine = self.local_engine.zip(contexts.as_ref()).map(|(make, contexts)| make(contexts));
        let shared = Shared { name: self.name.into(), timeout, limits, contexts, ..Shared::default() };
        let (functions, states, shared) = (self.functions, self.states, Arc::new(shared));
        Ok((config, Arc::new(NativeHandler { functions, states, shared, local_engine })))
    }
}

impl Agent {
    /// Starts all workers of a job in this process: they talk through memory, and get their ranks in the order
    /// of `builders`. For tests, and for programs that may or may not be spread over processes.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Usage`](crate::ErrorKind::Usage) for a name that is no name or given twice, or for a
    /// function whose state is missing.
    pub fn start_together(builders: impl IntoIterator<Item = AgentBuilder>) -> Result<Vec<Self>> {
        let hub = Hub::new();
        let start = |(rank, builder): (u32, AgentBuilder)| {
            let (config, handler) = builder.prepare(rank)?;
            let shared = Arc::clone(&handler.shared);
            Ok(Self::new(EngineAgent::start_in_memory(config, handler, &hub)?, shared))
        };
        let agents: Vec<Self> = (0..).zip(builders).map(start).collect::<Result<_>>()?;
        let info = |agent: &Self| {
            let me = agent.engine().identity();
            PeerInfo::from_contact(me.name.clone(), me.rank, &agent.engine().contact())
        };
        let infos: Vec<_> = agents.iter().map(info).collect::<Result<_>>()?;
        agents.iter().try_for_each(|agent| agent.engine().open(infos.clone()))?;
        Ok(agents)
    }
}

impl fmt::Debug for AgentBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AgentBuilder")
            .field("name", &self.name)
            .field("rank", &self.rank)
            .field("world_size", &self.world_size)
            .field("functions", &self.functions)
            .finish_non_exhaustive()
    }
}
