"""The state of a parameter before its first step, and what it looks like."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from functional_optim._torch import may_be_view
from functional_optim.core.aliasing import GivenMemory, copy_of, storages_of
from functional_optim.core.calling import started
from functional_optim.core.compiling import remembered
from functional_optim.core.dtensors import is_sharded, local, reduced
from functional_optim.core.hyper import are_unchanged, is_plain, mapped
from functional_optim.core.leaf import PLAIN
from functional_optim.core.stage import Stage
from functional_optim.core.state import (
    GateCounts,
    LeafState,
    field_tensors,
    map_state,
    state_tensors,
)
from functional_optim.core.views import real_view
from functional_optim.core.without_memory import WithoutMemory

_REQUIRES_GRAD = attrgetter("requires_grad")


def init_leaf(stages: Sequence[Stage], hypers: Sequence[Any], param: Tensor) -> LeafState:
    """The state of a parameter before its first step, each tensor in memory of its own."""
    require_dtype(stages, param.dtype)
    view = real_view(param)
    states = tuple(
        [started(stage, view, hyper) for stage, hyper in zip(stages, hypers, strict=True)]
    )
    if param.is_complex():
        states = tuple(
            map_state(lambda t: _complex_like(param, t) if t.shape == view.shape else t, state)
            for state in states
        )
    if is_sharded(param) and param.dim():  # pointwise stages step the shard, others the DTensor
        pairs = zip(stages, states, strict=True)
        states = tuple(
            map_state(_number, state) if stage.kind == "pointwise" else state
            for stage, state in pairs
        )
    if not _are_new(param, state_tensors(states)):
        given = GivenMemory([param])
        states = tuple(map_state(lambda one: _no_view(given.apart(one)), state) for state in states)
    gates = tuple(
        [GateCounts(none_made(), none_made()) for stage in stages if stage.gate is not None]
    )
    return LeafState(none_made(), states, gates)


def _are_new(param: Tensor, tensors: Sequence[Tensor]) -> bool:
    """Return True if all tensors are in separate memory, and autograd tracks none of them."""
    every = [param, *tensors]
    if torch.compiler.is_compiling() or not PLAIN.issuperset(map(type, every)):
        return False
    return not any(map(_REQUIRES_GRAD, tensors)) and len(storages_of(every)) == len(every)


def _number(tensor: Tensor) -> Tensor:
    """Return one number for a whole parameter as a plain tensor, the same on all ranks."""
    return local(reduced(tensor)) if tensor.dim() == 0 else tensor


def _no_view(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy if autograd tracks it as a view.

    A step in place drops the history of the state that it writes, and a view keeps its history.
    """
    return copy_of(tensor) if tensor.requires_grad and may_be_view(tensor) else tensor


def none_made() -> Tensor:
    """The count of steps that were never made."""
    return torch.zeros((), dtype=torch.int64, device="cpu")


def _complex_like(param: Tensor, view: Tensor) -> Tensor:
    made = torch.view_as_complex(view)
    if is_sharded(made) and is_sharded(param):  # of uneven shards, it has come to be whole
        return made.redistribute(param.device_mesh, param.placements)
    return made


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


Fields = tuple[tuple[Field, ...], ...]
"""The fields of every stage's state."""

FieldsOf = Callable[[Sequence[Stage], Sequence[Any], Sequence[int], torch.dtype], Fields]
"""What :func:`fields_of` is."""

_T = TypeVar("_T")

_NONE: Any = object()
"""Returned for a result that is not cached."""

_SHAPES = 1024
"""Number of shapes for which the results of the latest stages are cached."""


def kept_for_plain(
    of_any: Callable[[tuple[Stage, ...], tuple[Any, ...], tuple[int, ...], torch.dtype], _T],
) -> Callable[[Sequence[Stage], Sequence[Any], Sequence[int], torch.dtype], _T]:
    """Return a function of stages, hyper-parameters, shape and dtype whose results are kept.

    They are kept for hyper-parameters that are plain numbers: others (a tensor with its graph, a
    schedule) must not be kept alive by a cache. Nor are sizes that a tracer leaves open, which have
    no hash. A state may have a number in it, so results are kept for each default dtype of torch.
    """

    @remembered(1024)
    def kept(
        stages: tuple[Stage, ...],
        hypers: tuple[Any, ...],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        default: torch.dtype,
    ) -> _T:
        return of_any(stages, hypers, shape, dtype)

    latest: list[_Latest | None] = [None]

    def found(
        stages: Sequence[Stage], hypers: Sequence[Any], shape: Sequence[int], dtype: torch.dtype
    ) -> _T:
        if torch.compiler.is_compiling():
            return of_any(tuple(stages), tuple(hypers), tuple(shape), dtype)
        last, default = latest[0], torch.get_default_dtype()
        if (
            last is None
            or last.hypers is not hypers
            or last.default is not default
            or last.stages != tuple(stages)
        ):
            last = _Latest(tuple(stages), hypers, default, all(map(is_plain, hypers)), {})
            latest[0] = last if last.are_plain and isinstance(hypers, tuple) else None
        result: Any = _NONE
        if type(shape) is torch.Size:
            result = last.results.get((shape, dtype), _NONE)
        if result is _NONE:
            sizes = tuple(shape)
            if not last.are_plain or any(type(size) is not int for size in sizes):
                return of_any(last.stages, tuple(hypers), sizes, dtype)
            result = kept(last.stages, tuple(hypers), sizes, dtype, default)
            if len(last.results) < _SHAPES:
                last.results[torch.Size(sizes), dtype] = result
        found_before: _T = result
        return found_before

    return found


