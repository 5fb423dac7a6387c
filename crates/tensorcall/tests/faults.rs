//! Messages that a test lets fail or come late.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{Functions, answer, ask, call, leave_together, memory_group, rank, request};
use tensorcall::engine::proto::wire::message::Message;
use tensorcall::engine::transport::Outbound;
use tensorcall::engine::{ErrorKind, Fault, Faults};

/// What happens to calls of functions by their names.
#[derive(Debug)]
struct ByName;

impl Faults for ByName {
    fn before_send(&self, message: &Outbound, label: &str, attempt: u32) -> Option<Fault> {
        match (&message.message, label) {
            (Message::Call(_), "late") => Some(Fault::Delay(Duration::from_millis(100))),
            (Message::Call(_), "fails") => Some(Fault::Fail("planted".to_owned())),
            // A message that is no call is tried again.
            (Message::Cancel { .. }, _) if attempt < 2 => Some(Fault::Fail("planted".to_owned())),
            _ => None,
        }
    }
}

fn functions() -> Functions {
    let echo = |payload: &[u8]| payload.to_vec();
    Functions::default().plain("late", echo).plain("fails", echo).plain("other", echo).with(
        "waits for its cancellation",
        |_, responder| {
            std::thread::spawn(move || {
                while !responder.is_cancelled() {
                    std::thread::yield_now();
                }
                drop(responder);
            });
        },
    )
}

fn pair() -> Vec<tensorcall::engine::Agent> {
    memory_group(2, |config| config.faults = Some(Arc::new(ByName)), functions)
}

#[test]
fn a_call_that_fails_does_so_before_the_caller_has_its_future() {
    let agents = pair();

    let future = call(&agents[0], 1, "fails", b"").unwrap();

    assert!(future.is_done());
    assert!(answer(&future).unwrap_err().to_string().contains("planted"));
    assert_eq!(ask(&agents[0], 1, "other", b"x").unwrap(), b"x");
    leave_together(agents);
}

#[test]
#[expect(clippy::disallowed_methods, reason = "measures time")]
fn a_late_call_comes_and_its_limit_counts_from_the_call() {
    let agents = pair();
    let limited = agents[0].call(rank(1), request("late", b"", Some(Duration::from_millis(20)))).unwrap();
    let begin = Instant::now();

    let future = call(&agents[0], 1, "late", b"x").unwrap();

    assert_eq!(answer(&future).unwrap(), b"x");
    assert!(begin.elapsed() >= Duration::from_millis(100));
    assert_eq!(answer(&limited).unwrap_err().kind(), ErrorKind::Timeout);
    leave_together(agents);
}

#[test]
fn a_group_is_not_quiet_while_calls_are_late() {
    let agents = pair();

    let future = call(&agents[0], 1, "late", b"x").unwrap();
    leave_together(agents);

    assert_eq!(answer(&future).unwrap(), b"x");
}

#[test]
fn what_is_not_a_call_is_sent_again_when_it_failed() {
    let agents = pair();
    let future = call(&agents[0], 1, "waits for its cancellation", b"").unwrap();

    assert!(agents[0].cancel(rank(1), future.call().unwrap()));

    // The function ends, and with it the shutdown, only when the message has come.
    leave_together(agents);
}
