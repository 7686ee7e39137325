"""The graph of a chain over whole tensors as straight-line Python that writes into kept memory.

Elementwise operations and products of matrices are written with ``out=``, each result's last
operation straight into the parameter or state it belongs to, if nothing reads the old value
afterwards. These are the operations of the rule itself, on tensors of the same layouts: the step is
the rule's bit for bit. All else allocates its result, as the rule does.

Views of kept memory are the same at each step: they are made once, by ``views``.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from functional_optim.core.aliasing import overlaps_itself, storage_of
from functional_optim.kernels.errors import UntraceableError
from functional_optim.kernels.expressions import Namespace, argument, statement
from functional_optim.kernels.graph import Trace
from functional_optim.kernels.kept_memory import aligned, laid_in
from functional_optim.kernels.operators import OPERATORS, REFLECTED

_ELEMENTWISE = frozenset(
    [
        torch.abs,
        torch.add,
        torch.addcdiv,
        torch.addcmul,
        torch.clamp,
        torch.div,
        torch.lerp,
        torch.maximum,
        torch.minimum,
        torch.mul,
        torch.neg,
        torch.sign,
        torch.sqrt,
        torch.sub,
    ]
)
"""What reads each element before it writes it: the result may lie where an operand lay."""

_PRODUCTS = frozenset([torch.mm, torch.bmm, torch.addmm, torch.baddbmm])

_CASTS = frozenset(["to", "float", "double", "half", "bfloat16"])


class Slot(NamedTuple):
    """A value in kept memory."""

    region: int
    """Which piece of memory; values that are not wanted at the same time share one."""
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class WholeProgram:
    """A chain over one leaf."""

    step: Callable[..., None]
    """``step(lane tensors, uniform values, views)``; ``step.text`` is its source."""
    views: Callable[..., tuple[Tensor, ...]]
    """``views(a tensor for each slot)``: these tensors, and views of them."""
    slots: tuple[Slot, ...]
    offsets: tuple[int, ...]
    """Where each region begins, in bytes."""
    kept_bytes: int
    """Of all regions together."""

    def tensors(self, memory: Tensor) -> tuple[Tensor, ...]:
        """What a step takes, in memory of so many bytes."""
        return self.views(
            *(
                laid_in(memory, self.offsets[region], size, stride, dtype)
                for region, size, stride, dtype in self.slots
            )
        )


def whole_program(trace: Trace, values: dict[fx.Node, Any]) -> WholeProgram:
    """Write the program of a graph.

    Args:
        trace: of a chain, for tensors of given shapes.
        values: for each node a tensor without data that it is like.

    Raises:
        UntraceableError: results that change places, or that share memory with each other.
    """
    return _Writer(trace, values).write()


class _Writer:
    """Writes one program."""

    def __init__(self, trace: Trace, values: dict[fx.Node, Any]) -> None:
        self.trace, self.values = trace, values
        self.namespace = Namespace()
        self.nodes = [node for node in trace.graph.nodes if node.op != "placeholder"]
        self.order = {node: i for i, node in enumerate(self.nodes)}
        self.root = _roots(trace, values)
        self.results = [(self._itself(node), trace.lane[place]) for node, place in trace.results]
        self.last = self._last_uses()
        self.place: dict[fx.Node, str] = {node: node.name for node in trace.lane}
        """Where each value that is still wanted lies: a lane tensor, or a region by its number."""
        self.kept: list[fx.Node] = []
        """Nodes that are made before the first step: slots, and views of them."""
        self.slots: dict[fx.Node, Slot] = {}
        self.room: list[int] = []
        """The bytes of each region."""
        self.lines: list[str] = []

    def write(self) -> WholeProgram:
        for node in self.nodes:
            self._emit(node)
            for source in [one for one in self.place if self.last[one] <= self.order[node]]:
                del self.place[source]
        self._copy_results()
        returned = "".join(f"{node.name}, " for node in self.kept)
        made = [
            f"    {node.name} = {statement(node, self.namespace)}\n"
            for node in self.kept
            if node not in self.slots
        ]
        views = f"def views({_names(self.slots)}):\n{''.join(made)}    return ({returned})"
        heads = _names([*self.trace.lane, *self.trace.uniform, *self.kept])
        body = "".join(f"    {line}\n" for line in self.lines) or "    pass\n"
        offsets, total = [], 0
        for count in self.room:
            offsets.append(total)
            total += aligned(count)
        return WholeProgram(
            self.namespace.function(f"def step({heads}):\n{body}", "step"),
            self.namespace.function(views, "views"),
            tuple(self.slots.values()),
            tuple(offsets),
            total,
        )

    def _last_uses(self) -> dict[fx.Node, int]:
        """Where each value, or a view of it, is read for the last time."""
        last = dict.fromkeys(self.trace.graph.nodes, -1)
        for node in self.nodes:
            for source in (node, *node.all_input_nodes):
                root = self.root[source]
                last[root] = max(last[root], self.order[node])
        for node, _ in self.results:
            last[self.root[node]] = len(self.nodes)
        return last

    def _itself(self, node: fx.Node) -> fx.Node:
        """The node whose value this one's is as it lies, as of a cast to the dtype that it has."""
        root, value = self.root[node], self.values[node]
        if not isinstance(value, Tensor) or not _is_alike(self.values[root], value):
            return node
        return root if value.storage_offset() == self.values[root].storage_offset() else node

    def _is_tensor(self, value: Any) -> bool:
        return isinstance(value, fx.Node) and isinstance(self.values[value], Tensor)

    def _shape(self, value: Any) -> Sequence[int]:
        """The shape of a tensor; none, of anything else."""
        return self.values[value].shape if self._is_tensor(value) else ()

    def _emit(self, node: fx.Node) -> None:
        if self.root[node] is not node:  # a view
            if all(one in self.kept for one in node.all_input_nodes):
                self.kept.append(node)
            else:
                self._line(node)
            return
        self._line(node, self._with_out(node) or self._cast(node))

    def _line(self, node: fx.Node, text: str | None = None) -> None:
        self.lines.append(f"{node.name} = {text or statement(node, self.namespace)}")

    def _cast(self, node: fx.Node) -> str | None:
        """A copy in another dtype."""
        if node.op != "call_method" or node.target not in _CASTS:
            return None
        own: Any = node.args[0]
        if not self._is_tensor(own) or self.values[own].shape != self.values[node].shape:
            return None
        where = self._destination(node, elementwise=False)
        return f"{where}.copy_({argument(own, self.namespace)})"

    def _with_out(self, node: fx.Node) -> str | None:
        """The call that does this with ``out=``; None if it is none of those."""
        target, args = self._function(node)
        elementwise = target in _ELEMENTWISE
        if not elementwise and target not in _PRODUCTS:
            return None
        if not args or not self._is_tensor(args[0]) or not self._is_laid_so(node, target, args):
            return None
        where = self._destination(node, elementwise=elementwise)
        texts = [argument(one, self.namespace) for one in args]
        texts += [f"{key}={argument(one, self.namespace)}" for key, one in node.kwargs.items()]
        name = self.namespace.name(target, target.__name__)
        return f"{name}({', '.join(texts)}, out={where})"

    def _function(self, node: fx.Node) -> tuple[Any, tuple[Any, ...]]:
        """The function of torch that a node calls, and its arguments in the order that it takes."""
        target: Any = node.target
        args = node.args
        if node.op == "call_method":
            return getattr(torch, str(target), None), args
        if target in (operator.matmul, torch.matmul):
            sizes = [len(self._shape(one)) for one in args]
            products: Any = {2: torch.mm, 3: torch.bmm}
            return products.get(sizes[0]) if sizes[0] == sizes[1] else None, args
        if target in REFLECTED and args and not self._is_tensor(args[0]):
            return REFLECTED[target], args[::-1]
        return OPERATORS.get(target, target), args

    def _is_laid_so(self, node: fx.Node, target: Any, args: Sequence[Any]) -> bool:
        """Whether the function takes memory of the result's layout, and keeps it."""
        value = self.values[node]
        if not isinstance(value, Tensor) or overlaps_itself(value):
            return False
        out = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        given = fx.map_arg((tuple(args), node.kwargs), self.values.__getitem__)
        try:
            made = target(*given[0], **given[1], out=out)
        except (TypeError, RuntimeError, ValueError, IndexError):
            return False
        return bool(made is out and out.stride() == value.stride())

    def _destination(self, node: fx.Node, *, elementwise: bool) -> str:
        """The name of the memory that an operation writes into.

        It may be that of an operand of the same layout that an elementwise operation is the last to
        read; a product reads its operands again while it writes.
        """
        now, value = self.order[node], self.values[node]
        operands = {self.root[one] for one in node.all_input_nodes}
        taken = {
            where
            for owner, where in self.place.items()
            if self.last[owner] > now
            or (owner in operands and not (elementwise and self._may_go(owner, node)))
        }
        for result, lane in self.results:
            ends_there = result is node or self.last[node] == self.order.get(result)
            if ends_there and _is_alike(self.values[lane], value) and lane.name not in taken:
                self.place[node] = lane.name
                return lane.name
        region = self._free_region(value, taken)
        self.place[node] = str(region)
        self.slots[node] = Slot(region, value.shape, value.stride(), value.dtype)
        self.kept.append(node)
        return node.name

    def _may_go(self, owner: fx.Node, node: fx.Node) -> bool:
        """Whether each element of an operand lies where that of the result may be written."""
        views = [one for one in node.all_input_nodes if self.root[one] is owner]
        return all(self._itself(one) is owner for one in views) and _is_alike(
            self.values[owner], self.values[node]
        )

    def _free_region(self, value: Tensor, taken: set[str]) -> int:
        """A region that is not taken: the smallest that is large enough, or else the largest."""
        need = _span(value)
        free = [k for k in range(len(self.room)) if str(k) not in taken]
        enough = [k for k in free if self.room[k] >= need]
        if enough:
            return min(enough, key=self.room.__getitem__)
        if not free:
            self.room.append(need)
            return len(self.room) - 1
        widest = max(free, key=self.room.__getitem__)
        self.room[widest] = need
        return widest

    def _copy_results(self) -> None:
        """What was not written in its place goes there."""
        targets = {lane.name for _, lane in self.results}
        for node, lane in self.results:
            where = self.place.get(self.root[node], "")
            if where == lane.name and self.root[node] is node:
                continue
            if where in targets:
                raise UntraceableError("results that lie in each other's memory change places")
            self.lines.append(f"{lane.name}.copy_({node.name})")


def _roots(trace: Trace, values: dict[fx.Node, Any]) -> dict[fx.Node, fx.Node]:
    """For each node, the one that its memory belongs to; itself, if it is no view."""
    owner: dict[int, fx.Node] = {}
    root: dict[fx.Node, fx.Node] = {}
    for node in trace.graph.nodes:
        value = values[node]
        if isinstance(value, (tuple, list)):
            value = value[0] if value and isinstance(value[0], Tensor) else None
        if not isinstance(value, Tensor):
            root[node] = node
        else:
            root[node] = owner.setdefault(storage_of(value), node)
    return root


def _is_alike(one: Any, other: Tensor) -> bool:
    if not isinstance(one, Tensor):
        return False
    return (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


def _span(value: Tensor) -> int:
    """The bytes from its first element to its last."""
    if not value.numel():
        return 0
    steps = sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))
    return (1 + steps) * value.element_size()


def _names(nodes: Iterable[fx.Node]) -> str:
    return ", ".join(node.name for node in nodes)
