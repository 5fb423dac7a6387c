//! The bounds a receiver sets, checked before anything is allocated (NET-2).

/// What a receiver accepts from a peer.
///
/// Every number that arrives is compared with its bound before memory is taken for what it
/// announces. A sender obeys the same bounds, so both ends of a group share one configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of one descriptor. Default 1 MiB.
    pub max_control: u32,
    /// Bytes of one message's body: payload and tensors together. Default 64 GiB.
    pub max_message: u64,
    /// Tensors of one message, and also its buffers. Default 65 536.
    pub max_tensors: u32,
    /// References of one message. Default 65 536.
    pub max_rrefs: u32,
    /// How deep containers of a [`Value`](super::value::Value) may nest. Default 64.
    pub max_depth: u16,
    /// Messages of one connection and direction that may be under way at once. Default 64.
    pub max_open_streams: u32,
    /// Items of one [`Value`](super::value::Value), containers and their contents alike. Default
    /// ten million.
    pub max_items: u32,
    /// Whether buffers may lie in shared memory ([`Place::Block`](super::tensor::Place::Block)).
    /// Default no; only a receiver that maps such memory may say yes.
    pub blocks: bool,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_control: 1 << 20,
            max_message: 64 << 30,
            max_tensors: 1 << 16,
            max_rrefs: 1 << 16,
            max_depth: 64,
            max_open_streams: 64,
            max_items: 10_000_000,
            blocks: false,
        }
    }
}
