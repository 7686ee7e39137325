"""The reference executor, which calls each stage in Python, leaf by leaf.

All other executors must give its results. torch.func sees each of its operations, so vmap and grad
work with it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from functional_optim._torch.compilers import has_dispatch_mode
from functional_optim._torch.derivatives import is_transforming
from functional_optim._torch.tensors import has_versions, may_be_view, version_of
from functional_optim.core.aliasing import storage_key
from functional_optim.core.bit_equality import same_bits
from functional_optim.core.dtensors import is_dtensor, redistribute_like
from functional_optim.core.hyper import is_plain
from functional_optim.core.leaf import (
    PLAIN,
    Leaf,
    Scalars,
    Stepped,
    check_kept,
    has_device_scalars,
    is_measured,
    split_at_measured,
)
from functional_optim.core.stage import Stage, block_size_of
from functional_optim.core.stage_contract import (
    call_measure,
    call_reduce,
    call_stage,
    is_raw_source,
)
from functional_optim.core.state import field_tensors, state_tensors
from functional_optim.kernels.cache import Cache
from functional_optim.kernels.chunks import (
    as_chunk,
    slice_chunk,
    tensors_of,
    why_not_flat,
    why_not_pointwise,
    with_tensors,
)
from functional_optim.kernels.errors import NotPureError
from functional_optim.kernels.executor import Executor
from functional_optim.kernels.lowering import TensorScalarMode
from functional_optim.kernels.totals import (
    sum_in_order,
    sum_tensors,
    total_of,
    try_reduce_each,
)


class _StageWalk:
    """The parameter, gradient and new states of a leaf while its stages run."""

    __slots__ = ("grad", "param", "raw", "states")

    def __init__(self, leaf: Leaf) -> None:
        self.param = leaf.param
        self.grad = self.raw = leaf.grad
        self.states: list[Any] = []

    def run(
        self, stages: Sequence[Stage], segment: range, leaf: Leaf, totals: Sequence[Tensor]
    ) -> None:
        """Run the stages of a segment. Only its first stage may be measured, by the last total."""
        for index in segment:
            stage = stages[index]
            state, coefficients = leaf.states[index], leaf.coefficients[index]
            sums = [totals[-1].to(self.grad.device)] if is_measured(stage) else []
            self.param, self.grad, state = call_stage(
                stage, self.param, self.grad, state, coefficients, sums, self.raw
            )
            if is_raw_source(stage):
                self.raw = self.grad
            self.states.append(state)


def _run_stages(
    stages: Sequence[Stage],
    leaves: Sequence[Leaf],
    measured: Sequence[Tensor],
    finish: Callable[[Leaf, _StageWalk], None],
) -> None:
    """Run all stages for all leaves, and call ``finish`` for each leaf.

    A chain without a total in the middle finishes one leaf before it starts the next leaf, so that
    temporaries are freed.
    """
    walks = [_StageWalk(leaf) for leaf in leaves]
    totals = list(measured)
    parts = split_at_measured(stages)
    seen = 0
    for part in parts:
        first = stages[part.start]
        if is_measured(first):
            seen += 1
            if len(totals) < seen:
                totals.append(_total(first, leaves, [walk.grad for walk in walks]))
        for position, (leaf, walk) in enumerate(zip(leaves, walks, strict=True)):
            walk.run(stages, part, leaf, totals[:seen])
            if part is parts[-1]:
                finish(leaf, walk)
                walks[position] = None  # type: ignore[call-overload]  # frees its temporaries


def _walked(stages: Sequence[Stage], leaf: Leaf, measured: Sequence[Tensor]) -> _StageWalk:
    """Run stages for one leaf, with the totals of all measured stages."""
    found: list[_StageWalk] = []
    _run_stages(stages, [leaf], measured, lambda _, walk: found.append(walk))
    return found[0]


def write(leaf: Leaf, stepped: Stepped) -> None:
    """Copy the results of a step into the leaf."""
    check_kept(leaf, stepped)
    targets = [leaf.param, *state_tensors(leaf.states)]
    values = [stepped.param, *state_tensors(stepped.states)]
    for target, value in zip(targets, _copy_aliased(values, targets), strict=True):
        target.copy_(redistribute_like(value, target))


def _copy_aliased(values: list[Tensor], targets: list[Tensor]) -> list[Tensor]:
    """Return the values, with a copy of each value that a write to the targets may change."""
    try:
        begins = {target.data_ptr() for target in targets}
        suspects = [
            may_be_view(value) or value.data_ptr() in begins or value.is_inference()
            for value in values
        ]
    except RuntimeError:  # inside a transform of torch.func
        return [v if v is t else v.clone() for v, t in zip(values, targets, strict=True)]
    return [
        value.clone()
        if suspect and value is not own and storage_key(value) in map(storage_key, targets)
        else value
        for value, own, suspect in zip(values, targets, suspects, strict=True)
    ]


def _functions_for(leaves: Sequence[Leaf]) -> AbstractContextManager[object]:
    """Return the context of the stages: a mode if coefficients are 0-d tensors on the device."""
    return TensorScalarMode() if has_device_scalars(leaves) else nullcontext()


def _total(stage: Stage, leaves: Sequence[Leaf], gradients: list[Tensor]) -> Tensor:
    return total_of(stage, gradients, on_device=has_device_scalars(leaves))


MAX_KINDS = 512
"""Largest number of kinds of leaves that are remembered for each chain."""

SMALL = 1 << 16
"""Largest number of elements on which a step is tried with copies of the tensors."""

_CHOICES = frozenset({bool, str, type(None)})

_CHECKED: Cache[set[Any]] = Cache()
"""Kinds of leaves that were checked, for each chain: shape, dtype, static coefficients."""


def _reduce_together(stages: Sequence[Stage], leaves: Sequence[Leaf]) -> Tensor | None:
    """Return the totals of a stage without state over leaves on CUDA; None in all other cases.

    One by one, each leaf needs several launches. On the CPU, plans reduce leaves together.
    """
    stage, first = stages[-1], leaves[0]
    if len(stages) > 1 or stage.stateful or not first.param.is_cuda:
        return None
    shared = first.coefficients[-1]
    for own in {id(leaf.coefficients): leaf.coefficients[-1] for leaf in leaves}.values():
        if not is_plain(own) or own != shared:
            return None
    params, grads = [leaf.param for leaf in leaves], [leaf.grad for leaf in leaves]
    columns = try_reduce_each(stage, params, grads, first.states[-1], shared)
    if columns is None:
        return None
    return torch.stack(list(map(sum_in_order, columns))).to(first.param.device)


def _try_step(stages: Sequence[Stage], leaf: Leaf) -> None:
    """Step a leaf, without a result. Raise RuntimeError if it does not fit, or a rule is not pure.

    A small leaf is copied before, so that a rule that writes to its arguments changes nothing.
    Copies of a large leaf would take more memory than its step. Under a dispatch mode, tensors may
    have no values to compare.
    """
    given = tensors_of(leaf)
    is_copied = leaf.param.numel() <= SMALL
    tried = [one.clone() for one in given] if is_copied else given
    before = list(map(_writes_to, tried))
    _run_stages(
        [*stages],
        [with_tensors(leaf, tried)],
        [],
        lambda one, walk: check_kept(one, Stepped(walk.param, tuple(walk.states))),
    )
    if has_dispatch_mode():
        return
    fields = [
        f"the state {name}"
        for state in leaf.states
        for name, value in zip(getattr(state, "_fields", ()), state, strict=True)
        for _ in field_tensors(value)
    ]
    for name, one, own, writes in zip(
        ["param", "grad", *fields], tried, given, before, strict=True
    ):
        if type(one) in PLAIN and (_writes_to(one) != writes or not _has_bits_of(one, own)):
            raise NotPureError(
                f"{', '.join(stage.name for stage in stages)}: a rule wrote to {name}, which is an "
                "argument, and a rule is a pure function: return new tensors, as by "
                "`param - lr * grad` in place of `param.sub_(lr * grad)`, or clone() first"
                f"{'' if is_copied else f'. {leaf.name!r} has been changed by it: load it again'}"
            )


def _part_to_try(stages: Sequence[Stage], leaf: Leaf) -> Leaf:
    """Return the first elements of a large leaf; the leaf if its stages need all of it.

    A step of the whole leaf would take memory for temporaries, which most kernels do not need.
    """
    if leaf.param.numel() <= SMALL or has_dispatch_mode() or why_not_pointwise(stages):
        return leaf
    chunk = None if why_not_flat(stages, leaf) else as_chunk(leaf)
    if chunk is None:
        return leaf
    block_size = block_size_of(stages)
    length = max(SMALL // block_size, 1) * block_size
    return with_tensors(chunk, slice_chunk(tensors_of(chunk), block_size, 0, length))


def _fits(stages: Sequence[Stage], part: Leaf) -> bool:
    """Return True if a part of a leaf can be stepped; the whole leaf gives the error if not."""
    try:
        _try_step(stages, part)
    except NotPureError:
        raise
    except Exception:  # noqa: BLE001  any error of a rule
        return False
    return True


def _writes_to(tensor: Tensor) -> int:
    """Return autograd's number of writes to a tensor; 0 if it has none."""
    return version_of(tensor) if has_versions and not tensor.is_inference() else 0


