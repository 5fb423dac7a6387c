//! [`Bytes`]: shared memory that nobody writes, or whose only user writes it.

use std::fmt;
use std::ops::{Deref, Range};
use std::sync::Arc;

use crate::buffer::{Buffer, Region};
use crate::error::{Error, Result};

/// Shared bytes: cheap to clone and to slice. Those that a call brought lie where they were received; they
/// are sent from where they lie.
#[derive(Clone)]
pub struct Bytes {
    owner: Owner,
    range: Range<usize>,
}

#[derive(Clone)]
enum Owner {
    /// Ours; writable while there is one user.
    Buffer(Arc<Buffer>),
    Foreign(Arc<dyn AsRef<[u8]> + Send + Sync>),
    /// Their owner can do little with them before it gets them back.
    #[cfg(feature = "candle")]
    Lent(Arc<dyn AsRef<[u8]> + Send + Sync>),
}

impl Bytes {
    /// The bytes of any owned buffer, which is kept alive and not copied.
    pub fn from_owner(owner: impl AsRef<[u8]> + Send + Sync + 'static) -> Self {
        let len = owner.as_ref().len();
        Self { owner: Owner::Foreign(Arc::new(owner)), range: 0..len }
    }

    /// As [`from_owner`](Self::from_owner), of an owner that wants them back soon.
    #[cfg(feature = "candle")]
    pub(crate) fn lent(owner: impl AsRef<[u8]> + Send + Sync + 'static) -> Self {
        let len = owner.as_ref().len();
        Self { owner: Owner::Lent(Arc::new(owner)), range: 0..len }
    }

    /// Gives lent bytes back, and has a copy of them from now on.
    #[cfg(feature = "candle")]
    pub(crate) fn settle(&mut self) -> Result<()> {
        if let Owner::Lent(_) = self.owner {
            *self = self.copied()?;
        }
        Ok(())
    }

    /// `len` zero bytes, 64-byte aligned.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Io`](crate::ErrorKind::Io) if there is no memory.
    pub fn zeroed(len: usize) -> Result<Self> {
        let buffer = Buffer::zeroed(len).map_err(|error| Error::io("bytes", error))?;
        Ok(Self::from_buffer(buffer))
    }

    /// The part in `range`, which counts from the start of these bytes.
    ///
    /// # Panics
    ///
    /// If `range` is out of bounds.
    pub fn slice(&self, range: Range<usize>) -> Self {
        let len = self.range.len();
        assert!(range.start <= range.end && range.end <= len, "{range:?} is not within 0..{len}");
        let start = self.range.start;
        Self { owner: self.owner.clone(), range: start + range.start..start + range.end }
    }

    /// A vector with these bytes.
    pub fn to_vec(&self) -> Vec<u8> {
        self.as_ref().to_vec()
    }

    pub(crate) fn from_buffer(buffer: Buffer) -> Self {
        let len = buffer.len();
        Self { owner: Owner::Buffer(Arc::new(buffer)), range: 0..len }
    }

    /// The bytes of a buffer that others use too.
    pub(crate) fn from_shared(buffer: &Arc<Buffer>) -> Self {
        Self { owner: Owner::Buffer(Arc::clone(buffer)), range: 0..buffer.len() }
    }

    /// A copy in memory of ours.
    pub(crate) fn copied(&self) -> Result<Self> {
        let copy = Buffer::copy_of(self.as_ref()).map_err(|error| Error::io("bytes", error))?;
        Ok(Self::from_buffer(copy))
    }

    /// The bytes, if they are ours and nobody else uses them.
    pub(crate) fn get_mut(&mut self) -> Option<&mut [u8]> {
        match &mut self.owner {
            Owner::Buffer(buffer) => Arc::get_mut(buffer)?.as_mut().get_mut(self.range.clone()),
            Owner::Foreign(_) => None,
            #[cfg(feature = "candle")]
            Owner::Lent(_) => None,
        }
    }

    /// As the transports take it.
    pub(crate) fn to_region(&self) -> Region {
        Region::from_owner(self.clone())
    }
}

impl AsRef<[u8]> for Bytes {
    fn as_ref(&self) -> &[u8] {
        let all = match &self.owner {
            Owner::Buffer(buffer) => (**buffer).as_ref(),
            Owner::Foreign(owner) => (**owner).as_ref(),
            #[cfg(feature = "candle")]
            Owner::Lent(owner) => (**owner).as_ref(),
        };
        all.get(self.range.clone()).unwrap_or_default()
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.as_ref()
    }
}

impl From<Vec<u8>> for Bytes {
    fn from(bytes: Vec<u8>) -> Self {
        Self::from_owner(bytes)
    }
}

impl PartialEq for Bytes {
    fn eq(&self, other: &Self) -> bool {
        self.as_ref() == other.as_ref()
    }
}

impl Eq for Bytes {}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Bytes({} bytes)", self.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_share_memory_and_count_from_their_own_start() {
        let bytes = Bytes::from((0..10).collect::<Vec<u8>>());

        let middle = bytes.slice(2..8).slice(1..3);

        assert_eq!(middle.as_ref(), [3, 4]);
        assert_eq!(middle.as_ptr(), bytes[3..].as_ptr());
    }

    #[test]
    fn only_the_single_user_of_our_memory_may_write_it() {
        let mut ours = Bytes::zeroed(4).unwrap();
        ours.get_mut().unwrap()[0] = 7;
        let mut other = ours.clone();
        let mut foreign = Bytes::from(vec![1]);

        assert!(ours.get_mut().is_none() && other.get_mut().is_none() && foreign.get_mut().is_none());
        assert_eq!(other.copied().unwrap().as_ref(), [7, 0, 0, 0]);
    }

    #[test]
    fn a_region_of_bytes_is_where_they_are() {
        let bytes = Bytes::from(vec![1, 2, 3]).slice(1..3);

        let region = bytes.to_region();

        assert_eq!((region.as_ptr(), region.len()), (bytes.as_ptr(), 2));
    }
}
