"""BoundPlans: plans of a bound optimizer, for runs of its flat buffers or for single leaves."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.core.checks import check_grad
from functional_optim.core.stage import Stage
from functional_optim.core.state import LeafState, map_state, state_tensors
from functional_optim.core.views import real_view
from functional_optim.kernels import Executor
from functional_optim.optimizer.bound_buffer import BoundBuffer
from functional_optim.plan import StepPlan, engine
from functional_optim.plan.flat.layout import FlatLayout
from functional_optim.plan.guard import mark_changed
from functional_optim.plan.item import Item
from functional_optim.plan.leaf_positions import rows_of
from functional_optim.plan.step_plan import BoundStep

LEAST = 1 << 14
"""Number of elements of a buffer from which separate gradients are read without a copy. For fewer
elements, a copy is faster."""

PLANS = 8
"""Number of sets of missing gradients for which plans are kept."""

Present = bytes | None
"""For each parameter, nonzero if it has a gradient; None if all have one."""

Hypers = Sequence[tuple[Any, ...]]
"""The hyper-parameters of each group of parameters."""


class BoundParams(NamedTuple):
    """Bound parameters, with everything that their plans need."""

    stages: Sequence[Stage]
    executor: Executor
    layout: FlatLayout
    params: Sequence[Tensor]
    names: Sequence[str]
    states: Sequence[LeafState]
    groups: Sequence[int]
    """For each parameter, the group whose hyper-parameters it has."""
    buffers: Sequence[BoundBuffer]
    views: Sequence[Tensor | None]
    """For each parameter, its view of the gradient buffer."""

    def item(self, place: int) -> Item:
        """Return a parameter as a leaf. Its gradient is set in each step."""
        param = self.params[place]
        return Item(param, param, self.states[place], (), self.names[place])

    def run(self, buffer: BoundBuffer, run: slice) -> Item:
        """Return adjacent parameters in a buffer as one leaf, with all of their step counts."""
        chunk = buffer.chunk(run)
        state = LeafState(buffer.counts[run], chunk.states)
        return Item(chunk.param, chunk.grad, state, (), chunk.name)

    def check(self, gradients: Sequence[Any], present: Present) -> None:
        """Raise TypeError or ValueError if a gradient does not fit its parameter."""
        for k, (param, name) in enumerate(zip(self.params, self.names, strict=True)):
            if present is None or present[k]:
                check_grad(param, gradients[k], name)


class _BoundPlan:
    """Plan of a step of bound parameters, and the gradients that the plan reads.

    Args:
        present: which parameters have a gradient.
        flat: buffers whose adjacent parameters are one leaf, with the gradients in the buffer. Each
            other parameter is a leaf.
        gradients: of all parameters, with the layouts of later gradients.
        as_real: True if complex parameters are stepped as twice as many real elements.
    """

    def __init__(
        self,
        bound: BoundParams,
        present: Present,
        flat: Sequence[BoundBuffer],
        gradients: Sequence[Any],
        *,
        as_real: bool = False,
    ) -> None:
        items: list[Item] = []
        groups: list[int] = []
        for buffer in flat:
            runs = buffer.runs(present)
            items += [bound.run(buffer, run) for run in runs]
            groups += [bound.groups[buffer.segments[0].index]] * len(runs)
        self._fixed = [item.grad for item in items]
        known = {one.index for buffer in flat for one in buffer.segments}
        every = range(len(bound.params))
        self._places = [k for k in every if k not in known and (present is None or present[k])]
        self._as_real = as_real and any(bound.params[k].is_complex() for k in self._places)
        for k in self._places:
            item = bound.item(k)._replace(grad=gradients[k])
            items.append(_real_item(item) if self._as_real else item)
        groups += [bound.groups[k] for k in self._places]
        self._runs = len(self._fixed)
        in_order = not self._fixed and self._places == list(every)
        self._in_order = in_order and not self._as_real
        self._tensors = [
            tensor
            for item in items
            for tensor in (item.param, *state_tensors(item.state.stages), item.state.step)
        ]
        start = len(self._tensors)
        listed = [*self._tensors, *(item.grad for item in items)]
        rows = rows_of(items, listed, range(start, len(listed)))
        self._plan: StepPlan | None = None
        """None if two leaves have the same tensor."""
        if rows is not None:
            stages, executor = bound.stages, bound.executor
            options: Any = {"may_begin": True, "kept": start}
            self._plan = StepPlan(stages, executor, items, groups, rows, listed, **options)

    def prepare(
        self, gradients: Sequence[Any], hypers: Hypers, measured: Sequence[Tensor]
    ) -> BoundStep | None:
        """Check and bind a step with the gradients of all parameters."""
        if self._plan is None:
            return None
        return self._plan.prepare(self._listed(gradients), hypers, measured)

    @property
    def steps_runs(self) -> bool:
        """True if each run is one leaf. False if a gradient is a parameter of the run."""
        plan = self._plan
        return plan is not None and not any(k < self._runs for k in plan.others)

    def takes(self, gradients: Sequence[Any]) -> bool:
        """Return True if the plan fits such gradients."""
        return self._plan is not None and self._plan.takes(self._listed(gradients))

    def _listed(self, gradients: Sequence[Any]) -> list[Any]:
        """Return the list of a step with these gradients."""
        if self._in_order:
            return [*self._tensors, *gradients]
        own = list(map(gradients.__getitem__, self._places))
        if self._as_real:
            own = list(map(_real_or_same, own))
        return [*self._tensors, *self._fixed, *own]


def _real_item(item: Item) -> Item:
    param, grad = real_view(item.param.detach()), real_view(item.grad)
    states = tuple(map_state(real_view, one) for one in item.state.stages)
    return item._replace(param=param, grad=grad, state=LeafState(item.state.step, states))


def _real_or_same(grad: Any) -> Any:
    has_view = isinstance(grad, Tensor) and grad.layout == torch.strided and not grad.is_conj()
    return real_view(grad) if has_view else grad


class BoundPlans:
    """Plans of the steps of bound parameters.

    Args:
        flat: buffers whose adjacent parameters may be stepped as one leaf.
    """

    def __init__(self, bound: BoundParams, flat: Sequence[BoundBuffer]) -> None:
        self._bound, self._flat = bound, flat
        self._plans: dict[Any, _BoundPlan] = {}
        written = [one for buffer in bound.buffers for one in buffer.written]
        self._written = [*bound.layout.params, *written]

    def step_read(
        self, gradients: Sequence[Any], present: Present, hypers: Hypers, measured: Sequence[Tensor]
    ) -> bool:
        """Step with gradients outside the buffers, without a copy.

        Returns:
            False, with nothing changed, if a gradient and its parameter differ in layout.
        """
        key = "read", present
        plan = self._plans.get(key)
        steps = None if plan is None else plan.prepare(gradients, hypers, measured)
        if plan is not None and steps is None and not plan.takes(gradients):
            return False
        if steps is None:
            plan = _BoundPlan(self._bound, present, (), self._bound.views, as_real=True)
            self._keep(key, plan)
            steps = plan.prepare(gradients, hypers, measured)
        if steps is None:
            return False
        mark_changed(self._written)
        steps.run()
        return True

    def step(
        self,
        gradients: Sequence[Any],
        present: Present,
        hypers: Hypers,
        measured: Sequence[Tensor],
        *,
        flat: bool,
    ) -> None:
        """Step with the gradients in the flat buffers, or leaf by leaf.

        Args:
            gradients: of all parameters, or None.
            present: which parameters have a gradient.
            flat: True if the flat buffers contain the gradients.
        """
        key = flat, present
        plan = self._plans.get(key)
        steps = None if plan is None else plan.prepare(gradients, hypers, measured)
        if steps is None:
            self._bound.check(gradients, present)
            plan = _BoundPlan(self._bound, present, self._flat if flat else (), gradients)
            if plan.steps_runs:
                self._keep(key, plan)
                steps = plan.prepare(gradients, hypers, measured)
        if steps is not None:
            mark_changed(self._written)
            steps.run()
        else:
            flat_ones = [one.index for buffer in self._flat for one in buffer.segments]
            own = {k: self._bound.views[k] for k in flat_ones if flat}
            every = [own.get(k, one) for k, one in enumerate(gradients)]
            self._step_alone(every, present, hypers, measured)

    def _keep(self, key: Any, plan: _BoundPlan) -> None:
        if len(self._plans) >= PLANS:
            self._plans.clear()
        self._plans[key] = plan

    def _step_alone(
        self, gradients: Sequence[Any], present: Present, hypers: Hypers, measured: Sequence[Tensor]
    ) -> None:
        """Step leaves with layouts that no plan supports."""
        bound = self._bound
        items = [
            bound.item(k)._replace(grad=gradients[k], hypers=hypers[bound.groups[k]])
            for k in range(len(bound.params))
            if present is None or present[k]
        ]
        engine.update_(bound.stages, bound.executor, items, measured)
