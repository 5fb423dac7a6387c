//! Mistakes that a simulated worker can be given, to see that the simulator finds them.

/// One mistake. Most are a driver's; [`Fault::OneWave`] is a setting of the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// One wave is believed.
    OneWave,
    /// The activity counter does not count.
    FrozenActivity,
    /// Requests that wait or run are not reported.
    ProcessingNotReported,
    /// Only calls that somebody waits for are reported as outstanding.
    AbandonedNotReported,
    /// A lost peer's calls are failed, but not taken out.
    LossCompletesTwice,
    /// A reply that comes after its call's deadline completes the call again.
    LateReplyDelivered,
    /// The deadline that came with a request is not looked at.
    ExpiredRequestRuns,
    /// A lost peer's waiting requests are kept.
    LostPeersRequestsRun,
    /// Losses are not told to the termination machine.
    LossNotTold,
    /// A report counts for whatever wave is out.
    StaleReportAccepted,
    /// Quiet counts for whatever round is waited for.
    StaleQuietAccepted,
    /// Who the coordinator says is gone is not dropped.
    GoneIgnored,
    /// A new coordinator is not told which rounds are over.
    QuietNotPassedOn,
    /// Only the first coordinator is told of an arrival.
    TakeoverIgnored,
    /// Lives of a worker are not told apart.
    IncarnationIgnored,
}
