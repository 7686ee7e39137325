"""The state of a parameter before its first step, and what it looks like."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.calling import started
from functional_optim.forms import map_state, real_view
from functional_optim.hyper import is_plain
from functional_optim.stage import Stage
from functional_optim.state import LeafState, field_tensors


def init_leaf(stages: Sequence[Stage], hypers: Sequence[Any], param: Tensor) -> LeafState:
    """The state of a parameter before its first step."""
    require_dtype(stages, param.dtype)
    view = real_view(param)
    states = tuple(started(stage, view, hyper) for stage, hyper in zip(stages, hypers, strict=True))
    if param.is_complex():
        states = tuple(
            map_state(lambda t: torch.view_as_complex(t) if t.shape == view.shape else t, state)
            for state in states
        )
    return LeafState(torch.zeros((), dtype=torch.int64, device="cpu"), states)


def require_dtype(stages: Sequence[Stage], dtype: torch.dtype, where: str = "") -> None:
    """Every stage takes parameters of this dtype.

    Raises:
        ValueError: names the stage that does not.
    """
    for stage in stages:
        if stage.dtypes and dtype not in stage.dtypes:
            raise ValueError(
                f"{stage.name} takes parameters of {' or '.join(map(str, stage.dtypes))}, got "
                f"{dtype}{where}: convert parameters and gradients, or build another optimizer"
            )


class Field(NamedTuple):
    """A field of a stage's state, as ``init`` makes it for some hyper-parameters."""

    name: str
    tensors: int | None
    """How many tensors an option puts there; None for a field that is always one tensor."""
    dtype: torch.dtype | None
    """The dtype; None where there is no tensor."""


def fields_of(
    stages: Sequence[Stage], hypers: Sequence[Any], dims: int, dtype: torch.dtype
) -> tuple[tuple[Field, ...], ...]:
    """The fields of every stage's state, for parameters of ``dims`` dimensions and a dtype.

    Kept for hyper-parameters that are plain numbers; others (a tensor with its graph, a schedule)
    must not be kept alive by a cache.
    """
    if all(map(is_plain, hypers)):
        return _kept_fields(tuple(stages), tuple(hypers), dims, dtype)
    return _fields(tuple(stages), tuple(hypers), dims, dtype)


def _fields(
    stages: tuple[Stage, ...], hypers: tuple[Any, ...], dims: int, dtype: torch.dtype
) -> tuple[tuple[Field, ...], ...]:
    with torch.no_grad():
        probe = init_leaf(stages, hypers, torch.empty((0,) * dims, dtype=dtype, device="cpu"))
    return tuple(tuple(map(_field, getattr(one, "_fields", ()), one)) for one in probe.stages)


_kept_fields = lru_cache(maxsize=256)(_fields)


def _field(name: str, value: Any) -> Field:
    tensors = field_tensors(value)
    count = len(value) if isinstance(value, list) else None
    return Field(name, count, tensors[0].dtype if tensors else None)
