"""Calls of a worker to itself: the whole path in Python, and the three kinds of target."""

from __future__ import annotations

import functools
import pickle
import threading
import time

import pytest
import torch

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*")


def add(a, b=0):
    return a + b


def boom(text):
    raise ValueError(text)


def snooze(seconds):
    time.sleep(seconds)
    return seconds


def grad_mode():
    return torch.is_grad_enabled()


def leave_grad_mode_off():
    torch.set_grad_enabled(False)


def count_args(*args, **kwargs):
    return len(args), sorted(kwargs)


class Adder:
    def __init__(self, n):
        self.n = n

    def add(self, x):
        return x + self.n

    @classmethod
    def twice(cls, x):
        return 2 * x

    @staticmethod
    def thrice(x):
        return 3 * x


@pytest.mark.parametrize(
    ("func", "args", "kwargs", "expected"),
    [
        (add, (1,), {"b": 2}, 3),
        (min, (3, 2), None, 2),
        (len, ([1, 2],), None, 2),
        (Adder(5).add, (1,), None, 6),
        (Adder.twice, (4,), None, 8),
        (Adder.thrice, (4,), None, 12),
        (functools.partial(add, b=4), (1,), None, 5),
        (count_args, [1, "x"], {"k": None}, (2, ["k"])),
        (count_args, None, None, (0, [])),
        (str, (5,), None, "5"),
        (leave_grad_mode_off, (), None, None),
    ],
)
def test_python_functions(alone, func, args, kwargs, expected):
    assert alone.rpc_sync("me", func, args=args, kwargs=kwargs) == expected
    assert alone.rpc_async(0, func, args=args, kwargs=kwargs).wait() == expected


@pytest.mark.parametrize(
    ("func", "args", "kwargs"),
    [
        (torch.add, (torch.ones(2), 1), {}),
        (torch.add, (torch.ones(2), torch.ones(2)), {"alpha": 3}),
        (torch.Tensor.add, (torch.ones(2), 1), {}),
        (torch.nonzero, (torch.eye(2),), {}),
        (torch.zeros, ((2, 3),), {"dtype": torch.int64}),
    ],
)
def test_operators(alone, func, args, kwargs):
    result = alone.rpc_sync("me", func, args=args, kwargs=kwargs)

    assert torch.equal(result, func(*args, **kwargs))


def test_an_operator_that_does_not_fit_its_arguments_fails_at_the_call(alone):
    with pytest.raises(
        RuntimeError, match="Overloaded torch operator invoked from Python failed to match any"
    ):
        alone.rpc_async("me", torch.add, args=("x", {}))


def test_an_error_of_an_operator_has_torchs_text_alone(alone):
    with pytest.raises(RuntimeError, match=r"^The size of tensor a"):
        alone.rpc_sync("me", torch.add, args=(torch.ones(2), torch.ones(3)))


@pytest.fixture
def script():
    @torch.jit.script
    def scripted(a: torch.Tensor, b: int = 3) -> torch.Tensor:
        if b < 0:
            raise ValueError("below zero")
        return a + b

    return scripted


def test_script_functions(alone, script):
    assert torch.equal(alone.rpc_sync("me", script, args=(torch.ones(1),)), torch.full((1,), 4.0))
    with pytest.raises(RuntimeError, match=r"scripted\(\) expected at most 2 argument\(s\)"):
        alone.rpc_async("me", script, args=(torch.ones(1), 2, 3))
    with pytest.raises(RuntimeError, match="missing value for argument 'a'"):
        alone.rpc_async("me", script)
    with pytest.raises(RuntimeError, match="below zero"):
        alone.rpc_sync("me", script, args=(torch.ones(1), -1))


def test_local_functions_fail_at_once_and_by_name(alone):
    """LOG row 99."""

    def local(x):
        return x

    with pytest.raises((AttributeError, pickle.PicklingError), match="local"):
        alone.rpc_async("me", local, args=(1,))
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        alone.rpc_async("me", lambda x: x, args=(1,))


def test_destinations(alone):
    info = alone.get_worker_info()

    assert alone.get_worker_info("me") == alone.get_worker_info(0) == info
    assert alone.rpc_sync(info, add, (1, 2)) == 3
    for unknown in ("you", 1, -1, alone.WorkerInfo("you", 0)):
        with pytest.raises(RuntimeError, match="name:me,rank:0 could not find destination"):
            alone.rpc_sync(unknown, add, (1, 2))
    with pytest.raises(ValueError, match=r"Cannot get WorkerInfo from name 0\.5"):
        alone.rpc_sync(0.5, add, (1, 2))
    with pytest.raises(TypeError, match=r"function should be callable\."):
        alone.rpc_sync("me", 5)


def test_arguments_that_do_not_pickle_fail_at_the_call_with_their_own_error(alone):
    with pytest.raises(RuntimeError, match=r"Can not pickle torch.futures.Future"):
        alone.rpc_async("me", add, args=(torch.futures.Future(),))
    with pytest.raises(TypeError, match="lock"):
        alone.rpc_async("me", add, args=(threading.Lock(),))


def test_a_future_as_result_is_an_error(alone):
    with pytest.raises(RuntimeError, match=r"Can not pickle torch.futures.Future"):
        alone.rpc_sync("me", torch.futures.Future)


