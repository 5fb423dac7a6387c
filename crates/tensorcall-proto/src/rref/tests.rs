//! Both machines by hand: one flow, or one mishap, each.

use super::*;
use crate::ids::{ForkId, Incarnation, RRefId, Rank};

/// A value has a letter, a waiter a number.
type TestOwner = Owner<char, u32>;
type TestUser = User<u32>;
type Said = (Life, RRefMessage);

fn life(rank: u32) -> Life {
    Life { rank: Rank::new(rank).unwrap(), incarnation: Incarnation::new(100 + u64::from(rank)) }
}

/// The link that breaks.
const LINK: u64 = 5;

/// The owner, and two users.
fn o() -> Life {
    life(0)
}
fn a() -> Life {
    life(1)
}
fn b() -> Life {
    life(2)
}

/// A reference that `a` created on `o`, and `a`'s fork of it.
fn new_rref() -> NewRRef {
    NewRRef { rref: RRefId::new(a(), 1), fork: ForkId::new(a(), 2) }
}

/// A fork that `by` gives away.
fn fork(by: Life, local: u64) -> ForkId {
    ForkId::new(by, local)
}

fn said<W: std::fmt::Debug>(user: &mut User<W>) -> Vec<Said> {
    let mut said = Vec::new();
    while let Some(effect) = user.poll_effect() {
        match effect {
            UserEffect::Send(to, message) => said.push((to, message)),
            other => panic!("{other:?}"),
        }
    }
    said
}

fn effects(owner: &mut TestOwner) -> Vec<OwnerEffect<char, u32>> {
    std::iter::from_fn(|| owner.poll_effect()).collect()
}

/// An owner with `new_rref`, whose value is there, and `a` as its user.
fn shared() -> (TestOwner, TestUser) {
    let (mut owner, mut user) = (TestOwner::new(o()), TestUser::new(a()));
    let NewRRef { rref, fork } = new_rref();
    user.create(new_rref(), o());
    assert_eq!(owner.create(rref, fork, a()), Created::New);
    owner.resolve(rref, 'x');
    user.creation_done(fork, o());
    (owner, user)
}

#[test]
fn a_reference_made_by_remote_lives_until_its_only_user_deletes_it() {
    let (mut owner, mut user) = shared();
    let NewRRef { rref, fork } = new_rref();
    assert_eq!(owner.lookup(rref), Found::Ready('x'));
    assert!(user.standing(fork).unwrap().confirmed);

    user.release(fork);
    assert_eq!(said(&mut user), [(o(), RRefMessage::Delete { fork })]);
    assert_eq!((user.counts().users, user.counts().unacknowledged), (0, 1));

    owner.handle_message(a(), RRefMessage::Delete { fork });
    let deleted = RRefMessage::Deleted { fork };
    assert_eq!(effects(&mut owner), [OwnerEffect::Drop('x'), OwnerEffect::Send(a(), deleted)]);
    assert_eq!(owner.counts(), OwnerCounts::default());
    assert_eq!(owner.lookup(rref), Found::Gone(RRefError::Freed));

    assert!(user.handle_message(o(), deleted));
    assert_eq!(user.counts(), UserCounts::default());
}

#[test]
fn a_user_that_is_released_before_the_creation_is_answered_deletes_after_it() {
    let mut user = TestUser::new(a());
    let fork = new_rref().fork;
    user.create(new_rref(), o());

    user.release(fork);
    assert_eq!(said(&mut user), []);
    assert_eq!(user.standing(fork).unwrap().error, Some(RRefError::Deleted));

    user.creation_done(fork, o());
    assert_eq!(said(&mut user), [(o(), RRefMessage::Delete { fork })]);
}

