"""List programs: the graph of a chain as straight-line Python over lists of tensors.

An operation becomes one call of a foreach function if a trial gives equal bits. The call is in
place if no later operation reads its first operand. ``where`` with a mask that a scalar fills
copies one of two lists. All other operations are comprehensions. A name is deleted after its last
use, so that torch reuses the memory of temporaries.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from functional_optim._torch.operators import foreach_clone, foreach_copy_, list_function
from functional_optim.core.bit_equality import same_bits
from functional_optim.kernels.expressions import (
    COPIES,
    OPERATORS,
    REFLECTED,
    Namespace,
    argument,
    statement,
)
from functional_optim.kernels.graph import Trace
from functional_optim.kernels.validate import (
    EXAMPLE_ELEMENTS,
    call_node,
    examples,
    last_uses,
    repeat,
    trial_numbers,
    validate,
)

_TENSORS = {
    **dict.fromkeys(("abs", "exp", "log", "neg", "reciprocal", "rsqrt", "sign", "sqrt"), 1),
    **dict.fromkeys(("add", "sub", "mul", "div", "maximum", "minimum", "lerp", "pow"), 2),
    **dict.fromkeys(("clamp_max", "clamp_min"), 2),
    **dict.fromkeys(("addcmul", "addcdiv"), 3),
    **dict.fromkeys(("bitwise_and", "bitwise_left_shift", "bitwise_or"), 2),
    **dict.fromkeys(("bitwise_right_shift", "bitwise_xor", "clamp", "masked_fill"), 2),
}
"""Operations with an in-place form, and the largest number of tensors that a call takes. Torch has
foreach functions for most of them."""

_SCALES = frozenset({"mul", "div"})
"""Operations whose second argument may be a 0-d tensor on the same device."""

SHORTER = 300
"""Number of elements of the second tensor in a trial."""


def scalar_value(scalar: Tensor) -> float | Tensor:
    """Return a 0-d tensor as an argument of a foreach function: on the CPU, its number.

    On an accelerator, reading the number would wait for the device.
    """
    return scalar.item() if scalar.is_cpu else scalar


class ListProgram(NamedTuple):
    """Program of a chain for lists of tensors."""

    step: Any
    """``step(lists of the tensors of leaves, scalar arguments)`` steps in place; ``step.text`` is
    its source."""
    is_one_call: bool
    """True if the step is one call, which writes to its first list."""
    temporaries: int
    """Number of tensors that a step allocates for each leaf."""


class _Call(NamedTuple):
    """Call of a foreach function."""

    name: str
    args: tuple[Any, ...]
    """The in-place function writes to the first argument."""
    kwargs: dict[str, Any]


class _Selection(NamedTuple):
    """``torch.where(torch.full_like(x, condition), yes, no)``: one of two lists."""

    mask: fx.Node
    condition: fx.Node
    yes: fx.Node
    no: fx.Node


def list_program(
    trace: Trace, chunk: Sequence[Tensor], scalar_args: Sequence[Any], block_size: int
) -> ListProgram:
    """Return the program of a pointwise graph, tried on the first elements of a chunk.

    ``block_size`` is the number of elements that the chain computes together.
    """
    with torch.no_grad():
        few = examples(chunk, block_size)
        values, root = validate(trace, few, scalar_args)
        return _Writer(trace, values, root, few[0].shape).write()


class _Writer:
    """Writer of one program.

    Args:
        values: the value of each node in an example.
        root: for each node, the node that owns its memory.
        shape: of the tensors of the example.
    """

    def __init__(
        self,
        trace: Trace,
        values: dict[fx.Node, Any],
        root: dict[fx.Node, fx.Node],
        shape: torch.Size,
    ) -> None:
        self.trace, self.values, self.root, self.shape = trace, values, root, shape
        self.namespace = Namespace()
        self.nodes = [node for node in trace.graph.nodes if node.op != "placeholder"]
        self.order = {node: place for place, node in enumerate(self.nodes)}
        self.last = last_uses(trace, root)
        self.each = set(trace.chunk)
        """The nodes with a value for each leaf."""
        for node in self.nodes:
            if not self.each.isdisjoint(node.all_input_nodes):
                self.each.add(node)
        self.calls = {node: self._foreach_call(node) for node in self.nodes}
        self.selections = {
            node: found for node in self.nodes if (found := self._selection(node)) is not None
        }
        self.home: dict[fx.Node, fx.Node] = {}
        """For each value that is computed in the tensors of leaves, their placeholder."""
        self.allocating: list[fx.Node] = []
        """Nodes whose values have memory of their own."""

    def write(self) -> ListProgram:
        for node, place in self.trace.results:
            self._compute_in_place(node, self.trace.chunk[place])
        masks = {found.mask for found in self.selections.values()}
        unused = {mask for mask in masks if all(one in self.selections for one in mask.users)}
        named = [node for node in self.nodes if node not in unused]
        copies, ends = self._copies(), self._last_readers(named)
        lines = []
        for node in named:
            lines.append(self._line(node))
            lines += [f"del {', '.join(ends[node])}"] if ends[node] else []
        lines += copies
        heads = [node.name for node in (*self.trace.chunk, *self.trace.scalar_args)]
        body = "".join(f"    {line}\n" for line in lines) or "    pass\n"
        step = self.namespace.function(f"def step({', '.join(heads)}):\n{body}", "step")
        is_one_call = len(named) == 1 and not self.allocating and not copies
        return ListProgram(step, is_one_call, len(self.allocating))

    def _last_readers(self, named: Sequence[fx.Node]) -> dict[fx.Node, list[str]]:
        """Return, for each node, the names of the nodes that no later node or copy reads."""
        found: dict[fx.Node, list[str]] = {node: [] for node in named}
        kept = {node for node, _ in self.trace.results}
        for node in named:
            if node not in kept:
                readers = [node, *(one for one in node.users if one in found)]
                found[max(readers, key=self.order.__getitem__)].append(node.name)
        return found

    def _is_list(self, value: Any) -> bool:
        """Return True if a node has a number for each element of each leaf."""
        if not isinstance(value, fx.Node) or value not in self.each:
            return False
        own = self.values[value]
        return isinstance(own, Tensor) and own.shape == self.shape

    # -------------------------------------------------------------------------- foreach functions

    def _foreach_call(self, node: fx.Node) -> _Call | None:
        """Return the foreach call that has a node's bits; None if there is none."""
        found = self._named_call(node)
        if found is None or not self._is_list(found.args[0]):
            return None
        if not all(map(self._is_list, self.each.intersection([node, *node.all_input_nodes]))):
            return None
        lists = [one for one in found.args if self._is_list(one)]
        if len(lists) > _TENSORS[found.name] or not set(found.kwargs) <= {"alpha", "value"}:
            return None
        if any(map(self._is_scalar_tensor, found.kwargs.values())):
            return None
        if found.name not in _SCALES and any(map(self._is_scalar_tensor, found.args)):
            return None
        return found if self._is_equal(node, found) else None

    def _is_scalar_tensor(self, value: Any) -> bool:
        """Return True if an argument is a 0-d tensor, the same for all leaves."""
        if not isinstance(value, fx.Node) or value in self.each:
            return False
        return isinstance(self.values[value], Tensor)

    def _named_call(self, node: fx.Node) -> _Call | None:
        """Return a node as a call of an operation with a foreach function; None if it has none."""
        target, args, kwargs = node.target, node.args, dict(node.kwargs)
        if node.op == "call_method":
            name = str(target)
        elif target in REFLECTED and args and not self._is_list(args[0]):
            name, args = REFLECTED[target].__name__, args[::-1]
        else:
            name = getattr(OPERATORS.get(target, target), "__name__", "")
        if not args or name not in _TENSORS or list_function(name) is None:
            return None
        if name == "lerp" and "weight" in kwargs:
            args = (*args, kwargs.pop("weight"))
        return _Call(name, args, kwargs)

    def _is_equal(self, node: fx.Node, call: _Call) -> bool:
        """Return True if a foreach call has the node's bits, for tensors of two lengths."""
        tried = {one: self._trial(one, k) for k, one in enumerate(node.all_input_nodes)}
        shorter = {
            one: value[:SHORTER].clone() if self._is_list(one) else value
            for one, value in tried.items()
        }
        wanted = [call_node(node, tried), call_node(node, shorter)]

        def given(value: Any) -> Any:
            if self._is_list(value):
                return [tried[value].clone(), shorter[value].clone()]
            own = tried[value] if isinstance(value, fx.Node) else value
            return scalar_value(own) if isinstance(own, Tensor) else own

        try:
            for suffix in ("", "_"):
                function = list_function(call.name + suffix)
                if function is None:
                    return False
                args = list(map(given, call.args))
                made = function(*args, **{key: given(one) for key, one in call.kwargs.items()})
                if not all(map(same_bits, made or args[0], wanted)):
                    return False
        except (TypeError, RuntimeError, ValueError, IndexError):
            return False
        return True

    def _trial(self, source: fx.Node, index: int) -> Any:
        """Return the value of an input for a trial; integers keep their values."""
        value = self.values[source]
        if self._is_list(source):
            is_float = value.is_floating_point()
            return trial_numbers(value, index, EXAMPLE_ELEMENTS) if is_float else repeat(value)
        return 0.1 + index / 7 if isinstance(value, float) else value

    def _selection(self, node: fx.Node) -> _Selection | None:
        """Return a ``where`` as the selection of one of two lists; None if it is another call."""
        if node.target is not torch.where or len(node.args) != 3:
            return None
        mask, yes, no = node.args
        if not (isinstance(mask, fx.Node) and mask.target is torch.full_like):
            return None
        condition = mask.args[1] if len(mask.args) == 2 else None
        if not isinstance(condition, fx.Node) or not isinstance(self.values[condition], float):
            return None
        if not all(map(self._is_list, (node, mask, yes, no))):
            return None
        assert isinstance(yes, fx.Node), "it is a list"
        assert isinstance(no, fx.Node), "it is a list"
        kinds = {self.values[one].dtype for one in (node, yes, no)}
        is_bool = self.values[mask].dtype == torch.bool
        return _Selection(mask, condition, yes, no) if is_bool and len(kinds) == 1 else None

    # --------------------------------------------------------------------------------- statements

    def _compute_in_place(self, result: fx.Node, chunk: fx.Node) -> None:
        """Compute a result in the tensor that it replaces, if in-place calls lead to it."""
        if self._is_copy(result) and self.last[chunk] <= self.order[result]:
            self.home[result] = chunk
            return
        way, node = [result], result
        while node in self.calls and node not in self.home:
            call = self.calls[node]
            if call is None or self.root[node] is not node:
                return
            first = call.args[0]
            if not self._can_overwrite(first, node):
                return
            if first is chunk:
                self.home.update(dict.fromkeys(way, chunk))
                return
            way.append(first)
            node = first

    def _is_copy(self, node: fx.Node) -> bool:
        """Return True if a node copies the elements of another one, perhaps to another dtype."""
        if node.op != "call_method" or node.target not in COPIES or self.root[node] is not node:
            return False
        source = node.args[0]
        if not isinstance(source, fx.Node) or not self._is_list(source) or not self._is_list(node):
            return False
        return bool(self.values[source].device == self.values[node].device)

    def _can_overwrite(self, value: Any, node: fx.Node) -> bool:
        """Return True if a node may overwrite its first operand, because it reads it last."""
        if self.root[value] is not value or self.last[value] != self.order[node]:
            return False
        call = self.calls[node]
        assert call is not None
        others = [one for one in (*call.args[1:],) if isinstance(one, fx.Node)]
        return value not in others and self.values[value].dtype == self.values[node].dtype

    def _line(self, node: fx.Node) -> str:
        call = self.calls[node]
        if call is None and node in self.home:
            call = _Call("copy", (self.home[node], node.args[0]), {})
        first = None if call is None else call.args[0]
        is_own = first in self.calls and first not in self.home
        if call and (node in self.home or (is_own and self._can_overwrite(first, node))):
            return f"{self._text_of(call, '_')}; {node.name} = {self._text(first)}"
        if self.root[node] is node and isinstance(self.values[node], Tensor):
            self.allocating.append(node)
        return f"{node.name} = {self._expression(node)}"

    def _expression(self, node: fx.Node) -> str:
        call = self.calls[node]
        if node in self.selections:
            _, condition, yes, no = self.selections[node]
            clone = self.namespace.name(foreach_clone, "clone")
            return f"{clone}({yes.name} if {condition.name} else {no.name})"
        return self._comprehension(node) if call is None else self._text_of(call)

    def _text_of(self, call: _Call, suffix: str = "") -> str:
        name = call.name + suffix
        texts = [self._text(one) for one in call.args]
        texts += [f"{key}={argument(one, self.namespace)}" for key, one in call.kwargs.items()]
        return f"{self.namespace.name(list_function(name), name)}({', '.join(texts)})"

    def _text(self, value: Any) -> str:
        text = argument(value, self.namespace)
        if not self._is_scalar_tensor(value):
            return text
        return f"{self.namespace.name(scalar_value, 'scalar_value')}({text})"

    def _comprehension(self, node: fx.Node) -> str:
        """Return a node as a list comprehension over leaves, or as one value for all leaves."""
        lists = list(dict.fromkeys(one for one in node.all_input_nodes if one in self.each))
        text = statement(node, self.namespace)
        if not lists:
            return text
        names = ", ".join(one.name for one in lists)
        if len(lists) == 1:
            return f"[{text} for {names} in {names}]"
        return f"[{text} for {names} in zip({names})]"

    def _copies(self) -> list[str]:
        """Return the statements that copy results to leaves. Old values are cloned first."""
        left = [
            (node, self.trace.chunk[place])
            for node, place in self.trace.results
            if self.home.get(node) is not self.trace.chunk[place]
        ]
        clone = self.namespace.name(foreach_clone, "clone")
        copy = self.namespace.name(foreach_copy_, "copy_")
        lines, names = [], {}
        for node, _ in left:
            names[node] = node.name
            if self.root[node] in self.trace.chunk or node in self.home:
                names[node] = f"{node.name}_kept"
                lines.append(f"{names[node]} = {clone}({node.name})")
        return [*lines, *(f"{copy}({chunk.name}, {names[node]})" for node, chunk in left)]
