"""State of a parameter before its first step, and the fields of that state."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import lru_cache, partial
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from functional_optim._torch.derivatives import is_transforming
from functional_optim._torch.tensors import may_be_view
from functional_optim.core.aliasing import AliasTracker, clone_strided, storage_addresses
from functional_optim.core.dtensors import is_dtensor, reduce_partial, to_local
from functional_optim.core.hyper import are_unchanged, is_plain, map_values
from functional_optim.core.leaf import PLAIN
from functional_optim.core.meta_init import MetaLikeMode
from functional_optim.core.stage import Stage
from functional_optim.core.stage_contract import init_state
from functional_optim.core.stage_defaults import no_init
from functional_optim.core.state import (
    GateCounts,
    LeafState,
    field_tensors,
    map_state,
    state_tensors,
)
from functional_optim.core.views import real_view

_REQUIRES_GRAD = attrgetter("requires_grad")


def init_leaf(stages: Sequence[Stage], hypers: Sequence[Any], param: Tensor) -> LeafState:
    """Return the state of a parameter before its first step. Its tensors share no memory."""
    (states,) = init_stages(stages, hypers, [param])
    gates = tuple(
        [GateCounts(zero_count(), zero_count()) for stage in stages if stage.gate is not None]
    )
    return LeafState(zero_count(), states, gates)


def init_stages(
    stages: Sequence[Stage], hypers: Sequence[Any], params: Sequence[Tensor]
) -> list[tuple[Any, ...]]:
    """Return for each parameter the states of all stages. Tensors of a state share no memory."""
    for dtype in dict.fromkeys([param.dtype for param in params]):
        check_dtype(stages, dtype)
    pairs = enumerate(zip(stages, hypers, strict=True))
    with_state = [(k, *pair) for k, pair in pairs if pair[0].init is not no_init]
    made: list[tuple[Any, ...]] = []
    for param in params:
        view = real_view(param) if param.is_complex() else param
        states: list[Any] = [()] * len(stages)
        for k, stage, hyper in with_state:
            states[k] = init_state(stage, view, hyper)
            if len(made) < 2 and not torch.compiler.is_compiling() and stage not in _TRIED:
                _check_new_memory(stage, view, states[k])
        is_usual = view is param and type(param) in PLAIN
        made.append(tuple(states if is_usual else _as_param(stages, states, param, view)))
    if _are_new(params, state_tensors(chain.from_iterable(made))):
        return made
    return [_without_aliases(param, states) for param, states in zip(params, made, strict=True)]


_TRIED: set[Stage] = set()
"""Stages whose ``init`` returned new memory in two calls."""

_FIRST: dict[Stage, list[ReferenceType[Tensor]]] = {}
"""The tensors of the first call of a stage's ``init``."""

MAX_TRIED = 512
"""Largest number of stages in ``_TRIED``, and in ``_FIRST``."""


def _check_new_memory(stage: Stage, param: Tensor, state: Any) -> None:
    """Raise TypeError if ``init`` returned memory of its first call, or an expanded tensor.

    A step would then write to the state of several parameters.
    """
    if is_transforming() or type(param) not in PLAIN or param.is_meta:
        return  # there is no memory to compare
    first = _FIRST.get(stage)
    earlier = [tensor for one in first or () if (tensor := one()) is not None]
    kept = storage_addresses(earlier) - storage_addresses([param])
    pairs = zip(getattr(state, "_fields", ()), state, strict=True)
    every = [(name, tensor) for name, value in pairs for tensor in field_tensors(value)]
    for name, tensor in every:
        found = None
        if not kept.isdisjoint(storage_addresses([tensor])):
            found = "memory that it also returned in another call"
        elif 0 in tensor.stride() and tensor.numel() > 1:
            found = "a tensor whose elements share memory"
        if found is not None:
            raise TypeError(
                f"{stage.name}: init returned {found}, in the field {name} of its state, and each "
                "parameter needs state of its own; return a new tensor, as by clone()"
            )
    if max(len(_FIRST), len(_TRIED)) >= MAX_TRIED:
        _FIRST.clear()
        _TRIED.clear()
    if first is None:
        _FIRST[stage] = [ref(tensor) for _, tensor in every]
    else:
        _FIRST.pop(stage, None)
        _TRIED.add(stage)


def _as_param(
    stages: Sequence[Stage], states: Sequence[Any], param: Tensor, view: Tensor
) -> Sequence[Any]:
    """Return the states of a complex parameter, or a DTensor, from the states of its real view."""
    if view is not param:
        like = partial(_complex_like, param, view)
        states = [map_state(like, state) for state in states]
    if is_dtensor(param) and param.dim():  # pointwise stages step the shard, others the DTensor
        pairs = zip(stages, states, strict=True)
        return [map_state(_plain_scalar, own) if k.kind == "pointwise" else own for k, own in pairs]
    return states