#[test]
fn a_third_worker_asks_the_owner_and_then_thanks_the_one_that_shared() {
    let (mut owner, mut from) = shared();
    let NewRRef { rref, fork: own } = new_rref();
    let child = fork(a(), 3);
    let mut to = TestUser::new(b());

    let desc = from.fork_out(own, child, b()).unwrap();
    assert_eq!(to.receive(desc, a()), Received::New);
    let ask = RRefMessage::Fork { rref, fork: child };
    assert_eq!(said(&mut to), [(o(), ask)]);
    assert_eq!(to.when_confirmed(&[child, child], 7), None);
    assert_eq!((to.counts().pending_users, from.counts().pending_children), (1, 1));

    // Released, but it stands by for its child.
    from.release(own);
    assert_eq!(said(&mut from), []);

    owner.handle_message(b(), ask);
    let known = RRefMessage::Known { fork: child, alive: true };
    assert_eq!(effects(&mut owner), [OwnerEffect::Send(b(), known)]);
    assert!(to.handle_message(o(), known));
    assert_eq!(to.poll_effect(), Some(UserEffect::Confirmed(7)));
    let accept = RRefMessage::Accept { fork: child };
    assert_eq!(said(&mut to), [(a(), accept)]);
    assert_eq!(to.when_confirmed(&[child], 8), Some(8));

    assert!(from.handle_message(b(), accept));
    let accepted = RRefMessage::Accepted { fork: child };
    assert_eq!(said(&mut from), [(o(), RRefMessage::Delete { fork: own }), (b(), accepted)]);
    assert_eq!(to.counts().unacknowledged, 1);
    assert!(to.handle_message(a(), accepted));
    assert_eq!(to.counts().unacknowledged, 0);
    owner.handle_message(a(), RRefMessage::Delete { fork: own });
    assert_eq!(owner.lookup(rref), Found::Ready('x'));
    assert_eq!(owner.forks().collect::<Vec<_>>(), [(rref, child, b())]);
}

#[test]
fn an_owner_counts_what_it_shares_before_the_receiver_has_it() {
    let mut owner = TestOwner::new(o());
    let (rref, shared) = (RRefId::new(o(), 1), fork(o(), 2));
    let mut user = TestUser::new(b());
    owner.create_local(rref, 'x');

    let desc = owner.fork_out(rref, shared, b()).unwrap();
    owner.release(rref);
    assert_eq!(owner.counts(), OwnerCounts { rrefs: 1, forks: 1, unacknowledged: 1, waiting: 0 });

    user.receive(desc, o());
    assert!(user.standing(shared).unwrap().confirmed);
    let arrived = RRefMessage::Fork { rref, fork: shared };
    assert_eq!(said(&mut user), [(o(), arrived)]);
    user.release(shared);
    assert_eq!(said(&mut user), []);
    owner.handle_message(b(), arrived);
    assert_eq!(owner.counts().unacknowledged, 0);
    let known = RRefMessage::Known { fork: shared, alive: true };
    assert_eq!(effects(&mut owner), [OwnerEffect::Send(b(), known)]);

    user.handle_message(o(), known);
    assert_eq!(said(&mut user), [(o(), RRefMessage::Delete { fork: shared })]);
    owner.handle_message(b(), RRefMessage::Delete { fork: shared });
    assert_eq!(owner.counts(), OwnerCounts::default());
    assert_eq!(effects(&mut owner)[0], OwnerEffect::Drop('x'));
}

#[test]
fn a_reference_that_comes_back_to_its_owner_is_held_and_accepted_at_once() {
    let (mut owner, mut user) = shared();
    let NewRRef { rref, fork: own } = new_rref();
    let back = fork(a(), 3);

    let desc = user.fork_out(own, back, o()).unwrap();
    user.release(own);
    assert_eq!(owner.received_back(desc, a()), Found::Ready('x'));
    let accept = RRefMessage::Accept { fork: back };
    assert_eq!(effects(&mut owner), [OwnerEffect::Send(a(), accept)]);

    assert!(user.handle_message(o(), accept));
    let accepted = RRefMessage::Accepted { fork: back };
    assert_eq!(said(&mut user), [(o(), RRefMessage::Delete { fork: own }), (o(), accepted)]);
    owner.handle_message(a(), accepted);
    assert_eq!(owner.counts().unacknowledged, 0);
    owner.handle_message(a(), RRefMessage::Delete { fork: own });
    assert_eq!(owner.counts().rrefs, 1);
    owner.release(rref);
    assert_eq!(owner.counts().rrefs, 0);
}

