//! References when workers go and links break: nothing is freed too early, nothing stays for ever (RREF-1).
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::cell::RefCell;
use std::time::Duration;

use common::bench::{Bench, await_empty, benches, created, give, remote, take, value_of, with_rrefs};
use common::proxy::Proxy;
use common::{
    Kind, SOON, answer, ask, deadline, eventually, finish, info, info_over, leave_together, rank, request,
    strangers, thread,
};
use tensorcall::engine::transport::Address;
use tensorcall::engine::{Agent, ErrorKind, PeerInfo, RRefCounts, RRefState};

/// Workers that meet over TCP; `from` reaches `to` through a proxy.
fn proxied(count: u32, from: usize, to: usize) -> (Vec<Agent>, Vec<Bench>, Proxy) {
    let benches: Vec<Bench> = (0..count).map(|_| Bench::default()).collect();
    let mut next = benches.iter();
    let next = RefCell::new(&mut next);
    let agents = strangers(Kind::Tcp, count, |_| {}, || next.borrow_mut().next().unwrap().functions());
    let target = info_over(Kind::Tcp, &agents[to]);
    let Address::Tcp(address) = target.addresses[0] else { panic!("an address of TCP") };
    let proxy = Proxy::to(address);
    for (number, agent) in agents.iter().enumerate() {
        let infos = agents.iter().enumerate().map(|(other, peer)| match other {
            _ if other == number => info(peer),
            _ if (number, other) == (from, to) => {
                PeerInfo { addresses: vec![proxy.address.clone()], ..target.clone() }
            }
            _ => info_over(Kind::Tcp, peer),
        });
        agent.open(infos.collect()).unwrap();
    }
    (agents, benches, proxy)
}

fn brief() -> std::time::Instant {
    deadline(Duration::from_millis(10))
}

#[test]
fn when_the_owner_goes_its_references_fail_and_so_do_those_who_wait() {
    for kind in Kind::ALL {
        let (agents, benches) = benches(kind, 3);
        let rref = created(&agents[0], 1, b"x");
        let (pending, creation) = remote(&agents[0], 1, "keep at the gate", b"");
        let fetch = pending.fetch("to_here", None).unwrap();
        give(&agents[0], 2, "shelve", &[&rref]).unwrap();
        let passed = take(&benches[2]);
        benches[1].gate.await_arrivals(1);

        agents[1].close(false, deadline(SOON));

        for future in [fetch, creation] {
            assert!(matches!(answer(&future).unwrap_err().kind(), ErrorKind::PeerLeft | ErrorKind::PeerLost));
        }
        for rref in [&rref, &pending, &passed] {
            eventually("the reference has failed", || rref.state() == RRefState::Failed);
            let error = rref.fetch("to_here", Some(SOON)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::RRef);
            assert!(error.to_string().contains("worker1"), "{error}");
        }
        let error = give(&agents[0], 2, "shelve", &[&rref]).unwrap_err();
        assert!(error.to_string().contains("its owner, worker 'worker1' (rank 1), is lost"), "{error}");
        drop((rref, pending, passed));
        await_empty(&[agents[0].clone(), agents[2].clone()]);
        benches[1].gate.open();
    }
}

#[test]
fn when_a_holder_goes_its_references_are_given_back() {
    for kind in Kind::ALL {
        let (agents, _) = benches(kind, 3);
        let rref = created(&agents[0], 1, b"x");
        give(&agents[0], 2, "shelve", &[&rref]).unwrap();
        let _unshared = created(&agents[2], 1, b"y");
        assert_eq!(agents[1].rref_counts().forks, 3);

        agents[2].close(false, deadline(SOON));

        eventually("one is left", || {
            agents[1].rref_counts() == RRefCounts { owners: 1, forks: 1, ..RRefCounts::default() }
        });
        assert_eq!(value_of(&rref).unwrap(), b"x");
        drop(rref);
        await_empty(&agents[..2]);
    }
}

