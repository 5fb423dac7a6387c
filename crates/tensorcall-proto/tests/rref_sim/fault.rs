//! Mistakes that a simulated worker can be given, to see that the simulator finds them.

/// One mistake, of a machine or of its driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// A user that is released before it is confirmed is deleted at once, and forgotten.
    DeleteBeforeConfirmation,
    /// A user takes itself for confirmed before the owner has answered.
    AcceptBeforeConfirmation,
    /// A user that is released is deleted although a child of it is pending.
    DeleteWithPendingChild,
    /// What a broken link may have lost is not said again.
    NotSaidAgain,
    /// Whether a child arrived is not asked after a link broke.
    NotRescinded,
    /// An owner that shares does not count before its receiver has spoken.
    SharedButNotCounted,
    /// An owner answers a fork without counting it.
    ForkNotCounted,
    /// An owner counts a fork that is said twice as two.
    ForkCountedTwice,
    /// An owner forgets forks that were deleted before their creation came, and late answers to creations
    /// are dropped.
    TombstoneForgotten,
    /// Nothing is answered to a count of a fork that is no more.
    StrayCountIgnored,
    /// A lost worker's forks are kept.
    LostForksKept,
    /// What was shared with a lost worker is kept.
    LostChildrenKept,
    /// The loss of a worker's earlier life counts for its present one.
    LivesConfused,
    /// A reference that comes back to its owner is accepted, but not held.
    HoldForgotten,
    /// Forks of a message that was not sent are kept.
    UnsentNotTold,
    /// Forks of a message that was not read are not registered.
    UnreadNotRegistered,
    /// A creation that does not run is not given up.
    AbandonedNotTold,
    /// What is not acknowledged is not reported.
    NothingReported,
    /// A function runs before its arguments are confirmed.
    RunsUnconfirmed,
}
