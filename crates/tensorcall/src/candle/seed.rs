//! [`Seed`]: gives candle's backward pass a gradient to begin with.
//!
//! Candle begins at one number with the gradient 1. A seed makes such a number of a tensor, and hands the
//! tensor a gradient of our choice: a vector-Jacobian product over many tensors is one run over the sum of
//! their seeds.

use candle_core::{CpuStorage, CustomOp1, DType, Layout, Result, Shape, Tensor};

/// See the module.
struct Seed(Tensor);

impl CustomOp1 for Seed {
    fn name(&self) -> &'static str {
        "tensorcall seed"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        // Its value means nothing; all seeds have the same type, so that they can be added.
        Ok((CpuStorage::F64(vec![0.0]), Shape::from(1)))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor) -> Result<Option<Tensor>> {
        Ok(Some(self.0.clone()))
    }
}

/// A number from which candle's backward pass reaches the tensors with these gradients, one for each.
pub(super) fn seeded(pairs: &[(Tensor, Tensor)]) -> Result<Option<Tensor>> {
    if pairs.is_empty() {
        return Ok(None);
    }
    let seed = |(tensor, gradient): &(Tensor, Tensor)| tensor.apply_op1(Seed(gradient.clone()));
    let seeds = pairs.iter().map(seed).collect::<Result<Vec<_>>>()?;
    // One node with many arguments: a chain of sums would be as deep as there are seeds.
    Tensor::cat(&seeds, 0)?.sum_all().map(Some)
}

/// A number that depends on these tensors, to walk the graph from.
pub(super) fn joined(tensors: &[Tensor]) -> Result<Option<Tensor>> {
    let nothing = Tensor::zeros((), DType::F64, &candle_core::Device::Cpu)?;
    let pairs: Vec<_> = tensors.iter().map(|tensor| (tensor.clone(), nothing.clone())).collect();
    seeded(&pairs)
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::*;

    #[test]
    fn gradients_of_several_tensors_of_several_types_go_in_at_once() {
        let variable = Var::new(&[1f32, 2.0, 3.0], &Device::Cpu).unwrap();
        let square = variable.sqr().unwrap();
        let wide = variable.to_dtype(DType::F64).unwrap();
        let pairs = [
            (square, Tensor::new(&[1f32, 10.0, 100.0], &Device::Cpu).unwrap()),
            (wide, Tensor::new(&[0.5f64, 0.5, 0.5], &Device::Cpu).unwrap()),
            (variable.as_tensor().clone(), Tensor::new(&[0f32, 0.0, 1.0], &Device::Cpu).unwrap()),
        ];

        let gradients = seeded(&pairs).unwrap().unwrap().backward().unwrap();

        let found = gradients.get(&variable).unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(found, [2.5, 40.5, 601.5]);
    }

    #[test]
    fn a_walk_finds_what_the_tensors_depend_on() {
        let variables: Vec<_> = (0..3).map(|_| Var::zeros(2, DType::F32, &Device::Cpu).unwrap()).collect();
        let tensors = [(&*variables[0] * &*variables[1]).unwrap(), variables[0].exp().unwrap()];

        let joined = joined(&tensors).unwrap().unwrap();

        let found = |variable: &Var| joined.sorted_nodes().iter().any(|node| node.id() == variable.id());
        assert_eq!(variables.iter().map(found).collect::<Vec<_>>(), [true, true, false]);
    }
}
