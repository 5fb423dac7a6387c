//! Lists of operations for backward passes: any bytes are a list. Used by the tests of `tensorcall-proto` as
//! well, so it uses nothing but that crate.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use tensorcall_proto::autograd::{
    AutogradCall, AutogradError, Content, Effect, Pass, Passes, Plan, PlannedRecv, Step, Work,
};
use tensorcall_proto::ids::{Incarnation, Life, PassId, Rank};

/// One worker hears anything of anybody, in any order. It plans once and first, runs each source once, sends
/// each gradient once, answers each call once, and in the end has nothing left.
pub fn autograd(data: &[u8]) {
    let mut bench = Bench::new();
    for &byte in data.iter().take(MOST_OPERATIONS) {
        bench.operate(byte >> 5, byte & 31);
    }
    bench.end();
}

/// Longer lists find nothing that shorter ones do not.
const MOST_OPERATIONS: usize = 400;

#[derive(Debug, Clone)]
struct Failure;

impl From<AutogradError> for Failure {
    fn from(_: AutogradError) -> Self {
        Self
    }
}

struct Bench {
    machine: Passes<u8, Failure, usize>,
    now: Instant,
    /// What answers each call, and how often it did.
    answers: Vec<u32>,
    calls: Vec<(PassId, Step)>,
    own: Vec<PassId>,
    ended: BTreeSet<PassId>,
    parts: BTreeMap<PassId, Part>,
}

/// What is known of a pass.
#[derive(Default)]
struct Part {
    recvs: Vec<u64>,
    planned: bool,
    over: bool,
    run: BTreeSet<Option<u64>>,
    sent: BTreeSet<u64>,
}

impl Bench {
    fn new() -> Self {
        Self {
            machine: Passes::new(life(1)),
            now: start(),
            answers: Vec::new(),
            calls: Vec::new(),
            own: Vec::new(),
            ended: BTreeSet::new(),
            parts: BTreeMap::new(),
        }
    }

    fn operate(&mut self, operation: u8, about: u8) {
        let (pass, detail) = (self.pass(about), u64::from(about >> 2));
        let from = rank(u32::from(about & 3));
        match operation {
            0 if self.own.len() < 3 => {
                let own = self.machine.begin(self.now, detail, about & 1 == 1, Some(1_000_000));
                self.own.push(own);
            }
            0 | 1 => self.call(from, pass, Step::Begin, Content::Nothing),
            2 => self.call(from, pass, Step::Gradient { message: detail }, Content::Gradient(about)),
            3 => match about & 3 {
                0 => self.call(from, pass, Step::Ask { message: detail }, Content::Nothing),
                1 => self.call(from, pass, Step::Probe { origin: rank(1) }, Content::Nothing),
                2 => self.call(from, pass, Step::Probe { origin: from }, Content::Nothing),
                _ => self.call(from, pass, Step::NoGradient { message: detail }, Content::Nothing),
            },
            4 => self.work(pass.id, about),
            5 if !self.calls.is_empty() => {
                let (pass, step) = self.calls.remove(usize::from(about) % self.calls.len());
                self.machine.handle_answer(self.now, pass, step, Ok(()));
            }
            6 if about == 31 => self.machine.handle_lost(from, &Failure),
            6 if about > 27 => self.call(from, pass, Step::Abort, Content::Error(Failure)),
            7 => {
                self.now += Duration::from_millis(10 * u64::from(about));
                self.machine.handle_time(self.now);
            }
            _ => {}
        }
        self.carry_out();
    }

    /// One of three passes of another worker, or one of this worker's.
    fn pass(&self, about: u8) -> Pass {
        let id = match self.own.get(usize::from(about & 3)) {
            Some(&own) if about & 4 == 4 => own,
            _ => PassId::new(life(2), u64::from(about & 3)),
        };
        Pass { id, context: 0, retain_graph: false, patience_us: Some(1_000_000) }
    }

    fn call(&mut self, from: Rank, pass: Pass, step: Step, content: Content<u8, Failure>) {
        self.answers.push(0);
        let answer = self.answers.len() - 1;
        self.machine.handle_call(self.now, from, AutogradCall { pass, step }, content, answer);
    }

    /// A thread does what there is to do.
    fn work(&mut self, pass: PassId, about: u8) {
        let Some(work) = self.machine.take_work(pass) else { return };
        let part = self.parts.entry(pass).or_default();
        assert!(!part.over, "work after the end");
        match work {
            Work::Plan => {
                assert!(!part.planned, "a second plan");
                part.planned = true;
                let plan = plan(about, self.own.contains(&pass));
                part.recvs = plan.recvs.iter().map(|recv| recv.message).collect();
                let plan = if about == 30 { Err(Failure) } else { Ok(plan) };
                self.machine.handle_planned(self.now, pass, plan);
            }
            Work::Vjp { arrived, wanted, .. } => {
                for (message, _) in arrived {
                    assert!(part.run.insert(message), "a source ran twice");
                }
                let found = wanted.iter().map(|&message| (message, Some(about))).collect();
                let found = if about == 30 { Err(Failure) } else { Ok(found) };
                self.machine.handle_vjp_done(self.now, pass, found);
            }
            Work::End(_) => {
                part.over = true;
                self.machine.handle_ended(pass);
            }
        }
    }

    fn carry_out(&mut self) {
        while let Some(effect) = self.machine.poll_effect() {
            match effect {
                Effect::Work(_) => {}
                Effect::Call { pass, step, .. } => {
                    let part = self.parts.entry(pass.id).or_default();
                    if let Step::Gradient { message } | Step::NoGradient { message } = step
                        && part.recvs.contains(&message)
                    {
                        assert!(part.sent.insert(message), "gradients were sent twice");
                    }
                    self.calls.push((pass.id, step));
                }
                Effect::Answer(answer, _) => self.answers[answer] += 1,
                Effect::Ended(pass, _) => assert!(self.ended.insert(pass), "a pass ended twice"),
            }
        }
        assert!(self.answers.iter().all(|&count| count <= 1), "a call was answered twice");
    }

    fn end(&mut self) {
        self.machine.fail_all(&Failure);
        let passes: Vec<_> =
            (0..4).map(|number| PassId::new(life(2), number)).chain(self.own.clone()).collect();
        for pass in passes {
            self.work(pass, 0);
            self.carry_out();
        }
        assert!(self.machine.is_empty(), "a pass is left");
        assert!(self.answers.iter().all(|&count| count == 1), "a call was not answered");
        assert_eq!(self.ended.len(), self.own.len());
    }
}

/// Some sources and recv functions.
fn plan(about: u8, roots: bool) -> Plan {
    let recv = |message: u64| PlannedRecv {
        message: 8 + message,
        from: rank(u32::try_from(message % 4).unwrap_or(0)),
        reach: (0..4).filter(|source| (u64::from(about) >> source ^ message) & 1 == 1).collect(),
    };
    Plan {
        sends: (0..3).map(|message| (message, rank(u32::from(about & 3)))).collect(),
        roots,
        recvs: (0..3).map(recv).collect(),
        known: vec![rank(3)],
    }
}

fn rank(number: u32) -> Rank {
    Rank::new(number).unwrap_or(Rank::MAX)
}

fn life(number: u32) -> Life {
    Life { rank: rank(number), incarnation: Incarnation::new(7) }
}

#[allow(clippy::disallowed_methods, reason = "some instant to begin with")]
fn start() -> Instant {
    Instant::now()
}
