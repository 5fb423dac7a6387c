//! A set that remembers what was put in last.

use std::collections::{HashSet, VecDeque};
use std::hash::Hash;

/// The last [`Recent::CAPACITY`] items, so that memory is bounded. Only what is better for knowing more may
/// depend on it, never what must be right.
#[derive(Debug)]
pub(super) struct Recent<T> {
    items: HashSet<T>,
    order: VecDeque<T>,
}

impl<T: Copy + Eq + Hash> Recent<T> {
    /// A few hundred lost calls or lives at a time are many.
    pub(super) const CAPACITY: usize = 1024;

    pub(super) fn new() -> Self {
        Self { items: HashSet::new(), order: VecDeque::new() }
    }

    pub(super) fn insert(&mut self, item: T) {
        if !self.items.insert(item) {
            return;
        }
        self.order.push_back(item);
        if self.order.len() > Self::CAPACITY
            && let Some(oldest) = self.order.pop_front()
        {
            self.items.remove(&oldest);
        }
    }

    pub(super) fn contains(&self, item: &T) -> bool {
        self.items.contains(item)
    }

    pub(super) fn remove(&mut self, item: &T) {
        if self.items.remove(item) {
            self.order.retain(|other| other != item);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_items_are_forgotten_first() {
        let mut recent = Recent::new();

        for item in 0..=Recent::<usize>::CAPACITY {
            recent.insert(item);
            recent.insert(item);
        }
        recent.remove(&5);
        recent.insert(5000);

        assert!(!recent.contains(&0) && !recent.contains(&5));
        assert!(recent.contains(&1) && recent.contains(&5000));
        assert!(recent.order.len() <= Recent::<usize>::CAPACITY);
        assert_eq!(recent.order.len(), recent.items.len());
    }
}