def _has_bits_of(copy: Tensor, given: Tensor) -> bool:
    """Return True if a copy still has the values of a tensor.

    Autograd does not count writes through ``.data``.
    """
    if copy is given or copy.is_meta:
        return True
    pair = [one.resolve_conj().resolve_neg() for one in (copy, given)]
    return same_bits(*[torch.view_as_real(one) if one.is_complex() else one for one in pair])


class ReferenceExecutor(Executor):
    """Executor that calls the stages of a chain in order, in Python."""

    exact = True
    takes_dtensors = True

    def taking(self, scalars: Scalars) -> Executor | None:
        return self

    def update(
        self, stages: Sequence[Stage], leaves: Sequence[Leaf], measured: Sequence[Tensor]
    ) -> list[Stepped]:
        results: list[Stepped] = []
        with _functions_for(leaves):
            _run_stages(
                stages,
                leaves,
                measured,
                lambda leaf, walk: results.append(Stepped(walk.param, tuple(walk.states))),
            )
        return results

    def update_(
        self, stages: Sequence[Stage], leaves: Sequence[Leaf], measured: Sequence[Tensor]
    ) -> None:
        with torch.no_grad(), _functions_for(leaves):
            _run_stages(
                stages,
                leaves,
                measured,
                lambda leaf, walk: write(leaf, Stepped(walk.param, tuple(walk.states))),
            )

    def require(self, stages: Sequence[Stage], leaves: Sequence[Leaf]) -> None:
        """Step one leaf of each new kind, and discard the result.

        So a rule raises its errors about shapes and dtypes before anything is written. Of a large
        leaf of a pointwise chain, only the first elements are stepped.

        Raises:
            RuntimeError: a step changes a shape or dtype, or a rule writes to its arguments. An
                error of a rule is raised unchanged.
        """
        if is_transforming():
            return
        tried = _CHECKED.get_or_make(tuple(stages), set)
        new: dict[Any, Leaf] = {}
        choices: dict[int, Any] = {}
        for leaf in leaves:
            made = leaf.coefficients
            if id(made) not in choices:
                choices[id(made)] = [one for own in made for one in own if type(one) in _CHOICES]
            key = leaf.param.shape, leaf.param.dtype, *choices[id(made)]
            if key not in tried and leaf.scalars is Scalars.HOST and not is_dtensor(leaf.param):
                new.setdefault(key, leaf)
        if not new:
            return
        with torch.no_grad():
            for leaf in new.values():
                part = _part_to_try(stages, leaf)
                if part is leaf or not _fits(stages, part):
                    _try_step(stages, leaf)
        if len(tried) + len(new) > MAX_KINDS:
            tried.clear()
        tried.update(new)

    def reduce(
        self, stages: Sequence[Stage], leaves: Sequence[Leaf], measured: Sequence[Tensor]
    ) -> Tensor:
        """Return the totals of the last stage over the leaves: a float64 vector."""
        together = _reduce_together(stages, leaves)
        if together is not None:
            return together
        total: Tensor | None = None
        for parts in self.addends(stages, leaves, measured):
            one = torch.stack([part.to(torch.float64).reshape(()) for part in parts])
            total = one if total is None else total + one.to(total.device)
        assert total is not None
        return total

    def addends(
        self, stages: Sequence[Stage], leaves: Sequence[Leaf], measured: Sequence[Tensor]
    ) -> Iterator[tuple[Tensor, ...]]:
        """Yield the addends of each leaf to the totals: tensors of one element."""
        last = stages[-1]
        for leaf in leaves:
            param, grad = leaf.param, leaf.grad
            if len(stages) > 1:
                walk = _walked(stages[:-1], leaf, measured)
                param, grad = walk.param, walk.grad
            yield call_reduce(last, param, grad, leaf.states[-1], leaf.coefficients[-1])

    def measure(
        self, stages: Sequence[Stage], leaves: Sequence[Leaf], measured: Sequence[Tensor]
    ) -> Tensor:
        wanted = [i for i, stage in enumerate(stages) if is_measured(stage)][len(measured)]
        with _functions_for(leaves):
            if wanted == 0:
                return _total(stages[0], leaves, [leaf.grad for leaf in leaves])
            found: list[Tensor] = []
            stage, before = stages[wanted], stages[:wanted]
            if not all(leaf.param.is_cpu for leaf in leaves):
                _run_stages(before, leaves, measured, lambda _, walk: found.append(walk.grad))
                return _total(stage, leaves, found)
            _run_stages(  # at once, so that a gradient is freed before the next leaf
                before,
                leaves,
                measured,
                lambda _, walk: found.append(call_measure(stage, walk.grad)),
            )
            return sum_tensors(found)
