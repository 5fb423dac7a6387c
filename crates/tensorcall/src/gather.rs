//! Gathering one value from each worker of a set, and giving all to each.
//!
//! Workers in Python do this before they leave together (`rpc/_gather.py`); this is the same in Rust, so that
//! both can be in one group. The worker with the smallest name leads: the others report to it, and it tells
//! them all. They call each other by the names of Python's functions, with plain data.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tensorcall_proto::ids::{Rank, WorkerName};
use tensorcall_proto::wire::Value;

use crate::agent::{Agent, InboundCall, Responder, lend};
use crate::clock::now;
use crate::error::{Error, ErrorKind, Result};
use crate::future::{Promise, RpcFuture, promise};
use crate::plain;
use crate::sync::Mutex;

/// What a worker calls on the leader: it reports its value.
const REPORT: &str = "tensorcall.rpc.api:_gather_to_leader";
/// What the leader calls on the others: it tells what all reported.
const TELL: &str = "tensorcall.rpc.api:_broadcast_to_followers";
/// What anybody calls on a silent worker: answering is all.
const SIGN_OF_LIFE: &str = "tensorcall.rpc.api:_sign_of_life";

/// Between two looks at who was lost.
const SLICE: Duration = Duration::from_millis(250);
/// When to ask a silent worker for a sign of life, and how rarely in a long wait.
const PROBE_AFTER: Duration = Duration::from_secs(1);
const PROBE_AT_MOST_EVERY: Duration = Duration::from_secs(30);
/// What an agent may take to find out that a worker is lost.
const VERDICT_AFTER: Duration = Duration::from_secs(1);

/// What each gave, by name.
pub type Gathered = BTreeMap<String, Value>;

/// One worker's part in all gatherings: those that it calls for, and what others say of them.
#[derive(Default)]
pub struct Gatherings {
    rounds: Mutex<Rounds>,
}

#[derive(Default)]
struct Rounds {
    /// How many there were of each set of workers.
    counts: HashMap<String, u64>,
    /// Those that are under way, or that others were early with, by their ids.
    open: HashMap<String, Round>,
}

struct Round {
    gathered: Gathered,
    /// Told when all have reported, or the leader has told.
    complete: Arc<Promise>,
}

impl Default for Round {
    fn default() -> Self {
        Self { gathered: Gathered::new(), complete: Arc::new(promise().0) }
    }
}

impl Gatherings {
    /// Answers a request of another worker, if it is part of a gathering; else gives it back. What is wrong with
    /// it is told to its caller. Takes no time, so that any thread will do.
    pub fn handle(&self, call: InboundCall, responder: Responder) -> Option<(InboundCall, Responder)> {
        let part: fn(&Self, &[Value]) -> Result<Value, String> = match call.function.as_deref() {
            Some(REPORT) => Self::reported,
            Some(TELL) => Self::told,
            Some(SIGN_OF_LIFE) => |_, _| Ok(Value::Nil),
            _ => return Some((call, responder)),
        };
        plain::answer(responder, plain::arguments_of(&call).and_then(|arguments| part(self, &arguments)));
        None
    }

    /// Gives `value` to all workers of `names`, this one included, and returns what each gave. A worker that
    /// is lost is passed over.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Timeout`] if somebody did not come within `timeout` (`None` waits for ever); what a worker
    /// had to say against it, as [`ErrorKind::Remote`].
    pub fn gather(
        &self,
        agent: &Agent,
        names: &BTreeSet<WorkerName>,
        value: Value,
        timeout: Option<Duration>,
    ) -> Result<Gathered> {
        let members: BTreeSet<&str> = names.iter().map(WorkerName::as_str).collect();
        let leader = *members.first().ok_or_else(|| Error::usage("nobody is to gather"))?;
        let id = self.begin(&members);
        let limit = timeout.map(|timeout| now() + timeout);
        let part = Part { gatherings: self, agent, id: &id, members, leader, timeout, limit };
        let result = part.take(value);
        let round = self.rounds.lock().open.remove(&id);
        result.map(|()| round.map(|round| round.gathered).unwrap_or_default())
    }

