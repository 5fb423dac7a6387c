"""Plain Python values on their way: exact types travel, everything else is left to pickle."""

import collections
import enum
import gc
import math
import sys
from typing import Any

import pytest
from tensorcall import _tensorcall

testing = _tensorcall._testing
send = testing.roundtrip

LIMIT = 64


def nested(depth: int) -> Any:
    value: Any = None
    for _ in range(depth):
        value = [value]
    return value


def same(a: Any, b: Any) -> bool:
    """Equal, of equal types, all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    return a == b


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        False,
        0,
        -1,
        2**63 - 1,
        -(2**63),
        0.0,
        1.5,
        math.inf,
        "",
        "text",
        "ü€😀\0",
        b"",
        b"\x00\xff",
        (),
        [],
        {},
        (1, "x", 2.0),
        [[], [()], [{}]],
        {"a": 1, 2: "b", None: [True], (1, "k"): {b"": 0.5}, 1.5: ()},
        [None] * 1000,
        list(range(-1000, 1000)),
        {str(i): float(i) for i in range(1000)},
        [[i] for i in range(100)],
    ],
    ids=lambda value: repr(value)[:30],
)
def test_plain_values_arrive_equal_and_of_the_same_types(value: Any) -> None:
    assert same(send(value), value)


def test_signs_of_zero_and_nan_are_kept() -> None:
    negative, nan = send((-0.0, math.nan))

    assert math.copysign(1, negative) == -1
    assert math.isnan(nan)


def test_order_of_a_dict_is_kept() -> None:
    assert list(send({"b": 1, "a": 2, "c": 3})) == ["b", "a", "c"]


class Number(int):
    pass


class Color(enum.IntEnum):
    RED = 1


Point = collections.namedtuple("Point", "x y")


def twice(value: Any) -> list[Any]:
    return [value, value]


def cycle() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    "value",
    [
        2**63,
        -(2**63) - 1,
        1j,
        {1},
        frozenset(),
        bytearray(b"x"),
        range(3),
        object(),
        len,
        int,
        "\ud800",
        Number(3),
        Color.RED,
        Point(1, 2),
        collections.OrderedDict(a=1),
        collections.defaultdict(int),
        [1, [2, [object()]]],
        {"k": object()},
        {object(): 1},
    ],
    ids=lambda value: repr(value)[:30],
)
def test_everything_else_is_left_to_pickle(value: Any) -> None:
    with pytest.raises(TypeError, match="not plain"):
        send(value)


@pytest.mark.parametrize(
    "value",
    [
        twice([]),
        twice({}),
        twice((1,)),
        cycle(),
        twice([]) + list(range(20)),
        [*[[] for _ in range(20)], *twice([])],
    ],
    ids=["list", "dict", "tuple", "cycle", "early", "late"],
)
def test_identity_that_would_be_lost_is_left_to_pickle(value: Any) -> None:
    with pytest.raises(TypeError, match="not plain"):
        send(value)


def test_what_has_no_identity_to_lose_may_repeat() -> None:
    assert send(twice(())) == [(), ()]
    assert send(twice("text")) == ["text", "text"]


def test_a_value_that_doubles_at_each_level_is_given_up_at_once() -> None:
    value: Any = (None,)
    for _ in range(60):
        value = (value, value)

    with pytest.raises(TypeError, match="not plain"):
        send(value)


def test_nesting_is_plain_up_to_the_limit_of_the_wire() -> None:
    assert send(nested(LIMIT)) == nested(LIMIT)
    with pytest.raises(TypeError, match="not plain"):
        send(nested(LIMIT + 1))
    with pytest.raises(TypeError, match="not plain"):
        send(nested(100_000))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"\x03",
        b"\x05\x01\xff",
        b"\x07\xff\xff\xff\xff\x0f",
        b"\x07\x01" * 100_000 + b"\x00",
        b"\x0a\x00",
        b"\x0d\x01x",
        b"\x00\x00",
        b"\x09\x01\x07\x00\x00",
    ],
    ids=["empty", "tag", "cut", "utf8", "huge", "deep", "tensor", "pickle", "trailing", "unhashable"],
)
def test_bytes_that_are_no_value_raise(data: bytes) -> None:
    with pytest.raises((RuntimeError, TypeError)):
        testing.decode(data)


def test_values_leave_no_references_behind() -> None:
    marker = "".join(["used", "nowhere", "else"])
    value = ([marker], {marker: (marker,)})
    before = sys.getrefcount(marker)

    for _ in range(100):
        send(value)
    gc.collect()

    assert sys.getrefcount(marker) == before
