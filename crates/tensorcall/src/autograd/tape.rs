//! [`Tape`]: what one worker has of an autograd context.

use std::any::Any;
use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Arc, OnceLock, Weak};

use tensorcall_proto::ids::Rank;
use tensorcall_proto::wire::tensor::{DType, TensorDesc};

use super::contexts::Contexts;
use crate::sync::Mutex;

/// A tensor as the graph of a tensor library has it; the local engine knows what it is.
pub type Node = Arc<dyn Any + Send + Sync>;

/// Where a tensor of a message is in the graphs of its worker.
#[derive(Clone)]
pub enum Graph {
    /// The tensor was made from this node.
    Made(Node),
    /// A message brought it.
    Received(Arc<Slot>),
}

/// A tensor that a message brought, and the node that it becomes when somebody computes with it.
pub struct Slot {
    /// The type of its elements.
    pub dtype: DType,
    /// The size of each dimension.
    pub shape: Vec<u64>,
    node: OnceLock<Node>,
}

impl Slot {
    /// A tensor like that, of which no graph knows yet.
    pub fn of(desc: &TensorDesc) -> Arc<Self> {
        Arc::new(Self { dtype: desc.dtype, shape: desc.shape.clone(), node: OnceLock::new() })
    }

    /// Its node, if somebody has computed with it.
    pub fn node(&self) -> Option<&Node> {
        self.node.get()
    }

    /// Its node, which `make` makes for the first who asks.
    ///
    /// # Errors
    ///
    /// Those of `make`.
    pub fn node_or<E>(&self, make: impl FnOnce() -> Result<Node, E>) -> Result<&Node, E> {
        if let Some(node) = self.node.get() {
            return Ok(node);
        }
        let node = make()?;
        Ok(self.node.get_or_init(|| node))
    }
}

/// The ranks of workers, above the counters, in the numbers of contexts and messages.
pub(super) const WORKER_SHIFT: u32 = 48;

/// A send function: the tensors that a message took away.
#[derive(Clone)]
pub struct Sending {
    /// Number of the message.
    pub message: u64,
    /// Who receives it.
    pub to: Rank,
    /// Its tensors that need gradients, in their order.
    pub tensors: Vec<Graph>,
}

/// A recv function: the tensors that a message brought.
#[derive(Clone)]
pub struct Receipt {
    /// Number of the message.
    pub message: u64,
    /// Who sent it.
    pub from: Rank,
    /// Its tensors that need gradients, in their order.
    pub tensors: Vec<Arc<Slot>>,
}

/// What one worker has of an autograd context.
pub struct Tape {
    id: u64,
    /// The contexts that it is one of.
    home: Weak<Contexts>,
    state: Mutex<State>,
    kept: OnceLock<Arc<dyn Any + Send + Sync>>,
}

#[derive(Default)]
struct State {
    sent: Vec<Sending>,
    received: Vec<Receipt>,
    /// The workers that it was sent to.
    known: BTreeSet<Rank>,
    /// Calls of this worker in the context that have no outcome yet.
    open_calls: usize,
    ended: bool,
}

impl Tape {
    pub(super) fn new(id: u64, home: Weak<Contexts>) -> Self {
        Self { id, home, state: Mutex::default(), kept: OnceLock::new() }
    }

    /// Number of the context, the same on all workers.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The send functions, in the order in which they were made.
    pub fn sent(&self) -> Vec<Sending> {
        self.state.lock().sent.clone()
    }

    /// The recv functions, in the order in which they were made.
    pub fn received(&self) -> Vec<Receipt> {
        self.state.lock().received.clone()
    }

    /// The workers that this one has sent the context to.
    pub fn known(&self) -> Vec<Rank> {
        self.state.lock().known.iter().copied().collect()
    }

    /// What the local engine keeps here until the context ends: always of the same type.
    pub fn kept<T: Any + Default + Send + Sync>(&self) -> Arc<T> {
        let kept = self.kept.get_or_init(|| Arc::new(T::default()));
        Arc::clone(kept).downcast().unwrap_or_default()
    }

    /// Whether the context has ended here.
    pub(super) fn is_over(&self) -> bool {
        self.state.lock().ended
    }

    pub(super) fn is_of(&self, contexts: &Contexts) -> bool {
        std::ptr::eq(self.home.as_ptr(), contexts)
    }

    /// A message takes the context, and these tensors, to `to`.
    pub(super) fn send(&self, to: Rank, message: Option<u64>, tensors: Vec<Graph>) {
        let mut state = self.state.lock();
        if state.ended {
            return;
        }
        state.known.insert(to);
        if let Some(message) = message {
            state.sent.push(Sending { message, to, tensors });
        }
    }

