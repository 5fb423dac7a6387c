//! tonic (gRPC over HTTP/2), with windows large enough for the largest messages.

use std::future::Future;
use std::io::stdin;
use std::time::Duration;

use anyhow::Result;
use bench_loops::{Callee, Client, LARGEST, Role, Settings, run};
use bytes::Bytes;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Request, Response, Status};

use service::bench_client::BenchClient;
use service::bench_server::{Bench, BenchServer};

#[expect(clippy::all, clippy::pedantic, unused_qualifications, reason = "generated")]
mod service {
    include!(concat!(env!("OUT_DIR"), "/bench.Bench.rs"));
}

const WINDOW: u32 = 16 << 20;
const FRAME: u32 = (1 << 24) - 1;

/// The one message.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Data {
    #[prost(string, tag = "1")]
    text: String,
    #[prost(bytes = "bytes", tag = "2")]
    bytes: Bytes,
}

struct Answers;

#[tonic::async_trait]
impl Bench for Answers {
    async fn text(&self, request: Request<Data>) -> Result<Response<Data>, Status> {
        Ok(Response::new(request.into_inner()))
    }

    async fn give(&self, _: Request<Data>) -> Result<Response<Data>, Status> {
        Ok(Response::new(Data::default()))
    }

    async fn echo(&self, request: Request<Data>) -> Result<Response<Data>, Status> {
        Ok(Response::new(request.into_inner()))
    }

    async fn sleep(&self, _: Request<Data>) -> Result<Response<Data>, Status> {
        let slept = tokio::task::spawn_blocking(|| std::thread::sleep(Duration::from_millis(50)));
        slept.await.map_err(|error| Status::internal(error.to_string()))?;
        Ok(Response::new(Data::default()))
    }
}

struct Caller {
    stub: BenchClient<Channel>,
    source: Bytes,
}

impl Client for Caller {
    fn trivial(&self, text: &str) -> impl Future<Output = ()> + 'static {
        let (mut stub, text) = (self.stub.clone(), text.to_owned());
        async move {
            let answer = stub.text(Data { text, bytes: Bytes::new() }).await.expect("an answer");
            assert!(!answer.into_inner().text.is_empty());
        }
    }

    fn give(&self, bytes: usize) -> impl Future<Output = ()> + 'static {
        let (mut stub, bytes) = (self.stub.clone(), self.source.slice(..bytes));
        async move {
            stub.give(Data { text: String::new(), bytes }).await.expect("an answer");
        }
    }

    fn echo(&self, bytes: usize) -> impl Future<Output = ()> + 'static {
        let (mut stub, bytes) = (self.stub.clone(), self.source.slice(..bytes));
        async move {
            let answer = stub.echo(Data { text: String::new(), bytes }).await.expect("an answer");
            assert!(!answer.into_inner().bytes.is_empty());
        }
    }

    fn sleep(&self) -> impl Future<Output = ()> + 'static {
        let mut stub = self.stub.clone();
        async move {
            stub.sleep(Data::default()).await.expect("an answer");
        }
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
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    println!("{}", listener.local_addr()?);
    let service =
        BenchServer::new(Answers).max_decoding_message_size(usize::MAX).max_encoding_message_size(usize::MAX);
    let server = Server::builder()
        .initial_stream_window_size(WINDOW)
        .initial_connection_window_size(4 * WINDOW)
        .max_frame_size(FRAME)
        .add_service(service);
    Ok(server.serve_with_incoming(TcpIncoming::from(listener).with_nodelay(Some(true))).await?)
}

async fn connect(address: &str) -> Result<Caller> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))?
        .tcp_nodelay(true)
        .initial_stream_window_size(WINDOW)
        .initial_connection_window_size(4 * WINDOW);
    let stub = BenchClient::new(endpoint.connect().await?)
        .max_decoding_message_size(usize::MAX)
        .max_encoding_message_size(usize::MAX);
    Ok(Caller { stub, source: vec![1; LARGEST].into() })
}
