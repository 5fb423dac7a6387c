//! One rule of the protocol per test. How the rules hold together is the simulator's business.

use std::collections::VecDeque;

use super::*;

const CALM: Counts = Counts { outstanding: 0, processing: 0, activity: 7 };
const BUSY: Counts = Counts { outstanding: 0, processing: 1, activity: 7 };

/// Members whose messages arrive at once and in order, and whose counts the test sets.
struct Group {
    now: Instant,
    members: Vec<Termination>,
    counts: Vec<Counts>,
    dead: Vec<Rank>,
    sent: Vec<(u16, u16, TerminationMessage)>,
    over: Vec<(u16, u64)>,
    told_gone: Vec<(u16, u16)>,
}

impl Group {
    #[expect(clippy::disallowed_methods, reason = "any instant will do")]
    fn new(size: u32) -> Self {
        let ranks: Vec<Rank> = (0..size).map(|number| Rank::new(number).unwrap()).collect();
        let member = |&rank: &Rank| Termination::new(rank, ranks.iter().copied(), Config::default());
        Self {
            now: Instant::now(),
            members: ranks.iter().map(member).collect(),
            counts: vec![CALM; ranks.len()],
            dead: Vec::new(),
            sent: Vec::new(),
            over: Vec::new(),
            told_gone: Vec::new(),
        }
    }

    fn arrive(&mut self, member: u32) {
        self.members[index(rank(member))].arrive(self.now, true);
        self.settle();
    }

    fn arrive_all(&mut self) {
        for number in 0..self.members.len() {
            self.members[number].arrive(self.now, true);
        }
        self.settle();
    }

    fn crash(&mut self, member: u32) {
        self.dead.push(rank(member));
    }

    fn lose(&mut self, at: u32, lost: u32) {
        self.members[index(rank(at))].handle_lost(self.now, rank(lost));
        self.settle();
    }

    fn wait(&mut self) {
        self.now += Duration::from_millis(50);
        for number in 0..self.members.len() {
            self.members[number].handle_timeout(self.now);
        }
        self.settle();
    }

    /// Follows all effects until there are none.
    fn settle(&mut self) {
        let mut mail = VecDeque::new();
        loop {
            for number in 0..self.members.len() {
                while let Some(effect) = self.members[number].poll_effect() {
                    self.follow(number, effect, &mut mail);
                }
            }
            let Some((from, to, message)) = mail.pop_front() else { break };
            self.members[index(to)].handle_message(self.now, from, message);
        }
    }

    fn follow(
        &mut self,
        number: usize,
        effect: Effect,
        mail: &mut VecDeque<(Rank, Rank, TerminationMessage)>,
    ) {
        let me = rank(u32::try_from(number).unwrap());
        match effect {
            Effect::Send(to, message) => {
                self.sent.push((me.get(), to.get(), message.clone()));
                if !self.dead.contains(&to) && !self.dead.contains(&me) {
                    mail.push_back((me, to, message));
                }
            }
            Effect::TakeCounts => self.members[number].handle_counts(self.now, self.counts[number]),
            Effect::Quiet { round, .. } => self.over.push((me.get(), round)),
            Effect::PeerGone(gone) => self.told_gone.push((me.get(), gone.get())),
            Effect::Watch(_) => {}
        }
    }
}

fn rank(number: u32) -> Rank {
    Rank::new(number).unwrap()
}

fn index(rank: Rank) -> usize {
    usize::from(rank.get())
}

fn effects(member: &mut Termination) -> Vec<Effect> {
    std::iter::from_fn(|| member.poll_effect()).collect()
}

fn wave(round: u64, epoch: u64, wave: u64) -> TerminationMessage {
    TerminationMessage::Wave { round, epoch, wave, gone: [].into() }
}

#[test]
fn a_worker_alone_is_quiet_without_a_message() {
    let mut group = Group::new(1);

    group.arrive(0);

    assert_eq!(group.over, [(0, 1)]);
    assert!(group.sent.is_empty());
}

