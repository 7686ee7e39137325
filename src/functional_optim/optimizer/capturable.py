"""A bound optimizer whose steps may be captured as CUDA graphs.

A replay repeats what the device did, and runs no Python. So what changes from step to step stands
on the device, and changes there: step counts count themselves, and coefficients are computed from
them and from hyper-parameters that are 0-d tensors. What Python knows of counts is which of them
are equal; once a step was captured, that has to stay so.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.capturing import is_capturing
from functional_optim.core.chain import Chain, with_hyper
from functional_optim.core.checks import check_grad
from functional_optim.core.compiling import uncompiled_class
from functional_optim.core.hyper import mapped
from functional_optim.core.local_shards import check_whole
from functional_optim.core.one_at_a_time import one_at_a_time
from functional_optim.core.overrides import paths_of, shape_of
from functional_optim.core.slots import Slotted, slotted
from functional_optim.core.stage import Stage, block_size_of
from functional_optim.core.state import LeafState, State, map_state
from functional_optim.core.views import real_view
from functional_optim.kernels import Leaf, Scalars, is_measured
from functional_optim.kernels.chunks import tensors_of, why_not_flat, with_tensors
from functional_optim.kernels.on_device import require_unlooked
from functional_optim.kernels.validate import EXAMPLE_ELEMENTS
from functional_optim.optimizer.bound import BoundOptimizer
from functional_optim.plan import engine
from functional_optim.plan.device_numbers import DeviceNumbers, first_value
from functional_optim.plan.guard import mask_of


def _example(stages: Sequence[Stage], leaf: Leaf) -> Leaf:
    """A chunk of a few elements that is compiled as this leaf is."""
    block_size = block_size_of(stages)
    blocks = max(1, EXAMPLE_ELEMENTS // block_size)
    tensors = tensors_of(leaf)
    sizes = [
        blocks * block_size if one.numel() == leaf.param.numel() else blocks for one in tensors
    ]
    few = [one.new_zeros(size) for one, size in zip(tensors, sizes, strict=True)]
    return with_tensors(leaf, few)


@uncompiled_class
class CapturableOptimizer(BoundOptimizer):
    """Result of ``optimizer.bind(params, capturable=True)``: its steps may be captured.

    Each replay of a captured :meth:`step` is a whole step: it counts, and its coefficients are
    those of its number. Hyper-parameters are read on the device each time: :meth:`set_hyper`
    between replays holds from the next one on, as does what is written into a 0-d tensor of
    ``optimizer.hyper``. Schedules are computed there: they are to be written with torch's
    operations, and what they give is not held against bounds.

    Coefficients are computed in double precision by the device, whose powers and roots may differ
    from Python's in the last place; else it is the step of any bound optimizer. ``state`` holds
    the step counts as tensors beside their parameters.

    Wait for :meth:`ready`, and make some steps, before you capture one, as for any graph. What is
    captured belongs to this object's memory: keep it for as long as there are replays, and replay
    nothing after :meth:`release`.

    Example::

        >>> import torch
        >>> from functional_optim import adamw
        >>> params = torch.ones(2)
        >>> bound = adamw(lr=0.1).bind(params, capturable=True)  # on a CUDA device: to be captured
        >>> bound.gradients.fill_(1.0)
        tensor([1., 1.])
        >>> bound.step(bound.gradients)
        >>> bound.set_hyper(lr=0.2)
        >>> bound.step(bound.gradients)
        >>> int(bound.state.leaves.step)
        2
    """

    _scalars = Scalars.DEVICE
    _numbers: DeviceNumbers

    def __init__(self, optimizer: Chain, params: Any, state: State | None = None) -> None:
        self._captured: list[bool] | None = None
        self._asked: list[Leaf] = []
        super().__init__(optimizer, params, state)
        try:
            self._prepare()
        except BaseException:
            self._layout.undo()
            raise

    def _begin(self, optimizer: Chain) -> None:
        self._watched = []
        self._numbers = self._on_device(optimizer, self._hypers)

    def _lay_out(self, given: list[LeafState] | None) -> None:
        super()._lay_out(given)
        for buffer in self._buffers:
            buffer.made()  # reads the counts, which cannot be done while a step is captured

    def _on_device(self, optimizer: Chain, hypers: list[tuple[Any, ...]]) -> DeviceNumbers:
        named = dict(zip(self._names, self._params, strict=True))
        check_whole(named, "a step that may be captured")
        device, *more = dict.fromkeys(param.device for param in self._params)
        if more:
            raise ValueError(
                f"there are parameters on {device} and on {more[0]}, and a graph is captured on "
                "one device: bind those of each device apart"
            )
        for stage in optimizer.stages:
            if stage.state_device not in {None, device.type}:
                raise ValueError(
                    f"{stage.name} keeps its state on {stage.state_device}, and a step that may be "
                    f"captured runs on {device} alone; keep the state there, or leave capturable "
                    "out"
                )
        return DeviceNumbers(optimizer.stages, hypers, self._slots(optimizer), device)

    def _slots(self, optimizer: Chain) -> list[Slotted]:
        """The hyper-parameters of each parameter, with a slot for each number."""
        paths = paths_of(self._spec)
        places = list(zip(paths, map(shape_of, self._placed(self._params)), strict=True))
        every = slotted(optimizer.links, optimizer.overrides, places, first=first_value)
        return [every[place] for place in self._places]

    def _prepare(self) -> None:
        """Find out what cannot be found out while a step is captured."""
        stages = self._optimizer.stages
        by_chunks = self._executor.in_chunks(stages)
        leaves = [
            (buffer.chunk(buffer.runs()[0]), buffer.segments[0].index) for buffer in self._buffers
        ]
        for place in self._others:
            param = real_view(self._params[place].detach())
            states = tuple(map_state(real_view, one) for one in self._states[place].stages)
            leaves.append((Leaf(param, param, states, (), self._names[place]), place))
        total = torch.ones((), dtype=torch.float64, device=self._params[0].device)
        totals = [total] * sum(map(is_measured, stages))
        self._asked = []
        seen: set[Any] = set()
        with torch.no_grad():
            for leaf, place in leaves:
                kind = (
                    id(self._hypers[place]),
                    *((one.shape, one.dtype) for one in tensors_of(leaf)),
                )
                if kind in seen:
                    continue
                seen.add(kind)
                _, found = self._first_of(place)
                require_unlooked(stages, leaf._replace(coefficients=found))
                if by_chunks is not None and why_not_flat(stages, leaf) is None:
                    numbers = mapped(Tensor, Tensor.item, found)
                    by_chunks.validate(stages, leaf._replace(coefficients=numbers), totals)
                    chunk = _example(stages, leaf)
                    chunk = chunk._replace(coefficients=found, scalars=self._scalars)
                    self._asked.append(chunk)
                    by_chunks.explain(stages, chunk)  # asks for what is compiled

    def ready(self, timeout: float | None = None) -> bool:
        stages = self._optimizer.stages
        by_chunks = self._executor.in_chunks(stages)
        if by_chunks is not None:
            for chunk in self._asked:
                by_chunks.compile(stages, chunk)
        return super().ready(timeout)

    def _first_of(self, place: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        own = self._hypers[place]
        return own, self._numbers.coefficients(own, self._states[place].step)

    @one_at_a_time
    def step(self, grads: Any = None, *, measured: Sequence[Tensor] = (), **hyper: Any) -> None:
        """Step in place, so that a CUDA graph may capture it; each replay is a step then.

        Args:
            grads: as for :meth:`BoundOptimizer.step`. What is captured reads them where they are.
            measured: as for :meth:`Optimizer.update`, on the device.
            hyper: none; :meth:`set_hyper` changes numbers between replays.

        Raises:
            TypeError: a hyper-parameter; or as for :meth:`BoundOptimizer.step`.
            ValueError: as for :meth:`BoundOptimizer.step`.
            RuntimeError: the same; or other parameters have gradients than when it was captured;
                or it is captured while a compiler is at work for it.
        """
        if hyper:
            raise TypeError(
                f"step({', '.join(hyper)}=...) would be captured as it is now, for every replay: "
                "use set_hyper, whose numbers each replay reads"
            )
        capturing = is_capturing(self._params[:1])  # all are on one device
        stepped = self._have_gradients(grads) if capturing or self._captured else []
        if self._captured and stepped != self._captured:
            self._refuse(stepped)
        device = self._params[0].device
        elsewhere = [total.device for total in measured if total.device != device]
        if elsewhere:
            raise ValueError(
                f"measured is read at each replay, so it has to be on {device}, got a total on "
                f"{elsewhere[0]}"
            )
        super().step(grads, measured=measured)
        if capturing:
            self._captured = stepped
            for buffer in self._buffers:
                buffer.keep_together(stepped)

    def _step(
        self,
        hypers: Sequence[tuple[Any, ...]],
        given: list[Tensor | None] | None,
        measured: Sequence[Tensor],
    ) -> None:
        """A step whose numbers are the device's: nothing of it is planned, since it is captured."""
        self._check()
        flat = self._flat if given is None or self._own.gather(given) else []
        every: Sequence[Any] = self._gradients if given is None else given
        present = mask_of(every)
        runs = [(buffer, buffer.runs(present)) for buffer in flat]
        items = []
        for buffer, run in ((buffer, run) for buffer, own in runs for run in own):
            item = self._bound.run(buffer, run)
            # A copy: all counts of the run are advanced together, afterwards.
            state = item.state._replace(step=item.state.step[0].clone())
            hypers_of_run = self._hypers[buffer.segments[run.start].index]
            items.append(item._replace(state=state, hypers=hypers_of_run))
        in_runs = {one.index for buffer in flat for one in buffer.segments}
        for place, grad in enumerate(every):
            if grad is not None and place not in in_runs:
                check_grad(self._params[place], grad, self._names[place])
                item = self._bound.item(place)
                items.append(item._replace(grad=grad, hypers=self._hypers[place]))
        stages = self._optimizer.stages
        engine.update_(stages, self._executor, items, measured, self._numbers.make)
        self._layout.mark_changed()
        for buffer, own in runs:
            buffer.advance(own)

    def _have_gradients(self, grads: Any) -> list[bool]:
        """Return True if each parameter has a gradient."""
        given = self._params if grads is self._gradient_tree else self._grad_list(grads)
        return [one is not None for one in given]

    def _refuse(self, stepped: Sequence[bool]) -> None:
        """Other parameters have gradients than when a step was captured.

        Raises:
            RuntimeError: names the first.
        """
        pairs = zip(self._names, stepped, self._captured or (), strict=True)
        name = next(name for name, now, then in pairs if now != then)
        raise RuntimeError(
            f"a captured step is made of the parameters that had a gradient then; of {name!r} that "
            "is no longer so, and step counts would part, which replays do not see: give it a "
            "gradient of zeros, or bind such parameters apart"
        )

    @one_at_a_time
    def set_hyper(self, **hyper: Any) -> None:
        """Change hyper-parameters, by name, from the next step or replay on.

        Raises:
            TypeError: a name that the chain does not have.
            ValueError: a value out of bounds, an option that the state was not made for; or, once
                a step was captured, something that is no other number in place of a number.
            RuntimeError: a CUDA graph is being captured, whose replays would set them again.
        """
        if is_capturing(self._params[:1]):
            raise RuntimeError(
                "a CUDA graph is being captured, and each of its replays would set these "
                "hyper-parameters again: call set_hyper before, or between replays"
            )
        optimizer = with_hyper(self._optimizer, hyper)
        hypers = self._hypers_of(optimizer)
        self._check_options(optimizer, hypers)
        more = self._numbers.fill(hypers, self._slots(optimizer))
        if more is not None:
            if self._captured is not None:
                raise ValueError(
                    f"{more}, which what was captured cannot follow: bind the parameters again, "
                    "and capture a step of those"
                )
            self._begin_with(optimizer, hypers)
        self._optimizer, self._hypers = optimizer, hypers

    def _begin_with(self, optimizer: Chain, hypers: list[tuple[Any, ...]]) -> None:
        """Take hyper-parameters of any kind; where that fails, nothing is changed."""
        before = self._optimizer, self._hypers, self._numbers
        try:
            self._numbers = self._on_device(optimizer, hypers)
            self._optimizer, self._hypers = optimizer, hypers
            self._prepare()
        except BaseException:
            self._optimizer, self._hypers, self._numbers = before
            raise

    @one_at_a_time
    def load_state(self, state: State) -> None:
        """As :meth:`BoundOptimizer.load_state`; replays go on from there.

        Raises:
            TypeError, ValueError: as there.
            RuntimeError: a step was captured, and step counts that were equal no longer are;
                nothing is changed then.
        """
        checked = self._checked(state)
        for buffer in self._buffers:
            buffer.require_together([int(checked[one.index].step) for one in buffer.segments])
        super().load_state(state)
        for buffer in self._buffers:
            buffer.made()  # reads the counts, which cannot be done while a step is captured
