"""Programs: the graph of a chain over one whole leaf, as Python that allocates little memory.

Each operation writes with ``out=`` to scratch, which is reused after the last read of its value.
The last operation of a result writes to the parameter or state itself, if no later operation reads
the old value. The operations are those of the rule, on tensors of the same layouts, so a step
equals the rule's step bit for bit. An operation without ``out=`` allocates its result.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from functional_optim.core.aliasing import has_internal_overlap
from functional_optim.kernels.expressions import (
    COPIES,
    OPERATORS,
    REFLECTED,
    Namespace,
    argument,
    statement,
)
from functional_optim.kernels.graph import Trace
from functional_optim.kernels.validate import Validated, last_uses

_ELEMENTWISE = (
    *(torch.abs, torch.add, torch.addcdiv, torch.addcmul, torch.clamp, torch.div),
    *(torch.lerp, torch.maximum, torch.minimum, torch.mul, torch.neg, torch.sign),
    *(torch.sqrt, torch.sub),
)
_PRODUCTS = (torch.mm, torch.bmm, torch.addmm, torch.baddbmm)

OUT_FUNCTIONS: dict[Any, bool] = {
    **dict.fromkeys(_ELEMENTWISE, True),
    **dict.fromkeys(_PRODUCTS, False),
}
"""Functions that programs call with ``out=``. The value is True for elementwise functions, which
read each element before they write it. A product reads operands while it writes.
"""


class TensorLayout(NamedTuple):
    """Shape, strides and dtype of a tensor."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class Program(NamedTuple):
    """Program of a chain for tensors of certain layouts."""

    step: Callable[..., None]
    """``step(tensors of a leaf, scalar arguments, scratch)``; ``step.text`` is its source."""
    scratch: tuple[TensorLayout, ...]
    """The layout of each piece of scratch."""


def whole_program(trace: Trace, validated: Validated) -> Program:
    """Return the program of a graph over whole tensors."""
    return _Writer(trace, *validated).write()


