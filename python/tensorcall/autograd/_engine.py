"""torch's autograd as the local engine: this worker's part of a backward pass.

A pass asks for a plan, once: which send functions of the context there are (and roots, on the worker that
began), and which of these *sources* reach which recv functions. Then it asks for vector-Jacobian products
over sources whose gradients have arrived, and gets the gradients of the recv functions that are complete.
When all sources have been executed, the gradients of the leaves go to the context.

Usually every node runs once. Only where calls go in a circle, as with the answer to a call whose arguments
have a graph too, a recv function has to be complete before all sources have arrived. The sources that share
no nodes with others are then run for good. Of others the engine runs to that function alone, from all sources
that reach it, and runs again when the last one has come: nodes and hooks see complete gradients, but those
that lead to such a function and elsewhere, too, run more than once. Leaves get theirs, and their hooks run,
at the end.

Sources that share no nodes are run one after the other, those of the latest messages first, so that the sums
at the leaves do not depend on what arrived when, or on which threads made the graph.
"""

from __future__ import annotations

import functools
import operator
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from . import _context, _functions, _reducers
from ._context import DistAutogradContext
from ._functions import Gradients

PassId = tuple[int, int]
Arrived = tuple[int | None, Gradients]
"""A source, by its message, and its gradients; or the roots, by `None`."""
Plan = tuple[list[tuple[int, int]], list[tuple[int, int, list[int]]], list[int]]
"""Of the send functions the messages and the workers that these went to; of each recv function the message,
the sender and the places of the sources that reach it; the workers that the context went to."""

_run_backward: Any = torch.autograd.Variable._execution_engine.run_backward


class LocalEngine:
    """The passes of one worker.

    Args:
        find: gives its contexts by their ids.
    """

    def __init__(self, find: Callable[[int], DistAutogradContext | None]) -> None:
        self._find = find
        self._lock = threading.Lock()
        self._passes: dict[tuple[int, PassId], _Pass] = {}

    def plan(self, context_id: int, pass_id: PassId, roots: Sequence[torch.Tensor] | None) -> Plan:
        """Begin a pass here. The roots, if any, are the last source."""
        context = self._find(context_id)
        if context is None:
            # The message that should have brought it never arrived.
            return [], [], []
        made = _Pass(context, roots)
        with self._lock:
            self._passes[context_id, pass_id] = made
        return made.plan

    def vjp(
        self,
        context_id: int,
        pass_id: PassId,
        arrived: Sequence[Arrived],
        wanted: Sequence[int],
        *,
        last: bool,
        retain_graph: bool,
    ) -> list[tuple[int, Gradients]]:
        """Take in sources; the gradients of recv functions.

        Args:
            context_id: the context.
            pass_id: the pass.
            arrived: the sources.
            wanted: messages of recv functions: those whose sources are complete now.
            last: whether all sources are: the leaves' gradients go to the context.
            retain_graph: whether the graph is kept for another pass.
        """
        with self._lock:
            found = self._passes.get((context_id, pass_id))
        if found is None:
            raise RuntimeError(f"there is no backward pass {pass_id} in autograd context {context_id} here")
        return found.advance(arrived, wanted, last=last, retain_graph=retain_graph)

    def end(self, context_id: int, pass_id: PassId) -> None:
        """Forget a pass, whether it came to its end or failed."""
        with self._lock:
            ended = self._passes.pop((context_id, pass_id), None)
        # Not under the lock: it may let go of a graph.
        del ended

    def count(self) -> int:
        """How many passes are under way."""
        return len(self._passes)