def _are_new(params: Sequence[Tensor], tensors: Sequence[Tensor]) -> bool:
    """Return True if each tensor has its own memory, and autograd tracks none of them."""
    kinds = PLAIN.issuperset(map(type, params)) and PLAIN.issuperset(map(type, tensors))
    if torch.compiler.is_compiling() or not kinds or any(map(_REQUIRES_GRAD, tensors)):
        return False
    storages = storage_addresses(tensors)
    return len(storages) == len(tensors) and storages.isdisjoint(storage_addresses(params))


def _without_aliases(param: Tensor, states: Sequence[Any]) -> tuple[Any, ...]:
    """Return states with copies of the tensors that share memory with each other or the parameter.

    Copy also each result of autograd that is a view: a step in place detaches the state that it
    writes, and views cannot be detached in place.
    """
    aliases = AliasTracker([param])

    def copied(tensor: Tensor) -> Tensor:
        one = aliases.copy_if_aliased(tensor)
        return clone_strided(one) if one.requires_grad and may_be_view(one) else one

    return tuple([map_state(copied, state) for state in states])


def _plain_scalar(tensor: Tensor) -> Tensor:
    """Convert a 0-d DTensor to a plain tensor, which is equal on all ranks."""
    return to_local(reduce_partial(tensor)) if tensor.dim() == 0 else tensor


def zero_count() -> Tensor:
    """Return a step count of 0: a 0-d int64 tensor on the CPU."""
    return torch.zeros((), dtype=torch.int64, device="cpu")


def _complex_like(param: Tensor, view: Tensor, tensor: Tensor) -> Tensor:
    if tensor.shape != view.shape:
        return tensor
    made = torch.view_as_complex(tensor)
    if is_dtensor(made) and is_dtensor(param):  # torch replicates the result of uneven shards
        return made.redistribute(param.device_mesh, param.placements)
    return made


def check_dtype(stages: Sequence[Stage], dtype: torch.dtype, where: str = "") -> None:
    """Raise ValueError if a stage does not take parameters of this dtype."""
    for stage in stages:
        if stage.dtypes and dtype not in stage.dtypes:
            raise ValueError(
                f"{stage.name} takes parameters of {' or '.join(map(str, stage.dtypes))}, got "
                f"{dtype}{where}: convert parameters and gradients, or build another optimizer"
            )


class Field(NamedTuple):
    """Form of a field of a stage's state, for given hyper-parameters, shape and dtype."""

    name: str
    tensors: int | None
    """The length of a list of tensors; None for a field that is one tensor."""
    dtype: torch.dtype | None
    """The dtype; None for an empty list."""


Fields = tuple[tuple[Field, ...], ...]
"""The fields of every stage's state."""

FieldsOf = Callable[[Sequence[Stage], Sequence[Any], Sequence[int], torch.dtype], Fields]
"""Type of :func:`fields_of`."""

_T = TypeVar("_T")


def cache_plain(
    of_any: Callable[[tuple[Stage, ...], tuple[Any, ...], tuple[int, ...], torch.dtype], _T],
) -> Callable[[Sequence[Stage], Sequence[Any], Sequence[int], torch.dtype], _T]:
    """Cache a function of stages, hyper-parameters, shape and dtype.

    Only calls with plain hyper-parameters and sizes are cached. A cache must not keep alive a
    schedule or a tensor with its graph, and symbolic sizes have no hash. The key includes torch's
    default dtype, since a state may be a tensor of a Python number.
    """

    @lru_cache(1024)
    def kept(
        stages: tuple[Stage, ...],
        hypers: tuple[Any, ...],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        default: torch.dtype,
    ) -> _T:
        return of_any(stages, hypers, shape, dtype)

    def found(
        stages: Sequence[Stage], hypers: Sequence[Any], shape: Sequence[int], dtype: torch.dtype
    ) -> _T:
        own, sizes = tuple(hypers), tuple(shape)
        if (
            torch.compiler.is_compiling()
            or not all(map(is_plain, own))
            or not all([type(size) is int for size in sizes])  # noqa: C419  a generator is slower
        ):
            return of_any(tuple(stages), own, sizes, dtype)
        return kept(tuple(stages), own, sizes, dtype, torch.get_default_dtype())

    return found


