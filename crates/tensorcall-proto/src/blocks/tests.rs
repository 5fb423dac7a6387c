//! The two accounts against each other: whatever is lent, returned and withdrawn, in whatever order, no block has
//! two owners.

use std::collections::{HashSet, VecDeque};
use std::time::{Duration, Instant};

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

const TERMS: Terms = Terms { max_bytes: 16 << 20, idle: Duration::from_secs(10) };

/// What happens next.
#[derive(Debug, Clone)]
enum Step {
    /// A message with a buffer of so many bytes is sent.
    Send(u64),
    /// The borrower reads the next thing that was said to it.
    Hear,
    /// The lender does.
    HearBack,
    /// One of the borrower's buffers dies; `spent` if a forked child has it.
    Drop { which: usize, spent: bool },
    /// Time passes.
    Wait(u64),
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (0..5u32, 1..1000u64).prop_map(|(power, more)| Step::Send((MIN_BLOCK << power) + more)),
        12 => Just(Step::Hear),
        12 => Just(Step::HearBack),
        6 => (0..64usize, prop::bool::weighted(0.05)).prop_map(|(which, spent)| Step::Drop { which, spent }),
        1 => (0..12u64).prop_map(Step::Wait),
    ]
}

/// What is said to the borrower, in order.
#[derive(Debug)]
enum Said {
    Blocks(BlockMessage),
    Buffer(Block, u64),
}

/// A mistake that an end could make.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    None,
    /// The borrower gives back what it still uses.
    ReturnsEarly,
    /// It forgets to say that a child may still see a block.
    HidesFork,
}

struct Pair {
    lender: Lender,
    borrower: Borrower,
    said: VecDeque<Said>,
    said_back: VecDeque<BlockMessage>,
    /// Blocks that a buffer of the borrower lies in, and those that a child of it sees.
    held: Vec<Block>,
    seen: HashSet<Block>,
    under_way: HashSet<Block>,
    fault: Fault,
    now: Instant,
    lent: usize,
}

impl Pair {
    fn new(fault: Fault) -> Self {
        Self::with(TERMS, fault)
    }

    #[expect(clippy::disallowed_methods, reason = "a point in time to count from")]
    fn with(terms: Terms, fault: Fault) -> Self {
        Self {
            lender: Lender::new(terms),
            borrower: Borrower::new(TERMS.max_bytes),
            said: VecDeque::new(),
            said_back: VecDeque::new(),
            held: Vec::new(),
            seen: HashSet::new(),
            under_way: HashSet::new(),
            fault,
            now: Instant::now(),
            lent: 0,
        }
    }

    fn obey(&mut self) {
        while let Some(effect) = self.lender.poll_effect() {
            if let Effect::Withdraw { segment } = effect {
                self.said.push_back(Said::Blocks(BlockMessage::Withdraw { segment }));
            }
        }
        while let Some(Plan { segment, block_len, blocks }) = self.lender.poll_plan() {
            self.lender.handle_made(segment, true);
            self.said.push_back(Said::Blocks(BlockMessage::Offer { segment, block_len, blocks }));
        }
    }

