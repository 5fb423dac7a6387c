//! What the server of a store knows: keys, queues, and who waits for what.
//!
//! [`Table`] takes the requests of clients and gives replies, as PyTorch's server does; it does not know
//! how they travel. A client that breaks the protocol or asks for too much gets a [`StoreFault`]: its connection
//! has to be closed, nobody else is harmed.

use std::collections::{BTreeMap, HashMap, VecDeque};

use crate::wire::store::{CANCELLED, MAGIC, MISSING, READY, Reply, Request, TEXT_COST};

/// One client of a [`Table`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClientId(pub u64);

/// See the module.
#[derive(Debug)]
pub struct Table {
    values: HashMap<Vec<u8>, Vec<u8>>,
    queues: HashMap<Vec<u8>, VecDeque<Vec<u8>>>,
    clients: HashMap<ClientId, Client>,
    waits: BTreeMap<u64, Wait>,
    /// Numbers of waits by the key that they wait for, longest first.
    waiting: HashMap<Vec<u8>, VecDeque<u64>>,
    /// Who waits at a barrier.
    barriers: HashMap<Vec<u8>, Vec<ClientId>>,
    replies: VecDeque<(ClientId, Reply)>,
    next_wait: u64,
    /// Bytes of keys, values and waits, with [`TEXT_COST`] for each.
    size: usize,
    limit: usize,
}

#[derive(Debug, Default)]
struct Client {
    is_valid: bool,
    waits: Vec<u64>,
    barriers: Vec<Vec<u8>>,
}

#[derive(Debug)]
struct Wait {
    client: ClientId,
    /// The keys that it began with, some of which may be there by now.
    keys: Vec<Vec<u8>>,
    /// How many are not.
    missing: usize,
}

/// Why a client has to go.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StoreFault {
    /// It did not begin as a client of a store does, or began twice.
    #[error("not a client of a store")]
    Stranger,
    /// It adds to what is not a number.
    #[error("a value is not a number: {:?}", String::from_utf8_lossy(.0))]
    NotANumber(Vec<u8>),
    /// The store is as large as it may be.
    #[error("the store would grow beyond its limit of {limit} bytes")]
    Full {
        /// The limit.
        limit: usize,
    },
}

impl Table {
    /// An empty table that may grow to `limit` bytes.
    pub fn new(limit: usize) -> Self {
        Self {
            values: HashMap::new(),
            queues: HashMap::new(),
            clients: HashMap::new(),
            waits: BTreeMap::new(),
            waiting: HashMap::new(),
            barriers: HashMap::new(),
            replies: VecDeque::new(),
            next_wait: 0,
            size: 0,
            limit,
        }
    }

    /// A client asks for something. [`Table::poll_reply`] then has what there is to say, to it or to others.
    ///
    /// # Errors
    ///
    /// The client has to go: [`Table::handle_gone`] comes next.
    pub fn handle(&mut self, client: ClientId, request: Request) -> Result<(), StoreFault> {
        let state = self.clients.entry(client).or_default();
        if let Request::Validate(magic) = request {
            if magic != MAGIC || std::mem::replace(&mut state.is_valid, true) {
                return Err(StoreFault::Stranger);
            }
            return Ok(());
        }
        if !state.is_valid {
            return Err(StoreFault::Stranger);
        }
        if let Some(reply) = self.answer(client, request)? {
            self.replies.push_back((client, reply));
        }
        Ok(())
    }

