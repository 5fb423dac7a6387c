//! [`RRef`]: a typed reference to a value that stays on its worker.

use std::any::Any;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use tensorcall_proto::ids::WorkerName;

use super::agent::{Agent, Shared};
use super::answer::Object;
use super::args::Arguments;
use super::convert::{FromValue, IntoValue};
use super::future::{Call, RpcFuture};
use super::value::{ConversionError, Value};
use crate::agent::lend;
use crate::autograd::Outgoing;
use crate::error::{Error, ErrorKind, Result};
use crate::rref::{Kept, RRef as EngineRRef};

/// A reference to a value of type `T` on some worker, its owner.
///
/// It can be passed to any worker as an argument or in a result; [`fetch`](Self::fetch) copies the value
/// here; functions of the owner use it where it is, by [`local`](Self::local). The owner keeps the value
/// until the last reference anywhere is dropped. Cheap to clone.
///
/// `T` is what the owner is expected to have; nothing checks it before the value is fetched.
pub struct RRef<T> {
    rref: EngineRRef,
    shared: Arc<Shared>,
    value: PhantomData<fn() -> T>,
}

impl<T> RRef<T> {
    pub(super) fn new(rref: EngineRRef, shared: Arc<Shared>) -> Self {
        Self { rref, shared, value: PhantomData }
    }

    pub(super) fn engine(&self) -> &EngineRRef {
        &self.rref
    }

    /// The name of the worker that has the value.
    pub fn owner(&self) -> &str {
        self.rref.owner_name().map_or("", WorkerName::as_str)
    }

    /// Whether the value is on this worker.
    pub fn is_owner(&self) -> bool {
        self.rref.is_owner()
    }

    /// The same reference, to a value taken to be of another type.
    pub fn cast<U>(self) -> RRef<U> {
        RRef { rref: self.rref, shared: self.shared, value: PhantomData }
    }

    /// Calls a function of the owner with this reference as its first argument, before `arguments`.
    pub fn call<R: FromValue>(&self, function: &str, arguments: impl Arguments) -> RpcFuture<R> {
        let begin = || {
            let mut all = vec![Value::RRef(self.clone().cast())];
            all.extend(arguments.into_values()?);
            self.agent()?.begin(self.owner_name()?, self.rref.owner().rank, function, all)
        };
        RpcFuture::new(begin())
    }

    fn owner_name(&self) -> Result<WorkerName> {
        let unknown = || Error::usage(format!("the owner of {} is not known", self.rref));
        self.rref.owner_name().cloned().ok_or_else(unknown)
    }

    /// The agent that this reference belongs to.
    fn agent(&self) -> Result<Agent> {
        let agent = self.rref.belongs_to().ok_or_else(Error::shutting_down)?;
        Ok(Agent::new(agent, Arc::clone(&self.shared)))
    }
}

impl<T: FromValue> RRef<T> {
    /// Asks the owner for a copy of the value; waits for it to be made, if need be.
    ///
    /// What the function that makes it failed with is the error of every fetch.
    pub fn fetch(&self) -> RpcFuture<T> {
        let begin = || {
            let owner = self.rref.owner();
            let worker = self.owner_name()?;
            let function: Arc<str> = "fetch".into();
            let outgoing = match &self.shared.contexts {
                Some(contexts) => contexts.request(owner.rank, Vec::new())?,
                None => None,
            };
            let mark = outgoing.as_ref().map(Outgoing::mark);
            let future = self.rref.fetch_in(mark, &function, self.shared.timeout)?;
            let agent = self.rref.belongs_to().ok_or_else(Error::shutting_down)?.weak();
            let shared = Arc::clone(&self.shared);
            Ok((future, Call { agent, shared, to: owner.rank, worker, function, outgoing }))
        };
        RpcFuture::new(begin())
    }

    /// As [`fetch`](Self::fetch), and waits for it.
    ///
    /// # Errors
    ///
    /// As for every call, and [`ErrorKind::RRef`] if the value is gone.
    pub fn fetch_blocking(&self) -> Result<T> {
        self.fetch().wait()
    }
}

impl<T: Send + Sync + 'static> RRef<T> {
    /// The object itself, on its owner, where it was made by [`Keep`](super::function::Keep) or
    /// [`Agent::keep`]. Waits for it to be made, if need be.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::RRef`] if this is not its owner, if it was not made, or if it is of another type.
    pub fn local(&self) -> Result<Arc<T>> {
        let ready = self.rref.when_local()?;
        if !ready.is_done() {
            let limit = self.shared.timeout.map(|timeout| crate::clock::now() + timeout);
            if !lend(None, || ready.wait_until(limit)) {
                return Err(Error::new(
                    ErrorKind::Timeout,
                    format!("the value of {} was not made in time", self.rref),
                ));
            }
        }
        let expected = std::any::type_name::<T>();
        let wrong = |found: &str| {
            Error::new(
                ErrorKind::RRef,
                format!("{} refers to {found}, not to an object of type {expected}", self.rref),
            )
        };
        match self.rref.local_value()? {
            Some(Kept::Value(value)) => match value.downcast_ref::<Object>() {
                Some(Object::Kept { object, type_name }) => {
                    Arc::clone(object).downcast().map_err(|_| wrong(&format!("one of type {type_name}")))
                }
                Some(Object::Value(value)) => {
                    Err(wrong(&format!("a plain value ({}), to be fetched", value.kind())))
                }
                None => Err(wrong("another object")),
            },
            Some(Kept::Failed { text, .. }) => Err(Error::new(ErrorKind::RRef, text.to_string())),
            Some(Kept::Packed(_)) => Err(wrong("an error of the function that was to make it")),
            None => Err(wrong("nothing yet")),
        }
    }
}

impl Agent {
    /// A reference to a value of this worker.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Usage`] if a value cannot express it.
    pub fn share<T: IntoValue>(&self, value: T) -> Result<RRef<T>> {
        let value = value.into_value()?;
        #[cfg(feature = "candle")]
        let value = value.settled()?;
        Ok(self.refer(Object::Value(value), std::any::type_name::<T>()))
    }

    /// A reference to an object of this worker that stays here. [`RRef::local`] gives it to functions of
    /// this worker.
    pub fn keep<T: Send + Sync + 'static>(&self, object: T) -> RRef<T> {
        let type_name = std::any::type_name::<T>();
        self.refer(Object::Kept { object: Arc::new(object), type_name }, type_name)
    }

    fn refer<T>(&self, object: Object, label: &str) -> RRef<T> {
        let object: Arc<dyn Any + Send + Sync> = Arc::new(object);
        RRef::new(self.engine().make_rref(object, label), Arc::clone(self.shared()))
    }
}

impl<T> Clone for RRef<T> {
    fn clone(&self) -> Self {
        Self { rref: self.rref.clone(), shared: Arc::clone(&self.shared), value: PhantomData }
    }
}

impl<T> fmt::Debug for RRef<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RRef<{}>({})", std::any::type_name::<T>(), self.rref)
    }
}

impl<T> IntoValue for RRef<T> {
    fn into_value(self) -> Result<Value, ConversionError> {
        Ok(Value::RRef(self.cast()))
    }
}

impl<T> IntoValue for &RRef<T> {
    fn into_value(self) -> Result<Value, ConversionError> {
        self.clone().into_value()
    }
}

impl<T> FromValue for RRef<T> {
    fn from_value(value: Value) -> Result<Self, ConversionError> {
        match value {
            Value::RRef(rref) => Ok(rref.cast()),
            other => Err(ConversionError::expected("rref", &other)),
        }
    }
}
