//! Properties of one worker's part in backward passes, whatever it hears in whatever order.

use proptest::collection::vec;
use proptest::prelude::*;

#[expect(unreachable_pub, reason = "in the fuzz crate it is public")]
#[path = "../../../fuzz/src/passes.rs"]
mod passes;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    /// The body of the fuzz target says what must hold.
    #[test]
    fn any_list_of_events_ends_with_everything_answered_once(bytes in vec(any::<u8>(), 0..120)) {
        passes::autograd(&bytes);
    }
}