#[test]
fn two_calm_workers_need_two_waves() {
    let mut group = Group::new(2);

    group.arrive(1);
    group.arrive(0);

    let report = |wave| TerminationMessage::Report { round: 1, epoch: 0, wave, counts: CALM };
    let expected = [
        (1, 0, TerminationMessage::Arrive { round: 1, epoch: 0, quiet: 0 }),
        (0, 1, wave(1, 0, 1)),
        (1, 0, report(1)),
        (0, 1, wave(1, 0, 2)),
        (1, 0, report(2)),
        (0, 1, TerminationMessage::Quiet { round: 1, epoch: 0 }),
    ];
    assert_eq!(group.sent, expected);
    assert_eq!(group.over, [(0, 1), (1, 1)]);
}

#[test]
fn nothing_is_asked_before_all_have_arrived() {
    let mut group = Group::new(3);

    group.arrive(0);
    group.arrive(2);
    group.wait();

    assert_eq!(group.sent.len(), 1, "one arrival");
    let missing = WaitingFor { rank: rank(1), reason: WaitReason::NotArrived };
    assert_eq!(group.members[0].waiting_for(), [missing]);
    assert_eq!(group.members[0].next_deadline(), None);
}

#[test]
fn a_coordinator_watches_whom_it_waits_for() {
    let mut group = Group::new(3);
    group.arrive(2);

    group.members[0].arrive(group.now, true);

    assert_eq!(effects(&mut group.members[0]), [Effect::Watch(rank(1))]);
}

#[test]
fn a_busy_worker_says_so_once_and_answers_when_it_is_done() {
    let mut group = Group::new(2);
    group.counts[1] = BUSY;

    group.arrive_all();
    for _ in 0..10 {
        group.wait();
    }
    let reports = |group: &Group| {
        group.sent.iter().filter(|(.., message)| matches!(message, TerminationMessage::Report { .. })).count()
    };
    assert_eq!((reports(&group), group.over.len()), (1, 0));
    let busy = WaitingFor { rank: rank(1), reason: WaitReason::Busy(Some(BUSY)) };
    assert_eq!(group.members[0].waiting_for(), [busy]);

    group.counts[1] = CALM;
    group.wait();

    assert_eq!((reports(&group), group.over.len()), (3, 2));
}

#[test]
fn a_worker_that_says_it_is_idle_is_counted_at_once() {
    let mut group = Group::new(2);
    group.counts[1] = BUSY;
    group.arrive_all();

    group.counts[1] = CALM;
    group.members[1].handle_idle();
    group.settle();

    assert_eq!(group.over.len(), 2);
}

#[test]
fn activity_between_two_waves_makes_another_necessary() {
    let now = Group::new(1).now;
    let mut coordinator = Termination::new(rank(0), [rank(1)], Config::default());
    let report = |wave, activity| TerminationMessage::Report {
        round: 1,
        epoch: 0,
        wave,
        counts: Counts { activity, ..CALM },
    };
    coordinator.arrive(now, true);
    let arrive = TerminationMessage::Arrive { round: 1, epoch: 0, quiet: 0 };
    coordinator.handle_message(now, rank(1), arrive);

    for (number, activity) in [(1, 7), (2, 8)] {
        coordinator.handle_message(now, rank(1), report(number, activity));
        coordinator.handle_counts(now, CALM);
    }
    assert!(coordinator.is_waiting());
    let pause = coordinator.next_deadline().unwrap();
    coordinator.handle_timeout(pause);
    coordinator.handle_counts(pause, CALM);
    coordinator.handle_message(pause, rank(1), report(3, 8));

    assert!(!coordinator.is_waiting());
}

#[test]
fn a_lost_worker_is_not_waited_for() {
    let mut group = Group::new(3);
    group.arrive(0);
    group.arrive(1);
    group.crash(2);

    group.lose(0, 2);

    assert_eq!(group.over, [(0, 1), (1, 1)]);
    assert_eq!(group.members[0].lost().collect::<Vec<_>>(), [rank(2)]);
}

#[test]
fn a_worker_that_said_goodbye_is_gone_but_not_lost() {
    let mut group = Group::new(2);
    group.arrive(0);

    group.members[0].handle_goodbye(group.now, rank(1));
    group.settle();

    assert_eq!(group.over, [(0, 1)]);
    assert_eq!(group.members[0].lost().count(), 0);
    assert_eq!(group.members[0].live().collect::<Vec<_>>(), [rank(0)]);
}

