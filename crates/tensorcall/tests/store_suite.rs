//! What every store does, run over each of them; and what becomes of stores that are lost or lied to.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;
#[path = "common/store_cases.rs"]
mod store_cases;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use common::{SOON, finish, thread};
use store_cases::{Place, for_each_case};
use tensorcall::engine::proto::wire::store::{MAGIC, Request};
use tensorcall::store::{FileStore, MemoryStore, PrefixStore, Store, StoreError, StoreServer, TcpStore};

struct InMemory(Arc<MemoryStore>);

impl Place for InMemory {
    fn open(&self) -> Arc<dyn Store> {
        Arc::clone(&self.0) as Arc<dyn Store>
    }
}

struct InFile(PathBuf);

impl InFile {
    fn new() -> Self {
        Self(scratch_file())
    }
}

impl Place for InFile {
    fn open(&self) -> Arc<dyn Store> {
        Arc::new(FileStore::open(&self.0, None).unwrap())
    }
}

impl Drop for InFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

struct OverTcp(SocketAddr, Option<StoreServer>);

impl OverTcp {
    fn new() -> Self {
        let server = StoreServer::listen(any_port()).unwrap();
        Self(server.address(), Some(server))
    }
}

impl Place for OverTcp {
    fn open(&self) -> Arc<dyn Store> {
        let host = self.0.ip().to_string();
        Arc::new(TcpStore::connect(&host, self.0.port(), SOON).unwrap())
    }
}

/// The part of a store under a prefix.
struct Prefixed<P>(P);

impl<P: Place> Place for Prefixed<P> {
    fn open(&self) -> Arc<dyn Store> {
        Arc::new(PrefixStore::new("some/prefix", self.0.open()))
    }
}

fn any_port() -> SocketAddr {
    ([127, 0, 0, 1], 0).into()
}

fn scratch_file() -> PathBuf {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    std::env::temp_dir().join(format!("tensorcall-store-{}-{number}", std::process::id()))
}

