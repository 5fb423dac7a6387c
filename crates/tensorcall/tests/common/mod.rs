//! Agents for tests: a handler that runs Rust closures, and groups of agents in one process.
#![allow(dead_code, reason = "each test file uses a part")]

use std::any::Any;
use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use tensorcall::engine::buffer::{ALIGNMENT, Buffer, Region};
use tensorcall::engine::proto::ids::{Identity, Incarnation, Rank, WorkerName};
use tensorcall::engine::proto::wire::message::{Encoding, FailureKind, FunctionRef};
use tensorcall::engine::transport::Address;
use tensorcall::engine::transport::group::Fabric;
use tensorcall::engine::transport::memory::Hub;
use tensorcall::engine::{
    Agent, AgentConfig, Error, Handler, InboundCall, PeerInfo, Request, Responder, Result, RpcFuture,
    ThreadHook,
    body::{Body, Received},
};

pub(crate) mod bench;
pub(crate) mod gate;
pub(crate) mod log;
pub(crate) mod proxy;
pub(crate) mod raw;

/// No wait of a test is longer.
pub(crate) const SOON: Duration = Duration::from_secs(20);

type Function = Box<dyn Fn(InboundCall, Responder) + Send + Sync>;

/// Runs closures by name.
#[derive(Default)]
pub(crate) struct Functions(HashMap<&'static str, Function>);

impl Functions {
    pub(crate) fn with(
        mut self,
        name: &'static str,
        function: impl Fn(InboundCall, Responder) + Send + Sync + 'static,
    ) -> Self {
        self.0.insert(name, Box::new(function));
        self
    }

    /// A function from payload to payload.
    pub(crate) fn plain(
        self,
        name: &'static str,
        function: impl Fn(&[u8]) -> Vec<u8> + Send + Sync + 'static,
    ) -> Self {
        self.with(name, move |call, responder| {
            let result = function(call.body.payload.as_ref());
            responder.returned(Encoding::Bytes, Body::of(result));
        })
    }
}

impl ThreadHook for Functions {
    fn run(&self, body: &mut (dyn FnMut() + Send)) {
        body();
    }
}

impl Handler for Functions {
    fn handle(&self, call: InboundCall, responder: Responder) {
        match call.function.as_deref().and_then(|name| self.0.get(name)) {
            Some(function) => function(call, responder),
            None => responder.failed(FailureKind::Usage, format!("no function {:?}", call.function)),
        }
    }

    /// Values are vectors of bytes.
    fn fetch(&self, value: Arc<dyn Any + Send + Sync>, _: InboundCall, responder: Responder) {
        let bytes = value.downcast_ref::<Vec<u8>>().unwrap().clone();
        responder.returned(Encoding::Bytes, Body::of(bytes));
    }
}

pub(crate) fn rank(number: u32) -> Rank {
    Rank::new(number).unwrap()
}

pub(crate) fn config(number: u32) -> AgentConfig {
    let mut config = AgentConfig::new(WorkerName::parse(&format!("worker{number}")).unwrap(), rank(number));
    config.job = raw::JOB.into();
    config.secret = raw::SECRET.into();
    config
}

/// A way to move messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Memory,
    Unix,
    Tcp,
    /// A process group, received from by rank or from any.
    Group {
        any_source: bool,
    },
}

impl Kind {
    pub(crate) const ALL: [Self; 4] =
        [Self::Memory, Self::Unix, Self::Tcp, Self::Group { any_source: false }];
    pub(crate) const SOCKETS: [Self; 2] = [Self::Unix, Self::Tcp];

    pub(crate) fn names(self, address: &Address) -> bool {
        match address {
            Address::Memory(_) => self == Self::Memory,
            Address::Unix { .. } => self == Self::Unix,
            Address::Tcp(_) => self == Self::Tcp,
            Address::Group(_) => matches!(self, Self::Group { .. }),
        }
    }
}

/// Agents that meet over one kind of transport. Calls to oneself go through memory, as ever.
pub(crate) fn group(
    kind: Kind,
    count: u32,
    adjust: impl Fn(&mut AgentConfig),
    functions: impl Fn() -> Functions,
) -> Vec<Agent> {
    let agents = strangers(kind, count, adjust, functions);
    for (own, agent) in agents.iter().enumerate() {
        let mut infos: Vec<_> = agents.iter().map(|agent| info_over(kind, agent)).collect();
        infos[own] = info(agent);
        agent.open(infos).unwrap();
    }
    agents
}

/// Agents that do not know each other yet.
pub(crate) fn strangers(
    kind: Kind,
    count: u32,
    adjust: impl Fn(&mut AgentConfig),
    functions: impl Fn() -> Functions,
) -> Vec<Agent> {
    let hub = Hub::new();
    let fabric = Fabric::new(count, kind != (Kind::Group { any_source: false }));
    let start = |number| {
        let mut config = config(number);
        adjust(&mut config);
        let handler = Arc::new(functions());
        match kind {
            Kind::Memory => Agent::start_in_memory(config, handler, &hub).unwrap(),
            Kind::Unix | Kind::Tcp => Agent::start(config, handler).unwrap(),
            Kind::Group { .. } => Agent::start_over_group(config, handler, fabric.member(number)).unwrap(),
        }
    };
    (0..count).map(start).collect()
}

/// What others know of an agent.
pub(crate) fn info(agent: &Agent) -> PeerInfo {
    let me = agent.identity();
    PeerInfo::from_contact(me.name.clone(), me.rank, &agent.contact()).unwrap()
}