#[test]
fn when_the_one_who_shared_goes_the_receiver_keeps_its_reference() {
    for kind in Kind::ALL {
        let (agents, benches) = benches(kind, 3);
        let rref = created(&agents[0], 1, b"inherited");
        give(&agents[0], 2, "shelve", &[&rref]).unwrap();

        agents[0].close(false, deadline(SOON));

        eventually("one is left", || agents[1].rref_counts().forks == 1);
        let passed = take(&benches[2]);
        assert_eq!(value_of(&passed).unwrap(), b"inherited");
        drop(passed);
        await_empty(&agents[1..]);
        assert_eq!(rref.state(), RRefState::Deleted);
    }
}

#[test]
fn a_request_is_held_until_the_owner_can_be_asked() {
    let (agents, benches, proxy) = proxied(3, 2, 1);
    let rref = created(&agents[0], 1, b"x");
    ask(&agents[2], 1, "echo", b"").unwrap();
    proxy.swallow();
    let held = agents[0].call(rank(2), with_rrefs("shelve", &[&rref])).unwrap();

    // The owner hears nothing; other requests pass.
    assert_eq!(ask(&agents[0], 2, "echo", b"passes").unwrap(), b"passes");
    assert!(!held.wait_until(Some(brief())));
    proxy.reset();

    answer(&held).unwrap();
    let passed = take(&benches[2]);
    drop(rref);
    assert_eq!(value_of(&passed).unwrap(), b"x");
    drop(passed);
    await_empty(&agents);
    leave_together(agents);
}

#[test]
fn a_request_that_is_held_when_the_owner_goes_is_answered() {
    let (agents, _, proxy) = proxied(3, 2, 1);
    let rref = created(&agents[0], 1, b"x");
    ask(&agents[2], 1, "echo", b"").unwrap();
    proxy.swallow();
    let held = agents[0].call(rank(2), with_rrefs("shelve", &[&rref])).unwrap();
    let (failed, creation) = agents[0].remote(rank(2), with_rrefs("shelve", &[&rref])).unwrap();
    let fetch = failed.fetch("to_here", Some(SOON)).unwrap();
    assert!(!held.wait_until(Some(brief())));

    agents[1].close(false, deadline(SOON));
    proxy.reset();

    for future in [held, creation, fetch] {
        let error = answer(&future).unwrap_err().to_string();
        assert!(error.contains("an RRef in the arguments is of no use"), "{error}");
        assert!(error.contains("worker1"), "{error}");
    }
}

#[test]
fn a_held_request_whose_time_is_over_is_answered_and_forgotten() {
    let (agents, _, proxy) = proxied(3, 2, 1);
    let rref = created(&agents[0], 1, b"x");
    ask(&agents[2], 1, "echo", b"").unwrap();
    proxy.swallow();
    let mut request = with_rrefs("shelve", &[&rref]);
    request.timeout = Some(Duration::from_millis(20));

    let held = agents[0].call(rank(2), request).unwrap();

    assert_eq!(answer(&held).unwrap_err().kind(), ErrorKind::Timeout);
    eventually("nothing is held", || agents[2].metrics().server_active_calls == 0);
    proxy.reset();
    drop(rref);
    await_empty(&agents);
    leave_together(agents);
}

#[test]
fn references_outlive_the_link_to_their_owner() {
    let (agents, _, proxy) = proxied(2, 0, 1);
    let kept = created(&agents[0], 1, b"kept");
    for round in 0..5 {
        let dropped = created(&agents[0], 1, b"dropped");
        if round % 2 == 0 {
            proxy.swallow();
        }
        drop(dropped);
        // The word of it is lost, or not.
        eventually("the handle is gone", || agents[0].rref_counts().pending_futures > 0 || round % 2 == 1);
        proxy.reset();
        eventually("it is given back all the same", || agents[1].rref_counts().forks == 1);
        eventually("there is a new link", || ask(&agents[0], 1, "echo", b"").is_ok());
    }

    assert_eq!(value_of(&kept).unwrap(), b"kept");
    drop(kept);
    await_empty(&agents);
    leave_together(agents);
}

