//! How workers become a group, static and dynamic, well and badly.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Duration;

use common::{Functions, SOON, ask, deadline, finish, rank, thread};
use tensorcall::engine::proto::ids::{Rank, WorkerName};
use tensorcall::engine::transport::memory::Hub;
use tensorcall::engine::{
    Agent, AgentConfig, Handler, InboundCall, Joining, Member, Responder, Roster, Start, ThreadHook, join,
};
use tensorcall::rendezvous::Rendezvous;
use tensorcall::store::{MemoryStore, PrefixStore, Store, StoreServer, TcpStore};
use tensorcall::{Error, ErrorKind};

/// A worker's functions, and its roster before them.
struct Worker {
    functions: Functions,
    roster: Arc<Roster>,
}

impl ThreadHook for Worker {
    fn run(&self, body: &mut (dyn FnMut() + Send)) {
        body();
    }
}

impl Handler for Worker {
    fn handle(&self, call: InboundCall, responder: Responder) {
        if let Some((call, responder)) = self.roster.handle(call, responder) {
            self.functions.handle(call, responder);
        }
    }
}

fn config(name: &str) -> AgentConfig {
    AgentConfig::new(WorkerName::parse(name).unwrap(), rank(0))
}

fn join_by(
    rendezvous: &Rendezvous,
    config: AgentConfig,
    timeout: Duration,
    start: Start<'_>,
) -> Result<Member, Error> {
    let roster = Arc::new(Roster::default());
    let functions = Functions::default().plain("echo", <[u8]>::to_vec);
    let handler = Arc::new(Worker { functions, roster: Arc::clone(&roster) });
    join(rendezvous, Joining { config, handler, roster, timeout, start })
}

fn over_sockets(rendezvous: &Rendezvous, config: AgentConfig, timeout: Duration) -> Result<Member, Error> {
    join_by(rendezvous, config, timeout, &Agent::start)
}

fn member_of(store: &Arc<dyn Store>, name: &str, rank: u32, size: Option<u32>) -> Result<Member, Error> {
    let rendezvous = Rendezvous::in_store(Arc::clone(store), rank, size)?;
    over_sockets(&rendezvous, config(name), SOON)
}

fn joins(
    store: &Arc<dyn Store>,
    name: &str,
    rank: u32,
    size: Option<u32>,
) -> Receiver<Result<Member, Error>> {
    let (store, name) = (Arc::clone(store), name.to_owned());
    thread(move || member_of(&store, &name, rank, size))
}

fn memory() -> Arc<dyn Store> {
    Arc::new(MemoryStore::new())
}

fn call(from: &Member, to: &str) -> Result<Vec<u8>, Error> {
    let to = from.roster().rank_of(to).ok_or_else(|| Error::new(ErrorKind::Usage, "nobody has that name"))?;
    ask(from.agent(), to.get().into(), "echo", to.to_string().as_bytes())
}

fn names(member: &Member) -> Vec<String> {
    member.roster().workers().iter().map(|(name, rank)| format!("{name}:{rank}")).collect()
}

#[test]
fn a_static_group_meets_in_a_store_over_tcp_and_all_call_all() {
    let server = StoreServer::listen(([127, 0, 0, 1], 0).into()).unwrap();
    let port = server.address().port();
    let threads: Vec<_> = (0..4)
        .map(|number| {
            thread(move || {
                let store = TcpStore::connect("127.0.0.1", port, SOON).unwrap();
                let rendezvous = Rendezvous::in_store(Arc::new(store), number, Some(4)).unwrap();
                over_sockets(&rendezvous, config(&format!("w{number}")), SOON).unwrap()
            })
        })
        .collect();
    let members: Vec<Member> = threads.iter().map(finish).collect();

    for member in &members {
        assert_eq!(names(member), ["w0:0", "w1:1", "w2:2", "w3:3"]);
        assert!(!member.is_dynamic());
        for to in ["w0", "w1", "w2", "w3"] {
            assert_eq!(call(member, to).unwrap(), &to.as_bytes()[1..]);
        }
    }
}

#[test]
fn many_workers_of_one_process_meet_in_memory() {
    const SIZE: u32 = 50;
    let (store, hub) = (memory(), Hub::new());
    let threads: Vec<_> = (0..SIZE)
        .map(|number| {
            let (store, hub) = (Arc::clone(&store), Arc::clone(&hub));
            thread(move || {
                let rendezvous = Rendezvous::in_store(store, number, Some(SIZE)).unwrap();
                let start = |config, handler| Agent::start_in_memory(config, handler, &hub);
                join_by(&rendezvous, config(&format!("w{number}")), SOON, &start).unwrap()
            })
        })
        .collect();
    let members: Vec<Member> = threads.iter().map(finish).collect();

    assert_eq!(call(&members[0], "w49").unwrap(), b"49");
    assert_eq!(call(&members[49], "w0").unwrap(), b"0");
}