#[test]
fn a_worker_may_share_with_itself() {
    let (mut owner, mut user) = shared();
    let NewRRef { rref, fork: own } = new_rref();

    let child = fork(a(), 3);
    let desc = user.fork_out(own, child, a()).unwrap();
    user.receive(desc, a());
    user.release(own);
    assert_eq!(said(&mut user), [(o(), RRefMessage::Fork { rref, fork: child })]);
    user.handle_message(o(), RRefMessage::Known { fork: child, alive: true });
    assert_eq!(said(&mut user), [(o(), RRefMessage::Delete { fork: own })]);
    assert_eq!(user.counts().pending_children, 0);

    let to_self = owner.fork_out(rref, fork(o(), 1), o()).unwrap();
    assert_eq!(owner.received_back(to_self, o()), Found::Ready('x'));
    assert_eq!((owner.counts().forks, owner.counts().unacknowledged), (1, 0));
}

#[test]
fn a_value_that_a_worker_creates_on_itself_comes_later() {
    let mut owner = TestOwner::new(o());
    let rref = RRefId::new(o(), 1);
    owner.create_pending(rref);

    assert_eq!(owner.wait(rref, 1), Wait::Waiting);
    assert!(owner.fork_out(rref, fork(o(), 2), b()).is_ok());
    owner.resolve(rref, 'x');

    assert_eq!(effects(&mut owner), [OwnerEffect::Ready(1, 'x')]);
    assert_eq!(owner.wait(rref, 2), Wait::Ready(2, 'x'));
}

#[test]
fn whatever_overtakes_a_creation_waits_for_it() {
    let mut owner = TestOwner::new(o());
    let NewRRef { rref, fork: own } = new_rref();

    assert_eq!(owner.wait(rref, 1), Wait::Waiting);
    assert_eq!(owner.wait(rref, 2), Wait::Waiting);
    let child = fork(a(), 3);
    owner.handle_message(b(), RRefMessage::Fork { rref, fork: child });
    let known = RRefMessage::Known { fork: child, alive: true };
    assert_eq!(effects(&mut owner), [OwnerEffect::Send(b(), known)]);
    let desc = RRefDesc { rref, owner: o(), fork: fork(a(), 4) };
    assert_eq!(owner.received_back(desc, a()), Found::Waiting);
    assert_eq!(owner.cancel_wait(rref, |&waiter| waiter == 2), [2]);
    effects(&mut owner);

    assert_eq!(owner.create(rref, own, a()), Created::New);
    assert_eq!(owner.create(rref, own, a()), Created::Again);
    owner.resolve(rref, 'x');
    assert_eq!(effects(&mut owner), [OwnerEffect::Ready(1, 'x')]);
}

#[test]
fn a_placeholder_that_nobody_wants_is_no_more() {
    let mut owner = TestOwner::new(o());
    let rref = new_rref().rref;
    let child = fork(a(), 3);

    owner.wait(rref, 1);
    owner.handle_message(b(), RRefMessage::Fork { rref, fork: child });
    owner.handle_message(b(), RRefMessage::Delete { fork: child });
    assert_eq!(owner.counts().rrefs, 1);
    owner.cancel_wait(rref, |_| true);
    assert_eq!(owner.counts(), OwnerCounts::default());

    assert_eq!(owner.create(rref, new_rref().fork, a()), Created::New);
}

