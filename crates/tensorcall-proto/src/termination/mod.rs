//! Finding out that a group is quiet: graceful shutdown and `sync()` (TERM-1).
//!
//! Every worker that calls shutdown or sync *arrives* at a round. When all live members have arrived,
//! the coordinator (the lowest live rank) asks them in *waves* what they have under way. A member
//! answers a wave when it has nothing outstanding and nothing in processing, with its activity counter.
//! Two successive waves that all members answered with the same counter have a moment between them at
//! which nothing was under way anywhere, in transit included; then the coordinator says [`Quiet`].
//!
//! - O(N) messages per wave and round, none while somebody has yet to arrive, and none while somebody is
//!   busy: a busy member counts again by itself, with a growing pause, and reports when it is done.
//! - A lost coordinator is followed by the next live rank. An epoch is named by its coordinator's rank,
//!   and losses are final, so epochs only grow. Members arrive anew at the new coordinator and tell
//!   which rounds they know to be quiet, so that nobody is stranded who missed a [`Quiet`].
//! - A wave tells which members are gone. A member that had not noticed drops them before it counts, so
//!   that no request of a lost worker starts work behind the coordinator's back.
//!
//! Messages may be repeated, reordered among themselves and overtake calls: each names its round, epoch
//! and wave. `docs/shutdown.md` tells the protocol with its reasons.
//!
//! [`Quiet`]: TerminationMessage::Quiet

mod message;
mod survey;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub use self::message::{Counts, TerminationMessage};
use self::survey::{Next, Survey};
use crate::ids::Rank;

/// How cautious and how patient a [`Termination`] is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// Successive waves that must agree. TERM-1 needs 2, the default; only the simulator plants others.
    pub agreeing_waves: u32,
    /// Pause before a busy member counts again, or a wave follows one that saw activity. Doubles each
    /// time. 1 ms by default.
    pub first_pause: Duration,
    /// The longest such pause, 50 ms by default. Between waves of a large group it grows further, by
    /// 200 us per member.
    pub longest_pause: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            agreeing_waves: 2,
            first_pause: Duration::from_millis(1),
            longest_pause: Duration::from_millis(50),
        }
    }
}

/// What the driver is to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// Send this to a member, unless it is gone.
    Send(Rank, TerminationMessage),
    /// Make sure that the loss of this member is noticed (keep a connection to it): its arrival is
    /// waited for, and a dead worker sends nothing.
    Watch(Rank),
    /// The coordinator knows that this member is gone: close its connection and fail or drop what is
    /// under way with it, before anything else is done. [`Termination::handle_lost`] need not follow.
    PeerGone(Rank),
    /// Take all counts at one moment and give them to [`Termination::handle_counts`].
    TakeCounts,
    /// This round is over: the group was quiet after this worker arrived.
    Quiet {
        /// What [`Termination::arrive`] returned.
        round: u64,
        /// Whether this worker arrived to leave.
        leaving: bool,
    },
}

/// One member that a coordinator waits for, for error texts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WaitingFor {
    /// The member.
    pub rank: Rank,
    /// What it has not done yet.
    pub reason: WaitReason,
}

/// Why a round is not over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitReason {
    /// The member has not called shutdown or sync.
    NotArrived,
    /// The member has something under way, or does not answer (`None`).
    Busy(Option<Counts>),
    /// The member is the coordinator and has not said that the group is quiet.
    Coordinator,
}

/// One member's part in finding out that the group is quiet.
#[derive(Debug)]
pub struct Termination {
    config: Config,
    /// By rank.
    members: Vec<Member>,
    /// Indices of this worker and of the lowest live member.
    me: usize,
    coordinator: usize,
    live: usize,
    /// Members that are lost or have left, in the order of news.
    gone: Vec<Rank>,
    /// The last round this worker arrived at; the last one it knows to be quiet.
    round: u64,
    quiet: u64,
    leaving: bool,
    /// The wave that this worker has yet to answer calmly, and the last one it was asked in.
    asked: Option<Asked>,
    last_asked: Option<Tag>,
    /// What the counts that the driver is taking are for.
    counting: Option<Tag>,
    survey: Option<Survey>,
    /// Number of the last wave that this worker started.
    wave: u64,
    timer: Option<Instant>,
    effects: VecDeque<Effect>,
    ignored: u64,
}

#[derive(Debug)]
struct Member {
    rank: Rank,
    standing: Standing,
    /// The last round it arrived at, and the last one it knows to be quiet, as far as it told this
    /// worker.
    arrived: u64,
    quiet: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Standing {
    Live,
    Lost,
    Left,
}

/// Names a wave. The epoch comes first: order is by age within a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Tag {
    epoch: u64,
    wave: u64,
    round: u64,
}