#[test]
fn one_group_after_another_meets_at_one_place() {
    let store = memory();
    let places: Vec<_> = (0..2)
        .map(|rank| Arc::new(Rendezvous::in_store(Arc::clone(&store), rank, Some(2)).unwrap()))
        .collect();

    for life in 0..3 {
        let threads: Vec<_> = places
            .iter()
            .map(|place| {
                let place = Arc::clone(place);
                thread(move || {
                    over_sockets(&place, config(&format!("w{life}-{}", place.rank())), SOON).unwrap()
                })
            })
            .collect();
        let members: Vec<Member> = threads.iter().map(finish).collect();
        assert_eq!(call(&members[1], &format!("w{life}-0")).unwrap(), b"0");
    }
}

#[test]
fn what_is_wrong_with_one_worker_is_told_to_all() {
    let (same, sizes, secrets) = (memory(), memory(), memory());
    let with_secret = |number: u32, secret: &str| {
        let (store, mut config) = (Arc::clone(&secrets), config(&format!("w{number}")));
        config.secret = secret.into();
        thread(move || over_sockets(&Rendezvous::in_store(store, number, Some(2)).unwrap(), config, SOON))
    };
    for (threads, said) in [
        (
            vec![joins(&same, "same", 0, Some(2)), joins(&same, "same", 1, Some(2))],
            "RPC worker name same is not unique. Workers 1 and 0 share the same name.",
        ),
        (
            vec![joins(&sizes, "a", 0, Some(2)), joins(&sizes, "b", 1, Some(3))],
            "rank 0 was given world size 2, rank 1 3",
        ),
        (
            vec![with_secret(0, "one"), with_secret(1, "other")],
            "the workers have different secrets: rank(s) [0] have one, rank(s) [1] have another",
        ),
    ] {
        for thread in &threads {
            let error = finish(thread).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Usage);
            assert!(error.to_string().contains(said), "{error}");
        }
    }
}

#[test]
fn what_no_worker_leaves_in_a_store_is_said_with_its_key() {
    for (key, text) in [("job", "no JSON"), ("worker 0", "[1]"), ("job", r#"{"job": "j", "secret": "odd"}"#)]
    {
        let store = memory();
        let keys = PrefixStore::new("rpc_prefix_0/tensorcall//", Arc::clone(&store));
        keys.set(key, text.as_bytes()).unwrap();

        let error = member_of(&store, "w0", 0, Some(1)).unwrap_err();

        assert!(error.to_string().contains(key.split(' ').next().unwrap()), "{error}");
    }
}

#[test]
fn two_workers_of_one_rank_are_told_so_and_so_are_all_whoever_comes_first() {
    let refused = |thread: &Receiver<Result<Member, Error>>| {
        let error = finish(thread).err().unwrap();
        assert!(error.to_string().starts_with("two workers claim rank 2: "), "{error}");
    };
    let twins = |store| [joins(store, "b", 2, Some(3)), joins(store, "c", 2, Some(3))];
    let (together, late) = (memory(), memory());

    let waits = joins(&together, "a", 0, Some(3));
    twins(&together).iter().for_each(refused);
    refused(&waits);

    twins(&late).iter().for_each(refused);
    refused(&joins(&late, "a", 0, Some(3)));
}

#[test]
fn who_cannot_start_is_told_to_the_others() {
    let store = memory();
    let well = joins(&store, "well", 0, Some(2));
    let mut unwell = config("unwell");
    unwell.listen_interface = Some("nothing0".to_owned());

    let rendezvous = Rendezvous::in_store(Arc::clone(&store), 1, Some(2)).unwrap();
    let own = over_sockets(&rendezvous, unwell, SOON).unwrap_err();
    let other = finish(&well).unwrap_err();

    assert!(own.to_string().contains("nothing0"), "{own}");
    assert_eq!(other.to_string(), format!("worker 'unwell' (rank 1) cannot join: {own}"));
}

/// Waits for the shortest time that workers wait for each other: 5 s.
#[test]
fn who_does_not_come_is_named_to_all_in_bounded_time() {
    let (store, begin) = (memory(), common::now());
    let waits = |name: &'static str, number| {
        let store = Arc::clone(&store);
        thread(move || {
            let rendezvous = Rendezvous::in_store(store, number, Some(4)).unwrap();
            over_sockets(&rendezvous, config(name), Duration::from_millis(1))
        })
    };
    let threads = [waits("a", 0), waits("c", 2)];

    for thread in &threads {
        let error = finish(thread).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout);
        assert_eq!(
            error.to_string(),
            "workers did not come after 5 s: missing rank(s) [1, 3] of world size 4"
        );
    }
    assert!(begin.elapsed() < Duration::from_secs(12));
}

#[test]
fn a_store_that_is_lost_is_said_with_who_lost_it() {
    let server = StoreServer::listen(([127, 0, 0, 1], 0).into()).unwrap();
    let store = TcpStore::connect("127.0.0.1", server.address().port(), SOON).unwrap();
    drop(server);

    let error = member_of(&(Arc::new(store) as Arc<dyn Store>), "w1", 1, Some(2)).unwrap_err();

    assert_eq!(error.kind(), ErrorKind::Io);
    let text = "worker 'w1' (rank 1) lost the store in which the workers meet";
    assert!(error.to_string().starts_with(text), "{error}");
}

