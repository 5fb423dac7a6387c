//! Names for workers, their lives, their messages and their references.
//!
//! A [`Rank`] and a [`WorkerName`] say which worker; an [`Incarnation`] says which life of it, so
//! that what an earlier life sent never reaches a later one (LIFE-1). All of them check their
//! value where it enters, so whoever holds one need not check again.

use std::borrow::Borrow;
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// A worker's number in its group: 0 to [`Rank::MAX`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u16", into = "u16")]
pub struct Rank(u16);

impl Rank {
    /// The largest rank; PyTorch keeps worker ids in a signed 16-bit number.
    pub const MAX: Self = Self(i16::MAX.unsigned_abs());

    /// The rank `value`, or `None` if it exceeds [`Rank::MAX`].
    pub fn new(value: u32) -> Option<Self> {
        u16::try_from(value).ok().and_then(|rank| Self::try_from(rank).ok())
    }

    /// The rank as a number.
    pub const fn get(self) -> u16 {
        self.0
    }
}

impl TryFrom<u16> for Rank {
    type Error = InvalidRank;

    fn try_from(value: u16) -> Result<Self, InvalidRank> {
        if value <= Self::MAX.0 { Ok(Self(value)) } else { Err(InvalidRank(value)) }
    }
}

impl From<Rank> for u16 {
    fn from(rank: Rank) -> Self {
        rank.0
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A number that is no [`Rank`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("rank {0} exceeds {max}", max = Rank::MAX)]
pub struct InvalidRank(pub u16);

/// Defines a newtype over `u64` that is only ever compared, printed and sent.
macro_rules! number {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(u64);

        impl $name {
            /// Wraps `value`.
            pub const fn new(value: u64) -> Self {
                Self(value)
            }

            /// The wrapped number.
            pub const fn get(self) -> u64 {
                self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

number! {
    /// One life of a worker, drawn at random when it starts (LIFE-1).
    Incarnation
}

number! {
    /// One call of one caller; the reply carries the same number. Never reused by an incarnation.
    MessageId
}

/// One life of a worker, by rank: what messages about references are addressed to (LIFE-1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Life {
    /// The worker's rank.
    pub rank: Rank,
    /// Which life of it.
    pub incarnation: Incarnation,
}

impl fmt::Display for Life {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} (incarnation {:016x})", self.rank, self.incarnation.get())
    }
}

/// Defines an id that a worker gives out of its own counter, unique in a group for ever (LIFE-1).
macro_rules! unique {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub struct $name {
            /// The worker that gave the id.
            pub creator: Rank,
            /// Which life of that worker.
            pub incarnation: Incarnation,
            /// The number out of that life's counter.
            pub local: u64,
        }

        impl $name {
            /// The id that `creator` gives with `local`.
            pub const fn new(creator: Life, local: u64) -> Self {
                Self { creator: creator.rank, incarnation: creator.incarnation, local }
            }

            /// The life that gave the id.
            pub const fn life(self) -> Life {
                Life { rank: self.creator, incarnation: self.incarnation }
            }
        }

        /// As PyTorch prints it, without the incarnation.
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "GloballyUniqueId(created_on={}, local_id={})", self.creator, self.local)
            }
        }
    };
}

unique! {
    /// A remote reference: the same id for its owner and all users. Given by whoever calls `remote`, or by
    /// the owner.
    RRefId
}

unique! {
    /// One act of sharing a reference, and the user that came of it. Given by the worker that shares; used
    /// once.
    ForkId
}

unique! {
    /// One backward pass. Given by the worker that begins it.
    PassId
}

/// A worker's name: 1 to 127 characters out of `A-Z a-z 0-9 - _ :`. Cheap to clone.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkerName(Arc<str>);

impl WorkerName {
    /// The longest name, in characters (all of them ASCII, so bytes as well).
    pub const MAX_LEN: usize = 127;

    /// Checks `name` and wraps it.
    ///
    /// # Errors
    ///
    /// [`InvalidName`] says which rule of the type is broken.
    pub fn parse(name: &str) -> Result<Self, InvalidName> {
        if name.is_empty() {
            return Err(InvalidName::Empty);
        }
        if name.len() > Self::MAX_LEN {
            return Err(InvalidName::TooLong { len: name.len() });
        }
        match name.chars().find(|&c| !(c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | ':'))) {
            Some(found) => Err(InvalidName::Character { found }),
            None => Ok(Self(name.into())),
        }
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// A table by names can be asked with text: both hash and compare alike.
impl Borrow<str> for WorkerName {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for WorkerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl AsRef<str> for WorkerName {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

impl std::str::FromStr for WorkerName {
    type Err = InvalidName;