#[test]
fn a_failed_creation_is_not_shared_and_is_deleted_when_released() {
    let mut user = TestUser::new(a());
    let own = new_rref().fork;
    user.create(new_rref(), o());

    user.creation_failed(own);
    let failed = Some(RRefError::CreationFailed);
    assert_eq!(user.standing(own).unwrap().error, failed);
    assert_eq!(user.fork_out(own, fork(a(), 3), b()), Err(RRefError::CreationFailed));
    assert_eq!(user.when_confirmed(&[own], 1), None);
    let unconfirmed = UserEffect::Unconfirmed(1, own, RRefError::CreationFailed);
    assert_eq!(user.poll_effect(), Some(unconfirmed));

    // The answer that comes late confirms it; it is of no use for all that.
    user.creation_done(own, o());
    assert_eq!(user.standing(own).unwrap().error, failed);
    user.release(own);
    assert_eq!(said(&mut user), [(o(), RRefMessage::Delete { fork: own })]);
}

#[test]
fn a_creation_that_comes_after_its_delete_does_not_run() {
    let mut owner = TestOwner::new(o());
    let NewRRef { rref, fork: own } = new_rref();

    owner.handle_message(a(), RRefMessage::Delete { fork: own });

    assert_eq!(effects(&mut owner), [OwnerEffect::Send(a(), RRefMessage::Deleted { fork: own })]);
    assert_eq!(owner.create(rref, own, a()), Created::Refused);
    assert_eq!(owner.counts(), OwnerCounts::default());
}

#[test]
fn a_creation_that_comes_after_its_delete_runs_for_others() {
    let mut owner = TestOwner::new(o());
    let NewRRef { rref, fork: own } = new_rref();
    let child = fork(a(), 3);
    owner.handle_message(b(), RRefMessage::Fork { rref, fork: child });

    owner.handle_message(a(), RRefMessage::Delete { fork: own });

    assert_eq!(owner.create(rref, own, a()), Created::New);
    assert_eq!(owner.forks().collect::<Vec<_>>(), [(rref, child, b())]);
}

#[test]
fn a_late_answer_to_a_creation_that_was_given_up_deletes_again() {
    let mut user = TestUser::new(a());
    let own = new_rref().fork;
    user.create(new_rref(), o());
    user.creation_failed(own);
    user.release(own);
    assert_eq!(said(&mut user), [(o(), RRefMessage::Delete { fork: own })]);
    user.handle_message(o(), RRefMessage::Deleted { fork: own });

    user.creation_done(own, o());

    assert_eq!(said(&mut user), [(o(), RRefMessage::Delete { fork: own })]);
}

#[test]
fn a_creation_that_never_left_is_not_deleted() {
    let mut user = TestUser::new(a());
    let own = new_rref().fork;
    user.create(new_rref(), o());

    user.unsent(own);
    user.release(own);

    assert_eq!(said(&mut user), []);
    assert_eq!(user.counts(), UserCounts::default());
}

#[test]
fn a_child_in_a_message_that_never_left_is_dropped() {
    let (mut owner, mut user) = shared();
    let NewRRef { rref, fork: own } = new_rref();
    user.fork_out(own, fork(a(), 3), b()).unwrap();
    owner.fork_out(rref, fork(o(), 1), b()).unwrap();

    user.unsent(fork(a(), 3));
    owner.unsent(fork(o(), 1));

    user.release(own);
    assert_eq!(said(&mut user), [(o(), RRefMessage::Delete { fork: own })]);
    assert_eq!(owner.counts().forks, 1);
}

#[test]
fn a_creation_that_is_not_run_fails_those_who_wait() {
    let mut owner = TestOwner::new(o());
    let NewRRef { rref, fork: own } = new_rref();
    owner.create(rref, own, a());
    owner.wait(rref, 1);

    owner.abandon(rref);

    let error = RRefError::NeverCreated;
    assert_eq!(effects(&mut owner), [OwnerEffect::Failed(1, error)]);
    assert_eq!(owner.wait(rref, 2), Wait::Gone(2, error));
    assert_eq!(owner.fork_out(rref, fork(o(), 1), b()), Err(error));
    owner.handle_message(a(), RRefMessage::Delete { fork: own });
    assert_eq!(owner.counts(), OwnerCounts::default());
}

