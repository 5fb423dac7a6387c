//! References against a model of a few lines: a value is there exactly as long as somebody has a handle of it
//! or is about to, whatever is delivered when, twice or never (RREF-1).

#![expect(clippy::expect_used, reason = "a test stops where something is wrong")]

use proptest::collection::vec;
use proptest::prelude::*;

#[expect(unreachable_pub, reason = "in the fuzz crate it is public")]
#[path = "../../../fuzz/src/operations.rs"]
mod operations;

/// An operation and what it is about, low numbers more often: there is seldom much to choose from.
fn any_operation() -> impl Strategy<Value = u8> {
    let operation =
        prop_oneof![2 => Just(0u8), 4 => Just(1), 4 => Just(2), 8 => Just(3), 2 => Just(5), 1 => Just(6)];
    (operation, prop_oneof![0..6u8, 0..32u8]).prop_map(|(operation, about)| operation << 5 | about)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]

    #[test]
    fn any_sharing_and_dropping_frees_each_value_once_and_in_time(list in vec(any_operation(), 0..120)) {
        operations::rref(&list);
    }

    #[test]
    fn any_misfortune_leaves_nothing_behind(list in vec(any::<u8>(), 0..200)) {
        operations::rref(&list);
    }
}
