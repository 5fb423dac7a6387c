//! [`Engine`]: one worker's part in one backward pass.

use std::collections::{BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use super::error::AutogradError;
use super::message::{Pass, Step};
use super::reach::Reach;
use super::{Content, Effect, Plan, Work};
use crate::ids::Rank;

/// How long a worker waits for gradients before it asks whether they will come.
const ASK_AFTER: Duration = Duration::from_millis(250);

/// One worker's part in one backward pass.
#[derive(Debug)]
pub(super) struct Engine<G, E, A> {
    pass: Pass,
    me: Rank,
    /// Whether the pass began here.
    starter: bool,
    /// Whose call told us of the pass. It is answered when our part is done, and those of all that we told.
    parent: Option<(Rank, Option<A>)>,
    /// Whom we told of it.
    told: BTreeSet<Rank>,
    /// Calls that have not been answered. The first that a worker gets of a pass is answered when its part
    /// is done, all others at once.
    unanswered: usize,
    plan: Planned<G>,
    /// What came before the plan.
    early: Early<G>,
    /// The recv functions that the local engine is at.
    wanted: Vec<u64>,
    /// The ranks whose probes were passed on.
    probes: BTreeSet<Rank>,
    /// Whether a probe of ours was sent.
    probed: bool,
    /// Whether this worker waits for itself.
    cyclic: bool,
    progress: Instant,
    turn: Turn,
    failed: Option<E>,
    stage: Stage,
}

/// How far the local engine is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    New,
    Planned,
    /// All that is left is to tell the local engine.
    Ending,
    Ended,
}

/// Whose turn it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Turn {
    /// Nobody's: there is nothing to do here.
    Idle,
    /// A thread has been asked for.
    Called,
    /// The local engine is at work.
    Busy,
}

#[derive(Debug)]
struct Planned<G> {
    sources: Vec<Source<G>>,
    recvs: Vec<Recv>,
    /// Sources that have not arrived.
    missing: usize,
    /// Whether there were any gradients: the local engine has something to finish.
    touched: bool,
}

#[derive(Debug)]
struct Source<G> {
    /// `None` for the roots.
    message: Option<u64>,
    to: Rank,
    state: SourceState<G>,
    asked: bool,
}

#[derive(Debug)]
enum SourceState<G> {
    Waiting,
    Arrived(Option<G>),
    Executed,
}

#[derive(Debug)]
struct Recv {
    message: u64,
    from: Rank,
    reach: Reach,
    /// Sources in its reach that have not arrived.
    missing: usize,
    /// Whether the local engine may have something for it.
    touched: bool,
    sent: bool,
}

#[derive(Debug)]
struct Early<G> {
    gradients: Vec<(u64, Option<G>)>,
    asked: Vec<(Rank, u64)>,
    probes: Vec<Rank>,
}

type Effects<G, E, A> = VecDeque<Effect<G, E, A>>;

impl<G, E: Clone + From<AutogradError>, A> Engine<G, E, A> {
    pub(super) fn new(me: Rank, pass: Pass, starter: bool, now: Instant) -> Self {
        Self {
            pass,
            me,
            starter,
            parent: None,
            told: BTreeSet::new(),
            unanswered: 0,
            plan: Planned { sources: Vec::new(), recvs: Vec::new(), missing: 0, touched: false },
            early: Early { gradients: Vec::new(), asked: Vec::new(), probes: Vec::new() },
            wanted: Vec::new(),
            probes: BTreeSet::new(),
            probed: false,
            cyclic: false,
            progress: now,
            turn: Turn::Idle,
            failed: None,
            stage: Stage::New,
        }
    }

    /// A call of another worker. Says what to answer at once, if anything.
    pub(super) fn handle_call(
        &mut self,
        now: Instant,
        from: Rank,
        step: Step,
        content: Content<G, E>,
        answer: A,
        out: &mut Effects<G, E, A>,
    ) {
        if let Some(error) = &self.failed {
            let result = if step == Step::Abort { Ok(()) } else { Err(error.clone()) };
            return out.push_back(Effect::Answer(answer, result));
        }
        let mut answer = Some(answer);
        if !self.starter && self.parent.is_none() {
            self.parent = Some((from, answer.take()));
        }
        match (step, content) {
            (Step::Begin, _) => self.progress = now,
            (Step::Gradient { message }, Content::Gradient(gradient)) => {
                self.handle_gradient(now, message, Some(gradient));
            }
            (Step::Gradient { message } | Step::NoGradient { message }, _) => {
                self.handle_gradient(now, message, None);
            }
            (Step::Ask { message }, _) => self.handle_ask(from, message, out),
            (Step::Probe { origin }, _) => self.handle_probe(origin, out),
            (Step::Abort, Content::Error(error)) => self.fail(error, out),
            (Step::Abort, _) => self.fail(AutogradError::Over.into(), out),
        }
        if let Some(answer) = answer {
            out.push_back(Effect::Answer(answer, Ok(())));
        }
        self.advance(out);
    }

