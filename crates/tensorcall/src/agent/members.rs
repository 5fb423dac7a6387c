//! The members of a group, this worker included: who they are and the way to each.
//!
//! A static group is known from the start and keeps its members, also those that are gone. Into a
//! dynamic group workers come at run time, and a worker that is gone may come back as another life.

use std::collections::HashSet;
use std::sync::Arc;

use rustc_hash::FxHashMap;

use tensorcall_proto::ids::{Identity, Incarnation, Life, Rank, WorkerName};
use tensorcall_proto::in_flight::Window;

use super::peers::{Peer, PeerInfo};
use crate::error::{Error, Result};
use crate::sync::Mutex;

/// See the module.
#[derive(Debug)]
pub(crate) struct Members {
    table: Mutex<Table>,
    window: Window,
    kind: GroupKind,
}

/// Whether workers may come at run time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GroupKind {
    Static,
    Dynamic,
}

/// What [`Members::admit`] found.
#[derive(Debug)]
pub(crate) enum Admitted {
    /// It is a member already.
    Known,
    /// It is one now.
    New,
    /// It is one now, in the place of this earlier life.
    Instead(Arc<Peer>),
}

#[derive(Debug, Default)]
struct Table {
    by_rank: FxHashMap<Rank, Arc<Peer>>,
    by_name: FxHashMap<WorkerName, Rank>,
    /// Lives that others have taken the place of.
    former: HashSet<(Rank, Incarnation)>,
}

impl Members {
    /// # Errors
    ///
    /// If two workers share a name or a rank.
    pub(crate) fn new(
        infos: impl IntoIterator<Item = PeerInfo>,
        window: Window,
        kind: GroupKind,
    ) -> Result<Self> {
        let mut table = Table::default();
        for info in infos {
            let Identity { name, rank, .. } = &info.identity;
            if table.by_rank.contains_key(rank) {
                return Err(Error::usage(format!("two workers have rank {rank}")));
            }
            if let Some(&other) = table.by_name.get(name) {
                return Err(not_unique(name, other, *rank));
            }
            table.insert(info, window);
        }
        Ok(Self { table: Mutex::new(table), window, kind })
    }

    /// Takes in a worker that has joined a dynamic group. Doing it again is harmless.
    ///
    /// # Errors
    ///
    /// If the group is static, another member has its name, or this life of it is over.
    pub(crate) fn admit(&self, info: PeerInfo) -> Result<Admitted> {
        let Identity { name, rank, incarnation } = info.identity.clone();
        if self.kind == GroupKind::Static {
            return Err(Error::usage(format!("worker '{name}' cannot join: the group is static")));
        }
        if let Some(holder) = self.other_with_name(&name, rank)
            && holder.state.lock().gone.is_none()
        {
            return Err(not_unique(&name, holder.rank(), rank));
        }
        let mut table = self.table.lock();
        if table.former.contains(&(rank, incarnation)) {
            return Err(Error::usage(format!("this life of worker '{name}' is over")));
        }
        let before = table.by_rank.get(&rank).cloned();
        if before.as_ref().is_some_and(|peer| peer.info.identity == info.identity) {
            return Ok(Admitted::Known);
        }
        if let Some(peer) = &before {
            let Identity { name, incarnation, .. } = &peer.info.identity;
            if table.by_name.get(name) == Some(&rank) {
                table.by_name.remove(name);
            }
            table.former.insert((rank, *incarnation));
        }
        table.insert(info, self.window);
        Ok(before.map_or(Admitted::New, Admitted::Instead))
    }

    fn other_with_name(&self, name: &WorkerName, rank: Rank) -> Option<Arc<Peer>> {
        let table = self.table.lock();
        let other = table.by_name.get(name).filter(|other| **other != rank)?;
        table.by_rank.get(other).cloned()
    }

    pub(crate) fn get(&self, rank: Rank) -> Option<Arc<Peer>> {
        self.table.lock().by_rank.get(&rank).cloned()
    }

    pub(crate) fn rank_of(&self, name: &WorkerName) -> Option<Rank> {
        self.table.lock().by_name.get(name).copied()
    }

    /// The name and rank of the worker with this name.
    pub(crate) fn find(&self, name: &str) -> Option<(WorkerName, Rank)> {
        self.table.lock().by_name.get_key_value(name).map(|(name, rank)| (name.clone(), *rank))
    }