def compute_fields(
    stages: tuple[Stage, ...],
    hypers: tuple[Any, ...],
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> Fields:
    """Return the fields of every stage's state for parameters of a shape and a dtype."""
    probe = init_like(stages, hypers, shape, dtype)
    return tuple(tuple(map(_field, getattr(one, "_fields", ()), one)) for one in probe.stages)


fields_of = cache_plain(compute_fields)
"""Cached :func:`compute_fields`."""


class TreeFields:
    """Cache of :func:`fields_of` for the leaves of one tree, in one step.

    Global caches are off while a compiler traces. Without this cache, computing the fields of each
    leaf would take a fifth of the time of a trace.
    """

    def __init__(self) -> None:
        self._known: dict[int, list[tuple[Sequence[int], torch.dtype, Fields]]] = {}

    def of(self, chain: object) -> FieldsOf:
        """Return :func:`fields_of` for leaves with this chain, which must outlive the cache."""
        if torch.compiler.is_exporting():  # comparing symbolic sizes would add constraints to it
            return fields_of
        known = self._known.setdefault(id(chain), [])

        def found(
            stages: Sequence[Stage],
            hypers: Sequence[Any],
            shape: Sequence[int],
            dtype: torch.dtype,
        ) -> Fields:
            for other, kind, fields in known:
                if kind == dtype and other == shape:
                    return fields
            known.append((shape, dtype, fields_of(stages, hypers, shape, dtype)))
            return known[-1][2]

        return found


class StateFields:
    """Fields of the state of parameters, to compare after changes of hyper-parameters."""

    def __init__(
        self,
        stages: Sequence[Stage],
        hypers: Sequence[Any],
        kinds: Iterable[tuple[Sequence[int], torch.dtype]],
    ) -> None:
        self._stages, self._kinds = tuple(stages), list(kinds)
        self._names = [(k, name) for k, one in enumerate(stages) for name in field_hypers(one)]
        self._fields, self._values = self._of(hypers), self._read(hypers)

    def is_valid_for(self, hypers: Sequence[Any]) -> bool:
        """Return True if the state has the same fields with these hyper-parameters."""
        now = self._read(hypers)
        if are_unchanged(self._values, now):
            return True
        try:
            found = self._of(hypers)
        except (TypeError, ValueError):  # the next step raises this error
            return False
        if found != self._fields:
            return False
        self._values = now
        return True

    def _read(self, hypers: Sequence[Any]) -> list[Any]:
        return [getattr(hypers[index], name) for index, name in self._names]

    def _of(self, hypers: Sequence[Any]) -> list[Fields]:
        own = tuple(hypers)
        return [compute_fields(self._stages, own, tuple(shape), d) for shape, d in self._kinds]


def field_hypers(stage: Stage) -> Sequence[str]:
    """Return the names of the hyper-parameters that the fields of a stage's state depend on."""
    if stage.state_depends_on is None and stage.stateful:
        hyper: Any = stage.hyper
        return tuple(hyper._fields)
    return stage.state_depends_on or ()


def init_like(
    stages: Sequence[Stage], hypers: Sequence[Any], shape: Sequence[int], dtype: torch.dtype
) -> LeafState:
    """Return a state with the names, shapes and dtypes for such a parameter. Values are undefined.

    The state is on the meta device, or on the CPU if ``init`` reads values.
    """
    fast = nullcontext() if torch.compiler.is_compiling() else MetaLikeMode()

    with torch.no_grad():
        try:
            with fast:
                return init_stand_in(stages, hypers, torch.empty(shape, dtype=dtype, device="meta"))
        except (NotImplementedError, RuntimeError):  # init reads values
            return init_stand_in(stages, hypers, torch.zeros(shape, dtype=dtype, device="cpu"))


def init_stand_in(stages: Sequence[Stage], hypers: Sequence[Any], param: Tensor) -> LeafState:
    """Return the initial state of a meta or CPU stand-in for a parameter on another device."""

    def move(one: Tensor) -> Tensor:
        return one if one.is_cpu else one.to(param.device)

    own = [one if is_plain(one) else map_values(Tensor, move, one) for one in hypers]
    return init_leaf(stages, own, param)


def has_same_fields(
    stages: Sequence[Stage],
    hypers: Sequence[Any],
    shapes: Iterable[Sequence[int]],
    dtype: torch.dtype,
) -> bool:
    """Return True if parameters of all these shapes have the same fields of state."""
    return len({fields_of(stages, hypers, shape, dtype) for shape in map(tuple, shapes)}) <= 1


def _field(name: str, value: Any) -> Field:
    tensors = field_tensors(value)
    count = len(value) if isinstance(value, list) else None
    return Field(name, count, tensors[0].dtype if tensors else None)