    /// The answer to a call of ours.
    pub(super) fn handle_answer(
        &mut self,
        now: Instant,
        step: Step,
        result: Result<(), E>,
        out: &mut Effects<G, E, A>,
    ) {
        if step == Step::Abort {
            return;
        }
        self.unanswered = self.unanswered.saturating_sub(1);
        match result {
            Err(error) => self.fail(error, out),
            // That a worker that was asked is there is no progress.
            Ok(()) if matches!(step, Step::Ask { .. } | Step::Probe { .. }) => {}
            Ok(()) => self.progress = now,
        }
        self.advance(out);
    }

    /// A worker is lost.
    pub(super) fn handle_lost(&mut self, rank: Rank, error: E, out: &mut Effects<G, E, A>) {
        let parent = self.parent.as_ref().map(|(rank, _)| *rank);
        if self.stage < Stage::Ending
            && (self.told.contains(&rank) || parent == Some(rank) || self.pass.id.creator == rank)
        {
            self.fail(error, out);
            self.advance(out);
        }
    }

    /// This worker ends.
    pub(super) fn handle_end(&mut self, error: E, out: &mut Effects<G, E, A>) {
        self.fail(error, out);
        self.advance(out);
    }

    /// What a thread that [`Effect::Work`] asked for is to do; `None` if that is settled meanwhile.
    pub(super) fn take_work(&mut self, out: &mut Effects<G, E, A>) -> Option<Work<G, E>> {
        if self.turn != Turn::Called {
            return None;
        }
        self.turn = Turn::Busy;
        loop {
            if self.is_over() {
                self.stage = Stage::Ending;
                return Some(Work::End(self.outcome()));
            }
            if self.stage == Stage::New {
                return Some(Work::Plan);
            }
            if !self.may_batch(out) {
                self.turn = Turn::Idle;
                return None;
            }
            if let Some(work) = self.next_batch(out) {
                return Some(work);
            }
        }
    }

    /// The local engine has planned.
    pub(super) fn handle_planned(&mut self, now: Instant, plan: Result<Plan, E>, out: &mut Effects<G, E, A>) {
        self.rest(now);
        match plan {
            Ok(plan) if self.failed.is_none() => self.follow(plan, out),
            Ok(_) => {}
            Err(error) => self.fail(error, out),
        }
        self.advance(out);
    }

    /// The local engine has the gradients of those recv functions that were wanted.
    pub(super) fn handle_vjp_done(
        &mut self,
        now: Instant,
        gradients: Result<Vec<(u64, Option<G>)>, E>,
        out: &mut Effects<G, E, A>,
    ) {
        self.rest(now);
        match gradients {
            Ok(gradients) if self.failed.is_none() => {
                let unnamed = std::mem::take(&mut self.wanted).into_iter().map(|message| (message, None));
                for (message, gradient) in gradients.into_iter().chain(unnamed) {
                    self.send(message, gradient, out);
                }
            }
            Ok(_) => {}
            Err(error) => self.fail(error, out),
        }
        self.advance(out);
    }

    /// The local engine knows that the pass is over. Returns how it ended, and the messages whose gradients
    /// were sent.
    pub(super) fn handle_ended(&mut self, out: &mut Effects<G, E, A>) -> (Result<(), E>, Vec<u64>) {
        self.stage = Stage::Ended;
        let outcome = self.outcome();
        if let Some((_, Some(answer))) = self.parent.take() {
            out.push_back(Effect::Answer(answer, outcome.clone()));
        }
        if self.starter {
            out.push_back(Effect::Ended(self.pass.id, outcome.clone()));
        }
        (outcome, self.plan.recvs.iter().map(|recv| recv.message).collect())
    }

