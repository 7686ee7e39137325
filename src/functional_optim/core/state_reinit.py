"""Repeated initialization, in the first step, of state that starts as values of the parameter.

A model may be loaded between the construction of an optimizer and the first step. So an average or
a float32 master weight is initialized again in the first step. State that starts as zeros or
another constant is not, since the caller may have written to it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import ne
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from functional_optim.core.meta_init import MetaLikeMode
from functional_optim.core.stage import Rule, Stage
from functional_optim.core.state import LeafState, map_state, state_tensors
from functional_optim.core.state_init import cache_plain, init_leaf, init_stand_in
from functional_optim.core.tree import tensors_in

_FACTORIES = frozenset(
    {
        *(torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like),
        *(torch.rand_like, torch.randn_like, torch.randint_like),
        *(Tensor.new_empty, Tensor.new_empty_strided, Tensor.new_zeros, Tensor.new_ones),
        Tensor.new_full,
    }
)
"""Functions that read the shape and the dtype of a tensor, but no values."""
_FILLING = frozenset({Tensor.zero_, Tensor.fill_})
"""Functions that overwrite all values."""


class _ValueTracker(TorchFunctionMode):
    """Mode that tracks which tensors are computed from the values of the tensor ``source``."""

    def __init__(self, source: Tensor) -> None:
        super().__init__()
        # By id: the tensor, which is kept alive so that its id stays unique, and its dependence.
        self._seen: dict[int, tuple[Tensor, bool]] = {id(source): (source, True)}

    def __contains__(self, tensor: Tensor) -> bool:
        """Return True if a tensor depends on the values of the source, or is unknown."""
        return self._seen.get(id(tensor), (tensor, True))[1]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function, and record if its results depend on the values."""
        result = func(*args, **(kwargs or {}))
        inputs = tensors_in((args, kwargs))
        outputs = inputs if result is None else tensors_in(result)  # None: it wrote to its inputs
        depends = func not in _FACTORIES | _FILLING and any(one in self for one in inputs)
        self._seen.update({id(one): (one, depends) for one in outputs})
        return result


Starts = tuple[tuple[bool, ...], ...]
"""For each stage and each tensor of its state, True if the tensor starts as parameter values."""


def _compute_starts(
    stages: tuple[Stage, ...], hypers: tuple[Any, ...], shape: tuple[int, ...], dtype: torch.dtype
) -> Starts:
    """Return which tensors of the initial state depend on the values of the parameter.

    A tensor that depends on a tensor hyper-parameter also counts, since a scheduler may write the
    hyper-parameter before the first step. If ``init`` cannot run on the meta device, since it reads
    values, all of the state counts.
    """
    param = torch.empty(shape, dtype=dtype, device="meta")
    try:
        with torch.no_grad(), MetaLikeMode(), _ValueTracker(param) as values:
            made = init_stand_in(stages, hypers, param)
    except (NotImplementedError, RuntimeError):
        with torch.no_grad():
            made = init_stand_in(stages, hypers, torch.zeros(shape, dtype=dtype, device="cpu"))
        return tuple((True,) * len(state_tensors([one])) for one in made.stages)
    return tuple(tuple(one in values for one in state_tensors([own])) for own in made.stages)


starts_as_param = cache_plain(_compute_starts)
"""Cached :func:`_compute_starts`."""


def _compute_initial_values(
    stages: tuple[Stage, ...], hypers: tuple[Any, ...], shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[list[Any], ...]:
    """Return for each stage the values of the initial state of a zero parameter."""
    with torch.no_grad():
        made = init_stand_in(stages, hypers, torch.zeros(shape, dtype=dtype, device="cpu")).stages
    return tuple([one.tolist() for one in state_tensors([own])] for own in made)


_initial_values = cache_plain(_compute_initial_values)


def _stages_that_ran(stages: Sequence[Stage], state: LeafState) -> list[bool]:
    """Return for each stage True if it has run for this leaf, in a step or before a closed gate."""
    counts = iter([*(one.runs for one in state.gates), state.step])
    found, ran = [], int(next(counts)) > 0
    for stage in stages:
        found.append(ran)
        if stage.gate is not None:
            ran = int(next(counts)) > 0
    return found


def reinit_state(
    stages: Sequence[Stage],
    hypers: Sequence[Any],
    param: Tensor,
    state: LeafState,
    init_hypers: Sequence[Any] | None = None,
) -> LeafState:
    """Return a state in which tensors that start as the parameter have its current values.

    Only stages that have not run yet are initialized again, and only if no rule has run: a rule
    between two gates may have changed the parameter. If nothing changes, ``state`` is returned.
    ``init_hypers`` initialized the state, if they may differ from ``hypers``.
    """
    wanted = starts_as_param(stages, hypers, param.shape, param.dtype)
    if init_hypers is not None and init_hypers is not hypers:
        wanted = _add_changed(wanted, stages, hypers, init_hypers, param)
    if not any(map(any, wanted)):
        return state
    ran = _stages_that_ran(stages, state)
    pairs = list(zip(stages, ran, strict=True))
    if any(has and isinstance(stage, Rule) for stage, has in pairs):
        return state
    again = [k for k, one in enumerate(wanted) if any(one) and not ran[k]]
    if not again:
        return state
    with torch.no_grad():  # only these stages: others may have a state of the parameter's size
        made = init_leaf([stages[k] for k in again], [hypers[k] for k in again], param)
    states = list(state.stages)
    for k, new in zip(again, made.stages, strict=True):
        states[k] = _select_tensors(wanted[k], states[k], new)
    return state._replace(stages=tuple(states))


def _select_tensors(is_new: Sequence[bool], old: Any, new: Any) -> Any:
    """Return a stage's state with the tensors of the new state for which ``is_new`` is True."""
    flags = iter(is_new)
    pick: Callable[[Tensor, Tensor], Tensor] = lambda a, b: b if next(flags) else a  # noqa: E731
    return map_state(pick, old, new)


def _add_changed(
    wanted: Starts,
    stages: Sequence[Stage],
    hypers: Sequence[Any],
    before: Sequence[Any],
    param: Tensor,
) -> Starts:
    """Return ``wanted``, also True for tensors whose initial values changed with ``hypers``."""
    for stage, one, other in zip(stages, hypers, before, strict=True):
        if one is not other and stage.stateful:
            break
    else:  # a generator would be a call for each stage of each parameter
        return wanted
    small = (1,) * param.dim()  # compared on a parameter of one element
    numbers = [_initial_values(stages, own, small, param.dtype) for own in (hypers, before)]
    found = []
    for own, now, then in zip(wanted, *numbers, strict=True):
        is_alike = len(own) == len(now) == len(then)
        changed = map(ne, now, then) if is_alike else [True] * len(own)
        found.append(tuple(one or other for one, other in zip(own, changed, strict=True)))
    return tuple(found)