def test_arguments_are_copies_also_for_calls_to_self(alone):
    mine = torch.ones(2)

    assert alone.rpc_sync("me", torch.Tensor.add_, args=(mine, 1)).tolist() == [2, 2]
    assert mine.tolist() == [1, 1]


def test_tensors_on_other_devices_are_refused(alone):
    with pytest.raises(
        RuntimeError, match=r"only supports CPU tensors by default.*destination me.*device: meta"
    ):
        alone.rpc_sync("me", add, args=(torch.ones(2, device="meta"),))


def test_exceptions_of_the_function_are_raised_here(alone):
    """LOG row 32."""
    with pytest.raises(ValueError, match=r"(?s)On WorkerInfo.*in boom"):
        alone.rpc_sync("me", boom, args=("x",))
    future = alone.rpc_async("me", boom, args=("x",))
    for _ in range(2):
        with pytest.raises(ValueError, match="x"):
            future.wait()


def test_a_call_that_takes_too_long_fails(alone):
    with pytest.raises(RuntimeError, match="RPC ran for more than set timeout"):
        alone.rpc_sync("me", snooze, args=(1,), timeout=0.05)
    assert alone.rpc_sync("me", snooze, args=(0.1,), timeout=0) == 0.1


def test_the_default_limit_can_be_set(alone):
    assert alone.get_rpc_timeout() == 20
    alone._set_rpc_timeout(0.05)

    with pytest.raises(RuntimeError, match="RPC ran for more than set timeout"):
        alone.rpc_sync("me", snooze, args=(1,))
    alone._set_rpc_timeout(20)
    with pytest.raises(RuntimeError, match="non-negative"):
        alone._set_rpc_timeout(-3)


def test_each_request_begins_with_grad_mode_on(alone):
    for _ in range(20):
        alone.rpc_sync("me", leave_grad_mode_off)
        assert alone.rpc_sync("me", grad_mode) is True


def test_wait_all_collects_the_futures_of_this_thread(alone):
    api = alone.api
    with api._wait_all():
        assert api._thread_local_var.future_list == []
        future = alone.rpc_async("me", snooze, args=(0.1,))
        alone.rpc_sync("me", add, (1, 2))
        assert len(api._thread_local_var.future_list) == 1
    assert future.done()
    assert not hasattr(api._thread_local_var, "future_list")

    with pytest.raises(ValueError, match="inner"), api._wait_all():
        alone.rpc_async("me", boom, args=("inner",))
    with pytest.raises(KeyError), api._wait_all():
        alone.rpc_async("me", boom, args=("inner",))
        raise KeyError("body")
    assert not hasattr(api._thread_local_var, "future_list")


class Recording:
    def __init__(self, inner):
        self.inner, self.seen = inner, []

    def serialize(self, obj):
        self.seen.append(obj)
        return self.inner.serialize(obj)


def test_a_replaced_pickler_sees_every_call(alone):
    pickler = Recording(alone.internal._internal_rpc_pickler)

    with alone.api._use_rpc_pickler(pickler):
        assert alone.rpc_sync("me", add, (1, 2)) == 3

    assert pickler.seen == [(add, (1, 2), {})]
    assert alone.api._default_pickler is alone.internal._internal_rpc_pickler


def test_callbacks_may_call(alone):
    def callback(future):
        inner = alone.rpc_async("me", add, (future.wait(), 1)).then(lambda f: f.wait() + 1)
        return inner.wait()

    future = alone.rpc_async("me", add, (1, 1)).then(callback)

    assert future.wait() == 4


def test_gather_and_barrier_of_one(alone):
    assert alone.api._all_gather(5) == {"me": 5}
    alone.api._barrier(["me"])
    alone.api._wait_all_workers()


def test_debug_info_is_the_union_of_its_parts(alone):
    info = alone._get_debug_info()
    agent = alone.api._get_current_rpc_agent()

    assert int(info["agent.thread_pool_size"]) == 16
    assert agent.get_debug_info().keys() <= info.keys()
    assert alone._rref_context_get_debug_info().keys() <= info.keys()
    assert all(isinstance(value, str) for value in info.values())
    assert isinstance(agent, alone.TensorPipeAgent)
    assert agent.is_static_group


def test_a_second_init_is_refused_and_init_after_shutdown_works(alone, tmp_path):
    options = alone.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/again")
    with pytest.raises(RuntimeError, match="already initialized"):
        alone.init_rpc("me", rank=0, world_size=1, rpc_backend_options=options)
    alone.shutdown()
    with pytest.raises(RuntimeError, match=r"^RPC has not been initialized"):
        alone.shutdown()

    alone.init_rpc("other", rank=0, world_size=1, rpc_backend_options=options)

    assert alone.rpc_sync("other", add, (1, 2)) == 3


def test_a_shutdown_that_fails_leaves_no_agent(alone, monkeypatch):
    def fail():
        raise RuntimeError("simulated")

    monkeypatch.setattr(alone.api, "_delete_all_user_and_unforked_owner_rrefs", fail)

    with pytest.raises(RuntimeError, match="simulated"):
        alone.shutdown()

    assert not alone._is_current_rpc_agent_set()
