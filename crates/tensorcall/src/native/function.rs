//! [`Function`]: which Rust functions other workers can call, and what they may take and return.

use std::any::{Any, TypeId};
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;

use tensorcall_proto::ids::Identity;

use super::agent::Agent;
use super::answer::Answer;
use super::context::Caller;
use super::convert::{FromValue, IntoValue};
use super::states::States;
use super::value::{ConversionError, Value};

/// A function that other workers can call: a plain Rust function or closure of up to twelve arguments,
/// blocking or `async`.
///
/// Arguments are types that implement [`FromValue`], in the order in which callers pass them. In between
/// may stand what is not passed by callers: [`State<T>`], the [`Agent`] that was called, and the
/// [`Caller`]. A function returns a type that implements [`IntoValue`], or [`Keep<T>`], or a `Result` of one
/// with any error that can be displayed.
///
/// This trait is implemented for all such functions and cannot be implemented otherwise.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a function that other workers can call",
    note = "its arguments must be owned types that implement `FromValue`, or `State<T>`, `Agent` or `Caller`, and it \
            must return `T`, `Keep<T>`, `Result<T, E>` or a future of one, where `T: IntoValue` and `E: Display`"
)]
pub trait Function<Marker>: Send + Sync + 'static {
    /// What it takes from the agent.
    #[doc(hidden)]
    fn needs() -> Vec<Need>;

    /// Runs it, or the beginning of it.
    #[doc(hidden)]
    fn run(&self, call: Incoming<'_>) -> Running;
}

/// State that the functions of an agent share, given to
/// [`AgentBuilder::state`](super::builder::AgentBuilder::state). Each call gets a clone: an `Arc`, usually.
///
/// ```
/// use std::sync::{Arc, Mutex};
/// use tensorcall::State;
///
/// fn count(State(counter): State<Arc<Mutex<u64>>>, more: u64) -> u64 {
///     let mut counter = counter.lock().unwrap();
///     *counter += more;
///     *counter
/// }
/// ```
#[derive(Debug, Clone, Copy)]
pub struct State<T>(pub T);

/// A result that stays on its worker, whatever its type: for functions that are called by
/// [`Agent::remote`]. On that worker [`RRef::local`](super::rref::RRef::local) gives it to other functions.
#[derive(Debug, Clone, Copy)]
pub struct Keep<T>(pub T);

/// What a function came to.
#[doc(hidden)]
pub enum Returned {
    Value(Value),
    Kept { object: Arc<dyn Any + Send + Sync>, type_name: &'static str },
}

/// Why a function has no result.
#[doc(hidden)]
#[derive(Debug)]
pub enum Failure {
    /// It was not called as it must be.
    Usage(String),
    /// It returned an error of this type, or panicked.
    Raised { class: String, message: String },
}

pub(super) type Outcome = Result<Returned, Failure>;

/// A function on its way.
#[doc(hidden)]
pub enum Running {
    Done(Outcome),
    Later(Pin<Box<dyn Future<Output = Outcome> + Send>>),
}

pub(super) const GONE: &str = "its agent is gone";

/// A call as its function sees it.
#[doc(hidden)]
pub struct Incoming<'a> {
    pub(super) arguments: std::vec::IntoIter<Value>,
    pub(super) taken: usize,
    pub(super) states: &'a States,
    pub(super) caller: &'a Identity,
    pub(super) answer: &'a Answer,
}

/// Something that a function needs.
#[doc(hidden)]
#[derive(Debug, Clone, Copy)]
pub enum Need {
    Argument,
    State(TypeId, &'static str),
    Nothing,
}

/// What can stand for an argument of a function. See [`Function`].
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be an argument of a function that other workers call",
    note = "arguments are owned types that implement `FromValue`, or `State<T>`, `Agent` or `Caller`"
)]
pub trait Argument: Sized {
    /// Where it comes from.
    #[doc(hidden)]
    fn need() -> Need;

    /// Takes it from a call.
    #[doc(hidden)]
    fn take(call: &mut Incoming<'_>) -> Result<Self, Failure>;
}

impl<T: FromValue> Argument for T {
    fn need() -> Need {
        Need::Argument
    }

    fn take(call: &mut Incoming<'_>) -> Result<Self, Failure> {
        call.taken += 1;
        let number = call.taken;
        let wrong = |error: ConversionError| Failure::Usage(format!("argument {number}: {error}"));
        let value = call.arguments.next();
        let value = value.ok_or_else(|| Failure::Usage(format!("argument {number} is missing")))?;
        T::from_value(value).map_err(wrong)
    }
}

impl<T: Clone + Send + Sync + 'static> Argument for State<T> {
    fn need() -> Need {
        Need::State(TypeId::of::<T>(), std::any::type_name::<T>())
    }

    fn take(call: &mut Incoming<'_>) -> Result<Self, Failure> {
        let missing = || Failure::Usage(format!("there is no state {}", std::any::type_name::<T>()));
        call.states.get::<T>().cloned().map(Self).ok_or_else(missing)
    }
}

impl Argument for Agent {
    fn need() -> Need {
        Need::Nothing
    }

    fn take(call: &mut Incoming<'_>) -> Result<Self, Failure> {
        call.answer.agent().ok_or_else(|| Failure::Usage(GONE.to_owned()))
    }
}