class _Writer:
    """Writer of one program.

    Args:
        values: the value of each node in an example. Tensors have no data.
        root: for each node, the node that owns its memory.
    """

    def __init__(
        self, trace: Trace, values: dict[fx.Node, Any], root: dict[fx.Node, fx.Node]
    ) -> None:
        self.trace, self.values, self.root = trace, values, root
        self.namespace = Namespace()
        self.nodes = [node for node in trace.graph.nodes if node.op != "placeholder"]
        self.order = {node: i for i, node in enumerate(self.nodes)}
        self.results = [(self._unaliased(node), trace.chunk[k]) for node, k in trace.results]
        self.last = last_uses(trace, root)
        self.scratch: list[TensorLayout] = []
        self.memory: dict[fx.Node, str] = {node: node.name for node in trace.chunk}
        """The name of the memory of each value that is read later: a leaf's tensor, or scratch."""
        self.lines: list[str] = []
        self.allocated: dict[fx.Node, list[str]] = {}
        """The names of each value that has memory of its own, and of its views."""

    def write(self) -> Program:
        for node in self.nodes:
            self._emit(node)
            self._free(node)
            for source in [n for n in self.memory if self.last[n] <= self.order[node]]:
                del self.memory[source]
        self._copy_results()
        heads = [node.name for node in (*self.trace.chunk, *self.trace.scalar_args)]
        heads += [f"scratch_{i}" for i in range(len(self.scratch))]
        body = "".join(f"    {line}\n" for line in self.lines) or "    pass\n"
        step = self.namespace.function(f"def step({', '.join(heads)}):\n{body}", "step")
        return Program(step, tuple(self.scratch))

    def _free(self, node: fx.Node) -> None:
        """Delete the names of the allocated values that no later node reads."""
        now = self.order[node]
        read = {self.root[one] for one in (node, *node.all_input_nodes)} & self.allocated.keys()
        for owner in sorted(read, key=lambda one: self.order[one]):
            if self.last[owner] <= now:
                self.lines.append(f"del {', '.join(self.allocated.pop(owner))}")

    def _unaliased(self, node: fx.Node) -> fx.Node:
        """Return the node that owns the same tensor, such as the source of a cast to its dtype."""
        root, value = self.root[node], self.values[node]
        source = self.values[root]
        if not isinstance(value, Tensor) or not isinstance(source, Tensor):
            return node
        is_same = _layout(source) == _layout(value)
        return root if is_same and value.storage_offset() == source.storage_offset() else node

    def _emit(self, node: fx.Node) -> None:
        value, text = self.values[node], None
        own = isinstance(value, Tensor) and self.root[node] is node
        if own and not has_internal_overlap(value):
            text = self._reciprocal(node) or self._with_out(node) or self._in_place(node)
        if own and text is None:
            self.allocated[node] = [node.name]
        elif self.root[node] in self.allocated:
            self.allocated[self.root[node]].append(node.name)
        self.lines.append(f"{node.name} = {text or statement(node, self.namespace)}")

    def _reciprocal(self, node: fx.Node) -> str | None:
        """Return ``number / tensor`` as text: two operations in torch, each with a rounding."""
        if node.target is not operator.truediv or self._is_tensor(node.args[0]):
            return None
        number, tensor = map(self._text, node.args)
        name = self.namespace.name(torch.reciprocal, "reciprocal")
        return f"{name}({tensor}, out={self._destination(node)}).mul_({number})"

    def _with_out(self, node: fx.Node) -> str | None:
        """Return the call of torch's function with ``out=``; None if there is none."""
        target, args = self._torch_function(node)
        elementwise = OUT_FUNCTIONS.get(target)
        if elementwise is None or not self._can_write_out(node, target, args):
            return None
        texts = [self._text(one) for one in args]
        texts += [f"{key}={self._text(value)}" for key, value in node.kwargs.items()]
        where = self._destination(node, elementwise=elementwise)
        name = self.namespace.name(target, target.__name__)
        return f"{name}({', '.join(texts)}, out={where})"

    def _torch_function(self, node: fx.Node) -> tuple[Any, tuple[Any, ...]]:
        """Return the torch function that a node calls, and its arguments in order."""
        target: Any = node.target
        args = node.args
        if node.op == "call_method":
            return getattr(torch, str(target), None), args
        if target in (operator.matmul, torch.matmul):
            sizes = [self.values[one].dim() if self._is_tensor(one) else 0 for one in args]  # type: ignore[index]  # a node
            products: Any = {2: torch.mm, 3: torch.bmm}
            return products.get(sizes[0]) if sizes[0] == sizes[1] else None, args
        if target in REFLECTED and args and not self._is_tensor(args[0]):
            return REFLECTED[target], args[::-1]
        return OPERATORS.get(target, target), args

    def _can_write_out(self, node: fx.Node, target: Any, args: Sequence[Any]) -> bool:
        """Return True if a function of tensors accepts ``out=`` with the layout of the result."""
        value = self.values[node]
        if not (args and self._is_tensor(args[0])):
            return False
        given = fx.map_arg((tuple(args), node.kwargs), self.values.__getitem__)
        out = torch.empty_strided(*_layout(value)[:2], dtype=value.dtype, device=value.device)
        try:
            made = target(*given[0], **given[1], out=out)
        except (TypeError, RuntimeError, ValueError, IndexError):
            return False
        return made is out and out.stride() == value.stride()

    def _in_place(self, node: fx.Node) -> str | None:
        """Return an operation without ``out=`` as an in-place method of its destination."""
        method = node.target if node.op == "call_method" else None
        if method in COPIES or node.target is torch.clone:
            source: Any = node.args[0]
            made, given = self.values[node], self.values.get(source)
            if not isinstance(given, Tensor) or given.device != made.device:
                return None
            if given.shape != made.shape:
                return None
            return f"{self._destination(node)}.copy_({source.name})"
        if node.target is torch.fill and len(node.args) == 2:
            return f"{self._destination(node)}.fill_({self._text(node.args[1])})"
        return None

    def _destination(self, node: fx.Node, *, elementwise: bool = True) -> str:
        """Return the name of the memory that an operation writes to.

        An elementwise operation may write to an operand that no later operation reads, because it
        reads each element before it writes it.
        """
        now, layout = self.order[node], _layout(self.values[node])
        operands = {self.root[one] for one in node.all_input_nodes}
        excluded = [one for one in operands if not elementwise or self._reads_view(one, node)]
        taken = {
            memory
            for owner, memory in self.memory.items()
            if self.last[owner] > now or owner in excluded
        }
        for result, chunk in self.results:
            ends_there = result is node or self.last[node] == self.order.get(result)
            fits = _layout(self.values[chunk]) == layout
            if ends_there and fits and chunk.name not in taken:
                self.memory[node] = chunk.name
                return chunk.name
        self.memory[node] = self._free_scratch(layout, taken)
        return self.memory[node]

    def _reads_view(self, owner: fx.Node, node: fx.Node) -> bool:
        """Return True if a node reads a part of a value, or its transpose."""
        views = [one for one in node.all_input_nodes if self.root[one] is owner]
        return any(self._unaliased(one) is not owner for one in views)

    def _free_scratch(self, layout: TensorLayout, taken: set[str]) -> str:
        """Return the name of free scratch with a layout; add a piece if there is none."""
        names = [f"scratch_{i}" for i, one in enumerate(self.scratch) if one == layout]
        free = [name for name in names if name not in taken]
        if not free:
            free = [f"scratch_{len(self.scratch)}"]
            self.scratch.append(layout)
        return free[0]

    def _copy_results(self) -> None:
        """Copy results to the tensors of the leaf, each result before it is overwritten."""
        left = [
            (node.name, self.memory.get(self.root[node], ""), chunk)
            for node, chunk in self.results
            if self.memory.get(node) != chunk.name
        ]
        while left:
            for at, (name, own, target) in enumerate(left):
                others = [memory for k, (_, memory, _) in enumerate(left) if k != at]
                if target.name not in (own, *others):
                    self.lines.append(f"{target.name}.copy_({name})")
                    del left[at]
                    break
            else:  # results swap tensors, or a result is a transpose of its own tensor
                name, _, target = left[0]
                taken = {memory for _, memory, _ in left}
                aside = self._free_scratch(_layout(self.values[target]), taken)
                self.lines.append(f"{aside}.copy_({name})")
                left[0] = (aside, aside, target)

    def _text(self, value: Any) -> str:
        return argument(value, self.namespace)

    def _is_tensor(self, argument: Any) -> bool:
        return isinstance(argument, fx.Node) and isinstance(self.values[argument], Tensor)


def _layout(value: Tensor) -> TensorLayout:
    return TensorLayout(value.shape, value.stride(), value.dtype)
