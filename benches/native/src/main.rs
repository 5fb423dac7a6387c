//! Our native calls with default options: authentication, deadlines, functions on pool threads.

use std::env;
use std::future::Future;
use std::io::stdin;
use std::time::Duration;

use anyhow::Result;
use bench_loops::{Callee, Client, LARGEST, Role, Settings, run};
use tensorcall::{Agent, Bytes};

const PLACE: &str = "BENCH_RENDEZVOUS";
const NAMES: [&str; 2] = ["caller", "callee"];
const TO: &str = "callee";

fn text(text: String) -> String {
    text
}

fn give(_: Bytes) {}

fn echo(bytes: Bytes) -> Bytes {
    bytes
}

fn sleep() {
    std::thread::sleep(Duration::from_millis(50));
}

struct Caller {
    agent: Agent,
    source: Bytes,
}

impl Client for Caller {
    fn trivial(&self, text: &str) -> impl Future<Output = ()> + 'static {
        let answer = self.agent.call::<String>(TO, "text", (text,));
        async move { assert!(!answer.await.expect("an answer").is_empty()) }
    }

    fn single(&self, text: &str) -> impl Future<Output = ()> + 'static {
        let answer: String = self.agent.call_blocking(TO, "text", (text,)).expect("an answer");
        async move { assert!(!answer.is_empty()) }
    }

    fn give(&self, bytes: usize) -> impl Future<Output = ()> + 'static {
        let answer = self.agent.call::<()>(TO, "give", (self.source.slice(0..bytes),));
        async move { answer.await.expect("an answer") }
    }

    fn echo(&self, bytes: usize) -> impl Future<Output = ()> + 'static {
        let answer = self.agent.call::<Bytes>(TO, "echo", (self.source.slice(0..bytes),));
        async move { assert!(!answer.await.expect("an answer").is_empty()) }
    }

    fn sleep(&self) -> impl Future<Output = ()> + 'static {
        let answer = self.agent.call::<()>(TO, "sleep", ());
        async move { answer.await.expect("an answer") }
    }
}

fn main() -> Result<()> {
    let settings = Settings::take()?;
    match settings.role {
        Role::Callee => {
            println!("ready");
            let agent = join(1, &env::var(PLACE)?)?;
            println!("joined");
            stdin().lines().for_each(drop);
            drop(agent);
        }
        Role::Caller => {
            let place = env::temp_dir().join(format!("tensorcall-bench-{}", std::process::id()));
            let url = format!("file://{}", place.display());
            let mut callee = Callee::start(&[(PLACE, url.clone())])?;
            let agent = join(0, &url)?;
            callee.hear()?;
            std::fs::remove_file(place)?;
            let caller = Caller { agent, source: Bytes::from_owner(vec![1; LARGEST]) };
            run(&settings, &caller, callee.id(), |work| futures::executor::block_on(work));
        }
    }
    Ok(())
}

fn join(rank: usize, url: &str) -> Result<Agent> {
    let builder = Agent::builder(NAMES[rank]).rendezvous(url).rank(u32::try_from(rank)?).world_size(2);
    let builder = builder.function("text", text).function("give", give).function("echo", echo);
    Ok(builder.function("sleep", sleep).start()?)
}
