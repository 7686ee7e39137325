"""The one table of executors: whoever runs a chain finds its executor here, by name."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, Protocol

from torch import Tensor

from functional_optim.core.brief import brief
from functional_optim.core.dtensors import is_sharded
from functional_optim.core.leaf import Leaf, Scalars, Stepped
from functional_optim.core.stage import Stage
from functional_optim.kernels.auto import AutoKernel
from functional_optim.kernels.blocked import BlockedKernel
from functional_optim.kernels.exact import ExactKernel
from functional_optim.kernels.executor import Executor
from functional_optim.kernels.fused import FusedKernel
from functional_optim.kernels.inductor import InductorKernel
from functional_optim.kernels.lane_executor import LaneExecutor
from functional_optim.kernels.reference import ReferenceExecutor
from functional_optim.kernels.script import ScriptExecutor
from functional_optim.kernels.stacked import StackedExecutor

ExecutorName = Literal["auto", "reference", "script", "blocked", "compile", "stacked", "fused"]


class OverLeaves(Protocol):
    """What an executor has to have; of all else, :class:`Executor` says what it is unless told."""

    def update(
        self, stages: Sequence[Stage], leaves: Sequence[Leaf], measured: Sequence[Tensor]
    ) -> list[Stepped]: ...

    def update_(
        self, stages: Sequence[Stage], leaves: Sequence[Leaf], measured: Sequence[Tensor]
    ) -> None: ...

    def measure(
        self, stages: Sequence[Stage], leaves: Sequence[Leaf], measured: Sequence[Tensor]
    ) -> Tensor: ...

    def require(self, stages: Sequence[Stage], leaves: Sequence[Leaf]) -> None: ...


class _Told(Executor):
    """An executor that says nothing of itself: it steps whole leaves."""

    def __init__(self, functions: OverLeaves) -> None:
        self._functions = functions

    def update(
        self, stages: Sequence[Stage], leaves: Sequence[Leaf], measured: Sequence[Tensor]
    ) -> list[Stepped]:
        return self._functions.update(stages, leaves, measured)

    def update_(
        self, stages: Sequence[Stage], leaves: Sequence[Leaf], measured: Sequence[Tensor]
    ) -> None:
        self._functions.update_(stages, leaves, measured)

    def measure(
        self, stages: Sequence[Stage], leaves: Sequence[Leaf], measured: Sequence[Tensor]
    ) -> Tensor:
        return self._functions.measure(stages, leaves, measured)

    def require(self, stages: Sequence[Stage], leaves: Sequence[Leaf]) -> None:
        self._functions.require(stages, leaves)


class _Table(dict[str, Executor]):
    """Executors by name; whatever is put in answers all that an executor is asked."""

    def __setitem__(self, name: str, executor: OverLeaves) -> None:
        super().__setitem__(name, executor if isinstance(executor, Executor) else _Told(executor))


_EXACT, _FUSED, _INDUCTOR, _BLOCKED = (
    ExactKernel(),
    FusedKernel(),
    InductorKernel(),
    BlockedKernel(),
)
_AUTO = AutoKernel(_EXACT, _FUSED, _INDUCTOR, _BLOCKED)
_STACKS = StackedExecutor(exact=True)

EXECUTORS: dict[str, Executor] = _Table(
    {
        "auto": LaneExecutor(_AUTO, joining=_AUTO, stacks=_STACKS, on_device=True),
        "reference": ReferenceExecutor(LaneExecutor(on_device=True), stand_in="auto"),
        "script": ScriptExecutor(),
        "blocked": LaneExecutor(_BLOCKED, stacks=_STACKS),
        "compile": LaneExecutor(
            _EXACT, _INDUCTOR, _BLOCKED, joining=_EXACT, stacks=_STACKS, on_device=True
        ),
        "stacked": LaneExecutor(_AUTO, joining=_AUTO, stacks=StackedExecutor(exact=False)),
        "fused": LaneExecutor(_FUSED, strict=True),
    }
)
"""All executors by name, those of users (:func:`register_executor`) among them."""


def register_executor(name: str, executor: OverLeaves) -> None:
    """Give an executor of your own a name, by which ``optimizer.using(executor=name)`` finds it.

    Args:
        name: that no other executor has.
        executor: derived from :class:`Executor`; or anything with its four functions, which then
            steps whole leaves, one by one.

    Raises:
        TypeError: a name that is no text.
        ValueError: a name that another executor has.

    Example::

        >>> import torch
        >>> from functional_optim import sgd
        >>> from functional_optim.kernels import EXECUTORS, ReferenceExecutor, register_executor
        >>> class Counting(ReferenceExecutor):
        ...     steps = 0
        ...     def update(self, stages, leaves, measured):
        ...         self.steps += 1
        ...         return super().update(stages, leaves, measured)
        >>> counting = Counting()
        >>> register_executor("counting", counting)
        >>> optimizer, params = sgd(lr=0.5).using(executor="counting"), torch.ones(1)
        >>> optimizer.update(params, torch.ones(1), optimizer.init(params))[0], counting.steps
        (tensor([0.5000]), 1)
        >>> del EXECUTORS["counting"]
    """
    if not isinstance(name, str):
        raise TypeError(f"the name of an executor must be a str, got {brief(name)}")
    if name in EXECUTORS:
        raise ValueError(
            f"there is an executor {name!r} already; give another name than {', '.join(EXECUTORS)}"
        )
    given: Any = executor  # the table makes an Executor of it
    EXECUTORS[name] = given


def check_executor(name: object) -> None:
    """A name in the table.

    Raises:
        ValueError: none of this name is there.
    """
    if name not in EXECUTORS:
        raise ValueError(f"executor must be one of {', '.join(EXECUTORS)}, got {name!r}")


def executor_taking(name: str, scalars: Scalars) -> Executor:
    """The executor of a name, for steps whose numbers come from there.

    Raises:
        ValueError: it takes no numbers from there.
    """
    found = EXECUTORS[name].taking(scalars)
    if found is None:
        able = [repr(one) for one, other in EXECUTORS.items() if other.taking(scalars)]
        raise ValueError(
            f"a step that may be captured is made by {' or '.join(sorted(able))}, got "
            f"executor={name!r}, which takes coefficients as Python's numbers; give "
            "optimizer.using(executor='auto')"
        )
    return found


def in_place(name: str, params: Iterable[Tensor]) -> str:
    """The executor for a front-end that steps these parameters in place.

    On the CPU, auto stands in for the reference, which an optimizer has unless told otherwise: it
    gives the same bits, and no temporaries as large as a parameter. Only the reference computes
    with DTensors as they are.
    """
    stand_in = EXECUTORS[name].stand_in
    return name if stand_in is None or not all(map(_is_plain_cpu, params)) else stand_in


def _is_plain_cpu(param: Tensor) -> bool:
    return param.is_cpu and not is_sharded(param)
