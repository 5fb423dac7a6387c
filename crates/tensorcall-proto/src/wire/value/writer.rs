//! [`ValueWriter`]: values, item by item, at the end of a vector.

use super::tag;

/// Appends items to a vector. Whoever announces a container writes its items next; nothing
/// checks that here, as the reader will.
///
/// A receiver refuses a value that breaks its [`Limits`](crate::wire::Limits): compare
/// [`ValueWriter::items`] with `max_items`, and stop at `max_depth` nested containers.
#[derive(Debug)]
pub struct ValueWriter<'a> {
    out: &'a mut Vec<u8>,
    items: u64,
}

impl<'a> ValueWriter<'a> {
    /// Appends to `out`.
    pub const fn new(out: &'a mut Vec<u8>) -> Self {
        Self { out, items: 0 }
    }

    /// How many items were written: containers and their contents alike, a map's keys and values
    /// one by one.
    pub const fn items(&self) -> u64 {
        self.items
    }

    /// Bytes in the vector so far, including those that were there before.
    pub const fn len(&self) -> usize {
        self.out.len()
    }

    /// Whether the vector is empty.
    pub const fn is_empty(&self) -> bool {
        self.out.is_empty()
    }

    /// Writes nothing as an item; Python's `None`.
    pub fn nil(&mut self) {
        self.tag(tag::NIL);
    }

    /// Writes a truth value.
    pub fn bool(&mut self, value: bool) {
        self.tag(if value { tag::TRUE } else { tag::FALSE });
    }

    /// Writes a whole number.
    pub fn int(&mut self, value: i64) {
        // Zigzag: the sign moves to the lowest bit, so that numbers near zero stay short.
        let zigzag = (value << 1) ^ (value >> 63);
        self.number(tag::INT, zigzag.cast_unsigned());
    }

    /// Writes a number of double precision; the bits of a NaN are kept.
    pub fn float(&mut self, value: f64) {
        self.tag(tag::FLOAT);
        self.out.extend_from_slice(&value.to_bits().to_le_bytes());
    }

    /// Writes text.
    pub fn str(&mut self, text: &str) {
        self.block(tag::STR, text.as_bytes());
    }

    /// Writes bytes.
    pub fn bytes(&mut self, bytes: &[u8]) {
        self.block(tag::BYTES, bytes);
    }

    /// Begins bytes: the caller sees to it that the next `len` bytes of the message are these.
    pub fn begin_bytes(&mut self, len: usize) {
        self.number(tag::BYTES, len as u64);
    }

    /// Begins a list: the next `len` values are its items.
    pub fn list(&mut self, len: usize) {
        self.number(tag::LIST, len as u64);
    }

    /// Begins a tuple: the next `len` values are its items.
    pub fn tuple(&mut self, len: usize) {
        self.number(tag::TUPLE, len as u64);
    }

    /// Begins a map: the next `2 * len` values are its keys and values in turn.
    pub fn map(&mut self, len: usize) {
        self.number(tag::MAP, len as u64);
    }

    /// Writes a tensor, by its place in the descriptor's table.
    pub fn tensor(&mut self, index: u32) {
        self.number(tag::TENSOR, index.into());
    }

    /// Writes a remote reference, by its place in the descriptor's table.
    pub fn rref(&mut self, index: u32) {
        self.number(tag::RREF, index.into());
    }

    /// Writes an exception: its classes, the most special one first, parted by spaces; what it says; and
    /// where it was raised.
    pub fn exception(&mut self, classes: &str, message: &str, origin: &str) {
        self.block(tag::EXCEPTION, classes.as_bytes());
        for text in [message, origin] {
            self.leb128(text.len() as u64);
            self.out.extend_from_slice(text.as_bytes());
        }
    }

    /// Writes a Python pickle as an opaque item.
    pub fn pickle(&mut self, bytes: &[u8]) {
        self.block(tag::PICKLE, bytes);
    }

    fn tag(&mut self, tag: u8) {
        self.items += 1;
        self.out.push(tag);
    }

    fn block(&mut self, tag: u8, bytes: &[u8]) {
        self.number(tag, bytes.len() as u64);
        self.out.extend_from_slice(bytes);
    }

    fn number(&mut self, tag: u8, number: u64) {
        self.tag(tag);
        self.leb128(number);
    }

    /// Writes a number in LEB128: seven bits a byte, the lowest first, the high bit set on all but the last.
    fn leb128(&mut self, mut number: u64) {
        while number >= 0x80 {
            self.out.push(number.to_le_bytes()[0] | 0x80);
            number >>= 7;
        }
        self.out.push(number.to_le_bytes()[0]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(write: impl FnOnce(&mut ValueWriter<'_>)) -> Vec<u8> {
        let mut out = Vec::new();
        write(&mut ValueWriter::new(&mut out));
        out
    }

    #[test]
    fn small_numbers_of_both_signs_take_two_bytes() {
        assert_eq!(written(|w| w.int(0)), [3, 0]);
        assert_eq!(written(|w| w.int(-1)), [3, 1]);
        assert_eq!(written(|w| w.int(1)), [3, 2]);
        assert_eq!(written(|w| w.int(63)), [3, 126]);
        assert_eq!(written(|w| w.int(-64)), [3, 127]);
        assert_eq!(written(|w| w.int(64)), [3, 128, 1]);
    }

    #[test]
    fn extreme_numbers_take_eleven_bytes() {
        assert_eq!(written(|w| w.int(i64::MIN)).len(), 11);
        assert_eq!(written(|w| w.int(i64::MAX)).len(), 11);
    }

    #[test]
    fn text_follows_its_length() {
        assert_eq!(written(|w| w.str("hé")), [5, 3, b'h', 0xc3, 0xa9]);
    }

    #[test]
    fn items_count_containers_and_contents() {
        let mut out = vec![0xff];
        let mut writer = ValueWriter::new(&mut out);

        writer.tuple(2);
        writer.nil();
        writer.map(1);
        writer.str("k");
        writer.bool(true);

        assert_eq!(writer.items(), 5);
        assert_eq!(writer.len(), 10);
        assert_eq!(out, [0xff, 8, 2, 0, 9, 1, 5, 1, b'k', 2]);
    }
}
