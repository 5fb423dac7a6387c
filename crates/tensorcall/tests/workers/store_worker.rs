//! A Rust process for the tests of stores and joining (`python/tests/integration/test_rust_stores.py`).
//!
//! - `store_worker serve`: hosts a store, says its port, and ends with its standard input
//! - `store_worker suite PORT`: runs all cases of the stores' suite on the server at that port
//! - `store_worker file PATH SIZE`: opens a file store and obeys `set KEY VALUE`, `get KEY`, `add KEY DELTA`
//! - `store_worker join NAME URL RANK [SIZE]`: joins a group, without a size a dynamic one, and says who is there or
//!   why not (`-` is what the launcher says, and `%` in the name the rank); then obeys `call WORKER FUNCTION INT…`, `names`, `again NAME` (once it has left) and `leave`
//!
//! Orders come on the standard input, a line each, and each is answered by a line.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test stops where something is wrong")]

use std::io::{BufRead, Read};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tensorcall::engine::body::Body;
use tensorcall::engine::proto::ids::{Rank, WorkerName};
use tensorcall::engine::proto::wire::message::{Encoding, FailureKind, FunctionRef};
use tensorcall::engine::proto::wire::{Limits, Value};
use tensorcall::engine::{
    Agent, AgentConfig, Gatherings, Handler, InboundCall, Joining, Member, Request, Responder, Roster,
    ThreadHook, join,
};
use tensorcall::rendezvous::Rendezvous;
use tensorcall::store::{FileStore, PrefixStore, Store, StoreServer, TcpStore};
use tensorcall::{Error, Result};

#[path = "../common/store_cases.rs"]
mod store_cases;
use store_cases::{Place, for_each_case};

/// No wait is longer.
const SOON: Duration = Duration::from_secs(20);

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["serve"] => serve(),
        ["suite", port] => suite(port.parse().unwrap()),
        ["file", path, size] => file(&FileStore::open(path, Some(size.parse().unwrap())).unwrap()),
        ["join", name, url, rank] => Worker::new(url, rank, None).obey(name),
        ["join", name, url, rank, size] => Worker::new(url, rank, Some(size)).obey(name),
        _ => panic!("unknown arguments: {arguments:?}"),
    }
}

fn orders() -> impl Iterator<Item = Vec<String>> {
    let lines = std::io::stdin().lock().lines();
    lines.map(|line| line.unwrap().split_whitespace().map(str::to_owned).collect())
}

fn serve() {
    let server = StoreServer::listen(([127, 0, 0, 1], 0).into()).unwrap();
    println!("{}", server.address().port());
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
}

