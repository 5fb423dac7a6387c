//! Tensors of messages in candle's graphs.
//!
//! A tensor that was received becomes a variable, where the graph of this worker ends; in a pass it stands
//! for the tensor of the sender.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{Tensor, TensorId};

use super::error::{Problem, Result};
use super::memory;
use crate::autograd::{Graph, Node, Slot};
use crate::native;
use crate::sync::Mutex;

/// So many received tensors are remembered, to find those that are used in another context than theirs.
const REMEMBERED: usize = 1 << 16;

static RECEIVED: Mutex<Option<Remembered>> = Mutex::new(None);

#[derive(Default)]
struct Remembered {
    ids: HashSet<TensorId>,
    order: VecDeque<TensorId>,
}

/// Whether a variable stands for a received tensor.
pub(super) fn is_received(id: TensorId) -> bool {
    RECEIVED.lock().as_ref().is_some_and(|received| received.ids.contains(&id))
}

fn remember(id: TensorId) {
    let mut received = RECEIVED.lock();
    let Remembered { ids, order } = received.get_or_insert_default();
    ids.insert(id);
    order.push_back(id);
    if order.len() > REMEMBERED
        && let Some(oldest) = order.pop_front()
    {
        ids.remove(&oldest);
    }
}

/// Candle's tensor of one that is in no graph or was received.
pub(super) fn tensor_of(tensor: &native::Tensor) -> Result<Tensor> {
    match tensor.graph() {
        None => memory::copy(tensor, false),
        Some(Graph::Made(node)) => node_tensor(node),
        Some(Graph::Received(slot)) => node_tensor(slot.node_or(|| {
            let variable = memory::copy(tensor, true)?;
            remember(variable.id());
            Ok::<Node, Problem>(Arc::new(variable))
        })?),
    }
}

/// Candle's tensor for a message, with its place in the graph if it has one.
pub(super) fn to_message(tensor: &Tensor) -> Result<native::Tensor> {
    // Gradients come for what is sent, in main memory.
    let tensor = tensor.to_device(&candle_core::Device::Cpu)?;
    let sent = memory::lend(&tensor)?;
    if tensor.track_op() && tensor.dtype().is_float() {
        return Ok(sent.with_graph(Graph::Made(Arc::new(tensor))));
    }
    Ok(sent)
}

fn node_tensor(node: &Node) -> Result<Tensor> {
    node.downcast_ref::<Tensor>().cloned().ok_or(Problem::Roots)
}

/// The nodes of a pass. Received tensors that nobody has computed with may have been sent on as they are:
/// in the pass variables stand for them, too.
#[derive(Default)]
pub(super) struct Nodes(HashMap<*const Slot, Tensor>);

impl Nodes {
    pub(super) fn of(&mut self, tensor: &Graph) -> Result<Tensor> {
        match tensor {
            Graph::Made(node) => node_tensor(node),
            Graph::Received(slot) => self.of_slot(slot),
        }
    }

    pub(super) fn of_slot(&mut self, slot: &Arc<Slot>) -> Result<Tensor> {
        if let Some(tensor) = self.0.get(&Arc::as_ptr(slot)) {
            return Ok(tensor.clone());
        }
        let tensor = match slot.node() {
            Some(node) => node_tensor(node)?,
            None => memory::stand_in(slot.dtype, &slot.shape)?,
        };
        self.0.insert(Arc::as_ptr(slot), tensor.clone());
        Ok(tensor)
    }
}

/// The gradients that passes have brought to the variables of this worker.
#[derive(Default)]
pub(super) struct Kept(Mutex<HashMap<TensorId, Tensor>>);

impl Kept {
    pub(super) fn add(&self, found: impl Iterator<Item = (TensorId, Tensor)>) -> Result<()> {
        let mut gradients = self.0.lock();
        for (id, gradient) in found {
            let sum = match gradients.get(&id) {
                Some(before) => (before + gradient)?,
                None => gradient,
            };
            gradients.insert(id, sum);
        }
        Ok(())
    }

    /// A copy, as candle's optimizers take it.
    pub(super) fn store(&self) -> GradStore {
        let mut store = GradStore::default();
        for (id, gradient) in &*self.0.lock() {
            store.insert_id(*id, gradient.clone());
        }
        store
    }
}
