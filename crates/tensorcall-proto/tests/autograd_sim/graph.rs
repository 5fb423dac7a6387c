//! A toy tensor library: programs whose graphs lie on several workers.
//!
//! Numbers are those modulo 2^64, so that sums and products are exact in any order, and a gradient is right
//! or wrong. [`Program::gradients`] computes all gradients at once as one process would, without the protocol.

use std::collections::{BTreeMap, BTreeSet};

use crate::rng::Rng;
use crate::scenario::Scenario;

pub(crate) type Vector = Vec<u64>;

/// Index of a node.
pub(crate) type Id = usize;

#[derive(Debug, Clone)]
pub(crate) enum Op {
    Leaf,
    /// A tensor of a message; the message by index, the tensor by position.
    Received(usize, usize),
    Add(Id, Id),
    Mul(Id, Id),
    Scale(Id, u64),
    /// Some elements of the middle.
    Take(Id, usize),
    Join(Id, Id),
    /// One number, many times.
    Spread(Id),
    Sum(Id),
}

#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) worker: usize,
    pub(crate) op: Op,
    pub(crate) value: Vector,
}

/// Tensors that one worker sent to another.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) id: u64,
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) sent: Vec<Id>,
    /// What they are there; empty if nobody has read the message.
    pub(crate) received: Vec<Id>,
}

/// What a forward pass has left on all workers.
#[derive(Debug)]
pub(crate) struct Program {
    pub(crate) nodes: Vec<Node>,
    pub(crate) messages: Vec<Message>,
    /// Whom each worker told of the context.
    pub(crate) known: Vec<BTreeSet<usize>>,
    /// Where passes begin, and from which roots.
    pub(crate) starts: Vec<(usize, Vec<Id>)>,
    /// Whether messages only go from workers to later ones.
    pub(crate) is_acyclic: bool,
}

impl Program {
    pub(crate) fn random(rng: &mut Rng, scenario: &Scenario) -> Self {
        let mut program = Self {
            nodes: Vec::new(),
            messages: Vec::new(),
            known: vec![BTreeSet::new(); scenario.workers],
            starts: Vec::new(),
            is_acyclic: scenario.acyclic,
        };
        for worker in 0..scenario.workers {
            for _ in 0..rng.between(1, 3) {
                let value = (0..rng.between(1, 3)).map(|_| rng.next()).collect();
                program.push(worker, Op::Leaf, value);
            }
        }
        for _ in 0..scenario.steps {
            let worker = rng.index(scenario.workers);
            if rng.chance(scenario.messages) {
                program.send(rng, scenario, worker);
            } else {
                program.compute(rng, worker);
            }
        }
        for _ in 0..rng.between(1, scenario.passes) {
            let starter = if scenario.acyclic { scenario.workers - 1 } else { rng.index(scenario.workers) };
            let roots = (0..rng.between(1, 3)).map(|_| program.any(rng, starter)).collect();
            program.starts.push((starter, roots));
        }
        program
    }

    /// The same on other workers: those of these numbers.
    pub(crate) fn on_workers(mut self, numbers: &[usize]) -> Self {
        self.nodes.iter_mut().for_each(|node| node.worker = numbers[node.worker]);
        for message in &mut self.messages {
            (message.from, message.to) = (numbers[message.from], numbers[message.to]);
        }
        self.starts.iter_mut().for_each(|(starter, _)| *starter = numbers[*starter]);
        let mut known = vec![BTreeSet::new(); numbers.iter().max().map_or(0, |last| last + 1)];
        for (worker, others) in self.known.into_iter().enumerate() {
            known[numbers[worker]] = others.into_iter().map(|other| numbers[other]).collect();
        }
        self.known = known;
        self
    }

    fn push(&mut self, worker: usize, op: Op, value: Vector) -> Id {
        self.nodes.push(Node { worker, op, value });
        self.nodes.len() - 1
    }

    /// One of a worker's tensors, a late one rather than an early one.
    fn any(&self, rng: &mut Rng, worker: usize) -> Id {
        let own: Vec<_> = (0..self.nodes.len()).filter(|&id| self.nodes[id].worker == worker).collect();
        let (one, other) = (rng.index(own.len()), rng.index(own.len()));
        own[one.max(other)]
    }

