//! tarpc over TCP, with bincode and its own defaults but for the size of messages.

use std::future::Future;
use std::io::stdin;
use std::time::{Duration, Instant};

use anyhow::Result;
use bench_loops::{Callee, Client, LARGEST, Role, Settings, run};
use futures::StreamExt;
use serde_bytes::ByteBuf;
use tarpc::serde_transport::tcp;
use tarpc::server::{BaseChannel, Channel};
use tarpc::tokio_serde::formats::Bincode;
use tarpc::{client, context};
use tokio::runtime::Runtime;

#[tarpc::service]
trait Bench {
    async fn text(text: String) -> String;
    async fn give(bytes: ByteBuf);
    async fn echo(bytes: ByteBuf) -> ByteBuf;
    async fn sleep();
}

#[derive(Clone)]
struct Server;

impl Bench for Server {
    async fn text(self, _: context::Context, text: String) -> String {
        text
    }

    async fn give(self, _: context::Context, _bytes: ByteBuf) {}

    async fn echo(self, _: context::Context, bytes: ByteBuf) -> ByteBuf {
        bytes
    }

    async fn sleep(self, _: context::Context) {
        let slept = tokio::task::spawn_blocking(|| std::thread::sleep(Duration::from_millis(50)));
        slept.await.expect("the thread sleeps");
    }
}

struct Caller {
    stub: BenchClient,
    source: Vec<u8>,
}

fn context() -> context::Context {
    let mut context = context::current();
    context.deadline = Instant::now() + Duration::from_secs(60);
    context
}

impl Client for Caller {
    fn trivial(&self, text: &str) -> impl Future<Output = ()> + 'static {
        let (stub, text) = (self.stub.clone(), text.to_owned());
        async move { assert!(!stub.text(context(), text).await.expect("an answer").is_empty()) }
    }

    /// tarpc wants to own what it sends: who keeps the bytes pays for a copy.
    fn give(&self, bytes: usize) -> impl Future<Output = ()> + 'static {
        let (stub, bytes) = (self.stub.clone(), ByteBuf::from(&self.source[..bytes]));
        async move { stub.give(context(), bytes).await.expect("an answer") }
    }

    fn echo(&self, bytes: usize) -> impl Future<Output = ()> + 'static {
        let (stub, bytes) = (self.stub.clone(), ByteBuf::from(&self.source[..bytes]));
        async move { assert!(!stub.echo(context(), bytes).await.expect("an answer").is_empty()) }
    }

    fn sleep(&self) -> impl Future<Output = ()> + 'static {
        let stub = self.stub.clone();
        async move { stub.sleep(context()).await.expect("an answer") }
    }
}

fn main() -> Result<()> {
    let settings = Settings::take()?;
    let runtime = Runtime::new()?;
    match settings.role {
        Role::Callee => {
            runtime.spawn(serve());
            stdin().lines().for_each(drop);
        }
        Role::Caller => {
            let callee = Callee::start(&[])?;
            let caller = runtime.block_on(connect(&callee.greeting))?;
            run(&settings, &caller, callee.id(), |work| runtime.block_on(work));
        }
    }
    runtime.shutdown_background();
    Ok(())
}

async fn serve() -> Result<()> {
    let mut listener = tcp::listen("127.0.0.1:0", Bincode::default).await?;
    listener.config_mut().max_frame_length(usize::MAX);
    println!("{}", listener.local_addr());
    while let Some(transport) = listener.next().await {
        let transport = transport?;
        transport.get_ref().set_nodelay(true)?;
        let answers = BaseChannel::with_defaults(transport).execute(Server.serve());
        tokio::spawn(answers.for_each(|answer| async { drop(tokio::spawn(answer)) }));
    }
    Ok(())
}

async fn connect(address: &str) -> Result<Caller> {
    let mut connection = tcp::connect(address, Bincode::default);
    connection.config_mut().max_frame_length(usize::MAX);
    let transport = connection.await?;
    transport.get_ref().set_nodelay(true)?;
    let stub = BenchClient::new(client::Config::default(), transport).spawn();
    Ok(Caller { stub, source: vec![1; LARGEST] })
}
