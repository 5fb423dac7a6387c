//! How workers join and leave a dynamic group, one after the other.
//!
//! Whoever joins or leaves holds the turn meanwhile: a value in the store that its holder renews, a lease. A holder
//! that has not renewed it for [`LEASE`] is passed over. Under the turn, the store's list of members is read and
//! written.
//!
//! A joiner tells every member twice: first where it can be reached, so that all of them know it before anybody names
//! it (references to it may travel between any two of them), then its name. Members that do not answer because they
//! died are struck off the list. Members need the store only to join and to leave; if it is gone, they go on, and
//! leaving is told to the others all the same.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tensorcall_proto::ids::{Rank, WorkerName};
use tensorcall_proto::wire::Value;
use tensorcall_proto::wire::message::FailureKind;

use super::devices::{self, Devices};
use super::meeting::not_unique;
use super::roster::{ADMIT, FAREWELL, WELCOME};
use super::secret::{self, Job, NO_SECRET, random_hex};
use super::{
    Candidate, Deadline, Failure, Joining, Member, Start, keys_of, next_group, own_info, read_json,
    write_json,
};
use crate::agent::{Agent, Handler, InboundCall, PeerInfo, Responder, ThreadHook};
use crate::clock::{now, pause};
use crate::config::AgentConfig;
use crate::error::{Error, ErrorKind, Result};
use crate::plain;
use crate::rendezvous::Rendezvous;
use crate::store::{PrefixStore, Store, StoreError};

/// After this a turn that was not renewed is over.
const LEASE: Duration = Duration::from_secs(10);

const RENEW_EVERY: Duration = Duration::from_secs(2);
const POLL_EVERY: Duration = Duration::from_millis(20);
/// A worker that is said to be there answers in this time.
const PROBE_LIMIT: Duration = Duration::from_secs(5);

const FREE: &str = "free";
const TURN: &str = "turn";
const MEMBERS: &str = "members";
const SIGN_OF_LIFE: &str = "tensorcall.rpc.api:_sign_of_life";

/// Name, contact and devices by rank.
type Members = BTreeMap<u32, (String, String, Devices)>;

pub(super) fn join(rendezvous: &Rendezvous, joining: Joining<'_>) -> Result<Member, Failure> {
    let deadline = Deadline::of_rendezvous(joining.timeout);
    secret::mark_dynamic(&keys_of(Arc::new(next_group(rendezvous))))?;
    // Members come and go, each as often as it likes: they meet in one place.
    let keys = keys_of(Arc::new(PrefixStore::new("rpc_dynamic", Arc::clone(rendezvous.store()))));
    let job = secret::agree(&keys, &joining.config.secret)?;
    check_secret(&keys, &job)?;
    let name = joining.config.name.clone();
    let turn = Turn::acquire(&keys, &name, deadline)?;
    let joined = join_in_turn(rendezvous, joining, &keys, &job, &turn);
    turn.give_back();
    let member = joined?;
    Ok(Member { list: Some(keys), ..member })
}

fn join_in_turn(
    rendezvous: &Rendezvous,
    joining: Joining<'_>,
    keys: &PrefixStore,
    job: &Job,
    turn: &Turn<'_>,
) -> Result<Member, Failure> {
    let Joining { mut config, handler, roster: names, timeout, start } = joining;
    let (name, rank) = (config.name.clone(), rendezvous.checked_rank());
    config.rank = rank;
    config.job.clone_from(&job.id);
    config.secret = job.secret.clone().unwrap_or_default();
    config.rendezvous_host = rendezvous.host().map(str::to_owned);
    let mut members = read(keys)?;
    let in_the_way = members
        .iter()
        .filter(|(other, (theirs, ..))| theirs == name.as_str() || **other == u32::from(rank.get()));
    let in_the_way: Vec<u32> = in_the_way.map(|(other, _)| *other).collect();
    for other in in_the_way {
        make_way(&mut members, other, &config, start)?;
        turn.renew_if_due()?;
    }
    let mine = Devices::default();
    let said = members.values().map(|(name, _, devices)| (name.as_str(), devices));
    let said: Vec<_> = said.chain([(name.as_str(), &mine)]).collect();
    if let Some(fault) = devices::fault(&said, false) {
        return Err(Error::usage(fault).into());
    }
    let candidate = Candidate(Some(start(config, handler)?));
    let agent = candidate.agent()?;
    let me = own_info(agent)?;
    job.warn_if_reachable(&me);
    let others = members.iter().map(|(rank, (name, contact, _))| info(*rank, name, contact));
    let others: Vec<PeerInfo> = others.collect::<Result<_>>()?;
    for info in others.iter().chain([&me]) {
        names.add(info.identity.name.clone(), info.identity.rank);
    }
    let ranks: Vec<_> = others.iter().map(|info| info.identity.rank).collect();
    agent.open_dynamic(others.into_iter().chain([me]).collect())?;
    let told =
        [Value::Str(name.as_str().to_owned()), Value::Int(rank.get().into()), Value::Str(agent.contact())];
    let limit = (!timeout.is_zero()).then_some(timeout);
    let lost = tell(agent, &ranks, ADMIT, &told, limit, Some(turn))?;
    turn.renew()?;
    members.insert(rank.get().into(), (name.as_str().to_owned(), agent.contact(), mine));
    members.retain(|rank, _| Rank::new(*rank).is_some_and(|rank| !lost.contains(&rank)));
    keys.set(MEMBERS, write_json(&members)?.as_bytes())?;
    let [name, rank, _] = told;
    let present: Vec<_> = ranks.into_iter().filter(|rank| !lost.contains(rank)).collect();
    tell(agent, &present, WELCOME, &[name, rank, Value::Map(Vec::new())], limit, Some(turn))?;
    for rank in lost {
        names.remove(rank);
    }
    Ok(Member { agent: candidate.accept()?, roster: names, timeout, list: None })
}

