//! The coordinator's side of a round: who has arrived, and do two waves agree.

use std::time::Duration;

use super::{Config, Counts, WaitReason};

/// What a coordinator learns in one round. Members go by index.
#[derive(Debug)]
pub(super) struct Survey {
    config: Config,
    stage: Stage,
    answers: Vec<Answer>,
    /// Members that are neither lost nor have left.
    live: usize,
    /// Successive waves so far that agree with each other.
    agreed: u32,
    pause: Duration,
}

/// What a coordinator is to do after it learned something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    /// Wait for more.
    Wait,
    /// Send the next wave.
    Wave,
    /// Send the next wave after this pause.
    Pause(Duration),
    /// The group is quiet.
    Quiet,
}

#[derive(Debug)]
enum Stage {
    /// So many live members have yet to arrive.
    Arriving { missing: usize },
    /// A wave is out.
    Asking(Wave),
    /// Between waves.
    Pausing,
}

#[derive(Debug)]
struct Wave {
    number: u64,
    /// Live members that have yet to answer calmly.
    unanswered: usize,
    /// Whether an answer differs from that of the same member in the wave before.
    has_moved: bool,
    /// Whether a member was lost since it began. Members that had answered by then may have heard
    /// from the lost one later, so the wave counts for nothing.
    is_void: bool,
}

/// What one member last answered, with the wave.
#[derive(Debug, Clone, Default)]
struct Answer {
    calm: Option<(u64, u64)>,
    busy: Option<(u64, Counts)>,
}

impl Survey {
    /// Of `members`, `live` are there and `missing` of these have yet to arrive.
    pub(super) fn new(members: usize, live: usize, missing: usize, config: Config) -> Self {
        Self {
            config,
            stage: Stage::Arriving { missing },
            answers: vec![Answer::default(); members],
            live,
            agreed: 0,
            pause: config.first_pause,
        }
    }

    /// The first thing to do.
    pub(super) fn begin(&self) -> Next {
        if matches!(self.stage, Stage::Arriving { missing: 0 }) { Next::Wave } else { Next::Wait }
    }

    /// One of the missing members has arrived.
    pub(super) fn handle_arrival(&mut self) -> Next {
        let Stage::Arriving { missing } = &mut self.stage else { return Next::Wait };
        *missing -= 1;
        self.begin()
    }

    /// A live member is gone.
    pub(super) fn handle_gone(&mut self, member: usize, had_arrived: bool) -> Next {
        self.live -= 1;
        match &mut self.stage {
            Stage::Arriving { .. } if !had_arrived => self.handle_arrival(),
            Stage::Asking(wave) => {
                wave.is_void = true;
                if !self.answers[member].is_calm_in(wave.number) {
                    wave.unanswered -= 1;
                }
                self.end_wave()
            }
            _ => Next::Wait,
        }
    }

    /// Wave `number` is being sent.
    pub(super) fn start_wave(&mut self, number: u64) {
        let unanswered = self.live;
        self.stage = Stage::Asking(Wave { number, unanswered, has_moved: false, is_void: false });
    }

    /// A live member answers a wave. `None` if the answer is old or repeated.
    pub(super) fn handle_report(&mut self, member: usize, number: u64, counts: Counts) -> Option<Next> {
        let answer = &mut self.answers[member];
        let Stage::Asking(wave) = &mut self.stage else { return None };
        if wave.number != number || answer.is_calm_in(number) {
            return None;
        }
        if !counts.is_calm() {
            answer.busy = Some((number, counts));
            return Some(Next::Wait);
        }
        let before = answer.calm.replace((number, counts.activity));
        wave.has_moved |= before != Some((number - 1, counts.activity));
        wave.unanswered -= 1;
        Some(self.end_wave())
    }

    /// Why the round waits for a live member, if it does.
    pub(super) fn wait_reason(&self, member: usize, has_arrived: bool) -> Option<WaitReason> {
        if !has_arrived {
            return Some(WaitReason::NotArrived);
        }
        let Stage::Asking(wave) = &self.stage else { return None };
        let answer = &self.answers[member];
        let busy = answer.busy.filter(|&(number, _)| number == wave.number);
        (!answer.is_calm_in(wave.number)).then(|| WaitReason::Busy(busy.map(|(_, counts)| counts)))
    }

    fn end_wave(&mut self) -> Next {
        let Stage::Asking(wave) = &self.stage else { return Next::Wait };
        if wave.unanswered > 0 {
            return Next::Wait;
        }
        let is_first = self.agreed == 0;
        let (has_moved, is_void) = (wave.has_moved, wave.is_void);
        self.stage = Stage::Pausing;
        self.agreed = match (is_void, has_moved) {
            (true, _) => 0,
            (false, true) => 1,
            (false, false) => self.agreed + 1,
        };
        if self.agreed >= self.config.agreeing_waves {
            Next::Quiet
        } else if is_void || (has_moved && !is_first) {
            Next::Pause(self.next_pause())
        } else {
            Next::Wave
        }
    }

    fn next_pause(&mut self) -> Duration {
        let live = u32::try_from(self.live).unwrap_or(u32::MAX);
        let longest = self.config.longest_pause.max(PAUSE_PER_MEMBER.saturating_mul(live));
        let pause = self.pause;
        self.pause = (pause * 2).min(longest);
        pause
    }
}

impl Answer {
    fn is_calm_in(&self, wave: u64) -> bool {
        self.calm.is_some_and(|(number, _)| number == wave)
    }
}

/// Keeps the waves that activity makes necessary from loading the coordinator of a large group: at
/// 1,000 members one wave per 200 ms, which is 10,000 messages/s.
const PAUSE_PER_MEMBER: Duration = Duration::from_micros(200);
