//! Groups that workers join, leave and come back to at run time.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::gate::Gate;
use common::{Functions, Kind, SOON, answer, ask, call, deadline, eventually, info, rank, strangers};
use tensorcall::engine::{Agent, ErrorKind};

fn echo() -> Functions {
    Functions::default().plain("echo", <[u8]>::to_vec)
}

/// `joiner` comes to a group that `members` have opened.
fn join(members: &[Agent], joiner: &Agent) {
    joiner.open_dynamic(members.iter().chain([joiner]).map(info).collect()).unwrap();
    for member in members {
        member.admit(info(joiner)).unwrap();
    }
}

fn leave(agent: &Agent) {
    agent.quiesce(true, Some(deadline(SOON))).unwrap();
    agent.close(true, deadline(Duration::from_secs(2)));
}

fn workers_that_join_one_after_the_other_call_each_other(kind: Kind) {
    let agents = strangers(kind, 4, |_| {}, echo);

    for number in 0..agents.len() {
        join(&agents[..number], &agents[number]);
        for (from, agent) in agents[..=number].iter().enumerate() {
            for to in 0..=u32::try_from(number).unwrap() {
                assert_eq!(ask(agent, to, "echo", b"hello").unwrap(), b"hello", "{from} to {to}");
            }
        }
    }
}

#[test]
fn workers_that_join_one_after_the_other_call_each_other_in_memory() {
    workers_that_join_one_after_the_other_call_each_other(Kind::Memory);
}

#[test]
fn workers_that_join_one_after_the_other_call_each_other_over_sockets() {
    workers_that_join_one_after_the_other_call_each_other(Kind::Unix);
}

#[test]
fn a_joiner_is_served_before_it_is_a_member_and_called_after() {
    let agents = strangers(Kind::Unix, 2, |_| {}, echo);
    let (member, joiner) = (&agents[0], &agents[1]);
    member.open_dynamic(vec![info(member)]).unwrap();
    joiner.open_dynamic(agents.iter().map(info).collect()).unwrap();

    assert_eq!(ask(joiner, 0, "echo", b"before").unwrap(), b"before");
    assert_eq!(ask(member, 1, "echo", b"").unwrap_err().kind(), ErrorKind::Usage);

    member.admit(info(joiner)).unwrap();
    assert_eq!(ask(member, 1, "echo", b"after").unwrap(), b"after");
}

#[test]
fn a_worker_leaves_on_its_own_and_calls_to_it_say_that_it_left() {
    let agents = strangers(Kind::Unix, 3, |_| {}, echo);
    for number in 0..3 {
        join(&agents[..number], &agents[number]);
    }
    for agent in &agents {
        ask(agent, 2, "echo", b"").unwrap();
    }

    leave(&agents[2]);

    eventually("worker2 has left", || agents[0].gone() == [rank(2)] && agents[1].gone() == [rank(2)]);
    let error = ask(&agents[0], 2, "echo", b"").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PeerLeft);
    assert!(error.to_string().contains("worker2"), "{error}");
    assert_eq!(ask(&agents[0], 1, "echo", b"others go on").unwrap(), b"others go on");
}

#[test]
fn a_worker_leaves_only_when_its_own_calls_are_answered() {
    let gate = Arc::new(Gate::default());
    let functions = || {
        let gate = Arc::clone(&gate);
        echo().plain("wait", move |payload| {
            gate.pass();
            payload.to_vec()
        })
    };
    let agents = strangers(Kind::Unix, 2, |_| {}, functions);
    join(&[], &agents[0]);
    join(&agents[..1], &agents[1]);
    let waiting = call(&agents[1], 0, "wait", b"x").unwrap();

    let early = agents[1].quiesce(true, Some(deadline(Duration::from_millis(100))));
    gate.open();
    leave(&agents[1]);

    assert_eq!(early.unwrap_err().kind(), ErrorKind::Timeout);
    assert_eq!(answer(&waiting).unwrap(), b"x");
}

#[test]
fn a_worker_that_died_comes_back_as_another_life() {
    let gate = Arc::new(Gate::default());
    let functions = || {
        let gate = Arc::clone(&gate);
        echo().plain("wait", move |payload| {
            gate.pass();
            payload.to_vec()
        })
    };
    let agents = strangers(Kind::Unix, 2, |_| {}, functions);
    join(&[], &agents[0]);
    join(&agents[..1], &agents[1]);
    let pending = call(&agents[0], 1, "wait", b"").unwrap();

    let [again] =
        <[_; 1]>::try_from(strangers(Kind::Unix, 1, |config| *config = common::config(1), functions))
            .unwrap();
    join(&agents[..1], &again);

    let error = answer(&pending).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PeerLost);
    assert_eq!(ask(&agents[0], 1, "echo", b"new life").unwrap(), b"new life");
    assert_eq!(ask(&again, 0, "echo", b"new life").unwrap(), b"new life");
    // What the earlier life says from now on is not heard.
    let stale = ask(&agents[1], 0, "echo", b"old life").unwrap_err();
    assert_eq!(stale.kind(), ErrorKind::PeerLost);
    gate.open();
}

#[test]
fn nobody_joins_a_static_group_or_takes_the_name_of_a_live_member() {
    let agents = strangers(Kind::Memory, 3, |_| {}, echo);
    agents[0].open(vec![info(&agents[0])]).unwrap();
    agents[1].open_dynamic(vec![info(&agents[1])]).unwrap();

    assert_eq!(agents[0].admit(info(&agents[2])).unwrap_err().kind(), ErrorKind::Usage);
    let mut same_name = info(&agents[2]);
    same_name.identity.name = agents[1].identity().name.clone();
    let error = agents[1].admit(same_name).unwrap_err();

    assert!(error.to_string().contains("not unique"), "{error}");
}
