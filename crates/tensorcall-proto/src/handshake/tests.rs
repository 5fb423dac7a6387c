//! Both ends of the handshake against each other, and against everybody else.

use proptest::prelude::*;

use super::envelope::{Envelope, Proof};
use super::*;
use crate::ids::WorkerName;
use crate::wire::VERSION;

const SECRET: &[u8] = b"a secret of the job";

fn identity(rank: u32, incarnation: u64) -> Identity {
    Identity {
        name: WorkerName::parse(&format!("worker{rank}")).unwrap(),
        rank: Rank::new(rank).unwrap(),
        incarnation: Incarnation::new(incarnation),
    }
}

fn expect(rank: u32, incarnation: Option<u64>) -> Expect {
    Expect { rank: Rank::new(rank).unwrap(), incarnation: incarnation.map(Incarnation::new) }
}

/// Worker 0, which calls worker 1.
fn initiator() -> Initiator {
    Initiator::new(SECRET, "job", identity(0, 10), expect(1, Some(11)), Role::Calls, [1; 32])
}

fn responder() -> Responder {
    Responder::new(SECRET, "job", identity(1, 11), [2; 32])
}

/// What each end says when both are left to talk.
struct Talk {
    hello: Vec<u8>,
    challenge: Vec<u8>,
    auth: Vec<u8>,
    welcome: Vec<u8>,
}

fn talk() -> Talk {
    let (mut initiator, mut responder) = (initiator(), responder());
    let hello = initiator.poll_send().unwrap();
    responder.feed(&hello).unwrap();
    let challenge = responder.poll_send().unwrap();
    initiator.feed(&challenge).unwrap();
    let auth = initiator.poll_send().unwrap();
    responder.feed(&auth).unwrap();
    let welcome = responder.poll_send().unwrap();
    Talk { hello, challenge, auth, welcome }
}

/// Lets both ends talk until neither has anything to say, or one gives up.
fn meet(
    initiator: &mut Initiator,
    responder: &mut Responder,
) -> (Result<(), HandshakeError>, Result<(), HandshakeError>) {
    let mut result = (Ok(()), Ok(()));
    loop {
        let (forth, back) = (initiator.poll_send(), responder.poll_send());
        if forth.is_none() && back.is_none() {
            return result;
        }
        if let Some(bytes) = forth {
            result.1 = responder.feed(&bytes);
        }
        if let Some(bytes) = back {
            result.0 = initiator.feed(&bytes);
        }
    }
}

#[test]
fn whoever_names_the_job_is_told_from_a_stranger() {
    let mut responder = responder();
    assert!(!responder.knows_job());
    responder.feed(&talk().hello).unwrap();
    assert!(responder.knows_job());

    let mut other = Responder::new(SECRET, "other job", identity(1, 11), [2; 32]);
    other.feed(&talk().hello).unwrap();
    assert!(!other.knows_job());
}

#[test]
fn both_ends_learn_who_the_other_is() {
    let (mut initiator, mut responder) = (initiator(), responder());

    assert_eq!(meet(&mut initiator, &mut responder), (Ok(()), Ok(())));

    let at_initiator = initiator.done().unwrap();
    let at_responder = responder.done().unwrap();
    assert_eq!((at_initiator.peer, at_initiator.role), (identity(1, 11), Role::Calls));
    assert_eq!((at_responder.peer, at_responder.role), (identity(0, 10), Role::Calls));
    assert_eq!(initiator.done(), None, "the result is given once");
}

#[test]
fn whichever_life_is_there_may_be_called() {
    let mut initiator = Initiator::new(SECRET, "job", identity(0, 10), expect(1, None), Role::Calls, [1; 32]);

    assert_eq!(meet(&mut initiator, &mut responder()), (Ok(()), Ok(())));

    assert_eq!(initiator.done().unwrap().peer.incarnation, Incarnation::new(11));
}

#[test]
fn any_split_of_the_bytes_works() {
    let Talk { hello, challenge, auth, welcome } = talk();
    for cut in 0..=hello.len() + auth.len() {
        let mut responder = responder();
        let all = [hello.clone(), auth.clone()].concat();
        // The second part begins in the middle of either message.
        responder.feed(&all[..cut]).unwrap();
        responder.feed(&all[cut..]).unwrap();
        assert!(responder.done().is_some(), "cut at {cut}");
    }
    let mut initiator = initiator();
    for byte in [challenge, welcome].concat() {
        initiator.feed(&[byte]).unwrap();
    }
    assert!(initiator.done().is_some());
}