#[test]
fn what_was_shared_in_a_request_that_never_arrives_is_taken_back() {
    let (agents, benches, proxy) = proxied(3, 0, 2);
    let rref = created(&agents[0], 1, b"x");
    let own = agents[0].make_rref(std::sync::Arc::new(b"own".to_vec()), "");
    ask(&agents[0], 2, "echo", b"").unwrap();
    proxy.swallow();
    let lost = agents[0].call(rank(2), with_rrefs("shelve", &[&rref, &own])).unwrap();
    assert!(!lost.wait_until(Some(brief())));
    assert_eq!(agents[0].rref_counts().pending_futures, 2);

    proxy.reset();

    assert_eq!(answer(&lost).unwrap_err().kind(), ErrorKind::PeerLost);
    eventually("nothing is pending", || agents[0].rref_counts().pending_futures == 0);
    assert!(benches[2].shelf.lock().is_empty());
    drop((rref, own));
    await_empty(&agents);
    leave_together(agents);
}

#[test]
fn what_was_shared_in_a_reply_that_never_arrives_is_taken_back() {
    let (agents, benches, proxy) = proxied(3, 0, 2);
    give(&agents[2], 2, "shelve", &[&created(&agents[2], 1, b"x")]).unwrap();
    let lost = agents[0].call(rank(2), request("return at the gate", b"", Some(SOON))).unwrap();
    benches[2].gate.await_arrivals(1);
    proxy.swallow();
    benches[2].gate.open();
    eventually("the reply is out", || agents[2].metrics().server_active_calls == 0);

    proxy.reset();

    assert_eq!(answer(&lost).unwrap_err().kind(), ErrorKind::PeerLost);
    eventually("nothing is pending", || agents[2].rref_counts().pending_futures == 0);
    benches[2].shelf.lock().clear();
    await_empty(&agents);
    leave_together(agents);
}

#[test]
fn a_reply_for_a_link_that_is_gone_shares_nothing() {
    let (agents, benches, proxy) = proxied(3, 0, 2);
    give(&agents[2], 2, "shelve", &[&created(&agents[2], 1, b"x")]).unwrap();
    let lost = agents[0].call(rank(2), request("return at the gate", b"", Some(SOON))).unwrap();
    benches[2].gate.await_arrivals(1);
    proxy.reset();
    assert_eq!(answer(&lost).unwrap_err().kind(), ErrorKind::PeerLost);
    eventually("there is a new link", || ask(&agents[0], 2, "echo", b"").is_ok());

    benches[2].gate.open();

    eventually("the function has ended", || agents[2].metrics().server_active_calls == 0);
    benches[2].shelf.lock().clear();
    await_empty(&agents);
    leave_together(agents);
}

#[test]
fn a_creation_whose_link_breaks_marks_its_reference_and_leaves_nothing_behind() {
    for lost in [false, true] {
        let (agents, benches, proxy) = proxied(2, 0, 1);
        ask(&agents[0], 1, "echo", b"").unwrap();
        if lost {
            proxy.swallow();
        }
        let (rref, creation) = remote(&agents[0], 1, "keep at the gate", b"x");
        let fetch = rref.fetch("to_here", None).unwrap();
        if !lost {
            benches[1].gate.await_arrivals(1);
            eventually("the fetch waits", || agents[1].metrics().server_active_calls == 2);
        }

        proxy.reset();

        for future in [creation, fetch] {
            assert_eq!(answer(&future).unwrap_err().kind(), ErrorKind::PeerLost);
        }
        assert_eq!(rref.state(), RRefState::Failed);
        let error = rref.fetch("to_here", Some(SOON)).unwrap_err().to_string();
        assert!(error.contains("could not be created") && error.contains("worker1"), "{error}");
        drop(rref);
        let left = usize::from(!lost);
        eventually("the fetch is dropped", || agents[1].metrics().server_active_calls == left);
        benches[1].gate.open();
        await_empty(&agents);
        leave_together(agents);
    }
}

