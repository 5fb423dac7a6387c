//! Python objects of plain types as [`Value`](tensorcall_proto::wire::value::Value) bytes, and back.
//!
//! Only *exact* types travel this way: `None`, `bool`, `int` of 64 bits, `float`, `str`, `bytes`, `tuple`,
//! `list`, `dict`, `torch.Tensor` and references. Everything else, and everything whose meaning would suffer, is
//! left to pickle: one container that occurs twice (its identity would be lost) or in itself, text
//! with surrogates, nesting beyond the limit of the wire.
//!
//! Between Python and other languages there is no pickle. What is for them may also have parameters, and a container may occur twice, since only its contents mean anything there
//! ([`encode_plain`]); what is not plain even so is an error that names it (`unfit.rs`).

use std::collections::HashSet;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyDict, PyFloat, PyInt, PyList, PyNone, PyString, PyTuple};
use tensorcall_proto::wire::{Event, Limits, ValueReader, ValueWriter, WireError};

use crate::rref;
use crate::tensor::TensorWriter;

/// Whether an object could be written as plain data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub(crate) enum Plain {
    /// It was.
    Yes,
    /// It has to be pickled. Nothing was written, but tensors may have been added.
    No,
}

/// Appends `object` to `out`, its tensors to `tensors` and its references to `rrefs`.
///
/// # Errors
///
/// Exceptions out of torch; what is merely not plain is [`Plain::No`].
pub(crate) fn encode<'py>(
    object: &Bound<'py, PyAny>,
    out: &mut Vec<u8>,
    tensors: &mut TensorWriter<'py>,
    rrefs: &mut Vec<tensorcall::engine::RRef>,
) -> PyResult<Plain> {
    let before = out.len();
    let limits = Limits::default();
    let writer = ValueWriter::new(out);
    let mut encoder = Encoder { writer, tensors, rrefs, limits, seen: Seen::default(), foreign: false };
    let plain = encoder.value(object, 0)?;
    if plain == Plain::No {
        out.truncate(before);
    }
    Ok(plain)
}

/// As [`encode`], for who is no Python program.
///
/// # Errors
///
/// Exceptions out of torch, and that a reference cannot be passed on.
pub(crate) fn encode_plain<'py>(
    object: &Bound<'py, PyAny>,
    out: &mut Vec<u8>,
    tensors: &mut TensorWriter<'py>,
    rrefs: &mut Vec<tensorcall::engine::RRef>,
) -> PyResult<Plain> {
    let (limits, writer) = (Limits::default(), ValueWriter::new(out));
    let mut encoder = Encoder { writer, tensors, rrefs, limits, seen: Seen::default(), foreign: true };
    encoder.value(object, 0)
}

struct Encoder<'a, 'py> {
    writer: ValueWriter<'a>,
    tensors: &'a mut TensorWriter<'py>,
    rrefs: &'a mut Vec<tensorcall::engine::RRef>,
    limits: Limits,
    seen: Seen,
    /// The receiver is no Python program.
    foreign: bool,
}