/// A wave that waits for this worker's answer.
#[derive(Debug)]
struct Asked {
    tag: Tag,
    told_busy: bool,
    pause: Duration,
}

impl Termination {
    /// Knows the group, `me` included, and waits for this worker to arrive.
    pub fn new(me: Rank, members: impl IntoIterator<Item = Rank>, config: Config) -> Self {
        let mut ranks: Vec<Rank> = members.into_iter().chain([me]).collect();
        ranks.sort_unstable();
        ranks.dedup();
        let me = ranks.partition_point(|&rank| rank < me);
        Self {
            config,
            me,
            coordinator: 0,
            live: ranks.len(),
            members: ranks
                .into_iter()
                .map(|rank| Member { rank, standing: Standing::Live, arrived: 0, quiet: 0 })
                .collect(),
            gone: Vec::new(),
            round: 0,
            quiet: 0,
            leaving: false,
            asked: None,
            last_asked: None,
            counting: None,
            survey: None,
            wave: 0,
            timer: None,
            effects: VecDeque::new(),
            ignored: 0,
        }
    }

    /// This worker called shutdown (`leaving`) or sync. Returns the round, which ends with
    /// [`Effect::Quiet`]. Doing so again before that is harmless and returns the same round, and so is
    /// arriving after having left.
    pub fn arrive(&mut self, now: Instant, leaving: bool) -> u64 {
        if self.is_waiting() {
            self.leaving |= leaving;
        } else if !self.has_left() {
            self.leaving = leaving;
            self.round += 1;
            self.members[self.me].arrived = self.round;
            if self.is_coordinator() {
                self.begin_survey(now);
            } else {
                self.send_arrive();
            }
        }
        self.round
    }

    /// A member said something.
    pub fn handle_message(&mut self, now: Instant, from: Rank, message: TerminationMessage) {
        let Some(from) = self.find(from).filter(|&from| self.is_live(from) && from != self.me) else {
            self.ignored += 1;
            return;
        };
        match message {
            TerminationMessage::Arrive { round, epoch, quiet } if epoch == self.epoch_of(self.me) => {
                self.handle_arrive(now, from, round, quiet);
            }
            TerminationMessage::Wave { round, epoch, wave, gone } if epoch == self.epoch_of(from) => {
                self.handle_wave(now, from, Tag { epoch, wave, round }, &gone);
            }
            TerminationMessage::Report { round, epoch, wave, counts } if epoch == self.epoch_of(self.me) => {
                self.handle_report(now, from, Tag { epoch, wave, round }, counts);
            }
            TerminationMessage::Quiet { round, epoch } if epoch == self.epoch_of(from) => {
                self.handle_quiet(from, round);
            }
            _ => self.ignored += 1,
        }
    }

    /// A member is lost. Known losses are ignored.
    pub fn handle_lost(&mut self, now: Instant, rank: Rank) {
        self.handle_gone(now, rank, Standing::Lost);
    }

    /// A member said goodbye: it is gone, but not lost.
    pub fn handle_goodbye(&mut self, now: Instant, rank: Rank) {
        self.handle_gone(now, rank, Standing::Left);
    }

    /// Answers [`Effect::TakeCounts`].
    pub fn handle_counts(&mut self, now: Instant, counts: Counts) {
        let counted_for = self.counting.take();
        let Some(asked) = &mut self.asked else { return };
        let tag = asked.tag;
        if counted_for != Some(tag) {
            // Counts taken before a wave must not answer it: it would not come after the wave before.
            self.take_counts();
            return;
        }
        if counts.is_calm() {
            self.asked = None;
            self.timer = None;
        } else {
            self.timer = Some(now + asked.pause);
            asked.pause = (asked.pause * 2).min(self.config.longest_pause);
            if std::mem::replace(&mut asked.told_busy, true) {
                return;
            }
        }
        self.report(now, tag, counts);
    }

    /// This worker may have become idle: counts again now instead of after the pause. Optional.
    pub fn handle_idle(&mut self) {
        if self.asked.is_some() && self.timer.take().is_some() {
            self.take_counts();
        }
    }

    /// Time has passed.
    pub fn handle_timeout(&mut self, now: Instant) {
        if self.timer.is_none_or(|timer| timer > now) {
            return;
        }
        self.timer = None;
        if self.asked.is_some() {
            self.take_counts();
        } else if self.survey.is_some() {
            self.start_wave();
        }
    }

