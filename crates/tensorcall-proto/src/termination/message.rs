//! What members say to each other about whether the group is quiet.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::ids::Rank;

/// What members say to each other.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum TerminationMessage {
    /// To the coordinator: the sender has arrived at `round`.
    Arrive {
        /// The last round that the sender arrived at.
        round: u64,
        /// The coordinator's rank, in the sender's view.
        epoch: u64,
        /// The last round that the sender knows to be quiet; equals `round` when it waits for nothing.
        quiet: u64,
    },
    /// From the coordinator: answer when you have nothing under way.
    Wave {
        /// The round that all live members have arrived at.
        round: u64,
        /// The coordinator's rank.
        epoch: u64,
        /// Grows by one from wave to wave of an epoch.
        wave: u64,
        /// Members that are lost or have left: drop them before counting.
        gone: Arc<[Rank]>,
    },
    /// To the coordinator: answers a wave. Sent once if the sender is busy, and once when it is not.
    Report {
        /// The round of the wave.
        round: u64,
        /// The epoch of the wave.
        epoch: u64,
        /// The wave.
        wave: u64,
        /// What the sender has under way.
        counts: Counts,
    },
    /// From the coordinator: nothing was under way anywhere.
    Quiet {
        /// The round that is over.
        round: u64,
        /// The coordinator's rank.
        epoch: u64,
    },
}

/// What a worker has under way, taken at one moment or in an order that hides nothing: outstanding, then
/// processing, then activity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub struct Counts {
    /// Requests sent and not answered, those that nobody waits for any more included
    /// ([`InFlight::unanswered`](crate::in_flight::InFlight::unanswered)).
    pub outstanding: u64,
    /// Requests received and not answered, asynchronous executions, and callbacks that are due or run.
    pub processing: u64,
    /// Grows whenever either of the others does: calls started, requests received.
    pub activity: u64,
}

impl Counts {
    /// Whether nothing is under way.
    pub fn is_calm(&self) -> bool {
        self.outstanding == 0 && self.processing == 0
    }
}
