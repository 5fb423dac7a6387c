"""Device maps: what a group accepts, and where tensors go."""

from __future__ import annotations

import pytest
import torch
from tensorcall.rpc import TensorPipeRpcBackendOptions, _devices


def entry(count=0, maps=None, devices=()):
    return {"count": count, "maps": maps or {}, "devices": list(devices)}


def test_a_group_without_maps_or_with_fitting_ones_is_well():
    assert _devices.fault({"a": entry(), "b": entry()}) is None
    maps = {"b": {"cuda:0": "cuda:1", "cpu": "cpu"}}
    assert _devices.fault({"a": entry(1, maps), "b": entry(2)}) is None
    assert _devices.fault({"a": entry(1, maps, ["cuda:0"]), "b": entry(2, None, ["cuda:1"])}) is None


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ({"a": entry(2, None, ["cuda:0", "cuda:0"])}, "Node a has duplicated devices"),
        ({"a": entry(1, None, ["cuda:1"])}, "Node a has devices with invalid indices"),
        (
            {"a": entry(1, {"c": {"cuda:0": "cuda:0"}})},
            "Node a has invalid target node names in its device maps",
        ),
        (
            {"a": entry(2, {"b": {"cuda:0": "cuda:0", "cuda:1": "cuda:0"}}), "b": entry(2)},
            "Node a has duplicated target devices in its device map for b",
        ),
        (
            {"a": entry(2, {"b": {"cuda:1": "cuda:0"}}, ["cuda:0"]), "b": entry(1)},
            "Node a has unexpected source devices in its device map for b",
        ),
        (
            {"a": entry(1, {"b": {"cuda:1": "cuda:0"}}), "b": entry(1)},
            "Node a has source devices with invalid indices in its device map for b",
        ),
        (
            {"a": entry(1, {"b": {"cuda:0": "cuda:1"}}), "b": entry(2, None, ["cuda:0"])},
            "Node a has unexpected target devices in its device map for b",
        ),
        (
            {"a": entry(1, {"b": {"cuda:0": "cuda:1"}}), "b": entry(1)},
            "Node a has target devices with invalid indices in its device map for b",
        ),
    ],
)
def test_what_is_wrong_with_maps_is_told(entries, text):
    """LOG rows 53 and 56."""
    assert _devices.fault(entries).startswith(text)


def test_a_dynamic_group_may_not_know_all_targets_yet():
    assert _devices.fault({"a": entry(1, {"later": {"cuda:0": "cuda:7"}})}, static=False) is None


def test_results_go_back_the_way_that_arguments_came():
    """LOG row 54."""
    directory = _devices.Directory("b", TensorPipeRpcBackendOptions())
    directory.learn(0, "a", {"b": {"cuda:0": "cuda:1"}, "c": {"cuda:0": "cuda:5"}})

    assert directory.responses(0)._map == {torch.device("cuda:1"): torch.device("cuda:0")}
    assert directory.own() == [torch.device("cuda:1")]


def test_tensors_in_main_memory_stay_unless_the_map_moves_them():
    tensors = [torch.ones(2)]
    options = TensorPipeRpcBackendOptions(device_maps={"b": {"cpu": "cpu"}, "c": {"cpu": 0}})
    directory = _devices.Directory("a", options)

    assert directory.requests("nobody").stage(tensors) is tensors
    assert directory.requests("b").stage(tensors) is tensors
    assert directory.requests("c").stage(tensors) == [(tensors[0], "cuda:0")]


def test_a_device_without_a_place_is_refused_by_name():
    """LOG row 56."""
    placement = _devices.Directory("a", TensorPipeRpcBackendOptions()).requests("b")

    with pytest.raises(RuntimeError, match="Request device mapping is not available for destination b"):
        placement.stage([torch.ones(2, device="meta")])
