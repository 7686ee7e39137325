"""Laws of executors: every executor gives the result of the reference executor.

An executor that runs the operations of the rule gives equal bits. A compiler or a hand-written
kernel may round differently. Then one step must be in the range of the reference: the results that
it gives if gradient and state are changed by a few units in the last place. So the bound also holds
for rules that are not continuous, such as those that take signs.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import optree
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from functional_optim.core.hyper import is_plain
from functional_optim.core.state import State
from functional_optim.kernels import is_measured
from functional_optim.kernels.errors import UntraceableError
from functional_optim.optimizer import Optimizer
from functional_optim.testing.compare import require_same, snapshot
from functional_optim.testing.compiled_executor import COMPILED
from functional_optim.testing.runs import Grads, Params, Run, replay_steps
from functional_optim.testing.subject import Subject

MOVED = 8.0
"""Change of the inputs of a step, in units in the last place, to find the range of its results."""

MOVED_ON_DEVICES = 512.0
"""The same on accelerators: torch's fused Adam for CUDA computes 1 - beta in float32, with a
relative error of up to 2**-25 / (1 - beta)."""

ULPS = 8.0
"""Allowed distance from that range, in units in the last place of the largest magnitude."""


def script_is_reference(subject: Subject, run: Run) -> None:
    """``optimizer.script(params).step(gradients)`` gives the bits of the reference executor.

    For optimizers with one chain for all leaves.
    """
    optimizer, params = subject.build(run), run.params()
    if optimizer.is_composed or not subject.scripted:
        return
    if not all(is_plain(link.hyper) for link in optimizer.links):
        return
    program = optimizer.script(params)
    for grads in run.grads():
        program.step([grads[name] for name in run.names])
    want = replay_steps(optimizer.using(executor="reference"), run.params(), run.grads())
    require_same("script and reference", (params, program.state), want)


def blocked_is_reference(subject: Subject, run: Run) -> None:
    """The operations of the chain over pieces give the bits that they give over whole tensors."""
    _same_as_reference("blocked", subject, run)


def any_history(subject: Subject, run: Run) -> None:
    """Earlier steps of other runs do not change the result, whatever their values."""
    optimizer = _rename_stages(subject.build(run))
    want = replay_steps(optimizer, run.params(), run.grads())
    other = optimizer.using(executor="blocked")
    zeros = {name: torch.zeros_like(param) for name, param in run.params().items()}
    other.update(zeros, {name: zero.clone() for name, zero in zeros.items()}, other.init(zeros))
    got = replay_steps(other, run.params(), run.grads())
    require_same("blocked, after a step of zeros, and reference", got, want)


def auto_is_reference(subject: Subject, run: Run) -> None:
    """``auto`` gives the result of the reference executor.

    On the CPU the bits are equal. On other devices the result is within the stated bound.
    """
    _check_executor("auto", subject, run)


def compiled_is_reference(subject: Subject, run: Run) -> None:
    """A compiled loop of the chain gives the result of the reference executor.

    On the CPU the bits are equal. On other devices torch.compile builds the loop, and the result is
    within the stated bound. A chain without such a loop runs as torch's operations over pieces;
    ``optimizer.explain(params)`` gives the reason.
    """
    _check_executor(COMPILED, subject, run)


def traced_is_close(subject: Subject, run: Run) -> None:
    """``update`` as one graph of torch.compile gives the result of Python.

    The result is within the stated bound, since step counts are tensors in the graph, and
    coefficients are rounded differently.
    """
    optimizer, params = subject.build(run), run.params()
    torch.compiler.reset()  # drop the graphs of earlier optimizers
    traced = torch.compile(optimizer.update, fullgraph=True, backend="eager")
    state = optimizer.init(params)
    for grads in run.grads():
        want = optimizer.update(params, grads, state)
        got = traced(params, grads, state)
        spanned = [want, *_moved_steps(optimizer, params, grads, state)]
        _require_in_range("traced", got, spanned, (params, state))
        params, state = want


def bound_is_reference(subject: Subject, run: Run) -> None:
    """Parameters in flat buffers get the result of separate parameters.

    The bits are equal, unless a stage has a total, whose rounding depends on the order of its
    terms. For optimizers with one chain for all leaves.
    """
    optimizer = subject.build(run).using(executor="blocked")
    if optimizer.is_composed:
        return
    params = run.params()
    bound = optimizer.bind(params)
    for grads in run.grads():
        bound.step(grads)
    want = replay_steps(optimizer.using(executor="reference"), run.params(), run.grads())
    ulps = ULPS if any(map(is_measured, optimizer.stages)) else 0.0
    require_same("bound and reference", (params, bound.state), want, ulps)


def capturable_is_close(subject: Subject, run: Run) -> None:
    """Steps with scalars on the device, as for CUDA graphs, give the result of Python's scalars.

    The result is within the stated bound. For optimizers with one chain for all leaves, whose
    coefficients can be computed on the device.
    """
    optimizer, params = subject.build(run), run.params()
    if optimizer.is_composed:
        return
    state = optimizer.init(params)
    for grads in run.grads():
        want = optimizer.update(params, grads, state)
        stepped = {name: param.clone() for name, param in params.items()}
        try:
            bound = optimizer.using(executor="reference").bind(stepped, state, capturable=True)
        except (UntraceableError, ValueError):
            return  # bind refuses the optimizer
        bound.step(grads)
        spanned = [want, *_moved_steps(optimizer, params, grads, state)]
        # On accelerators other kernels also round the parts that compute in fewer digits.
        coarsest = None if run.device == "cpu" else coarsest_of(optimizer, run)
        _require_in_range("capturable", (stepped, bound.state), spanned, (params, state), coarsest)
        params, state = want


_COUNT = itertools.count(1)


def _rename_stages(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer with new stage names, for which executors have nothing cached."""
    number = next(_COUNT)
    links = tuple(
        link._replace(stage=replace(link.stage, name=f"{link.stage.name} ({number})"))
        for link in optimizer.links
    )
    return replace(optimizer, links=links)