#[test]
fn a_value_whose_users_are_gone_when_it_comes_is_dropped() {
    let mut owner = TestOwner::new(o());
    let NewRRef { rref, fork: own } = new_rref();
    owner.create(rref, own, a());

    owner.handle_lost(a());
    assert_eq!(owner.counts().rrefs, 1);
    owner.resolve(rref, 'x');

    assert_eq!(effects(&mut owner), [OwnerEffect::Drop('x')]);
    assert_eq!(owner.counts(), OwnerCounts::default());
    owner.resolve(rref, 'y');
    assert_eq!(effects(&mut owner), [OwnerEffect::Drop('y')]);
}

#[test]
fn a_lost_worker_holds_nothing_and_creates_nothing() {
    let (mut owner, _) = shared();
    let other = RRefId::new(a(), 50);
    owner.wait(other, 1);
    owner.handle_message(b(), RRefMessage::Fork { rref: other, fork: fork(a(), 51) });
    effects(&mut owner);

    owner.handle_lost(a());

    let failed = OwnerEffect::Failed(1, RRefError::NeverCreated);
    assert_eq!(effects(&mut owner), [OwnerEffect::Drop('x'), failed]);
    // Late messages of that life make nothing.
    owner.handle_message(a(), RRefMessage::Fork { rref: other, fork: fork(a(), 52) });
    assert_eq!(owner.create(RRefId::new(a(), 60), fork(a(), 61), a()), Created::Refused);
    assert_eq!(owner.wait(RRefId::new(a(), 70), 2), Wait::Gone(2, RRefError::NeverCreated));
    assert_eq!(effects(&mut owner), []);
    // A later life is another worker.
    let next = Life { incarnation: Incarnation::new(7), ..a() };
    assert_eq!(owner.create(RRefId::new(next, 1), ForkId::new(next, 2), next), Created::New);
}

#[test]
fn a_lost_owner_fails_its_users_and_who_waits_for_them() {
    let mut user = TestUser::new(b());
    let (asked, confirmed) = (fork(a(), 3), fork(o(), 1));
    let rref = new_rref().rref;
    user.receive(RRefDesc { rref, owner: o(), fork: asked }, a());
    user.receive(RRefDesc { rref, owner: o(), fork: confirmed }, o());
    user.when_confirmed(&[asked, confirmed], 1);
    while user.poll_effect().is_some() {}

    user.handle_lost(o());

    let error = RRefError::OwnerLost(o());
    assert_eq!(user.poll_effect(), Some(UserEffect::Unconfirmed(1, asked, error)));
    assert_eq!(said(&mut user), [(a(), RRefMessage::Accept { fork: asked })]);
    assert_eq!(user.standing(confirmed).unwrap().error, Some(error));
    user.release(asked);
    user.release(confirmed);
    assert_eq!(said(&mut user), []);
    assert_eq!(user.counts().unacknowledged, 1);
    assert!(user.handle_message(a(), RRefMessage::Accepted { fork: asked }));
    assert_eq!(user.counts(), UserCounts::default());
}

#[test]
fn a_lost_holder_is_not_waited_for() {
    let (_, mut user) = shared();
    let own = new_rref().fork;
    user.fork_out(own, fork(a(), 3), b()).unwrap();
    user.release(own);

    user.handle_lost(b());

    assert_eq!(said(&mut user), [(o(), RRefMessage::Delete { fork: own })]);
}

