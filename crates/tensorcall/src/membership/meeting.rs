//! How a static group meets.
//!
//! Every worker puts one entry into the store; rank 0 collects them, checks names and ranks and publishes one record
//! for all: the roster, or the error that every worker then has. So a join takes O(N) operations in all, and a
//! mistake of one worker is told to each in the same words. An entry has a fingerprint of the secret, so that
//! workers with different ones are found out here and not by connections that are refused.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tensorcall_proto::ids::{Rank, WorkerName};

use super::devices::{self, Devices, Maps};
use super::secret::{self, NO_SECRET, random_hex};
use super::{
    Candidate, Deadline, Failure, Joining, Member, keys_of, next_group, own_info, read_json, write_json,
};
use crate::agent::PeerInfo;
use crate::clock::now;
use crate::error::{Error, ErrorKind, Result};
use crate::rendezvous::Rendezvous;
use crate::store::{PrefixStore, Store, StoreError};

/// How long rank 0, which may host the store, waits until the others have read from it.
const PARTING: Duration = Duration::from_secs(5);
/// The same, for an error when the time for meeting is over.
const LATE_PARTING: Duration = Duration::from_secs(1);

const ALL_SERVE: &str = "all serve";
const ROSTER: &str = "roster";

/// What one worker tells all, or that it cannot join.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct Entry {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    #[serde(default)]
    name: String,
    #[serde(default)]
    world_size: u32,
    #[serde(default)]
    secret: Option<String>,
    #[serde(default)]
    contact: String,
    #[serde(default)]
    devices: Devices,
    /// Tells the entries of two workers apart that are alike otherwise.
    #[serde(default)]
    by: String,
}

/// What rank 0 tells all.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Record {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    /// How many workers have come and read an error that says who did not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    present: Option<u32>,
    /// How many read another error: what rank 0 takes the size to be, and not all may agree on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    size: Option<u32>,
    /// Whether the error is one of values, as Python calls it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    is_value: Option<bool>,
    /// Name and contact of each.
    #[serde(default)]
    workers: Vec<(String, String)>,
    #[serde(default)]
    device_maps: Vec<Maps>,
}

pub(super) fn join(rendezvous: &Rendezvous, joining: Joining<'_>, size: u32) -> Result<Member, Failure> {
    let Joining { mut config, handler, roster: names, timeout, start } = joining;
    let deadline = Deadline::of_rendezvous(timeout);
    let keys = keys_of(std::sync::Arc::new(next_group(rendezvous)));
    let (name, rank) = (config.name.clone(), rendezvous.checked_rank());
    let meeting = Meeting::new(&keys, rendezvous, size, deadline);
    let job = secret::agree(&keys, &config.secret)?;
    let fingerprint = job.fingerprint();
    let mut entry =
        Entry { name: name.as_str().to_owned(), world_size: size, secret: fingerprint, ..Entry::default() };
    let Some(secret) = job.secret.clone() else {
        meeting.enter(entry)?;
        meeting.roster()?;
        return Err(Error::usage(NO_SECRET).into());
    };
    config.rank = rank;
    config.job.clone_from(&job.id);
    config.secret = secret;
    config.rendezvous_host = rendezvous.host().map(str::to_owned);
    let candidate = match start(config, handler) {
        Ok(agent) => Candidate(Some(agent)),
        Err(error) => {
            meeting.spoil(&format!("worker '{name}' (rank {rank}) cannot join: {error}"))?;
            meeting.part("error", size);
            return Err(error.into());
        }
    };
    let agent = candidate.agent()?;
    job.warn_if_reachable(&own_info(agent)?);
    entry.contact = agent.contact();
    let contact = entry.contact.clone();
    meeting.enter(entry)?;
    let roster = meeting.roster()?;
    meeting.check(&roster, &name, &contact)?;
    let mut infos = Vec::with_capacity(roster.len());
    for (rank, (name, contact)) in (0..).zip(roster) {
        let name = WorkerName::parse(&name).map_err(|error| Error::usage(error.to_string()))?;
        let rank = Rank::new(rank).ok_or_else(|| Error::usage(format!("rank {rank} is out of range")))?;
        infos.push(PeerInfo::from_contact(name.clone(), rank, &contact)?);
        names.add(name, rank);
    }
    agent.open(infos)?;
    meeting.wait_until_all_serve()?;
    Ok(Member { agent: candidate.accept()?, roster: names, timeout, list: None })
}

/// One worker's part in a join.
struct Meeting<'a> {
    store: &'a PrefixStore,
    rank: u32,
    size: u32,
    deadline: Deadline,
    /// What an error may come from, if the workers meet in a file.
    suspicion: String,
}

impl<'a> Meeting<'a> {
    fn new(store: &'a PrefixStore, rendezvous: &Rendezvous, size: u32, deadline: Deadline) -> Self {
        let suspicion = rendezvous.file().map(|file| {
            format!(
                ". If that is not so, {} is left from an earlier job: remove it, or meet at another file",
                file.display()
            )
        });
        let rank = rendezvous.rank();
        Self { store, rank, size, deadline, suspicion: suspicion.unwrap_or_default() }
    }

    /// Leaves this worker's entry, unless another one has this rank; then the others are told as well.
    fn enter(&self, entry: Entry) -> Result<(), Failure> {
        let name = entry.name.clone();
        let mine = write_json(&Entry { by: random_hex::<8>()?, ..entry })?;
        let found = self.store.compare_set(&key(self.rank), b"", mine.as_bytes())?;
        if found == mine.as_bytes() {
            return Ok(());
        }
        let other: Entry = read_json("worker", &found)?;
        if let Some(error) = other.error {
            self.part("error", self.size);
            return Err(Error::usage(error).into());
        }
        self.mark_read("error", self.size);
        let text =
            format!("two workers claim rank {}: {} and {name}{}", self.rank, other.name, self.suspicion);
        self.spoil(&text)?;
        Err(Error::usage(text).into())
    }

    /// Says that the group cannot come together: to rank 0, which waits for the entries of all, to those who come
    /// later, and to those who wait for rank 0, which may be among the latter.
    fn spoil(&self, error: &str) -> Result<(), Failure> {
        let entry = write_json(&Entry { error: Some(error.to_owned()), ..Entry::default() })?;
        for rank in 0..self.size {
            self.store.compare_set(&key(rank), b"", entry.as_bytes())?;
        }
        self.publish(&Record { error: Some(error.to_owned()), size: Some(self.size), ..Record::default() })?;
        Ok(())
    }

    /// Name and contact of every worker. If the group did not come together, the error is the same on every rank.
    fn roster(&self) -> Result<Vec<(String, String)>, Failure> {
        let record = if self.rank == 0 {
            self.publish(&self.collect()?)?
        } else {
            if self.wait(&[ROSTER]).is_err() {
                let text = self.missing();
                self.mark_read("error", self.size);
                return Err(Error::new(ErrorKind::Timeout, text).into());
            }
            self.store.get(ROSTER)?.unwrap_or_default()
        };
        let record: Record = read_json(ROSTER, &record)?;
        if let Some(error) = record.error {
            self.part("error", record.present.or(record.size).unwrap_or(self.size));
            let kind = if record.present.is_some() { ErrorKind::Timeout } else { ErrorKind::Usage };
            return Err(Error::new(kind, error).into());
        }
        Ok(record.workers)
    }

    /// Makes sure that the roster is of this group, and not of an earlier one that met in this store.
    fn check(&self, roster: &[(String, String)], name: &WorkerName, contact: &str) -> Result<()> {
        let mine = usize::try_from(self.rank).ok().and_then(|rank| roster.get(rank));
        let is_mine = mine.is_some_and(|(theirs, at)| theirs == name.as_str() && at == contact);
        if is_mine && u32::try_from(roster.len()) == Ok(self.size) {
            return Ok(());
        }
        let names: Vec<_> = roster.iter().map(|(name, _)| name.as_str()).collect();
        Err(Error::usage(format!(
            "the store has the roster of another group ({}), without {name} of rank {}{}",
            names.join(", "),
            self.rank,
            self.suspicion
        )))
    }