    fn step(&mut self, step: &Step) -> Result<(), String> {
        match step {
            Step::Send(len) => {
                if let Some(block) = self.lender.lend(*len, self.now) {
                    self.lent += 1;
                    if self.held.contains(&block)
                        || self.seen.contains(&block)
                        || !self.under_way.insert(block)
                    {
                        return Err(format!("{block:?} is lent while somebody has it"));
                    }
                    self.said.push_back(Said::Buffer(block, *len));
                }
            }
            Step::Hear => match self.said.pop_front() {
                Some(Said::Blocks(BlockMessage::Offer { segment, block_len, blocks })) => {
                    let room = self.borrower.handle_offer(segment, block_len, blocks);
                    let accepted = room.map_err(|error| error.to_string())?.is_some();
                    self.said_back.push_back(BlockMessage::Answer { segment, accepted });
                }
                Some(Said::Blocks(BlockMessage::Withdraw { segment })) => {
                    self.borrower.handle_withdraw(segment).map_err(|error| error.to_string())?;
                }
                Some(Said::Buffer(block, len)) => {
                    let borrowed = self.borrower.borrow(block.segment, block.offset, len);
                    assert_eq!(borrowed.map_err(|error| error.to_string())?, block);
                    self.under_way.remove(&block);
                    self.held.push(block);
                    if self.fault == Fault::ReturnsEarly {
                        self.give_back(block, true);
                    }
                }
                Some(Said::Blocks(said)) => return Err(format!("{said:?} is nothing that a lender says")),
                None => {}
            },
            Step::HearBack => match self.said_back.pop_front() {
                Some(BlockMessage::Answer { segment, accepted }) => {
                    let result = self.lender.handle_answer(segment, accepted, self.now);
                    result.map_err(|error| error.to_string())?;
                }
                Some(BlockMessage::Return { segment, block, reusable }) => {
                    let result = self.lender.handle_return(segment, block, reusable, self.now);
                    result.map_err(|error| error.to_string())?;
                }
                Some(said) => return Err(format!("{said:?} is nothing that a borrower says")),
                None => {}
            },
            Step::Drop { which, spent } => {
                if !self.held.is_empty() && self.fault != Fault::ReturnsEarly {
                    let block = self.held.swap_remove(which % self.held.len());
                    if *spent {
                        self.seen.insert(block);
                    }
                    self.give_back(block, !spent || self.fault == Fault::HidesFork);
                }
            }
            Step::Wait(seconds) => {
                self.now += Duration::from_secs(*seconds);
                self.lender.handle_timeout(self.now);
            }
        }
        self.obey();
        if self.lender.total() > TERMS.max_bytes || self.borrower.total() > TERMS.max_bytes {
            return Err("more is shared than the terms allow".to_owned());
        }
        Ok(())
    }

    fn give_back(&mut self, block: Block, reusable: bool) {
        self.borrower.give_back(block.segment, block.index);
        let (segment, block) = (block.segment, block.index);
        self.said_back.push_back(BlockMessage::Return { segment, block, reusable });
    }

    /// Everything is heard, and all buffers die.
    fn settle(&mut self) -> Result<(), String> {
        while !(self.said.is_empty() && self.said_back.is_empty() && self.held.is_empty()) {
            self.step(&Step::Hear)?;
            self.step(&Step::HearBack)?;
            if let Some(block) = self.held.pop() {
                self.give_back(block, true);
            }
        }
        Ok(())
    }
}

fn run(steps: &[Step], fault: Fault) -> Result<Pair, String> {
    let mut pair = Pair::new(fault);
    for step in steps {
        pair.step(step)?;
    }
    Ok(pair)
}

proptest! {
    #[test]
    fn no_block_has_two_owners_and_an_idle_account_is_empty(steps in vec(any_step(), 0..400)) {
        let mut pair = run(&steps, Fault::None).map_err(TestCaseError::fail)?;

        pair.settle().map_err(TestCaseError::fail)?;
        pair.step(&Step::Wait(TERMS.idle.as_secs())).map_err(TestCaseError::fail)?;
        pair.settle().map_err(TestCaseError::fail)?;

        prop_assert!(pair.lender.is_empty());
        prop_assert_eq!((pair.lender.total(), pair.borrower.total(), pair.borrower.borrowed()), (0, 0, 0));
    }
}

/// Steps by which a pair comes to lend a good deal.
fn busy() -> Vec<Step> {
    let send = |len| [Step::Send(len), Step::Hear, Step::HearBack, Step::Hear, Step::HearBack];
    let drop = |spent| Step::Drop { which: 0, spent };
    (0..60).flat_map(|at| send(MIN_BLOCK << (at % 2)).into_iter().chain([drop(at % 7 == 3)])).collect()
}

#[test]
fn a_busy_pair_lends_and_lends_again() {
    let pair = run(&busy(), Fault::None).unwrap();

    assert!(pair.lent > 30, "{}", pair.lent);
}

#[test]
fn planted_faults_are_found() {
    for fault in [Fault::ReturnsEarly, Fault::HidesFork] {
        assert!(run(&busy(), fault).is_err(), "{fault:?}");
    }
}

/// A pair that has a block for 1 MiB.
fn warm() -> Pair {
    warm_with(TERMS)
}

fn warm_with(terms: Terms) -> Pair {
    let mut pair = Pair::with(terms, Fault::None);
    for _ in 0..2 {
        pair.step(&Step::Send(1 << 20)).unwrap();
        pair.settle().unwrap();
    }
    assert!(pair.lender.has(1 << 20));
    pair
}