#[test]
fn a_broken_link_makes_both_sides_say_again_what_matters() {
    let (mut owner, mut user) = shared();
    let NewRRef { rref, fork: own } = new_rref();
    let asked = fork(b(), 9);
    user.receive(RRefDesc { rref, owner: o(), fork: asked }, b());
    owner.fork_out(rref, fork(o(), 1), a()).unwrap();
    user.fork_out(own, fork(a(), 3), o()).unwrap();
    user.fork_out(own, fork(a(), 4), o()).unwrap();
    owner.sent(fork(o(), 1), LINK);
    user.sent(fork(a(), 3), LINK);
    user.sent(fork(a(), 4), LINK + 1);
    said(&mut user);

    user.handle_link_broken(o(), LINK);
    owner.handle_link_broken(a(), LINK);

    let again =
        [(o(), RRefMessage::Fork { rref, fork: asked }), (o(), RRefMessage::Rescind { fork: fork(a(), 3) })];
    assert_eq!(said(&mut user), again);
    let rescind = RRefMessage::Rescind { fork: fork(o(), 1) };
    let known = RRefMessage::Known { fork: own, alive: true };
    let again = [RRefMessage::AskAgain, rescind, known];
    assert_eq!(effects(&mut owner), again.map(|message| OwnerEffect::Send(a(), message)));

    // The owner got nothing, the user neither.
    assert!(user.handle_message(o(), rescind));
    assert_eq!(said(&mut user), [(o(), RRefMessage::Unknown { fork: fork(o(), 1) })]);
    owner.handle_message(a(), RRefMessage::Unknown { fork: fork(o(), 1) });
    assert_eq!((owner.counts().forks, owner.counts().unacknowledged), (1, 0));
    assert!(user.handle_message(o(), RRefMessage::Unknown { fork: fork(a(), 3) }));
    // What is under way on another link may still come.
    assert_eq!(user.counts().pending_children, 1);
}

#[test]
fn what_is_given_to_a_link_that_has_broken_is_asked_after() {
    let (mut owner, mut user) = shared();
    let NewRRef { rref, fork: own } = new_rref();
    user.fork_out(own, fork(a(), 3), b()).unwrap();
    owner.fork_out(rref, fork(o(), 1), b()).unwrap();
    user.handle_link_broken(b(), LINK);
    owner.handle_link_broken(b(), LINK);
    assert_eq!(said(&mut user), []);

    user.sent(fork(a(), 3), LINK);
    owner.sent(fork(o(), 1), LINK);

    assert_eq!(said(&mut user), [(b(), RRefMessage::Rescind { fork: fork(a(), 3) })]);
    let rescind = RRefMessage::Rescind { fork: fork(o(), 1) };
    assert_eq!(effects(&mut owner), [OwnerEffect::Send(b(), rescind)]);
}

#[test]
fn a_delete_is_said_again_until_it_is_answered() {
    let (_, mut user) = shared();
    let own = new_rref().fork;
    user.release(own);
    said(&mut user);

    user.handle_link_broken(o(), LINK);
    assert_eq!(said(&mut user), [(o(), RRefMessage::Delete { fork: own })]);
    user.handle_message(o(), RRefMessage::Deleted { fork: own });
    user.handle_link_broken(o(), LINK);
    assert_eq!(said(&mut user), []);
}

#[test]
fn a_fork_that_comes_after_it_was_given_up_asks_the_owner() {
    let mut owner = TestOwner::new(o());
    let (rref, shared) = (RRefId::new(o(), 1), fork(o(), 2));
    let mut user = TestUser::new(b());
    owner.create_local(rref, 'x');
    let desc = owner.fork_out(rref, shared, b()).unwrap();
    owner.handle_message(b(), RRefMessage::Unknown { fork: shared });
    assert_eq!(owner.counts().forks, 0);

    user.receive(desc, o());
    owner.handle_message(b(), RRefMessage::Fork { rref, fork: shared });
    let known = |alive| OwnerEffect::Send(b(), RRefMessage::Known { fork: shared, alive });
    assert_eq!(effects(&mut owner), [known(true)]);
    assert_eq!(owner.counts().forks, 1);

    // Had the value been freed meanwhile, the user would be told.
    owner.release(rref);
    owner.handle_message(b(), RRefMessage::Delete { fork: shared });
    effects(&mut owner);
    owner.handle_message(b(), RRefMessage::Fork { rref, fork: shared });
    assert_eq!(effects(&mut owner), [known(false)]);
    user.handle_message(o(), RRefMessage::Known { fork: shared, alive: false });
    assert_eq!(user.standing(shared).unwrap().error, Some(RRefError::Freed));
}

