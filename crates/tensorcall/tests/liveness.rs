//! Who is alive and who is lost: by signs of life, not by how long something takes.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use common::gate::Gate;
use common::proxy::Proxy;
use common::raw::{Listener, Wire, identity};
use common::{
    Functions, Kind, SOON, answer, answer_all, ask, call, deadline, finish, group, info, info_over,
    leave_together, now, rank, request, strangers, thread,
};
use tensorcall::engine::proto::wire::frame::{FrameHeader, FrameKind};
use tensorcall::engine::transport::Address;
use tensorcall::engine::{Agent, AgentConfig, ErrorKind, PeerInfo, promise};

fn echo() -> Functions {
    Functions::default().plain("echo", <[u8]>::to_vec)
}

/// One agent, a worker1 that the test plays, and worker1's end of the first connection.
fn played_peer(kind: Kind, adjust: impl Fn(&mut AgentConfig)) -> (Agent, Wire) {
    let agent = strangers(kind, 1, adjust, echo).remove(0);
    let mine = info(&agent);
    let (listener, address) = Listener::new(kind, &mine);
    let peer = PeerInfo { identity: identity(1), addresses: vec![address], plain: false };
    agent.open(vec![mine, peer]).unwrap();
    let accepting = thread(move || {
        let mut wire = listener.accept();
        wire.welcome(identity(1)).unwrap();
        wire
    });
    // Opens the connection; nobody answers.
    drop(agent.call(rank(1), request("echo", b"", Some(Duration::from_millis(1)))));
    (agent, finish(&accepting))
}

fn impatient(config: &mut AgentConfig) {
    config.silence_limit = Duration::from_secs(2);
    config.keepalive = Duration::from_millis(200);
}

#[test]
fn a_peer_that_gives_no_sign_of_life_is_lost_within_the_limit() {
    for kind in Kind::SOCKETS {
        let (agent, wire) = played_peer(kind, impatient);
        let start = now();

        let error = answer(&call(&agent, 1, "echo", b"").unwrap()).unwrap_err();

        let took = start.elapsed();
        assert_eq!(error.kind(), ErrorKind::PeerLost);
        assert!(error.to_string().contains("no sign of life for 2 s"), "{error}");
        assert!((Duration::from_millis(1500)..Duration::from_secs(6)).contains(&took), "{took:?}");
        assert!(ask(&agent, 0, "echo", b"others are unharmed").is_ok());
        drop(wire);
    }
}

/// LOG row 14.
#[test]
fn a_peer_that_answers_pings_is_alive_however_long_it_takes() {
    let (agent, mut wire) = played_peer(Kind::Tcp, |config| {
        config.silence_limit = Duration::from_millis(600);
        config.keepalive = Duration::from_millis(50);
    });
    let future = agent.call(rank(1), request("echo", b"", Some(Duration::from_secs(2)))).unwrap();
    let answering = thread(move || {
        let mut pings = 0;
        while let Ok(frame) = wire.next_frame() {
            if frame.kind == FrameKind::Ping {
                pings += 1;
                wire.write_all(&FrameHeader::pong(frame.stream).encode()).unwrap();
            }
        }
        pings
    });

    let error = answer(&future).unwrap_err();

    assert_eq!(error.kind(), ErrorKind::Timeout);
    assert!(agent.gone().is_empty());
    drop(agent);
    assert!(finish(&answering) > 3);
}

/// LOG row 20.
#[test]
fn a_worker_that_computes_for_long_is_alive() {
    let computing = || {
        echo().plain("compute", |_| {
            let (_kept, never) = promise();
            never.wait_until(Some(deadline(Duration::from_millis(1500))));
            Vec::new()
        })
    };
    let adjust = |config: &mut AgentConfig| {
        config.silence_limit = Duration::from_millis(500);
        config.keepalive = Duration::from_millis(50);
    };
    for kind in Kind::SOCKETS {
        let agents = group(kind, 2, adjust, computing);

        assert!(ask(&agents[0], 1, "compute", b"").is_ok());

        leave_together(agents);
    }
}

/// While bulk goes one way a ping of the other side still gets its answer.
/// LOG row 22.
#[test]
fn a_worker_that_only_receives_for_long_is_alive() {
    let adjust = |config: &mut AgentConfig| {
        config.silence_limit = Duration::from_secs(2);
        config.keepalive = Duration::from_millis(10);
    };
    for kind in Kind::SOCKETS {
        let agents = group(kind, 2, adjust, || echo().plain("drop", |_| Vec::new()));
        let bulk = vec![0; 32 << 20];

        let many: Vec<_> = (0..8).map(|_| call(&agents[0], 1, "drop", &bulk).unwrap()).collect();

        answer_all(&many);
        leave_together(agents);
    }
}

/// Worker `from` reaches the other one through a proxy, that one reaches it directly.
fn through_proxy(from: usize, functions: impl Fn() -> Functions) -> (Vec<Agent>, Proxy) {
    let agents = strangers(Kind::Tcp, 2, |_| {}, functions);
    let [mine, theirs] = [from, 1 - from].map(|number| info_over(Kind::Tcp, &agents[number]));
    let Address::Tcp(target) = theirs.addresses[0] else { panic!("an address of TCP") };
    let proxy = Proxy::to(target);
    let proxied = PeerInfo { addresses: vec![proxy.address.clone()], ..theirs };
    agents[from].open(vec![info(&agents[from]), proxied]).unwrap();
    agents[1 - from].open(vec![mine, info(&agents[1 - from])]).unwrap();
    (agents, proxy)
}

