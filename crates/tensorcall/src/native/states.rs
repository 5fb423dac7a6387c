//! State and functions of an agent, by type and by name.

use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::fmt;
use std::marker::PhantomData;

use rustc_hash::FxHashMap;

use super::function::{Function, Incoming, Need, Running};
use crate::error::{Error, Result};

/// State that functions share, one of each type.
#[derive(Default)]
pub(crate) struct States(HashMap<TypeId, Box<dyn Any + Send + Sync>>);

impl States {
    pub(super) fn insert<T: Send + Sync + 'static>(&mut self, state: T) {
        self.0.insert(TypeId::of::<T>(), Box::new(state));
    }

    pub(super) fn get<T: 'static>(&self) -> Option<&T> {
        self.0.get(&TypeId::of::<T>())?.downcast_ref()
    }
}

impl fmt::Debug for States {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "States({})", self.0.len())
    }
}

/// Functions by name.
#[derive(Default)]
pub(crate) struct Functions(FxHashMap<String, Registered>);

/// A function, whatever its type.
pub(crate) struct Registered {
    run: Box<dyn Run>,
    needs: Vec<Need>,
}

trait Run: Send + Sync {
    fn run(&self, call: Incoming<'_>) -> Running;
}

struct Typed<F, M>(F, PhantomData<fn() -> M>);

impl<M, F: Function<M>> Run for Typed<F, M> {
    fn run(&self, call: Incoming<'_>) -> Running {
        self.0.run(call)
    }
}

impl Functions {
    /// Replaces a function of the same name.
    pub(crate) fn insert<M: 'static>(&mut self, name: String, function: impl Function<M>) {
        fn needs<M, F: Function<M>>(_: &F) -> Vec<Need> {
            F::needs()
        }
        let needs = needs(&function);
        let run = Box::new(Typed(function, PhantomData::<fn() -> M>));
        self.0.insert(name, Registered { run, needs });
    }

    /// Looks whether every function finds the state that it needs.
    ///
    /// # Errors
    ///
    /// If one does not; names it.
    pub(crate) fn check(&self, states: &States) -> Result<()> {
        for (name, function) in &self.0 {
            for need in &function.needs {
                if let Need::State(type_id, type_name) = need
                    && !states.0.contains_key(type_id)
                {
                    return Err(Error::usage(format!(
                        "function '{name}' needs State<{type_name}>: give the builder such a state"
                    )));
                }
            }
        }
        Ok(())
    }

    pub(crate) fn get(&self, name: &str) -> Option<&Registered> {
        self.0.get(name)
    }

    /// What to say of a name that is not there.
    pub(crate) fn missing(&self, name: &str) -> String {
        let mut names: Vec<_> = self.0.keys().map(String::as_str).collect();
        names.sort_unstable();
        let more = names.len().saturating_sub(SHOWN);
        names.truncate(SHOWN);
        let known = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        format!("there is no function '{name}' here; there is {known}{more}")
    }
}

/// How many names an error lists.
const SHOWN: usize = 20;

impl Registered {
    /// How many arguments callers pass.
    pub(crate) fn arity(&self) -> usize {
        self.needs.iter().filter(|need| matches!(need, Need::Argument)).count()
    }

    pub(crate) fn run(&self, call: Incoming<'_>) -> Running {
        self.run.run(call)
    }
}

impl fmt::Debug for Functions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}