#[test]
fn a_fork_that_is_said_again_after_its_delete_heals() {
    let (mut owner, _) = shared();
    let rref = new_rref().rref;
    let child = fork(a(), 3);
    let mut user = TestUser::new(b());
    let ask = RRefMessage::Fork { rref, fork: child };
    let known = RRefMessage::Known { fork: child, alive: true };
    user.receive(RRefDesc { rref, owner: o(), fork: child }, a());
    user.handle_message(o(), known);
    user.release(child);
    for message in [ask, RRefMessage::Delete { fork: child }, ask] {
        owner.handle_message(b(), message);
    }
    user.handle_message(o(), RRefMessage::Deleted { fork: child });
    while user.poll_effect().is_some() {}

    assert!(user.handle_message(o(), known));

    assert_eq!(said(&mut user), [(o(), RRefMessage::Delete { fork: child })]);
    owner.handle_message(b(), RRefMessage::Delete { fork: child });
    assert_eq!(owner.counts().forks, 1);
}

#[test]
fn a_fork_id_is_used_once() {
    let mut user = TestUser::new(b());
    let child = fork(a(), 3);
    let desc = RRefDesc { rref: new_rref().rref, owner: o(), fork: child };

    assert_eq!(user.receive(desc, a()), Received::New);
    assert_eq!(user.receive(desc, a()), Received::Again);
    user.release(child);
    assert_eq!(user.standing(child).unwrap().error, None);
    user.release(child);
    assert_eq!(user.standing(child).unwrap().error, Some(RRefError::Deleted));
    user.handle_message(o(), RRefMessage::Known { fork: child, alive: true });

    assert_eq!(user.receive(desc, a()), Received::Ended);
    assert_eq!(user.counts().users, 0);
}

#[test]
fn everything_is_deleted_by_force_as_it_is_confirmed() {
    let (_, mut user) = shared();
    let NewRRef { rref, fork: own } = new_rref();
    let asked = fork(b(), 9);
    user.receive(RRefDesc { rref, owner: o(), fork: asked }, b());
    said(&mut user);

    user.delete_all();
    assert_eq!(said(&mut user), [(o(), RRefMessage::Delete { fork: own })]);
    assert_eq!(user.fork_out(asked, fork(a(), 4), b()), Err(RRefError::Deleted));
    user.handle_message(o(), RRefMessage::Known { fork: asked, alive: true });
    let accept = RRefMessage::Accept { fork: asked };
    assert_eq!(said(&mut user), [(b(), accept), (o(), RRefMessage::Delete { fork: asked })]);

    // The handles go later.
    user.release(own);
    user.release(asked);
    assert_eq!(said(&mut user), []);
}

#[test]
fn what_others_say_of_forks_that_are_not_theirs_is_ignored() {
    let (mut owner, mut user) = shared();
    let NewRRef { rref, fork: own } = new_rref();
    user.fork_out(own, fork(a(), 3), b()).unwrap();
    owner.fork_out(rref, fork(o(), 1), b()).unwrap();

    for message in [RRefMessage::Delete { fork: own }, RRefMessage::Unknown { fork: fork(o(), 1) }] {
        owner.handle_message(life(9), message);
    }
    owner.handle_message(life(9), RRefMessage::Fork { rref, fork: fork(o(), 1) });
    user.handle_message(life(9), RRefMessage::Accept { fork: fork(a(), 3) });
    user.handle_message(life(9), RRefMessage::Known { fork: own, alive: false });
    user.handle_message(life(9), RRefMessage::Deleted { fork: own });

    assert_eq!(owner.counts(), OwnerCounts { rrefs: 1, forks: 2, unacknowledged: 1, waiting: 0 });
    assert_eq!(effects(&mut owner), []);
    assert_eq!((user.counts().users, user.counts().pending_children), (1, 1));
    assert_eq!(user.standing(own).unwrap().error, None);
}

// What the simulator and the property test found.