    /// The reply to a request, if there is one at once.
    fn answer(&mut self, client: ClientId, request: Request) -> Result<Option<Reply>, StoreFault> {
        Ok(Some(match request {
            Request::Validate(_) => return Err(StoreFault::Stranger),
            Request::Set(key, value) => return self.set(key, value).map(|()| None),
            Request::Append(key, value) => return self.append(key, &value).map(|()| None),
            Request::MultiSet(pairs) => {
                pairs.into_iter().try_for_each(|(key, value)| self.set(key, value))?;
                return Ok(None);
            }
            Request::QueuePush(key, value) => return self.push(key, value).map(|()| None),
            Request::CompareSet(key, expected, desired) => {
                Reply::Value(self.compare_set(key, expected, desired)?)
            }
            Request::Get(key) => Reply::Value(self.get(&key).unwrap_or_default().to_vec()),
            Request::Add(key, delta) => Reply::Number(self.add(key, delta)?),
            Request::Check(keys) => {
                Reply::Flag(if keys.iter().all(|key| self.has(key)) { READY } else { MISSING })
            }
            Request::Wait(keys) => return self.wait(client, keys),
            Request::NumKeys => Reply::Number(self.len().try_into().unwrap_or(i64::MAX)),
            Request::Delete(key) => Reply::Number(self.delete(&key).into()),
            Request::MultiGet(keys) => {
                // What is asked for twice is sent twice, so the keys are not bound for what comes back.
                let sent: usize = keys.iter().map(|key| self.get(key).unwrap_or_default().len()).sum();
                let limit = self.limit.min(MAX_REPLY);
                if sent > limit {
                    return Err(StoreFault::Full { limit });
                }
                let value = |key: &Vec<u8>| self.get(key).unwrap_or_default().to_vec();
                Reply::Values(keys.iter().map(value).collect())
            }
            Request::CancelWait => {
                self.cancel(client);
                Reply::Flag(CANCELLED)
            }
            Request::Ping(nonce) => Reply::Nonce(nonce),
            Request::QueuePop(key) => Reply::Popped(self.pop(&key)),
            Request::QueueLen(key) => {
                let len = self.queues.get(&key).map_or(0, VecDeque::len);
                Reply::Number(len.try_into().unwrap_or(i64::MAX))
            }
            Request::ListKeys => Reply::Keys(self.values.keys().cloned().collect()),
            Request::Barrier(key, size) => return self.barrier(client, key, size),
        }))
    }

    /// A client is gone, and with it what it waits for.
    pub fn handle_gone(&mut self, client: ClientId) {
        self.cancel(client);
        self.clients.remove(&client);
    }

    /// What is to be said next, and to whom; those who are gone are to be passed over.
    pub fn poll_reply(&mut self) -> Option<(ClientId, Reply)> {
        self.replies.pop_front()
    }

    /// Whether a client has said what a client says first.
    pub fn is_valid(&self, client: ClientId) -> bool {
        self.clients.get(&client).is_some_and(|client| client.is_valid)
    }

    /// How many keys there are; queues do not count.
    pub fn len(&self) -> usize {
        self.values.len()
    }

    /// Whether there is no key.
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// How large it is, as its limit counts.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Whether a key, or a queue with something in it, is there.
    pub fn has(&self, key: &[u8]) -> bool {
        self.values.contains_key(key) || self.queues.contains_key(key)
    }

    /// The value of a key.
    pub fn get(&self, key: &[u8]) -> Option<&[u8]> {
        self.values.get(key).map(Vec::as_slice)
    }

    /// Lets a key have a value.
    ///
    /// # Errors
    ///
    /// [`StoreFault::Full`], and nothing has changed.
    pub fn set(&mut self, key: Vec<u8>, value: Vec<u8>) -> Result<(), StoreFault> {
        let before = self.values.get(&key).map_or(0, |value| cost(&key, value));
        self.resize(before, cost(&key, &value))?;
        self.wake_all(&key);
        self.values.insert(key, value);
        Ok(())
    }

    /// Adds bytes to the end of a value; a missing one is empty.
    ///
    /// # Errors
    ///
    /// [`StoreFault::Full`], and nothing has changed.
    pub fn append(&mut self, key: Vec<u8>, more: &[u8]) -> Result<(), StoreFault> {
        let mut value = self.values.get(&key).cloned().unwrap_or_default();
        value.extend_from_slice(more);
        self.set(key, value)
    }

    /// As [`Request::CompareSet`] says.
    ///
    /// # Errors
    ///
    /// [`StoreFault::Full`], and nothing has changed.
    pub fn compare_set(
        &mut self,
        key: Vec<u8>,
        expected: Vec<u8>,
        desired: Vec<u8>,
    ) -> Result<Vec<u8>, StoreFault> {
        match self.values.get(&key) {
            Some(found) if *found != expected => Ok(found.clone()),
            None if !expected.is_empty() => Ok(expected),
            _ => {
                self.set(key, desired.clone())?;
                Ok(desired)
            }
        }
    }

    /// Adds to a number; a missing one is 0.
    ///
    /// # Errors
    ///
    /// [`StoreFault::NotANumber`] or [`StoreFault::Full`], and nothing has changed.
    pub fn add(&mut self, key: Vec<u8>, delta: i64) -> Result<i64, StoreFault> {
        let before = match self.values.get(&key) {
            None => 0,
            Some(text) => number(text).ok_or_else(|| StoreFault::NotANumber(text.clone()))?,
        };
        let sum = before.wrapping_add(delta);
        self.set(key, sum.to_string().into_bytes())?;
        Ok(sum)
    }

