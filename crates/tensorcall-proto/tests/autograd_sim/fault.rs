//! Mistakes that simulated workers can be given, to see that the simulator finds them.

/// One mistake, of a machine, of its driver or of the local engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// A plan does not say that the last of several sources reaches a recv function.
    ReachForgotten,
    /// What recv functions got before they were wanted is not in what they send.
    PartsForgotten,
    /// Gradients are acknowledged and not used.
    GradientSwallowed,
    /// A worker says that its part is done when it hears of the pass.
    DoneAtOnce,
    /// Those who were told of a pass are not told that it failed.
    AbortSwallowed,
    /// Nobody answers whether gradients will come.
    AskSwallowed,
    /// Nobody finds out that it waits for itself.
    ProbeSwallowed,
    /// Every worker runs what it has without waiting for more.
    NeverWaits,
    /// An error of a local engine is not told.
    ErrorNotTold,
}
