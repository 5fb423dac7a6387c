"""References to values, in a group of one worker: the whole path in Python."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import threading
import time
import warnings

import pytest
import tensorcall.rpc as rpc
import torch
from tensorcall.rpc import RRef, functions, internal, rref_proxy

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch calls TorchScript deprecated

    @torch.jit.interface
    class Doubles:
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            pass


class Double(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


go = threading.Event()


def when_told(value):
    assert go.wait(20)
    return value


def value_of(rref):
    return rref.to_here()


def itself(value):
    return value


def fail(text):
    raise KeyError(text)


def eventually(is_so):
    end = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.001)


class Counter:
    def __init__(self, n):
        self.n = n
        self.on_instance = None

    def add(self, by):
        self.n += by
        return self.n

    def reveal(self):
        self.on_instance = lambda: self.n

    @functions.async_execution
    def later(self, x):
        return rpc.rpc_async("me", itself, args=(x + self.n,))

    async def slowly(self, x):
        return x + self.n


def test_a_local_one_refers_to_the_very_object(alone):
    for value in ([1, 2], {"a": 1}, (1,), Counter(1), torch.ones(2)):
        rref = RRef(value)
        assert rref.local_value() is value
        assert rref.to_here() is value
    assert alone._rref_context_get_debug_info()["num_owner_rrefs"] == "0"


def test_texts_and_numbers_are_torchs(alone):
    one, other = RRef(1), alone.remote("me", itself, args=(2,))

    assert str(one) == repr(one) == "OwnerRRef(GloballyUniqueId(created_on=0, local_id=0))"
    assert str(other) == "OwnerRRef(GloballyUniqueId(created_on=0, local_id=1))"
    assert one.owner() == alone.get_worker_info()
    assert one.owner_name() == "me"
    assert (one.is_owner(), one.confirmed_by_owner()) == (True, True)
    assert one != other
    assert len({one, other, one}) == 2


def test_without_an_agent_there_are_none():
    """LOG row 77: torch's own tests expect so before `init_rpc`."""
    with pytest.raises(RuntimeError, match="Current RPC agent is not set"):
        RRef(1)
    with pytest.raises(RuntimeError, match="RPC has not been initialized"):
        rpc.remote("me", itself, args=(1,))
    assert rpc._rref_context_get_debug_info()["num_forks"] == "0"


def test_a_remote_result_stays_until_it_is_asked_for(alone):
    go.clear()
    rref = alone.remote("me", when_told, args=([1],))
    with pytest.raises(RuntimeError, match="RPC ran for more than set timeout"):
        rref.to_here(0.01)
    go.set()

    assert rref.to_here() == [1]
    assert rref.to_here() is rref.local_value()


def test_the_exception_of_the_function_is_raised_by_every_use(alone):
    """LOG row 32."""
    rref = alone.remote("me", fail, args=("lost",))

    for use in (rref.to_here, rref.local_value, rref._get_type, rref.rpc_sync().anything):
        with pytest.raises(KeyError, match="lost"):
            use()
    with pytest.raises(KeyError, match="lost"):
        rref._get_type(blocking=False).wait()


def test_a_creation_that_takes_too_long_marks_the_reference(alone):
    """LOG row 15."""
    go.clear()
    rref = alone.remote("me", when_told, args=(1,), timeout=0.01)

    with pytest.raises(RuntimeError, match="RPC ran for more than set timeout"):
        rref._get_future().wait()
    for use in (rref.to_here, rref.local_value, rref._serialize, lambda: internal.serialize(rref)):
        with pytest.raises(RuntimeError, match=r"RRef creation via rpc.remote\(\) timed out"):
            use()
    with pytest.raises(RuntimeError, match=r"RRef creation via rpc.remote\(\) timed out"):
        alone.rpc_async("me", value_of, args=(rref,))
    go.set()


def test_references_travel_in_whatever_can_be_sent(alone):
    one, other = RRef("one"), alone.remote("me", itself, args=("other",))

    got = alone.rpc_sync("me", itself, args=({"list": [one, other], "object": Counter(one)},))
    twice = alone.rpc_sync("me", itself, args=([one, one],))

    assert [rref.to_here() for rref in got["list"]] == ["one", "other"]
    assert got["object"].n.to_here() == "one"
    assert twice[0] is twice[1]
    assert alone.remote("me", value_of, args=(one,)).to_here() == "one"
    assert alone.rpc_sync("me", value_of, args=(alone.remote("me", RRef, args=(5,)),)).to_here() == 5


@dataclasses.dataclass
class Batch:
    name: str
    frames: RRef


def test_a_field_of_an_object_may_stay_where_it_is_until_somebody_wants_it(alone):
    """LOG row 80."""
    batch = alone.rpc_sync(
        "me", itself, args=(Batch("one", alone.remote("me", itself, args=(torch.ones(1000),))),)
    )

    assert batch.name == "one"
    assert batch.frames.to_here().sum() == 1000


class Reduced:
    def __init__(self, rref):
        self.rref = rref


def test_reducers_of_ones_own_may_hold_references(alone):
    def reduce(reduced):
        return restore, (reduced.rref._serialize(),)

    internal._internal_rpc_pickler._register_reducer(Reduced, reduce)
    try:
        assert alone.rpc_sync("me", itself, args=(Reduced(RRef(5)),)).rref.to_here() == 5
    finally:
        del internal._internal_rpc_pickler._class_reducer_dict[Reduced]
        internal._internal_rpc_pickler._table_version = -1