    /// Removes a key; tells whether it was there. Queues stay.
    pub fn delete(&mut self, key: &[u8]) -> bool {
        let removed = self.values.remove(key);
        if let Some(value) = &removed {
            self.size -= cost(key, value);
        }
        removed.is_some()
    }

    /// Adds to the end of a queue.
    ///
    /// # Errors
    ///
    /// [`StoreFault::Full`], and nothing has changed.
    pub fn push(&mut self, key: Vec<u8>, value: Vec<u8>) -> Result<(), StoreFault> {
        self.resize(0, cost(&key, &value))?;
        self.wake_one(&key);
        self.queues.entry(key).or_default().push_back(value);
        Ok(())
    }

    /// Takes from the front of a queue.
    pub fn pop(&mut self, key: &[u8]) -> Option<Vec<u8>> {
        let queue = self.queues.get_mut(key)?;
        let value = queue.pop_front();
        if queue.is_empty() {
            self.queues.remove(key);
        }
        if let Some(value) = &value {
            self.size -= cost(key, value);
        }
        value
    }

    fn wait(&mut self, client: ClientId, keys: Vec<Vec<u8>>) -> Result<Option<Reply>, StoreFault> {
        let missing: Vec<_> = keys.into_iter().filter(|key| !self.has(key)).collect();
        if missing.is_empty() {
            return Ok(Some(Reply::Flag(READY)));
        }
        self.resize(0, cost_of_wait(&missing))?;
        let number = self.next_wait;
        self.next_wait += 1;
        for key in &missing {
            self.waiting.entry(key.clone()).or_default().push_back(number);
        }
        self.clients.entry(client).or_default().waits.push(number);
        self.waits.insert(number, Wait { client, missing: missing.len(), keys: missing });
        Ok(None)
    }

    fn barrier(&mut self, client: ClientId, key: Vec<u8>, size: u64) -> Result<Option<Reply>, StoreFault> {
        let arrived = self.add(key.clone(), 1)?;
        if u64::try_from(arrived).is_ok_and(|arrived| arrived >= size) {
            for other in self.barriers.remove(&key).unwrap_or_default() {
                self.leave_barrier(other, &key);
                self.replies.push_back((other, Reply::Flag(READY)));
            }
            return Ok(Some(Reply::Flag(READY)));
        }
        self.resize(0, cost(&key, b""))?;
        self.barriers.entry(key.clone()).or_default().push(client);
        self.clients.entry(client).or_default().barriers.push(key);
        Ok(None)
    }

    /// Forgets, on the client's side, that it waits at a barrier.
    fn leave_barrier(&mut self, client: ClientId, key: &[u8]) {
        let Some(state) = self.clients.get_mut(&client) else { return };
        if let Some(place) = state.barriers.iter().position(|other| other == key) {
            state.barriers.swap_remove(place);
            self.size -= cost(key, b"");
        }
    }

    /// A client waits for nothing any more.
    fn cancel(&mut self, client: ClientId) {
        let Some(state) = self.clients.get_mut(&client) else { return };
        let (waits, barriers) = (std::mem::take(&mut state.waits), std::mem::take(&mut state.barriers));
        for number in waits {
            self.forget_wait(number);
        }
        for key in barriers {
            self.size -= cost(&key, b"");
            if let Some(others) = self.barriers.get_mut(&key) {
                others.retain(|other| *other != client);
                if others.is_empty() {
                    self.barriers.remove(&key);
                }
            }
        }
    }

    fn forget_wait(&mut self, number: u64) -> Option<ClientId> {
        let wait = self.waits.remove(&number)?;
        self.size -= cost_of_wait(&wait.keys);
        for key in &wait.keys {
            if let Some(numbers) = self.waiting.get_mut(key) {
                numbers.retain(|other| *other != number);
                if numbers.is_empty() {
                    self.waiting.remove(key);
                }
            }
        }
        Some(wait.client)
    }

    fn wake_all(&mut self, key: &[u8]) {
        for number in self.waiting.remove(key).unwrap_or_default() {
            self.key_came(number);
        }
    }

