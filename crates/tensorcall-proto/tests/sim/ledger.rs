//! What an omniscient observer knows of every call, and the invariants it can check by that.

use std::collections::BTreeMap;

use crate::network::Life;

/// An invariant that does not hold.
#[derive(Debug, Clone)]
pub(crate) struct Violation {
    pub(crate) invariant: &'static str,
    pub(crate) text: String,
}

/// Every call of a run.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    calls: Vec<Call>,
    /// Calls without an outcome, by caller.
    open: BTreeMap<Life, usize>,
    violation: Option<Violation>,
}

/// Names a call across all workers and lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Uid(usize);

#[derive(Debug)]
struct Call {
    caller: Life,
    completed: u32,
    started: u32,
}

impl Ledger {
    pub(crate) fn begin(&mut self, caller: Life) -> Uid {
        self.calls.push(Call { caller, completed: 0, started: 0 });
        *self.open.entry(caller).or_default() += 1;
        Uid(self.calls.len() - 1)
    }

    /// The caller sees the outcome.
    pub(crate) fn complete(&mut self, uid: Uid, by: Life) {
        let call = &mut self.calls[uid.0];
        call.completed += 1;
        let (caller, completed) = (call.caller, call.completed);
        if completed == 1 {
            *self.open.entry(caller).or_default() -= 1;
        } else {
            self.breaks("CALL-1", || format!("call {} of {caller} completed {completed} times", uid.0));
        }
        if caller != by {
            self.breaks("LIFE-1", || format!("call {} of {caller} completed at {by}", uid.0));
        }
    }

    /// A callee begins to run it.
    pub(crate) fn start(&mut self, uid: Uid, caller: Life, is_expired: bool, is_caller_lost: bool) {
        let call = &mut self.calls[uid.0];
        call.started += 1;
        if call.started > 1 {
            self.breaks("run once", || format!("request {} of {caller} runs again", uid.0));
        }
        if is_expired {
            self.breaks("deadline", || format!("request {} of {caller} runs after its deadline", uid.0));
        }
        if is_caller_lost {
            self.breaks("lost caller", || format!("request {} runs, but {caller} is lost", uid.0));
        }
    }

    /// A reply completes the call that a life has under an id.
    pub(crate) fn check_reply(&mut self, call: Uid, reply: Uid) {
        if call != reply {
            self.breaks("LIFE-1", || format!("the reply to call {} completes call {}", reply.0, call.0));
        }
    }

    /// Calls of `caller` that have no outcome.
    pub(crate) fn open(&self, caller: Life) -> usize {
        self.open.get(&caller).copied().unwrap_or(0)
    }

    pub(crate) fn len(&self) -> usize {
        self.calls.len()
    }

    pub(crate) fn breaks(&mut self, invariant: &'static str, text: impl FnOnce() -> String) {
        if self.violation.is_none() {
            self.violation = Some(Violation { invariant, text: text() });
        }
    }

    pub(crate) fn violation(&self) -> Option<&Violation> {
        self.violation.as_ref()
    }
}
