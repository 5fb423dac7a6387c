//! [`WireError`]: one variant per way bytes can be wrong.

/// Why bytes from a peer are not what they should be.
///
/// The peer broke the protocol or is another program: the connection cannot go on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// The first two bytes of a frame are not `TC`.
    #[error("frame starts with {found:02x?} instead of `TC`")]
    Magic {
        /// What is there instead.
        found: [u8; 2],
    },
    /// The frame is of a version this program does not speak.
    #[error("wire version {found} is not {supported}")]
    Version {
        /// Version of the frame.
        found: u8,
        /// The version spoken here.
        supported: u8,
    },
    /// No frame kind has this number.
    #[error("frame kind {0} is unknown")]
    FrameKind(u8),
    /// The frame has flags that this version does not define.
    #[error("frame flags {0:#04x} are unknown")]
    FrameFlags(u8),
    /// No priority has this number.
    #[error("frame priority {0} is unknown")]
    FramePriority(u8),
    /// Bytes 6 and 7 of a frame are not zero.
    #[error("reserved header field is {0:#06x}")]
    FrameReserved(u16),
    /// This kind of frame cannot have these lengths or flags.
    #[error("frame of kind {kind} with {control_len} control and {body_len} body bytes is malformed")]
    FrameShape {
        /// Number of the frame kind.
        kind: u8,
        /// Announced descriptor bytes.
        control_len: u32,
        /// Announced body bytes.
        body_len: u64,
    },
    /// A descriptor exceeds [`Limits::max_control`](super::Limits::max_control).
    #[error("descriptor of {len} bytes exceeds the limit of {limit}")]
    ControlTooLarge {
        /// Length in bytes.
        len: u64,
        /// The limit in bytes.
        limit: u32,
    },
    /// A body exceeds [`Limits::max_message`](super::Limits::max_message).
    #[error("body of {len} bytes exceeds the limit of {limit}")]
    BodyTooLarge {
        /// Length in bytes; `u64::MAX` if the sum of the parts does not fit a `u64`.
        len: u64,
        /// The limit in bytes.
        limit: u64,
    },
    /// A part of a descriptor is cut short or holds a value that its type does not have.
    #[error("descriptor is malformed at its {part}")]
    Malformed {
        /// Which part.
        part: &'static str,
    },
    /// Bytes follow where a descriptor or a value should end.
    #[error("{len} bytes follow the end of a {what}")]
    Trailing {
        /// `"descriptor"` or `"value"`.
        what: &'static str,
        /// How many bytes follow.
        len: usize,
    },
    /// A table of a descriptor has more entries than its limit.
    #[error("descriptor has {count} {what}, more than the limit of {limit}")]
    TooMany {
        /// What is counted.
        what: &'static str,
        /// How many are announced.
        count: u64,
        /// How many are allowed.
        limit: u32,
    },
    /// A function slot is used that was not defined, or defined that is not the next one.
    #[error("function slot {slot} is not defined, or defined out of turn")]
    FunctionSlot {
        /// The slot.
        slot: u32,
    },
    /// A message that never has a body announces one.
    #[error("a message without a body announces one")]
    UnexpectedBody,
    /// A buffer lies in shared memory, which is not enabled here, or beyond the end of addresses.
    #[error("buffer {index} lies in a block that is not accepted")]
    Block {
        /// Index of the buffer.
        index: usize,
    },
    /// No dtype has this code.
    #[error("dtype code {0} is unknown")]
    DType(u8),
    /// A tensor has more dimensions than [`MAX_DIMS`](super::tensor::MAX_DIMS), or not as many
    /// strides as dimensions.
    #[error("tensor has {dims} dimensions and {strides} strides")]
    TensorDims {
        /// Number of dimensions.
        dims: usize,
        /// Number of strides; equal to `dims` where none are given.
        strides: usize,
    },
    /// The size of a tensor does not fit a signed 64-bit number.
    #[error("size of a tensor overflows")]
    TensorOverflow,
    /// A tensor names a buffer that the descriptor does not have.
    #[error("tensor lies in buffer {buffer} of {count}")]
    TensorBuffer {
        /// The named buffer.
        buffer: u32,
        /// How many there are.
        count: usize,
    },
    /// A tensor reaches beyond the end of its buffer.
    #[error("tensor ends at byte {end} of a buffer of {len}")]
    TensorExtent {
        /// One past the tensor's last byte.
        end: u64,
        /// Length of the buffer in bytes.
        len: u64,
    },
    /// A tensor's offset is not a multiple of its item size.
    #[error("tensor offset {offset} is not a multiple of its item size {item}")]
    TensorOffset {
        /// The offset in bytes.
        offset: u64,
        /// The item size in bytes.
        item: u64,
    },
    /// A value ends in the middle of an item, or before all announced items came.
    #[error("value is cut short")]
    ValueTruncated,
    /// More items were asked for than the value has.
    #[error("value has no further item")]
    ValueEnded,
    /// No kind of value has this tag.
    #[error("value tag {0} is unknown")]
    ValueTag(u8),
    /// A number is written in more bytes than it needs or does not fit 64 bits.
    #[error("value has a malformed number")]
    ValueNumber,
    /// A string is not UTF-8.
    #[error("value has a string that is not UTF-8")]
    ValueUtf8,
    /// Containers nest deeper than [`Limits::max_depth`](super::Limits::max_depth).
    #[error("value nests deeper than {limit}")]
    ValueDepth {
        /// The limit.
        limit: u16,
    },
    /// The value has more items than [`Limits::max_items`](super::Limits::max_items).
    #[error("value has more than {limit} items")]
    ValueItems {
        /// The limit.
        limit: u32,
    },
    /// The value names a reference that the message does not have.
    #[error("value names reference {index} of {count}")]
    ValueRRef {
        /// The named reference.
        index: u64,
        /// How many references the message has.
        count: u32,
    },
    /// The value names a tensor that the message does not have.
    #[error("value names tensor {index} of {count}")]
    ValueTensor {
        /// The named tensor.
        index: u64,
        /// How many tensors the message has.
        count: u32,
    },
}
