"""An optimizer bound to parameters: flat buffers, prepared once, stepped without a loop.

What :meth:`Optimizer.update_` finds out anew at each call (trees, checks, where each tensor lies)
is found out once here. Parameters, gradients and state lie in flat buffers, so that a step is one
kernel call per buffer.
"""

import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from functional_optim import engine
from functional_optim.bound_buffer import copy_states
from functional_optim.bound_explain import Explainer, why_alone
from functional_optim.bound_gradients import ALL, BoundGradients, Gathered
from functional_optim.bound_joined import JoinedSteps
from functional_optim.bound_numbers import Numbers, OnHost
from functional_optim.bound_states import make_states
from functional_optim.bound_whole import WholeStep
from functional_optim.bound_work import step_lanes, works
from functional_optim.capturing import check_not_captured
from functional_optim.checks import check_grad, check_leaf_state, check_measured, check_writable
from functional_optim.compiling import uncompiled_class
from functional_optim.executors import Executor, LaneExecutor, is_measured
from functional_optim.flat_layout import FlatLayout
from functional_optim.gradient_memory import order_in_memory
from functional_optim.hyper import all_plain
from functional_optim.items import params_of
from functional_optim.native import LOOPS
from functional_optim.one_at_a_time import StepLock, one_at_a_time
from functional_optim.overrides import hypers_of, paths_of
from functional_optim.places import grads_of
from functional_optim.stage import grain_of
from functional_optim.state import LeafState, State
from functional_optim.tree import Path, flatten_like, leaf_states, path_name

if TYPE_CHECKING:
    from functional_optim.optimizer import Optimizer


