//! What every store does, run over each of them; and what becomes of stores that are lost or lied to.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use common::{SOON, deadline, finish, now, thread};
use tensorcall::engine::proto::wire::store::{MAGIC, Request};
use tensorcall::store::{FileStore, MemoryStore, PrefixStore, Store, StoreError, StoreServer, TcpStore};

/// Stores that several workers have opened at one place.
trait Place {
    fn open(&self) -> Arc<dyn Store>;
}

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

fn values_are_seen_by_all(place: &dyn Place) {
    let (one, other) = (place.open(), place.open());

    assert_eq!(other.get("k"), Ok(None));
    one.set("k", b"v").unwrap();
    assert_eq!(other.get("k"), Ok(Some(b"v".to_vec())));
    other.set("k", b"").unwrap();
    assert_eq!(one.get("k"), Ok(Some(Vec::new())));
    let bytes: Vec<u8> = (0..=255).cycle().take(3 << 20).collect();
    one.set("with spaces, ü and /", &bytes).unwrap();
    assert_eq!(other.get("with spaces, ü and /"), Ok(Some(bytes)));
}

fn a_value_is_swapped_for_the_expected_one_only(place: &dyn Place) {
    let store = place.open();
    let swap = |expected: &str, desired: &str| {
        String::from_utf8(store.compare_set("k", expected.as_bytes(), desired.as_bytes()).unwrap()).unwrap()
    };

    assert_eq!(swap("x", "y"), "x");
    assert_eq!(store.check(&["k"]), Ok(false));
    assert_eq!(swap("", "y"), "y");
    assert_eq!(swap("", "z"), "y");
    assert_eq!(swap("y", "z"), "z");
    assert_eq!(store.get("k"), Ok(Some(b"z".to_vec())));
}

fn one_of_many_wins_a_swap(place: &dyn Place) {
    let swap = |number: u32| {
        let store = place.open();
        thread(move || {
            store.compare_set("k", b"", number.to_string().as_bytes()).unwrap()
                == number.to_string().as_bytes()
        })
    };

    let threads: Vec<_> = (1..=8).map(swap).collect();

    assert_eq!(threads.iter().map(finish).filter(|won| *won).count(), 1);
}

fn sums_add_up_and_are_text(place: &dyn Place) {
    let add = || {
        let store = place.open();
        thread(move || (0..25).for_each(|_| assert!(store.add("n", 2).is_ok())))
    };
    let threads: Vec<_> = (0..4).map(|_| add()).collect();
    threads.iter().for_each(finish);

    let store = place.open();
    assert_eq!(store.get("n"), Ok(Some(b"200".to_vec())));
    assert_eq!(store.add("n", -300), Ok(-100));
    store.set("word", b"word").unwrap();
    // A server can only hang up; the others say why.
    let error = store.add("word", 1).unwrap_err();
    assert!(matches!(error, StoreError::NotANumber { .. } | StoreError::Lost { .. }), "{error}");
    assert_eq!(place.open().get("word"), Ok(Some(b"word".to_vec())));
}

fn bytes_are_added_to_the_end(place: &dyn Place) {
    let store = place.open();

    store.append("k", b"one").unwrap();
    store.append("k", b"two").unwrap();

    assert_eq!(store.get("k"), Ok(Some(b"onetwo".to_vec())));
}

fn keys_are_there_until_they_are_removed(place: &dyn Place) {
    let (one, other) = (place.open(), place.open());
    one.set("a", b"1").unwrap();
    one.set("b", b"2").unwrap();

    assert_eq!(other.check(&["a", "b"]), Ok(true));
    assert_eq!(other.check(&[]), Ok(true));
    assert_eq!(other.multi_get(&["b", "none", "a"]), Ok(vec![b"2".to_vec(), vec![], b"1".to_vec()]));
    assert_eq!(one.delete("a"), Ok(true));
    assert_eq!(one.delete("a"), Ok(false));
    assert_eq!(other.check(&["a", "b"]), Ok(false));
    one.set("a", b"again").unwrap();
    assert_eq!(other.get("a"), Ok(Some(b"again".to_vec())));
}