/// LOG row 37.
#[test]
fn a_connection_that_breaks_fails_its_calls_and_the_next_call_makes_a_new_one() {
    let gate = Gate::default();
    let holding = || {
        let gate = gate.clone();
        echo().plain("hold", move |_| {
            gate.pass();
            Vec::new()
        })
    };
    let (agents, proxy) = through_proxy(0, holding);
    for round in 1..=3 {
        let held: Vec<_> = (0..3).map(|_| call(&agents[0], 1, "hold", b"").unwrap()).collect();
        gate.await_arrivals(3 * round);

        proxy.reset();

        for future in held {
            let error = answer(&future).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::PeerLost);
            assert!(error.to_string().contains("worker1"), "{error}");
        }
        assert_eq!(ask(&agents[0], 1, "echo", b"again").unwrap(), b"again");
        assert!(agents[0].gone().is_empty() && agents[1].gone().is_empty());
    }
    gate.open();
    leave_together(agents);
}

/// LOG row 37.
#[test]
fn calls_the_other_way_do_not_notice_a_broken_connection() {
    let (agents, proxy) = through_proxy(0, echo);
    ask(&agents[0], 1, "echo", b"").unwrap();
    let calling = thread({
        let agent = agents[1].clone();
        move || (0..200u8).all(|i| ask(&agent, 0, "echo", &[i]).is_ok_and(|answer| answer == [i]))
    });

    proxy.reset();

    assert!(finish(&calling));
    leave_together(agents);
}

/// What coordinator and member say to each other may be lost with the link that carries it.
#[test]
fn a_group_becomes_quiet_although_its_messages_are_lost_with_a_connection() {
    for from in 0..2 {
        let (agents, proxy) = through_proxy(from, echo);
        for to in 0..2 {
            ask(&agents[1 - to as usize], to, "echo", b"the links are there").unwrap();
        }
        proxy.swallow();
        let leave = |agent: &Agent| {
            let agent = agent.clone();
            thread(move || agent.quiesce(true, Some(deadline(SOON))).map_err(|error| error.to_string()))
        };
        let [first, second] = [from, 1 - from].map(|number| leave(&agents[number]));
        // Long enough for most runs to say what will be lost; in the others nothing is.
        let (_kept, never) = promise();
        never.wait_until(Some(deadline(Duration::from_millis(50))));

        proxy.reset();

        assert_eq!((finish(&first), finish(&second)), (Ok(()), Ok(())));
        for agent in agents {
            agent.close(true, deadline(SOON));
        }
    }
}

/// LOG row 35.
#[test]
fn a_loss_ends_what_the_lost_worker_had_asked_for() {
    let gate = Gate::default();
    let functions = || {
        let gate = gate.clone();
        echo().plain("hold", move |_| {
            gate.pass();
            Vec::new()
        })
    };
    let mut agents = group(Kind::Tcp, 3, |_| {}, functions);
    let held = call(&agents[2], 1, "hold", b"").unwrap();
    gate.await_arrivals(1);

    agents.remove(2).close(false, deadline(SOON));

    assert_eq!(answer(&held).unwrap_err().kind(), ErrorKind::ShuttingDown);
    gate.open();
    // Its answer has nobody to go to, and nobody waits for it.
    leave_together(agents);
}

/// Every address is tried, and the error tells how each of them failed.
/// LOG row 39.
#[test]
fn the_loss_of_a_worker_that_never_listened_tells_of_every_address() {
    let agents = strangers(Kind::Tcp, 1, |_| {}, echo);
    let mine = info(&agents[0]);
    let gone = Kind::SOCKETS.map(|kind| Listener::new(kind, &mine).1);
    agents[0].open(vec![mine, common::nobody(1, gone.to_vec())]).unwrap();
    let both = Arc::new(gone);

    let text = ask(&agents[0], 1, "echo", b"").unwrap_err().to_string();

    assert!(both.iter().all(|address| text.contains(&address.to_string())), "{text}");
    assert!(text.matches("refused").count() == 2, "{text}");
}

/// LOG rows 49 and 50: what does not connect is passed over, whatever it promised.
#[test]
fn an_address_that_does_not_connect_is_passed_over_for_the_next() {
    let agents = strangers(Kind::Tcp, 2, |_| {}, echo);
    let infos: Vec<_> = agents.iter().map(info).collect();
    for agent in &agents {
        let seen = infos.iter().map(|info| {
            let mut info = info.clone();
            let reachable = info.addresses.pop().unwrap();
            // Nobody listens there any more: the listener ends with the statement.
            info.addresses = Kind::SOCKETS.map(|kind| Listener::new(kind, &info).1).to_vec();
            info.addresses.push(reachable);
            info
        });
        agent.open(seen.collect()).unwrap();
    }

    assert_eq!(ask(&agents[0], 1, "echo", b"by the last").unwrap(), b"by the last");

    leave_together(agents);
}
