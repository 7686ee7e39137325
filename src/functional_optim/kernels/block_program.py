"""The graph of a chain as straight-line Python that allocates nothing.

Each operation is written with ``out=`` into scratch that is used again as soon as its value is no
longer wanted, and each result's last operation straight into the parameter or state it belongs to,
if nothing reads the old value afterwards. So it is bit for bit the rule itself.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from functional_optim.kernels.examine import called, examine, examples, same_bits, varied
from functional_optim.kernels.expressions import Namespace, argument, statement
from functional_optim.kernels.graph import Trace
from functional_optim.kernels.operators import OPERATORS, REFLECTED

_COPIES = frozenset(
    [
        "bfloat16",
        "bool",
        "byte",
        "char",
        "clone",
        "contiguous",
        "double",
        "float",
        "half",
        "int",
        "long",
        "short",
        "to",
        "type",
        "type_as",
    ]
)
"""What gives the elements of its first argument as they are, or in another dtype."""


class BlockProgram(NamedTuple):
    """A chain over one block."""

    step: Callable[..., None]
    """``step(lane tensors, uniform values, scratch tensors)``; ``step.text`` is its source."""
    scratch: tuple[torch.dtype, ...]
    """The dtype of each scratch block."""
    allocating: tuple[str, ...]
    """Operations that have no ``out=`` and allocate their result anew for each block."""


def block_program(
    trace: Trace, lane: Sequence[Tensor], uniform: Sequence[Any], *, granularity: int
) -> BlockProgram:
    """Write the program of a trace.

    Args:
        trace: of a pointwise chain.
        lane: tensors to try it on (a few of their first elements); their dtypes are the program's.
        uniform: the uniform values of some step. No number of theirs, nor of the lane's, decides
            what is written: the program is for all.
        granularity: in blocks of how many elements the chain works; 1 for each on its own.

    Raises:
        UntraceableError: a result of another shape or dtype than what it is to replace.
        NotPointwiseError: the graph looks at more than one element at a time.
    """
    with torch.no_grad():
        few = examples(lane, granularity)
        return _Writer(trace, few, uniform, pointwise=granularity == 1).write()


class _Writer:
    """Writes one program, by what each operation gives on an example."""

    def __init__(
        self, trace: Trace, lane: Sequence[Tensor], uniform: Sequence[Any], *, pointwise: bool
    ) -> None:
        self.trace = trace
        self.length = lane[0].numel()
        self.namespace = Namespace()
        self.values, self.root = examine(trace, lane, uniform, pointwise=pointwise)
        self.nodes = [node for node in trace.graph.nodes if node.op != "placeholder"]
        self.order = {node: i for i, node in enumerate(self.nodes)}
        self.scratch: list[torch.dtype] = []
        self.memory: dict[fx.Node, str] = {node: node.name for node in trace.lane}
        """Where each value that is still wanted lies: a lane tensor or a scratch block."""
        self.lines: list[str] = []
        self.allocating: list[str] = []

    def write(self) -> BlockProgram:
        last = self._last_uses()
        for node in self.nodes:
            self._emit(node, last)
            for source in [n for n in self.memory if last[n] <= self.order[node]]:
                del self.memory[source]
        self._copy_results()
        heads = [node.name for node in (*self.trace.lane, *self.trace.uniform)]
        heads += [f"scratch_{i}" for i in range(len(self.scratch))]
        body = "".join(f"    {line}\n" for line in self.lines) or "    pass\n"
        step = self.namespace.function(f"def step({', '.join(heads)}):\n{body}", "step")
        return BlockProgram(step, tuple(self.scratch), tuple(self.allocating))

    def _copy_results(self) -> None:
        """What was not written in its place goes there, each before it is itself written over."""
        left = [
            (node.name, self.memory.get(self.root[node], ""), self.trace.lane[place])
            for node, place in self.trace.results
            if self.memory.get(node) != self.trace.lane[place].name
        ]
        while left:
            for at, (name, _, target) in enumerate(left):
                others = [memory for k, (_, memory, _) in enumerate(left) if k != at]
                if target.name not in others:
                    self.lines.append(f"{target.name}.copy_({name})")
                    del left[at]
                    break
            else:  # they change places
                name, _, target = left[0]
                dtype = self.values[target].dtype
                aside = self._free_scratch(dtype, {memory for _, memory, _ in left})
                self.lines.append(f"{aside}.copy_({name})")
                left[0] = (aside, aside, target)

    def _last_uses(self) -> dict[fx.Node, int]:
        """Where each value, or a view of it, is read for the last time."""
        last = dict.fromkeys(self.trace.graph.nodes, -1)
        for node in self.nodes:
            for source in node.all_input_nodes:
                root = self.root[source]
                last[root] = max(last[root], self.order[node])
            if self.root[node] is not node:
                last[self.root[node]] = max(last[self.root[node]], self.order[node])
        for node, _ in self.trace.results:
            last[self.root[node]] = len(self.nodes)
        return last

    def _destination(
        self, node: fx.Node, last: dict[fx.Node, int], apart: Sequence[fx.Node] = ()
    ) -> str:
        """The name of the memory that an operation writes into.

        It may be that of an operand which is read here for the last time: the operations are
        elementwise, so each element is read before it is written.
        """
        now, dtype = self.order[node], self.values[node].dtype
        taken = {
            memory for owner, memory in self.memory.items() if last[owner] > now or owner in apart
        }
        for result, place in self.trace.results:
            target = self.trace.lane[place].name
            ends_there = result is node or last[node] == self.order.get(result)
            fits = self.values[self.trace.lane[place]].dtype == dtype
            if ends_there and fits and target not in taken:
                self.memory[node] = target
                return target
        self.memory[node] = self._free_scratch(dtype, taken)
        return self.memory[node]

    def _free_scratch(self, dtype: torch.dtype, taken: set[str]) -> str:
        """The name of a scratch block that is not taken."""
        names = [f"scratch_{i}" for i, one in enumerate(self.scratch) if one == dtype]
        free = [name for name in names if name not in taken]
        if not free:
            free = [f"scratch_{len(self.scratch)}"]
            self.scratch.append(dtype)
        return free[0]

    def _emit(self, node: fx.Node, last: dict[fx.Node, int]) -> None:
        value = self.values[node]
        whole = isinstance(value, Tensor) and value.shape == (self.length,)
        if whole and self.root[node] is node:
            if node.target is operator.truediv and not self._is_tensor(node.args[0]):
                self._divide_number(node, last)
                return
            call = self._with_out(node)
            if call is not None:
                self._line(node, f"{call}, out={self._destination(node, last)})")
                return
            in_place = self._written_in_place(node, last)
            if in_place is not None:
                self._line(node, in_place)
                return
            self.allocating.append(str(getattr(node.target, "__name__", node.target)))
        self._line(node, statement(node, self.namespace))

    def _written_in_place(self, node: fx.Node, last: dict[fx.Node, int]) -> str | None:
        """An operation that has no ``out=``, as a method that writes into its destination."""
        method = node.target if node.op == "call_method" else None
        if method in _COPIES or node.target is torch.clone:
            if not self._are_alike(node, node.args[0]):
                return None
            return f"{self._destination(node, last)}.copy_({self._text(node.args[0])})"
        if node.target is torch.fill and len(node.args) == 2:
            return f"{self._destination(node, last)}.fill_({self._text(node.args[1])})"
        if method == "masked_fill" and len(node.args) == 3:
            own, mask, fill = node.args
            if not isinstance(own, fx.Node) or not isinstance(mask, fx.Node):
                return None
            where = self._destination(node, last, [self.root[mask]])
            filled = f"masked_fill_({mask.name}, {self._text(fill)})"
            if where != self.memory.get(self.root[own]):
                filled = f"copy_({own.name}).{filled}"
            return f"{where}.{filled}"
        return None

    def _text(self, value: Any) -> str:
        return argument(value, self.namespace)

    def _are_alike(self, node: fx.Node, source: Any) -> bool:
        """Whether a value and its source have the same shape, and lie on the same device."""
        if not self._is_tensor(source):
            return False
        made, given = self.values[node], self.values[source]
        return bool(made.shape == given.shape and made.device == given.device)

    def _is_tensor(self, argument: Any) -> bool:
        return isinstance(argument, fx.Node) and isinstance(self.values[argument], Tensor)

    def _divide_number(self, node: fx.Node, last: dict[fx.Node, int]) -> None:
        """``number / tensor`` is two operations in torch, and is rounded twice."""
        number, tensor = map(self._text, node.args)
        where = self._destination(node, last)
        reciprocal = self.namespace.name(torch.reciprocal, "reciprocal")
        self._line(node, f"{reciprocal}({tensor}, out={where}).mul_({number})")

    def _line(self, node: fx.Node, text: str) -> None:
        self.lines.append(f"{node.name} = {text}")

    def _with_out(self, node: fx.Node) -> str | None:
        """The call of torch's function that does this with ``out=``, up to that; None if none does.

        That is remembered for lanes of any values, so it is tried on none of the caller's.
        """
        target: Any = node.target
        args = node.args
        if node.op == "call_method":
            # This one's method takes its arguments in another order than the function.
            target = None if target == "where" else getattr(torch, str(target), None)
        elif target in REFLECTED and not self._is_tensor(args[0]):
            target, args = REFLECTED[target], args[::-1]
        target = OPERATORS.get(target, target)
        if not callable(target) or "out" in node.kwargs:
            return None
        tried = self._tried(node)
        given = fx.map_arg((args, node.kwargs), tried.__getitem__)
        out = torch.empty_like(self.values[node])
        try:
            made = target(*given[0], **given[1], out=out)
            wanted = called(node, tried)
        except (TypeError, RuntimeError, ValueError, IndexError):
            return None
        if made is not out or not (out.is_meta or same_bits(out, wanted)):
            return None
        name = self.namespace.name(target, target.__name__)
        texts = [self._text(one) for one in args]
        texts += [f"{key}={self._text(value)}" for key, value in node.kwargs.items()]
        return f"{name}({', '.join(texts)}"

    def _tried(self, node: fx.Node) -> dict[fx.Node, Any]:
        """Values to try an operation on, for each node that it takes; whole numbers as they are."""
        found: dict[fx.Node, Any] = {}
        for k, source in enumerate(node.all_input_nodes):
            value = self.values[source]
            if isinstance(value, Tensor) and value.is_floating_point():
                value = varied(value, k, value.numel()).reshape(value.shape)
            elif isinstance(value, float):
                value = 0.1 + k / 7
            found[source] = value
        return found