pub(super) fn leave(member: &Member, keys: &PrefixStore, deadline: Deadline) {
    let me = member.agent.identity();
    let left = Turn::acquire(keys, &me.name, deadline).and_then(|turn| {
        let left = strike_off(keys, me.rank, &me.name)
            .and_then(|()| Ok(say_farewell(member, deadline, Some(&turn))?));
        turn.give_back();
        left
    });
    let error = match left {
        Ok(()) => return,
        Err(Failure::Told(error)) => error,
        Err(Failure::Store(error)) => error.into(),
    };
    tracing::warn!("worker '{}' leaves without the store's list of members: {error}", me.name);
    if let Err(error) = say_farewell(member, deadline, None) {
        tracing::debug!(%error, "saying farewell");
    }
}

fn say_farewell(member: &Member, deadline: Deadline, turn: Option<&Turn<'_>>) -> Result<()> {
    let me = member.agent.identity();
    let told = [Value::Str(me.name.as_str().to_owned()), Value::Int(me.rank.get().into())];
    let limit = deadline.end.map(|_| deadline.after);
    tell(&member.agent, &member.roster.others(me.rank), FAREWELL, &told, limit, turn).map(drop)
}

fn strike_off(keys: &PrefixStore, rank: Rank, name: &WorkerName) -> Result<(), Failure> {
    let mut members = read(keys)?;
    let rank = u32::from(rank.get());
    if members.get(&rank).is_some_and(|(theirs, ..)| theirs == name.as_str()) {
        members.remove(&rank);
        keys.set(MEMBERS, write_json(&members)?.as_bytes())?;
    }
    Ok(())
}

fn read(keys: &PrefixStore) -> Result<Members, Failure> {
    match keys.get(MEMBERS)? {
        Some(text) => Ok(read_json(MEMBERS, &text)?),
        None => Ok(Members::new()),
    }
}

fn info(rank: u32, name: &str, contact: &str) -> Result<PeerInfo> {
    let name = WorkerName::parse(name).map_err(|error| Error::usage(error.to_string()))?;
    let rank = Rank::new(rank).ok_or_else(|| Error::usage(format!("rank {rank} is out of range")))?;
    PeerInfo::from_contact(name, rank, contact)
}

/// Finds out here, not by refused connections, that this worker has another secret than the first one.
fn check_secret(keys: &PrefixStore, job: &Job) -> Result<(), Failure> {
    let Some(mine) = job.fingerprint() else { return Err(Error::usage(NO_SECRET).into()) };
    if keys.compare_set("secret", b"", mine.as_bytes())? == mine.as_bytes() {
        return Ok(());
    }
    let text = "this worker has another secret than the group: set TENSORCALL_SECRET or TENSORCALL_SECRET_FILE alike \
                on all workers, or on none";
    Err(Error::usage(text).into())
}

/// Strikes a member off that died, whose name or rank is wanted; one that lives keeps them.
fn make_way(members: &mut Members, other: u32, config: &AgentConfig, start: Start<'_>) -> Result<()> {
    let Some((theirs, contact, _)) = members.get(&other) else { return Ok(()) };
    if lives(info(other, theirs, contact)?, config, start)? {
        let (name, rank) = (&config.name, config.rank);
        let text = if theirs == name.as_str() {
            not_unique(name.as_str(), rank, other)
        } else {
            format!("two workers claim rank {rank}: {theirs} and {name}")
        };
        return Err(Error::usage(text));
    }
    members.remove(&other);
    Ok(())
}