def _check_executor(executor: str, subject: Subject, run: Run) -> None:
    """Require equal bits on the CPU. On accelerators other kernels and compilers round the step."""
    check = _same_as_reference if run.device == "cpu" else _close_to_reference
    check(executor, subject, run)


def _same_as_reference(executor: str, subject: Subject, run: Run) -> None:
    optimizer = subject.build(run)
    other = optimizer.using(executor=executor)
    want = replay_steps(optimizer, run.params(), run.grads())
    require_same(f"{executor} and reference", replay_steps(other, run.params(), run.grads()), want)
    params = run.params()
    state = other.init(params)
    for grads in run.grads():
        other.update_(params, grads, state)
    require_same(f"{executor} in place and reference", (params, state), want)


def _close_to_reference(executor: str, subject: Subject, run: Run) -> None:
    """Compare each step on an accelerator, from the parameters and state of the reference."""
    optimizer, params = subject.build(run), run.params()
    other = optimizer.using(executor=executor)
    state = optimizer.init(params)
    for grads in run.grads():
        want = optimizer.update(params, grads, state)
        spanned = [want, *_moved_steps(optimizer, params, grads, state, MOVED_ON_DEVICES)]
        got = other.update(params, grads, state)
        _require_in_range(executor, got, spanned, (params, state))
        written = snapshot((params, state))
        other.update_(written[0], grads, written[1])
        _require_in_range(f"{executor} in place", written, spanned, (params, state))
        params, state = want


def _moved_steps(
    optimizer: Optimizer, params: Params, grads: Grads, state: State, by: float = MOVED
) -> Iterator[tuple[Params, State]]:
    """Return steps of the reference from inputs changed by a few units in the last place."""
    for of_params, of_grads, of_state in (
        (0, 1, 0),
        (0, -1, 0),
        (0, 0, 1),
        (0, 0, -1),
        (0, 1, -1),
        (0, -1, 1),
        (1, 0, 0),
        (-1, 0, 0),
    ):
        yield optimizer.update(
            _moved(params, of_params * by),
            _moved(grads, of_grads * by),
            _moved(state, of_state * by),
        )


def _moved(tree: Any, by: float) -> Any:
    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dtype.is_floating_point or by == 0.0:
            return leaf
        return leaf * (1 + by * torch.finfo(leaf.dtype).eps)

    return optree.tree_map(move, tree, none_is_leaf=True)


def _require_in_range(
    executor: str, got: Any, spanned: list[Any], before: Any, coarsest: torch.dtype | None = None
) -> None:
    """Check that every element is between the least and the greatest of ``spanned``, or close.

    ``coarsest`` is the dtype of the unit of the allowed distance; None for the dtype of each
    tensor.
    """
    paths, leaves, _ = optree.tree_flatten_with_path(got)
    olds = optree.tree_leaves(before)
    columns = [optree.tree_leaves(one) for one in spanned]
    for place, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
        # A step count may be on the device in one state, and on the host in another.
        several = torch.stack([column[place].to(leaf.device) for column in columns])
        if leaf.dtype == torch.int64:
            assert torch.equal(leaf, several[0]), f"{executor}: {path} differs"
            continue
        wide = several.double()
        unknown = wide.isnan()  # a root may be NaN for inputs a few units away
        # If terms cancel, the error is relative to the terms, not to their sum.
        sizes = [wide.nan_to_num(0.0).abs(), olds[place].double().abs().to(leaf.device)]
        largest = max((float(size.max()) for size in sizes if size.numel()), default=0.0)
        room = 1.0  # one code of an integer state
        if leaf.dtype.is_floating_point:
            eps = torch.finfo(leaf.dtype if coarsest is None else coarsest).eps
            room = ULPS * eps * largest + torch.finfo(leaf.dtype).tiny
        value = leaf.double()
        least = wide.masked_fill(unknown, float("inf")).amin(0)
        greatest = wide.masked_fill(unknown, float("-inf")).amax(0)
        fine = (value >= least - room) & (value <= greatest + room)
        fine |= value.isnan() & unknown.any(0)
        if not bool(fine.all()):
            where = int((~fine).reshape(-1).nonzero()[0])
            name = ".".join(str(key) for key in path)
            raise AssertionError(
                f"{executor} and reference differ at {name!r}, element {where}: "
                f"{leaf.reshape(-1)[where].item()!r}, the reference spans "
                f"{several.reshape(len(spanned), -1)[:, where].tolist()}"
            )


class _DtypeMode(TorchFunctionMode):
    """Mode that collects the dtypes of all floating-point results."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        for one in optree.tree_leaves(found):
            if isinstance(one, Tensor) and one.is_floating_point():
                self.seen.add(one.dtype)
        return found


def coarsest_of(optimizer: Optimizer, run: Run) -> torch.dtype | None:
    """Return the dtype with the fewest digits that a step of the reference executor computes in.

    The result is None if no dtype has fewer digits than the dtype of the parameters.
    """
    by_reference = optimizer.using(executor="reference")
    params = run.params()
    state = by_reference.init(params)
    grads = {name: torch.ones_like(param) for name, param in params.items()}
    with _DtypeMode() as mode:
        by_reference.update(params, grads, state)
    found = max(mode.seen, key=_eps, default=run.dtype)
    return found if _eps(found) > _eps(run.dtype) else None


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps
