//! [`ValueReader`]: values, item by item, borrowed from the bytes they arrived in.
//!
//! Reading neither recurses nor allocates by announced counts. The items that all open
//! containers still promise never exceed the bytes that are left, as every item takes one byte at
//! least: who reads may reserve room for what a container announces, since in sum that is
//! bounded by the input (NET-2).

use super::tag;
use crate::wire::{Limits, WireError};

/// One item of a value. A container is followed by its items.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Event<'a> {
    /// Nothing; Python's `None`.
    Nil,
    /// A truth value.
    Bool(bool),
    /// A whole number.
    Int(i64),
    /// A number of double precision.
    Float(f64),
    /// Text.
    Str(&'a str),
    /// Bytes.
    Bytes(&'a [u8]),
    /// A list begins: the next so many values are its items.
    List(usize),
    /// A tuple begins: the next so many values are its items.
    Tuple(usize),
    /// A map begins: so many pairs follow, each a key and then its value.
    Map(usize),
    /// A tensor, by its place in the descriptor's table.
    Tensor(u32),
    /// A remote reference, by its place in the descriptor's table.
    RRef(u32),
    /// An exception.
    Exception {
        /// Its classes, the most special one first, parted by spaces.
        classes: &'a str,
        /// What it says.
        message: &'a str,
        /// Where it was raised, for people.
        origin: &'a str,
    },
    /// A Python pickle.
    Pickle(&'a [u8]),
}

/// Reads one value item by item.
///
/// Containers nest at most [`Limits::max_depth`] deep, so a reader that recurses into them may.
/// After an error the rest of the value means nothing.
#[derive(Debug)]
pub struct ValueReader<'a> {
    rest: &'a [u8],
    /// Items that the root and all open containers still promise.
    promised: u64,
    /// Items that may still be announced.
    budget: u64,
    /// Items that each open container still promises, the innermost last. A container is removed
    /// when an item is read after it, not with its last item: that one may be a container too,
    /// and is nested deeper than this one.
    open: Vec<u64>,
    max_depth: u16,
    max_items: u32,
    tensors: Option<u32>,
    rrefs: Option<u32>,
}

impl<'a> ValueReader<'a> {
    /// Reads the value that `bytes` are.
    pub const fn new(bytes: &'a [u8], limits: &Limits) -> Self {
        Self {
            rest: bytes,
            promised: 1,
            budget: limits.max_items as u64,
            open: Vec::new(),
            max_depth: limits.max_depth,
            max_items: limits.max_items,
            tensors: None,
            rrefs: None,
        }
    }

    /// Refuses tensors whose index is not below `count`.
    pub const fn with_tensors(mut self, count: u32) -> Self {
        self.tensors = Some(count);
        self
    }

    /// Refuses references whose index is not below `count`.
    pub const fn with_rrefs(mut self, count: u32) -> Self {
        self.rrefs = Some(count);
        self
    }

    /// The next item.
    ///
    /// # Errors
    ///
    /// [`WireError::ValueEnded`] if all items were read; otherwise what is wrong with the bytes.
    #[expect(
        clippy::should_implement_trait,
        reason = "an iterator could not tell the end from an error with `?`"
    )]
    #[inline]
    pub fn next(&mut self) -> Result<Event<'a>, WireError> {
        self.begin_item()?;
        match self.byte()? {
            tag::NIL => Ok(Event::Nil),
            tag::FALSE => Ok(Event::Bool(false)),
            tag::TRUE => Ok(Event::Bool(true)),
            tag::INT => self.int().map(Event::Int),
            tag::FLOAT => self.float().map(Event::Float),
            tag::STR => self.str().map(Event::Str),
            tag::BYTES => self.block().map(Event::Bytes),
            tag::LIST => self.container(1).map(Event::List),
            tag::TUPLE => self.container(1).map(Event::Tuple),
            tag::MAP => self.container(2).map(Event::Map),
            tag::TENSOR => self.tensor().map(Event::Tensor),
            tag::RREF => self.rref().map(Event::RRef),
            tag::EXCEPTION => self.exception(),
            tag::PICKLE => self.block().map(Event::Pickle),
            unknown => Err(WireError::ValueTag(unknown)),
        }
    }

    /// Whether the whole value was read.
    pub const fn is_done(&self) -> bool {
        self.promised == 0
    }

    /// Checks that the whole value was read and that nothing follows it.
    ///
    /// # Errors
    ///
    /// [`WireError::ValueTruncated`] if items are missing, [`WireError::Trailing`] if bytes follow.
    pub const fn finish(&self) -> Result<(), WireError> {
        if !self.is_done() {
            Err(WireError::ValueTruncated)
        } else if !self.rest.is_empty() {
            Err(WireError::Trailing { what: "value", len: self.rest.len() })
        } else {
            Ok(())
        }
    }

    #[inline]
    fn begin_item(&mut self) -> Result<(), WireError> {
        self.promised = self.promised.checked_sub(1).ok_or(WireError::ValueEnded)?;
        while let Some(left) = self.open.last_mut() {
            if let Some(fewer) = left.checked_sub(1) {
                *left = fewer;
                return Ok(());
            }
            self.open.pop();
        }
        // No container is open, so this is the root.
        self.budget = self.budget.checked_sub(1).ok_or(WireError::ValueItems { limit: self.max_items })?;
        Ok(())
    }

    /// Opens a container whose entries are `width` items each.
    fn container(&mut self, width: u64) -> Result<usize, WireError> {
        let len = self.number()?;
        if self.open.len() >= self.max_depth.into() {
            return Err(WireError::ValueDepth { limit: self.max_depth });
        }
        let left = self.rest.len() as u64;
        let promised = len.checked_mul(width).filter(|&items| items <= left - self.promised.min(left));
        let items = promised.ok_or(WireError::ValueTruncated)?;
        self.budget =
            self.budget.checked_sub(items).ok_or(WireError::ValueItems { limit: self.max_items })?;
        self.promised += items;
        self.open.push(items);
        usize::try_from(len).map_err(|_| WireError::ValueTruncated)
    }

    #[inline]
    fn byte(&mut self) -> Result<u8, WireError> {
        let (&byte, rest) = self.rest.split_first().ok_or(WireError::ValueTruncated)?;
        self.rest = rest;
        Ok(byte)
    }

    fn int(&mut self) -> Result<i64, WireError> {
        let zigzag = self.number()?;
        Ok((zigzag >> 1).cast_signed() ^ -(zigzag & 1).cast_signed())
    }

    fn float(&mut self) -> Result<f64, WireError> {
        let (bits, rest) = self.rest.split_first_chunk().ok_or(WireError::ValueTruncated)?;
        self.rest = rest;
        Ok(f64::from_bits(u64::from_le_bytes(*bits)))
    }

    fn str(&mut self) -> Result<&'a str, WireError> {
        std::str::from_utf8(self.block()?).map_err(|_| WireError::ValueUtf8)
    }

    fn tensor(&mut self) -> Result<u32, WireError> {
        self.index(self.tensors)?.map_err(|(index, count)| WireError::ValueTensor { index, count })
    }

    fn rref(&mut self) -> Result<u32, WireError> {
        self.index(self.rrefs)?.map_err(|(index, count)| WireError::ValueRRef { index, count })
    }

    fn exception(&mut self) -> Result<Event<'a>, WireError> {
        Ok(Event::Exception { classes: self.str()?, message: self.str()?, origin: self.str()? })
    }

    /// A place in a table of `count` entries, if that is known; else the place and that count.
    fn index(&mut self, count: Option<u32>) -> Result<Result<u32, (u64, u32)>, WireError> {
        let index = self.number()?;
        let count = count.unwrap_or(u32::MAX);
        Ok(u32::try_from(index).ok().filter(|&index| index < count).ok_or((index, count)))
    }

    fn block(&mut self) -> Result<&'a [u8], WireError> {
        let len = usize::try_from(self.number()?).map_err(|_| WireError::ValueTruncated)?;
        let (block, rest) = self.rest.split_at_checked(len).ok_or(WireError::ValueTruncated)?;
        self.rest = rest;
        Ok(block)
    }

    /// Reads a number in LEB128, in as few bytes as it needs.
    #[inline]
    fn number(&mut self) -> Result<u64, WireError> {
        let first = self.byte()?;
        if first < 0x80 { Ok(first.into()) } else { self.long_number(first) }
    }

    fn long_number(&mut self, first: u8) -> Result<u64, WireError> {
        let mut number = u64::from(first & 0x7f);
        for shift in (7..64).step_by(7) {
            let byte = self.byte()?;
            // The tenth byte has room for one bit only, and no last byte may add nothing.
            if (shift == 63 && byte > 1) || byte == 0 {
                return Err(WireError::ValueNumber);
            }
            number |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(number);
            }
        }
        Err(WireError::ValueNumber)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reader(bytes: &[u8]) -> ValueReader<'_> {
        ValueReader::new(bytes, &Limits::default())
    }

    /// The first error in `bytes`, read to the end.
    fn error(bytes: &[u8], limits: &Limits) -> Option<WireError> {
        let mut reader = ValueReader::new(bytes, limits).with_tensors(2).with_rrefs(1);
        while !reader.is_done() {
            if let Err(error) = reader.next() {
                return Some(error);
            }
        }
        reader.finish().err()
    }

    fn default_error(bytes: &[u8]) -> Option<WireError> {
        error(bytes, &Limits::default())
    }

    #[test]
    fn items_are_borrowed_from_the_input() {
        let bytes = [8, 2, 5, 2, b'h', b'i', 6, 1, 0xff];
        let mut reader = reader(&bytes);

        assert_eq!(reader.next(), Ok(Event::Tuple(2)));
        assert_eq!(reader.next(), Ok(Event::Str("hi")));
        assert!(!reader.is_done());
        assert_eq!(reader.next(), Ok(Event::Bytes(&[0xff])));
        assert!(reader.is_done());
        assert_eq!(reader.finish(), Ok(()));
        assert_eq!(reader.next(), Err(WireError::ValueEnded));
    }

    #[test]
    fn numbers_of_all_lengths_are_read() {
        for value in [0, 1, -1, 63, -64, 64, 8191, -8192, i64::MAX, i64::MIN] {
            let mut bytes = Vec::new();
            super::super::ValueWriter::new(&mut bytes).int(value);

            assert_eq!(reader(&bytes).next(), Ok(Event::Int(value)));
        }
    }

    #[test]
    fn numbers_with_needless_or_too_many_bytes_are_refused() {
        assert_eq!(default_error(&[3, 0x80, 0]), Some(WireError::ValueNumber));
        let mut long = vec![3];
        long.extend([0xff; 9]);
        long.push(2);
        assert_eq!(default_error(&long), Some(WireError::ValueNumber));
    }

    #[test]
    fn a_zero_in_the_middle_of_a_number_is_a_full_byte() {
        assert_eq!(reader(&[3, 0x80, 0x80, 1]).next(), Ok(Event::Int(1 << 13)));
    }

    #[test]
    fn every_cut_of_a_value_is_truncated() {
        let whole = [8, 3, 5, 2, b'h', b'i', 4, 0, 0, 0, 0, 0, 0, 0, 0, 9, 1, 3, 0x80, 1, 2];
        assert_eq!(default_error(&whole), None);

        for cut in 0..whole.len() {
            assert_eq!(default_error(&whole[..cut]), Some(WireError::ValueTruncated), "cut at {cut}");
        }
    }

    #[test]
    fn bytes_after_the_value_are_refused() {
        assert_eq!(default_error(&[0, 0]), Some(WireError::Trailing { what: "value", len: 1 }));
    }

    #[test]
    fn unknown_tags_are_refused() {
        assert_eq!(default_error(&[14]), Some(WireError::ValueTag(14)));
        assert_eq!(default_error(&[255]), Some(WireError::ValueTag(255)));
    }

    #[test]
    fn text_must_be_utf8() {
        assert_eq!(default_error(&[5, 1, 0xff]), Some(WireError::ValueUtf8));
    }

    #[test]
    fn containers_promise_no_more_in_sum_than_there_are_bytes() {
        // Behind the inner announcement are four bytes, for its own items and one of the outer list.
        assert_eq!(default_error(&[7, 2, 7, 3, 0, 0, 0, 0]), None);
        assert_eq!(default_error(&[7, 2, 7, 4, 0, 0, 0, 0]), Some(WireError::ValueTruncated));
        assert_eq!(default_error(&[9, 2, 0, 0, 0]), Some(WireError::ValueTruncated));
    }

    #[test]
    fn lengths_near_the_end_of_numbers_are_truncated() {
        for tag in [5, 6, 7, 8, 9, 12, 13] {
            let mut bytes = vec![tag];
            bytes.extend([0xff; 9]);
            bytes.push(1);

            assert_eq!(default_error(&bytes), Some(WireError::ValueTruncated), "tag {tag}");
        }
    }

    #[test]
    fn depth_counts_containers_in_last_place_too() {
        let limits = Limits { max_depth: 3, ..Limits::default() };

        assert_eq!(error(&[7, 1, 7, 1, 7, 0], &limits), None);
        assert_eq!(error(&[7, 1, 7, 1, 7, 1, 7, 0], &limits), Some(WireError::ValueDepth { limit: 3 }));
        assert_eq!(error(&[7, 2, 7, 1, 7, 0, 7, 1, 7, 0], &limits), None);
    }

    #[test]
    fn items_are_counted_over_the_whole_value() {
        let limits = Limits { max_items: 4, ..Limits::default() };

        assert_eq!(error(&[7, 3, 0, 0, 0], &limits), None);
        assert_eq!(error(&[7, 4, 0, 0, 0, 0], &limits), Some(WireError::ValueItems { limit: 4 }));
        assert_eq!(error(&[7, 1, 9, 1, 0, 7, 1, 0], &limits), Some(WireError::ValueItems { limit: 4 }));
        assert_eq!(error(&[0], &Limits { max_items: 0, ..limits }), Some(WireError::ValueItems { limit: 0 }));
    }

    #[test]
    fn tensors_must_be_in_the_table() {
        assert_eq!(default_error(&[10, 1]), None);
        assert_eq!(default_error(&[10, 2]), Some(WireError::ValueTensor { index: 2, count: 2 }));
    }

    #[test]
    fn references_must_be_in_the_table() {
        assert_eq!(default_error(&[11, 0]), None);
        assert_eq!(default_error(&[11, 1]), Some(WireError::ValueRRef { index: 1, count: 1 }));
    }

    #[test]
    fn an_exception_is_three_texts() {
        let bytes = [12, 3, b'a', b':', b'E', 2, b'n', b'o', 0];

        let exception = Event::Exception { classes: "a:E", message: "no", origin: "" };
        assert_eq!(reader(&bytes).next(), Ok(exception));
        for cut in 0..bytes.len() {
            assert_eq!(default_error(&bytes[..cut]), Some(WireError::ValueTruncated), "cut at {cut}");
        }
        assert_eq!(default_error(&[12, 0, 1, 0xff, 0]), Some(WireError::ValueUtf8));
    }
}