@uncompiled_class
class BoundOptimizer:
    """What ``optimizer.bind(params)`` returns: one optimizer, its parameters and their state.

    Parameters are moved into flat buffers, and stay the same objects; ``state`` and ``gradients``
    are trees of views of such buffers.

    Several threads may call it: steps, and what changes numbers, state or layout, are made one
    after the other, in the order in which the threads come. Ctrl-C waits until they are made.

    Example::

        >>> import torch
        >>> from functional_optim import adamw
        >>> model = torch.nn.Linear(3, 1)
        >>> bound = adamw(lr=0.1).bind(dict(model.named_parameters()))
        >>> model(torch.ones(1, 3)).sum().backward()
        >>> bound.step()
        >>> int(bound.state.leaves["weight"].step)
        1
    """

    def __init__(self, optimizer: "Optimizer", params: Any, state: State | None = None) -> None:
        leaves, self._spec, paths = params_of(optimizer, params)
        self._lock = StepLock()
        self._optimizer = optimizer
        self._places = [i for i, leaf in enumerate(leaves) if leaf is not None]
        self._params: list[Tensor] = [leaves[i] for i in self._places]
        self._names = self._names_of([paths[i] for i in self._places])
        check_writable(dict(zip(self._names, self._params, strict=True)))
        self._measured = any(map(is_measured, optimizer.stages))
        self._hypers = self._hypers_of(optimizer)
        self._plain = all_plain(self._hypers)
        self._numbers = self._numbers_for(optimizer)
        self._lay_out(None if state is None else self._checked(state))

    def _numbers_for(self, optimizer: "Optimizer") -> Numbers:
        return OnHost(self._params)

    def _lay_out(self, given: list[LeafState] | None, order: Sequence[int] | None = None) -> None:
        """Parameters and state into buffers; the values of ``given``, if there are any."""
        stages = self._optimizer.stages
        grain = grain_of(stages)
        groups = {id(hypers): number for number, hypers in enumerate(self._hypers)}
        self._layout = FlatLayout(
            self._params,
            self._names,
            keys=[
                # Blocks of several elements follow each other in the order of the shape.
                (groups[id(hypers)], grain == 1 or param.is_contiguous())
                for hypers, param in zip(self._hypers, self._params, strict=True)
            ],
            align=grain,
            order=order,
        )
        beside = self._numbers.counts_beside
        made = make_states(stages, self._params, self._hypers, self._layout, counts_beside=beside)
        self._buffers, self._states, self._others = made
        self._ends = [one.ends for one in self._buffers if one.ends is not None]
        if given is not None:
            copy_states(self._states, given)
        self._short = any(buffer.dtype.itemsize <= 2 for buffer in self._layout.buffers)
        self._free: bool | None = None  # found out when it is asked
        self._state = State(self._tree(self._states))
        self._own = BoundGradients(self._layout, self._params, self._names, self._others)
        mine = [] if self._measured or self._others else self._buffers
        self._joined = JoinedSteps(stages, mine, self._own.views)
        self._whole = self._whole_step()
        self._gradients = self._own.views
        self._gradient_tree = self._tree(self._gradients)

    @property
    def optimizer(self) -> "Optimizer":
        """The optimizer; :meth:`set_hyper` changes its hyper-parameters."""
        return self._optimizer

    @property
    def params(self) -> Any:
        """The tree of parameters that was bound."""
        return self._tree(self._params)

    @property
    def state(self) -> State:
        """The state, stepped in place: what ``update`` takes, to be saved like any other."""
        return self._state

    @property
    def gradients(self) -> Any:
        """A tree of gradients in flat buffers: fill them, and give it to ``step``.

        Nothing is copied then. ``layout.attach_gradients()`` lets autograd write there.
        """
        return self._gradient_tree

    @property
    def layout(self) -> FlatLayout:
        """Where the parameters lie."""
        return self._layout

    @one_at_a_time
    def set_hyper(self, **hyper: Any) -> None:
        """Change hyper-parameters, by name, from the next step on.

        Raises:
            TypeError: a name that the chain does not have.
            ValueError: a value out of bounds, or an option that the state was not made for.
        """
        self._optimizer, hypers = self._with(hyper)
        self._use(hypers)

    def _use(self, hypers: list[tuple[Any, ...]]) -> None:
        """Step by these hyper-parameters from now on."""
        self._hypers, self._plain, self._free = hypers, all_plain(hypers), None
        self._whole = self._whole_step()

    def _check_options(self, optimizer: "Optimizer", hypers: list[tuple[Any, ...]]) -> None:
        """The state was made for these options; parameters of a group share them."""
        for i in {id(one): i for i, one in enumerate(hypers)}.values():
            state, name = self._states[i], self._names[i]
            check_leaf_state(optimizer.stages, hypers[i], self._params[i], state, name)

    @one_at_a_time
    def load_state(self, state: State) -> None:
        """Take over the values of another state of the same tree, such as one from a checkpoint.

        Raises:
            TypeError, ValueError: it is none of this optimizer and these parameters; nothing is
                changed then.
        """
        copy_states(self._states, self._checked(state))

    def ready(self, timeout: float | None = None) -> bool:
        """Wait until what compiles in the background is done; steps do not need it.

        Args:
            timeout: seconds to wait at most.

        Returns:
            Whether every buffer is stepped by what it will be stepped by from now on.
        """
        until = None if timeout is None else time.monotonic() + timeout
        LOOPS.wait(0.0)  # compiled beside the step
        done = self._explainer().ready(timeout)
        return LOOPS.wait(None if until is None else max(0.0, until - time.monotonic())) and done

    def explain(self) -> str:
        """What runs each stretch of the buffers, and why, one line each."""
        alone = why_alone(self._optimizer.stages, self._params, self._others, self._layout)
        return "\n".join([*self._explainer().lines(), *alone])

    @one_at_a_time
    def follow_gradients(self) -> None:
        """Place parameters and state in the order in which the ``.grad`` lie in memory now.

        Where gradients lie end to end, as in the buckets of DistributedDataParallel with
        ``gradient_as_bucket_view=True``, steps then read them there, and gather nothing. DDP
        arranges its buckets anew once, after the first iteration: call this after the second.
        Not so the short ones where 8-bit state is kept of parameters that do not fill their last
        block. It takes a copy of parameters and state; :attr:`state`, :attr:`gradients` and
        :attr:`layout` are new objects afterwards.

        Raises:
            ValueError: a parameter without a gradient, or with a sparse one; nothing has changed.
            RuntimeError: a parameter or buffer that someone has moved, resized or re-pointed.
        """
        order = order_in_memory(grads_of(self._params), self._names)
        self._layout.check()
        states = self._states
        self._layout.undo()
        self._lay_out(states, order)

    @one_at_a_time
    def release(self) -> None:
        """Give every parameter memory of its own again; this object is of no use afterwards."""
        self._layout.undo()

    @one_at_a_time
    def step(self, grads: Any = None, *, measured: Sequence[Tensor] = (), **hyper: Any) -> None:
        """One step of every parameter that has a gradient, in place.

        Args:
            grads: a tree like the parameters', with a gradient or None for each;
                :attr:`gradients`, to copy nothing; None to take the parameters' ``.grad``. Where
                gradients lie decides how parameters are joined to lanes, and by that how an
                executor that is not exact rounds.
            measured: as for :meth:`Optimizer.update`.
            hyper: hyper-parameters for this step only.

        Raises:
            TypeError: an unknown hyper-parameter, or a gradient that is no tensor.
            ValueError: another tree, a gradient of another shape, dtype or device, or a value out
                of bounds.
            RuntimeError: a parameter or buffer that someone has moved, resized or re-pointed; a
                sparse gradient that the chain cannot take; a CUDA graph is being captured.
        """
        if LOOPS.unsaid:
            LOOPS.say()
        if self._numbers.watched:
            check_not_captured(self._numbers.watched)
        whole = None if hyper or measured else self._whole
        if whole is not None and grads is self._gradient_tree and whole.make():
            return
        optimizer, hypers = self._with(hyper)
        if measured:
            check_measured(optimizer.stages, measured)
        self._layout.check()
        for buffer in self._buffers:
            buffer.check()
        executor = self._numbers.executor(optimizer)
        given = None if grads is self._gradient_tree else self._grad_list(grads)
        gathered: Gathered | None = None
        if self._is_flat(executor) and not (hyper and self._short and executor.exact):
            if given is not None and self._step_joined(executor, optimizer, hypers, given):
                self._layout.mark_changed()
                return
            gathered = self._gathered(given)
            if whole is not None and gathered == ALL and whole.make():
                return
        if gathered is not None:
            assert isinstance(executor, LaneExecutor)
            self._step_flat(executor, optimizer, hypers, given, measured, gathered)
        else:
            every = self._gradients if given is None else given
            items = self._items(hypers, every, range(len(every)))
            engine.update_(optimizer.stages, executor, items, measured, self._numbers.make())
        self._layout.mark_changed()

    def _with(self, hyper: dict[str, Any]) -> tuple["Optimizer", list[tuple[Any, ...]]]:
        """The optimizer, and hyper-parameters of each parameter, for one step."""
        if not hyper:
            return self._optimizer, self._hypers
        optimizer = self._optimizer.replace(**hyper)
        hypers = self._hypers_of(optimizer)
        self._check_options(optimizer, hypers)
        return optimizer, hypers

    def _step_joined(
        self, executor: LaneExecutor, optimizer: "Optimizer", hypers: Any, given: Sequence[Any]
    ) -> bool:
        """The step by gradients where they lie; whether it was made."""
        plain = hypers is self._hypers and self._plain
        at = self._numbers.at(optimizer.stages, plain=plain)
        return self._joined.make(executor, given, hypers, at, plain=plain)

    def _whole_step(self) -> WholeStep | None:
        """What makes the commonest step, where it can be made."""
        executor, stages = self._numbers.executor(self._optimizer), self._optimizer.stages
        if not self._is_flat(executor) or self._measured or self._others or not self._plain:
            return None
        return WholeStep(executor, stages, self._buffers, self._hypers, self._ends, self._layout)

    def _is_flat(self, executor: Executor) -> TypeGuard[LaneExecutor]:
        """Whether an executor steps the buffers as lanes."""
        if not isinstance(executor, LaneExecutor) or not (executor.exact and self._short):
            return isinstance(executor, LaneExecutor)
        # Torch's kernels round the last 16-bit floats of a tensor in another way: but for loops
        # that do not, lane and leaf by leaf are not the same to the bit.
        if self._free is None:
            self._free = self._explainer().is_cut_freely()
        return self._free

    def _step_flat(
        self,
        executor: LaneExecutor,
        optimizer: "Optimizer",
        hypers: list[tuple[Any, ...]],
        given: list[Tensor | None] | None,
        measured: Sequence[Tensor],
        gathered: Gathered,
    ) -> None:
        """Buffers as lanes; parameters apart one by one."""
        stages = optimizer.stages
        plain = hypers is self._hypers and self._plain
        at = self._numbers.at(stages, plain=plain)
        find = partial(works, self._buffers, hypers, given, gathered, at=at, plain=plain)
        work = find()
        lanes = [one.lane for one in work]
        others = self._items(hypers, self._gradients if given is None else given, self._others)
        executor.require(stages, lanes)
        totals: Sequence[Tensor] = measured
        if self._measured:
            with torch.no_grad():
                # What lies between gradients is not measured.
                bare = [one.lane for one in find(filled=False)] if self._ends else lanes
                totals = executor.totals(stages, bare, measured)
        if others:  # first: it may find something wrong before it writes
            engine.update_(stages, executor, others, totals, self._numbers.make())
        step_lanes(executor, stages, lanes, totals, self._ends, self._layout)
        for buffer in self._buffers:
            buffer.advance([one.part for one in work if one.buffer is buffer])

    def _items(
        self,
        hypers: list[tuple[Any, ...]],
        grads: Sequence[Tensor | None],
        which: Sequence[int],
    ) -> list[engine.Item]:
        """These parameters as :meth:`Optimizer.update_` steps them, one by one."""
        items = []
        for i in which:
            grad, param, name = grads[i], self._params[i], self._names[i]
            if grad is not None:
                check_grad(param, grad, name)
                items.append(engine.Item(param, grad, self._states[i], hypers[i], name))
        return items

    def _gathered(self, given: list[Tensor | None] | None) -> Gathered | None:
        """Where gradients are to be read; None where the step must go leaf by leaf."""
        if not self._buffers or (self._measured and self._others):
            return None
        return ALL if given is None else self._own.gather(given)

    def _grad_list(self, grads: Any) -> list[Tensor | None]:
        """One gradient or None for each parameter."""
        if grads is None:
            return grads_of(self._params)
        found = flatten_like(self._spec, grads, "gradients")
        if len(self._places) == len(found):
            return found
        for place, grad in enumerate(found):
            if grad is not None and place not in self._places:
                name = path_name(paths_of(self._spec)[place])
                raise ValueError(f"there is a gradient at {name!r}, but the parameter is None")
        return [found[place] for place in self._places]

    def _names_of(self, paths: Sequence[Path]) -> list[str]:
        """What errors call the parameters."""
        return list(map(path_name, paths))

    def _hypers_of(self, optimizer: "Optimizer") -> list[tuple[Any, ...]]:
        every = hypers_of(optimizer.links, optimizer.overrides, self._spec)
        return [every[place] for place in self._places]

    def _checked(self, state: State) -> list[LeafState]:
        """The leaf states of a state that belongs to these parameters."""
        found = leaf_states(self._spec, state)
        given, stages = [found[place] for place in self._places], self._optimizer.stages
        pairs = zip(self._params, self._names, given, self._hypers, strict=True)
        for param, name, one, hypers in pairs:
            check_leaf_state(stages, hypers, param, one, name)
        return given

    def _tree(self, values: Sequence[Any]) -> Any:
        placed: list[Any] = [None] * self._spec.num_leaves
        for place, value in zip(self._places, values, strict=True):
            placed[place] = value
        return self._spec.unflatten(placed)

    def _explainer(self) -> Explainer:
        hypers, plain = self._hypers, self._plain
        return Explainer(self._optimizer, self._numbers, self._buffers, hypers, plain=plain)
