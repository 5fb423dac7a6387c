//! What a simulated job is like.

use crate::rng::Rng;

/// The numbers of one run. Times are in virtual microseconds, chances in percent.
#[derive(Debug, Clone)]
pub(crate) struct Scenario {
    pub(crate) workers: usize,
    /// Operations and messages of a program.
    pub(crate) steps: u64,
    /// How many of them are messages.
    pub(crate) messages: u64,
    /// Whether messages only go from a worker to later ones.
    pub(crate) acyclic: bool,
    /// Messages that are never read.
    pub(crate) unread: u64,
    /// Passes that may go on at once.
    pub(crate) passes: u64,
    /// The usual delay of a message and duration of a computation, at most.
    pub(crate) delay: u64,
    /// Chance of something that takes many times as long.
    pub(crate) stragglers: u64,
    /// Chance of a call that arrives twice.
    pub(crate) duplicates: u64,
    pub(crate) trouble: Trouble,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Trouble {
    None,
    /// A local engine raises.
    Error,
    /// A worker dies.
    Loss,
    /// Gradients are lost although they were acknowledged.
    Silence,
}

/// A kind of job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Family {
    /// Workers in a row: no cycles between them.
    Row,
    /// Two to eight workers, anything to anybody.
    Cycles,
    /// As `Cycles`, and some messages are never read.
    Unread,
    /// As `Cycles`, and a local engine raises.
    Errors,
    /// As `Cycles`, and a worker dies.
    Losses,
    /// As `Cycles`, and gradients are lost.
    Silence,
}

impl Family {
    pub(crate) const ALL: [Self; 6] =
        [Self::Row, Self::Cycles, Self::Unread, Self::Errors, Self::Losses, Self::Silence];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Row => "row",
            Self::Cycles => "cycles",
            Self::Unread => "unread",
            Self::Errors => "errors",
            Self::Losses => "losses",
            Self::Silence => "silence",
        }
    }

    pub(crate) fn scenario(self, rng: &mut Rng) -> Scenario {
        let workers = usize::try_from(rng.between(2, 8)).expect("a small number");
        Scenario {
            workers,
            steps: rng.between(5, 60),
            messages: rng.between(20, 60),
            acyclic: self == Self::Row,
            unread: if self == Self::Unread { 30 } else { 0 },
            passes: 2,
            delay: rng.between(1, 2_000),
            stragglers: rng.below(10),
            duplicates: rng.below(20),
            trouble: match self {
                Self::Row | Self::Cycles | Self::Unread => Trouble::None,
                Self::Errors => Trouble::Error,
                Self::Losses => Trouble::Loss,
                Self::Silence => Trouble::Silence,
            },
        }
    }
}