    /// Whether a worker that proved to be of the job may call us: it is a member, or may become one.
    pub(crate) fn may_call(&self, identity: &Identity) -> bool {
        let table = self.table.lock();
        match table.by_rank.get(&identity.rank) {
            Some(peer) if peer.info.identity == *identity => true,
            _ => {
                self.kind == GroupKind::Dynamic
                    && !table.former.contains(&(identity.rank, identity.incarnation))
            }
        }
    }

    /// Whether this life of a worker, which is no member, may become one.
    pub(crate) fn may_come(&self, life: Life) -> bool {
        self.kind == GroupKind::Dynamic && !self.table.lock().former.contains(&(life.rank, life.incarnation))
    }

    pub(crate) fn all(&self) -> Vec<Arc<Peer>> {
        self.table.lock().by_rank.values().cloned().collect()
    }

    pub(crate) fn ranks(&self) -> Vec<Rank> {
        self.table.lock().by_rank.keys().copied().collect()
    }

    pub(crate) fn kind(&self) -> GroupKind {
        self.kind
    }
}

impl Table {
    fn insert(&mut self, info: PeerInfo, window: Window) {
        let Identity { name, rank, .. } = info.identity.clone();
        self.by_name.insert(name, rank);
        self.by_rank.insert(rank, Arc::new(Peer::new(info, window)));
    }
}

fn not_unique(name: &WorkerName, one: Rank, other: Rank) -> Error {
    Error::usage(format!("worker name '{name}' is not unique: ranks {one} and {other} share it"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::peers::Gone;

    const WINDOW: Window = Window { max_calls: 1, max_bytes: 1 };

    fn info(name: &str, rank: u32, life: u64) -> PeerInfo {
        let identity = Identity {
            name: WorkerName::parse(name).unwrap(),
            rank: Rank::new(rank).unwrap(),
            incarnation: Incarnation::new(life),
        };
        PeerInfo { identity, addresses: Vec::new(), plain: false }
    }

    fn dynamic(infos: Vec<PeerInfo>) -> Members {
        Members::new(infos, WINDOW, GroupKind::Dynamic).unwrap()
    }

    #[test]
    fn names_and_ranks_are_unique() {
        for other in [info("a", 1, 2), info("b", 0, 2)] {
            assert!(Members::new([info("a", 0, 1), other], WINDOW, GroupKind::Static).is_err());
        }
    }

    #[test]
    fn a_static_group_stays_as_it_is() {
        let members = Members::new([info("a", 0, 1)], WINDOW, GroupKind::Static).unwrap();

        assert!(members.admit(info("b", 1, 2)).is_err());

        assert!(!members.may_call(&info("b", 1, 2).identity));
        assert!(members.may_call(&info("a", 0, 1).identity));
    }

    #[test]
    fn a_new_life_takes_the_place_of_an_earlier_one_for_good() {
        let members = dynamic(vec![info("a", 0, 1), info("b", 1, 2)]);

        assert!(matches!(members.admit(info("b", 1, 2)), Ok(Admitted::Known)));
        assert!(matches!(members.admit(info("b", 1, 3)), Ok(Admitted::Instead(_))));

        assert!(members.admit(info("b", 1, 2)).is_err());
        assert!(!members.may_call(&info("b", 1, 2).identity));
        assert!(members.may_call(&info("b", 1, 3).identity));
    }

    #[test]
    fn a_rank_may_come_back_under_another_name_and_frees_the_first_one() {
        let members = dynamic(vec![info("a", 0, 1), info("b", 1, 2)]);

        members.admit(info("c", 1, 3)).unwrap();
        members.admit(info("b", 2, 4)).unwrap();

        assert_eq!(members.rank_of(&WorkerName::parse("c").unwrap()), Rank::new(1));
        assert_eq!(members.rank_of(&WorkerName::parse("b").unwrap()), Rank::new(2));
    }

    #[test]
    fn the_name_of_a_live_member_is_taken_and_that_of_one_that_is_gone_is_free() {
        let members = dynamic(vec![info("a", 0, 1), info("b", 1, 2)]);
        assert!(members.admit(info("b", 2, 3)).is_err());

        members.get(Rank::new(1).unwrap()).unwrap().state.lock().gone = Some(Gone::Left);

        assert!(matches!(members.admit(info("b", 2, 3)), Ok(Admitted::New)));
        assert_eq!(members.rank_of(&WorkerName::parse("b").unwrap()), Rank::new(2));
    }

    #[test]
    fn a_worker_that_is_about_to_join_may_call() {
        assert!(dynamic(vec![info("a", 0, 1)]).may_call(&info("b", 1, 2).identity));
    }
}
