//! Why an object is not plain data, for people: where in it, and what is there.
//!
//! Only looked for when [`value::encode_plain`](crate::value::encode_plain) has said no: what it accepts is
//! repeated here, without writing anything.

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple};
use tensorcall_proto::wire::Limits;

use crate::rref;
use crate::tensor::TensorWriter;

/// What data that goes to other languages may be made of.
const ALLOWED: &str = "Between Python and Rust travel None, bool, int of 64 bits, float, str, bytes, list, tuple, \
                       dict, torch.Tensor and RRef";

/// The exception that `what` is not plain data because of what is found in `object`.
pub(crate) fn error(what: &str, object: &Bound<'_, PyAny>) -> PyErr {
    match first(object) {
        Ok(Some(Found { place, problem })) if place.is_empty() => {
            PyTypeError::new_err(format!("{what} is not plain data: it is {problem}. {ALLOWED}"))
        }
        Ok(Some(Found { place, problem })) => {
            PyTypeError::new_err(format!("{what} is not plain data: at {place} is {problem}. {ALLOWED}"))
        }
        Ok(None) => PyTypeError::new_err(format!("{what} has more items than a message may have")),
        Err(error) => error,
    }
}

/// Which of some arguments is not plain data: its name and itself. None, if each is.
pub(crate) fn argument<'py>(
    args: &Bound<'py, PyTuple>,
    kwargs: &Bound<'py, PyDict>,
) -> PyResult<Option<(String, Bound<'py, PyAny>)>> {
    for (number, argument) in (1..).zip(args.iter()) {
        if first(&argument)?.is_some() {
            return Ok(Some((format!("argument {number}"), argument)));
        }
    }
    for (name, argument) in kwargs.iter() {
        if first(&name)?.is_some() {
            return Ok(Some((format!("the name of argument {}", name.repr()?), name)));
        }
        if first(&argument)?.is_some() {
            return Ok(Some((format!("argument {}", name.repr()?), argument)));
        }
    }
    Ok(None)
}

/// The first thing that is not plain.
struct Found {
    /// Where, as Python would index it.
    place: String,
    problem: String,
}

fn first(object: &Bound<'_, PyAny>) -> PyResult<Option<Found>> {
    let mut search = Search { tensors: TensorWriter::new(object.py())?, place: Vec::new() };
    Ok(search.look(object)?.map(|problem| Found { place: search.place.concat(), problem }))
}

struct Search<'py> {
    tensors: TensorWriter<'py>,
    /// The way to what is looked at.
    place: Vec<String>,
}

impl<'py> Search<'py> {
    /// What is wrong with `object`; the place is then where.
    fn look(&mut self, object: &Bound<'py, PyAny>) -> PyResult<Option<String>> {
        if object.is_none() || object.is_exact_instance_of::<PyBool>() || is_simple(object) {
            return Ok(None);
        }
        if let Ok(text) = object.cast_exact::<PyString>() {
            return Ok(text.to_str().is_err().then(|| "text with surrogates, which has no UTF-8".to_owned()));
        }
        if let Ok(number) = object.cast_exact::<PyInt>() {
            return Ok(number.extract::<i64>().is_err().then(|| "an int of more than 64 bits".to_owned()));
        }
        if self.tensors.is_exact_tensor(object) {
            return Ok(self.tensors.try_push(object)?.err().map(|unfit| format!("a torch.Tensor: {unfit}")));
        }
        if self.tensors.tensor_of_parameter(object)?.is_some() || rref::is_rref(object)? {
            return Ok(None);
        }
        if self.place.len() > Limits::default().max_depth.into() {
            self.place.truncate(3);
            return Ok(Some("more nesting than a message may have (does it contain itself?)".into()));
        }
        self.look_inside(object)
    }

    fn look_inside(&mut self, object: &Bound<'py, PyAny>) -> PyResult<Option<String>> {
        if let Ok(tuple) = object.cast_exact::<PyTuple>() {
            return self.items(tuple.iter());
        }
        if let Ok(list) = object.cast_exact::<PyList>() {
            return self.items(list.iter());
        }
        let Ok(dict) = object.cast_exact::<PyDict>() else {
            return Ok(Some(format!("an object of type {}", object.get_type().fully_qualified_name()?)));
        };
        for (key, value) in dict.iter() {
            let shown = key.repr()?.to_string();
            for (step, item) in [(format!(" key {shown}"), key), (format!("[{shown}]"), value)] {
                self.place.push(step);
                if let Some(problem) = self.look(&item)? {
                    return Ok(Some(problem));
                }
                self.place.pop();
            }
        }
        Ok(None)
    }

    fn items(&mut self, items: impl Iterator<Item = Bound<'py, PyAny>>) -> PyResult<Option<String>> {
        for (number, item) in items.enumerate() {
            self.place.push(format!("[{number}]"));
            if let Some(problem) = self.look(&item)? {
                return Ok(Some(problem));
            }
            self.place.pop();
        }
        Ok(None)
    }
}

fn is_simple(object: &Bound<'_, PyAny>) -> bool {
    object.is_exact_instance_of::<PyFloat>() || object.is_exact_instance_of::<PyBytes>()
}