#[test]
fn bytes_after_the_handshake_are_handed_on() {
    let Talk { hello, challenge, auth, welcome } = talk();
    let (mut initiator, mut responder) = (initiator(), responder());

    responder.feed(&hello).unwrap();
    responder.feed(&[auth, b"first frame".to_vec()].concat()).unwrap();
    responder.feed(b", more").unwrap();
    initiator.feed(&challenge).unwrap();
    initiator.feed(&[welcome, b"reply".to_vec()].concat()).unwrap();

    assert_eq!(responder.done().unwrap().leftover, b"first frame, more");
    assert_eq!(initiator.done().unwrap().leftover, b"reply");
}

#[test]
fn a_stranger_is_told_a_nonce_and_nothing_else() {
    let mut initiator =
        Initiator::new(b"a guess", "job", identity(0, 10), expect(1, None), Role::Calls, [1; 32]);
    let mut responder = responder();

    responder.feed(&initiator.poll_send().unwrap()).unwrap();
    let challenge = responder.poll_send().unwrap();
    initiator.feed(&challenge).unwrap();
    let result = responder.feed(&initiator.poll_send().unwrap());

    assert_eq!(challenge[8..], [2; 32]);
    assert_eq!(result, Err(HandshakeError::WrongSecret));
    assert_eq!(responder.poll_send(), None);
    assert_eq!(responder.done(), None);
    assert_eq!(initiator.closed(), HandshakeError::ProofRefused);
}

#[test]
fn a_responder_without_the_secret_is_not_believed() {
    let mut initiator = initiator();
    let mut impostor = Responder::new(SECRET, "job", identity(1, 11), [2; 32]);
    let mut envelope = Envelope::new(b"a guess");
    envelope
        .send_proved(Kind::Welcome, &Welcome { answers: [1; 32], me: identity(1, 11) }, Proof::Responder)
        .unwrap();

    impostor.feed(&initiator.poll_send().unwrap()).unwrap();
    initiator.feed(&impostor.poll_send().unwrap()).unwrap();
    let result = initiator.feed(&envelope.poll_send().unwrap());

    assert_eq!(result, Err(HandshakeError::WrongSecret));
    assert_eq!(initiator.done(), None);
}

#[test]
fn a_job_with_the_same_secret_is_told_that_it_is_another() {
    let mut initiator =
        Initiator::new(SECRET, "another", identity(0, 10), expect(1, None), Role::Calls, [1; 32]);

    let (at_initiator, at_responder) = meet(&mut initiator, &mut responder());

    let error = HandshakeError::WrongJob { ours: "job".to_owned(), theirs: "another".to_owned() };
    let text = error.to_string();
    assert_eq!(at_responder, Err(error));
    assert_eq!(at_initiator, Err(HandshakeError::Rejected { code: RejectCode::Job, text }));
}

#[test]
fn a_job_with_another_secret_is_named_in_the_log_and_told_nothing() {
    let mut initiator =
        Initiator::new(b"theirs", "another", identity(0, 10), expect(1, None), Role::Calls, [1; 32]);
    let mut responder = responder();

    let (at_initiator, at_responder) = meet(&mut initiator, &mut responder);

    assert!(matches!(at_responder, Err(HandshakeError::WrongJob { .. })));
    assert_eq!(at_initiator, Ok(()));
    assert_eq!(responder.poll_send(), None);
}

#[test]
fn another_rank_than_the_called_one_refuses() {
    let mut initiator = Initiator::new(SECRET, "job", identity(0, 10), expect(2, None), Role::Calls, [1; 32]);

    let (at_initiator, at_responder) = meet(&mut initiator, &mut responder());

    let (expected, found) = (Rank::new(2).unwrap(), Rank::new(1).unwrap());
    assert_eq!(at_responder, Err(HandshakeError::WrongRank { expected, found }));
    assert!(matches!(at_initiator, Err(HandshakeError::Rejected { code: RejectCode::Rank, .. })));
}