class _Pass:
    """One backward pass in one context."""

    def __init__(self, context: DistAutogradContext, roots: Sequence[torch.Tensor] | None) -> None:
        self._context = context
        self._sources: dict[int | None, _Source] = {}
        sends = context._send_functions()
        for message, node in sends.items():
            self._sources[message] = _Source(1 << len(self._sources), [_functions.send_edge(node)])
        if roots is not None:
            source = _Source(1 << len(sends), [get_gradient_edge(root) for root in roots])
            source.gradients = [torch.ones_like(root) for root in roots]
            self._sources[None] = source
        self._below = _below([edge.node for source in self._sources.values() for edge in source.edges])
        reach = _reach(self._below, list(self._sources.values()))
        self._leaves = {node: reach[node] for node in self._below if type(node) is _functions.LeafNode}
        self._found: dict[Any, torch.Tensor] = {}
        reduced = _reducers.partners(node.variable for node in self._leaves)
        self._reduced = reduced
        self._groups = [-1] if reduced is not None else _groups(reach, len(self._sources))
        self._waiting: dict[int, tuple[Any, int]] = {}
        recvs = []
        for message, node in context._recv_functions().items():
            mask = 0 if node is None else reach.get(node, 0)
            recvs.append((message, _context.rank_of(message), _places(mask)))
            if node is not None:
                self._waiting[message] = node, mask
        self._refuse_others({node for node, _ in self._waiting.values()})
        to = [(message, node.rank) for message, node in sends.items()]
        self.plan: Plan = to, recvs, sorted(context._known_worker_ids())

    def _refuse_others(self, own: set[Any]) -> None:
        for node in self._below:
            if type(node) is _functions.RecvNode and node not in own:
                raise RuntimeError(
                    "Autograd context no longer valid: a tensor that was received in autograd context "
                    f"{node.context_id} is part of the graph of a pass in {self._context._context_id()}"
                )

    def advance(
        self, arrived: Sequence[Arrived], wanted: Sequence[int], *, last: bool, retain_graph: bool
    ) -> list[tuple[int, Gradients]]:
        """Take in sources and run torch's engine as far as it has to."""
        for message, values in arrived:
            source = self._sources.get(message)
            if source is not None and message is not None:
                source.values, source.gradients = values, [_NOTHING]
        ready = [(message, *self._waiting.pop(message)) for message in wanted]
        needed = -1 if last else functools.reduce(operator.or_, (mask for *_, mask in ready), 0)
        outputs: dict[Any, Gradients] = {}
        waiting = []
        for group in self._groups:
            whole = last or not group & ~needed
            if not whole:
                waiting.append(group)
            recvs = [node for _, node, mask in ready if mask & group]
            if whole or recvs:
                outputs |= self._run_group(group & needed, recvs, whole=whole, retain_graph=retain_graph)
        self._groups = waiting
        if last:
            self._commit()
        return [
            (message, outputs.get(node) or [None] * _functions.outputs_of(node)) for message, node, _ in ready
        ]

    def _run_group(
        self, sources: int, recvs: list[Any], *, whole: bool, retain_graph: bool
    ) -> dict[Any, Gradients]:
        """Run to these recv functions and, if it is the `whole` group, to its leaves; what the former get."""
        leaves = [node for node, mask in self._leaves.items() if mask & sources] if whole else []
        keep = retain_graph or (not whole and self._run_again(recvs))
        if self._reduced is not None and leaves:
            with _reducers.own_gradients(self._reduced) as own:
                run, _ = self._run(sources, recvs, leaves, keep, accumulate=True)
                self._context.accumulate(own.take(), _add)
        else:
            run, results = self._run(sources, recvs, leaves, keep)
            self._collect(leaves, results, run)
        return run.found

    def _run(
        self, reach: int, recvs: list[Any], leaves: list[Any], keep: bool, accumulate: bool = False
    ) -> tuple[_functions.Run, list[torch.Tensor | None]]:
        """Run torch's engine from the sources in `reach` to these recv functions and leaves.

        Returns what the recv functions and the leaves get. With `accumulate` the gradients of the leaves are
        in ``.grad`` instead, and their hooks have run.
        """
        edges: list[GradientEdge] = []
        gradients: list[torch.Tensor] = []
        run = _functions.Run()
        for source in self._sources.values():
            if source.bit & reach and source.gradients is not None:
                edges += source.edges
                gradients += source.gradients
                if source.values is not None:
                    run.arrived[source.edges[0].node] = source.values
        inputs = [GradientEdge(node, 0) for node in leaves]
        inputs += [_functions.recv_edge(node) for node in recvs]
        if not edges or not inputs:
            return run, []
        with _functions.running(run):
            results = _run_backward(
                tuple(edges),
                tuple(gradients),
                keep,
                False,
                tuple(inputs),
                allow_unreachable=True,
                accumulate_grad=accumulate,
            )
        return run, [] if accumulate else list(results[: len(leaves)])

    def _run_again(self, recvs: list[Any]) -> bool:
        """Whether nodes that lead to these recv functions lead elsewhere, too."""
        ready = set(recvs)
        waiting = {node for node, _ in self._waiting.values()}
        leads: dict[Any, tuple[bool, bool]] = {}
        for node in reversed(_ordered(self._below)):
            here = node in ready
            there = not here and (node in waiting or type(node) is _functions.LeafNode)
            for below in self._below[node]:
                here |= leads[below][0]
                there |= leads[below][1]
            leads[node] = here, there
            if here and there:
                return True
        return False

    def _collect(self, leaves: list[Any], results: list[torch.Tensor | None], run: _functions.Run) -> None:
        """Take in gradients of leaves."""
        shared = _shared(results, run)
        for node, place in zip(leaves, range(len(results)), strict=False):
            gradient, results[place] = results[place], None
            if gradient is None:
                continue
            before = self._found.get(node)
            if before is None:
                self._found[node] = _own(gradient, node.variable, shared)
            else:
                self._found[node] = _add(before, gradient)

    def _commit(self) -> None:
        """Give the gradients of the leaves to the context."""
        found, self._found = self._found, {}
        for node, gradient in found.items():
            for hook in _hooks_of(node.register_prehook):
                changed = hook((gradient,))
                if changed is not None:
                    gradient = changed[0] if isinstance(changed, tuple) else changed
            found[node] = gradient
        self._context.accumulate({node.variable: gradient for node, gradient in found.items()}, _add)
        for node, gradient in found.items():
            for hook in _hooks_of(node.register_hook):
                hook((), (gradient,))


