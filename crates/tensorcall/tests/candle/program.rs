//! Random programs over several workers, and what they would be on one.
//!
//! A program is a number: it decides which operations a worker does on its inputs and its own variables, and
//! which workers it calls meanwhile with what. `python/tests/programs/gradients.py` has the same programs for
//! torch, number by number and operation by operation.
#![allow(
    dead_code,
    clippy::unwrap_used,
    reason = "workers and tests use a part each; a test stops where it is wrong"
)]

use candle_core::{D, Device, Result, Tensor, Var};

/// Rows and columns of every tensor.
const SIZE: usize = 3;
/// Variables of each worker.
const VARIABLES: usize = 2;
const MASK: u64 = u64::MAX;

/// Numbers that are the same in every language (splitmix64).
pub(crate) struct Numbers(u64);

impl Numbers {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15) & MASK;
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, count: usize) -> usize {
        usize::try_from((self.next() >> 33) % count as u64).unwrap()
    }

    #[expect(clippy::cast_precision_loss, reason = "53 bits")]
    fn fraction(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// The variables of a worker.
pub(crate) fn variables(worker: u64) -> Vec<Var> {
    let mut numbers = Numbers::new(1000 + worker);
    let mut variable = || {
        let items: Vec<f64> = (0..SIZE * SIZE).map(|_| numbers.fraction() * 2.0 - 1.0).collect();
        Var::from_vec(items, (SIZE, SIZE), &Device::Cpu).unwrap()
    };
    (0..VARIABLES).map(|_| variable()).collect()
}

/// Where programs run.
pub(crate) trait Place {
    /// How many workers there are.
    fn workers(&self) -> u64;

    /// The variables of a worker that it is to compute with.
    fn variables(&self, worker: u64) -> &[Var];

    /// Runs a program on another worker, or on the same one.
    fn call(&self, to: u64, seed: u64, depth: u64, inputs: Vec<Tensor>) -> Result<Vec<Tensor>>;
}

/// Runs program `seed` as `worker`. With a `depth` of 0 it calls nobody.
pub(crate) fn run(
    place: &impl Place,
    worker: u64,
    seed: u64,
    depth: u64,
    inputs: Vec<Tensor>,
) -> Result<Vec<Tensor>> {
    let mut numbers = Numbers::new(seed);
    let mut pool = inputs;
    pool.extend(place.variables(worker).iter().map(|variable| variable.as_tensor().clone()));
    for _ in 0..4 + numbers.below(4) {
        let a = pool[numbers.below(pool.len())].clone();
        let b = pool[numbers.below(pool.len())].clone();
        let made = match numbers.below(if depth > 0 { 12 } else { 7 }) {
            0 => (a + b)?,
            1 => (a * b)?,
            2 => a.matmul(&b)?.tanh()?,
            3 => a.sin()?,
            4 => a.t()?.contiguous()?,
            5 => Tensor::cat(&[a.narrow(0, 0, 1)?, b.narrow(0, 1, SIZE - 1)?], 0)?,
            6 => a.broadcast_sub(&b.mean_keepdim(D::Minus2)?)?,
            _ => {
                let to = numbers.below(usize::try_from(place.workers()).unwrap()) as u64;
                let seed = numbers.next() & (MASK >> 1);
                let inputs = if numbers.below(2) == 0 { vec![a] } else { vec![a, b] };
                pool.extend(place.call(to, seed, depth - 1, inputs)?);
                continue;
            }
        };
        pool.push(made);
    }
    let last = (&pool[pool.len() - 1] + &pool[pool.len() - 2])?.tanh()?;
    let any = pool[numbers.below(pool.len())].clone();
    Ok(vec![last, any])
}

/// A number that depends on all that a program returned.
pub(crate) fn loss(outputs: &[Tensor]) -> Result<Tensor> {
    let mut sum = Tensor::zeros((), candle_core::DType::F64, &Device::Cpu)?;
    for output in outputs {
        sum = (sum + output.sqr()?.sum_all()?)?;
    }
    Ok(sum)
}

/// All workers in one process and one graph.
pub(crate) struct Alone(pub(crate) Vec<Vec<Var>>);

impl Place for Alone {
    fn workers(&self) -> u64 {
        self.0.len() as u64
    }

    fn variables(&self, worker: u64) -> &[Var] {
        &self.0[usize::try_from(worker).unwrap()]
    }

    fn call(&self, to: u64, seed: u64, depth: u64, inputs: Vec<Tensor>) -> Result<Vec<Tensor>> {
        run(self, to, seed, depth, inputs)
    }
}

/// The gradients of all variables of all workers, as one process computes them; zeros where there are none.
pub(crate) fn expected(workers: u64, first: u64, seed: u64, depth: u64) -> Vec<Vec<Tensor>> {
    let alone = Alone((0..workers).map(variables).collect());
    let loss = loss(&run(&alone, first, seed, depth, Vec::new()).unwrap()).unwrap();
    let store = loss.backward().unwrap();
    let gradient = |variable: &Var| store.get(variable).cloned().unwrap_or(variable.zeros_like().unwrap());
    alone.0.iter().map(|own| own.iter().map(gradient).collect()).collect()
}

/// How far two tensors are from each other, where 1 or the larger of their numbers counts as a unit.
pub(crate) fn distance(a: &Tensor, b: &Tensor) -> f64 {
    let numbers = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f64>().unwrap();
    assert_eq!(a.dims(), b.dims());
    let pairs = numbers(a).into_iter().zip(numbers(b));
    pairs.map(|(a, b)| (a - b).abs() / a.abs().max(b.abs()).max(1.0)).fold(0.0, f64::max)
}