macro_rules! over_all_stores {
    ($($case:ident,)*) => {
        mod memory { use super::*; $(#[test] fn $case() { store_cases::$case(&InMemory(Arc::default())); })* }
        mod file { use super::*; $(#[test] fn $case() { store_cases::$case(&InFile::new()); })* }
        mod tcp { use super::*; $(#[test] fn $case() { store_cases::$case(&OverTcp::new()); })* }
        mod prefix { use super::*; $(#[test] fn $case() { store_cases::$case(&Prefixed(OverTcp::new())); })* }
    };
}
for_each_case!(over_all_stores);

#[test]
fn the_last_participant_removes_the_file() {
    let path = scratch_file();
    let first = FileStore::open(&path, Some(2)).unwrap();
    drop(FileStore::open(&path, Some(2)).unwrap());
    assert!(path.exists());

    drop(first);

    assert!(!path.exists());
}

#[test]
fn what_a_writer_that_died_left_behind_is_no_record() {
    let path = scratch_file();
    let store = FileStore::open(&path, Some(1)).unwrap();
    store.set("k", b"v").unwrap();
    let mut file = std::fs::OpenOptions::new().append(true).open(&path).unwrap();
    file.write_all(b"\x02\0\0\0/k\xff\0\0\0half of").unwrap();

    assert_eq!(store.get("k"), Ok(Some(b"v".to_vec())));
    store.set("l", b"w").unwrap();

    let other = FileStore::open(&path, None).unwrap();
    assert_eq!(other.multi_get(&["k", "l"]), Ok(vec![b"v".to_vec(), b"w".to_vec()]));
}

#[test]
fn a_file_that_is_none_of_a_store_is_an_error_that_names_it() {
    let path = std::env::temp_dir().join("no such folder").join("file");

    let error = FileStore::open(&path, None).unwrap_err();

    assert!(error.to_string().contains("no such folder"), "{error}");
}

#[test]
fn a_server_that_comes_late_is_waited_for() {
    let probe = TcpListener::bind(any_port()).unwrap();
    let address = probe.local_addr().unwrap();
    drop(probe);
    let client = thread(move || TcpStore::connect("127.0.0.1", address.port(), SOON).map(drop));
    assert!(client.recv_timeout(Duration::from_millis(50)).is_err());

    let _server = StoreServer::listen(address).unwrap();

    assert_eq!(finish(&client), Ok(()));
}

#[test]
fn nobody_or_somebody_else_at_the_address_is_an_error_in_time() {
    let silent = TcpListener::bind(any_port()).unwrap();
    let port = silent.local_addr().unwrap().port();
    let wrong = TcpListener::bind(any_port()).unwrap();
    let wrong_port = wrong.local_addr().unwrap().port();
    let talker = thread(move || wrong.accept().unwrap().0.write_all(b"220 mail.example.org ready").unwrap());
    let nobody = {
        let probe = TcpListener::bind(any_port()).unwrap();
        probe.local_addr().unwrap().port()
    };
    let briefly = Duration::from_millis(200);

    for (host, port, patience, why) in [
        ("127.0.0.1", port, briefly, "does not answer as a store does"),
        ("127.0.0.1", wrong_port, SOON, "does not speak as a store does"),
        ("127.0.0.1", nobody, briefly, "refused"),
        ("no.such.host.invalid", 1, briefly, "no.such.host.invalid"),
    ] {
        let error = TcpStore::connect(host, port, patience).unwrap_err();
        assert!(matches!(error, StoreError::Unreachable { .. }), "{error}");
        assert!(error.to_string().contains(why) && error.to_string().contains(&port.to_string()), "{error}");
    }
    finish(&talker);
}

#[test]
fn a_store_whose_server_is_gone_is_lost_for_all_at_once() {
    let mut place = OverTcp::new();
    let (waiting, store) = (place.open(), place.open());
    store.set("k", b"v").unwrap();
    let waits = thread(move || waiting.wait(&["never"], None));

    place.1 = None;

    assert!(matches!(finish(&waits), Err(StoreError::Lost { .. })));
    assert!(matches!(store.get("k"), Err(StoreError::Lost { .. })));
    assert!(matches!(store.set("k", b""), Err(StoreError::Lost { .. })));
}

#[test]
fn what_is_too_long_is_said_before_it_is_sent() {
    let store = OverTcp::new().open();

    for error in [store.set("k", &vec![0; (8 << 20) + 1]), store.append(&"k".repeat(9000), b"")] {
        assert!(matches!(error, Err(StoreError::TooLong { .. })), "{error:?}");
    }
}

#[test]
fn stores_are_reached_over_ipv6() {
    let server = match StoreServer::listen("[::1]:0".parse().unwrap()) {
        Ok(server) => server,
        Err(error) => return eprintln!("no IPv6 here: {error}"),
    };

    let store = TcpStore::connect("::1", server.address().port(), SOON).unwrap();

    assert_eq!(store.add("n", 1), Ok(1));
}

#[test]
fn two_servers_cannot_have_one_port() {
    let place = OverTcp::new();

    let error = StoreServer::listen(place.0).unwrap_err();

    assert!(error.to_string().contains(&place.0.to_string()), "{error}");
}

/// A connection that says what it likes.
fn stranger(place: &OverTcp) -> TcpStream {
    let stream = TcpStream::connect(place.0).unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    stream
}

fn hello() -> Vec<u8> {
    let mut bytes = Vec::new();
    Request::Validate(MAGIC).encode(&mut bytes);
    bytes
}

fn is_closed(stream: &mut TcpStream) -> bool {
    match stream.read(&mut [0; 64]) {
        Ok(count) => count == 0,
        Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
    }
}

#[test]
fn who_sends_what_no_client_sends_is_closed_and_harms_nobody() {
    let place = OverTcp::new();
    let store = place.open();
    store.set("word", b"word").unwrap();
    let after_hello = |bytes: &[u8]| [&hello(), bytes].concat();
    let mut add = Vec::new();
    Request::Add(b"/word".to_vec(), 1).encode(&mut add);

    for bytes in [
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        b"\0\0\0\0\0".to_vec(),
        after_hello(&hello()),
        after_hello(&[19]),
        after_hello(&[&[3][..], &[0xff; 8]].concat()),
        after_hello(&[&[6][..], &[0xff; 8]].concat()),
        after_hello(&add),
        vec![13, 1, 2, 3, 4],
    ] {
        let mut stream = stranger(&place);
        stream.write_all(&bytes).unwrap();
        assert!(is_closed(&mut stream), "{bytes:?}");
    }

    assert_eq!(store.get("word"), Ok(Some(b"word".to_vec())));
}

#[test]
fn who_does_not_read_its_replies_is_not_read_from_and_gets_all_of_them_later() {
    let place = OverTcp::new();
    let store = place.open();
    store.set("k", &vec![7; 1 << 20]).unwrap();
    let mut get = Vec::new();
    Request::Get(b"/k".to_vec()).encode(&mut get);
    let count = 200;
    let requests = [hello(), get.repeat(count)].concat();
    let mut stream = stranger(&place);
    stream.write_all(&requests).unwrap();

    // The server serves others meanwhile.
    for _ in 0..20 {
        assert_eq!(store.check(&["k"]), Ok(true));
    }
    let mut reply = vec![0; 8 + (1 << 20)];
    for _ in 0..count {
        stream.read_exact(&mut reply).unwrap();
        assert!(reply[..8] == (1u64 << 20).to_le_bytes() && reply[8..].iter().all(|byte| *byte == 7));
    }
}

#[test]
fn bytes_that_come_one_by_one_are_understood() {
    let place = OverTcp::new();
    let mut stream = stranger(&place);
    stream.set_nodelay(true).unwrap();
    let mut bytes = hello();
    Request::Set(b"/slow".to_vec(), b"but sure".to_vec()).encode(&mut bytes);
    Request::Ping(5).encode(&mut bytes);

    for byte in bytes {
        stream.write_all(&[byte]).unwrap();
    }

    let mut pong = [0; 4];
    stream.read_exact(&mut pong).unwrap();
    assert_eq!(pong, 5u32.to_le_bytes());
    assert_eq!(place.open().get("slow"), Ok(Some(b"but sure".to_vec())));
}
