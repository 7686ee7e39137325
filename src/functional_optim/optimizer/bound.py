"""BoundOptimizer: parameters, their gradients and their state in flat buffers."""

import time
from collections.abc import Sequence
from itertools import compress
from operator import is_
from typing import Any, NoReturn

from torch import Tensor

from functional_optim.core.chain import Chain, require_one_dense_chain, with_hyper
from functional_optim.core.checks import check_leaf_state, check_measured, check_writable
from functional_optim.core.dynamo import disable_compile_of_class
from functional_optim.core.graph_capture import check_not_captured
from functional_optim.core.hyper import copy_tensors
from functional_optim.core.lock import StepLock, with_lock
from functional_optim.core.overrides import LeafChain, chains_of, paths_of
from functional_optim.core.stage import block_size_of
from functional_optim.core.state import LeafState, State
from functional_optim.core.tree import flatten_like, leaf_states, path_name
from functional_optim.kernels import Chunks, Leaf, Scalars, executor_taking, in_place
from functional_optim.kernels.rounding import record_rounding
from functional_optim.native import LOOPS
from functional_optim.optimizer.bound_buffer import copy_states
from functional_optim.optimizer.bound_leaves import BoundLeaves, whole_buffers
from functional_optim.optimizer.bound_states import (
    StateGuard,
    check_shapes,
    gradients_of,
    init_states,
    layout_of,
    why_alone,
)
from functional_optim.optimizer.explain import explain_chunk
from functional_optim.plan import tree_steps
from functional_optim.plan.flat.layout import FlatLayout
from functional_optim.plan.guard import grads_of, mark_changed
from functional_optim.plan.item import coefficients_at
from functional_optim.plan.list_layout import MemoryGuard
from functional_optim.plan.tree import params_of


