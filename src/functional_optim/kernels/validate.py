"""A graph tried on a few elements: what its values are, which share memory, what is wrong with it.

Whatever runs a graph in pieces trusts a rule that says it is pointwise. Here that is tested.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from functional_optim.core.aliasing import storage_of
from functional_optim.core.leaf import Leaf
from functional_optim.core.stage import Stage
from functional_optim.kernels.chunks import tensors_of, with_tensors
from functional_optim.kernels.errors import NotPointwiseError, UntraceableError
from functional_optim.kernels.graph import Trace
from functional_optim.kernels.reference import ReferenceExecutor

EXAMPLE_ELEMENTS = 512
WHOLE = 24
CUT = 11
MATRIX = (4, 6)
"""A pointwise graph gives the same for WHOLE elements in a matrix."""
"""A pointwise graph gives the same for elements from CUT on, whether those before are there or not.
Both lengths are odd for a kernel that takes elements by the vector."""
ULPS = 64.0
"""How far a kernel may round by where an element stands."""

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Whole numbers of so many bytes."""


class Validated(NamedTuple):
    """Results of a graph on an example."""

    values: dict[fx.Node, Any]
    """The value of every node."""
    root: dict[fx.Node, fx.Node]
    """For every node, the one that its memory belongs to; itself, if it is no view."""