impl<'py> Encoder<'_, 'py> {
    /// Writes one value; `depth` containers are open around it.
    fn value(&mut self, object: &Bound<'py, PyAny>, depth: u16) -> PyResult<Plain> {
        if object.is_none() {
            self.writer.nil();
        } else if let Ok(text) = object.cast_exact::<PyString>() {
            // Surrogates have no UTF-8.
            let Ok(text) = text.to_str() else {
                return Ok(Plain::No);
            };
            self.writer.str(text);
        } else if let Ok(number) = object.cast_exact::<PyInt>() {
            let Ok(number) = number.extract() else {
                return Ok(Plain::No);
            };
            self.writer.int(number);
        } else if let Ok(number) = object.cast_exact::<PyFloat>() {
            self.writer.float(number.value());
        } else if self.tensors.is_exact_tensor(object) {
            let Ok(index) = self.tensors.try_push(object)? else {
                return Ok(Plain::No);
            };
            self.writer.tensor(index);
        } else if let Ok(truth) = object.cast_exact::<PyBool>() {
            self.writer.bool(truth.is_true());
        } else if let Ok(bytes) = object.cast_exact::<PyBytes>() {
            self.writer.bytes(bytes.as_bytes());
        } else {
            return self.container(object, depth);
        }
        Ok(self.within_limits())
    }

    fn container(&mut self, object: &Bound<'py, PyAny>, depth: u16) -> PyResult<Plain> {
        if depth >= self.limits.max_depth {
            return Ok(Plain::No);
        }
        if let Ok(tuple) = object.cast_exact::<PyTuple>() {
            // The empty tuple is one object everywhere.
            if !tuple.is_empty() && !self.first_time(object) {
                return Ok(Plain::No);
            }
            self.writer.tuple(tuple.len());
            self.items(tuple.iter_borrowed(), depth)
        } else if let Ok(list) = object.cast_exact::<PyList>() {
            if !self.first_time(object) {
                return Ok(Plain::No);
            }
            // A copy, since reading a tensor may run Python code that changes the list.
            let items: Vec<_> = list.iter().collect();
            self.writer.list(items.len());
            self.items(&items, depth)
        } else if let Ok(dict) = object.cast_exact::<PyDict>() {
            if !self.first_time(object) {
                return Ok(Plain::No);
            }
            let pairs: Vec<_> = dict.iter().collect();
            self.writer.map(pairs.len());
            self.items(pairs.iter().flat_map(|(key, value)| [key, value]), depth)
        } else {
            self.special(object)
        }
    }

    /// References, and what only receivers in other languages get as plain data.
    fn special(&mut self, object: &Bound<'py, PyAny>) -> PyResult<Plain> {
        if rref::is_rref(object)? {
            // One object is one reference, and pickling says why one cannot be passed on.
            let rref = match rref::of_python(object) {
                Ok(rref) if self.first_time(object) => rref,
                Err(error) if self.foreign => return Err(error),
                _ => return Ok(Plain::No),
            };
            self.writer.rref(u32::try_from(self.rrefs.len())?);
            self.rrefs.push(rref);
        } else if self.foreign
            && let Some(tensor) = self.tensors.tensor_of_parameter(object)?
            && let Ok(index) = self.tensors.try_push(&tensor)?
        {
            self.writer.tensor(index);
        } else {
            return Ok(Plain::No);
        }
        Ok(self.within_limits())
    }

    /// Whether a container or reference may be written: where its identity counts, only once.
    fn first_time(&mut self, object: &Bound<'_, PyAny>) -> bool {
        self.foreign || self.seen.first_time(object)
    }

    fn items<I>(&mut self, items: I, depth: u16) -> PyResult<Plain>
    where
        I: IntoIterator,
        I::Item: std::ops::Deref<Target = Bound<'py, PyAny>>,
    {
        for item in items {
            if self.value(&item, depth + 1)? == Plain::No {
                return Ok(Plain::No);
            }
        }
        Ok(self.within_limits())
    }

    fn within_limits(&self) -> Plain {
        if self.writer.items() <= self.limits.max_items.into() { Plain::Yes } else { Plain::No }
    }
}

/// Containers met so far, by address. They stay alive in the object that is being written.
#[derive(Default)]
struct Seen {
    few: Vec<usize>,
    many: HashSet<usize>,
}

impl Seen {
    /// So many are compared one by one.
    const FEW: usize = 8;

    fn first_time(&mut self, object: &Bound<'_, PyAny>) -> bool {
        let address = object.as_ptr() as usize;
        if self.few.contains(&address) {
            return false;
        }
        if self.few.len() < Self::FEW {
            self.few.push(address);
            return true;
        }
        self.many.insert(address)
    }
}