class _Source:
    """A send function, or the roots."""

    def __init__(self, bit: int, edges: list[GradientEdge]) -> None:
        self.bit = bit
        self.edges = edges
        self.gradients: list[torch.Tensor] | None = None
        """What torch's engine is given for the edges; `None` if nothing has come."""
        self.values: Gradients | None = None
        """What has come for a send function, which hands it out itself."""


_NOTHING = torch.empty(0)
"""What the engine gives a send function, which knows the gradients from elsewhere."""


def _below(begins: list[Any]) -> dict[Any, list[Any]]:
    """All nodes that can be reached, each with those that follow it."""
    below: dict[Any, list[Any]] = {}
    stack = begins
    while stack:
        node = stack.pop()
        if node in below:
            continue
        # Recv functions are where this worker's part of the graph ends.
        ends = type(node) is _functions.RecvNode
        below[node] = [] if ends else [each for each, _ in node.next_functions if each is not None]
        stack += below[node]
    return below


def _ordered(below: dict[Any, list[Any]]) -> list[Any]:
    """The nodes, each before those that follow it."""
    waits = dict.fromkeys(below, 0)
    for nodes in below.values():
        for node in nodes:
            waits[node] += 1
    order = [node for node, count in waits.items() if not count]
    for node in order:
        for each in below[node]:
            waits[each] -= 1
            if not waits[each]:
                order.append(each)
    return order


def _reach(below: dict[Any, list[Any]], sources: list[_Source]) -> dict[Any, int]:
    """Of each node the bits of the sources that reach it."""
    if len(sources) <= 1:
        return dict.fromkeys(below, 1)
    masks = dict.fromkeys(below, 0)
    for source in sources:
        for edge in source.edges:
            masks[edge.node] |= source.bit
    for node in _ordered(below):
        mask = masks[node]
        for each in below[node]:
            masks[each] |= mask
    return masks