    /// Time has passed.
    pub(super) fn handle_time(&mut self, now: Instant, out: &mut Effects<G, E, A>) {
        if !self.is_waiting() {
            return;
        }
        let waited = now.saturating_duration_since(self.progress);
        if self.patience().is_some_and(|patience| waited >= patience) {
            let missing = self.plan.waiting().filter_map(|source| Some((source.message?, source.to)));
            let missing = missing.collect();
            let millis = u64::try_from(waited.as_millis()).unwrap_or(u64::MAX);
            self.fail(AutogradError::Stalled { millis, missing, answers: self.unanswered }.into(), out);
            self.advance(out);
        } else if waited >= ASK_AFTER {
            self.ask(out);
        }
    }

    /// When [`handle_time`](Self::handle_time) has something to do.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        if !self.is_waiting() {
            return None;
        }
        let asks = self.plan.waiting().any(|source| !source.asked);
        let ask = asks.then(|| self.progress + ASK_AFTER);
        let end = self.patience().and_then(|patience| self.progress.checked_add(patience));
        ask.into_iter().chain(end).min()
    }

    fn patience(&self) -> Option<Duration> {
        self.pass.patience_us.map(Duration::from_micros)
    }

    /// Whether others have to do something before this worker can.
    fn is_waiting(&self) -> bool {
        self.turn == Turn::Idle && self.stage < Stage::Ending && self.failed.is_none()
    }

    /// The local engine has done what it was at.
    fn rest(&mut self, now: Instant) {
        self.turn = Turn::Idle;
        self.progress = now;
    }

    fn handle_gradient(&mut self, now: Instant, message: u64, gradient: Option<G>) {
        self.progress = now;
        if self.stage == Stage::New {
            self.early.gradients.push((message, gradient));
        } else {
            self.plan.arrive(Some(message), gradient);
        }
    }

    /// Somebody waits for the gradients of what it sent here.
    fn handle_ask(&mut self, from: Rank, message: u64, out: &mut Effects<G, E, A>) {
        if self.stage == Stage::New {
            self.early.asked.push((from, message));
        } else if !self.plan.recvs.iter().any(|recv| recv.message == message) {
            self.call(from, Step::NoGradient { message }, Content::Nothing, out);
        }
    }

    fn handle_probe(&mut self, origin: Rank, out: &mut Effects<G, E, A>) {
        if self.stage == Stage::New {
            self.early.probes.push(origin);
        } else if origin == self.me {
            self.cyclic = true;
        } else if self.probes.insert(origin) {
            self.pass_on(origin, out);
        }
    }

    /// Sends a probe to all whose gradients are missing.
    fn pass_on(&mut self, origin: Rank, out: &mut Effects<G, E, A>) {
        let to: BTreeSet<_> = self.plan.waiting().map(|source| source.to).collect();
        for to in to {
            self.call(to, Step::Probe { origin }, Content::Nothing, out);
        }
    }

    fn ask(&mut self, out: &mut Effects<G, E, A>) {
        let mut asked = Vec::new();
        for source in &mut self.plan.sources {
            if let (SourceState::Waiting, Some(message), false) =
                (&source.state, source.message, source.asked)
            {
                source.asked = true;
                asked.push((source.to, message));
            }
        }
        for (to, message) in asked {
            self.call(to, Step::Ask { message }, Content::Nothing, out);
        }
    }

    /// The plan is there: takes in what came before it, and tells the others, unless they will be told by
    /// what they are sent anyway.
    fn follow(&mut self, plan: Plan, out: &mut Effects<G, E, A>) {
        self.stage = Stage::Planned;
        let sends = plan.sends.iter().map(|send| send.1);
        let others = sends.chain(plan.recvs.iter().map(|recv| recv.from)).chain(plan.known.iter().copied());
        let parent = self.parent.as_ref().map(|(rank, _)| *rank);
        self.told = others.filter(|&rank| rank != self.me && Some(rank) != parent).collect();
        self.plan = Planned::new(plan, self.me);
        let unreached = self.plan.recvs.iter().filter(|recv| recv.reach.len() == 0);
        let unreached: Vec<_> = unreached.map(|recv| (recv.message, recv.from)).collect();
        for (message, gradient) in std::mem::take(&mut self.early.gradients) {
            self.plan.arrive(Some(message), gradient);
        }
        let mut untold = self.told.clone();
        for (message, from) in unreached {
            untold.remove(&from);
            self.send(message, None, out);
        }
        if self.plan.missing == 0 || self.plan.waits_for_those_who_wait() {
            // The next batch runs at once: these hear of the pass by their gradients.
            for recv in self.plan.recvs.iter().filter(|recv| recv.is_ready()) {
                untold.remove(&recv.from);
            }
        }
        for to in untold {
            self.call(to, Step::Begin, Content::Nothing, out);
        }
        for (from, message) in std::mem::take(&mut self.early.asked) {
            self.handle_ask(from, message, out);
        }
        for origin in std::mem::take(&mut self.early.probes) {
            self.handle_probe(origin, out);
        }
    }

    /// Looks what is to be done next here, and asks for a thread if that is up to the local engine.
    pub(super) fn advance(&mut self, out: &mut Effects<G, E, A>) {
        if self.turn != Turn::Idle {
            return;
        }
        let over = self.stage < Stage::Ending && self.is_over();
        if over {
            self.stage = Stage::Ending;
        }
        let has_work = match self.stage {
            Stage::New => true,
            Stage::Planned => self.may_batch(out),
            Stage::Ending => over,
            Stage::Ended => false,
        };
        if has_work {
            self.turn = Turn::Called;
            out.push_back(Effect::Work(self.pass));
        }
    }

    /// Whether all that is left is to tell the local engine: the pass has failed, or this worker's part and
    /// those of all that it told are done.
    fn is_over(&self) -> bool {
        let done = self.stage == Stage::Planned && self.unanswered == 0 && self.plan.is_done();
        self.stage == Stage::Ending || self.failed.is_some() || done
    }

    fn outcome(&self) -> Result<(), E> {
        self.failed.clone().map_or(Ok(()), Err)
    }

    /// Whether sources can be run now: all of them have arrived, or a cycle makes it necessary that some
    /// go first.
    fn may_batch(&mut self, out: &mut Effects<G, E, A>) -> bool {
        if self.plan.missing == 0 {
            return !self.plan.is_done();
        }
        if !self.plan.recvs.iter().any(Recv::is_ready) {
            return false;
        }
        if self.cyclic || self.plan.waits_for_those_who_wait() {
            return true;
        }
        if !std::mem::replace(&mut self.probed, true) {
            self.pass_on(self.me, out);
        }
        false
    }

    /// Takes what runs next. What turns out to have no gradient without running anything is sent at once.
    fn next_batch(&mut self, out: &mut Effects<G, E, A>) -> Option<Work<G, E>> {
        let batch = self.plan.take_batch();
        for message in batch.untouched {
            self.send(message, None, out);
        }
        // The last batch is told even if it is empty: the gradients of the leaves are taken in with it.
        let commits = batch.last && self.plan.touched;
        if batch.arrived.is_empty() && batch.wanted.is_empty() && !commits {
            return None;
        }
        self.wanted.clone_from(&batch.wanted);
        Some(Work::Vjp { arrived: batch.arrived, wanted: batch.wanted, last: batch.last })
    }

    /// Sends what a recv function has, once.
    fn send(&mut self, message: u64, gradient: Option<G>, out: &mut Effects<G, E, A>) {
        let recv = self.plan.recvs.iter_mut().find(|recv| recv.message == message && !recv.sent);
        let Some(recv) = recv else { return };
        recv.sent = true;
        let to = recv.from;
        match gradient {
            Some(gradient) => {
                self.call(to, Step::Gradient { message }, Content::Gradient(gradient), out);
            }
            None => self.call(to, Step::NoGradient { message }, Content::Nothing, out),
        }
    }

    fn call(&mut self, to: Rank, step: Step, content: Content<G, E>, out: &mut Effects<G, E, A>) {
        self.unanswered += 1;
        out.push_back(Effect::Call { pass: self.pass, to, step, content });
    }

    /// The pass fails here. Everybody learns it: those we told by [`Step::Abort`], who told us by its answer.
    fn fail(&mut self, error: E, out: &mut Effects<G, E, A>) {
        if self.failed.is_some() || self.stage >= Stage::Ending {
            return;
        }
        for to in self.told.clone() {
            self.call(to, Step::Abort, Content::Error(error.clone()), out);
        }
        if let Some((_, answer)) = &mut self.parent
            && let Some(answer) = answer.take()
        {
            out.push_back(Effect::Answer(answer, Err(error.clone())));
        }
        self.plan = Planned { sources: Vec::new(), recvs: Vec::new(), missing: 0, touched: false };
        self.early.gradients.clear();
        self.failed = Some(error);
    }
}