#[test]
fn a_member_that_had_not_noticed_a_loss_is_told_before_it_counts() {
    let mut member = Termination::new(rank(1), [rank(0), rank(2)], Config::default());
    let now = Group::new(1).now;
    member.arrive(now, true);
    effects(&mut member);

    let gone = [rank(2)].into();
    let asked = TerminationMessage::Wave { round: 1, epoch: 0, wave: 1, gone };
    member.handle_message(now, rank(0), asked);

    assert_eq!(effects(&mut member), [Effect::PeerGone(rank(2)), Effect::TakeCounts]);
}

#[test]
fn a_wave_that_a_loss_interrupts_does_not_count() {
    let now = Group::new(1).now;
    let mut coordinator = Termination::new(rank(0), [rank(1), rank(2)], Config::default());
    let report = |wave| TerminationMessage::Report { round: 1, epoch: 0, wave, counts: CALM };
    for from in [1, 2] {
        let arrive = TerminationMessage::Arrive { round: 1, epoch: 0, quiet: 0 };
        coordinator.handle_message(now, rank(from), arrive);
    }
    coordinator.arrive(now, true);
    coordinator.handle_counts(now, CALM);
    coordinator.handle_message(now, rank(1), report(1));
    coordinator.handle_message(now, rank(2), report(1));
    // The second wave is out. Rank 1 has answered when rank 2 is lost.
    coordinator.handle_counts(now, CALM);
    coordinator.handle_message(now, rank(1), report(2));

    coordinator.handle_lost(now, rank(2));

    assert!(coordinator.is_waiting());
    assert!(coordinator.next_deadline().is_some());
}

#[test]
fn the_next_rank_takes_over_from_a_lost_coordinator() {
    let mut group = Group::new(3);
    group.counts[2] = BUSY;
    group.arrive_all();
    group.crash(0);
    group.counts[2] = CALM;

    group.lose(2, 0);
    assert!(group.over.is_empty(), "rank 1 does not know yet");
    group.lose(1, 0);

    assert_eq!(group.over, [(1, 1), (2, 1)]);
    assert!(group.members[1].is_coordinator());
}

#[test]
fn a_new_coordinator_learns_that_the_round_is_over_from_who_was_told() {
    let mut group = Group::new(3);
    for number in 0..3 {
        group.members[number].arrive(group.now, false);
    }
    group.crash(0);
    group.settle();
    // Rank 0 told rank 2 alone before it died.
    group.members[2].handle_message(group.now, rank(0), TerminationMessage::Quiet { round: 1, epoch: 0 });
    group.counts[2] = BUSY;
    group.settle();
    assert_eq!(group.over, [(2, 1)]);

    group.lose(1, 0);
    assert_eq!(group.over, [(2, 1)]);
    group.lose(2, 0);

    assert_eq!(group.over, [(2, 1), (1, 1)], "although rank 2 has gone on to work");
}

/// Found by the simulator: seed 882 of the small jobs, which hung.
#[test]
fn who_arrives_at_a_coordinator_that_does_not_know_yet_is_told_later() {
    let mut group = Group::new(3);
    for number in 0..3 {
        group.members[number].arrive(group.now, false);
    }
    group.crash(0);
    group.settle();
    // Rank 2 misses that round 1 is over and arrives at rank 1, which does not know that rank 0 is dead
    // and still hears from it that the round is over.
    group.lose(2, 0);
    group.members[1].handle_message(group.now, rank(0), TerminationMessage::Quiet { round: 1, epoch: 0 });
    group.settle();

    group.lose(1, 0);

    assert_eq!(group.over, [(1, 1), (2, 1)]);
}