impl Argument for Caller {
    fn need() -> Need {
        Need::Nothing
    }

    fn take(call: &mut Incoming<'_>) -> Result<Self, Failure> {
        Ok(Caller::new(call.caller.clone(), call.answer.responder().watch()))
    }
}

/// What a function may return, errors aside. See [`Function`].
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be the result of a function that other workers call",
    note = "results are types that implement `IntoValue`, or `Keep<T>`"
)]
pub trait Success {
    #[doc(hidden)]
    fn returned(self) -> Outcome;
}

impl<T: IntoValue> Success for T {
    fn returned(self) -> Outcome {
        let unfit = |error| Failure::Usage(format!("the result cannot be sent: {error}"));
        self.into_value().map(Returned::Value).map_err(unfit)
    }
}

impl<T: Send + Sync + 'static> Success for Keep<T> {
    fn returned(self) -> Outcome {
        Ok(Returned::Kept { object: Arc::new(self.0), type_name: std::any::type_name::<T>() })
    }
}

/// What a function may return. See [`Function`].
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be the result of a function that other workers call",
    note = "results are `T` or `Result<T, E>`, where `T` implements `IntoValue` or is `Keep<T>`, and `E: Display`"
)]
pub trait Output {
    #[doc(hidden)]
    fn outcome(self) -> Outcome;
}

impl<T: Success> Output for T {
    fn outcome(self) -> Outcome {
        self.returned()
    }
}

impl<T: Success, E: fmt::Display> Output for Result<T, E> {
    fn outcome(self) -> Outcome {
        match self {
            Ok(result) => result.returned(),
            // `{:#}` lets error types that know it tell their causes.
            Err(error) => Err(Failure::Raised { class: class_name::<E>(), message: format!("{error:#}") }),
        }
    }
}

/// The name of an error type as exceptions are named: `rust:path.of.Type`.
fn class_name<E>() -> String {
    let name: String = std::any::type_name::<E>().split_whitespace().collect();
    format!("rust:{}", name.replace("::", "."))
}

/// Marks functions that run to their end.
#[doc(hidden)]
#[derive(Debug)]
pub struct Blocking;

/// Marks functions that return a future.
#[doc(hidden)]
#[derive(Debug)]
pub struct Async;

macro_rules! functions {
    ($(($($type:ident)*);)*) => {$(
        impl<Fun, Out, $($type,)*> Function<(Blocking, $($type,)*)> for Fun
        where
            Fun: Fn($($type),*) -> Out + Send + Sync + 'static,
            Out: Output,
            $($type: Argument,)*
        {
            fn needs() -> Vec<Need> {
                vec![$($type::need()),*]
            }

            #[allow(non_snake_case, unused_mut, unused_variables, reason = "one macro for all numbers of arguments")]
            fn run(&self, mut call: Incoming<'_>) -> Running {
                $(let $type = match $type::take(&mut call) {
                    Ok(argument) => argument,
                    Err(failure) => return Running::Done(Err(failure)),
                };)*
                Running::Done(self($($type),*).outcome())
            }
        }

        impl<Fun, Fut, $($type,)*> Function<(Async, $($type,)*)> for Fun
        where
            Fun: Fn($($type),*) -> Fut + Send + Sync + 'static,
            Fut: Future<Output: Output> + Send + 'static,
            $($type: Argument,)*
        {
            fn needs() -> Vec<Need> {
                vec![$($type::need()),*]
            }

            #[allow(non_snake_case, unused_mut, unused_variables, reason = "one macro for all numbers of arguments")]
            fn run(&self, mut call: Incoming<'_>) -> Running {
                $(let $type = match $type::take(&mut call) {
                    Ok(argument) => argument,
                    Err(failure) => return Running::Done(Err(failure)),
                };)*
                let future = self($($type),*);
                Running::Later(Box::pin(async move { future.await.outcome() }))
            }
        }
    )*};
}

functions! {
    ();
    (A1);
    (A1 A2);
    (A1 A2 A3);
    (A1 A2 A3 A4);
    (A1 A2 A3 A4 A5);
    (A1 A2 A3 A4 A5 A6);
    (A1 A2 A3 A4 A5 A6 A7);
    (A1 A2 A3 A4 A5 A6 A7 A8);
    (A1 A2 A3 A4 A5 A6 A7 A8 A9);
    (A1 A2 A3 A4 A5 A6 A7 A8 A9 A10);
    (A1 A2 A3 A4 A5 A6 A7 A8 A9 A10 A11);
    (A1 A2 A3 A4 A5 A6 A7 A8 A9 A10 A11 A12);
    (A1 A2 A3 A4 A5 A6 A7 A8 A9 A10 A11 A12 A13);
}

impl fmt::Debug for Returned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Value(value) => value.fmt(f),
            Self::Kept { type_name, .. } => write!(f, "Keep({type_name})"),
        }
    }
}

impl fmt::Debug for Running {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if matches!(self, Self::Done(_)) { "Done" } else { "Later" })
    }
}

impl fmt::Debug for Incoming<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Incoming").field("arguments", &self.arguments.len()).finish_non_exhaustive()
    }
}
