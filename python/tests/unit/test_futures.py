"""Futures: one outcome, callbacks, combinations."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError

import pytest
import torch
from tensorcall.rpc import _call, _futures
from tensorcall.rpc._futures import Future, collect_all, wait_all


@pytest.fixture(autouse=True)
def patched():
    _futures.patch()
    yield
    _futures.unpatch()


def test_a_future_of_ours_is_one_of_torchs():
    assert isinstance(Future(), torch.futures.Future)
    assert isinstance(Future(), torch._C.Future)


def test_wait_gives_the_same_object_each_time():
    future = Future()
    value = [1]
    future.set_result(value)

    assert future.done()
    assert future.wait() is value
    assert future.value() is value
    assert torch._C.Future.wait(future) is value


def test_wait_raises_the_error_each_time_with_its_own_type():
    future = Future()
    future.set_exception(KeyError("x"))

    for _ in range(2):
        with pytest.raises(KeyError):
            future.wait()
    with pytest.raises(KeyError):
        future.value()
    with pytest.raises(KeyError):
        torch._C.Future.wait(future)


def test_wait_with_a_limit_leaves_the_future_pending():
    future = Future()

    with pytest.raises(TimeoutError):
        future.wait(0.01)

    assert not future.done()
    future.set_result(1)
    assert future.wait(0.01) == 1


def test_value_of_a_pending_future_is_an_error():
    with pytest.raises(RuntimeError, match="not done"):
        Future().value()


def test_a_future_is_completed_once():
    future = Future()
    future.set_result(1)

    with pytest.raises(RuntimeError, match="Future can only be marked completed once"):
        future.set_result(2)
    with pytest.raises(RuntimeError, match="Future can only be marked completed once"):
        future.set_exception(ValueError())
    assert future.wait() == 1


def test_many_threads_may_wait_and_one_completes():
    future = Future()
    seen = []
    threads = [threading.Thread(target=lambda: seen.append(future.wait(20))) for _ in range(8)]
    for thread in threads:
        thread.start()
    future.set_result("x")
    for thread in threads:
        thread.join(20)

    assert seen == ["x"] * 8


def test_then_gives_a_future_of_the_callbacks_result():
    future = Future()
    child = future.then(lambda f: f.wait() + 1).then(lambda f: f.value() * 10)

    future.set_result(1)

    assert isinstance(child, Future)
    assert child.wait(20) == 20


def test_then_on_a_done_future_runs_at_once_on_this_thread():
    future = Future()
    future.set_result(1)

    child = future.then(lambda f: threading.get_ident())

    assert child.done()
    assert child.wait() == threading.get_ident()


def test_an_exception_of_a_callback_becomes_a_runtime_error_with_its_text():
    future = Future()
    child = future.then(lambda f: f + 1)
    future.set_result(1)

    with pytest.raises(RuntimeError, match=r"TypeError: unsupported operand type\(s\) for \+"):
        child.wait()


def test_callbacks_run_also_when_the_parent_failed():
    future = Future()

    def recover(parent):
        with pytest.raises(ValueError, match="lost"):
            parent.wait()
        return "saved"

    child = future.then(recover)
    future.set_exception(ValueError("lost"))

    assert child.wait(20) == "saved"


def test_then_needs_a_callable():
    with pytest.raises(TypeError, match=r"incompatible function arguments\."):
        Future().then(None)
    with pytest.raises(TypeError, match=r"incompatible function arguments\."):
        Future().add_done_callback(3)


def test_callbacks_run_in_the_order_they_were_added(caplog):
    future = Future()
    order = []

    def fail(_):
        raise ValueError("only logged")

    future.add_done_callback(lambda f: order.append(1))
    future.add_done_callback(fail)
    future.then(lambda f: order.append(2))
    future.set_result(None)
    future.add_done_callback(lambda f: order.append(3))

    assert order == [1, 2, 3]
    assert "only logged" in caplog.text


def test_a_chain_of_a_thousand_callbacks_does_not_overflow_the_stack():
    first = last = Future()
    for _ in range(1000):
        last = last.then(lambda f: f.value() + 1)

    first.set_result(0)

    assert last.wait(30) == 1000


def test_cancel_fails_a_pending_future():
    future = Future()

    assert future.cancel()
    assert not future.cancel()
    with pytest.raises(CancelledError):
        future.wait()


@pytest.mark.parametrize("combine", [collect_all, torch.futures.collect_all])
def test_collect_all_takes_ours_and_torchs(combine):
    ours, theirs = Future(), torch.futures.Future()
    both = combine([ours, theirs])

    assert isinstance(both, Future)
    theirs.set_result(2)
    assert not both.done()
    ours.set_result(1)

    assert [f.wait() for f in both.wait(20)] == [1, 2]


@pytest.mark.parametrize("wait", [wait_all, torch.futures.wait_all])
def test_wait_all_ends_with_the_first_error_although_others_are_pending(wait):
    pending, failed = Future(), Future()
    failed.set_exception(KeyError("gone"))

    with pytest.raises(KeyError, match="gone"):
        wait([pending, torch.futures.Future(), failed])


def test_wait_all_of_a_failed_future_of_torchs():
    theirs = torch.futures.Future()
    theirs.set_exception(ValueError("theirs"))

    with pytest.raises(ValueError, match="theirs"):
        torch.futures.wait_all([Future(), theirs])


def test_collect_all_of_none_is_done():
    assert collect_all([]).wait(1) == []
    assert torch.futures.wait_all([]) == []


def test_futures_of_torch_alone_go_to_torch():
    futures = [torch.futures.Future() for _ in range(2)]
    both = torch.futures.collect_all(futures)

    assert not isinstance(both, Future)
    for future in futures:
        future.set_result(5)
    assert torch.futures.wait_all(futures) == [5, 5]


def test_torchs_own_callbacks_on_a_future_of_ours_run():
    future = Future()
    seen = []
    torch._C.Future.add_done_callback(future, lambda f: seen.append(f.value()))

    future.set_result(7)

    assert seen == [7]


def test_a_call_that_could_not_be_made_fails_through_its_future():
    future = Future(call=_call.Unsent(RuntimeError("worker 'w' is lost")))
    seen = []
    future.add_done_callback(seen.append)

    assert future.done()
    assert seen == [future]
    assert not future.cancel()
    with pytest.raises(RuntimeError, match="worker 'w' is lost"):
        future.wait()