#[test]
fn another_life_than_the_called_one_refuses() {
    let mut initiator =
        Initiator::new(SECRET, "job", identity(0, 10), expect(1, Some(12)), Role::Calls, [1; 32]);

    let (at_initiator, at_responder) = meet(&mut initiator, &mut responder());

    let (rank, expected, found) = (Rank::new(1).unwrap(), Incarnation::new(12), Incarnation::new(11));
    assert_eq!(at_responder, Err(HandshakeError::WrongIncarnation { rank, expected, found }));
    assert!(matches!(at_initiator, Err(HandshakeError::Rejected { code: RejectCode::Incarnation, .. })));
}

#[test]
fn a_member_that_answers_for_another_is_found_out() {
    // A responder that knows the secret but does not check whom the initiator called.
    let mut initiator = initiator();
    let mut envelope = Envelope::new(SECRET);
    let hello = initiator.poll_send().unwrap();
    let hello = envelope.read(&mut hello.as_slice(), &[Kind::Hello]).unwrap().unwrap();
    let Hello { nonce, .. } = envelope.open(&hello).unwrap();
    envelope.send(Kind::Challenge, &Challenge { nonce: [2; 32] }).unwrap();
    initiator.feed(&envelope.poll_send().unwrap()).unwrap();
    let auth = initiator.poll_send().unwrap();
    let auth = envelope.read(&mut auth.as_slice(), &[Kind::Auth]).unwrap().unwrap();
    envelope.open_proved(&auth, Proof::Initiator).unwrap();
    let welcome = Welcome { answers: nonce, me: identity(5, 11) };
    envelope.send_proved(Kind::Welcome, &welcome, Proof::Responder).unwrap();

    let result = initiator.feed(&envelope.poll_send().unwrap());

    let (expected, found) = (Rank::new(1).unwrap(), Rank::new(5).unwrap());
    assert_eq!(result, Err(HandshakeError::WrongRank { expected, found }));
}

#[test]
fn a_role_that_is_unknown_is_refused() {
    let mut responder = responder();
    let mut envelope = Envelope::new(SECRET);
    envelope.send(Kind::Hello, &Hello { nonce: [1; 32], job: "job".to_owned() }).unwrap();
    responder.feed(&envelope.poll_send().unwrap()).unwrap();
    let challenge = responder.poll_send().unwrap();
    let challenge = envelope.read(&mut challenge.as_slice(), &[Kind::Challenge]).unwrap().unwrap();
    let Challenge { nonce } = envelope.open(&challenge).unwrap();
    let rank = Rank::new(1).unwrap();
    let auth = Auth { answers: nonce, me: identity(0, 10), rank, incarnation: None, role: 9 };
    envelope.send_proved(Kind::Auth, &auth, Proof::Initiator).unwrap();

    let result = responder.feed(&envelope.poll_send().unwrap());

    assert_eq!(result, Err(HandshakeError::UnknownRole(9)));
    assert!(responder.poll_send().is_some());
}

#[test]
fn recorded_messages_of_an_initiator_are_a_replay() {
    let Talk { hello, auth, .. } = talk();
    let mut responder = Responder::new(SECRET, "job", identity(1, 11), [3; 32]);

    responder.feed(&hello).unwrap();

    assert_eq!(responder.feed(&auth), Err(HandshakeError::Replayed));
}

#[test]
fn recorded_messages_of_a_responder_are_a_replay() {
    let Talk { challenge, welcome, .. } = talk();
    let mut initiator = Initiator::new(SECRET, "job", identity(0, 10), expect(1, None), Role::Calls, [4; 32]);

    initiator.feed(&challenge).unwrap();

    assert_eq!(initiator.feed(&welcome), Err(HandshakeError::Replayed));
}

#[test]
fn a_worker_that_is_sent_its_own_words_notices() {
    let mut initiator = initiator();
    let hello = initiator.poll_send().unwrap();

    let expected = Err(HandshakeError::OutOfTurn { expected: Kind::Challenge, found: Kind::Hello });
    assert_eq!(initiator.feed(&hello), expected);
}

#[test]
fn a_worker_that_is_sent_its_own_nonce_notices() {
    let mut echo = Responder::new(SECRET, "job", identity(1, 11), [9; 32]);
    let mut initiator = Initiator::new(SECRET, "job", identity(0, 10), expect(1, None), Role::Calls, [2; 32]);
    let mut stranger = responder();

    // The responder's nonce is that of the initiator, and the other way round.
    let hello = initiator.poll_send().unwrap();
    assert_eq!(stranger.feed(&hello), Err(HandshakeError::Reflected));
    echo.nonce = [2; 32];
    let other =
        Initiator::new(SECRET, "job", identity(3, 3), expect(1, None), Role::Calls, [7; 32]).poll_send();
    echo.feed(&other.unwrap()).unwrap();
    assert_eq!(initiator.feed(&echo.poll_send().unwrap()), Err(HandshakeError::Reflected));
}