    /// Returns when every worker has opened its agent.
    fn wait_until_all_serve(&self) -> Result<(), Failure> {
        if self.store.add("serving", 1)? == i64::from(self.size) {
            self.store.set(ALL_SERVE, b"1")?;
        }
        if self.wait(&[ALL_SERVE]).is_err() {
            let text = format!("not all of the {} workers started serving in {} s", self.size, self.deadline);
            return Err(Error::new(ErrorKind::Timeout, text).into());
        }
        self.part("serve", self.size);
        Ok(())
    }

    /// What rank 0 says to all.
    fn collect(&self) -> Result<Record, Failure> {
        let keys: Vec<_> = (0..self.size).map(key).collect();
        let keys: Vec<_> = keys.iter().map(String::as_str).collect();
        if self.wait(&keys).is_err() {
            let mut present = 0;
            for key in keys {
                present += u32::from(self.store.check(&[key])?);
            }
            return Ok(Record { error: Some(self.missing()), present: Some(present), ..Record::default() });
        }
        let entries = self.store.multi_get(&keys)?;
        let entries: Vec<Entry> =
            entries.iter().map(|entry| read_json("worker", entry)).collect::<Result<_>>()?;
        if let Some(error) = fault(&entries, self.size) {
            return Ok(Record { error: Some(error), size: Some(self.size), ..Record::default() });
        }
        let said: Vec<_> = entries.iter().map(|entry| (entry.name.as_str(), &entry.devices)).collect();
        if let Some(error) = devices::fault(&said, true) {
            return Ok(Record { error: Some(error), is_value: Some(true), ..Record::default() });
        }
        let has_maps = entries.iter().any(|entry| !entry.devices.maps.is_empty());
        let (workers, maps) =
            entries.into_iter().map(|entry| ((entry.name, entry.contact), entry.devices.maps)).unzip();
        Ok(Record { workers, device_maps: if has_maps { maps } else { Vec::new() }, ..Record::default() })
    }

    /// Leaves the record for all, unless somebody left one before; returns what counts.
    fn publish(&self, record: &Record) -> Result<Vec<u8>, Failure> {
        Ok(self.store.compare_set(ROSTER, b"", write_json(record)?.as_bytes())?)
    }

    /// The error of a wait that was in vain.
    fn missing(&self) -> String {
        let limit = format!("after {} s", self.deadline);
        let mut missing = Vec::new();
        for rank in 0..self.size {
            match self.store.check(&[&key(rank)]) {
                Ok(true) => {}
                Ok(false) => missing.push(rank),
                Err(error) => {
                    return format!("the store was lost {limit} of waiting for the other workers: {error}");
                }
            }
        }
        if missing.is_empty() {
            return format!("rank 0 did not say {limit} who is in the group of {} workers", self.size);
        }
        format!("workers did not come {limit}: missing rank(s) {missing:?} of world size {}", self.size)
    }

    /// Lets nobody lose the store who still needs it: rank 0, its likely host, goes last.
    fn part(&self, stage: &str, present: u32) {
        if self.rank != 0 {
            return self.mark_read(stage, present);
        }
        if present <= 1 {
            return;
        }
        let left = self.deadline.end.map_or(PARTING, |end| end.saturating_duration_since(now()).min(PARTING));
        let patience = if stage == "error" { left.max(LATE_PARTING) } else { left };
        if let Err(error) = self.wait_until_read(stage, present, now() + patience) {
            tracing::debug!(%error, "parting from the store");
        }
    }

    fn wait_until_read(&self, stage: &str, present: u32, limit: Instant) -> Result<(), StoreError> {
        if self.store.add(&format!("reading {stage}"), 0)? < i64::from(present) - 1 {
            self.store.wait(&[&format!("read {stage}")], Some(limit))?;
        }
        Ok(())
    }

    fn mark_read(&self, stage: &str, present: u32) {
        let marked = self.store.add(&format!("reading {stage}"), 1).and_then(|count| {
            if count == i64::from(present) - 1 {
                self.store.set(&format!("read {stage}"), b"1")
            } else {
                Ok(())
            }
        });
        if let Err(error) = marked {
            tracing::debug!(%error, "parting from the store");
        }
    }