#[test]
fn a_size_that_is_seen_once_is_not_worth_a_segment() {
    let mut pair = Pair::new(Fault::None);

    pair.step(&Step::Send(1 << 20)).unwrap();
    assert!(pair.lender.is_empty());

    pair.step(&Step::Send(1 << 20)).unwrap();
    assert_eq!(pair.lender.total(), 4 << 20);
}

/// What is asked for, and whether there is room; what is missed is made.
fn ask(pair: &mut Pair, lens: &[u64]) -> bool {
    let has_room = pair.lender.has_room(lens.iter().copied(), pair.now);
    pair.obey();
    pair.settle().unwrap();
    has_room
}

#[test]
fn sizes_that_come_together_are_made_together() {
    let mut pair = Pair::new(Fault::None);
    let lens = [1 << 20, 3 << 20, 2 << 20, 3 << 20, 100 << 10];

    assert!(!ask(&mut pair, &lens));
    assert!(pair.lender.is_empty());
    assert!(!ask(&mut pair, &lens));

    assert!(ask(&mut pair, &lens));
    assert!(lens.iter().all(|&len| pair.lender.has(len)));
}

#[test]
fn a_message_that_does_not_fit_is_lent_most_of_and_again() {
    let mut pair = Pair::new(Fault::None);
    let lens = [10 << 20, 5 << 20, 4 << 20, 3 << 20];
    for _ in 0..2 {
        assert!(!ask(&mut pair, &lens));
    }
    let total = pair.lender.total();

    for _ in 0..5 {
        pair.now += Duration::from_secs(5);
        assert!(ask(&mut pair, &lens));
        assert_eq!(pair.lender.total(), total);
        assert!(pair.lender.has(10 << 20) && pair.lender.has(5 << 20));
    }
}

#[test]
fn nothing_is_made_for_a_message_most_of_which_will_never_fit() {
    let mut pair = Pair::new(Fault::None);
    let lens = [30 << 20, 4 << 20, 1 << 20];

    for _ in 0..5 {
        assert!(!ask(&mut pair, &lens));
    }

    assert!(pair.lender.is_empty());
}

#[test]
fn a_block_of_a_segment_that_is_not_mapped_is_not_lent() {
    let mut lender = Lender::new(TERMS);
    let now = Pair::new(Fault::None).now;
    assert_eq!((lender.lend(1 << 20, now), lender.lend(1 << 20, now)), (None, None));
    let Some(Plan { segment, .. }) = lender.poll_plan() else { panic!("a segment is made") };
    lender.handle_made(segment, true);

    assert_eq!(lender.lend(1 << 20, now), None);
    lender.handle_answer(segment, true, now).unwrap();
    assert!(lender.lend(1 << 20, now).is_some());
}

#[test]
fn a_peer_that_maps_nothing_is_not_asked_again() {
    let mut lender = Lender::new(TERMS);
    let now = Pair::new(Fault::None).now;
    let _ = (lender.lend(1 << 20, now), lender.lend(1 << 20, now));
    let Some(Plan { segment, .. }) = lender.poll_plan() else { panic!("a segment is made") };
    lender.handle_made(segment, true);

    lender.handle_answer(segment, false, now).unwrap();

    assert_eq!(lender.poll_effect(), Some(Effect::Forget { segment }));
    let _ = (lender.lend(1 << 20, now), lender.lend(1 << 20, now));
    assert_eq!((lender.poll_plan(), lender.total()), (None, 0));
}

#[test]
fn a_peer_that_has_no_more_room_is_lent_no_more_than_it_has() {
    let mut pair = warm();
    for _ in 0..2 {
        pair.lender.handle_miss(2 << 20, pair.now);
    }
    let Plan { segment, .. } = pair.lender.poll_plan().unwrap();
    pair.lender.handle_made(segment, true);

    pair.lender.handle_answer(segment, false, pair.now).unwrap();

    for _ in 0..3 {
        pair.lender.handle_miss(2 << 20, pair.now);
    }
    assert_eq!((pair.lender.poll_plan(), pair.lender.total()), (None, 4 << 20));
    assert!(pair.lender.has(1 << 20));
}

#[test]
fn what_is_held_for_ever_leaves_the_account_at_its_limit() {
    let mut pair = warm();

    for _ in 0..100 {
        pair.step(&Step::Send(1 << 20)).unwrap();
        for _ in 0..3 {
            pair.step(&Step::Hear).unwrap();
            pair.step(&Step::HearBack).unwrap();
        }
    }

    assert_eq!(pair.held.len(), 16);
    assert_eq!(pair.lender.total(), TERMS.max_bytes);
    assert!(!pair.lender.has(1 << 20));
}

