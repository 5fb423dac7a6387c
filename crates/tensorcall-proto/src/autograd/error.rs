//! Why a backward pass fails, as far as the protocol itself finds out.

use crate::ids::Rank;

/// Why a backward pass fails, as far as the protocol itself finds out.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AutogradError {
    /// Nothing has happened for as long as the pass may wait.
    #[error("the backward pass has made no progress for {millis} ms, and {}", waits_for(missing, *answers))]
    Stalled {
        /// How long, in milliseconds.
        millis: u64,
        /// The messages whose gradients have not come, and who received those messages.
        missing: Vec<(u64, Rank)>,
        /// How many workers have not answered.
        answers: usize,
    },
    /// The pass has ended on this worker.
    #[error("the backward pass is over here")]
    Over,
}

fn waits_for(missing: &[(u64, Rank)], answers: usize) -> String {
    if missing.is_empty() {
        return format!("{answers} workers have not answered");
    }
    let shown: Vec<_> =
        missing.iter().take(8).map(|(message, rank)| format!("{message} to rank {rank}")).collect();
    let more = if missing.len() > 8 { format!(" and {} more", missing.len() - 8) } else { String::new() };
    format!("the tensors sent in these messages got no gradients: {}{more}", shown.join(", "))
}
