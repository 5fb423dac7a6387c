//! Functions by number: the name of a function goes over a connection once.
//!
//! The caller's side, [`Names`], says [`FunctionRef::Define`] the first time and [`FunctionRef::Slot`] from then on;
//! the callee's, [`Slots`], turns both back into [`FunctionRef::Name`]. Whoever sends and whoever receives see names
//! alone, and look each up anew: a slot stands for a name, never for what had that name once.

use std::sync::Arc;

use rustc_hash::FxHashMap;

use super::error::WireError;
use super::frame::Priority;
use super::message::{Call, FunctionRef, Message};

/// So many functions have a slot of one connection and direction; others are always named.
pub const MAX_SLOTS: u32 = 4096;
/// Functions with longer names, in bytes, have no slot.
pub const MAX_SLOT_NAME: u32 = 256;

/// The slots that a connection has defined for the messages that it sends.
#[derive(Debug, Default)]
pub struct Names(FxHashMap<Arc<str>, u32>);

impl Names {
    /// Puts a slot in the place of the function's name in a message that is sent next at `priority`.
    pub fn shorten(&mut self, message: &mut Message, priority: Priority) {
        let Message::Call(Call { function, .. }) = message else { return };
        let FunctionRef::Name(name) = function else { return };
        if let Some(&slot) = self.0.get(name) {
            *function = FunctionRef::Slot(slot);
            return;
        }
        let slot = u32::try_from(self.0.len()).unwrap_or(u32::MAX);
        // What defines a slot must come before what uses it: messages of this priority stay in order, and pass
        // those that are less urgent.
        if priority == Priority::Normal && slot < MAX_SLOTS && name.len() <= MAX_SLOT_NAME as usize {
            self.0.insert(Arc::clone(name), slot);
            *function = FunctionRef::Define { slot, name: Arc::clone(name) };
        }
    }
}

/// The slots that the other side of a connection has defined.
#[derive(Debug, Default)]
pub struct Slots(Vec<Arc<str>>);

impl Slots {
    /// Puts the function's name in the place of its slot in a message that came. Messages must be given in the order
    /// in which their descriptors came.
    ///
    /// # Errors
    ///
    /// [`WireError::FunctionSlot`] if the slot is not defined, or defined out of turn.
    pub fn lengthen(&mut self, message: &mut Message) -> Result<(), WireError> {
        let Message::Call(Call { function, .. }) = message else { return Ok(()) };
        let name = match function {
            FunctionRef::Slot(slot) => {
                let name = usize::try_from(*slot).ok().and_then(|slot| self.0.get(slot));
                Arc::clone(name.ok_or(WireError::FunctionSlot { slot: *slot })?)
            }
            FunctionRef::Define { slot, name } => {
                if usize::try_from(*slot) != Ok(self.0.len()) {
                    return Err(WireError::FunctionSlot { slot: *slot });
                }
                self.0.push(Arc::clone(name));
                Arc::clone(name)
            }
            FunctionRef::InPayload
            | FunctionRef::Name(_)
            | FunctionRef::Fetch(_)
            | FunctionRef::Autograd(_) => return Ok(()),
        };
        *function = FunctionRef::Name(name);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::MessageId;
    use crate::wire::message::Encoding;

    fn call(function: FunctionRef) -> Message {
        Message::Call(Call {
            id: MessageId::new(1),
            function,
            encoding: Encoding::Value,
            timeout_us: None,
            nested: false,
            plain: false,
            autograd: None,
            creates: None,
        })
    }

    fn named(name: &str) -> Message {
        call(FunctionRef::Name(name.into()))
    }

    fn shortened(names: &mut Names, name: &str, priority: Priority) -> Message {
        let mut message = named(name);
        names.shorten(&mut message, priority);
        message
    }

    #[test]
    fn a_name_is_sent_once_and_read_each_time() {
        let (mut names, mut slots) = (Names::default(), Slots::default());
        for (name, sent) in [
            ("f", FunctionRef::Define { slot: 0, name: "f".into() }),
            ("g", FunctionRef::Define { slot: 1, name: "g".into() }),
            ("f", FunctionRef::Slot(0)),
            ("g", FunctionRef::Slot(1)),
        ] {
            let mut message = shortened(&mut names, name, Priority::Normal);
            assert_eq!(message, call(sent));
            assert_eq!(slots.lengthen(&mut message), Ok(()));
            assert_eq!(message, named(name));
        }
    }

    #[test]
    fn what_others_may_overtake_defines_nothing() {
        let mut names = Names::default();

        assert_eq!(shortened(&mut names, "f", Priority::Bulk), named("f"));

        shortened(&mut names, "f", Priority::Normal);
        assert_eq!(shortened(&mut names, "f", Priority::Bulk), call(FunctionRef::Slot(0)));
    }

    #[test]
    fn beyond_the_last_slot_and_the_longest_name_functions_are_named() {
        let mut names = Names::default();
        let long = "f".repeat(MAX_SLOT_NAME as usize + 1);
        assert_eq!(shortened(&mut names, &long, Priority::Normal), named(&long));

        for number in 0..MAX_SLOTS {
            shortened(&mut names, &number.to_string(), Priority::Normal);
        }

        assert_eq!(shortened(&mut names, "f", Priority::Normal), named("f"));
        assert_eq!(shortened(&mut names, "7", Priority::Normal), call(FunctionRef::Slot(7)));
    }

    #[test]
    fn slots_that_are_not_defined_in_turn_are_refused() {
        let mut slots = Slots::default();
        for function in [FunctionRef::Slot(0), FunctionRef::Define { slot: 1, name: "f".into() }] {
            let result = slots.lengthen(&mut call(function.clone()));
            assert!(matches!(result, Err(WireError::FunctionSlot { .. })), "{function:?}: {result:?}");
        }
        let define = call(FunctionRef::Define { slot: 0, name: "f".into() });
        assert_eq!(slots.lengthen(&mut define.clone()), Ok(()));
        assert_eq!(slots.lengthen(&mut define.clone()), Err(WireError::FunctionSlot { slot: 0 }));
    }
}