    /// The id of this set's next round.
    fn begin(&self, members: &BTreeSet<&str>) -> String {
        let set = members.iter().copied().collect::<Vec<_>>().join(" ");
        let mut rounds = self.rounds.lock();
        let count = rounds.counts.entry(set.clone()).or_default();
        *count += 1;
        format!("{set} {}", *count - 1)
    }

    fn with_round<T>(&self, id: &str, change: impl FnOnce(&mut Round) -> T) -> T {
        change(self.rounds.lock().open.entry(id.to_owned()).or_default())
    }

    /// On the leader: a worker reports.
    fn reported(&self, arguments: &[Value]) -> Result<Value, String> {
        let [Value::Str(id), Value::Str(name), value, Value::List(names)] = arguments else {
            return Err("a report is an id, a name, a value and a list of names".to_owned());
        };
        let complete = self.with_round(id, |round| round.report(id, name, value, names))?;
        if let Some(complete) = complete {
            complete.complete_empty();
        }
        Ok(Value::Nil)
    }

    /// On a follower: the leader tells what all reported.
    fn told(&self, arguments: &[Value]) -> Result<Value, String> {
        let [Value::Str(id), Value::Map(pairs)] = arguments else {
            return Err("what was gathered is an id and a map by names".to_owned());
        };
        let mut gathered = Gathered::new();
        for (name, value) in pairs {
            let Value::Str(name) = name else {
                return Err("what was gathered has a key that is no name".to_owned());
            };
            gathered.insert(name.clone(), value.clone());
        }
        let first = self.with_round(id, |round| {
            let first = !round.complete.future().is_done();
            if first {
                round.gathered = gathered;
            }
            first.then(|| round.completion())
        });
        if first.is_some_and(|complete| complete.complete_empty()) {
            Ok(Value::Nil)
        } else {
            Err(format!("the result of gathering {id} came a second time"))
        }
    }
}

impl Round {
    /// Notes a report; the promise to complete if it was the last one.
    fn report(
        &mut self,
        id: &str,
        name: &str,
        value: &Value,
        names: &[Value],
    ) -> Result<Option<Arc<Promise>>, String> {
        let is_member = |member: &&Value| matches!(member, Value::Str(member) if member == name);
        if !names.iter().any(|member| is_member(&member)) {
            return Err(format!("worker '{name}' reports to gathering {id}, which leaves it out"));
        }
        if self.gathered.contains_key(name) {
            return Err(format!("worker '{name}' reports a second time to gathering {id}"));
        }
        self.gathered.insert(name.to_owned(), value.clone());
        let all = self.gathered.len() == names.len();
        Ok(all.then(|| self.completion()))
    }

    /// Completing calls out: not under a lock (LOCK-1).
    fn completion(&self) -> Arc<Promise> {
        Arc::clone(&self.complete)
    }
}

/// One worker's part in one gathering.
struct Part<'a> {
    gatherings: &'a Gatherings,
    agent: &'a Agent,
    id: &'a str,
    members: BTreeSet<&'a str>,
    leader: &'a str,
    timeout: Option<Duration>,
    limit: Option<Instant>,
}

