//! [`Pass`]: this worker's part of one backward pass, as candle computes it.
//!
//! Sources are tensors that were sent, and the roots; the graph ends in variables: those that stand for
//! received tensors, whose gradients go on to their senders, and the program's own, whose gradients go to
//! the context. A product runs candle's backward pass from the sources that have arrived. As gradients are
//! linear, what several products find is added up; each source is run once.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use candle_core::{Tensor, TensorId};
use tensorcall_proto::autograd::{Plan, PlannedRecv};

use super::deep;
use super::error::{Problem, Result};
use super::gradients::{self, Gradients};
use super::graph::{self, Kept};
use super::seed;
use crate::autograd::{Arrived, Found, Tape};

/// See the module.
pub(super) struct Pass {
    tape: Arc<Tape>,
    /// By message; `None` are the roots.
    sources: HashMap<Option<u64>, Vec<Tensor>>,
    /// The variables that stand for the tensors of each message.
    received: HashMap<u64, Vec<Tensor>>,
    /// The program's variables.
    leaves: Vec<Tensor>,
    /// What the products have found so far.
    found: HashMap<TensorId, Tensor>,
    /// The most nodes that a walk has met.
    largest: usize,
}

impl Pass {
    /// Looks which variables the sources reach.
    pub(super) fn new(tape: Arc<Tape>, roots: Option<Vec<Tensor>>) -> Result<(Self, Plan)> {
        let (sent, received) = (tape.sent(), tape.received());
        let mut nodes = graph::Nodes::default();
        let mut own = HashMap::new();
        let mut pass = Self {
            sources: HashMap::new(),
            received: HashMap::new(),
            leaves: Vec::new(),
            found: HashMap::new(),
            largest: 0,
            tape,
        };
        for receipt in &received {
            let tensors =
                receipt.tensors.iter().map(|slot| nodes.of_slot(slot)).collect::<Result<Vec<_>>>()?;
            own.extend(tensors.iter().map(|tensor| (tensor.id(), receipt.message)));
            pass.received.insert(receipt.message, tensors);
        }
        let mut reach: HashMap<u64, Vec<usize>> = HashMap::new();
        let mut leaves = HashSet::new();
        let begins_here = roots.is_some();
        let sources = sent.iter().map(|sending| {
            let tensors = sending.tensors.iter().map(|tensor| nodes.of(tensor)).collect();
            (Some(sending.message), tensors)
        });
        let sources = sources.chain(roots.map(|roots| (None, Ok(roots))));
        for (place, (message, tensors)) in sources.enumerate() {
            let tensors: Vec<Tensor> = tensors?;
            for variable in pass.variables_of(&tensors)? {
                if let Some(message) = own.get(&variable.id()) {
                    let sources = reach.entry(*message).or_default();
                    if sources.last() != Some(&place) {
                        sources.push(place);
                    }
                } else if graph::is_received(variable.id()) {
                    return Err(Problem::Stranger);
                } else if leaves.insert(variable.id()) {
                    pass.leaves.push(variable);
                }
            }
            pass.sources.insert(message, tensors);
        }
        let recvs = received.iter().map(|receipt| PlannedRecv {
            message: receipt.message,
            from: receipt.from,
            reach: reach.remove(&receipt.message).unwrap_or_default(),
        });
        let plan = Plan {
            recvs: recvs.collect(),
            sends: sent.iter().map(|sending| (sending.message, sending.to)).collect(),
            roots: begins_here,
            known: pass.tape.known(),
        };
        Ok((pass, plan))
    }

    /// The variables that tensors depend on.
    fn variables_of(&mut self, tensors: &[Tensor]) -> Result<Vec<Tensor>> {
        let Some(joined) = seed::joined(tensors)? else { return Ok(Vec::new()) };
        let nodes = joined.sorted_nodes();
        self.largest = self.largest.max(nodes.len());
        Ok(nodes.into_iter().filter(|node| node.is_variable()).cloned().collect())
    }

    /// Runs sources; returns what the messages in `wanted` have got in this pass. With `last` the gradients
    /// of the program's variables go to the context.
    pub(super) fn advance(
        &mut self,
        arrived: Vec<Arrived>,
        wanted: &[u64],
        last: bool,
    ) -> Result<Vec<Found>> {
        let mut arrived = arrived;
        // Sums have the same order however gradients came.
        arrived.sort_unstable_by_key(|source| source.message);
        let mut pairs = Vec::new();
        for Arrived { message, gradients } in arrived {
            // What came for a message that is not in the plan was sent since, and waits for another pass.
            let Some(tensors) = self.sources.remove(&message) else { continue };
            match (message, gradients) {
                (Some(message), Some((encoding, body))) => {
                    let gradients = gradients::unpack(message, encoding, body, &tensors)?;
                    let both = tensors.into_iter().zip(gradients);
                    pairs.extend(both.filter_map(|(tensor, gradient)| Some((tensor, gradient?))));
                }
                (None, _) => {
                    let ones = tensors.iter().map(Tensor::ones_like).collect::<Result<Vec<_>, _>>()?;
                    pairs.extend(tensors.into_iter().zip(ones));
                }
                (Some(_), None) => {}
            }
        }
        self.run(&pairs)?;
        if last {
            let leaves = std::mem::take(&mut self.leaves);
            let found = leaves.iter().filter_map(|leaf| Some((leaf.id(), self.found.remove(&leaf.id())?)));
            self.tape.kept::<Kept>().add(found)?;
        }
        wanted.iter().map(|&message| self.take(message)).collect()
    }

    fn run(&mut self, pairs: &[(Tensor, Tensor)]) -> Result<()> {
        let Some(seeded) = seed::seeded(pairs)? else { return Ok(()) };
        let mut store = deep::run_if(self.largest, || seeded.backward())??;
        for variable in self.received.values().flatten().chain(&self.leaves) {
            let Some(gradient) = store.remove(variable) else { continue };
            // Candle's gradients may hold the graph that they were computed with.
            let gradient = gradient.detach();
            let sum = match self.found.get(&variable.id()) {
                Some(before) => (before + gradient)?,
                None => gradient,
            };
            self.found.insert(variable.id(), sum);
        }
        Ok(())
    }

    /// The gradients for the sender of a message.
    fn take(&mut self, message: u64) -> Result<Found> {
        let variables = self.received.remove(&message).unwrap_or_default();
        let gradients: Gradients =
            variables.iter().map(|variable| self.found.remove(&variable.id())).collect();
        Ok(Found { message, gradients: gradients::pack(&gradients)? })
    }
}