    /// What is pushed is for one of those who wait for it.
    fn wake_one(&mut self, key: &[u8]) {
        let Some(numbers) = self.waiting.get_mut(key) else { return };
        let first = numbers.pop_front();
        if numbers.is_empty() {
            self.waiting.remove(key);
        }
        if let Some(number) = first {
            self.key_came(number);
        }
    }

    /// One key that a wait lacked is there; a key that it names twice counts twice.
    fn key_came(&mut self, number: u64) {
        let Some(wait) = self.waits.get_mut(&number) else { return };
        wait.missing -= 1;
        if wait.missing > 0 {
            return;
        }
        if let Some(client) = self.forget_wait(number) {
            if let Some(state) = self.clients.get_mut(&client) {
                state.waits.retain(|other| *other != number);
            }
            self.replies.push_back((client, Reply::Flag(READY)));
        }
    }

    fn resize(&mut self, before: usize, after: usize) -> Result<(), StoreFault> {
        let size = self.size - before + after;
        if size > self.limit && after > before {
            return Err(StoreFault::Full { limit: self.limit });
        }
        self.size = size;
        Ok(())
    }
}

/// Most bytes of values in one reply: what clients take, [`StoreLimits::max_message`](crate::wire::store::StoreLimits).
const MAX_REPLY: usize = 64 << 20;

fn cost(key: &[u8], value: &[u8]) -> usize {
    key.len() + value.len() + 2 * TEXT_COST
}

fn cost_of_wait(keys: &[Vec<u8>]) -> usize {
    // Each key is kept twice.
    keys.iter().map(|key| 2 * (key.len() + TEXT_COST)).sum::<usize>() + TEXT_COST
}

