//! One worker at a time; `tests/autograd_sim` has whole groups.

use std::time::{Duration, Instant};

use super::*;
use crate::ids::{Incarnation, Life};

type Machine = Passes<u32, Fault, u32>;

#[derive(Debug, Clone, PartialEq, Eq)]
enum Fault {
    Engine(AutogradError),
    Said(&'static str),
}

impl From<AutogradError> for Fault {
    fn from(error: AutogradError) -> Self {
        Self::Engine(error)
    }
}

fn rank(rank: u32) -> Rank {
    Rank::new(rank).unwrap()
}

fn life(number: u32) -> Life {
    Life { rank: rank(number), incarnation: Incarnation::new(7) }
}

/// A pass that worker 9 began.
fn pass() -> Pass {
    Pass { id: PassId::new(life(9), 1), context: 5, retain_graph: false, patience_us: Some(1_000_000) }
}

fn recv(message: u64, from: u32, reach: &[usize]) -> PlannedRecv {
    PlannedRecv { message, from: rank(from), reach: reach.to_vec() }
}

fn plan(sends: &[(u64, u32)], recvs: Vec<PlannedRecv>) -> Plan {
    let sends = sends.iter().map(|&(message, to)| (message, rank(to))).collect();
    Plan { sends, roots: false, recvs, known: Vec::new() }
}

/// Worker 1, and what it does.
struct Bench {
    machine: Machine,
    now: Instant,
    answers: u32,
}

impl Bench {
    /// Worker 9 has told it of the pass, and waits for answer 0.
    fn told() -> Self {
        let mut bench = Self { machine: Passes::new(life(1)), now: Instant::now_for_tests(), answers: 0 };
        bench.call(9, Step::Begin, Content::Nothing);
        bench
    }

    /// As [`told`](Self::told), with this plan. Returns what it says to others.
    fn planned(plan: Plan) -> (Self, Vec<(u16, Step)>) {
        let mut bench = Self::told();
        assert_eq!(bench.work(), Some(Work::Plan));
        bench.machine.handle_planned(bench.now, pass().id, Ok(plan));
        let calls = bench.calls();
        (bench, calls)
    }

    fn call(&mut self, from: u32, step: Step, content: Content<u32, Fault>) {
        let call = AutogradCall { pass: pass(), step };
        self.machine.handle_call(self.now, rank(from), call, content, self.answers);
        self.answers += 1;
    }

    fn gradient(&mut self, from: u32, message: u64, gradient: u32) {
        self.call(from, Step::Gradient { message }, Content::Gradient(gradient));
    }

    fn done(&mut self, gradients: Vec<(u64, Option<u32>)>) {
        self.machine.handle_vjp_done(self.now, pass().id, Ok(gradients));
    }

    fn answered(&mut self, step: Step) {
        self.machine.handle_answer(self.now, pass().id, step, Ok(()));
    }

    fn work(&mut self) -> Option<Work<u32, Fault>> {
        self.machine.take_work(pass().id)
    }

    fn effects(&mut self) -> Vec<Effect<u32, Fault, u32>> {
        std::iter::from_fn(|| self.machine.poll_effect()).collect()
    }

    fn calls(&mut self) -> Vec<(u16, Step)> {
        let call = |effect| match effect {
            Effect::Call { to, step, .. } => Some((to.get(), step)),
            _ => None,
        };
        self.effects().into_iter().filter_map(call).collect()
    }

    fn answers(&mut self) -> Vec<(u32, Result<(), Fault>)> {
        let answer = |effect| match effect {
            Effect::Answer(answer, result) => Some((answer, result)),
            _ => None,
        };
        self.effects().into_iter().filter_map(answer).collect()
    }

