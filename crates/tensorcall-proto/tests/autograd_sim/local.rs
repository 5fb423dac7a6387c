//! One worker's local engine: plans, and vector-Jacobian products, over its part of a program.

use std::collections::{BTreeMap, BTreeSet};

use tensorcall_proto::autograd::{Plan, PlannedRecv};
use tensorcall_proto::ids::Rank;

use crate::fault::Fault;
use crate::graph::{Id, Op, Program, Vector, add};

/// The gradients of a message's tensors, where there are any.
pub(crate) type Gradient = Vec<Option<Vector>>;

/// What one worker has computed in one pass.
#[derive(Debug, Default)]
pub(crate) struct Local {
    /// Of leaves and received tensors.
    pub(crate) gradients: BTreeMap<Id, Vector>,
    /// How often each node ran.
    pub(crate) runs: BTreeMap<Id, u32>,
    pub(crate) products: u32,
    pub(crate) ended: bool,
}

/// What the engine of `worker` finds; `roots` if the pass began there.
pub(crate) fn plan(program: &Program, worker: usize, roots: Option<&[Id]>, fault: Option<Fault>) -> Plan {
    let sends = program.messages.iter().filter(|message| message.from == worker);
    let mut sources: Vec<_> = sends.clone().map(|message| message.sent.clone()).collect();
    sources.extend(roots.map(<[Id]>::to_vec));
    let covered: Vec<_> = sources.iter().map(|source| reach(program, source)).collect();
    let read = |message: &&crate::graph::Message| message.to == worker && !message.received.is_empty();
    let recvs = program.messages.iter().filter(read).map(|message| {
        let reaches = |&source: &usize| message.received.iter().any(|id| covered[source].contains(id));
        let mut reach: Vec<_> = (0..sources.len()).filter(reaches).collect();
        if fault == Some(Fault::ReachForgotten) && reach.len() > 1 {
            reach.pop();
        }
        PlannedRecv { message: message.id, from: rank(message.from), reach }
    });
    Plan {
        sends: sends.map(|message| (message.id, rank(message.to))).collect(),
        roots: roots.is_some(),
        recvs: recvs.collect(),
        known: program.known[worker].iter().map(|&to| rank(to)).collect(),
    }
}

fn reach(program: &Program, source: &[Id]) -> BTreeSet<Id> {
    let (mut covered, mut left) = (BTreeSet::new(), source.to_vec());
    while let Some(id) = left.pop() {
        if covered.insert(id) {
            left.extend(program.inputs(id));
        }
    }
    covered
}

impl Local {
    /// Runs these sources, and returns what the wanted messages have got so far.
    pub(crate) fn vjp(
        &mut self,
        program: &Program,
        arrived: Vec<(Vec<Id>, Gradient)>,
        wanted: &[u64],
        fault: Option<Fault>,
    ) -> Vec<(u64, Option<Gradient>)> {
        self.products += u32::from(!arrived.is_empty());
        let mut flowing = BTreeMap::new();
        for (ids, gradient) in arrived {
            for (id, gradient) in ids.into_iter().zip(gradient) {
                if let Some(gradient) = gradient {
                    add(&mut flowing, id, &gradient);
                }
            }
        }
        if fault == Some(Fault::PartsForgotten) {
            self.gradients.retain(|&id, _| matches!(program.nodes[id].op, Op::Leaf));
        }
        // Inputs are older than what is made of them.
        while let Some((id, gradient)) = flowing.pop_last() {
            *self.runs.entry(id).or_default() += 1;
            if matches!(program.nodes[id].op, Op::Leaf | Op::Received(..)) {
                add(&mut self.gradients, id, &gradient);
            }
            for (input, part) in program.pass_on(id, &gradient) {
                add(&mut flowing, input, &part);
            }
        }
        let found = |&id: &u64| {
            let message = program.messages.iter().find(|message| message.id == id)?;
            let gradient: Vec<_> =
                message.received.iter().map(|id| self.gradients.get(id).cloned()).collect();
            gradient.iter().any(Option::is_some).then_some(gradient)
        };
        wanted.iter().map(|id| (*id, found(id))).collect()
    }
}

pub(crate) fn rank(worker: usize) -> Rank {
    u32::try_from(worker).ok().and_then(Rank::new).expect("a small number")
}
