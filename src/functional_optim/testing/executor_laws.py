"""Laws of executors: whichever runs a chain, the result is the reference's.

Bit for bit where an executor runs the rule's own operations. Where a compiler or a hand-written
kernel rounds otherwise, one step lies within what the reference itself gives when gradient and
state are moved by a few units in the last place; so the bound holds for rules that jump, too, as
those that take signs do.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import optree
import torch
from torch import Tensor

from functional_optim.core.hyper import is_plain
from functional_optim.core.state import State
from functional_optim.kernels import is_measured
from functional_optim.kernels.errors import UntraceableError
from functional_optim.optimizer import Optimizer
from functional_optim.testing.compare import require_same, snapshot
from functional_optim.testing.compiled_executor import COMPILED
from functional_optim.testing.compute_dtype import coarsest_of
from functional_optim.testing.runs import Grads, Params, Run, replay_steps
from functional_optim.testing.subject import Subject

MOVED = 8.0
"""By how many units in the last place the inputs of a step are moved to find what it spans."""

MOVED_ON_DEVICES = 512.0
"""The same on accelerators: torch's fused Adam for CUDA takes 1 - beta in float32, which is off by
up to 2**-25 / (1 - beta) of itself."""

ULPS = 8.0
"""How far a result may lie outside of that, in units in the last place of the largest magnitude."""


def script_is_reference(subject: Subject, run: Run) -> None:
    """``optimizer.script(params).step(gradients)`` gives what the reference gives, bit for bit.

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
    """The chain's operations over blocks give what they give over whole tensors, bit for bit."""
    _same_as_reference("blocked", subject, run)


def any_history(subject: Subject, run: Run) -> None:
    """Steps of other runs before this one do not change its result, whatever their values."""
    optimizer = _unknown(subject.build(run))
    want = replay_steps(optimizer, run.params(), run.grads())
    other = optimizer.using(executor="blocked")
    zeros = {name: torch.zeros_like(param) for name, param in run.params().items()}
    other.update(zeros, {name: zero.clone() for name, zero in zeros.items()}, other.init(zeros))
    got = replay_steps(other, run.params(), run.grads())
    require_same("blocked, after a step of zeros, and reference", got, want)


def auto_is_reference(subject: Subject, run: Run) -> None:
    """``auto`` gives what the reference gives.

    Bit for bit on the CPU; elsewhere within the stated bound.
    """
    _as_reference("auto", subject, run)


def compiled_is_reference(subject: Subject, run: Run) -> None:
    """The chain as a compiled loop gives what the reference gives.

    Bit for bit on the CPU; elsewhere, where torch.compile makes it, within the stated bound.
    Where the chain has no such loop, torch's operations over blocks stand in for it. Whether it has
    one, and if not why, ``optimizer.explain(params)`` says.
    """
    _as_reference(COMPILED, subject, run)


def traced_is_close(subject: Subject, run: Run) -> None:
    """``update`` as one graph of torch.compile gives what it gives in Python.

    Within the stated bound: step counts are tensors there, so coefficients are rounded otherwise.
    """
    optimizer, params = subject.build(run), run.params()
    torch.compiler.reset()  # a graph of each optimizer, and none of the last ones
    traced = torch.compile(optimizer.update, fullgraph=True, backend="eager")
    state = optimizer.init(params)
    for grads in run.grads():
        want = optimizer.update(params, grads, state)
        got = traced(params, grads, state)
        spanned = [want, *_moved_steps(optimizer, params, grads, state)]
        _require_spanned("traced", got, spanned, (params, state))
        params, state = want


def bound_is_reference(subject: Subject, run: Run) -> None:
    """Parameters in flat buffers are stepped as they are one by one.

    Bit for bit, unless something is measured: a sum is rounded in the order in which it is taken.
    For optimizers with one chain for all leaves.
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
    """Steps whose numbers stand on the device, as CUDA graphs need them, give what Python's give.

    Within the stated bound, for optimizers with one chain for all leaves, whose coefficients can be
    computed there.
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
            return  # it says so before the first step
        bound.step(grads)
        spanned = [want, *_moved_steps(optimizer, params, grads, state)]
        # On accelerators, what is computed in fewer digits is rounded by other kernels, too.
        coarsest = None if run.device == "cpu" else coarsest_of(optimizer, run)
        _require_spanned("capturable", (stepped, bound.state), spanned, (params, state), coarsest)
        params, state = want


_COUNT = itertools.count(1)


def _unknown(optimizer: Optimizer) -> Optimizer:
    """Return the chain under new names, for which executors have nothing cached."""
    number = next(_COUNT)
    links = tuple(
        link._replace(stage=replace(link.stage, name=f"{link.stage.name} ({number})"))
        for link in optimizer.links
    )
    return replace(optimizer, links=links)


def _as_reference(executor: str, subject: Subject, run: Run) -> None:
    """On accelerators, kernels of others and compilers stand in, which round otherwise."""
    holds = _same_as_reference if run.device == "cpu" else _close_to_reference
    holds(executor, subject, run)


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
    """Step by step, each from where the reference is."""
    optimizer, params = subject.build(run), run.params()
    other = optimizer.using(executor=executor)
    state = optimizer.init(params)
    by = MOVED if run.device == "cpu" else MOVED_ON_DEVICES
    for grads in run.grads():
        want = optimizer.update(params, grads, state)
        spanned = [want, *_moved_steps(optimizer, params, grads, state, by)]
        got = other.update(params, grads, state)
        _require_spanned(executor, got, spanned, (params, state))
        written = snapshot((params, state))
        other.update_(written[0], grads, written[1])
        _require_spanned(f"{executor} in place", written, spanned, (params, state))
        params, state = want


def _moved_steps(
    optimizer: Optimizer, params: Params, grads: Grads, state: State, by: float = MOVED
) -> Iterator[tuple[Params, State]]:
    """The reference's step from inputs that are moved by a few units in the last place."""
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


def _require_spanned(
    executor: str,
    got: Any,
    spanned: list[Any],
    before: Any,
    coarsest: torch.dtype | None = None,
) -> None:
    """Every element lies between the least and the greatest of ``spanned``, or just outside."""
    paths, leaves, _ = optree.tree_flatten_with_path(got)
    olds = optree.tree_leaves(before)
    columns = [optree.tree_leaves(one) for one in spanned]
    for place, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
        # A count that stands on the device may be one of the host elsewhere.
        several = torch.stack([column[place].to(leaf.device) for column in columns])
        if leaf.dtype == torch.int64:
            assert torch.equal(leaf, several[0]), f"{executor}: {path} differs"
            continue
        wide = several.double()
        unknown = wide.isnan()  # a rule that takes a root may have none a few units away
        # A sum that cancels keeps the errors of what it was made of.
        sizes = [wide.nan_to_num(0.0).abs(), olds[place].double().abs().to(leaf.device)]
        largest = max((float(size.max()) for size in sizes if size.numel()), default=0.0)
        room = 1.0  # of the codes of a quantised state
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
