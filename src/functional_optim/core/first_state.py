"""State before the first step: which of it starts as the parameter, and is made again then.

Between the construction of an optimizer and the first step, a model may be loaded: an average, or a
float32 master, has to start from the parameter of then. What starts as zeros, or as any number, is
kept as it stands, since a caller may have written to it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import ne
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from functional_optim.core.initial import init_beside, init_leaf, kept_for_plain
from functional_optim.core.stage import Rule, Stage
from functional_optim.core.state import LeafState, map_state, state_tensors
from functional_optim.core.without_memory import WithoutMemory

_MAKING = frozenset(
    {
        *(torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like),
        *(torch.rand_like, torch.randn_like, torch.randint_like),
        *(Tensor.new_empty, Tensor.new_empty_strided, Tensor.new_zeros, Tensor.new_ones),
        Tensor.new_full,
    }
)
"""Functions that take the shape and the dtype of a tensor, and none of its values."""
_FILLING = frozenset({Tensor.zero_, Tensor.fill_})
"""Functions after which the values of before are gone."""


class _ValuesOf(TorchFunctionMode):
    """While it is on, it follows the tensors that are made of the values of one.

    Args:
        tensor: this one.
    """

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        # Whether each tensor is made of them. They live, so that no number comes twice.
        self._seen: dict[int, tuple[Tensor, bool]] = {id(tensor): (tensor, True)}

    def __contains__(self, tensor: Tensor) -> bool:
        """Return True if a tensor is made of the values, or nothing is known of it."""
        return self._seen.get(id(tensor), (tensor, True))[1]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function, and note what it makes."""
        result = func(*args, **(kwargs or {}))
        given = _tensors_in((args, kwargs))
        made = given if result is None else _tensors_in(result)  # None: it has written to some
        is_of_values = func not in _MAKING | _FILLING and any(one in self for one in given)
        self._seen.update({id(one): (one, is_of_values) for one in made})
        return result


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for one in value for tensor in _tensors_in(one)]
    return []


Starts = tuple[tuple[bool, ...], ...]
"""For each stage, for each tensor of its state, whether it starts as values of the parameter."""


def _starts_of_any(
    stages: tuple[Stage, ...], hypers: tuple[Any, ...], shape: tuple[int, ...], dtype: torch.dtype
) -> Starts:
    """Return which tensors of the first state are made of the values of the parameter.

    So are those of a tensor among the hyper-parameters, into which a scheduler may write before the
    first step. An ``init`` that cannot be followed without memory, since it looks at values, counts
    as one that makes all of its state of them.
    """
    param = torch.empty(shape, dtype=dtype, device="meta")
    try:
        with torch.no_grad(), WithoutMemory(), _ValuesOf(param) as values:
            made = init_beside(stages, hypers, param)
    except (NotImplementedError, RuntimeError):
        with torch.no_grad():
            made = init_beside(stages, hypers, torch.zeros(shape, dtype=dtype, device="cpu"))
        return tuple((True,) * len(state_tensors([one])) for one in made.stages)
    return tuple(tuple(one in values for one in state_tensors([own])) for own in made.stages)


starts_as_param = kept_for_plain(_starts_of_any)
"""The same, from a cache where it may be kept."""


def _first_numbers_of_any(
    stages: tuple[Stage, ...], hypers: tuple[Any, ...], shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[list[Any], ...]:
    """Return for each stage the values of its first state, of a parameter of zeros."""
    with torch.no_grad():
        made = init_beside(stages, hypers, torch.zeros(shape, dtype=dtype, device="cpu")).stages
    return tuple([one.tolist() for one in state_tensors([own])] for own in made)


_first_numbers = kept_for_plain(_first_numbers_of_any)


def _stages_that_ran(stages: Sequence[Stage], state: LeafState) -> list[bool]:
    """Return for each stage whether it has run for this leaf: up to a gate, or in a step."""
    counts = iter([*(one.runs for one in state.gates), state.step])
    found, ran = [], int(next(counts)) > 0
    for stage in stages:
        found.append(ran)
        if stage.gate is not None:
            ran = int(next(counts)) > 0
    return found


def with_first_values(
    stages: Sequence[Stage],
    hypers: Sequence[Any],
    param: Tensor,
    state: LeafState,
    made_for: Sequence[Any] | None = None,
) -> LeafState:
    """Return a state in which what starts as the parameter starts as it is now.

    So it is, stage by stage, where a stage has not run yet, and while no rule has changed the
    parameter: between two gates, one may have. The state is returned as it is, if it has no such
    tensor.

    Args:
        stages: of the chain.
        hypers: its hyper-parameters, of now.
        param: the parameter, as it is now.
        state: of the leaf.
        made_for: the hyper-parameters that the state was made for, if they may be others.
    """
    wanted = starts_as_param(stages, hypers, param.shape, param.dtype)
    if made_for is not None and made_for is not hypers:
        wanted = _also_changed(wanted, stages, hypers, made_for, param)
    if not any(map(any, wanted)):
        return state
    ran = _stages_that_ran(stages, state)
    pairs = list(zip(stages, ran, strict=True))
    if any(has and isinstance(stage, Rule) for stage, has in pairs):
        return state
    if not any(any(own) for own, has in zip(wanted, ran, strict=True) if not has):
        return state
    with torch.no_grad():
        made = init_leaf(stages, hypers, param)
    return state._replace(
        stages=tuple(
            own if has else _chosen(one, own, new)
            for one, own, new, has in zip(wanted, state.stages, made.stages, ran, strict=True)
        )
    )


def _chosen(wanted: Sequence[bool], own: Any, new: Any) -> Any:
    """Return a stage's state, with those tensors of the new one that are wanted."""
    left = iter(wanted)
    pick: Callable[[Tensor, Tensor], Tensor] = lambda a, b: b if next(left) else a  # noqa: E731
    return map_state(pick, own, new)


def _also_changed(
    wanted: Starts,
    stages: Sequence[Stage],
    hypers: Sequence[Any],
    before: Sequence[Any],
    param: Tensor,
) -> Starts:
    """Return also the tensors that start otherwise, since hyper-parameters are others now."""
    for stage, one, other in zip(stages, hypers, before, strict=True):
        if one is not other and stage.stateful:
            break
    else:
        return wanted
    small = (1,) * param.dim()  # seen at a parameter of one element
    numbers = [_first_numbers(stages, own, small, param.dtype) for own in (hypers, before)]
    found = []
    for own, now, then in zip(wanted, *numbers, strict=True):
        is_alike = len(own) == len(now) == len(then)
        changed = map(ne, now, then) if is_alike else [True] * len(own)
        found.append(tuple(one or other for one, other in zip(own, changed, strict=True)))
    return tuple(found)