def _groups(reach: dict[Any, int], count: int) -> list[int]:
    """The sources by their bits, in groups that share no nodes but leaves; those that came last first.

    A leaf that has hooks is a node like others: they are to see its whole gradient.
    """
    groups = [1 << number for number in reversed(range(count))]
    if count == 1:
        return groups
    inner = {
        mask
        for node, mask in reach.items()
        if type(node) is not _functions.LeafNode or node.variable._backward_hooks
    }
    for mask in inner:
        if mask & (mask - 1):
            apart = [group for group in groups if not group & mask]
            joined = functools.reduce(operator.or_, (group for group in groups if group & mask))
            groups = sorted([*apart, joined], reverse=True)
    return groups


def _places(mask: int) -> list[int]:
    return [place for place in range(mask.bit_length()) if mask >> place & 1]


def _add(before: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Accumulate into what a context has, in place where torch does."""
    if before.is_sparse and not gradient.is_sparse:
        return gradient + before
    before += gradient
    return before


def _shared(results: Iterable[torch.Tensor | None], run: _functions.Run) -> set[int]:
    """The memory that more than one of the gradients uses, or that goes to another worker."""
    seen: set[int] = set()
    shared: set[int] = set()
    for gradients in run.found.values():
        shared.update(_memory(gradient) for gradient in gradients if gradient is not None)
    for gradient in results:
        if gradient is not None:
            memory = _memory(gradient)
            (shared if memory in seen else seen).add(memory)
    return shared


def _memory(tensor: torch.Tensor) -> int:
    if tensor.layout is torch.sparse_coo:
        tensor = tensor._values()
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        # Layouts without one storage.
        return id(tensor)


_REFERENCES = 3
"""Those to a result that is nobody else's: of the variable in `_collect`, of the argument, of the count."""


def _own(gradient: torch.Tensor, leaf: torch.Tensor, shared: set[int]) -> torch.Tensor:
    """A gradient that may be kept as it is, or a copy: as torch decides for ``.grad``."""
    if _memory(gradient) in shared or sys.getrefcount(gradient) > _REFERENCES or gradient._use_count() > 1:
        return _copied(gradient, leaf)
    if gradient.layout is torch.sparse_coo:
        whole = gradient._indices().is_contiguous() and gradient._values().is_contiguous()
    elif gradient.layout is torch.strided:
        whole = gradient.stride() == leaf.stride() if _is_dense(leaf) else gradient.is_contiguous()
    else:
        whole = True
    return gradient if whole else _copied(gradient, leaf)


def _copied(gradient: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    if gradient.layout is not torch.strided or leaf.layout is not torch.strided:
        return gradient.clone()
    if _is_dense(leaf):
        return torch.empty_strided(
            leaf.size(), leaf.stride(), dtype=gradient.dtype, device=gradient.device
        ).copy_(gradient)
    return gradient.clone(memory_format=torch.contiguous_format)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor lie side by side, in whatever order."""
    if tensor.layout is not torch.strided:
        return False
    if tensor.is_contiguous():
        return True
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))


def _hooks_of(register: Any) -> list[Any]:
    """The hooks of a node, which only tells about them when another one comes."""
    handle = register(_no_hook)
    hooks = handle.hooks_dict_ref()
    handle.remove()
    return [] if hooks is None else list(hooks.values())


def _no_hook(*_: Any) -> None:
    """Stands for a hook for a moment."""


engine = LocalEngine(lambda context_id: _context.container.find(context_id))
"""That of this process."""


def begin_anew() -> Any:
    """In a forked child: have no passes. What is returned, the parent's, must be kept and left alone."""
    inherited = engine._passes
    engine._lock, engine._passes = threading.Lock(), {}
    _reducers.begin_anew()
    return inherited