#[test]
fn a_worker_whose_words_are_carried_to_its_own_ear_notices() {
    // Somebody in the middle connects worker 0 with itself; both proofs hold.
    let mut initiator = initiator();
    let mut responder = Responder::new(SECRET, "job", identity(0, 10), [2; 32]);

    let (at_initiator, at_responder) = meet(&mut initiator, &mut responder);

    assert_eq!(at_responder, Err(HandshakeError::Reflected));
    assert!(matches!(at_initiator, Err(HandshakeError::Rejected { code: RejectCode::Reflected, .. })));
}

#[test]
fn another_version_is_told_so_by_either_end() {
    let mut hello = talk().hello;
    hello[4] = VERSION + 1;
    let mut responder = responder();

    let result = responder.feed(&hello);

    let mut refusal = responder.poll_send().unwrap();
    assert_eq!(result, Err(HandshakeError::Version { theirs: VERSION + 1 }));
    refusal[4] = VERSION + 2;
    assert_eq!(initiator().feed(&refusal), Err(HandshakeError::Version { theirs: VERSION + 2 }));
}

#[test]
fn a_refusal_without_the_secret_is_not_believed() {
    let Talk { challenge, .. } = talk();
    let mut initiator = initiator();
    let mut envelope = Envelope::new(b"a guess");
    let reject = Reject { code: 2, text: "go away".to_owned() };
    envelope.send_proved(Kind::Reject, &reject, Proof::Refusal).unwrap();

    initiator.feed(&challenge).unwrap();

    assert_eq!(initiator.feed(&envelope.poll_send().unwrap()), Err(HandshakeError::ForgedRefusal));
}

#[test]
fn somebody_elses_protocol_is_quoted() {
    let error = responder().feed(b"GET / HTTP/1.1\r\nHost: example\r\n\r\n").unwrap_err();

    assert_eq!(error, HandshakeError::NotAHandshake { found: b"GET / HTTP/1.1\r\n".to_vec() });
    assert_eq!(error.to_string(), "not a tensorcall worker: it said \"GET / HTTP/1.1\\r\\n\"");
}

#[test]
fn garbage_is_noticed_at_its_first_byte() {
    assert_eq!(responder().feed(b"X"), Err(HandshakeError::NotAHandshake { found: b"X".to_vec() }));
    assert_eq!(responder().feed(b"TCX"), Err(HandshakeError::NotAHandshake { found: b"TCX".to_vec() }));
}

#[test]
fn an_oversized_message_is_refused_by_its_header() {
    let header = [b"TCHS", &[VERSION, Kind::Hello as u8, 0xff, 0xff][..]].concat();

    let error = HandshakeError::TooLarge { len: 65_543, limit: MAX_MESSAGE };
    assert_eq!(responder().feed(&header), Err(error));
}

#[test]
fn an_unknown_kind_is_refused_by_its_header() {
    let header = [b"TCHS", &[VERSION, 77][..]].concat();

    assert_eq!(responder().feed(&header), Err(HandshakeError::UnknownKind(77)));
}

#[test]
fn a_body_that_is_not_what_its_kind_says_is_malformed() {
    let mut message = talk().hello;
    message.push(0);
    message[6] += 1;

    assert_eq!(responder().feed(&message), Err(HandshakeError::Malformed(Kind::Hello)));
}

#[test]
fn a_stream_that_ends_early_is_truncated() {
    let Talk { hello, auth, .. } = talk();
    let mut responder = responder();

    responder.feed(&hello).unwrap();
    responder.feed(&auth[..20]).unwrap();

    assert_eq!(responder.closed(), HandshakeError::Truncated { expected: Kind::Auth, received: 20 });
    assert_eq!(initiator().closed(), HandshakeError::Truncated { expected: Kind::Challenge, received: 0 });
}

