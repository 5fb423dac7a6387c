//! The workers of a group that can be named.

use std::collections::BTreeMap;

use tensorcall_proto::ids::{Rank, WorkerName};
use tensorcall_proto::wire::Value;

use crate::agent::{Agent, InboundCall, PeerInfo, Responder};
use crate::plain;
use crate::sync::Mutex;

/// What a joiner asks every member for: to know where it is.
pub(super) const ADMIT: &str = "tensorcall.rpc._dynamic:_admit";
/// Then: that it may be called.
pub(super) const WELCOME: &str = "tensorcall.rpc._dynamic:_welcome";
/// What a worker that leaves tells every member.
pub(super) const FAREWELL: &str = "tensorcall.rpc._dynamic:_farewell";

/// What is done for a worker that joins or leaves, with its arguments.
type Part = fn(&Roster, Option<Agent>, &[Value]) -> Result<(), String>;

/// Who is in the group: in a dynamic one this changes as others join and leave.
///
/// A worker may be reachable before it is here: a joiner first makes sure that all members know it, and is named
/// after that.
#[derive(Debug, Default)]
pub struct Roster(Mutex<BTreeMap<Rank, WorkerName>>);

impl Roster {
    /// All workers, by rank.
    pub fn workers(&self) -> Vec<(WorkerName, Rank)> {
        self.0.lock().iter().map(|(rank, name)| (name.clone(), *rank)).collect()
    }

    /// The rank of the worker with this name.
    pub fn rank_of(&self, name: &str) -> Option<Rank> {
        self.0.lock().iter().find(|(_, other)| other.as_str() == name).map(|(rank, _)| *rank)
    }

    /// The name of the worker of this rank.
    pub fn name_of(&self, rank: Rank) -> Option<WorkerName> {
        self.0.lock().get(&rank).cloned()
    }

    /// Answers a request of a worker that joins or leaves, if it is one; else gives it back.
    pub fn handle(&self, call: InboundCall, responder: Responder) -> Option<(InboundCall, Responder)> {
        let part: Part = match call.function.as_deref() {
            Some(ADMIT) => |_, agent, arguments| admit(agent, arguments),
            Some(WELCOME) => |roster, _, arguments| roster.welcome(arguments),
            Some(FAREWELL) => |roster, _, arguments| roster.farewell(arguments),
            _ => return Some((call, responder)),
        };
        let agent = responder.agent();
        let done = plain::arguments_of(&call).and_then(|arguments| part(self, agent, &arguments));
        plain::answer(responder, done.map(|()| Value::Nil));
        None
    }

    pub(super) fn add(&self, name: WorkerName, rank: Rank) {
        let mut workers = self.0.lock();
        workers.retain(|_, other| *other != name);
        workers.insert(rank, name);
    }

    pub(super) fn remove(&self, rank: Rank) {
        self.0.lock().remove(&rank);
    }

    /// Everybody but `me`.
    pub(super) fn others(&self, me: Rank) -> Vec<Rank> {
        self.0.lock().keys().copied().filter(|rank| *rank != me).collect()
    }

    fn welcome(&self, arguments: &[Value]) -> Result<(), String> {
        let (name, rank) = name_and_rank(arguments)?;
        self.add(name, rank);
        Ok(())
    }

    fn farewell(&self, arguments: &[Value]) -> Result<(), String> {
        let (name, rank) = name_and_rank(arguments)?;
        if self.name_of(rank) == Some(name) {
            self.remove(rank);
        }
        Ok(())
    }
}

fn admit(agent: Option<Agent>, arguments: &[Value]) -> Result<(), String> {
    let (name, rank) = name_and_rank(arguments)?;
    let Some(Value::Str(contact)) = arguments.get(2) else {
        return Err("a joiner tells how to reach it".to_owned());
    };
    let info = PeerInfo::from_contact(name, rank, contact).map_err(|error| error.to_string())?;
    let agent = agent.ok_or("the agent is gone")?;
    agent.admit(info).map_err(|error| error.to_string())
}

fn name_and_rank(arguments: &[Value]) -> Result<(WorkerName, Rank), String> {
    let [Value::Str(name), Value::Int(rank), ..] = arguments else {
        return Err("a worker that joins or leaves tells its name and rank".to_owned());
    };
    let name = WorkerName::parse(name).map_err(|error| error.to_string())?;
    let rank = u32::try_from(*rank).ok().and_then(Rank::new);
    Ok((name, rank.ok_or("a rank is out of range")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(name: &str, rank: i64) -> [Value; 2] {
        [Value::Str(name.to_owned()), Value::Int(rank)]
    }

    #[test]
    fn who_is_welcomed_can_be_named_until_its_farewell() {
        let roster = Roster::default();

        roster.welcome(&said("a", 0)).unwrap();
        roster.welcome(&said("b", 1)).unwrap();
        assert_eq!(roster.rank_of("b").map(Rank::get), Some(1));
        assert_eq!(roster.workers().len(), 2);

        // A former holder of the rank says goodbye late.
        roster.farewell(&said("other", 1)).unwrap();
        assert_eq!(roster.name_of(Rank::new(1).unwrap()).as_ref().map(WorkerName::as_str), Some("b"));
        roster.farewell(&said("b", 1)).unwrap();
        assert_eq!(roster.rank_of("b"), None);
    }

    #[test]
    fn a_name_that_comes_back_has_its_new_rank_only() {
        let roster = Roster::default();
        roster.welcome(&said("a", 0)).unwrap();

        roster.welcome(&said("a", 5)).unwrap();

        assert_eq!(roster.workers().len(), 1);
        assert_eq!(roster.rank_of("a").map(Rank::get), Some(5));
    }

    #[test]
    fn what_makes_no_sense_is_an_error() {
        let roster = Roster::default();

        for arguments in
            [&[][..], &said("no name!", 0), &said("a", -1), &said("a", 1 << 20), &[Value::Nil, Value::Nil]]
        {
            assert!(roster.welcome(arguments).is_err(), "{arguments:?}");
        }
        assert!(admit(None, &said("a", 0)).is_err());
    }
}