    fn compute(&mut self, rng: &mut Rng, worker: usize) {
        let (a, b) = (self.any(rng, worker), self.any(rng, worker));
        let (x, y) = (self.nodes[a].value.clone(), self.nodes[b].value.clone());
        let pairs = |f: fn(u64, u64) -> u64| x.iter().zip(&y).map(|(&x, &y)| f(x, y)).collect();
        let (op, value) = match rng.below(7) {
            0 if x.len() == y.len() => (Op::Add(a, b), pairs(u64::wrapping_add)),
            1 | 2 if x.len() == y.len() => (Op::Mul(a, b), pairs(u64::wrapping_mul)),
            3 if x.len() > 1 => (Op::Take(a, 1), vec![x[1]]),
            4 if x.len() + y.len() <= 4 => (Op::Join(a, b), [x, y].concat()),
            5 if x.len() == 1 => (Op::Spread(a), vec![x[0]; 3]),
            6 => (Op::Sum(a), vec![x.iter().copied().fold(0, u64::wrapping_add)]),
            _ => {
                let factor = rng.next();
                (Op::Scale(a, factor), x.iter().map(|x| x.wrapping_mul(factor)).collect())
            }
        };
        self.push(worker, op, value);
    }

    fn send(&mut self, rng: &mut Rng, scenario: &Scenario, from: usize) {
        let to = if scenario.acyclic {
            if from + 1 == scenario.workers {
                return;
            }
            from + 1 + rng.index(scenario.workers - from - 1)
        } else {
            rng.index(scenario.workers)
        };
        self.known[from].insert(to);
        if rng.chance(10) {
            // Tensors without gradients: only the context travels.
            return;
        }
        let sent: Vec<_> = (0..rng.between(1, 3)).map(|_| self.any(rng, from)).collect();
        let index = self.messages.len();
        let id = (from as u64) << 48 | index as u64;
        let is_read = !rng.chance(scenario.unread);
        let receive = |(position, &id): (usize, &Id)| {
            let value = self.nodes[id].value.clone();
            self.nodes.push(Node { worker: to, op: Op::Received(index, position), value });
            self.nodes.len() - 1
        };
        let received = if is_read { sent.iter().enumerate().map(receive).collect() } else { Vec::new() };
        self.messages.push(Message { id, from, to, sent, received });
    }

    /// The nodes that a node is made of, on its own worker.
    pub(crate) fn inputs(&self, id: Id) -> Vec<Id> {
        match self.nodes[id].op {
            Op::Leaf | Op::Received(..) => Vec::new(),
            Op::Add(a, b) | Op::Mul(a, b) | Op::Join(a, b) => vec![a, b],
            Op::Scale(a, _) | Op::Take(a, _) | Op::Spread(a) | Op::Sum(a) => vec![a],
        }
    }

    /// What a node passes on of its gradient.
    pub(crate) fn pass_on(&self, id: Id, gradient: &Vector) -> Vec<(Id, Vector)> {
        let value = |id: Id| &self.nodes[id].value;
        let times = |other: Id| gradient.iter().zip(value(other)).map(|(g, x)| g.wrapping_mul(*x)).collect();
        let sum = |numbers: &[u64]| numbers.iter().copied().fold(0, u64::wrapping_add);
        match self.nodes[id].op {
            Op::Leaf | Op::Received(..) => Vec::new(),
            Op::Add(a, b) => vec![(a, gradient.clone()), (b, gradient.clone())],
            Op::Mul(a, b) => vec![(a, times(b)), (b, times(a))],
            Op::Scale(a, factor) => vec![(a, gradient.iter().map(|g| g.wrapping_mul(factor)).collect())],
            Op::Take(a, at) => {
                let mut whole = vec![0; value(a).len()];
                whole[at] = gradient[0];
                vec![(a, whole)]
            }
            Op::Join(a, b) => {
                let (one, other) = gradient.split_at(value(a).len());
                vec![(a, one.to_vec()), (b, other.to_vec())]
            }
            Op::Spread(a) => vec![(a, vec![sum(gradient)])],
            Op::Sum(a) => vec![(a, vec![gradient[0]; value(a).len()])],
        }
    }

    /// The gradients of all nodes that have one, by one run over everything.
    pub(crate) fn gradients(&self, roots: &[Id]) -> BTreeMap<Id, Vector> {
        let mut gradients = BTreeMap::new();
        for &root in roots {
            add(&mut gradients, root, &vec![1; self.nodes[root].value.len()]);
        }
        for id in (0..self.nodes.len()).rev() {
            let Some(gradient) = gradients.get(&id).cloned() else { continue };
            for (input, part) in self.pass_on(id, &gradient) {
                add(&mut gradients, input, &part);
            }
            if let Op::Received(message, position) = self.nodes[id].op {
                add(&mut gradients, self.messages[message].sent[position], &gradient);
            }
        }
        gradients
    }
}

/// Adds to what there is.
pub(crate) fn add(to: &mut BTreeMap<Id, Vector>, id: Id, gradient: &Vector) {
    let sum = to.entry(id).or_insert_with(|| vec![0; gradient.len()]);
    sum.iter_mut().zip(gradient).for_each(|(sum, part)| *sum = sum.wrapping_add(*part));
}