def examples(chunk: Sequence[Tensor], block_size: int) -> list[Tensor]:
    """Copies of the first elements of a chunk; the same blocks of tensors that have one per block.

    What is found out by them is kept for chunks of any length. Of one element, everything looks
    pointwise, and of none nothing can be told: short chunks are repeated. Of blocks there are whole
    ones only, for a chunk may end within one.

    Args:
        chunk: its tensors, the parameter first.
        block_size: how many elements are a block.
    """
    total = chunk[0].numel()
    if block_size == 1 and total < EXAMPLE_ELEMENTS:
        return [_repeated(tensor) for tensor in chunk]
    if 1 < total < block_size:
        return [_repeated(t, block_size) if t.numel() == total else t.clone() for t in chunk]
    groups = max(1, min(EXAMPLE_ELEMENTS, total) // block_size)
    return [t[: groups * block_size if t.numel() == total else groups].clone() for t in chunk]


def _repeated(tensor: Tensor, count: int = EXAMPLE_ELEMENTS) -> Tensor:
    """Enough elements for an example; zeros, where it has none."""
    given = tensor if tensor.numel() else tensor.new_zeros(1)
    return given.repeat(-(-count // given.numel()))[:count].clone()


def validate(
    trace: Trace, chunk: Sequence[Tensor], scalar_args: Sequence[Any], *, pointwise: bool
) -> Validated:
    """Evaluate a graph on examples.

    Args:
        trace: of a pointwise chain.
        chunk: what :func:`examples` gave.
        scalar_args: the scalar arguments of some step.
        pointwise: whether each element is on its own (and not in blocks of several).

    Raises:
        UntraceableError: a result of another shape or dtype than what it is to replace.
        NotPointwiseError: the graph looks at more than one element at a time.
    """
    values = dict(_placeholders(trace, chunk, scalar_args))
    for node in _operations(trace):
        values[node] = called(node, values)
        if pointwise:
            _require_whole(node, values, chunk[0].numel())
    for node, place in trace.results:
        require_kept(trace.chunk[place].name, values[node], chunk[place])
    if pointwise and chunk[0].device.type != "meta":
        _require_pointwise(trace, chunk, scalar_args)
    owner: dict[int, fx.Node] = {}
    root: dict[fx.Node, fx.Node] = {}
    for node in trace.graph.nodes:
        value = values[node]
        first = value[0] if isinstance(value, (tuple, list)) and value else value
        is_tensor = isinstance(first, Tensor)
        root[node] = owner.setdefault(storage_of(first), node) if is_tensor else node
    return Validated(values, root)


def last_uses(trace: Trace, root: dict[fx.Node, fx.Node]) -> dict[fx.Node, int]:
    """At which operation each value, or a view of it, is made or read for the last time.

    Args:
        trace: the graph.
        root: for each node, the one that its memory belongs to.

    Returns:
        The place among the operations; behind them all for what a step changes.
    """
    nodes = _operations(trace)
    last = dict.fromkeys(trace.graph.nodes, -1)
    for place, node in enumerate(nodes):
        for source in (node, *node.all_input_nodes):
            last[root[source]] = place
    for node, _ in trace.results:
        last[root[node]] = len(nodes)
    return last


def evaluate(trace: Trace, chunk: Sequence[Tensor], scalar_args: Sequence[Any]) -> list[Tensor]:
    """Evaluate a graph on a chunk, operation by operation, in the order of its results."""
    values = dict(_placeholders(trace, chunk, scalar_args))
    for node in _operations(trace):
        values[node] = called(node, values)
    return [values[node] for node, _ in trace.results]


def rounded_by_place(
    trace: Trace, chunk: Sequence[Tensor], scalar_args: Sequence[Any], piece: int
) -> str | None:
    """The operation of a pointwise graph that gives an element other bits in a short tensor.

    Args:
        trace: the graph.
        chunk: tensors of one length, many times that of a piece.
        scalar_args: the scalar arguments of some step.
        piece: how many elements a short tensor has.

    Returns:
        Its name; None if there is none.
    """
    whole = dict(_placeholders(trace, chunk, scalar_args))
    count = chunk[0].numel()

    def cut(node: fx.Node, start: int) -> Any:
        value = whole[node]
        of_elements = isinstance(value, Tensor) and value.shape == (count,)
        return value[start : start + piece].clone() if of_elements else value

    for node in _operations(trace):
        whole[node] = called(node, whole)
        if not isinstance(whole[node], Tensor) or whole[node].shape != (count,):
            continue
        for start in range(0, count, piece):
            few = called(node, {one: cut(one, start) for one in node.all_input_nodes})
            same = isinstance(few, Tensor) and few.shape == cut(node, start).shape
            if same and not bool(((few == cut(node, start)) | few.isnan()).all()):
                return node.name
    return None


def _placeholders(
    trace: Trace, chunk: Sequence[Tensor], scalar_args: Sequence[Any]
) -> list[tuple[fx.Node, Any]]:
    return [
        *zip(trace.chunk, chunk, strict=True),
        *zip(trace.scalar_args, scalar_args, strict=True),
    ]


def _operations(trace: Trace) -> list[fx.Node]:
    return [node for node in trace.graph.nodes if node.op != "placeholder"]


def called(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """Call a node's function on its arguments, by their nodes."""
    args = fx.map_arg(node.args, values.__getitem__)
    kwargs = fx.map_arg(node.kwargs, values.__getitem__)
    if node.op == "call_method":
        own, *rest = args
        return getattr(own, str(node.target))(*rest, **kwargs)
    target: Any = node.target
    return target(*args, **kwargs)


def _require_whole(node: fx.Node, values: dict[fx.Node, Any], length: int) -> None:
    """Something of another length than the chunk is no work on single elements."""
    value = values[node]
    of_elements = any(
        isinstance(values[one], Tensor) and values[one].shape == (length,)
        for one in node.all_input_nodes
    )
    if isinstance(value, Tensor) and of_elements and value.shape != (length,):
        raise NotPointwiseError(
            f"a stage of this chain says that it is pointwise, but {node.name} makes a tensor "
            f"of shape {tuple(value.shape)} of {length} elements, so it looks at more "
            "than one at a time; give that stage kind='per_matrix'"
        )


def require_kept(name: str, made: Any, old: Tensor) -> None:
    """A step keeps every shape and dtype.

    Raises:
        UntraceableError: this one does not.
    """
    if isinstance(made, Tensor) and made.shape == old.shape and made.dtype == old.dtype:
        return
    what = f"{tuple(made.shape)} of {made.dtype}" if isinstance(made, Tensor) else repr(made)
    raise UntraceableError(
        f"a rule made of {name}, {tuple(old.shape)} of {old.dtype}, something else: {what}"
    )


_OTHER_IN_A_MATRIX = (
    "a stage of this chain says that it is pointwise, but it makes of a matrix something else than "
    "of its elements one after the other; give that stage kind='per_matrix', or give its rule what "
    "it reads of the shape as a hyper-parameter, by override()"
)


def _require_pointwise(trace: Trace, chunk: Sequence[Tensor], scalar_args: Sequence[Any]) -> None:
    """Cut in two, every operation gives what it gives on the whole."""
    whole = dict(_placeholders(trace, [varied(t, k) for k, t in enumerate(chunk)], scalar_args))
    part: dict[fx.Node, Any] = {}

    def cut(node: fx.Node) -> Any:
        value = whole[node]
        of_elements = isinstance(value, Tensor) and value.shape == (WHOLE,)
        return value[CUT:] if of_elements else part.get(node, value)

    for node in _operations(trace):
        whole[node] = called(node, whole)
        part[node] = called(node, {one: cut(one) for one in node.all_input_nodes})
        if not _close(part[node], cut(node)):
            raise NotPointwiseError(
                f"a stage of this chain says that it is pointwise, but {node.name} makes of some "
                "elements something else when others stand before them; give that stage "
                "kind='per_matrix'"
            )
    try:
        made = evaluate(trace, [whole[one].view(MATRIX) for one in trace.chunk], scalar_args)
    except (RuntimeError, IndexError) as error:
        raise NotPointwiseError(f"{_OTHER_IN_A_MATRIX}: it takes none ({error})") from error
    for (node, _), one in zip(trace.results, made, strict=True):
        if not _close(one.reshape(-1), whole[node]):
            raise NotPointwiseError(f"{_OTHER_IN_A_MATRIX} in {node.name}")


def require_pointwise_stages(
    stages: Sequence[Stage], chunk: Leaf, totals: Sequence[Tensor]
) -> None:
    """Check that a chain without a graph is pointwise, by calling its stages.

    Raises:
        NotPointwiseError: the chain looks at more than one element at a time.
    """
    if chunk.param.device.type == "meta":
        return
    whole = with_tensors(chunk, [varied(t, k) for k, t in enumerate(tensors_of(chunk))])
    part = with_tensors(whole, [tensor[CUT:].clone() for tensor in tensors_of(whole)])
    again = with_tensors(whole, [tensor.clone() for tensor in tensors_of(whole)])
    matrix = with_tensors(whole, [one.clone().view(MATRIX) for one in tensors_of(whole)])
    devices = [chunk.param.device] if chunk.param.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        for one in (whole, again, part, matrix):
            ReferenceExecutor().update_(stages, [one], totals)
    if not all(map(_close, tensors_of(whole), tensors_of(again))):
        return  # it draws random numbers, so there is nothing to compare
    pairs = zip(tensors_of(part), tensors_of(whole), strict=True)
    if not all(_close(a, b[CUT:]) for a, b in pairs):
        raise NotPointwiseError(
            "a stage of this chain says that it is pointwise, but what it makes of some elements "
            "depends on those that stand before them; give that stage kind='per_matrix'"
        )
    pairs = zip(tensors_of(matrix), tensors_of(whole), strict=True)
    if not all(_close(a.reshape(-1), b) for a, b in pairs):
        raise NotPointwiseError(_OTHER_IN_A_MATRIX)


def varied(like: Tensor, index: int, count: int = WHOLE) -> Tensor:
    """Numbers of both signs that need every bit of their dtype, no two neighbours alike.

    They are the same in every process and for every caller: what is found out by them and then
    remembered for all does not depend on who came first.
    """
    place = torch.arange(1, count + 1, dtype=torch.float64, device=like.device)
    return ((place * (math.sqrt(2.0) + index / math.pi)) % 3.6 - 1.7).to(like.dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors of numbers or flags are equal, where each NaN equals any NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    # Words, for where denormals are flushed two of them are equal; and as one comparison, which is
    # nearly always enough, and eight times as fast.
    words = _WORDS[a.itemsize]
    ours, theirs = a.view(words), b.view(words)
    if torch.equal(ours, theirs):
        return True
    return bool(((ours == theirs) | (a.isnan() & b.isnan())).all())


def _close(a: Any, b: Any) -> bool:
    """Equal up to rounding; values that are no tensors, such as sizes, may differ."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return True
    if a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    finfo = torch.finfo(a.dtype)
    return torch.allclose(
        a.double(), b.double(), rtol=ULPS * finfo.eps, atol=finfo.tiny, equal_nan=True
    )
