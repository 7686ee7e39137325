"""The reference executor: each stage called in Python, leaf by leaf. Every other must equal it.

It is also the one that torch.func sees through: vmap and grad work over it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from functional_optim._torch import is_transforming, may_be_view
from functional_optim.core.aliasing import storage_of
from functional_optim.core.calling import called, renews_raw
from functional_optim.core.dtensors import is_sharded, placed_as
from functional_optim.core.hyper import is_plain
from functional_optim.core.leaf import (
    Leaf,
    Scalars,
    Stepped,
    is_measured,
    on_device,
    require_kept,
    segments,
)
from functional_optim.core.stage import Stage
from functional_optim.core.state import state_tensors
from functional_optim.kernels.cache import Cache
from functional_optim.kernels.chunks import why_not_pointwise
from functional_optim.kernels.executor import Executor
from functional_optim.kernels.on_tensors import OnTensors
from functional_optim.kernels.totals import reduced_each, sum_in_order, total_of


class _Passing:
    """A leaf on its way through the stages."""

    __slots__ = ("grad", "param", "raw", "states")

    def __init__(self, leaf: Leaf) -> None:
        self.param = leaf.param
        self.grad = self.raw = leaf.grad
        self.states: list[Any] = []

    def through(
        self, stages: Sequence[Stage], segment: range, leaf: Leaf, totals: Sequence[Tensor]
    ) -> None:
        for index in segment:
            stage, state, coefficients = (
                stages[index],
                leaf.states[index],
                leaf.coefficients[index],
            )
            sums = [totals[-1].to(self.grad.device)] if is_measured(stage) else []
            self.param, self.grad, state = called(
                stage, self.param, self.grad, state, coefficients, sums, self.raw
            )
            if renews_raw(stage):
                self.raw = self.grad
            self.states.append(state)


def _sweep(
    stages: Sequence[Stage],
    leaves: Sequence[Leaf],
    measured: Sequence[Tensor],
    finish: Callable[[Leaf, _Passing], None],
) -> None:
    """All stages over all leaves.

    Where nothing is measured in mid-chain, a leaf is finished before the next one begins, so that
    its temporaries are free again.
    """
    runs = [_Passing(leaf) for leaf in leaves]
    totals = list(measured)
    parts = segments(stages)
    seen = 0
    for part in parts:
        first = stages[part.start]
        if is_measured(first):
            seen += 1
            if len(totals) < seen:
                totals.append(_total(first, leaves, [run.grad for run in runs]))
        for position, (leaf, run) in enumerate(zip(leaves, runs, strict=True)):
            run.through(stages, part, leaf, totals[:seen])
            if part is parts[-1]:
                finish(leaf, run)
                runs[position] = None  # type: ignore[call-overload]  # its temporaries are free again


def write(leaf: Leaf, stepped: Stepped) -> None:
    """Copy a step's results into the leaf they came from."""
    require_kept(leaf, stepped)
    targets = [leaf.param, *state_tensors(leaf.states)]
    values = [stepped.param, *state_tensors(stepped.states)]
    for target, value in zip(targets, _unaliased(values, targets), strict=True):
        target.copy_(placed_as(value, target))


def _unaliased(values: list[Tensor], targets: list[Tensor]) -> list[Tensor]:
    """The values; copies of those that writing to the targets might change."""
    try:
        begins = {target.data_ptr() for target in targets}
        suspects = [
            may_be_view(value) or value.data_ptr() in begins or value.is_inference()
            for value in values
        ]
    except RuntimeError:  # inside a transform of torch.func
        return [v if v is t else v.clone() for v, t in zip(values, targets, strict=True)]
    return [
        value.clone() if suspect and _may_change(value, own, targets) else value
        for value, own, suspect in zip(values, targets, suspects, strict=True)
    ]


def _may_change(value: Tensor, own: Tensor, targets: list[Tensor]) -> bool:
    return value is not own and storage_of(value) in map(storage_of, targets)


def _functions_for(leaves: Sequence[Leaf]) -> AbstractContextManager[object]:
    """Return the context in which stages call torch's functions, with numbers or tensors."""
    return OnTensors() if on_device(leaves) else nullcontext()


def _total(stage: Stage, leaves: Sequence[Leaf], gradients: list[Tensor]) -> Tensor:
    return total_of(stage, gradients, on_device=on_device(leaves))


KINDS = 512
"""Of how many kinds of leaves it is known, for each chain, that its rules step them."""

_CHOICES = frozenset({bool, str, type(None)})

_TRIED: Cache[set[Any]] = Cache()
"""The kinds of leaves that stages have stepped: shape, dtype, choices among the coefficients."""


def _require_kept(leaf: Leaf, run: _Passing) -> None:
    require_kept(leaf, Stepped(run.param, tuple(run.states)))