struct Batch<G> {
    arrived: Vec<(Option<u64>, Option<G>)>,
    wanted: Vec<u64>,
    untouched: Vec<u64>,
    last: bool,
}

impl Recv {
    fn is_ready(&self) -> bool {
        !self.sent && self.missing == 0
    }
}

impl<G> Planned<G> {
    fn new(plan: Plan, me: Rank) -> Self {
        let waiting =
            |(message, to)| Source { message: Some(message), to, state: SourceState::Waiting, asked: false };
        let mut sources: Vec<_> = plan.sends.into_iter().map(waiting).collect();
        let missing = sources.len();
        if plan.roots {
            let state = SourceState::Arrived(None);
            sources.push(Source { message: None, to: me, state, asked: false });
        }
        let recv = |recv: super::PlannedRecv| {
            let reach = Reach::of(&recv.reach, sources.len());
            let missing = (0..missing).filter(|&source| reach.has(source)).count();
            let touched = plan.roots && reach.has(sources.len() - 1);
            Recv { message: recv.message, from: recv.from, reach, missing, touched, sent: false }
        };
        let recvs = plan.recvs.into_iter().map(recv).collect();
        Self { sources, recvs, missing, touched: plan.roots }
    }

    fn waiting(&self) -> impl Iterator<Item = &Source<G>> {
        self.sources.iter().filter(|source| matches!(source.state, SourceState::Waiting))
    }