/// The number at the start of a text, as C reads it.
fn number(text: &[u8]) -> Option<i64> {
    let text = text.trim_ascii_start();
    let signs = usize::from(matches!(text.first(), Some(b'+' | b'-')));
    let digits = text.iter().skip(signs).take_while(|byte| byte.is_ascii_digit()).count();
    std::str::from_utf8(&text[..signs + digits]).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: ClientId = ClientId(1);
    const B: ClientId = ClientId(2);
    const C: ClientId = ClientId(3);

    fn table() -> Table {
        let mut table = Table::new(1 << 20);
        for client in [A, B, C] {
            table.handle(client, Request::Validate(MAGIC)).unwrap();
        }
        table
    }

    fn text(text: &str) -> Vec<u8> {
        text.into()
    }

    fn keys(keys: &[&str]) -> Vec<Vec<u8>> {
        keys.iter().map(|key| text(key)).collect()
    }

    /// What all clients are told because of `request`.
    fn say(table: &mut Table, client: ClientId, request: Request) -> Vec<(ClientId, Reply)> {
        table.handle(client, request).unwrap();
        std::iter::from_fn(|| table.poll_reply()).collect()
    }

    fn ready(client: ClientId) -> (ClientId, Reply) {
        (client, Reply::Flag(READY))
    }

    #[test]
    fn a_value_is_swapped_only_for_the_one_that_is_expected() {
        let mut table = table();
        let mut swap = |key, expected, desired| {
            let request = Request::CompareSet(text(key), text(expected), text(desired));
            let [(A, Reply::Value(value))] = &say(&mut table, A, request)[..] else { panic!() };
            String::from_utf8(value.clone()).unwrap()
        };

        assert_eq!(swap("a", "x", "y"), "x");
        assert_eq!(swap("a", "", "y"), "y");
        assert_eq!(swap("a", "", "z"), "y");
        assert_eq!(swap("a", "y", "z"), "z");
        assert_eq!(table.len(), 1);
    }

    #[test]
    fn numbers_are_text_and_wrap_around() {
        let mut table = table();
        for (before, delta, after) in
            [("", 0, None), ("x", 1, None), (" 12x", 1, Some(13)), ("9223372036854775807", 1, Some(i64::MIN))]
        {
            table.set(text("n"), text(before)).unwrap();
            assert_eq!(table.add(text("n"), delta).ok(), after, "{before:?}");
        }
        assert_eq!(table.add(text("new"), -5), Ok(-5));
        assert_eq!(table.get(b"new"), Some(&b"-5"[..]));
    }

    #[test]
    fn who_waits_for_several_keys_is_told_when_the_last_one_comes() {
        let mut table = table();

        assert_eq!(say(&mut table, A, Request::Wait(keys(&["a", "b", "a"]))), []);
        assert_eq!(say(&mut table, B, Request::Set(text("a"), text(""))), []);
        // One that came counts, also if it goes again.
        assert_eq!(say(&mut table, B, Request::Delete(text("a"))), [(B, Reply::Number(1))]);
        assert_eq!(say(&mut table, B, Request::Add(text("b"), 1)), [ready(A), (B, Reply::Number(1))]);
        assert_eq!(say(&mut table, A, Request::Wait(keys(&["b"]))), [ready(A)]);
    }

    #[test]
    fn what_is_pushed_wakes_one_and_what_is_set_wakes_all() {
        let mut table = table();
        for client in [A, B] {
            assert_eq!(say(&mut table, client, Request::Wait(keys(&["q"]))), []);
        }

        assert_eq!(say(&mut table, C, Request::QueuePush(text("q"), text("1"))), [ready(A)]);
        assert_eq!(say(&mut table, A, Request::QueuePop(text("q"))), [(A, Reply::Popped(Some(text("1"))))]);
        assert_eq!(say(&mut table, A, Request::QueuePop(text("q"))), [(A, Reply::Popped(None))]);
        assert_eq!(say(&mut table, A, Request::Wait(keys(&["q"]))), []);
        assert_eq!(say(&mut table, C, Request::Set(text("q"), text("1"))), [ready(B), ready(A)]);
    }

    #[test]
    fn who_gives_up_or_goes_is_told_nothing_later_and_leaves_nothing_behind() {
        let mut table = table();
        say(&mut table, A, Request::Wait(keys(&["a", "b"])));
        say(&mut table, B, Request::Wait(keys(&["a"])));
        say(&mut table, B, Request::Barrier(text("bar"), 2));
        table.delete(b"bar");

        assert_eq!(say(&mut table, A, Request::CancelWait), [(A, Reply::Flag(CANCELLED))]);
        table.handle_gone(B);

        assert_eq!(table.size(), 0);
        assert!(table.waiting.is_empty() && table.waits.is_empty() && table.barriers.is_empty());
        assert_eq!(say(&mut table, C, Request::Set(text("a"), text(""))), []);
    }

    #[test]
    fn a_barrier_opens_when_enough_have_come_and_stays_open() {
        let mut table = table();
        let barrier = || Request::Barrier(text("bar"), 2);

        assert_eq!(say(&mut table, A, barrier()), []);
        assert_eq!(say(&mut table, B, barrier()), [ready(A), ready(B)]);
        assert_eq!(say(&mut table, C, barrier()), [ready(C)]);
        assert_eq!(say(&mut table, A, Request::CancelWait), [(A, Reply::Flag(CANCELLED))]);
    }

    #[test]
    fn strangers_are_found_out_by_their_first_word() {
        let mut table = table();
        let stranger = ClientId(9);

        assert_eq!(table.handle(stranger, Request::Ping(1)), Err(StoreFault::Stranger));
        assert_eq!(table.handle(stranger, Request::Validate(1)), Err(StoreFault::Stranger));
        assert_eq!(table.handle(A, Request::Validate(MAGIC)), Err(StoreFault::Stranger));
        assert!(!table.is_valid(stranger));
    }

    #[test]
    fn one_value_that_is_asked_for_many_times_makes_no_reply_beyond_the_limit() {
        let mut table = table();
        table.set(text("a"), vec![0; 400 << 10]).unwrap();

        assert_eq!(table.handle(A, Request::MultiGet(keys(&["a", "a"]))), Ok(()));
        let beyond = table.handle(B, Request::MultiGet(keys(&["a", "a", "a"])));

        assert!(matches!(beyond, Err(StoreFault::Full { .. })));
    }

    #[test]
    fn a_full_store_takes_no_more_and_keeps_what_it_has() {
        let mut table = table();
        let big = || vec![0; 400 << 10];
        table.set(text("a"), big()).unwrap();
        table.push(text("q"), big()).unwrap();

        assert!(matches!(table.set(text("c"), big()), Err(StoreFault::Full { .. })));
        assert!(matches!(table.append(text("a"), &big()), Err(StoreFault::Full { .. })));
        assert_eq!(table.get(b"a").map(<[u8]>::len), Some(400 << 10));

        assert!(table.delete(b"a"));
        table.set(text("c"), big()).unwrap();
        assert!(table.pop(b"q").is_some());
        table.delete(b"c");
        assert_eq!(table.size(), 0);
    }
}