/// Whether a worker answers. Asks by an agent made for that, which bears neither its name nor its rank.
fn lives(peer: PeerInfo, config: &AgentConfig, start: Start<'_>) -> Result<bool> {
    let to = peer.identity.rank;
    let name = format!("probe-{}", random_hex::<8>()?);
    let mut config = config.clone();
    config.name = WorkerName::parse(&name).map_err(|error| Error::usage(error.to_string()))?;
    config.rank = Rank::new((u32::from(to.get()) + 1) % u32::from(MAX_RANK)).unwrap_or(to);
    config.num_worker_threads = std::num::NonZeroUsize::MIN;
    let probe = Candidate(Some(start(config, Arc::new(Mute))?));
    let agent = probe.agent()?;
    agent.open_dynamic(vec![own_info(agent)?, peer])?;
    let call = plain::call(agent, to, SIGN_OF_LIFE, Vec::new(), Some(PROBE_LIMIT), None);
    let answered = call.and_then(|call| plain::outcome(&call));
    Ok(!is_loss(answered.as_ref().err()) && !agent.gone().contains(&to))
}

fn is_loss(error: Option<&Error>) -> bool {
    error.is_some_and(|error| matches!(error.kind(), ErrorKind::PeerLost | ErrorKind::PeerLeft))
}

/// Ranks are below this.
const MAX_RANK: u16 = 1 << 15;

/// Runs nothing for nobody.
struct Mute;

impl ThreadHook for Mute {
    fn run(&self, body: &mut (dyn FnMut() + Send)) {
        body();
    }
}

impl Handler for Mute {
    fn handle(&self, _: InboundCall, responder: Responder) {
        responder.failed(FailureKind::Usage, "this worker is about to join".to_owned());
    }
}

/// Has every one of `ranks` do something; returns those that are gone.
fn tell(
    agent: &Agent,
    ranks: &[Rank],
    what: &str,
    arguments: &[Value],
    limit: Option<Duration>,
    turn: Option<&Turn<'_>>,
) -> Result<BTreeSet<Rank>> {
    let calls: Vec<_> = ranks
        .iter()
        .map(|&rank| (rank, plain::call(agent, rank, what, arguments.to_vec(), limit, None)))
        .collect();
    let mut gone = BTreeSet::new();
    for (rank, call) in calls {
        let outcome = call.and_then(|call| {
            while !call.wait_until(Some(now() + RENEW_EVERY)) {
                turn.map_or(Ok(()), Turn::renew_if_due)?;
            }
            plain::outcome(&call)
        });
        match outcome {
            Ok(()) => {}
            Err(error) if is_loss(Some(&error)) || agent.gone().contains(&rank) => {
                gone.insert(rank);
            }
            Err(error) => return Err(error),
        }
    }
    Ok(gone)
}

/// The right to change who is a member.
struct Turn<'a> {
    store: &'a PrefixStore,
    name: &'a WorkerName,
    holder: String,
    count: Cell<u64>,
    renewed: Cell<Instant>,
}

impl<'a> Turn<'a> {
    /// Waits for the turn.
    fn acquire(store: &'a PrefixStore, name: &'a WorkerName, deadline: Deadline) -> Result<Self, Failure> {
        let holder = format!("{name} {}", random_hex::<8>()?);
        let turn = Self { store, name, holder, count: Cell::new(0), renewed: Cell::new(now()) };
        let (mut expected, mut seen, mut since) = (String::new(), String::new(), now());
        loop {
            let found = store.compare_set(TURN, expected.as_bytes(), turn.value().as_bytes())?;
            let found = String::from_utf8_lossy(&found).into_owned();
            if found == turn.value() {
                turn.renewed.set(now());
                return Ok(turn);
            }
            if found != seen {
                (seen, since) = (found.clone(), now());
            }
            if found == FREE {
                expected = found;
                continue;
            }
            let holder = seen.split(' ').next().unwrap_or_default();
            if now() - since > LEASE {
                tracing::warn!("worker '{holder}' is passed over: it stopped while joining or leaving");
                expected = found;
                continue;
            }
            if deadline.is_over() {
                let text = format!(
                    "worker '{name}' did not get its turn in {deadline} s: worker '{holder}' is joining or leaving"
                );
                return Err(Error::new(ErrorKind::Timeout, text).into());
            }
            FREE.clone_into(&mut expected);
            pause(POLL_EVERY);
        }
    }

    /// Says that this worker is still at it.
    fn renew(&self) -> Result<()> {
        let before = self.value();
        self.count.set(self.count.get() + 1);
        let found = self.store.compare_set(TURN, before.as_bytes(), self.value().as_bytes())?;
        if found != self.value().as_bytes() {
            return Err(Error::usage(format!(
                "worker '{}' did not finish joining or leaving within {} s and was passed over",
                self.name,
                LEASE.as_secs()
            )));
        }
        self.renewed.set(now());
        Ok(())
    }

    /// Renews unless that was done a moment ago.
    fn renew_if_due(&self) -> Result<()> {
        if now() - self.renewed.get() > RENEW_EVERY { self.renew() } else { Ok(()) }
    }

    fn give_back(self) {
        let given: Result<_, StoreError> =
            self.store.compare_set(TURN, self.value().as_bytes(), FREE.as_bytes());
        if let Err(error) = given {
            tracing::debug!(%error, "giving the turn back");
        }
    }

    fn value(&self) -> String {
        format!("{} {}", self.holder, self.count.get())
    }
}
