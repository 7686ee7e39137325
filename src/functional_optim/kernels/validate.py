"""Checks of a graph on a few elements: its values, shared memory, and errors."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from functional_optim._torch.compilers import fake_tensor_mode
from functional_optim.core.aliasing import storage_key
from functional_optim.core.hyper import map_values
from functional_optim.core.leaf import Leaf, Scalars, check_kept, is_measured
from functional_optim.core.stage import Stage
from functional_optim.kernels.chunks import tensors_of, with_tensors
from functional_optim.kernels.errors import UntraceableError
from functional_optim.kernels.graph import Trace
from functional_optim.kernels.reference import ReferenceExecutor

EXAMPLE_ELEMENTS = 512
WHOLE = 24
"""Default number of trial numbers."""

MAY_RETURN_ARGUMENT = "may_return_argument"
"""Key in the ``meta`` of a node whose result may be one of its arguments in some steps."""


class Validated(NamedTuple):
    """Values of a graph in an example."""

    values: dict[fx.Node, Any]
    """The value of each node."""
    root: dict[fx.Node, fx.Node]
    """For each node, the node that owns its memory; the node itself if it is not a view."""


def examples(chunk: Sequence[Tensor], block_size: int) -> list[Tensor]:
    """Return copies of the first elements of a chunk, and of the state of their blocks.

    The results of checks hold for chunks of any length. Checks need more than one element, so a
    short chunk is repeated. An example has full blocks only.
    """
    total = chunk[0].numel()
    if block_size == 1 and total < EXAMPLE_ELEMENTS:
        return [repeat(tensor) for tensor in chunk]
    if 1 < total < block_size:
        return [repeat(t, block_size) if t.numel() == total else t.clone() for t in chunk]
    groups = max(1, min(EXAMPLE_ELEMENTS, total) // block_size)
    return [t[: groups * block_size if t.numel() == total else groups].clone() for t in chunk]


def repeat(tensor: Tensor, count: int = EXAMPLE_ELEMENTS) -> Tensor:
    """Repeat the elements of a tensor up to a count; return zeros if the tensor is empty."""
    given = tensor if tensor.numel() else tensor.new_zeros(1)
    return given.repeat(-(-count // given.numel()))[:count].clone()


def validate(trace: Trace, chunk: Sequence[Tensor], scalar_args: Sequence[Any]) -> Validated:
    """Evaluate and check a graph on examples."""
    values = dict(_placeholders(trace, chunk, scalar_args))
    for node in _operations(trace):
        values[node] = call_node(node, values)
    for node, place in trace.results:
        _check_result(trace.chunk[place].name, values[node], chunk[place])
    owner: dict[int, fx.Node] = {}
    root: dict[fx.Node, fx.Node] = {}
    for node in trace.graph.nodes:
        value = values[node]
        first = value[0] if isinstance(value, (tuple, list)) and value else value
        is_tensor = isinstance(first, Tensor)
        root[node] = owner.setdefault(storage_key(first), node) if is_tensor else node
    return Validated(values, root)


def last_uses(trace: Trace, root: dict[fx.Node, fx.Node]) -> dict[fx.Node, int]:
    """Return the index of the operation that reads or computes each value, or a view of it, last.

    If a result may be an argument, the argument is read as long as the result. For results of the
    step the index is the number of operations.
    """
    nodes = _operations(trace)
    last = dict.fromkeys(trace.graph.nodes, -1)
    for place, node in enumerate(nodes):
        for source in (node, *node.all_input_nodes):
            last[root[source]] = place
    for node, _ in trace.results:
        last[root[node]] = len(nodes)
    for node in reversed(nodes):
        if MAY_RETURN_ARGUMENT in node.meta:
            for source in node.all_input_nodes:
                last[root[source]] = max(last[root[source]], last[root[node]])
    return last


def evaluate(trace: Trace, chunk: Sequence[Tensor], scalar_args: Sequence[Any]) -> list[Tensor]:
    """Evaluate a graph on a chunk, and return its results in order."""
    values = dict(_placeholders(trace, chunk, scalar_args))
    for node in _operations(trace):
        values[node] = call_node(node, values)
    return [values[node] for node, _ in trace.results]


def _placeholders(
    trace: Trace, chunk: Sequence[Tensor], scalar_args: Sequence[Any]
) -> list[tuple[fx.Node, Any]]:
    return [
        *zip(trace.chunk, chunk, strict=True),
        *zip(trace.scalar_args, scalar_args, strict=True),
    ]


def _operations(trace: Trace) -> list[fx.Node]:
    return [node for node in trace.graph.nodes if node.op != "placeholder"]


def call_node(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """Call the function of a node with the values of its arguments."""
    args = fx.map_arg(node.args, values.__getitem__)
    kwargs = fx.map_arg(node.kwargs, values.__getitem__)
    if node.op == "call_method":
        own, *rest = args
        return getattr(own, str(node.target))(*rest, **kwargs)
    target: Any = node.target
    return target(*args, **kwargs)


def _check_result(name: str, made: Any, old: Tensor) -> None:
    """Raise UntraceableError if a result has another shape or dtype than the old value."""
    if isinstance(made, Tensor) and made.shape == old.shape and made.dtype == old.dtype:
        return
    what = f"{tuple(made.shape)} of {made.dtype}" if isinstance(made, Tensor) else repr(made)
    raise UntraceableError(
        f"a rule returned {what} for {name}, which is {tuple(old.shape)} of {old.dtype}"
    )


def trial_numbers(like: Tensor, index: int, count: int = WHOLE) -> Tensor:
    """Return numbers of both signs that use all bits of their dtype, with different neighbours.

    The numbers are equal in all processes and for all callers. So a cached trial does not depend on
    its caller.
    """
    place = torch.arange(1, count + 1, dtype=torch.float64, device=like.device)
    return ((place * (math.sqrt(2.0) + index / math.pi)) % 3.6 - 1.7).to(like.dtype)


def check_device_scalars(stages: Sequence[Stage], leaf: Leaf) -> None:
    """Check that stages can run without reading the values of their coefficients.

    The stages are called with fake tensors, which have no values to read.
    """
    with fake_tensor_mode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        fake = with_tensors(leaf, [mode.from_tensor(tensor) for tensor in tensors_of(leaf)])
        coefficients = map_values(Tensor, mode.from_tensor, leaf.coefficients)
        total = torch.empty((), dtype=torch.float64, device=leaf.param.device)
        totals = [total] * sum(map(is_measured, stages))
        try:
            hidden = fake._replace(coefficients=coefficients, scalars=Scalars.DEVICE)
            check_kept(hidden, ReferenceExecutor().update(stages, [hidden], totals)[0])
        except Exception as error:
            line = str(error).strip().split("\n")[0]
            names = ", ".join(stage.name for stage in stages)
            raise UntraceableError(
                f"a chain ({names}) cannot be stepped with scalars on a device "
                f"({type(error).__name__}: {line}): a rule must use only functions of torch and of "
                "functional_optim.numeric, and must not branch on a scalar or on data"
            ) from error
