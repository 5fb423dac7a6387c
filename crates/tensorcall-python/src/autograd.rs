//! Distributed autograd, as Python sees it.

use tensorcall::proto::wire::message::AutogradRef;

/// An autograd context and, if tensors of the message require gradients, the number of the message.
pub(crate) type Place = (u64, Option<u64>);

pub(crate) fn to_ref((context, message): Place) -> AutogradRef {
    AutogradRef { context, message }
}

pub(crate) fn to_place(autograd: AutogradRef) -> Place {
    (autograd.context, autograd.message)
}