class _Latest(NamedTuple):
    """Results of a cached function for the stages and hyper-parameters of the latest call.

    The parameters of a group share stages and hyper-parameters, and many have the same shape. For
    them, this lookup replaces the hashes of all stages and hyper-parameters.
    """

    stages: tuple[Stage, ...]
    hypers: Sequence[Any]
    default: torch.dtype
    are_plain: bool
    results: dict[tuple[torch.Size, torch.dtype], Any]


def fields_of_any(
    stages: tuple[Stage, ...],
    hypers: tuple[Any, ...],
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> Fields:
    """Return the fields of every stage's state, for parameters of a shape and a dtype."""
    probe = init_like(stages, hypers, shape, dtype)
    return tuple(tuple(map(_field, getattr(one, "_fields", ()), one)) for one in probe.stages)


fields_of = kept_for_plain(fields_of_any)
"""The same, from a cache where it may be kept."""


class FieldsOfTree:
    """:func:`fields_of` for the leaves of one tree, of which many are alike.

    A compiler that traces keeps nothing from one call to the next, and for each leaf it would find
    this out anew: a fifth of the trace.
    """

    def __init__(self) -> None:
        self._known: dict[int, list[tuple[Sequence[int], torch.dtype, Fields]]] = {}

    def of(self, chain: object) -> FieldsOf:
        """Return :func:`fields_of` for leaves that share a chain, an object that outlives this."""
        if not torch.compiler.is_compiling() or torch.compiler.is_exporting():
            return fields_of  # when exporting, an open size is to be compared with no other
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
    """Fields of the state of some parameters, while hyper-parameters change.

    Args:
        stages: of the chain.
        hypers: of each stage.
        kinds: shapes and dtypes of the parameters.

    Example::

        >>> import torch
        >>> from functional_optim import sgd
        >>> optimizer = sgd(lr=0.1, momentum=0.9)
        >>> hypers = [link.hyper for link in optimizer.links]
        >>> fields = StateFields(optimizer.stages, hypers, [((3,), torch.float32)])
        >>> fields.hold([one._replace(lr=0.2) if "lr" in one._fields else one for one in hypers])
        True
        >>> fields.hold([link.hyper for link in sgd(lr=0.1).links])
        False
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        hypers: Sequence[Any],
        kinds: Iterable[tuple[Sequence[int], torch.dtype]],
    ) -> None:
        self._stages, self._kinds = tuple(stages), list(kinds)
        self._names = [(k, name) for k, one in enumerate(stages) for name in fields_depend_on(one)]
        self._fields, self._values = self._of(hypers), self._read(hypers)

    def hold(self, hypers: Sequence[Any]) -> bool:
        """Return True if these hyper-parameters ask for the same fields."""
        now = self._read(hypers)
        if are_unchanged(self._values, now):
            return True
        try:
            found = self._of(hypers)
        except (TypeError, ValueError):  # they refuse such leaves: whoever steps one says why
            return False
        if found != self._fields:
            return False
        self._values = now
        return True

    def _read(self, hypers: Sequence[Any]) -> list[Any]:
        return [getattr(hypers[place], name) for place, name in self._names]

    def _of(self, hypers: Sequence[Any]) -> list[Fields]:
        own = tuple(hypers)
        return [fields_of_any(self._stages, own, tuple(shape), d) for shape, d in self._kinds]


def fields_depend_on(stage: Stage) -> Sequence[str]:
    """Return the hyper-parameters that decide which fields a stage's state has."""
    if stage.state_depends_on is None and stage.stateful:
        hyper: Any = stage.hyper
        return tuple(hyper._fields)
    return stage.state_depends_on or ()


def init_like(
    stages: Sequence[Stage], hypers: Sequence[Any], shape: Sequence[int], dtype: torch.dtype
) -> LeafState:
    """The state of a parameter of a shape and a dtype, without memory where ``init`` allows it.

    Its values mean nothing: one asks for names, shapes and dtypes.
    """
    fast = nullcontext() if torch.compiler.is_compiling() else WithoutMemory()

    with torch.no_grad():
        try:
            with fast:
                return init_beside(stages, hypers, torch.empty(shape, dtype=dtype, device="meta"))
        except (NotImplementedError, RuntimeError):  # an init that looks at values
            return init_beside(stages, hypers, torch.zeros(shape, dtype=dtype, device="cpu"))


def init_beside(stages: Sequence[Stage], hypers: Sequence[Any], param: Tensor) -> LeafState:
    """The state of a stand-in for a parameter, on another device than its hyper-parameters."""

    def moved(one: Tensor) -> Tensor:
        return one if one.is_cpu else one.to(param.device)

    own = [one if is_plain(one) else mapped(Tensor, moved, one) for one in hypers]
    return init_leaf(stages, own, param)


def same_fields(
    stages: Sequence[Stage],
    hypers: Sequence[Any],
    shapes: Iterable[Sequence[int]],
    dtype: torch.dtype,
) -> bool:
    """Return True if parameters of these shapes have the same fields."""
    return len({fields_of(stages, hypers, shape, dtype) for shape in map(tuple, shapes)}) <= 1


def _field(name: str, value: Any) -> Field:
    tensors = field_tensors(value)
    count = len(value) if isinstance(value, list) else None
    return Field(name, count, tensors[0].dtype if tensors else None)