#[test]
fn an_accept_that_comes_twice_counts_no_fork_at_the_parent() {
    let (_, mut user) = shared();
    let own = new_rref().fork;
    user.fork_out(own, fork(a(), 3), b()).unwrap();
    let accept = RRefMessage::Accept { fork: fork(a(), 3) };

    // Twice for the user: the parent's own table of values has nothing to do with it.
    assert!(user.handle_message(b(), accept));
    assert!(user.handle_message(b(), accept));

    let accepted = (b(), RRefMessage::Accepted { fork: fork(a(), 3) });
    assert_eq!(said(&mut user), [accepted, accepted]);
}

#[test]
fn a_lost_accept_is_said_again_at_either_ends_word() {
    let mut user = TestUser::new(b());
    let child = fork(a(), 3);
    user.receive(RRefDesc { rref: new_rref().rref, owner: o(), fork: child }, a());
    user.handle_message(o(), RRefMessage::Known { fork: child, alive: true });
    said(&mut user);

    let again = [(a(), RRefMessage::Accept { fork: child })];
    assert!(!user.handle_message(a(), RRefMessage::AskAgain), "for the owner too");
    assert_eq!(said(&mut user), again);
    user.handle_link_broken(a(), LINK);
    assert_eq!(said(&mut user), again);

    user.handle_message(a(), RRefMessage::Accepted { fork: child });
    user.handle_link_broken(a(), LINK + 1);
    assert_eq!(said(&mut user), []);
}

#[test]
fn who_answered_asks_for_the_question_after_every_break() {
    let (mut owner, _) = shared();
    let own = new_rref().fork;
    owner.handle_message(a(), RRefMessage::Delete { fork: own });
    effects(&mut owner);

    // The first word may have been lost as well.
    for link in [LINK, LINK + 1] {
        owner.handle_link_broken(a(), link);
        assert_eq!(effects(&mut owner), [OwnerEffect::Send(a(), RRefMessage::AskAgain)]);
    }
}

#[test]
fn a_stale_answer_to_a_delete_does_not_hide_that_another_was_lost() {
    let (mut owner, mut user) = shared();
    let NewRRef { rref, fork: own } = new_rref();
    let (known, deleted) =
        (RRefMessage::Known { fork: own, alive: true }, RRefMessage::Deleted { fork: own });
    owner.hold(rref);
    user.release(own);
    owner.handle_message(a(), RRefMessage::Delete { fork: own });
    // An old word of the fork counts it again; the delete that answers is taken for answered, and lost.
    owner.handle_message(a(), RRefMessage::Fork { rref, fork: own });
    user.handle_message(o(), deleted);
    user.handle_message(o(), known);
    user.handle_message(o(), deleted);
    assert_eq!(user.counts(), UserCounts::default());
    said(&mut user);
    effects(&mut owner);

    user.handle_link_broken(o(), LINK);
    assert_eq!(said(&mut user), [(o(), RRefMessage::AskAgain)]);
    owner.handle_message(a(), RRefMessage::AskAgain);
    assert_eq!(effects(&mut owner), [OwnerEffect::Send(a(), known)]);
    user.handle_message(o(), known);

    assert_eq!(said(&mut user), [(o(), RRefMessage::Delete { fork: own })]);
}

#[test]
fn a_fork_under_way_on_a_sound_link_is_not_asked_after() {
    let (mut owner, mut user) = shared();
    let NewRRef { rref, fork: own } = new_rref();
    owner.fork_out(rref, fork(o(), 1), b()).unwrap();
    user.fork_out(own, fork(a(), 3), b()).unwrap();
    owner.sent(fork(o(), 1), LINK + 1);
    user.sent(fork(a(), 3), LINK + 1);

    user.handle_link_broken(b(), LINK);
    owner.handle_link_broken(b(), LINK);
    user.handle_message(b(), RRefMessage::AskAgain);
    owner.handle_message(b(), RRefMessage::AskAgain);

    assert_eq!(said(&mut user), []);
    assert_eq!(effects(&mut owner), []);
}