    /// A message was not sent, or its call had no answer: no gradients will come.
    pub(super) fn unsent(&self, message: u64) {
        let mut state = self.state.lock();
        let lost = state.sent.iter().position(|sent| sent.message == message);
        let lost = lost.map(|place| state.sent.remove(place));
        drop(state);
        drop(lost);
    }

    /// A message has brought these tensors.
    pub(super) fn receive(&self, message: u64, tensors: Vec<Arc<Slot>>) -> bool {
        let mut state = self.state.lock();
        let (false, Some(from)) = (state.ended, sender(message)) else { return false };
        state.received.push(Receipt { message, from, tensors });
        true
    }

    /// A call in the context is made.
    pub(super) fn begin_call(&self) {
        self.state.lock().open_calls += 1;
    }

    /// A call has its outcome. If it was what the end of the context has waited for: the workers to be told.
    pub(super) fn end_call(&self) -> BTreeSet<Rank> {
        let mut state = self.state.lock();
        state.open_calls = state.open_calls.saturating_sub(1);
        state.farewell()
    }

    /// Ends, here. Returns the workers to be told; none yet while calls have no outcome.
    pub(super) fn end(&self) -> BTreeSet<Rank> {
        let mut state = self.state.lock();
        state.ended = true;
        let graphs = (std::mem::take(&mut state.sent), std::mem::take(&mut state.received));
        let known = state.farewell();
        drop(state);
        // Freeing a graph may run code of the program: not under the lock.
        drop(graphs);
        known
    }
}

impl State {
    fn farewell(&mut self) -> BTreeSet<Rank> {
        if self.ended && self.open_calls == 0 { std::mem::take(&mut self.known) } else { BTreeSet::new() }
    }
}

/// The worker that made the number of a context or message.
pub(super) fn sender(number: u64) -> Option<Rank> {
    u32::try_from(number >> WORKER_SHIFT).ok().and_then(Rank::new)
}

impl fmt::Debug for Tape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tape").field("id", &self.id).finish_non_exhaustive()
    }
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Made(_) => "Made",
            Self::Received(_) => "Received",
        })
    }
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slot").field("dtype", &self.dtype).field("shape", &self.shape).finish_non_exhaustive()
    }
}

impl fmt::Debug for Sending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { message, to, tensors } = self;
        write!(f, "Sending {{ message: {message}, to: {to}, {} tensors }}", tensors.len())
    }
}

impl fmt::Debug for Receipt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { message, from, tensors } = self;
        write!(f, "Receipt {{ message: {message}, from: {from}, {} tensors }}", tensors.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tape() -> Tape {
        Tape::new(5, Weak::new())
    }

    fn rank(number: u32) -> Rank {
        Rank::new(number).unwrap()
    }

    #[test]
    fn workers_are_told_of_the_end_once_all_calls_have_their_outcomes() {
        let tape = tape();
        tape.begin_call();
        tape.begin_call();
        tape.send(rank(3), None, Vec::new());

        assert!(tape.end_call().is_empty());
        assert!(tape.end().is_empty());
        assert_eq!(tape.end_call(), BTreeSet::from([rank(3)]));
        assert!(tape.end().is_empty());
    }

    #[test]
    fn a_tape_that_has_ended_takes_nothing_in() {
        let tape = tape();
        tape.send(rank(3), Some(1), vec![Graph::Made(Arc::new("tensor"))]);
        tape.end();

        tape.send(rank(4), Some(2), vec![Graph::Made(Arc::new("tensor"))]);
        tape.receive(7, vec![Slot::of(&TensorDesc::contiguous(DType::Float32, vec![1], 0))]);

        assert!(tape.sent().is_empty() && tape.received().is_empty() && tape.known().is_empty());
    }

    #[test]
    fn a_message_that_had_no_answer_is_no_source() {
        let tape = tape();
        for message in [1, 2] {
            tape.send(rank(3), Some(message), vec![Graph::Made(Arc::new("tensor"))]);
        }

        tape.unsent(1);

        assert_eq!(tape.sent().iter().map(|sent| sent.message).collect::<Vec<_>>(), [2]);
    }

    #[test]
    fn the_sender_of_a_message_is_in_its_number() {
        assert_eq!(sender((7 << WORKER_SHIFT) + 123), Some(rank(7)));
        assert_eq!(sender(u64::MAX), None);
    }
}
