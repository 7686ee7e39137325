"""CapturableOptimizer: a bound optimizer whose steps may be captured as CUDA graphs.

A replay repeats operations of the device, and runs no Python. So step counts are on the device, and
the step increases them there. Coefficients are computed there too, from the step counts and from
hyper-parameters that are 0-d tensors. Python only knows which step counts are equal, and after a
capture these must stay equal.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim._torch.operators import foreach_add_
from functional_optim.core.chain import Chain
from functional_optim.core.checks import check_grad
from functional_optim.core.dynamo import disable_compile_of_class
from functional_optim.core.graph_capture import is_capturing
from functional_optim.core.hyper import map_values
from functional_optim.core.hyper_inputs import InputHypers, build_input_hypers
from functional_optim.core.interrupts import defer_interrupts
from functional_optim.core.local_shards import check_no_dtensor
from functional_optim.core.lock import with_lock
from functional_optim.core.overrides import LeafChain, paths_of, shape_of
from functional_optim.core.stage import Stage, block_size_of
from functional_optim.core.state import LeafState, State, map_state, state_tensors
from functional_optim.core.views import real_view
from functional_optim.kernels import Leaf, Scalars, is_measured
from functional_optim.kernels.chunks import tensors_of, why_not_flat, with_tensors
from functional_optim.kernels.validate import EXAMPLE_ELEMENTS, check_device_scalars
from functional_optim.optimizer.bound import BoundOptimizer
from functional_optim.optimizer.bound_buffer import BoundBuffer
from functional_optim.plan import item_steps
from functional_optim.plan.device_numbers import DeviceNumbers, first_value
from functional_optim.plan.guard import mark_changed
from functional_optim.plan.item import Item, StepScalars
from functional_optim.plan.leaf_positions import rows_of
from functional_optim.plan.step_plan import BoundStep, StepPlan


def _example(stages: Sequence[Stage], leaf: Leaf) -> Leaf:
    """Return a chunk of a few elements that needs the same kernel as a leaf."""
    block_size = block_size_of(stages)
    blocks = max(1, EXAMPLE_ELEMENTS // block_size)
    tensors = tensors_of(leaf)
    sizes = [
        blocks * block_size if one.numel() == leaf.param.numel() else blocks for one in tensors
    ]
    few = [one.new_zeros(size) for one, size in zip(tensors, sizes, strict=True)]
    return with_tensors(leaf, few)


@disable_compile_of_class
class CapturableOptimizer(BoundOptimizer):
    """Result of ``optimizer.bind(params, capturable=True)``: its steps may be captured.

    Each replay of a captured :meth:`step` is a whole step: it increases the step counts, and uses
    the coefficients of its step count. The device reads hyper-parameters in each replay. So
    :meth:`set_hyper`, or a write to a 0-d tensor of ``optimizer.hyper``, changes the next replay.
    The device also computes schedules: write them with torch's operations. Their values are not
    checked against bounds.

    The device computes coefficients in double precision. Its powers and roots may differ from
    Python's in the last digit. Otherwise the step is that of any bound optimizer. The step counts
    in ``state`` are on the device of the parameters.

    Before you capture a step, wait for :meth:`ready` and run some steps, as for any graph. A graph
    uses the memory of this object: keep this object as long as you replay the graph, and do not
    replay it after :meth:`release`.

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
        """For each parameter, True if the captured step steps it; None before a capture."""
        self._examples: list[Leaf] = []
        """A small chunk for each kernel of a step."""
        super().__init__(optimizer, params, state)
        try:
            self._prepare_capture()
        except BaseException:
            self._layout.undo()
            raise

    def _prepare_scalars(self, optimizer: Chain) -> None:
        self._uncaptured = []
        self._numbers = self._device_numbers(optimizer, self._hypers)

    def _fill_buffers(self, chains: Sequence[LeafChain], given: list[LeafState] | None) -> None:
        super()._fill_buffers(chains, given)
        self._read_counts()

    def _read_counts(self) -> None:
        """Read the step counts into the cache, which is impossible during a capture."""
        for buffer in self._buffers:
            buffer.step_counts()

    def _device_numbers(self, optimizer: Chain, hypers: list[tuple[Any, ...]]) -> DeviceNumbers:
        named = dict(zip(self._names, self._params, strict=True))
        check_no_dtensor(named, "a step that may be captured")
        device, *more = dict.fromkeys(param.device for param in self._params)
        if more:
            raise ValueError(
                f"there are parameters on {device} and on {more[0]}, but a graph is captured on "
                "one device: bind the parameters of each device separately"
            )
        for stage in optimizer.stages:
            if stage.state_device not in {None, device.type}:
                raise ValueError(
                    f"{stage.name} keeps its state on {stage.state_device}, and a step that may be "
                    f"captured runs on {device} alone; keep the state there, or leave capturable "
                    "out"
                )
        return DeviceNumbers(optimizer.stages, hypers, self._slots(optimizer), device)

    def _slots(self, optimizer: Chain) -> list[InputHypers]:
        """Return the hyper-parameters of each parameter, with a slot for each scalar."""
        paths = paths_of(self._spec)
        places = list(zip(paths, map(shape_of, self._placed(self._params)), strict=True))
        every = build_input_hypers(optimizer.links, optimizer.overrides, places, first=first_value)
        return [every[place] for place in self._places]

    def _prepare_capture(self) -> None:
        """Make checks that are impossible during a capture, and start compilation of kernels."""
        stages = self._optimizer.stages
        by_chunks = self._executor.in_chunks(stages)
        leaves = [(buffer.whole, buffer.segments[0].index) for buffer in self._buffers]
        for place in self._others:
            param = real_view(self._params[place].detach())
            states = tuple(map_state(real_view, one) for one in self._states[place].stages)
            leaves.append((Leaf(param, param, states, (), self._names[place]), place))
        total = torch.ones((), dtype=torch.float64, device=self._params[0].device)
        totals = [total] * sum(map(is_measured, stages))
        self._examples = []
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
                _, found = self._first_coefficients(place)
                check_device_scalars(stages, leaf._replace(coefficients=found))
                if by_chunks is not None and why_not_flat(stages, leaf) is None:
                    numbers = map_values(Tensor, Tensor.item, found)
                    by_chunks.validate(stages, leaf._replace(coefficients=numbers), totals)
                    chunk = _example(stages, leaf)
                    chunk = chunk._replace(coefficients=found, scalars=self._scalars)
                    self._examples.append(chunk)
                    by_chunks.explain(stages, chunk)  # starts compilation of its kernel

    def ready(self, timeout: float | None = None) -> bool:
        stages = self._optimizer.stages
        by_chunks = self._executor.in_chunks(stages)
        if by_chunks is not None:
            for chunk in self._examples:
                by_chunks.compile(stages, chunk)
        return super().ready(timeout)

    def _first_coefficients(self, place: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        own = self._hypers[place]
        return own, self._numbers.coefficients(own, self._states[place].step)

    @with_lock
    def step(self, grads: Any = None, *, measured: Sequence[Tensor] = (), **hyper: Any) -> None:
        """Run a step in place. A CUDA graph may capture it, and then each replay is a step.

        Args:
            grads: as for :meth:`BoundOptimizer.step`. Replays read the gradients at the same
                addresses.
            measured: as for :meth:`Optimizer.update`, on the device.
            hyper: must be empty. Use :meth:`set_hyper` to change values between replays.

        Raises:
            TypeError: a hyper-parameter; or as for :meth:`BoundOptimizer.step`.
            ValueError: as for :meth:`BoundOptimizer.step`.
            RuntimeError: as for :meth:`BoundOptimizer.step`; or other parameters have gradients
                than in the captured step; or a kernel is not compiled yet during a capture.
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
                buffer.keep_together([stepped[one.index] for one in buffer.segments])

    def _step(
        self,
        optimizer: Chain,
        chains: Sequence[LeafChain],
        given: list[Tensor | None] | None,
        measured: Sequence[Tensor],
    ) -> None:
        """Run a step with scalars on the device. Its plan is not kept: replays run no Python."""
        every = self._single.own if given is None else given
        grads = self._whole.own if given is None else self._whole.gradients(given)
        if grads is not None and self._whole.have_one_count():
            pairs = zip(self._whole.firsts, self._whole.leaves, strict=True)
            leaves = [(k, leaf.param, leaf.state, leaf.name) for k, leaf in pairs]
        else:
            grads, params = list(every), enumerate(self._params)
            leaves = [(k, param, self._states[k], self._names[k]) for k, param in params]
        in_buffers = [
            (buffer, [every[one.index] is not None for one in buffer.segments])
            for buffer in self._buffers
        ]
        counts = self._counts(in_buffers)
        items = []
        for (k, param, state, name), grad in zip(leaves, grads, strict=True):
            if grad is not None:
                check_grad(param, grad, name)
                own = state._replace(step=counts.get(k, state.step))
                items.append(Item(param, grad, own, self._hypers[k], name))
        scalars_of = _each_once(self._numbers.scalars_of)
        bound = self._bind(optimizer.stages, items, measured, scalars_of)
        if bound is None:
            item_steps.update_(optimizer.stages, self._executor, items, measured, scalars_of)
        else:
            defer_interrupts(_run_and_count, bound, items)
        stepped = [self._params[k] for k, grad in enumerate(every) if grad is not None]
        mark_changed([*stepped, *self._single.changed(every)])
        for buffer, are_stepped in in_buffers:
            buffer.advance(are_stepped)

    def _bind(
        self,
        stages: Sequence[Stage],
        items: Sequence[Item],
        measured: Sequence[Tensor],
        scalars_of: Callable[[Item], StepScalars],
    ) -> BoundStep | None:
        """Bind a step to kernels; None if they can step no item, or not in its memory."""
        if not items or self._executor.in_chunks(stages) is None:
            return None
        totals: Sequence[Tensor] = measured
        if len(measured) < sum(map(is_measured, stages)):
            totals = item_steps.totals(stages, self._executor, items, scalars_of, measured)
        made = [scalars_of(item) for item in items]  # one object for each group
        numbers = list({id(one): one for one in made}.values())
        groups = {id(one): number for number, one in enumerate(numbers)}
        states = [k for item in items for k in (*state_tensors(item.state.stages), item.state.step)]
        written = {id(one): one for one in (*(item.param for item in items), *states)}
        tensors = [*written.values(), *(item.grad for item in items)]
        rows = rows_of(items, tensors, range(len(written), len(tensors)))
        if rows is None:
            return None
        plan = StepPlan(
            stages,
            self._executor,
            [groups[id(one)] for one in made],
            rows,
            tensors,
            counted=False,
            scalars=self._scalars,
        )
        return plan.prepare(tensors, (), totals, numbers=numbers)

    def _counts(
        self, in_buffers: Sequence[tuple[BoundBuffer, Sequence[bool]]]
    ) -> dict[int, Tensor]:
        """Return copies of the step counts in buffers, by parameter.

        A step computes coefficients from a copy, and increases it; afterwards, the buffer increases
        its counts. Adjacent parameters with equal counts share a copy.
        """
        counts: dict[int, Tensor] = {}
        for buffer, stepped in in_buffers:
            for run in buffer.runs(stepped):
                copy = buffer.counts[run.start].clone()
                counts.update((one.index, copy) for one in buffer.segments[run])
        return counts

    def _have_gradients(self, grads: Any) -> list[bool]:
        """Return, for each parameter, True if it has a gradient."""
        given = self._params if grads is self._gradient_tree else self._grad_list(grads)
        return [one is not None for one in given]

    def _refuse(self, stepped: Sequence[bool]) -> None:
        """Raise RuntimeError: other parameters have gradients than in the captured step."""
        pairs = zip(self._names, stepped, self._captured or (), strict=True)
        name = next(name for name, now, then in pairs if now != then)
        raise RuntimeError(
            f"a captured step always steps the parameters that had a gradient during capture, but "
            f"{name!r} now differs: step counts would no longer be equal, and replays cannot see "
            "that. Give the parameter a gradient of zeros, or bind such parameters separately"
        )

    @with_lock
    def set_hyper(self, **hyper: Any) -> None:
        """Change hyper-parameters, by name, from the next step or replay on.

        Raises:
            TypeError: a name that the chain does not have.
            ValueError: a value out of bounds, or an option that needs other state; or, after a
                capture, a change that is not a change of a number to another number.
            RuntimeError: a CUDA graph is being captured: its replays would set the values again.
        """
        if is_capturing(self._params[:1]):
            raise RuntimeError(
                "a CUDA graph is being captured, and each of its replays would set these "
                "hyper-parameters again: call set_hyper before, or between replays"
            )
        optimizer, chains = self._with_hyper(hyper)
        hypers = [chain.hypers for chain in chains]
        more = self._numbers.fill(hypers, self._slots(optimizer))
        if more is not None:
            if self._captured is not None:
                raise ValueError(
                    f"{more}, which what was captured cannot follow: bind the parameters again, "
                    "and capture a step of those"
                )
            self._rebuild(optimizer, hypers)
        self._optimizer, self._hypers = optimizer, hypers
        self._group_chains = self._of_groups(chains)

    def _rebuild(self, optimizer: Chain, hypers: list[tuple[Any, ...]]) -> None:
        """Prepare for hyper-parameters of other kinds. After an error, nothing has changed."""
        before = self._optimizer, self._hypers, self._numbers
        try:
            self._numbers = self._device_numbers(optimizer, hypers)
            self._optimizer, self._hypers = optimizer, hypers
            self._prepare_capture()
        except BaseException:
            self._optimizer, self._hypers, self._numbers = before
            raise

    @with_lock
    def load_state(self, state: State) -> None:
        """Load a state as :meth:`BoundOptimizer.load_state`. Replays continue from this state.

        Raises:
            TypeError, ValueError: as for :meth:`BoundOptimizer.load_state`.
            RuntimeError: after a capture, step counts that must be equal differ; nothing has
                changed.
        """
        checked = self._checked(state)
        for buffer in self._buffers:
            buffer.check_together([int(checked[one.index].step) for one in buffer.segments])
        super().load_state(state)
        self._read_counts()


def _run_and_count(bound: BoundStep, items: Sequence[Item]) -> None:
    """Run a step, and increase the step counts on the device."""
    bound.run()
    with torch.no_grad():
        foreach_add_(list({id(one.state.step): one.state.step for one in items}.values()), 1)


def _each_once(scalars_of: Callable[[Item], StepScalars]) -> Callable[[Item], StepScalars]:
    """Return a function that computes the coefficients of each group and step count once."""
    known: dict[tuple[int, int], StepScalars] = {}

    def cached(item: Item) -> StepScalars:
        key = id(item.hypers), id(item.state.step)
        if key not in known:
            known[key] = scalars_of(item)
        return known[key]

    return cached