impl Part<'_> {
    fn take(&self, value: Value) -> Result<()> {
        let me = self.agent.identity().name.as_str();
        let names = self.members.iter().map(|&name| Value::Str(name.to_owned())).collect();
        let report = [Value::Str(self.id.to_owned()), Value::Str(me.to_owned()), value, Value::List(names)];
        if me == self.leader {
            self.gatherings.reported(&report).map_err(Error::usage)?;
            self.lead(me)
        } else {
            self.follow(&report)
        }
    }

    fn lead(&self, me: &str) -> Result<()> {
        let silent = self.wait(|reported| {
            self.members.iter().copied().filter(|name| !reported.contains_key(*name)).collect()
        });
        if !silent.is_empty() {
            return Err(self.timed_out(&silent));
        }
        let gathered = self.gatherings.with_round(self.id, |round| round.gathered.clone());
        let pairs = gathered.iter().map(|(name, value)| (Value::Str(name.clone()), value.clone())).collect();
        let told = [Value::Str(self.id.to_owned()), Value::Map(pairs)];
        let others = gathered.keys().filter(|name| *name != me);
        let calls: Vec<_> = others.map(|name| (name, self.call(name, TELL, &told))).collect();
        for (name, call) in calls {
            if let Err(error) = call.and_then(|call| plain::outcome(&call))
                && !self.is_forgiven(name)
            {
                return Err(Error::new(error.kind(), format!("worker '{name}' was not told: {error}")));
            }
        }
        Ok(())
    }

    fn follow(&self, report: &[Value; 4]) -> Result<()> {
        let told = self.call(self.leader, REPORT, report).and_then(|call| plain::outcome(&call));
        match told {
            Ok(()) => {}
            Err(_) if self.is_forgiven(self.leader) => return Ok(()),
            Err(error) => return Err(error),
        }
        let silent = self.wait(|_| vec![self.leader]);
        if silent.is_empty() { Ok(()) } else { Err(self.timed_out(&silent)) }
    }

    /// Waits until the round is complete, or all who are `missing` are lost. Returns who is missing when time
    /// is up.
    ///
    /// Whoever stays silent for long is asked for a sign of life, since the death of a worker is only seen by
    /// those who have a connection to it.
    fn wait<'n>(&self, missing: impl Fn(&Gathered) -> Vec<&'n str>) -> Vec<&'n str> {
        let complete = self.gatherings.with_round(self.id, |round| round.complete.future());
        let begin = now();
        let (mut last, mut pause) = (begin, PROBE_AFTER);
        loop {
            let slice = now() + SLICE;
            let until = self.limit.map_or(slice, |limit| limit.min(slice));
            if lend(None, || complete.wait_until(Some(until))) {
                return Vec::new();
            }
            let silent = self.gatherings.with_round(self.id, |round| missing(&round.gathered));
            let gone = self.agent.gone();
            let present: Vec<&str> =
                silent.iter().copied().filter(|name| !self.is_among(name, &gone)).collect();
            let now = now();
            if !silent.is_empty() && present.is_empty() {
                return Vec::new();
            }
            if self.limit.is_some_and(|limit| now >= limit) {
                return silent;
            }
            if now.saturating_duration_since(last) >= pause {
                last = now;
                pause = now.saturating_duration_since(begin).clamp(pause, PROBE_AT_MOST_EVERY);
                for name in present.into_iter().filter(|name| *name != self.agent.identity().name.as_str()) {
                    // What comes of it is told by the agent's verdict.
                    drop(self.call(name, SIGN_OF_LIFE, &[]));
                }
            }
        }
    }

    fn call(&self, to: &str, function: &str, arguments: &[Value]) -> Result<RpcFuture> {
        let rank = self.rank_of(to).ok_or_else(|| Error::usage(format!("there is no worker '{to}'")))?;
        plain::call(self.agent, rank, function, arguments.to_vec(), self.timeout, self.limit)
    }

    /// Whether a worker that did not answer is lost. A call fails with its connection; the verdict comes after
    /// another try to connect.
    fn is_forgiven(&self, name: &str) -> bool {
        let end = now() + VERDICT_AFTER;
        let (never, verdict) = promise();
        loop {
            if self.is_among(name, &self.agent.gone()) {
                return true;
            }
            if now() >= end {
                drop(never);
                return false;
            }
            lend(None, || verdict.wait_until(Some(now() + Duration::from_millis(10))));
        }
    }

    fn is_among(&self, name: &str, ranks: &[Rank]) -> bool {
        self.rank_of(name).is_some_and(|rank| ranks.contains(&rank))
    }

    fn rank_of(&self, name: &str) -> Option<Rank> {
        self.agent.rank_of(&WorkerName::parse(name).ok()?)
    }

    fn timed_out(&self, silent: &[&str]) -> Error {
        let text = format!(
            "worker(s) {} did not come to the gathering of {} in {} ms",
            silent.join(", "),
            self.members.iter().copied().collect::<Vec<_>>().join(", "),
            self.timeout.unwrap_or_default().as_millis()
        );
        Error::new(ErrorKind::Timeout, text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tensorcall_proto::wire::message::FailureKind;

    use crate::agent::{Handler, PeerInfo, ThreadHook};
    use crate::config::AgentConfig;
    use crate::transport::memory::Hub;

    #[derive(Default)]
    struct Gathers(Gatherings);

    impl ThreadHook for Gathers {
        fn run(&self, body: &mut (dyn FnMut() + Send)) {
            body();
        }
    }

    impl Handler for Gathers {
        fn handle(&self, call: InboundCall, responder: Responder) {
            if let Some((_, responder)) = self.0.handle(call, responder) {
                responder.failed(FailureKind::Usage, "no such function".to_owned());
            }
        }
    }

    fn group(size: u32) -> Vec<(Agent, Arc<Gathers>)> {
        let hub = Hub::new();
        let start = |number| {
            let name = WorkerName::parse(&format!("worker{number}")).unwrap();
            let handler = Arc::new(Gathers::default());
            let config = AgentConfig::new(name, Rank::new(number).unwrap());
            let agent =
                Agent::start_in_memory(config, Arc::clone(&handler) as Arc<dyn Handler>, &hub).unwrap();
            (agent, handler)
        };
        let workers: Vec<_> = (0..size).map(start).collect();
        let info = |agent: &Agent| {
            let me = agent.identity();
            PeerInfo::from_contact(me.name.clone(), me.rank, &agent.contact()).unwrap()
        };
        for (agent, _) in &workers {
            agent.open(workers.iter().map(|(agent, _)| info(agent)).collect()).unwrap();
        }
        workers
    }

    fn names(workers: &[(Agent, Arc<Gathers>)]) -> BTreeSet<WorkerName> {
        workers.iter().map(|(agent, _)| agent.identity().name.clone()).collect()
    }

    const SOON: Option<Duration> = Some(Duration::from_secs(20));

    #[test]
    fn everybody_learns_what_each_gave_in_every_round() {
        let workers = group(3);
        let names = names(&workers);

        for round in 0..2 {
            let part = |(number, (agent, handler)): (i64, &(Agent, Arc<Gathers>))| {
                handler.0.gather(agent, &names, Value::Int(10 * round + number), SOON).unwrap()
            };
            let part = &part;
            let gathered: Vec<Gathered> = std::thread::scope(|scope| {
                let threads: Vec<_> =
                    (0..).zip(&workers).map(|worker| scope.spawn(move || part(worker))).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });

            let expected: Gathered =
                (0..3).map(|number| (format!("worker{number}"), Value::Int(10 * round + number))).collect();
            assert_eq!(gathered, [expected.clone(), expected.clone(), expected]);
        }
        assert!(workers.iter().all(|(_, handler)| handler.0.rounds.lock().open.is_empty()));
    }

    #[test]
    fn who_does_not_come_is_named() {
        let workers = group(2);
        let (agent, handler) = &workers[0];

        let error = handler
            .0
            .gather(agent, &names(&workers), Value::Nil, Some(Duration::from_millis(50)))
            .unwrap_err();

        assert_eq!(error.kind(), ErrorKind::Timeout);
        assert!(error.to_string().starts_with("worker(s) worker1 did not come"), "{error}");
    }

    #[test]
    fn a_worker_that_is_lost_is_passed_over() {
        for lost in 0..2 {
            let workers = group(2);
            workers[lost].0.close(false, now());
            let (agent, handler) = &workers[1 - lost];

            handler.0.gather(agent, &names(&workers), Value::Nil, SOON).unwrap();
        }
    }
}