#[test]
fn old_repeated_and_misdirected_messages_are_ignored() {
    let mut group = Group::new(3);
    group.counts[2] = BUSY;
    group.arrive_all();
    let before = group.sent.len();
    let messages = [
        (1, 0, wave(1, 0, 1)),
        (1, 0, wave(1, 1, 9)),
        (1, 2, wave(1, 2, 9)),
        (1, 0, wave(2, 0, 9)),
        (1, 0, TerminationMessage::Quiet { round: 2, epoch: 0 }),
        (1, 2, TerminationMessage::Quiet { round: 1, epoch: 2 }),
        (0, 1, TerminationMessage::Report { round: 1, epoch: 0, wave: 1, counts: BUSY }),
        (0, 1, TerminationMessage::Report { round: 1, epoch: 0, wave: 0, counts: CALM }),
        (0, 1, TerminationMessage::Report { round: 0, epoch: 0, wave: 1, counts: CALM }),
        (0, 9, TerminationMessage::Arrive { round: 1, epoch: 0, quiet: 1 }),
    ];
    for (to, from, message) in messages {
        let ignored = group.members[to].ignored();
        group.members[to].handle_message(group.now, rank(from), message.clone());
        assert_eq!(group.members[to].ignored(), ignored + 1, "{message:?}");
    }
    group.settle();

    assert_eq!(group.sent.len(), before);
    assert!(group.over.is_empty());
}

#[test]
fn a_lost_member_is_not_listened_to() {
    let mut group = Group::new(2);
    group.members[0].handle_lost(group.now, rank(1));

    let arrive = TerminationMessage::Arrive { round: 1, epoch: 0, quiet: 0 };
    group.members[0].handle_message(group.now, rank(1), arrive);

    assert_eq!(group.members[0].ignored(), 1);
}

#[test]
fn counts_taken_before_a_wave_do_not_answer_it() {
    let now = Group::new(1).now;
    let mut member = Termination::new(rank(1), [rank(0)], Config::default());
    member.arrive(now, true);
    member.handle_message(now, rank(0), wave(1, 0, 1));
    effects(&mut member);

    member.handle_message(now, rank(0), wave(1, 0, 2));
    member.handle_counts(now, CALM);

    assert_eq!(effects(&mut member), [Effect::TakeCounts]);
    member.handle_counts(now, CALM);
    let report = TerminationMessage::Report { round: 1, epoch: 0, wave: 2, counts: CALM };
    assert_eq!(effects(&mut member), [Effect::Send(rank(0), report)]);
}

#[test]
fn arriving_again_is_harmless() {
    let mut group = Group::new(1);
    let mut waiting = Termination::new(rank(1), [rank(0)], Config::default());

    assert_eq!(waiting.arrive(group.now, false), 1);
    assert_eq!(waiting.arrive(group.now, true), 1);
    assert_eq!(effects(&mut waiting).len(), 1, "one arrival");
    group.arrive(0);
    assert!(group.members[0].has_left());
    group.arrive(0);

    assert_eq!(group.over, [(0, 1)]);
}

#[test]
fn rounds_follow_each_other() {
    let mut group = Group::new(2);

    for round in 1..=3 {
        for number in 0..2 {
            assert_eq!(group.members[number].arrive(group.now, false), round);
        }
        group.settle();
        assert_eq!(group.over.len(), 2 * usize::try_from(round).unwrap());
    }
    // Each round has two waves of its own: activity in between is none of its business.
    assert_eq!(group.sent.len(), 3 * 6);
}

#[test]
fn a_thousand_workers_need_six_messages_each() {
    let mut group = Group::new(1_000);

    group.arrive_all();

    assert_eq!(group.over.len(), 1_000);
    assert_eq!(group.sent.len(), 6 * 999);
}

#[test]
fn a_thousand_workers_may_lose_half_of_them() {
    let mut group = Group::new(1_000);
    for number in 0..500 {
        group.crash(number);
        for member in 500..1_000 {
            group.members[member].handle_lost(group.now, rank(number));
        }
    }

    for number in 500..1_000 {
        group.members[number].arrive(group.now, true);
    }
    group.settle();

    assert_eq!(group.over.len(), 500);
    assert_eq!(group.sent.len(), 6 * 499);
}

#[test]
fn the_reason_to_wait_is_the_coordinator_where_no_more_is_known() {
    let mut group = Group::new(2);
    assert!(group.members[1].waiting_for().is_empty());

    group.arrive(1);

    let waiting = WaitingFor { rank: rank(0), reason: WaitReason::Coordinator };
    assert_eq!(group.members[1].waiting_for(), [waiting]);
}