/// Builds the object that `bytes` are, with `tensors` and `rrefs` in the places that name them.
///
/// # Errors
///
/// `RuntimeError` if the bytes are no value; `TypeError` for a dict key that cannot be hashed.
pub(crate) fn decode<'py>(
    py: Python<'py>,
    bytes: &[u8],
    tensors: &[Bound<'py, PyAny>],
    rrefs: &[Bound<'py, PyAny>],
) -> PyResult<Bound<'py, PyAny>> {
    let reader = ValueReader::new(bytes, &Limits::default());
    let reader = reader.with_tensors(u32::try_from(tensors.len())?).with_rrefs(u32::try_from(rrefs.len())?);
    let mut decoder = Decoder { py, reader, tensors, rrefs };
    let object = decoder.value()?;
    decoder.reader.finish().map_err(malformed)?;
    Ok(object)
}

struct Decoder<'a, 'py> {
    py: Python<'py>,
    reader: ValueReader<'a>,
    tensors: &'a [Bound<'py, PyAny>],
    rrefs: &'a [Bound<'py, PyAny>],
}

impl<'py> Decoder<'_, 'py> {
    /// Reads one value. Recurses as deep as the reader lets containers nest, and reserves by
    /// announced lengths, whose sum the reader bounds by the input (NET-2).
    fn value(&mut self) -> PyResult<Bound<'py, PyAny>> {
        let py = self.py;
        Ok(match self.reader.next().map_err(malformed)? {
            Event::Nil => PyNone::get(py).to_owned().into_any(),
            Event::Bool(truth) => PyBool::new(py, truth).to_owned().into_any(),
            Event::Int(number) => number.into_pyobject(py)?.into_any(),
            Event::Float(number) => PyFloat::new(py, number).into_any(),
            Event::Str(text) => PyString::new(py, text).into_any(),
            Event::Bytes(bytes) => PyBytes::new(py, bytes).into_any(),
            Event::List(len) => PyList::new(py, self.values(len)?)?.into_any(),
            Event::Tuple(len) => PyTuple::new(py, self.values(len)?)?.into_any(),
            Event::Map(len) => self.map(len)?.into_any(),
            Event::Tensor(index) => entry(self.tensors, index)?,
            Event::RRef(index) => entry(self.rrefs, index)?,
            Event::Exception { .. } => {
                return Err(PyRuntimeError::new_err("an exception in the place of plain data"));
            }
            Event::Pickle(_) => return Err(PyRuntimeError::new_err("a pickle inside a plain value")),
        })
    }

    fn values(&mut self, len: usize) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let mut values = Vec::with_capacity(len);
        for _ in 0..len {
            values.push(self.value()?);
        }
        Ok(values)
    }

    fn map(&mut self, len: usize) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(self.py);
        for _ in 0..len {
            let key = self.value()?;
            dict.set_item(key, self.value()?)?;
        }
        Ok(dict)
    }
}

fn entry<'py>(table: &[Bound<'py, PyAny>], index: u32) -> PyResult<Bound<'py, PyAny>> {
    let entry = usize::try_from(index).ok().and_then(|index| table.get(index));
    let missing = || PyRuntimeError::new_err("a value names a tensor or a reference that is not there");
    entry.cloned().ok_or_else(missing)
}

/// An exception that is plain data: its classes, what it says, and where it was raised.
pub(crate) type PlainException<'a> = (&'a str, &'a str, &'a str);

/// The exception that `bytes` are.
///
/// # Errors
///
/// `RuntimeError` if they are none.
pub(crate) fn decode_exception(bytes: &[u8]) -> PyResult<PlainException<'_>> {
    let mut reader = ValueReader::new(bytes, &Limits::default());
    let event = reader.next().map_err(malformed)?;
    reader.finish().map_err(malformed)?;
    match event {
        Event::Exception { classes, message, origin } => Ok((classes, message, origin)),
        _ => Err(PyRuntimeError::new_err("plain data in the place of an exception")),
    }
}

/// The bytes of an exception.
pub(crate) fn encode_exception((classes, message, origin): PlainException<'_>) -> Vec<u8> {
    let mut payload = Vec::new();
    ValueWriter::new(&mut payload).exception(classes, message, origin);
    payload
}

#[expect(clippy::needless_pass_by_value, reason = "a function for `map_err`")]
fn malformed(error: WireError) -> PyErr {
    PyRuntimeError::new_err(format!("malformed value: {error}"))
}