fn who_waits_goes_on_when_all_keys_are_there(place: &dyn Place) {
    let (waiting, store) = (place.open(), place.open());
    let waits = thread(move || waiting.wait(&["a", "b"], Some(deadline(SOON))));
    store.set("a", b"").unwrap();
    assert!(waits.try_recv().is_err());

    store.add("b", 1).unwrap();

    assert_eq!(finish(&waits), Ok(()));
    assert_eq!(store.wait(&["b", "a"], None), Ok(()));
    assert_eq!(store.wait(&[], Some(now())), Ok(()));
}

fn who_waits_in_vain_is_told_so_and_goes_on(place: &dyn Place) {
    let store = place.open();
    store.set("a", b"here").unwrap();
    let begin = now();

    let error = store.wait(&["a", "b"], Some(deadline(Duration::from_millis(50)))).unwrap_err();

    assert!(matches!(error, StoreError::Timeout { .. }));
    assert!(error.to_string().contains('b'), "{error}");
    assert!(begin.elapsed() >= Duration::from_millis(50) && begin.elapsed() < SOON);
    assert_eq!(store.get("a"), Ok(Some(b"here".to_vec())));
    store.set("b", b"").unwrap();
    assert_eq!(store.wait(&["a", "b"], Some(now())), Ok(()));
}

fn threads_may_share_one_store(place: &dyn Place) {
    let store = place.open();
    let waits = thread({
        let store = Arc::clone(&store);
        move || store.wait(&["last"], Some(deadline(SOON)))
    });
    let adds: Vec<_> = (0..4)
        .map(|_| {
            let store = Arc::clone(&store);
            thread(move || (0..20).for_each(|_| assert!(store.add("n", 1).is_ok())))
        })
        .collect();
    adds.iter().for_each(finish);

    store.set("last", b"").unwrap();

    assert_eq!(finish(&waits), Ok(()));
    assert_eq!(store.get("n"), Ok(Some(b"80".to_vec())));
}

macro_rules! suite {
    ($($test:ident),* $(,)?) => {
        mod memory { use super::*; $(#[test] fn $test() { super::$test(&InMemory(Arc::default())); })* }
        mod file { use super::*; $(#[test] fn $test() { super::$test(&InFile::new()); })* }
        mod tcp { use super::*; $(#[test] fn $test() { super::$test(&OverTcp::new()); })* }
        mod prefix { use super::*; $(#[test] fn $test() { super::$test(&Prefixed(OverTcp::new())); })* }

        /// All of it in one place, that the environment names: PyTorch's server, for its tests.
        #[test]
        #[ignore = "needs a server: its port in TENSORCALL_TEST_STORE"]
        #[allow(clippy::disallowed_methods, reason = "tests")]
        fn on_the_server_of_the_environment() {
            let port = std::env::var("TENSORCALL_TEST_STORE").unwrap().parse().unwrap();
            $({
                println!(stringify!($test));
                let fresh = OverTcp(([127, 0, 0, 1], port).into(), None);
                struct Part(OverTcp);
                impl Place for Part {
                    fn open(&self) -> Arc<dyn Store> {
                        Arc::new(PrefixStore::new(stringify!($test), self.0.open()))
                    }
                }
                super::$test(&Part(fresh));
            })*
        }
    };
}

mod suite {
    use super::*;

    suite!(
        values_are_seen_by_all,
        a_value_is_swapped_for_the_expected_one_only,
        one_of_many_wins_a_swap,
        sums_add_up_and_are_text,
        bytes_are_added_to_the_end,
        keys_are_there_until_they_are_removed,
        who_waits_goes_on_when_all_keys_are_there,
        who_waits_in_vain_is_told_so_and_goes_on,
        threads_may_share_one_store,
    );
}

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
    let patience = Duration::from_millis(200);

    for (host, port, why) in [
        ("127.0.0.1", port, "does not answer as a store does"),
        ("127.0.0.1", wrong_port, "does not speak as a store does"),
        ("127.0.0.1", nobody, "refused"),
        ("no.such.host.invalid", 1, "no.such.host.invalid"),
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