#[test]
fn a_failed_handshake_stays_failed() {
    let Talk { hello, auth, .. } = talk();
    let mut responder = responder();
    let error = responder.feed(b"GET").unwrap_err();

    assert_eq!(responder.feed(&hello), Err(error.clone()));
    assert_eq!(responder.feed(&auth), Err(error));
    assert_eq!(responder.done(), None);
}

#[test]
fn a_job_id_that_is_too_long_fails_at_once() {
    let job = "x".repeat(257);
    let mut initiator = Initiator::new(SECRET, &job, identity(0, 10), expect(1, None), Role::Calls, [1; 32]);

    assert_eq!(initiator.feed(&talk().challenge), Err(HandshakeError::JobTooLong { len: 257 }));
    let hello = initiator.poll_send().unwrap();
    assert_eq!(responder().feed(&hello), Err(HandshakeError::JobTooLong { len: 257 }));
}

#[test]
fn every_bit_of_every_message_counts() {
    let Talk { hello, challenge, auth, welcome } = talk();
    let outcome = |hello: &[u8], challenge: &[u8], auth: &[u8], welcome: &[u8]| {
        let (mut initiator, mut responder) = (initiator(), responder());
        // The responder has to hear what the initiator says after the challenge that it really got.
        let told = responder.feed(hello).and_then(|()| responder.feed(auth));
        let heard = initiator.feed(challenge).and_then(|()| initiator.feed(welcome));
        (initiator.done().is_some() && heard.is_ok(), responder.done().is_some() && told.is_ok())
    };
    assert_eq!(outcome(&hello, &challenge, &auth, &welcome), (true, true));
    for bit in 0..8 * hello.len().max(challenge.len()).max(auth.len()).max(welcome.len()) {
        let flipped = |message: &[u8]| {
            let mut message = message.to_vec();
            if let Some(byte) = message.get_mut(bit / 8) {
                *byte ^= 1 << (bit % 8);
            }
            message
        };
        if bit < 8 * hello.len() {
            assert!(!outcome(&flipped(&hello), &challenge, &auth, &welcome).1, "bit {bit} of hello");
        }
        if bit < 8 * challenge.len() {
            assert!(!outcome(&hello, &flipped(&challenge), &auth, &welcome).0, "bit {bit} of challenge");
        }
        if bit < 8 * auth.len() {
            assert!(!outcome(&hello, &challenge, &flipped(&auth), &welcome).1, "bit {bit} of auth");
        }
        if bit < 8 * welcome.len() {
            assert!(!outcome(&hello, &challenge, &auth, &flipped(&welcome)).0, "bit {bit} of welcome");
        }
    }
}

#[test]
fn secrets_stay_out_of_logs() {
    let text = format!("{:?} {:?}", initiator(), responder());

    assert!(text.contains("awaited"), "{text}");
    assert!(!text.contains("nonce") && !text.contains("key"), "{text}");
}

proptest! {
    #[test]
    fn no_bytes_panic_or_fill_the_memory(chunks in prop::collection::vec(any::<Vec<u8>>(), 1..20), is_near in any::<bool>()) {
        let (mut initiator, mut responder) = (initiator(), responder());
        let Talk { hello, challenge, .. } = talk();
        if is_near {
            initiator.feed(&challenge).unwrap();
            responder.feed(&hello).unwrap();
        }
        for chunk in &chunks {
            let _ = initiator.feed(chunk);
            let _ = responder.feed(chunk);
        }

        prop_assert!(initiator.common.envelope.received() <= MAX_MESSAGE);
        prop_assert!(responder.common.envelope.received() <= MAX_MESSAGE);
        prop_assert!(initiator.done().is_none() && responder.done().is_none());
    }

    #[test]
    fn no_body_of_any_kind_panics(kind in 0u8..8, body in prop::collection::vec(any::<u8>(), 0..200), is_near in any::<bool>()) {
        let (mut initiator, mut responder) = (initiator(), responder());
        let Talk { hello, challenge, .. } = talk();
        if is_near {
            initiator.feed(&challenge).unwrap();
            responder.feed(&hello).unwrap();
        }
        let len = u16::try_from(body.len()).unwrap().to_le_bytes();
        let message = [&b"TCHS"[..], &[VERSION, kind], &len, &body].concat();

        let _ = initiator.feed(&message);
        let _ = responder.feed(&message);

        prop_assert!(initiator.done().is_none() && responder.done().is_none());
    }
}