/// The part of a server under the name of a case.
struct Part(&'static str, u16);

impl Place for Part {
    fn open(&self) -> Arc<dyn Store> {
        let store = TcpStore::connect("127.0.0.1", self.1, SOON).unwrap();
        Arc::new(PrefixStore::new(self.0, Arc::new(store)))
    }
}

fn suite(port: u16) {
    macro_rules! run {
        ($($case:ident,)*) => {
            $(
                store_cases::$case(&Part(stringify!($case), port));
                println!("{}", stringify!($case));
            )*
        };
    }
    for_each_case!(run);
}

fn file(store: &FileStore) {
    println!("open");
    for order in orders() {
        let order: Vec<&str> = order.iter().map(String::as_str).collect();
        match order[..] {
            ["set", key, value] => println!("{:?}", store.set(key, value.as_bytes())),
            ["get", key] => {
                println!("{:?}", store.get(key).map(|value| value.map(|v| String::from_utf8(v).unwrap())));
            }
            ["add", key, delta] => println!("{:?}", store.add(key, delta.parse().unwrap())),
            _ => panic!("unknown order: {order:?}"),
        }
    }
}

/// One worker, in one life after another.
struct Worker {
    rendezvous: Rendezvous,
}

/// The functions of a life: `echo` gives back its argument.
#[derive(Default)]
struct Functions {
    roster: Arc<Roster>,
    gatherings: Gatherings,
}

struct Life {
    member: Member,
    functions: Arc<Functions>,
}

impl Worker {
    fn new(url: &str, rank: &str, size: Option<&str>) -> Self {
        // What is not a number is left to the launcher.
        let rank = rank.parse().ok();
        let rendezvous = match size {
            Some(size) => Rendezvous::at(url, rank, size.parse().ok(), SOON),
            None => Rendezvous::at_dynamic(url, rank, SOON),
        };
        match rendezvous {
            Ok(rendezvous) => Self { rendezvous },
            Err(error) => {
                println!("error {error}");
                std::process::exit(0);
            }
        }
    }

    fn obey(&self, name: &str) {
        let mut life = self.join(name);
        for order in orders() {
            let order: Vec<&str> = order.iter().map(String::as_str).collect();
            match (&order[..], &life) {
                (["again", name], None) => life = self.join(name),
                (["call", to, function, arguments @ ..], Some(life)) => {
                    let arguments =
                        arguments.iter().map(|number| Value::Int(number.parse().unwrap())).collect();
                    println!(
                        "{}",
                        life.call(to, function, arguments).unwrap_or_else(|error| format!("error {error}"))
                    );
                }
                (["names"], Some(life)) => println!("{}", life.names()),
                (["leave"], Some(current)) => {
                    let left = current.leave();
                    life = None;
                    println!("{left:?}");
                }
                _ => panic!("unknown order: {order:?}"),
            }
        }
    }

    fn join(&self, name: &str) -> Option<Life> {
        let functions = Arc::new(Functions::default());
        let rank = Rank::new(self.rendezvous.rank()).unwrap();
        let name = WorkerName::parse(&name.replace('%', &rank.to_string())).unwrap();
        let config = AgentConfig { plain: true, ..AgentConfig::new(name, rank) };
        let (handler, roster) = (Arc::clone(&functions), Arc::clone(&functions.roster));
        let joining = Joining { config, handler, roster, timeout: patience(), start: &Agent::start };
        match join(&self.rendezvous, joining) {
            Ok(member) => {
                let life = Life { member, functions };
                println!("{}", life.names());
                Some(life)
            }
            Err(error) => {
                println!("error {error}");
                None
            }
        }
    }
}

/// The limit for calls.
#[allow(clippy::disallowed_methods, reason = "tests")]
fn patience() -> Duration {
    std::env::var("STORE_WORKER_TIMEOUT")
        .map_or(SOON, |seconds| Duration::from_secs_f64(seconds.parse().unwrap()))
}

impl Life {
    fn names(&self) -> String {
        let workers = self.member.roster().workers();
        workers.iter().map(|(name, rank)| format!("{name}:{rank}")).collect::<Vec<_>>().join(" ")
    }

    fn call(&self, to: &str, function: &str, arguments: Vec<Value>) -> Result<String> {
        let to: Rank =
            self.member.roster().rank_of(to).ok_or_else(|| Error::new(KIND, "nobody has that name"))?;
        let payload = Value::Tuple(vec![Value::Tuple(arguments), Value::Map(Vec::new())]);
        let request = Request {
            function: FunctionRef::Name(function.into()),
            label: function.into(),
            encoding: Encoding::Value,
            body: Body::of(payload.encode(&Limits::default()).unwrap()),
            timeout: Some(SOON),
            deadline: None,
            creates: None,
        };
        let future = self.member.agent().call(to, request)?;
        assert!(future.wait_until(Some(soon())));
        let response = future.take().unwrap()?;
        let value = Value::decode(response.body.payload.as_ref(), &Limits::default());
        Ok(format!("{value:?}"))
    }

    /// As graceful shutdown does.
    fn leave(&self) -> Result<()> {
        let agent = self.member.agent();
        if self.member.is_dynamic() {
            self.member.leave(SOON);
        } else {
            let names = self.member.roster().workers().into_iter().map(|(name, _)| name).collect();
            self.functions.gatherings.gather(agent, &names, Value::Nil, Some(SOON))?;
        }
        agent.quiesce(true, Some(soon()))?;
        agent.close(true, soon());
        Ok(())
    }
}

const KIND: tensorcall::ErrorKind = tensorcall::ErrorKind::Usage;

#[allow(clippy::disallowed_methods, reason = "tests have their own clock")]
fn soon() -> Instant {
    Instant::now() + SOON
}

impl ThreadHook for Functions {
    fn run(&self, body: &mut (dyn FnMut() + Send)) {
        body();
    }
}

impl Handler for Functions {
    fn handle(&self, call: InboundCall, responder: Responder) {
        let Some((call, responder)) = self.roster.handle(call, responder) else { return };
        let Some((call, responder)) = self.gatherings.handle(call, responder) else { return };
        let arguments = Value::decode(call.body.payload.as_ref(), &Limits::default());
        match (call.function.as_deref(), arguments) {
            (Some("echo"), Ok(Value::Tuple(parts))) => {
                let [Value::Tuple(arguments), _] = &parts[..] else { panic!("no arguments: {parts:?}") };
                let result = arguments[0].encode(&Limits::default()).unwrap();
                responder.returned(Encoding::Value, Body::of(result));
            }
            (function, _) => responder.failed(FailureKind::Usage, format!("no function {function:?}")),
        }
    }
}
