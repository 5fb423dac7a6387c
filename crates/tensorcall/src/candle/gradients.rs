//! Gradients as they travel: a byte for each tensor of the message that says whether it has one, and those
//! that there are. Workers with torch pack theirs alike.

use tensorcall_proto::wire::message::Encoding;

use super::error::{Problem, Result};
use super::memory;
use crate::body::{Body, Received};
use crate::native::{Bytes, Tensor};

/// The gradients of the tensors of a message, in their order; `None` for those that have none.
pub(super) type Gradients = Vec<Option<candle_core::Tensor>>;

/// Gradients as they travel; nothing if there are none.
pub(super) fn pack(gradients: &Gradients) -> Result<Option<(Encoding, Body)>> {
    if gradients.iter().all(Option::is_none) {
        return Ok(None);
    }
    let mut body = Body::default();
    for gradient in gradients {
        body.payload.push(u8::from(gradient.is_some()));
        if let Some(gradient) = gradient {
            let index = u32::try_from(body.buffers.len()).map_err(|_| Problem::Layout)?;
            let (desc, bytes) = memory::lend(gradient)?.describe(index)?;
            body.tensors.push(desc);
            body.buffers.push(bytes.to_region());
        }
    }
    Ok(Some((Encoding::Bytes, body)))
}

/// What a worker has packed for `like`, the tensors of `message`.
pub(super) fn unpack(
    message: u64,
    encoding: Encoding,
    body: Received,
    like: &[candle_core::Tensor],
) -> Result<Gradients> {
    let wrong = |why| Problem::Gradients { message, why };
    if encoding != Encoding::Bytes {
        return Err(wrong("they are of a kind that only Python knows"));
    }
    let Received { payload, tensors, buffers, .. } = body;
    let flags = payload.as_ref();
    if flags.len() != like.len() {
        return Err(wrong("there are not as many"));
    }
    let buffers: Vec<Bytes> = buffers.into_iter().map(Bytes::from_buffer).collect();
    let mut tensors = tensors.iter();
    let mut gradients = Vec::with_capacity(flags.len());
    for (&flag, like) in flags.iter().zip(like) {
        if flag == 0 {
            gradients.push(None);
            continue;
        }
        let desc = tensors.next().ok_or_else(|| wrong("there are not as many as announced"))?;
        let buffer = usize::try_from(desc.buffer).ok().and_then(|index| buffers.get(index));
        let buffer = buffer.ok_or_else(|| wrong("one of them has no memory"))?;
        let tensor = Tensor::received(desc, buffer).map_err(crate::Error::from)?;
        let gradient = memory::copy(&tensor, false)?;
        if gradient.dims() != like.dims() {
            return Err(wrong("one of them has another shape"));
        }
        // Libraries may compute in another precision than the tensor has.
        gradients.push(Some(gradient.to_dtype(like.dtype())?));
    }
    Ok(gradients)
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;

    fn some() -> (Gradients, Vec<candle_core::Tensor>) {
        let tensors = vec![
            candle_core::Tensor::new(&[[1f32, 2.0]], &Device::Cpu).unwrap(),
            candle_core::Tensor::new(&[3f32], &Device::Cpu).unwrap(),
            candle_core::Tensor::new(4f64, &Device::Cpu).unwrap(),
        ];
        (vec![Some(tensors[0].clone()), None, Some(tensors[2].clone())], tensors)
    }

    #[test]
    fn gradients_survive_the_trip_and_so_does_that_there_is_none() {
        let (gradients, like) = some();

        let (encoding, body) = pack(&gradients).unwrap().unwrap();
        let back = unpack(7, encoding, body.receive().unwrap(), &like).unwrap();

        let texts = |gradients: &Gradients| format!("{gradients:?}");
        assert_eq!(texts(&back), texts(&gradients));
        assert_eq!(body.payload, [1, 0, 1]);
        assert!(pack(&vec![None, None]).unwrap().is_none());
    }

    #[test]
    fn gradients_that_do_not_fit_are_refused() {
        let (gradients, like) = some();
        let (encoding, body) = pack(&gradients).unwrap().unwrap();
        let refusal = |encoding, body: &Body, like: &[candle_core::Tensor]| {
            unpack(7, encoding, body.receive().unwrap(), like).unwrap_err().to_string()
        };

        assert!(refusal(Encoding::Pickle, &body, &like).contains("only Python"));
        assert!(refusal(encoding, &body, &like[1..]).contains("not as many"));
        let other = [like[0].to_dtype(DType::F64).unwrap().t().unwrap(), like[1].clone(), like[2].clone()];
        assert!(refusal(encoding, &body, &other).contains("another shape"));
        let missing = Body { tensors: body.tensors[..1].to_vec(), ..body.clone() };
        assert!(refusal(encoding, &missing, &like).contains("announced"));
        let nowhere = Body { buffers: vec![], ..body };
        assert!(refusal(encoding, &nowhere, &like).contains("memory"));
    }
}