def _reduced_together(stages: Sequence[Stage], leaves: Sequence[Leaf]) -> Tensor | None:
    """Return the totals of a stage without state over leaves on CUDA; None for other leaves.

    One by one, leaves cost several launches each. On the CPU, plans put them together.
    """
    stage, first = stages[-1], leaves[0]
    if len(stages) > 1 or stage.stateful or not first.param.is_cuda:
        return None
    shared = first.coefficients[-1]
    for own in {id(leaf.coefficients): leaf.coefficients[-1] for leaf in leaves}.values():
        if not is_plain(own) or own != shared:
            return None
    params, grads = [leaf.param for leaf in leaves], [leaf.grad for leaf in leaves]
    columns = reduced_each(stage, params, grads, first.states[-1], shared)
    if columns is None:
        return None
    return torch.stack(list(map(sum_in_order, columns))).to(first.param.device)


class ReferenceExecutor(Executor):
    """Stages called one after the other, in Python.

    Args:
        on_device: what runs a chain so with numbers that stand on the device.
        tries_pointwise: whether chains that are pointwise are tried out, too; not where a kernel
            has tried them on a few elements.
    """

    exact = True
    takes_dtensors = True

    def __init__(
        self,
        on_device: Executor | None = None,
        *,
        tries_pointwise: bool = True,
    ) -> None:
        self._on_device = on_device
        self._tries_pointwise = tries_pointwise

    def taking(self, scalars: Scalars) -> Executor | None:
        return self if scalars is Scalars.HOST else self._on_device

    def update(
        self, stages: Sequence[Stage], leaves: Sequence[Leaf], measured: Sequence[Tensor]
    ) -> list[Stepped]:
        results: list[Stepped] = []
        with _functions_for(leaves):
            _sweep(
                stages,
                leaves,
                measured,
                lambda leaf, run: results.append(Stepped(run.param, tuple(run.states))),
            )
        return results

    def update_(
        self, stages: Sequence[Stage], leaves: Sequence[Leaf], measured: Sequence[Tensor]
    ) -> None:
        with torch.no_grad(), _functions_for(leaves):
            _sweep(
                stages,
                leaves,
                measured,
                lambda leaf, run: write(leaf, Stepped(run.param, tuple(run.states))),
            )

    def require(self, stages: Sequence[Stage], leaves: Sequence[Leaf]) -> None:
        """Step one leaf of each kind, once, and forget the result.

        What a rule has to say of a shape or dtype, it says before anything is written.

        Raises:
            RuntimeError: a step of another shape or dtype; or whatever a rule raises.
        """
        if is_transforming() or not (self._tries_pointwise or why_not_pointwise(stages)):
            return
        tried = _TRIED.get_or_make(tuple(stages), set)
        new: dict[Any, Leaf] = {}
        choices: dict[int, Any] = {}
        for leaf in leaves:
            made = leaf.coefficients
            if id(made) not in choices:
                choices[id(made)] = [one for own in made for one in own if type(one) in _CHOICES]
            key = leaf.param.shape, leaf.param.dtype, *choices[id(made)]
            if key not in tried and leaf.scalars is Scalars.HOST and not is_sharded(leaf.param):
                new.setdefault(key, leaf)
        if not new:
            return
        with torch.no_grad():
            for leaf in new.values():
                _sweep([*stages], [leaf], [], _require_kept)
        if len(tried) + len(new) > KINDS:
            tried.clear()
        tried.update(new)

    def reduce(
        self, stages: Sequence[Stage], leaves: Sequence[Leaf], measured: Sequence[Tensor]
    ) -> Tensor:
        """The totals over the leaves of the last stage, which reduces: a vector in float64."""
        together = _reduced_together(stages, leaves)
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
        """Return each leaf's addends to the totals: tensors of one element."""
        last = stages[-1]
        assert last.reduce is not None
        before = range(len(stages) - 1)
        for leaf in leaves:
            param, grad = leaf.param, leaf.grad
            if before:
                run = _Passing(leaf)
                run.through(stages, before, leaf, measured)
                param, grad = run.param, run.grad
            yield last.reduce(param, grad, leaf.states[-1], leaf.coefficients[-1])

    def measure(
        self, stages: Sequence[Stage], leaves: Sequence[Leaf], measured: Sequence[Tensor]
    ) -> Tensor:
        wanted = [i for i, stage in enumerate(stages) if is_measured(stage)][len(measured)]
        with _functions_for(leaves):
            if wanted == 0:
                return _total(stages[0], leaves, [leaf.grad for leaf in leaves])
            grads: list[Tensor] = []
            _sweep(stages[:wanted], leaves, measured, lambda leaf, run: grads.append(run.grad))
            return _total(stages[wanted], leaves, grads)
