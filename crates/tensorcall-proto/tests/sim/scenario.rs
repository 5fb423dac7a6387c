//! What a simulated job is like: how large, how busy, how unlucky.

use crate::rng::Rng;

/// Everything that shapes a run besides the seed. Times are in microseconds.
#[derive(Debug, Clone)]
pub(crate) struct Scenario {
    pub(crate) workers: u64,
    /// Calls that each worker starts by itself in each phase, at most.
    pub(crate) roots: u64,
    /// Calls that one of these may lead to, at most.
    pub(crate) fuel: u64,
    /// Percent of functions that hand on work without waiting for it, and answer before it is done.
    pub(crate) batons: u64,
    /// How long a worker's program makes calls before it arrives.
    pub(crate) busy_for: u64,
    /// Rounds: all but the last are `sync()`, the last is shutdown. 0 leaves without either.
    pub(crate) rounds: u64,
    pub(crate) delay: u64,
    /// The termination machine's first pause.
    pub(crate) pause: u64,
    /// Percent of messages that take up to 50 times as long.
    pub(crate) stragglers: u64,
    pub(crate) order: Order,
    /// Percent of replies and termination messages that come twice.
    pub(crate) duplicates: u64,
    /// Percent of calls with a deadline, and of calls that are cancelled.
    pub(crate) deadlines: u64,
    pub(crate) cancels: u64,
    /// Worker threads; calls to one peer at a time.
    pub(crate) pool: usize,
    pub(crate) window: usize,
    /// Workers that crash, at random times or right after they sent a termination message.
    pub(crate) crashes: u64,
    /// Pairs of workers that lose each other although both live.
    pub(crate) cuts: u64,
    /// Whether crashed workers come back as another life.
    pub(crate) restarts: bool,
    /// How long a crash may stay unnoticed.
    pub(crate) notice: u64,
}

/// What order messages between two workers keep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    /// As sent.
    Kept,
    /// As sent among calls and replies, and among control messages, which may overtake the former.
    KeptByPriority,
    /// None.
    Lost,
}

/// A kind of scenario; the seed does the rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Family {
    /// One to six workers, everything that can go wrong, `sync` and shutdown.
    Small,
    /// Two to five workers whose lives end and begin again; no shutdown.
    Restarts,
    /// Two to five workers that hand one piece of work around for long, and arrive early.
    Relay,
    /// A hundred workers and more.
    Hundred,
    /// A thousand workers, few calls.
    Thousand,
}

impl Family {
    pub(crate) const ALL: [Self; 5] =
        [Self::Small, Self::Restarts, Self::Relay, Self::Hundred, Self::Thousand];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Small => "small",
            Self::Restarts => "restarts",
            Self::Relay => "relay",
            Self::Hundred => "hundred",
            Self::Thousand => "thousand",
        }
    }

    pub(crate) fn scenario(self, rng: &mut Rng) -> Scenario {
        let base = any_small(rng);
        match self {
            Self::Small => base,
            Self::Restarts => Scenario {
                workers: rng.between(2, 5),
                rounds: 0,
                crashes: rng.between(1, 3),
                cuts: 0,
                restarts: true,
                ..base
            },
            Self::Relay => Scenario {
                workers: rng.between(2, 5),
                roots: 1,
                fuel: 100,
                batons: 95,
                busy_for: 2 * base.delay,
                rounds: 1,
                pause: base.delay / 4 + 1,
                duplicates: 30,
                deadlines: 0,
                cancels: 0,
                crashes: 0,
                cuts: 0,
                ..base
            },
            Self::Hundred => Scenario {
                workers: rng.between(100, 130),
                roots: 2,
                fuel: 6,
                rounds: rng.between(1, 2),
                crashes: rng.below(8),
                cuts: rng.below(3),
                ..base
            },
            Self::Thousand => Scenario {
                workers: 1000,
                roots: 1,
                fuel: 1,
                rounds: 1,
                crashes: rng.below(4),
                cuts: 0,
                duplicates: 0,
                ..base
            },
        }
    }
}

fn any_small(rng: &mut Rng) -> Scenario {
    let order = [Order::Kept, Order::KeptByPriority, Order::Lost][rng.index(3)];
    let mut or_none = |percent, value| if rng.chance(percent) { value } else { 0 };
    let (stragglers, duplicates) = (or_none(50, 10), or_none(50, 20));
    let (deadlines, cancels) = (or_none(60, 30), or_none(50, 15));
    let (crashes, cuts) = (or_none(50, 2), or_none(20, 1));
    let delay = rng.between(20, 1_000);
    let longest_busy = [2, 40][rng.index(2)] * delay;
    Scenario {
        workers: rng.between(1, 6),
        roots: rng.between(1, 4),
        fuel: rng.between(1, 24),
        batons: [0, 30, 90][rng.index(3)],
        busy_for: rng.below(longest_busy),
        rounds: rng.between(1, 3),
        delay,
        pause: 1_000,
        stragglers,
        order,
        duplicates,
        deadlines,
        cancels,
        pool: rng.index(3) + 1,
        window: rng.index(4) + 1,
        crashes: crashes * rng.between(1, 2) / 2,
        cuts,
        restarts: false,
        notice: rng.between(100, 30_000),
    }
}
