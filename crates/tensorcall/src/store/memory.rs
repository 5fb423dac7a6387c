//! A store for the threads of one process.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use tensorcall_proto::store::{ClientId, StoreFault, Table};
use tensorcall_proto::wire::store::{MAGIC, Request};

use super::{Store, StoreError};
use crate::fork::Home;
use crate::sync::{Condvar, Mutex};

/// A store that lives as long as somebody has it. Share it by [`Arc`].
#[derive(Debug)]
pub struct MemoryStore {
    state: Mutex<State>,
    home: Home,
}

#[derive(Debug)]
struct State {
    table: Table,
    /// Threads that wait, and how each is woken: a change wakes those whose keys are there, and no others.
    sleepers: HashMap<ClientId, Arc<Condvar>>,
    next: u64,
}

impl MemoryStore {
    /// An empty store.
    pub fn new() -> Self {
        let table = Table::new(usize::MAX);
        Self { state: Mutex::new(State { table, sleepers: HashMap::new(), next: 0 }), home: Home::here() }
    }

    fn with<R>(&self, run: impl FnOnce(&mut Table) -> R) -> Result<R, StoreError> {
        if !self.home.is_here() {
            return Err(StoreError::Forked);
        }
        let mut state = self.state.lock();
        let result = run(&mut state.table);
        state.wake();
        Ok(result)
    }

    fn change<R>(
        &self,
        key: &str,
        run: impl FnOnce(&mut Table) -> Result<R, StoreFault>,
    ) -> Result<R, StoreError> {
        self.with(run)?.map_err(|fault| StoreError::refused(key, fault))
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

impl State {
    /// Wakes the threads whose keys have come.
    fn wake(&mut self) {
        while let Some((client, _)) = self.table.poll_reply() {
            if let Some(sleeper) = self.sleepers.remove(&client) {
                sleeper.notify_one();
            }
        }
    }
}

impl Store for MemoryStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), StoreError> {
        self.change(key, |table| table.set(key.into(), value.into()))
    }

    fn get(&self, key: &str) -> Result<Option<Vec<u8>>, StoreError> {
        self.with(|table| table.get(key.as_bytes()).map(<[u8]>::to_vec))
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>, StoreError> {
        self.change(key, |table| table.compare_set(key.into(), expected.into(), desired.into()))
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64, StoreError> {
        self.change(key, |table| table.add(key.into(), delta))
    }

    fn append(&self, key: &str, more: &[u8]) -> Result<(), StoreError> {
        self.change(key, |table| table.append(key.into(), more))
    }

    fn check(&self, keys: &[&str]) -> Result<bool, StoreError> {
        self.with(|table| keys.iter().all(|key| table.has(key.as_bytes())))
    }

    fn wait(&self, keys: &[&str], limit: Option<Instant>) -> Result<(), StoreError> {
        if !self.home.is_here() {
            return Err(StoreError::Forked);
        }
        let mut state = self.state.lock();
        let me = ClientId(state.next);
        state.next += 1;
        let sleeper = Arc::new(Condvar::new());
        state.sleepers.insert(me, Arc::clone(&sleeper));
        let request = Request::Wait(keys.iter().map(|&key| key.into()).collect());
        let asked = state.table.handle(me, Request::Validate(MAGIC));
        let asked = asked.and_then(|()| state.table.handle(me, request));
        state.wake();
        let mut is_late = false;
        while asked.is_ok() && state.sleepers.contains_key(&me) && !is_late {
            match limit {
                None => sleeper.wait(&mut state),
                Some(limit) => is_late = sleeper.wait_until(&mut state, limit).timed_out(),
            }
        }
        let came = state.sleepers.remove(&me).is_none();
        state.table.handle_gone(me);
        asked.map_err(|fault| StoreError::refused(&keys.join(", "), fault))?;
        if came { Ok(()) } else { Err(StoreError::timeout(keys)) }
    }

    fn delete(&self, key: &str) -> Result<bool, StoreError> {
        self.with(|table| table.delete(key.as_bytes()))
    }
}
