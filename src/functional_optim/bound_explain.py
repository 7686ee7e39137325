"""What steps the buffers of a bound optimizer, in words; and whether it is compiled yet."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from functional_optim.bound_buffer import BoundBuffer
from functional_optim.bound_numbers import Numbers
from functional_optim.executors import LaneExecutor, Leaf
from functional_optim.executors.lanes import why_not_pointwise
from functional_optim.flat_layout import FlatLayout
from functional_optim.stage import Stage, grain_of

if TYPE_CHECKING:
    from functional_optim.optimizer import Optimizer


class Explainer:
    """Asks the executor about lanes as they are where each parameter has a gradient.

    Args:
        optimizer: that steps them.
        numbers: where its coefficients are computed.
        buffers: that are stepped as lanes.
        hypers: of each parameter.
        plain: whether these are plain numbers.
    """

    def __init__(
        self,
        optimizer: "Optimizer",
        numbers: Numbers,
        buffers: Sequence[BoundBuffer],
        hypers: Sequence[tuple[Any, ...]],
        *,
        plain: bool,
    ) -> None:
        self._name = optimizer.executor
        self._executor = numbers.executor(optimizer)
        self._stages = optimizer.stages
        at = numbers.at(optimizer.stages, plain=plain)
        self._lanes: list[Leaf] = []
        self._counts: list[int] = []
        for buffer in buffers:
            own = hypers[buffer.segments[0].index]
            resolved, coefficients = at(own, 1.0, buffer.count(0))
            for lane, _, part in buffer.lanes(None):
                self._counts.append(sum(one.numel for one in buffer.segments[part]))
                self._lanes.append(
                    lane._replace(coefficients=coefficients, hypers=resolved, step=1.0)
                )

    def ready(self, timeout: float | None) -> bool:
        """Wait for what compiles in the background; whether it is done."""
        if not isinstance(self._executor, LaneExecutor):
            return True
        done = [self._executor.ready(self._stages, lane, timeout) for lane in self._lanes]
        return all(done)

    def is_cut_freely(self) -> bool:
        """Whether lanes, joined and cut anywhere, keep their bits whatever their dtype."""
        executor = self._executor
        if not isinstance(executor, LaneExecutor):
            return False
        return all(executor.is_cut_freely(self._stages, lane) for lane in self._lanes)

    def lines(self) -> list[str]:
        """What steps each lane, and why."""
        found = []
        for lane, count in zip(self._lanes, self._counts, strict=True):
            param = lane.param
            how = f"{self._name}, as asked for"
            if isinstance(self._executor, LaneExecutor):
                how = self._executor.explain(self._stages, lane)
            what = f"{count:,} elements of {param.dtype} on {param.device}"
            found.append(f"{lane.name}: {what}: {how}")
        return found


def why_alone(
    stages: Sequence[Stage], params: Sequence[Tensor], others: Sequence[int], layout: FlatLayout
) -> list[str]:
    """Why parameters are stepped one by one, a line for each reason.

    Args:
        stages: of the chain.
        params: all parameters.
        others: the places of those.
        layout: where parameters lie.
    """

    def why(place: int) -> str:
        whole = why_not_pointwise(stages)
        if whole is not None:
            return whole
        if place in layout.reasons:
            return layout.reasons[place]
        if grain_of(stages) > 1 and not params[place].is_contiguous():
            return (
                "its elements do not lie in the order of its shape, and the chain works in blocks"
            )
        return "its state has another shape"

    counts = Counter(map(why, others))
    return [
        f"{count} {'parameters are' if count > 1 else 'parameter is'} stepped one by one: {reason}"
        for reason, count in counts.items()
    ]