/// The same with addresses of one kind only.
pub(crate) fn info_over(kind: Kind, agent: &Agent) -> PeerInfo {
    let mut info = info(agent);
    info.addresses.retain(|address| kind.names(address));
    assert_eq!(info.addresses.len(), 1, "an agent has one address of a kind");
    info
}

/// Tells the agents of each other.
pub(crate) fn introduce(agents: &[Agent]) {
    for agent in agents {
        agent.open(agents.iter().map(info).collect()).unwrap();
    }
}

/// Agents that meet over sockets, of whatever kind they choose.
pub(crate) fn socket_group(
    count: u32,
    adjust: impl Fn(&mut AgentConfig),
    functions: impl Fn() -> Functions,
) -> Vec<Agent> {
    let agents = strangers(Kind::Tcp, count, adjust, functions);
    introduce(&agents);
    agents
}

/// Agents that meet in memory.
pub(crate) fn memory_group(
    count: u32,
    adjust: impl Fn(&mut AgentConfig),
    functions: impl Fn() -> Functions,
) -> Vec<Agent> {
    group(Kind::Memory, count, adjust, functions)
}

pub(crate) fn threads(count: usize) -> NonZeroUsize {
    NonZeroUsize::new(count).unwrap()
}

pub(crate) fn request(function: &str, payload: &[u8], timeout: Option<Duration>) -> Request {
    Request {
        function: FunctionRef::Name(function.into()),
        label: function.into(),
        encoding: Encoding::Bytes,
        body: Body::of(payload.to_vec()),
        timeout,
        deadline: None,
        creates: None,
    }
}

pub(crate) fn call(agent: &Agent, to: u32, function: &str, payload: &[u8]) -> Result<RpcFuture> {
    agent.call(rank(to), request(function, payload, Some(SOON)))
}

/// The payload of the answer.
pub(crate) fn answer(future: &RpcFuture) -> Result<Vec<u8>, Error> {
    let done = tensorcall::engine::lend(None, || future.wait_until(Some(deadline(SOON))));
    assert!(done, "no answer in time");
    future.take().unwrap().map(|response| response.body.payload.as_ref().to_vec())
}

/// Waits for something that nobody tells of.
pub(crate) fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let limit = deadline(SOON);
    while !is_so() {
        assert!(now() < limit, "not in time: {what}");
        std::thread::park_timeout(Duration::from_millis(1));
    }
}

/// All of these end well.
pub(crate) fn answer_all(futures: &[RpcFuture]) {
    for future in futures {
        answer(future).unwrap();
    }
}

pub(crate) fn ask(agent: &Agent, to: u32, function: &str, payload: &[u8]) -> Result<Vec<u8>, Error> {
    answer(&call(agent, to, function, payload)?)
}

#[allow(clippy::disallowed_methods, reason = "tests have their own clock")]
pub(crate) fn now() -> Instant {
    Instant::now()
}

pub(crate) fn deadline(after: Duration) -> Instant {
    now() + after
}

/// Runs `run` on a thread; [`finish`] gets its result.
pub(crate) fn thread<R: Send + 'static>(run: impl FnOnce() -> R + Send + 'static) -> Receiver<R> {
    let (send, receive) = std::sync::mpsc::channel();
    std::thread::spawn(move || send.send(run()));
    receive
}

/// The result of a thread, in time.
pub(crate) fn finish<R>(thread: &Receiver<R>) -> R {
    thread.recv_timeout(SOON).unwrap_or_else(|error| panic!("a thread does not end well: {error}"))
}

/// All agents leave together, as graceful shutdown does.
pub(crate) fn leave_together(agents: Vec<Agent>) {
    let leave = |agent: Agent| {
        thread(move || {
            agent.quiesce(true, Some(deadline(SOON))).unwrap();
            agent.close(true, deadline(Duration::from_secs(2)));
        })
    };
    let threads: Vec<_> = agents.into_iter().map(leave).collect();
    threads.iter().for_each(finish);
}

/// A function that gives back what it gets, and fails unless all of it is aligned.
pub(crate) fn mirror(call: InboundCall, responder: Responder) {
    let Received { payload, tensors, buffers, rrefs, autograd } = call.body;
    if let Some(misaligned) = buffers.iter().chain([&payload]).find(|b| !is_aligned(b)) {
        return responder.failed(FailureKind::Internal, format!("{misaligned:?} is not aligned"));
    }
    let buffers = buffers.into_iter().map(Region::from_buffer).collect();
    let payload = payload.as_ref().to_vec();
    responder
        .returned(Encoding::Bytes, Body { payload, tensors, buffers, rrefs, autograd, ..Body::default() });
}

pub(crate) fn is_aligned(buffer: &Buffer) -> bool {
    (buffer.as_ptr() as usize).is_multiple_of(ALIGNMENT)
}

/// Bytes that differ from their neighbours at any distance that matters.
pub(crate) fn pattern(len: usize, seed: u8) -> Vec<u8> {
    let block: Vec<u8> = (0..65_521usize).map(|i| ((i % 251) ^ (i / 251)).to_le_bytes()[0] ^ seed).collect();
    let mut bytes = Vec::with_capacity(len);
    while bytes.len() < len {
        bytes.extend_from_slice(&block[..block.len().min(len - bytes.len())]);
    }
    bytes
}

/// What others know of an agent as long as it is not there: nobody ever listened at its addresses.
pub(crate) fn nobody(number: u32, addresses: Vec<Address>) -> PeerInfo {
    let config = config(number);
    let identity = Identity { name: config.name, rank: config.rank, incarnation: Incarnation::new(7) };
    PeerInfo { identity, addresses, plain: false }
}