#[test]
fn a_group_that_lost_a_worker_with_references_leaves_in_good_order() {
    for kind in Kind::ALL {
        for gone in 0..3 {
            let (mut agents, _) = benches(kind, 3);
            for (to, agent) in [1, 2, 0].into_iter().zip(&agents) {
                let rref = created(agent, to, b"x");
                give(agent, (to + 1) % 3, "shelve", &[&rref]).unwrap();
            }
            let leaver = agents.remove(gone);

            leaver.close(false, deadline(SOON));

            let leave = |agent: Agent| {
                thread(move || {
                    assert!(agent.delete_rrefs(Some(deadline(SOON))), "{:?}", agent.rref_counts());
                    agent.quiesce(true, Some(deadline(SOON))).unwrap();
                    agent.close(true, deadline(SOON));
                })
            };
            let leaving: Vec<_> = agents.into_iter().map(leave).collect();
            leaving.iter().for_each(finish);
        }
    }
}

/// Workers of a dynamic group that do not know each other yet.
fn dynamic(count: u32) -> (Vec<Agent>, Vec<Bench>) {
    let benches: Vec<Bench> = (0..count).map(|_| Bench::default()).collect();
    let mut next = benches.iter();
    let next = RefCell::new(&mut next);
    let agents = strangers(Kind::Unix, count, |_| {}, || next.borrow_mut().next().unwrap().functions());
    (agents, benches)
}

#[test]
fn references_of_a_worker_that_joins_are_taken_before_it_is_a_member() {
    let (agents, benches) = dynamic(3);
    let [first, second, joiner] = &agents[..] else { panic!() };
    for member in [first, second] {
        member.open_dynamic(vec![info(first), info(second)]).unwrap();
    }
    joiner.open_dynamic(agents.iter().map(info).collect()).unwrap();
    give(joiner, 0, "shelve", &[&joiner.make_rref(std::sync::Arc::new(b"new".to_vec()), "")]).unwrap();
    let shelved = take(&benches[0]);

    // The second member has heard nothing of the owner, and holds the request.
    let held = first.call(rank(1), with_rrefs("fetch", &[&shelved])).unwrap();
    assert!(!held.wait_until(Some(brief())));
    second.admit(info(joiner)).unwrap();

    assert_eq!(answer(&held).unwrap(), b"new");
    first.admit(info(joiner)).unwrap();
    assert_eq!(value_of(&shelved).unwrap(), b"new");
    drop(shelved);
    await_empty(&agents);
}

#[test]
fn references_to_an_earlier_life_fail_and_the_new_life_starts_afresh() {
    let (mut agents, _) = dynamic(2);
    let earlier = agents.pop().unwrap();
    let member = agents.pop().unwrap();
    member.open_dynamic(vec![info(&member), info(&earlier)]).unwrap();
    earlier.open_dynamic(vec![info(&member), info(&earlier)]).unwrap();
    let rref = created(&member, 1, b"x");
    give(&earlier, 0, "echo", &[]).unwrap();
    earlier.close(false, deadline(SOON));
    eventually("it is gone", || rref.state() == RRefState::Failed);

    let (mut again, _) = dynamic(2);
    let later = again.pop().unwrap();
    member.admit(info(&later)).unwrap();
    later.open_dynamic(vec![info(&member), info(&later)]).unwrap();

    assert_eq!(rref.fetch("to_here", Some(SOON)).unwrap_err().kind(), ErrorKind::RRef);
    let error = give(&member, 1, "shelve", &[&rref]).unwrap_err().to_string();
    assert!(error.contains("is lost"), "{error}");
    assert_eq!(value_of(&created(&member, 1, b"afresh")).unwrap(), b"afresh");
    drop(rref);
    await_empty(&[member, later]);
}
