//! [`Reach`]: which sources reach a recv function.

/// A set of sources, by their index.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Reach(Vec<u64>);

impl Reach {
    /// The set of those `sources` that are below `count`.
    pub(super) fn of(sources: &[usize], count: usize) -> Self {
        let mut words = vec![0; count.div_ceil(64)];
        for &source in sources.iter().filter(|&&source| source < count) {
            words[source / 64] |= 1 << (source % 64);
        }
        Self(words)
    }

    /// Whether `source` is one of them.
    pub(super) fn has(&self, source: usize) -> bool {
        self.0.get(source / 64).is_some_and(|word| word >> (source % 64) & 1 == 1)
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_has_what_it_was_made_of_and_nothing_else() {
        let reach = Reach::of(&[0, 63, 64, 64, 200], 130);

        assert_eq!((0..300).filter(|&source| reach.has(source)).collect::<Vec<_>>(), [0, 63, 64]);
        assert_eq!(reach.len(), 3);
        assert_eq!(Reach::of(&[0], 0).len(), 0);
    }
}