@disable_compile_of_class
class BoundOptimizer:
    """Result of ``optimizer.bind(params)``: an optimizer, its parameters and their state.

    Parameters are moved into flat buffers, and stay the same objects. ``state`` and ``gradients``
    are trees of views of flat buffers.

    Several threads may call its methods: steps and changes of hyper-parameters, state or layout run
    one after the other. Ctrl-C waits until a step is complete. ``copy.deepcopy((model, bound))``
    binds the copied model. A copy has its own flat buffers, and the same optimizer and values of
    parameters and state. The contents of gradient buffers are not copied.

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

    _scalars = Scalars.HOST
    """The origin of coefficients, and the location of step counts: the host or the device."""

    def __init__(self, optimizer: Chain, params: Any, state: State | None = None) -> None:
        require_one_dense_chain(optimizer, "bind")
        leaves, self._spec, paths = params_of(optimizer, params)
        self._lock = StepLock()
        self._optimizer = optimizer
        self._places = [i for i, leaf in enumerate(leaves) if leaf is not None]
        self._params: list[Tensor] = [leaves[i] for i in self._places]
        self._names = [path_name(paths[i]) for i in self._places]
        check_writable(dict(zip(self._names, self._params, strict=True)))
        chains = self._chains_of(optimizer)
        self._hypers = [chain.hypers for chain in chains]
        self._uncaptured = [param for param in self._params if param.is_cuda][:1]
        """A CUDA parameter, if there is one: its steps must not be captured."""
        name, on_host = optimizer.executor, self._scalars is Scalars.HOST
        self._executor_name = in_place(name, self._params, optimizer.stages) if on_host else name
        self._executor = executor_taking(self._executor_name, self._scalars)
        self._prepare_scalars(optimizer)
        self._fill_buffers(chains, None if state is None else self._checked(state))

    @with_lock
    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._optimizer, self.params, self._state)

    def __copy__(self) -> NoReturn:
        raise TypeError(
            f"copy.copy of a {type(self).__name__} would step the same parameters by a second "
            "state: use copy.deepcopy((params, bound)), which copies the parameters too"
        )

    def _prepare_scalars(self, optimizer: Chain) -> None:
        """Prepare scalars on the device. Errors are raised before any parameter is moved."""

    def _fill_buffers(self, chains: Sequence[LeafChain], given: list[LeafState] | None) -> None:
        """Move parameters and state into buffers."""
        stages = self._optimizer.stages
        numbers = {own: k for k, own in enumerate(dict.fromkeys(map(id, chains)))}
        groups = [numbers[id(own)] for own in chains]
        self._firsts = [groups.index(group) for group in range(len(numbers))]
        """The first parameter of each group. Parameters of a group have one chain."""
        self._layout = layout_of(self._params, self._names, groups, block_size_of(stages))
        try:
            self._fill(chains, groups, given)
        except BaseException:
            self._layout.undo()
            raise

    def _fill(
        self, chains: Sequence[LeafChain], groups: Sequence[int], given: list[LeafState] | None
    ) -> None:
        """Create the state and the leaves of steps, for parameters that are in buffers."""
        stages = self._optimizer.stages
        of = stages, self._params, self._hypers, self._layout
        made = init_states(*of, counts_on_device=self._scalars is Scalars.DEVICE)
        self._buffers, self._states, self._others = made
        if given is not None:
            check_shapes(self._states, given, self._names)
            copy_states(self._states, given)
        self._state = State(self._tree(self._states))
        self._gradients = gradients_of(self._layout, self._params)
        self._own_leaves = self._placed(self._gradients)
        self._gradient_tree, self._param_tree = self._tree(self._gradients), self.params
        self._group_chains = self._of_groups(chains)
        parts = self._layout, self._params, self._names, self._states, groups, self._gradients
        flat = whole_buffers(stages, self._by_chunks(), self._buffers, all_in=not self._others)
        self._whole = BoundLeaves(self._executor, flat, *parts)
        """Leaves of a step of whole buffers."""
        self._single = BoundLeaves(self._executor, (), *parts)
        """Leaves of a step of single parameters."""
        written = [one for buffer in self._buffers for one in buffer.written]
        self._guarded = [*self._layout.params, *written, *self._layout.gradient_buffers()]
        """Parameters and buffers, which must stay at their addresses."""
        self._guard = MemoryGuard(self._guarded, leaves=len(self._layout.params))
        self._state_guard: StateGuard | None = None
        """Checks the state if the caller has got it: only then can its tensors have moved."""

    @property
    def optimizer(self) -> Chain:
        """The optimizer; :meth:`set_hyper` changes its hyper-parameters."""
        return self._optimizer

    @property
    def params(self) -> Any:
        """The tree of parameters that was bound."""
        return self._tree(self._params)

    @property
    def state(self) -> State:
        """The state, which steps change in place. ``update`` takes it, and it can be saved.

        You may write values into its tensors. If a tensor gets other memory, the next step raises
        an error.
        """
        if self._state_guard is None:
            self._state_guard = StateGuard(self._states, self._names)
        return self._state

    @property
    def gradients(self) -> Any:
        """A tree of gradients in flat buffers: fill them, and pass the tree to ``step``.

        Then nothing is copied. ``layout.attach_gradients()`` lets autograd write there.
        """
        return self._gradient_tree

    @property
    def layout(self) -> FlatLayout:
        """Layout of the parameters."""
        return self._layout

    @with_lock
    def set_hyper(self, **hyper: Any) -> None:
        """Change hyper-parameters, by name, from the next step on.

        State that ``bind`` has computed from the old value does not change, such as the first step
        sizes of ``rprop``. So bind an optimizer with the learning rate of the first step.

        Raises:
            TypeError: a name that the chain does not have.
            ValueError: a value out of bounds, or an option that needs another state.
        """
        self._optimizer, chains = self._with_hyper(copy_tensors(hyper))
        self._hypers = [chain.hypers for chain in chains]
        self._group_chains = self._of_groups(chains)

    def _of_groups(self, chains: Sequence[LeafChain]) -> list[LeafChain]:
        """Return the chain of each group, from those of the parameters."""
        return [chains[place] for place in self._firsts]

    def _check_options(self, optimizer: Chain, chains: Sequence[LeafChain]) -> None:
        """Raise an error if the state does not fit hyper-parameters, once for each group."""
        for i in {id(one): i for i, one in enumerate(chains)}.values():
            own = self._params[i], self._states[i], self._names[i]
            check_leaf_state(optimizer.stages, chains[i].hypers, *own)

    @with_lock
    def load_state(self, state: State) -> None:
        """Copy the values of another state of the same tree, such as the state of a checkpoint.

        Raises:
            TypeError, ValueError: the state is of another optimizer or tree; nothing has changed.
            RuntimeError: a tensor of the bound state has other memory; nothing has changed.
        """
        if self._state_guard is not None:
            self._state_guard.check()
        given = self._checked(state)
        check_shapes(self._states, given, self._names)
        copy_states(self._states, given)

    def ready(self, timeout: float | None = None) -> bool:
        """Compile the step now, and wait for background compilation. Steps work without this call.

        Args:
            timeout: maximal number of seconds to wait. With an empty cache, kernels take tenths of
                a second, and native loops some seconds. With fewer than 64 parameters, this method
                does not wait for native loops.

        Returns:
            False if the native loops are still being compiled.
        """
        until = None if timeout is None else time.monotonic() + timeout
        LOOPS.wait(0.0, count=len(self._params))  # starts compilation in the background
        if (by_chunks := self._by_chunks()) is not None:
            for chunk in self._first_chunks():
                by_chunks.compile(self._optimizer.stages, chunk)
        left = None if until is None else max(0.0, until - time.monotonic())
        return LOOPS.wait(left, count=len(self._params))

    def explain(self) -> str:
        """Return which kernel steps each buffer, and why, one line for each buffer."""
        stages, how = self._optimizer.stages, (self._executor_name, self._executor)
        counts = [sum(one.numel for one in buffer.segments) for buffer in self._buffers]
        pairs = zip(self._first_chunks(), counts, strict=True)
        lines = [explain_chunk(stages, *how, *pair) for pair in pairs]
        return "\n".join([*lines, *why_alone(stages, self._params, self._others, self._layout)])

    @with_lock
    def release(self) -> None:
        """Move every parameter to a separate storage. Do not use this object afterwards."""
        self._layout.undo()

    @with_lock
    def step(self, grads: Any = None, *, measured: Sequence[Tensor] = (), **hyper: Any) -> None:
        """Step every parameter that has a gradient, in place.

        Args:
            grads: a tree like that of the parameters, with a gradient or None for each; or
                :attr:`gradients`, or None to read ``.grad``. If the flat buffers contain all
                gradients, each buffer is stepped as one tensor. Otherwise parameters are stepped
                as by :meth:`Optimizer.update_`, so that with an executor that is not exact,
                rounding depends on the memory of the gradients. On an accelerator, and if
                gradients differ from their parameters in strides or are complex, gradients are
                copied into the buffers first.
            measured: as for :meth:`Optimizer.update`.
            hyper: hyper-parameters for this step only.

        Raises:
            TypeError: an unknown hyper-parameter, or a gradient that is not a tensor.
            ValueError: another tree, a gradient of another shape, dtype or device, a value out of
                bounds, or a parameter that has become the result of an operation.
            RuntimeError: a parameter, a buffer or a tensor of the state was moved or resized, or
                has other memory; a sparse gradient that the chain cannot take; a CUDA graph is
                being captured.
        """
        if LOOPS.pending_warning:
            LOOPS.warn_pending()
        if self._uncaptured:
            check_not_captured(self._uncaptured)
        if measured:
            check_measured(self._optimizer.stages, measured)
        if self._state_guard is not None:
            self._state_guard.check()
        optimizer, chains = self._optimizer, self._group_chains
        if hyper:
            optimizer, every = self._with_hyper(hyper)
            chains = self._of_groups(every)
        given = None if self._are_own(grads) else self._grad_list(grads)
        if not self._guard.hold(self._guarded):
            self._check_memory(given)
            self._guard = MemoryGuard(self._guarded, leaves=len(self._layout.params))
        self._step(optimizer, chains, given, measured)

    def _step(
        self,
        optimizer: Chain,
        chains: Sequence[LeafChain],
        given: list[Tensor | None] | None,
        measured: Sequence[Tensor],
    ) -> None:
        """Step whole buffers if they contain the gradients, and else single parameters.

        Without a plan, as for parameters that share memory, step the tree.
        """
        leaves, every = self._whole, self._single.own if given is None else given
        grads = leaves.own if given is None else leaves.gradients(given)
        step = None if grads is None else leaves.prepare(optimizer.links, chains, grads, measured)
        if step is None:
            leaves, grads = self._single, every
            step = leaves.prepare(optimizer.links, chains, every, measured)
        if step is None:
            tree = self._param_tree, self._tree(every), self._state
            tree_steps.update_(optimizer, tree, measured, {})
        is_all = grads is not None and type(None) not in map(type, grads)
        mark_changed(leaves.all_changed if is_all else leaves.changed(grads or ()))
        if step is not None:
            leaves.steps.run(step, ())

    def _check_memory(self, grads: list[Tensor | None] | None) -> None:
        """Raise an error if memory has moved, or a parameter with a gradient is not a leaf."""
        self._layout.check()
        stepped = [True] * len(self._params) if grads is None else [g is not None for g in grads]
        check_writable(dict(compress(zip(self._names, self._params, strict=True), stepped)))
        for buffer in self._buffers:
            buffer.check()

    def _with_hyper(self, hyper: dict[str, Any]) -> tuple[Chain, list[LeafChain]]:
        """Return the optimizer with other values, and the chain of each parameter."""
        optimizer = with_hyper(self._optimizer, hyper)
        chains = self._chains_of(optimizer)
        self._check_options(optimizer, chains)
        return optimizer, chains

    def _are_own(self, grads: Any) -> bool:
        """Return True for the tree of gradients in flat buffers, with all of its tensors."""
        if grads is not self._gradient_tree:
            return False
        try:
            every = self._spec.flatten_up_to(grads)
        except ValueError:  # an entry was removed
            return False
        return all(map(is_, every, self._own_leaves))

    def _grad_list(self, grads: Any) -> list[Tensor | None]:
        """Return a gradient or None for each parameter."""
        if grads is None:
            return grads_of(self._params)
        found = flatten_like(self._spec, grads, "gradients")
        if len(self._places) == len(found):
            return found
        for place, grad in enumerate(found):
            if grad is not None and place not in self._places:
                name = path_name(paths_of(self._spec)[place])
                raise ValueError(
                    f"there is a gradient at {name!r}, but the parameter is None; pass None there"
                )
        return [found[place] for place in self._places]

    def _chains_of(self, optimizer: Chain) -> list[LeafChain]:
        given = self._spec, self._placed(self._params)
        every = chains_of(optimizer.links, optimizer.overrides, *given)
        return [every[place] for place in self._places]

    def _checked(self, state: State) -> list[LeafState]:
        """Check a state of these parameters, and return the state of each."""
        found = leaf_states(self._spec, state)
        given, stages = [found[place] for place in self._places], self._optimizer.stages
        for own in zip(self._hypers, self._params, given, self._names, strict=True):
            check_leaf_state(stages, *own)
        return given

    def _tree(self, values: Sequence[Any]) -> Any:
        return self._spec.unflatten(self._placed(values))

    def _placed(self, values: Sequence[Any]) -> list[Any]:
        placed = dict(zip(self._places, values, strict=True))
        return [placed.get(place) for place in range(self._spec.num_leaves)]

    def _by_chunks(self) -> Chunks | None:
        """Return the stepper of buffers; None if each parameter is stepped alone."""
        stages = self._optimizer.stages
        if self._executor.in_chunks(stages) is not None and self._scalars is Scalars.HOST:
            for chunk in self._first_chunks():
                record_rounding(stages, chunk)
        return self._executor.in_chunks(stages)

    def _first_chunks(self) -> list[Leaf]:
        """Return each buffer as a chunk, with the coefficients of a first step."""
        made = [self._first_coefficients(one.segments[0].index) for one in self._buffers]
        pairs = zip(self._buffers, made, strict=True)
        return [buffer.first_chunk(*own, self._scalars) for buffer, own in pairs]

    def _first_coefficients(self, place: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return coefficients_at(self._optimizer.stages, self._hypers[place], 1.0)
