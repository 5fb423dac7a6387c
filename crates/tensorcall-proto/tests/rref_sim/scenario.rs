//! What a simulated job is like: how large, how busy, how unlucky.

use crate::rng::Rng;

/// The numbers of one run. Times are in virtual microseconds, chances in percent.
#[derive(Debug, Clone)]
pub(crate) struct Scenario {
    pub(crate) workers: u64,
    /// Things that each worker's program does.
    pub(crate) acts: u64,
    /// The longest time a program takes for them.
    pub(crate) busy_for: u64,
    /// The usual delay of a message and duration of a function, at most.
    pub(crate) delay: u64,
    /// Chance of a message that takes many times as long.
    pub(crate) stragglers: u64,
    /// Chance that a message about references arrives twice.
    pub(crate) duplicates: u64,
    /// Chance of a call that its caller gives up soon.
    pub(crate) timeouts: u64,
    /// Chance of a message that is packed and not sent.
    pub(crate) unsent: u64,
    /// Chance of a message that arrives and is not read.
    pub(crate) unread: u64,
    /// Chance that a call goes to the owner of something it passes, or to the worker that was last called.
    pub(crate) homing: u64,
    pub(crate) cuts: u64,
    pub(crate) crashes: u64,
    pub(crate) restarts: bool,
    /// The longest time until a broken link or a crash is noticed.
    pub(crate) notice: u64,
}

/// A kind of job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Family {
    /// Two to six workers; links are sound and nobody dies.
    Calm,
    /// Two to six workers whose links break again and again.
    Links,
    /// Two to six workers whose lives end and begin again, and whose links break.
    Lives,
    /// Hundreds of workers, with a little of everything.
    Hundreds,
}

impl Family {
    pub(crate) const ALL: [Self; 4] = [Self::Calm, Self::Links, Self::Lives, Self::Hundreds];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Calm => "calm",
            Self::Links => "links",
            Self::Lives => "lives",
            Self::Hundreds => "hundreds",
        }
    }

    pub(crate) fn scenario(self, rng: &mut Rng) -> Scenario {
        let base = any_small(rng);
        match self {
            Self::Calm => base,
            Self::Links => Scenario { cuts: rng.between(1, 12), ..base },
            Self::Lives => {
                Scenario { crashes: rng.between(1, 3), restarts: rng.chance(70), cuts: rng.below(6), ..base }
            }
            Self::Hundreds => Scenario {
                workers: rng.between(200, 300),
                acts: rng.between(4, 12),
                cuts: rng.below(40),
                crashes: rng.below(10),
                restarts: true,
                ..base
            },
        }
    }
}

fn any_small(rng: &mut Rng) -> Scenario {
    let mut or_none = |percent, value| if rng.chance(percent) { value } else { 0 };
    let (stragglers, duplicates) = (or_none(60, 15), or_none(60, 25));
    let (timeouts, unsent, unread) = (or_none(50, 30), or_none(50, 10), or_none(50, 10));
    let delay = rng.between(20, 1_000);
    Scenario {
        workers: rng.between(2, 6),
        acts: rng.between(2, 24),
        busy_for: rng.between(1, 60) * delay,
        delay,
        stragglers,
        duplicates,
        timeouts,
        unsent,
        unread,
        homing: [0, 30, 80][rng.index(3)],
        cuts: 0,
        crashes: 0,
        restarts: false,
        notice: rng.between(1, 30) * delay,
    }
}