def restore(fork):
    assert len(fork) == 7
    return Reduced(rpc.PyRRef._deserialize(fork))


class KeyErrorWithReference(KeyError):
    pass


def fail_with(rref):
    error = KeyErrorWithReference("see")
    error.rref = rref
    raise error


def test_exceptions_may_carry_references(alone):
    with pytest.raises(KeyErrorWithReference) as raised:
        alone.rpc_sync("me", fail_with, args=(RRef(7),))

    assert raised.value.rref.to_here() == 7


@pytest.mark.parametrize("way", [pickle.dumps, copy.copy, copy.deepcopy, internal.serialize])
def test_outside_of_messages_they_cannot_be_copied(alone, way):
    with pytest.raises(RuntimeError, match="Can not pickle rref in python pickler"):
        way(RRef(1))


def test_methods_are_called_through_proxies(alone):
    rref = alone.remote("me", Counter, args=(1,))

    assert rref.rpc_sync().add(1) == 2
    assert rref.rpc_async(timeout=10).add(by=1).wait() == 3
    assert rref.remote().add(1).to_here() == 4
    assert rref.rpc_sync().later(5) == 9
    assert rref.rpc_async().later(5).wait() == 9
    assert rref.remote().later(5).to_here() == 9
    assert rref.rpc_sync().slowly(1) == 5
    assert isinstance(rref.rpc_sync(), rref_proxy.RRefProxy)


def test_a_method_that_is_not_there_is_an_attribute_error(alone):
    rref = RRef(Counter(1))

    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        rref.rpc_sync().nothing()
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        rref.rpc_async().nothing().wait()
    with pytest.raises(AttributeError, match=r"^type object 'Counter' has no attribute 'nothing'$"):
        rref.remote().nothing()


def test_functions_of_the_object_itself_can_be_called(alone):
    rref = RRef(Counter(8))
    rref.local_value().reveal()

    assert rref.rpc_sync().on_instance() == 8
    assert rref.remote().on_instance().to_here() == 8


def test_a_type_is_asked_for_without_waiting(alone):
    go.clear()
    rref = alone.remote("me", when_told, args=(1,))

    future = rref._get_type(blocking=False)
    assert not future.done()
    assert rref._get_type(blocking=False) is future
    go.set()

    assert future.wait() is int
    assert rref._get_type() is int


def test_a_type_that_could_not_be_had_is_asked_for_again(alone):
    go.clear()
    rref = alone.remote("me", when_told, args=(1,))
    with pytest.raises(RuntimeError, match="RPC ran for more than set timeout"):
        rref._get_type(timeout=0.01, blocking=False).wait()
    go.set()

    assert rref._get_type(blocking=False).wait() is int


def test_only_a_remote_call_has_a_future_of_its_creation(alone):
    rref = alone.remote("me", itself, args=(1,))

    assert rref._get_future() is rref._get_future()
    assert rref._get_future().wait() is None
    assert isinstance(rref._get_future(), torch._C.Future)
    with pytest.raises(RuntimeError, match=r"was not returned by rpc\.remote"):
        RRef(1)._get_future()
    with pytest.raises(RuntimeError, match="has no profiling future"):
        rref._get_profiling_future()
    rref._set_profiling_future(rref._get_future())
    assert rref._get_profiling_future() is rref._get_future()


def test_a_script_module_needs_a_hint_and_nothing_else_takes_one(alone):
    module = torch.jit.script(Double())

    rref = RRef(module, Doubles)

    assert rref.local_value() is module
    assert rref.rpc_sync().forward(torch.ones(1)).item() == 2
    assert rref.remote().forward(torch.ones(1)).to_here().item() == 2
    with pytest.raises(RuntimeError, match="must provide its ModuleInterface type hint"):
        RRef(module)
    with pytest.raises(RuntimeError, match=r"must be a torch\.jit\.interface"):
        RRef(module, int)
    with pytest.raises(RuntimeError, match="type_hint should only be specified"):
        RRef(5, Doubles)


def test_a_backward_pass_begins_at_the_value(alone):
    leaf = torch.ones(2, requires_grad=True)
    rref = RRef((leaf * 3).sum())

    rref.backward(retain_graph=True)
    rref.backward()

    assert leaf.grad.tolist() == [6, 6]
    with pytest.raises(RuntimeError, match="Could not find autograd context with id: 1"):
        rref.backward(1)


def test_values_go_with_the_last_reference(alone):
    rref = alone.remote("me", Counter, args=(1,))
    rref.to_here()
    assert alone._rref_context_get_debug_info()["num_owner_rrefs"] == "0"  # nobody else has one
    alive = len([o for o in gc.get_objects() if type(o) is Counter])
    assert alive == 1

    del rref

    eventually(lambda: not [o for o in gc.get_objects() if type(o) is Counter])


def test_after_shutdown_the_owner_still_has_its_value(alone):
    """LOG row 77."""
    rref = RRef([1])
    alone.shutdown()

    assert rref.local_value() == [1]
    assert rref.owner_name() == "me"


def test_a_generic_alias_makes_references(alone):
    assert RRef[int](5).to_here() == 5
    assert isinstance(RRef(5), rpc.PyRRef)