#[test]
fn idle_segments_make_room_for_another_size() {
    let mut pair = warm_with(Terms { max_bytes: 4 << 20, ..TERMS });
    let large = Step::Send(3 << 20);

    pair.step(&large).unwrap();
    pair.step(&large).unwrap();
    assert!(pair.said.is_empty(), "it was used just now");
    pair.now += Duration::from_secs(2);
    pair.step(&large).unwrap();

    assert!(matches!(pair.said[0], Said::Blocks(BlockMessage::Withdraw { .. })));
    pair.settle().unwrap();
    assert!(pair.lender.has(3 << 20) && !pair.lender.has(1 << 20));
}

#[test]
fn a_worn_segment_goes_when_its_last_block_is_back() {
    let mut pair = warm();
    let (first, second) = (pair.lender.lend(1 << 20, pair.now), pair.lender.lend(1 << 20, pair.now));
    let (first, second) = (first.unwrap(), second.unwrap());

    pair.lender.handle_return(first.segment, first.index, false, pair.now).unwrap();
    assert_eq!((pair.lender.lend(1 << 20, pair.now), pair.lender.poll_effect()), (None, None));
    pair.lender.handle_return(second.segment, second.index, true, pair.now).unwrap();

    let withdraw = Effect::Withdraw { segment: first.segment };
    assert_eq!(
        std::iter::from_fn(|| pair.lender.poll_effect()).find(|effect| *effect == withdraw),
        Some(withdraw)
    );
}

#[test]
fn what_a_correct_peer_does_not_say_is_an_error() {
    let mut pair = warm();
    let block = pair.lender.lend(1 << 20, pair.now).unwrap();
    let (segment, now) = (block.segment, pair.now);
    let lender = &mut pair.lender;
    assert_eq!(lender.handle_return(segment + 1, 0, true, now), Err(BlockError::UnknownSegment(segment + 1)));
    assert!(matches!(
        lender.handle_return(segment, block.index + 1, true, now),
        Err(BlockError::Twice { .. })
    ));
    assert!(matches!(lender.handle_return(segment, u32::MAX, true, now), Err(BlockError::Twice { .. })));
    assert_eq!(lender.handle_answer(segment, true, now), Err(BlockError::UnknownSegment(segment)));

    let borrower = &mut pair.borrower;
    let len = 1 << 20;
    assert!(borrower.borrow(segment, 0, len).is_ok());
    for (segment, offset, len) in [
        (segment, 1, 1),
        (segment, 4 << 20, 1),
        (segment, u64::MAX / len * len, 1),
        (segment, len, len + 1),
        (segment, len, 0),
    ] {
        assert!(
            matches!(borrower.borrow(segment, offset, len), Err(BlockError::NoBlock { .. })),
            "{offset} {len}"
        );
    }
    assert_eq!(borrower.borrow(segment, 0, 1), Err(BlockError::Twice { segment, block: 0 }));
    assert_eq!(borrower.borrow(9, 0, 1), Err(BlockError::UnknownSegment(9)));
    assert_eq!(borrower.handle_withdraw(segment), Err(BlockError::WithdrawnInUse(segment)));
    assert_eq!(borrower.handle_withdraw(9), Err(BlockError::UnknownSegment(9)));
    assert_eq!(borrower.handle_offer(segment, 64, 1), Err(BlockError::OfferedTwice(segment)));
    for (block_len, blocks) in [(0, 1), (64, 0), (65, 1), (64, MAX_BLOCKS + 1), (u64::MAX - 63, 2)] {
        assert!(matches!(borrower.handle_offer(9, block_len, blocks), Err(BlockError::Shape { .. })));
    }
    assert_eq!(borrower.handle_offer(9, 1 << 40, 1), Ok(None));
}

#[test]
fn a_block_fits_and_wastes_at_most_a_quarter() {
    for len in (MIN_BLOCK..4 << 20).step_by(40_009) {
        let block = block_len(len).unwrap();
        assert!(block >= len && block - len <= len / 4 && block.is_multiple_of(4096), "{len} -> {block}");
        assert_eq!(block_len(block), Some(block));
    }
    assert_eq!(block_len(1), Some(MIN_BLOCK));
    assert_eq!(block_len(u64::MAX), None);
}
