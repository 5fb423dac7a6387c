//! Agents for tests: a handler that runs Rust closures, and groups of agents in one process.
#![allow(dead_code, reason = "each test file uses a part")]

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tensorcall::proto::ids::{Rank, WorkerName};
use tensorcall::proto::wire::message::{Encoding, FailureKind, FunctionRef};
use tensorcall::transport::memory::Hub;
use tensorcall::{
    Agent, AgentConfig, Error, Handler, InboundCall, PeerInfo, Request, Responder, Result, RpcFuture, ThreadHook, body::Body,
};

/// No wait of a test is longer.
pub(crate) const SOON: Duration = Duration::from_secs(20);

type Function = Box<dyn Fn(InboundCall, Responder) + Send + Sync>;

/// Runs closures by name.
#[derive(Default)]
pub(crate) struct Functions(HashMap<&'static str, Function>);

impl Functions {
    pub(crate) fn with(mut self, name: &'static str, function: impl Fn(InboundCall, Responder) + Send + Sync + 'static) -> Self {
        self.0.insert(name, Box::new(function));
        self
    }

    /// A function from payload to payload.
    pub(crate) fn plain(self, name: &'static str, function: impl Fn(&[u8]) -> Vec<u8> + Send + Sync + 'static) -> Self {
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
}

pub(crate) fn rank(number: u32) -> Rank {
    Rank::new(number).unwrap()
}

pub(crate) fn config(number: u32) -> AgentConfig {
    let mut config = AgentConfig::new(WorkerName::parse(&format!("worker{number}")).unwrap(), rank(number));
    config.job = "test".to_owned();
    config.secret = b"secret".to_vec();
    config
}

/// Tells the agents of each other.
pub(crate) fn introduce(agents: &[Agent]) {
    let infos = || {
        agents.iter().map(|agent| {
            let me = agent.identity();
            PeerInfo::from_contact(me.name.clone(), me.rank, &agent.contact()).unwrap()
        })
    };
    for agent in agents {
        agent.open(infos().collect()).unwrap();
    }
}

/// Agents that meet over sockets.
pub(crate) fn socket_group(count: u32, adjust: impl Fn(&mut AgentConfig), functions: impl Fn() -> Functions) -> Vec<Agent> {
    let start = |number| {
        let mut config = config(number);
        adjust(&mut config);
        Agent::start(config, Arc::new(functions())).unwrap()
    };
    let agents: Vec<_> = (0..count).map(start).collect();
    introduce(&agents);
    agents
}

/// Agents that meet in memory.
pub(crate) fn memory_group(count: u32, adjust: impl Fn(&mut AgentConfig), functions: impl Fn() -> Functions) -> Vec<Agent> {
    let hub = Hub::new();
    let start = |number| {
        let mut config = config(number);
        adjust(&mut config);
        Agent::start_in_memory(config, Arc::new(functions()), &hub).unwrap()
    };
    let agents: Vec<_> = (0..count).map(start).collect();
    introduce(&agents);
    agents
}

pub(crate) fn threads(count: usize) -> NonZeroUsize {
    NonZeroUsize::new(count).unwrap()
}

pub(crate) fn request(function: &str, payload: &[u8], timeout: Option<Duration>) -> Request {
    Request {
        function: FunctionRef::Name(function.to_owned()),
        label: function.into(),
        encoding: Encoding::Bytes,
        body: Body::of(payload.to_vec()),
        timeout,
    }
}

pub(crate) fn call(agent: &Agent, to: u32, function: &str, payload: &[u8]) -> Result<RpcFuture> {
    agent.call(rank(to), request(function, payload, Some(SOON)))
}

/// The payload of the answer.
pub(crate) fn answer(future: &RpcFuture) -> Result<Vec<u8>, Error> {
    let done = tensorcall::lend(None, || future.wait_until(Some(deadline(SOON))));
    assert!(done, "no answer in time");
    future.take().unwrap().map(|response| response.body.payload.as_ref().to_vec())
}

pub(crate) fn ask(agent: &Agent, to: u32, function: &str, payload: &[u8]) -> Result<Vec<u8>, Error> {
    answer(&call(agent, to, function, payload)?)
}

#[allow(clippy::disallowed_methods, reason = "tests have their own clock")]
pub(crate) fn deadline(after: Duration) -> Instant {
    Instant::now() + after
}

/// All agents leave together, as graceful shutdown does.
pub(crate) fn leave_together(agents: Vec<Agent>) {
    let leave = |agent: Agent| {
        std::thread::spawn(move || {
            agent.quiesce(true, Some(deadline(SOON))).unwrap();
            agent.close(true, deadline(Duration::from_secs(2)));
        })
    };
    let threads: Vec<_> = agents.into_iter().map(leave).collect();
    for thread in threads {
        thread.join().unwrap();
    }
}