    fn wait(&self, keys: &[&str]) -> Result<(), StoreError> {
        self.store.wait(keys, self.deadline.end)
    }
}

/// Why these workers are no group.
fn fault(entries: &[Entry], size: u32) -> Option<String> {
    let mut ranks: HashMap<&str, usize> = HashMap::new();
    for (rank, entry) in entries.iter().enumerate() {
        if let Some(error) = &entry.error {
            return Some(error.clone());
        }
        if entry.world_size != size {
            return Some(format!("rank 0 was given world size {size}, rank {rank} {}", entry.world_size));
        }
        if let Some(other) = ranks.insert(&entry.name, rank) {
            return Some(not_unique(&entry.name, rank, other));
        }
    }
    secret_fault(entries)
}

pub(super) fn not_unique(name: &str, one: impl std::fmt::Display, other: impl std::fmt::Display) -> String {
    format!("RPC worker name {name} is not unique. Workers {one} and {other} share the same name.")
}

fn secret_fault(entries: &[Entry]) -> Option<String> {
    let mut holders: Vec<(&Option<String>, Vec<usize>)> = Vec::new();
    for (rank, entry) in entries.iter().enumerate() {
        match holders.iter_mut().find(|(secret, _)| **secret == entry.secret) {
            Some((_, ranks)) => ranks.push(rank),
            None => holders.push((&entry.secret, vec![rank])),
        }
    }
    if holders.len() == 1 {
        return None;
    }
    let mut said: Vec<String> = Vec::new();
    for (secret, ranks) in holders {
        let which = match secret {
            None => "no secret",
            Some(_) if said.is_empty() => "one",
            Some(_) => "another",
        };
        said.push(format!("rank(s) {ranks:?} have {which}"));
    }
    Some(format!(
        "the workers have different secrets: {}. Set TENSORCALL_SECRET or TENSORCALL_SECRET_FILE alike on all workers, \
         or on none",
        said.join(", ")
    ))
}

fn key(rank: u32) -> String {
    format!("worker {rank}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entries(of: &[(&str, u32, Option<&str>)]) -> Vec<Entry> {
        let entry = |(name, world_size, secret): &(&str, u32, Option<&str>)| Entry {
            name: (*name).to_owned(),
            world_size: *world_size,
            secret: secret.map(str::to_owned),
            ..Entry::default()
        };
        of.iter().map(entry).collect()
    }

    #[test]
    fn what_is_wrong_with_a_group_is_told_in_pythons_words() {
        let fault = |of: &[_]| fault(&entries(of), 2).unwrap();
        let same = Some("s");

        assert_eq!(
            fault(&[("same", 2, same), ("same", 2, same)]),
            "RPC worker name same is not unique. Workers 1 and 0 share the same name."
        );
        assert_eq!(fault(&[("a", 2, same), ("b", 3, same)]), "rank 0 was given world size 2, rank 1 3");
        let text = fault(&[("a", 2, Some("1")), ("b", 2, Some("2")), ("c", 2, Some("1")), ("d", 2, None)]);
        let ranks = "rank(s) [0, 2] have one, rank(s) [1] have another, rank(s) [3] have no secret";
        assert!(text.contains(ranks), "{text}");
        assert_eq!(super::fault(&entries(&[("a", 1, None)]), 1), None);
    }

    #[test]
    fn what_a_python_worker_leaves_is_understood() {
        let entry = r#"{"name": "w0", "world_size": 2, "secret": "00ff", "contact": "{}", "devices":
            {"count": 0, "maps": {}, "devices": []}, "by": "17"}"#;
        let record = r#"{"workers": [["w0", "{}"], ["w1", "{}"]], "device_maps": []}"#;
        let error = r#"{"error": "workers did not come", "present": 1}"#;

        assert_eq!(read_json::<Entry>("worker", entry.as_bytes()).unwrap().name, "w0");
        assert_eq!(read_json::<Record>("roster", record.as_bytes()).unwrap().workers.len(), 2);
        assert_eq!(read_json::<Record>("roster", error.as_bytes()).unwrap().present, Some(1));
        assert!(read_json::<Entry>("worker", b"no JSON").unwrap_err().to_string().contains("worker"));
    }
}