    /// The gradients of a message have come, or it is known that there are none. Only once; what is not
    /// known is of a call that never was.
    fn arrive(&mut self, message: Option<u64>, gradient: Option<G>) {
        let found = self.sources.iter_mut().enumerate().find(|(_, source)| source.message == message);
        let Some((index, source)) = found else { return };
        if !matches!(source.state, SourceState::Waiting) {
            return;
        }
        let some = gradient.is_some();
        source.state = SourceState::Arrived(gradient);
        self.missing -= 1;
        self.touched |= some;
        for recv in self.recvs.iter_mut().filter(|recv| recv.reach.has(index)) {
            recv.missing -= 1;
            recv.touched |= some;
        }
    }

    fn is_done(&self) -> bool {
        self.sources.iter().all(|source| matches!(source.state, SourceState::Executed))
            && self.recvs.iter().all(|recv| recv.sent)
    }

    /// Whether some worker whose gradients are missing waits for gradients from here: a cycle of two, such
    /// as a call and its answer make.
    fn waits_for_those_who_wait(&self) -> bool {
        let unsent = self.recvs.iter().filter(|recv| !recv.sent);
        let waits: BTreeSet<_> = unsent.map(|recv| recv.from).collect();
        self.waiting().any(|source| waits.contains(&source.to))
    }

    /// Takes all that have arrived, or those that the recv functions that are ready need.
    fn take_batch(&mut self) -> Batch<G> {
        let last = self.missing == 0;
        let ready: Vec<_> = self.recvs.iter().filter(|recv| recv.is_ready()).collect();
        let (mut arrived, mut executed) = (Vec::new(), Vec::new());
        for (index, source) in self.sources.iter_mut().enumerate() {
            let needed = last || ready.iter().any(|recv| recv.reach.has(index));
            if !needed {
                continue;
            }
            if let SourceState::Arrived(gradient) = &mut source.state {
                // The roots have no gradient, and are run.
                if gradient.is_some() || source.message.is_none() {
                    arrived.push((source.message, gradient.take()));
                }
                executed.push(index);
            }
        }
        for index in executed {
            self.sources[index].state = SourceState::Executed;
        }
        let ready = self.recvs.iter().filter(|recv| recv.is_ready());
        let (wanted, untouched): (Vec<_>, Vec<_>) = ready.partition(|recv| recv.touched);
        let message = |recv: &Recv| recv.message;
        Batch {
            arrived,
            wanted: wanted.into_iter().map(message).collect(),
            untouched: untouched.into_iter().map(message).collect(),
            last,
        }
    }
}