    fn from_str(name: &str) -> Result<Self, InvalidName> {
        Self::parse(name)
    }
}

impl Serialize for WorkerName {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for WorkerName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(NameVisitor)
    }
}

/// Reads a name without copying text that turns out not to be one.
struct NameVisitor;

impl de::Visitor<'_> for NameVisitor {
    type Value = WorkerName;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a worker name of 1 to {} characters", WorkerName::MAX_LEN)
    }

    fn visit_str<E: de::Error>(self, name: &str) -> Result<WorkerName, E> {
        WorkerName::parse(name).map_err(E::custom)
    }
}

/// Why a text is no [`WorkerName`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidName {
    /// There is no text at all.
    #[error("a worker name is empty")]
    Empty,
    /// The text is longer than [`WorkerName::MAX_LEN`].
    #[error("a worker name of {len} bytes exceeds {max}", max = WorkerName::MAX_LEN)]
    TooLong {
        /// Length of the text in bytes.
        len: usize,
    },
    /// The text holds a character that names may not have.
    #[error("{found:?} is not allowed in a worker name")]
    Character {
        /// The first such character.
        found: char,
    },
}

/// One life of one worker: who it says it is, and which start of it this is (LIFE-1).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Identity {
    /// The worker's name, unique in its group.
    pub name: WorkerName,
    /// The worker's rank, unique in its group.
    pub rank: Rank,
    /// Which life of that worker.
    pub incarnation: Incarnation,
}

impl Identity {
    /// The life, without the name.
    pub const fn life(&self) -> Life {
        Life { rank: self.rank, incarnation: self.incarnation }
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (rank {}, incarnation {:016x})", self.name, self.rank, self.incarnation.get())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rank_ends_at_the_largest_signed_16_bit_number() {
        assert_eq!(Rank::new(0).map(Rank::get), Some(0));
        assert_eq!(Rank::new(32_767), Some(Rank::MAX));
        assert_eq!(Rank::new(32_768), None);
        assert_eq!(Rank::new(65_536), None);
        assert_eq!(Rank::new(u32::MAX), None);
    }

    #[test]
    fn rank_from_the_wire_is_checked() {
        let bytes = postcard::to_allocvec(&40_000u16).unwrap();

        assert!(postcard::from_bytes::<Rank>(&bytes).is_err());
    }

    #[test]
    fn name_takes_letters_digits_dash_underscore_and_colon() {
        let name = WorkerName::parse("Worker-0_a:7").unwrap();

        assert_eq!(name.as_str(), "Worker-0_a:7");
        assert_eq!(name.to_string(), "Worker-0_a:7");
    }

    #[test]
    fn name_has_1_to_127_characters() {
        assert_eq!(WorkerName::parse(""), Err(InvalidName::Empty));
        assert!(WorkerName::parse(&"x".repeat(127)).is_ok());
        assert_eq!(WorkerName::parse(&"x".repeat(128)), Err(InvalidName::TooLong { len: 128 }));
    }

    #[test]
    fn name_refuses_every_other_character() {
        for (name, found) in [("a b", ' '), ("ä", 'ä'), ("a/b", '/'), ("a\0", '\0'), ("a.b", '.')] {
            assert_eq!(WorkerName::parse(name), Err(InvalidName::Character { found }), "{name:?}");
        }
    }

    #[test]
    fn name_from_the_wire_is_checked() {
        let good = postcard::to_allocvec("worker0").unwrap();
        let bad = postcard::to_allocvec("worker 0").unwrap();

        assert_eq!(postcard::from_bytes::<WorkerName>(&good).unwrap().as_str(), "worker0");
        assert!(postcard::from_bytes::<WorkerName>(&bad).is_err());
    }

    #[test]
    fn identity_prints_all_three_parts() {
        let identity = Identity {
            name: WorkerName::parse("ps").unwrap(),
            rank: Rank::new(3).unwrap(),
            incarnation: Incarnation::new(0xabc),
        };

        assert_eq!(identity.to_string(), "ps (rank 3, incarnation 0000000000000abc)");
    }

    #[test]
    fn ids_of_references_print_as_in_pytorch_and_name_their_life() {
        let life = Life { rank: Rank::new(1).unwrap(), incarnation: Incarnation::new(7) };
        let (rref, fork) = (RRefId::new(life, 4), ForkId::new(life, 5));

        assert_eq!(rref.to_string(), "GloballyUniqueId(created_on=1, local_id=4)");
        assert_eq!(fork.to_string(), "GloballyUniqueId(created_on=1, local_id=5)");
        assert_eq!((rref.life(), fork.life()), (life, life));
        assert_eq!(life.to_string(), "rank 1 (incarnation 0000000000000007)");
    }
}
