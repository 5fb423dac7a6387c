//! What every store does: the cases that `store_suite.rs` runs over each of ours, and the example `store_worker`
//! over PyTorch's server.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use tensorcall::store::{Store, StoreError};

/// No wait of a test is longer.
const SOON: Duration = Duration::from_secs(20);

/// Stores that several workers have opened at one place.
pub(crate) trait Place {
    fn open(&self) -> Arc<dyn Store>;
}

/// Calls `$run` with the names of all cases.
macro_rules! for_each_case {
    ($run:ident) => {
        $run! {
            values_are_seen_by_all,
            a_value_is_swapped_for_the_expected_one_only,
            one_of_many_wins_a_swap,
            sums_add_up_and_are_text,
            bytes_are_added_to_the_end,
            keys_are_there_until_they_are_removed,
            who_waits_goes_on_when_all_keys_are_there,
            who_waits_in_vain_is_told_so_and_goes_on,
            threads_may_share_one_store,
        }
    };
}
pub(crate) use for_each_case;

pub(crate) fn values_are_seen_by_all(place: &dyn Place) {
    let (one, other) = (place.open(), place.open());

    assert_eq!(other.get("k"), Ok(None));
    one.set("k", b"v").unwrap();
    assert_eq!(other.get("k"), Ok(Some(b"v".to_vec())));
    other.set("k", b"").unwrap();
    assert_eq!(one.get("k"), Ok(Some(Vec::new())));
    let bytes: Vec<u8> = (0..=255).cycle().take(3 << 20).collect();
    one.set("with spaces, ü and /", &bytes).unwrap();
    assert_eq!(other.get("with spaces, ü and /"), Ok(Some(bytes)));
}

pub(crate) fn a_value_is_swapped_for_the_expected_one_only(place: &dyn Place) {
    let store = place.open();
    let swap = |expected: &str, desired: &str| {
        String::from_utf8(store.compare_set("k", expected.as_bytes(), desired.as_bytes()).unwrap()).unwrap()
    };

    assert_eq!(swap("x", "y"), "x");
    assert_eq!(store.check(&["k"]), Ok(false));
    assert_eq!(swap("", "y"), "y");
    assert_eq!(swap("", "z"), "y");
    assert_eq!(swap("y", "z"), "z");
    assert_eq!(store.get("k"), Ok(Some(b"z".to_vec())));
}

pub(crate) fn one_of_many_wins_a_swap(place: &dyn Place) {
    let swap = |number: u32| {
        let store = place.open();
        thread(move || {
            store.compare_set("k", b"", number.to_string().as_bytes()).unwrap()
                == number.to_string().as_bytes()
        })
    };

    let threads: Vec<_> = (1..=8).map(swap).collect();

    assert_eq!(threads.iter().map(finish).filter(|won| *won).count(), 1);
}

pub(crate) fn sums_add_up_and_are_text(place: &dyn Place) {
    let add = || {
        let store = place.open();
        thread(move || (0..25).for_each(|_| assert!(store.add("n", 2).is_ok())))
    };
    let threads: Vec<_> = (0..4).map(|_| add()).collect();
    threads.iter().for_each(finish);

    let store = place.open();
    assert_eq!(store.get("n"), Ok(Some(b"200".to_vec())));
    assert_eq!(store.add("n", -300), Ok(-100));
    store.set("word", b"word").unwrap();
    // A server can only hang up; the others say why.
    let error = store.add("word", 1).unwrap_err();
    assert!(matches!(error, StoreError::NotANumber { .. } | StoreError::Lost { .. }), "{error}");
    assert_eq!(place.open().get("word"), Ok(Some(b"word".to_vec())));
}

pub(crate) fn bytes_are_added_to_the_end(place: &dyn Place) {
    let store = place.open();

    store.append("k", b"one").unwrap();
    store.append("k", b"two").unwrap();

    assert_eq!(store.get("k"), Ok(Some(b"onetwo".to_vec())));
}

pub(crate) fn keys_are_there_until_they_are_removed(place: &dyn Place) {
    let (one, other) = (place.open(), place.open());
    one.set("a", b"1").unwrap();
    one.set("b", b"2").unwrap();

    assert_eq!(other.check(&["a", "b"]), Ok(true));
    assert_eq!(other.check(&[]), Ok(true));
    assert_eq!(other.multi_get(&["b", "none", "a"]), Ok(vec![b"2".to_vec(), vec![], b"1".to_vec()]));
    assert_eq!(one.delete("a"), Ok(true));
    assert_eq!(one.delete("a"), Ok(false));
    assert_eq!(other.check(&["a", "b"]), Ok(false));
    one.set("a", b"again").unwrap();
    assert_eq!(other.get("a"), Ok(Some(b"again".to_vec())));
}

pub(crate) fn who_waits_goes_on_when_all_keys_are_there(place: &dyn Place) {
    let (waiting, store) = (place.open(), place.open());
    let waits = thread(move || waiting.wait(&["a", "b"], Some(now() + SOON)));
    store.set("a", b"").unwrap();
    assert!(waits.try_recv().is_err());

    store.add("b", 1).unwrap();

    assert_eq!(finish(&waits), Ok(()));
    assert_eq!(store.wait(&["b", "a"], None), Ok(()));
    assert_eq!(store.wait(&[], Some(now())), Ok(()));
}

pub(crate) fn who_waits_in_vain_is_told_so_and_goes_on(place: &dyn Place) {
    let store = place.open();
    store.set("a", b"here").unwrap();
    let begin = now();

    let error = store.wait(&["a", "b"], Some(begin + Duration::from_millis(50))).unwrap_err();

    assert!(matches!(error, StoreError::Timeout { .. }));
    assert!(error.to_string().contains('b'), "{error}");
    assert!(begin.elapsed() >= Duration::from_millis(50) && begin.elapsed() < SOON);
    assert_eq!(store.get("a"), Ok(Some(b"here".to_vec())));
    store.set("b", b"").unwrap();
    assert_eq!(store.wait(&["a", "b"], Some(now())), Ok(()));
}

pub(crate) fn threads_may_share_one_store(place: &dyn Place) {
    let store = place.open();
    let waits = thread({
        let store = Arc::clone(&store);
        move || store.wait(&["last"], Some(now() + SOON))
    });
    let adds: Vec<_> = (0..4)
        .map(|_| {
            let store = Arc::clone(&store);
            thread(move || (0..20).for_each(|_| assert!(store.add("n", 1).is_ok())))
        })
        .collect();
    adds.iter().for_each(finish);

    store.set("last", b"").unwrap();

    assert_eq!(finish(&waits), Ok(()));
    assert_eq!(store.get("n"), Ok(Some(b"80".to_vec())));
}

#[allow(clippy::disallowed_methods, reason = "tests have their own clock")]
fn now() -> Instant {
    Instant::now()
}

fn thread<R: Send + 'static>(run: impl FnOnce() -> R + Send + 'static) -> Receiver<R> {
    let (send, receive) = channel();
    std::thread::spawn(move || send.send(run()));
    receive
}

fn finish<R>(thread: &Receiver<R>) -> R {
    thread.recv_timeout(SOON).unwrap()
}