    /// When [`Termination::handle_timeout`] has something to do next.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.timer
    }

    /// What the driver is to do next.
    pub fn poll_effect(&mut self) -> Option<Effect> {
        self.effects.pop_front()
    }

    /// Whether this worker has arrived at a round that is not over.
    pub fn is_waiting(&self) -> bool {
        self.quiet < self.round
    }

    /// Whether a round that this worker arrived at to leave is over.
    pub fn has_left(&self) -> bool {
        self.leaving && !self.is_waiting()
    }

    /// The lowest live rank, in this worker's view.
    pub fn coordinator(&self) -> Rank {
        self.members[self.coordinator].rank
    }

    /// Whether this worker coordinates, in its own view.
    pub fn is_coordinator(&self) -> bool {
        self.coordinator == self.me
    }

    /// Members that are neither lost nor have left, this worker included.
    pub fn live(&self) -> impl Iterator<Item = Rank> + '_ {
        self.with_standing(Standing::Live).map(|(_, rank)| rank)
    }

    /// Members that are lost, those that the coordinator said to be gone included.
    pub fn lost(&self) -> impl Iterator<Item = Rank> + '_ {
        self.with_standing(Standing::Lost).map(|(_, rank)| rank)
    }

    /// Messages that were ignored because they are old, repeated or not from a live member.
    pub fn ignored(&self) -> u64 {
        self.ignored
    }

    /// Who keeps the round from ending, in this worker's view: only a coordinator knows more than that
    /// the coordinator does. Empty when this worker does not wait. Looks at every member.
    pub fn waiting_for(&self) -> Vec<WaitingFor> {
        if !self.is_waiting() {
            return Vec::new();
        }
        let Some(survey) = &self.survey else {
            return vec![WaitingFor { rank: self.coordinator(), reason: WaitReason::Coordinator }];
        };
        let live = self.with_standing(Standing::Live);
        live.filter_map(|(index, rank)| {
            let reason = survey.wait_reason(index, self.members[index].arrived >= self.round)?;
            Some(WaitingFor { rank, reason })
        })
        .collect()
    }

    fn handle_arrive(&mut self, now: Instant, from: usize, round: u64, quiet: u64) {
        let member = &mut self.members[from];
        let before = member.arrived;
        member.arrived = before.max(round);
        member.quiet = member.quiet.max(quiet);
        if self.is_waiting() && quiet >= self.round {
            // A former coordinator told `from`, which was in the same waves as this worker.
            self.conclude();
        }
        if round <= self.quiet {
            self.tell_if_quiet(from);
        } else if before < self.round && round >= self.round {
            let next = self.survey.as_mut().map(Survey::handle_arrival);
            self.go_on(now, next);
        }
    }

    fn handle_wave(&mut self, now: Instant, from: usize, tag: Tag, gone: &[Rank]) {
        let is_next = self.last_asked.is_none_or(|last| last < tag);
        if from != self.coordinator || !self.is_waiting() || tag.round != self.round || !is_next {
            self.ignored += 1;
            return;
        }
        for &rank in gone {
            let Some(index) = self.find(rank) else { continue };
            if index != self.me && index != from && self.is_live(index) {
                self.effects.push_back(Effect::PeerGone(rank));
                self.handle_gone(now, rank, Standing::Lost);
            }
        }
        self.ask(tag);
    }

    fn handle_report(&mut self, now: Instant, from: usize, tag: Tag, counts: Counts) {
        let survey = self.survey.as_mut().filter(|_| tag.round == self.round);
        let next = survey.and_then(|survey| survey.handle_report(from, tag.wave, counts));
        if next.is_none() {
            self.ignored += 1;
        }
        self.go_on(now, next);
    }

    fn handle_quiet(&mut self, from: usize, round: u64) {
        if from == self.coordinator && self.is_waiting() && round == self.round {
            self.conclude();
        } else {
            self.ignored += 1;
        }
    }

    fn handle_gone(&mut self, now: Instant, rank: Rank, standing: Standing) {
        let Some(index) = self.find(rank).filter(|&index| self.is_live(index) && index != self.me) else {
            return;
        };
        self.members[index].standing = standing;
        self.live -= 1;
        self.gone.push(rank);
        if index == self.coordinator {
            self.follow_next_coordinator(now);
        } else {
            let had_arrived = self.members[index].arrived >= self.round;
            let next = self.survey.as_mut().map(|survey| survey.handle_gone(index, had_arrived));
            self.go_on(now, next);
        }
    }

    fn follow_next_coordinator(&mut self, now: Instant) {
        while !self.is_live(self.coordinator) {
            self.coordinator += 1;
        }
        self.asked = None;
        self.timer = None;
        if self.is_coordinator() {
            for index in 0..self.members.len() {
                // It may have arrived here before this worker learned that its round is over.
                self.tell_if_quiet(index);
            }
            if self.is_waiting() {
                self.begin_survey(now);
            }
        } else if self.round > 0 && !self.has_left() {
            // Also when nothing is waited for: the new coordinator may have missed that a round is over.
            self.send_arrive();
        }
    }

    fn begin_survey(&mut self, now: Instant) {
        let mut missing = 0;
        for member in &self.members {
            if member.standing == Standing::Live && member.arrived < self.round {
                missing += 1;
                self.effects.push_back(Effect::Watch(member.rank));
            }
        }
        let survey = Survey::new(self.members.len(), self.live, missing, self.config);
        let next = survey.begin();
        self.survey = Some(survey);
        self.go_on(now, Some(next));
    }

    /// Does what the survey wants next.
    fn go_on(&mut self, now: Instant, next: Option<Next>) {
        match next {
            Some(Next::Wave) => self.start_wave(),
            Some(Next::Pause(pause)) => self.timer = Some(now + pause),
            Some(Next::Quiet) => self.conclude(),
            Some(Next::Wait) | None => {}
        }
    }

    fn start_wave(&mut self) {
        let Some(survey) = &mut self.survey else { return };
        self.wave += 1;
        survey.start_wave(self.wave);
        let tag = Tag { epoch: self.epoch_of(self.me), wave: self.wave, round: self.round };
        let Tag { epoch, wave, round } = tag;
        let gone: Arc<[Rank]> = self.gone.as_slice().into();
        for index in 0..self.members.len() {
            if index != self.me && self.is_live(index) {
                self.send(index, TerminationMessage::Wave { round, epoch, wave, gone: Arc::clone(&gone) });
            }
        }
        self.ask(tag);
    }

    /// The round is over: it is known that the group was quiet after this worker arrived.
    fn conclude(&mut self) {
        self.quiet = self.round;
        self.asked = None;
        self.timer = None;
        if self.survey.take().is_some() {
            for index in 0..self.members.len() {
                // Who is not known to have arrived will ask, and be answered then.
                let has_arrived = self.members[index].arrived >= self.round;
                if index != self.me && has_arrived && self.is_live(index) {
                    self.send_quiet(index, self.round);
                }
            }
        }
        self.effects.push_back(Effect::Quiet { round: self.round, leaving: self.leaving });
    }

    /// This worker is asked in a wave, perhaps by itself.
    fn ask(&mut self, tag: Tag) {
        self.asked = Some(Asked { tag, told_busy: false, pause: self.config.first_pause });
        self.last_asked = Some(tag);
        self.timer = None;
        self.take_counts();
    }

    fn take_counts(&mut self) {
        if self.counting.is_none()
            && let Some(asked) = &self.asked
        {
            self.counting = Some(asked.tag);
            self.effects.push_back(Effect::TakeCounts);
        }
    }

    fn report(&mut self, now: Instant, tag: Tag, counts: Counts) {
        if self.is_coordinator() {
            self.handle_report(now, self.me, tag, counts);
        } else {
            let Tag { epoch, wave, round } = tag;
            self.send(self.coordinator, TerminationMessage::Report { round, epoch, wave, counts });
        }
    }

    fn send_arrive(&mut self) {
        let (round, quiet, epoch) = (self.round, self.quiet, self.epoch_of(self.coordinator));
        self.send(self.coordinator, TerminationMessage::Arrive { round, epoch, quiet });
    }

    /// Tells a member that waits for a round which this worker knows to be over.
    fn tell_if_quiet(&mut self, index: usize) {
        let Member { arrived, quiet, .. } = self.members[index];
        if index != self.me && self.is_live(index) && quiet < arrived && arrived <= self.quiet {
            self.send_quiet(index, arrived);
        }
    }

    fn send_quiet(&mut self, to: usize, round: u64) {
        let epoch = self.epoch_of(self.me);
        self.send(to, TerminationMessage::Quiet { round, epoch });
    }

    fn send(&mut self, to: usize, message: TerminationMessage) {
        self.effects.push_back(Effect::Send(self.members[to].rank, message));
    }

    fn find(&self, rank: Rank) -> Option<usize> {
        self.members.binary_search_by_key(&rank, |member| member.rank).ok()
    }

    fn is_live(&self, index: usize) -> bool {
        self.members[index].standing == Standing::Live
    }

    /// An epoch is named by the rank of its coordinator.
    fn epoch_of(&self, index: usize) -> u64 {
        u64::from(self.members[index].rank.get())
    }

    fn with_standing(&self, standing: Standing) -> impl Iterator<Item = (usize, Rank)> + '_ {
        let all = self.members.iter().enumerate();
        all.filter(move |(_, member)| member.standing == standing).map(|(index, member)| (index, member.rank))
    }
}

#[cfg(test)]
mod tests;
