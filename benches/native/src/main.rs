//! Our native calls with default options: authentication, deadlines, functions on pool threads.

use std::env;
use std::future::Future;
use std::io::stdin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use bench_loops::{Callee, Client, LARGEST, Role, Settings, run};
use tensorcall::engine::body::Body;
use tensorcall::engine::proto::ids::{Rank, WorkerName};
use tensorcall::engine::proto::wire::message::{Encoding, FailureKind, FunctionRef};
use tensorcall::engine::{
    Agent, AgentConfig, Handler, InboundCall, PeerInfo, Request, Responder, RpcFuture, ThreadHook, lend,
};

const SECRET: &str = "BENCH_SECRET";
const NAMES: [&str; 2] = ["caller", "callee"];
const TIMEOUT: Duration = Duration::from_secs(60);

struct Functions;

impl ThreadHook for Functions {
    fn run(&self, body: &mut (dyn FnMut() + Send)) {
        body();
    }
}

impl Handler for Functions {
    fn handle(&self, call: InboundCall, responder: Responder) {
        let result = match call.function.as_deref() {
            Some("text" | "echo") => call.body.payload.as_ref().to_vec(),
            Some("give") => Vec::new(),
            Some("sleep") => {
                std::thread::sleep(Duration::from_millis(50));
                Vec::new()
            }
            other => return responder.failed(FailureKind::Usage, format!("no function {other:?}")),
        };
        responder.returned(Encoding::Bytes, Body::of(result));
    }
}

struct Caller {
    agent: Agent,
    callee: Rank,
    source: Vec<u8>,
}

impl Caller {
    fn call(&self, function: &'static str, payload: &[u8]) -> RpcFuture {
        let request = Request {
            function: FunctionRef::Name(function.to_owned()),
            label: function.into(),
            encoding: Encoding::Bytes,
            body: Body::of(payload.to_vec()),
            timeout: Some(TIMEOUT),
            deadline: None,
            creates: None,
        };
        self.agent.call(self.callee, request).expect("a call")
    }
}

impl Client for Caller {
    fn trivial(&self, text: &str) -> impl Future<Output = ()> + 'static {
        let answer = self.call("text", text.as_bytes());
        async move { assert_ne!(answer.await.expect("an answer").body.payload.len(), 0) }
    }

    fn single(&self, text: &str) -> impl Future<Output = ()> + 'static {
        let answer = self.call("text", text.as_bytes());
        async move {
            assert!(lend(None, || answer.wait_until(Some(Instant::now() + TIMEOUT))));
            answer.take().expect("an outcome").expect("an answer");
        }
    }

    fn give(&self, bytes: usize) -> impl Future<Output = ()> + 'static {
        let answer = self.call("give", &self.source[..bytes]);
        async move { drop(answer.await.expect("an answer")) }
    }

    fn echo(&self, bytes: usize) -> impl Future<Output = ()> + 'static {
        let answer = self.call("echo", &self.source[..bytes]);
        async move { assert_ne!(answer.await.expect("an answer").body.payload.len(), 0) }
    }

    fn sleep(&self) -> impl Future<Output = ()> + 'static {
        let answer = self.call("sleep", &[]);
        async move { drop(answer.await.expect("an answer")) }
    }
}

fn main() -> Result<()> {
    let settings = Settings::take()?;
    match settings.role {
        Role::Callee => {
            let agent = start(1, env::var(SECRET)?)?;
            println!("{}", agent.contact());
            let contact = stdin().lines().next().context("no word from the caller")??;
            meet(&agent, [&contact, &agent.contact()])?;
            stdin().lines().for_each(drop);
        }
        Role::Caller => {
            let secret = format!("{:?}", (Instant::now(), std::process::id()));
            let agent = start(0, secret.clone())?;
            let mut callee = Callee::start(&[(SECRET, secret)])?;
            meet(&agent, [&agent.contact(), &callee.greeting])?;
            callee.tell(&agent.contact())?;
            let caller = Caller { agent, callee: rank(1)?, source: vec![1; LARGEST] };
            run(&settings, &caller, callee.id(), |work| futures::executor::block_on(work));
        }
    }
    Ok(())
}

fn start(number: usize, secret: String) -> Result<Agent> {
    let mut config = AgentConfig::new(WorkerName::parse(NAMES[number])?, rank(number)?);
    config.job = "bench".to_owned();
    config.secret = secret.into_bytes();
    Ok(Agent::start(config, Arc::new(Functions))?)
}

fn meet(agent: &Agent, contacts: [&str; 2]) -> Result<()> {
    let infos = (0..2).map(|number| {
        Ok(PeerInfo::from_contact(WorkerName::parse(NAMES[number])?, rank(number)?, contacts[number])?)
    });
    Ok(agent.open(infos.collect::<Result<_>>()?)?)
}

fn rank(number: usize) -> Result<Rank> {
    Rank::new(u32::try_from(number)?).context("no such rank")
}