    fn pass_time(&mut self, millis: u64) {
        self.now += Duration::from_millis(millis);
        self.machine.handle_time(self.now);
    }
}

/// What the clock said at first does not matter here.
trait Clock {
    fn now_for_tests() -> Self;
}

impl Clock for Instant {
    #[expect(clippy::disallowed_methods, reason = "some instant to begin with")]
    fn now_for_tests() -> Self {
        Self::now()
    }
}

fn vjp(arrived: &[(u64, u32)], wanted: &[u64], last: bool) -> Work<u32, Fault> {
    let arrived = arrived.iter().map(|&(message, gradient)| (Some(message), Some(gradient))).collect();
    Work::Vjp { arrived, wanted: wanted.to_vec(), last }
}

#[test]
fn a_worker_tells_its_neighbours_but_not_the_one_that_told_it() {
    let mut plan = plan(&[(1, 9), (2, 3)], vec![recv(3, 4, &[0]), recv(4, 1, &[0])]);
    plan.known = vec![rank(3), rank(5), rank(1)];

    let (_, calls) = Bench::planned(plan);

    assert_eq!(calls, [(3, Step::Begin), (4, Step::Begin), (5, Step::Begin)]);
}

#[test]
fn all_sources_run_at_once_when_no_cycle_forces_more() {
    let (mut bench, _) = Bench::planned(plan(&[(1, 9), (2, 9)], vec![recv(3, 4, &[0])]));

    bench.gradient(9, 1, 10);
    assert_eq!(bench.work(), None);
    assert_eq!(bench.calls(), [(9, Step::Probe { origin: rank(1) })]);
    bench.gradient(9, 2, 20);

    assert_eq!(bench.work(), Some(vjp(&[(1, 10), (2, 20)], &[3], true)));
    bench.done(vec![(3, Some(30))]);
    assert_eq!(bench.calls(), [(4, Step::Gradient { message: 3 })]);
}

#[test]
fn a_worker_that_waits_for_itself_runs_what_it_has() {
    let sends = [(1, 9), (2, 8)];
    let recvs = || vec![recv(3, 4, &[0]), recv(4, 4, &[1]), recv(5, 4, &[0, 1])];
    let (mut bench, _) = Bench::planned(plan(&sends, recvs()));
    bench.gradient(9, 1, 10);
    assert_eq!(bench.work(), None);

    bench.call(8, Step::Probe { origin: rank(1) }, Content::Nothing);

    assert_eq!(bench.work(), Some(vjp(&[(1, 10)], &[3], false)));
    bench.done(vec![(3, None)]);
    bench.gradient(8, 2, 20);
    assert_eq!(bench.work(), Some(vjp(&[(2, 20)], &[4, 5], true)));
}

#[test]
fn a_call_and_its_answer_are_a_cycle_that_needs_no_probe() {
    let (mut bench, _) = Bench::planned(plan(&[(1, 4), (2, 9)], vec![recv(3, 4, &[1])]));

    bench.gradient(9, 2, 20);

    assert_eq!(bench.work(), Some(vjp(&[(2, 20)], &[3], false)));
}

#[test]
fn what_no_source_reaches_is_answered_without_the_local_engine() {
    let (mut bench, calls) = Bench::planned(plan(&[(1, 9)], vec![recv(3, 4, &[]), recv(4, 9, &[0])]));
    assert_eq!(calls, [(4, Step::NoGradient { message: 3 })]);

    bench.call(9, Step::NoGradient { message: 1 }, Content::Nothing);

    assert_eq!(bench.work(), None);
    assert_eq!(bench.calls(), [(9, Step::NoGradient { message: 4 })]);
}

#[test]
fn the_local_engine_is_told_of_the_end_even_if_the_last_source_has_no_gradient() {
    let (mut bench, _) = Bench::planned(plan(&[(1, 4), (2, 9)], vec![recv(3, 4, &[1])]));
    bench.gradient(9, 2, 20);
    assert_eq!(bench.work(), Some(vjp(&[(2, 20)], &[3], false)));
    bench.done(vec![(3, Some(30))]);

    bench.call(4, Step::NoGradient { message: 1 }, Content::Nothing);

    assert_eq!(bench.work(), Some(vjp(&[], &[], true)));
}

#[test]
fn a_wanted_recv_function_that_the_local_engine_does_not_name_has_no_gradient() {
    let (mut bench, _) = Bench::planned(plan(&[(1, 9)], vec![recv(3, 4, &[0])]));
    bench.gradient(9, 1, 10);
    assert_eq!(bench.work(), Some(vjp(&[(1, 10)], &[3], true)));
    bench.effects();

    bench.done(vec![(77, Some(5))]);

    assert_eq!(bench.calls(), [(4, Step::NoGradient { message: 3 })]);
}

#[test]
fn gradients_that_come_before_the_plan_or_twice_count_once() {
    let mut bench = Bench::told();
    bench.gradient(9, 1, 10);
    bench.gradient(9, 1, 11);
    assert_eq!(bench.work(), Some(Work::Plan));

    bench.machine.handle_planned(bench.now, pass().id, Ok(plan(&[(1, 9)], vec![])));
    bench.gradient(9, 1, 12);
    bench.gradient(9, 77, 13);

    assert_eq!(bench.work(), Some(vjp(&[(1, 10)], &[], true)));
}

#[test]
fn a_part_is_over_when_all_that_it_sent_and_all_that_it_told_is_answered() {
    let (mut bench, _) = Bench::planned(plan(&[(1, 9)], vec![recv(3, 4, &[0])]));
    bench.gradient(9, 1, 10);
    assert!(bench.work().is_some());
    bench.done(vec![(3, Some(30))]);
    assert_eq!(bench.work(), None);

    bench.answered(Step::Gradient { message: 3 });
    assert_eq!(bench.work(), None);
    bench.answered(Step::Begin);

    assert_eq!(bench.work(), Some(Work::End(Ok(()))));
    bench.effects();
    bench.machine.handle_ended(pass().id);
    assert_eq!(bench.answers(), [(0, Ok(()))]);
    assert!(bench.machine.is_empty());
    bench.call(4, Step::Begin, Content::Nothing);
    assert_eq!(bench.answers(), [(2, Ok(()))]);
}

#[test]
fn an_error_reaches_those_who_told_and_those_who_were_told() {
    let (mut bench, _) = Bench::planned(plan(&[(1, 9)], vec![recv(3, 4, &[0])]));
    bench.gradient(9, 1, 10);
    assert!(bench.work().is_some());
    bench.effects();

    bench.machine.handle_vjp_done(bench.now, pass().id, Err(Fault::Said("no")));

    let effects = bench.effects();
    assert!(matches!(
        effects[0],
        Effect::Call { step: Step::Abort, content: Content::Error(Fault::Said("no")), .. }
    ));
    assert!(matches!(effects[1], Effect::Answer(0, Err(Fault::Said("no")))));
    assert_eq!(bench.work(), Some(Work::End(Err(Fault::Said("no")))));
    bench.machine.handle_ended(pass().id);
    bench.call(4, Step::Begin, Content::Nothing);
    assert_eq!(bench.answers(), [(2, Err(Fault::Said("no")))]);
}

#[test]
fn a_pass_that_was_aborted_before_it_was_heard_of_does_not_begin() {
    let mut bench = Bench::told();
    let other = Pass { id: PassId::new(life(9), 2), ..pass() };
    let call = |step| AutogradCall { pass: other, step };
    bench.effects();

    bench.machine.handle_call(bench.now, rank(9), call(Step::Abort), Content::Error(Fault::Said("no")), 50);
    bench.machine.handle_call(bench.now, rank(4), call(Step::Begin), Content::Nothing, 51);

    assert_eq!(bench.answers(), [(50, Ok(())), (51, Err(Fault::Said("no")))]);
    assert_eq!(bench.machine.len(), 1);
}

#[test]
fn nothing_is_sent_any_more_once_a_pass_has_failed_while_the_local_engine_is_at_work() {
    let (mut bench, _) = Bench::planned(plan(&[(1, 9)], vec![recv(3, 4, &[0])]));
    bench.gradient(9, 1, 10);
    assert!(bench.work().is_some());

    bench.machine.handle_lost(rank(4), &Fault::Said("lost"));
    assert_eq!(bench.calls(), [(4, Step::Abort)]);
    assert_eq!(bench.work(), None);
    bench.done(vec![(3, Some(30))]);

    assert_eq!(bench.work(), Some(Work::End(Err(Fault::Said("lost")))));
    assert_eq!(bench.calls(), []);
}

#[test]
fn whoever_waits_asks_and_then_names_what_did_not_come() {
    let (mut bench, _) = Bench::planned(plan(&[(1, 9), (2, 4)], vec![]));
    bench.answered(Step::Begin);
    bench.gradient(9, 1, 10);
    assert_eq!(bench.machine.next_deadline(), Some(bench.now + Duration::from_millis(250)));

    bench.pass_time(250);
    assert_eq!(bench.calls(), [(4, Step::Ask { message: 2 })]);
    bench.machine.handle_answer(bench.now, pass().id, Step::Ask { message: 2 }, Ok(()));
    bench.pass_time(749);
    assert_eq!(bench.calls(), []);
    bench.pass_time(1);

    let error = AutogradError::Stalled { millis: 1000, missing: vec![(2, rank(4))], answers: 0 };
    assert_eq!(bench.answers().last(), Some(&(0, Err(Fault::Engine(error.clone())))));
    let text = "the backward pass has made no progress for 1000 ms, and the tensors sent in these messages got \
                no gradients: 2 to rank 4";
    assert_eq!(error.to_string(), text);
}

#[test]
fn time_does_not_count_while_the_local_engine_is_at_work() {
    let (mut bench, _) = Bench::planned(plan(&[(1, 9)], vec![]));
    bench.gradient(9, 1, 10);
    assert!(bench.work().is_some());
    bench.effects();

    bench.pass_time(5000);

    assert_eq!(bench.machine.next_deadline(), None);
    assert_eq!(bench.effects().len(), 0);
}

#[test]
fn whoever_asks_for_what_was_never_received_learns_that_there_is_no_gradient() {
    let (mut bench, _) = Bench::planned(plan(&[], vec![recv(3, 4, &[])]));
    for message in [3, 4] {
        bench.call(4, Step::Ask { message }, Content::Nothing);
    }
    assert_eq!(bench.calls(), [(4, Step::NoGradient { message: 4 })]);

    for step in [Step::NoGradient { message: 3 }, Step::NoGradient { message: 4 }, Step::Begin] {
        bench.answered(step);
    }
    assert_eq!(bench.work(), Some(Work::End(Ok(()))));
    bench.machine.handle_ended(pass().id);
    bench.effects();
    bench.call(4, Step::Ask { message: 5 }, Content::Nothing);
    assert_eq!(bench.calls(), [(4, Step::NoGradient { message: 5 })]);
}
