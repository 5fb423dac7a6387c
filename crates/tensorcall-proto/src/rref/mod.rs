//! Remote references: the owner keeps a value while any fork of it is unaccounted for, and a user says
//! that it is done only after its own fork is confirmed and all its children are (RREF-1).
//!
//! Two machines, one for each side that a worker can be on:
//!
//! - [`Owner`] has the values of this worker, the forks of each that others hold, and who waits for a
//!   value that is yet to come.
//! - [`User`] has the forks that this worker holds of others' values, and the *children* that it shared
//!   and that the owner may not know yet.
//!
//! A reference travels as an [`RRefDesc`] in the descriptor of a call or reply. The receiver's machine is
//! told on arrival, read or not: [`User::receive`], or [`Owner::received_back`] if the receiver owns it.
//!
//! Nothing here is ever in the way: every call returns at once, whatever came before, and what follows from
//! it comes out of `poll_effect`. Messages may be repeated and overtake each other and everything else. A
//! link that breaks loses messages; both ends are told ([`User::handle_link_broken`]) and say again what
//! matters. A worker that is lost holds nothing any more, and owns nothing.
//!
//! Which side a message is for: give it to [`User::handle_message`], and to [`Owner::handle_message`] if
//! that returns `false`. `docs/rref.md` tells the protocol with its reasons.

mod message;
mod owner;
mod recent;
mod user;

#[cfg(test)]
mod tests;

pub use self::message::{NewRRef, RRefDesc, RRefMessage};
pub use self::owner::{Created, Effect as OwnerEffect, Found, Owner, OwnerCounts, Wait};
pub use self::user::{Effect as UserEffect, Received, Standing, User, UserCounts};
use crate::ids::Life;

/// Why a reference leads to no value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum RRefError {
    /// The call that creates the value failed, timed out or never left: there may be a value or not.
    #[error("the call that creates the value failed")]
    CreationFailed,
    /// The owner is lost, and the value with it.
    #[error("its owner {0} is lost")]
    OwnerLost(Life),
    /// The owner freed the value: whoever shared the reference was lost before the owner knew of the fork.
    #[error("its owner has freed the value")]
    Freed,
    /// The value will never be: the worker that was to create it is lost, or its request was not run.
    #[error("its value was never created")]
    NeverCreated,
    /// This fork was given back.
    #[error("it has been deleted")]
    Deleted,
}