#[test]
fn a_dynamic_group_grows_and_shrinks_and_all_call_all() {
    let store = memory();
    let mut members = Vec::new();
    for number in 0..3 {
        members.push(member_of(&store, &format!("w{number}"), number, None).unwrap());
        for (from, to) in (0..=number).flat_map(|from| (0..=number).map(move |to| (from as usize, to))) {
            assert_eq!(call(&members[from], &format!("w{to}")).unwrap(), to.to_string().as_bytes());
        }
    }

    leave(&members[0]);

    assert_eq!(names(&members[2]), ["w1:1", "w2:2"]);
    assert_eq!(call(&members[1], "w0").unwrap_err().kind(), ErrorKind::Usage);
    let again = member_of(&store, "again", 7, None).unwrap();
    assert_eq!(names(&again), ["w1:1", "w2:2", "again:7"]);
    assert_eq!(call(&members[2], "again").unwrap(), b"7");
}

fn leave(member: &Member) {
    member.leave(SOON);
    member.agent().quiesce(true, Some(deadline(SOON))).unwrap();
    member.agent().close(true, deadline(Duration::from_secs(1)));
}

#[test]
fn the_name_or_rank_of_a_live_member_is_refused_and_that_of_one_that_died_is_free() {
    let store = memory();
    let first = member_of(&store, "w0", 0, None).unwrap();
    let second = member_of(&store, "w1", 1, None).unwrap();

    let name = member_of(&store, "w0", 2, None).unwrap_err();
    let number = member_of(&store, "other", 0, None).unwrap_err();
    second.agent().close(false, common::now());
    let again = member_of(&store, "w1", 1, None).unwrap();

    assert_eq!(name.to_string(), "RPC worker name w0 is not unique. Workers 2 and 0 share the same name.");
    assert_eq!(number.to_string(), "two workers claim rank 0: w0 and other");
    assert_eq!(call(&first, "w1").unwrap(), b"1");
    assert_eq!(call(&again, "w0").unwrap(), b"0");
}

#[test]
fn members_that_died_unnoticed_are_struck_off_by_the_next_joiner() {
    let store = memory();
    let members: Vec<_> = (0..2).map(|n| member_of(&store, &format!("w{n}"), n, None).unwrap()).collect();
    members[1].agent().close(false, common::now());

    let third = member_of(&store, "w2", 2, None).unwrap();

    assert_eq!(names(&third), ["w0:0", "w2:2"]);
    let list = PrefixStore::new("rpc_dynamic/tensorcall//", store).get("members").unwrap().unwrap();
    assert!(!String::from_utf8(list).unwrap().contains("\"w1\""));
}

#[test]
fn static_and_dynamic_members_do_not_mix() {
    let store = memory();
    let _member = member_of(&store, "w0", 0, None).unwrap();

    let error = member_of(&store, "w1", 0, Some(1)).unwrap_err();

    assert!(error.to_string().contains("mixes statically and dynamically"), "{error}");
}

#[test]
fn who_stopped_while_joining_is_passed_over_and_who_is_at_it_is_named() {
    let store = memory();
    let turn = PrefixStore::new("rpc_dynamic/tensorcall//", Arc::clone(&store));
    turn.set("turn", b"stuck 0123 7").unwrap();
    let begin = common::now();

    let member = joins(&store, "w0", 0, None);
    let rendezvous = Rendezvous::in_store(Arc::clone(&store), 1, None).unwrap();
    let early = over_sockets(&rendezvous, config("w1"), Duration::from_millis(1)).unwrap_err();
    let member = finish(&member).unwrap();

    assert_eq!(early.kind(), ErrorKind::Timeout);
    assert!(early.to_string().contains("worker 'stuck' is joining or leaving"), "{early}");
    assert!(begin.elapsed() > Duration::from_secs(10), "{:?}", begin.elapsed());
    assert_eq!(call(&member, "w0").unwrap(), b"0");
}

#[test]
fn without_the_store_members_go_on_and_leave() {
    let server = StoreServer::listen(([127, 0, 0, 1], 0).into()).unwrap();
    let connect =
        || Arc::new(TcpStore::connect("127.0.0.1", server.address().port(), SOON).unwrap()) as Arc<dyn Store>;
    let (one, other) = (connect(), connect());
    let members = [member_of(&one, "w0", 0, None).unwrap(), member_of(&other, "w1", 1, None).unwrap()];
    drop((one, other, server));

    assert_eq!(call(&members[0], "w1").unwrap(), b"1");
    leave(&members[0]);

    assert_eq!(names(&members[1]), ["w1:1"]);
    let gone: Vec<Rank> = members[1].agent().gone();
    assert!(gone.is_empty() || gone == [rank(0)]);
}
