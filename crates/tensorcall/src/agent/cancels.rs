//! Who wants to know that a request which runs here was cancelled.

use rustc_hash::FxHashMap;
use tensorcall_proto::ids::{Incarnation, Rank};
use tensorcall_proto::serving::RequestKey;

use crate::sync::Mutex;

type Told = Box<dyn FnOnce() + Send>;

/// What is to be told, by request. Each entry goes when it was told or the request was answered.
#[derive(Default)]
pub(super) struct Cancels(Mutex<FxHashMap<RequestKey, Told>>);

impl Cancels {
    /// Has `told` called when the request of `key` is cancelled. One for each request: the last counts.
    pub(super) fn expect(&self, key: RequestKey, told: Told) {
        let before = self.0.lock().insert(key, told);
        drop(before);
    }

    /// The request was cancelled.
    pub(super) fn tell(&self, key: RequestKey) {
        let told = self.0.lock().remove(&key);
        if let Some(told) = told {
            told();
        }
    }

    /// This life of a worker is gone: nobody waits for the answers to its requests.
    pub(super) fn tell_all_of(&self, peer: Rank, incarnation: Incarnation) {
        let is_its = |key: &RequestKey| key.peer == peer && key.incarnation == incarnation;
        let all: Vec<_> = self.0.lock().extract_if(|key, _| is_its(key)).collect();
        for (_, told) in all {
            told();
        }
    }

    /// The request was answered.
    pub(super) fn forget(&self, key: RequestKey) {
        let told = self.0.lock().remove(&key);
        drop(told);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use tensorcall_proto::ids::MessageId;

    use super::*;

    fn key(peer: u16, incarnation: u64) -> RequestKey {
        RequestKey {
            peer: Rank::new(u32::from(peer)).unwrap(),
            incarnation: Incarnation::new(incarnation),
            id: MessageId::new(1),
        }
    }

    #[test]
    fn a_cancellation_is_told_once_and_not_after_the_answer() {
        let cancels = Cancels::default();
        let (told, heard) = mpsc::channel();
        for peer in 1..=3 {
            let told = told.clone();
            cancels.expect(key(peer, 1), Box::new(move || told.send(peer).unwrap()));
        }

        cancels.forget(key(1, 1));
        for _ in 0..2 {
            cancels.tell(key(1, 1));
            cancels.tell(key(2, 1));
        }

        assert_eq!(heard.try_iter().collect::<Vec<_>>(), [2]);
    }

    #[test]
    fn the_loss_of_a_life_is_told_to_its_requests_alone() {
        let cancels = Cancels::default();
        let (told, heard) = mpsc::channel();
        for lost in [key(1, 1), key(1, 2), key(2, 1)] {
            let told = told.clone();
            cancels.expect(lost, Box::new(move || told.send(lost).unwrap()));
        }

        cancels.tell_all_of(key(1, 2).peer, Incarnation::new(2));

        assert_eq!(heard.try_iter().collect::<Vec<_>>(), [key(1, 2)]);
    }
}
