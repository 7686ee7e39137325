"""Shared scalars of an optimizer, which belong to no leaf: initial values, checks, updates."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from functional_optim._torch.derivatives import get_unwrapped, is_gradtrackingtensor
from functional_optim._torch.tensors import version_of
from functional_optim.core.chain import Chain
from functional_optim.core.format import format_value
from functional_optim.core.hyper import format_hyper, resolve
from functional_optim.core.links import Links, counts_steps, has_shared_state, stage_labels
from functional_optim.core.named_tuples import from_fields
from functional_optim.core.on_global_step import at_global_step
from functional_optim.core.overrides import LeafChain
from functional_optim.core.scalars import carries_derivative, concrete
from functional_optim.core.stage import Stage
from functional_optim.core.state import Shared
from functional_optim.core.state_init import zero_count


def initial_shared(optimizer: Chain, chains: Iterable[LeafChain] = ()) -> Any:
    """Return the initial ``State.shared``."""
    if not has_shared_state(optimizer.links, optimizer.overrides):
        return ()
    links = with_common_hypers(optimizer.links, list({id(one): one for one in chains}.values()))
    records = []
    for stage, hyper, *_ in links:
        own = resolve(stage.name, stage.bounds, stage.check, at_global_step(hyper, 1.0), 1.0)
        record: Any = stage.init_shared(own)
        _check_record(stage, "init_shared", record)
        records.append(type(record)(*map(as_tensor, record)) if record else ())
    opened = tuple(() if link.stage.gate is None else zero_count() for link in links)
    return Shared(zero_count(), tuple(records), opened)


def _check_record(stage: Stage, name: str, made: Any) -> None:
    """Raise TypeError if a function of a stage did not return its shared scalars."""
    if not stage.sharing:
        return
    if not isinstance(made, stage.shared):
        raise TypeError(
            f"{stage.name}: {name} must return its {stage.shared.__name__}; it returned "
            f"{format_value(made)}"
        )
    for field, one in zip(made._fields, made, strict=True):
        if not isinstance(one, (int, float)) and not (isinstance(one, Tensor) and not one.dim()):
            raise TypeError(
                f"{stage.name}: {name} must return a number or a 0-d tensor as {field}; it "
                f"returned {format_value(one)}"
            )


def as_tensor(value: Any) -> Tensor:
    """Return a scalar as a 0-d float64 tensor, a float on the CPU."""
    if isinstance(value, Tensor):
        return value.to(torch.float64)
    return torch.tensor(value, dtype=torch.float64, device="cpu")


def shared_labels(links: Links) -> dict[str, int]:
    """Return the indices of links with shared scalars, by name, with the label of a part before."""
    found: dict[str, int] = {}
    for part in dict.fromkeys(link.label for link in links):
        own = [place for place, link in enumerate(links) if link.label == part]
        names = stage_labels(links[place].stage for place in own)
        for place, name in zip(own, names, strict=True):
            if links[place].stage.sharing:
                found[f"{part}.{name}" if part else name] = place
    return found


def shared_by_name(optimizer: Chain, shared: Any) -> dict[str, Any]:
    """Implement :meth:`Optimizer.shared`."""
    check_shared(optimizer, shared)
    labels = shared_labels(optimizer.links)
    return {name: as_numbers(shared.stages[place]) for name, place in labels.items()}


def check_shared(optimizer: Chain, shared: Any) -> None:
    """Raise ValueError if shared scalars belong to another optimizer."""
    links = optimizer.links
    if not has_shared_state(links, optimizer.overrides):
        if shared != ():
            raise ValueError(
                "the state has shared numbers, and this optimizer keeps none: it is the state of "
                "another optimizer; use init(params)"
            )
        return
    kinds = [type(one) for one in shared.stages] if isinstance(shared, Shared) else None
    wanted = [link.stage.shared if link.stage.sharing else tuple for link in links]
    if kinds != wanted:
        names = [link.stage.name for link in links if link.stage.combine is not None]
        if counts_steps(links, optimizer.overrides):
            names.append("schedules on the global step")
        raise ValueError(
            f"state.shared must hold what {', '.join(names)} keep for all leaves, as init(params) "
            f"makes it; got {format_value(shared)}"
        )
    gates = [link.stage.gate is not None for link in links]
    if any(gates) and [isinstance(one, Tensor) for one in shared.opened] != gates:
        raise ValueError(
            "state.shared.opened must say how often each gate has opened, got "
            f"{format_value(shared.opened)}: it is the state of another optimizer, or of an "
            "earlier version; make one step by update(), whose state says it"
        )


def with_opened(links: Links, shared: Any) -> Any:
    """Return shared scalars that include how often each gate opened.

    The state of an earlier version lacks this. There, schedules counted calls, so the number of
    calls is used.
    """
    if not isinstance(shared, Shared) or shared.opened:
        return shared
    gates = [link.stage.gate is not None for link in links]
    return shared._replace(opened=tuple(shared.step if gate else () for gate in gates))


def common_hyper(stage: Stage, hypers: Sequence[Any]) -> Any:
    """Return the hyper-parameters that the shared scalars of a stage are computed with."""
    first = hypers[0]
    for other in hypers[1:]:
        for name in first._fields if stage.shared_by is None else stage.shared_by:
            one, two = getattr(first, name), getattr(other, name)
            if not _is_same(one, two):
                raise ValueError(
                    f"{stage.name} keeps numbers for all parameters that depend on {name}, so "
                    f"{name} must be the same for all of them, got {format_hyper(one)} and "
                    f"{format_hyper(two)}: give parameters with another one an optimizer of their "
                    "own, by partition({...}, labels(...))"
                )
    return first


def with_common_hypers(links: Links, chains: Sequence[LeafChain]) -> Links:
    """Return links, with the hyper-parameters of the leaves for links with shared scalars."""
    changed = list(links)
    for place, (stage, hyper, *_) in enumerate(links):
        if stage.combine is None:
            continue
        own = []
        for one in chains:  # a comprehension would be one more Python call
            if place in one.places:
                own.append(one.hypers[one.places.index(place)])  # noqa: PERF401
        if own and (len(own) > 1 or own[0] is not hyper):
            changed[place] = links[place]._replace(hyper=common_hyper(stage, own))
    return tuple(changed)


def _is_same(one: Any, two: Any) -> bool:
    """Return True if two hyper-parameters are the same number, or the same schedule."""
    if one is two:
        return True
    if isinstance(one, tuple) and isinstance(two, tuple) and len(one) == len(two):
        return all(map(_is_same, one, two))
    one, two = as_number(one), as_number(two)
    return not isinstance(one, Tensor) and not isinstance(two, Tensor) and bool(one == two)


def as_numbers(record: Any) -> Any:
    """Return shared scalars as floats, or as tensors if they carry a derivative."""
    if not record:
        return record
    return type(record)(*[one if type(one) is float else as_number(one) for one in record])


def as_all_numbers(records: Sequence[Any]) -> list[Any]:
    """Return the shared scalars of every link as floats."""
    found = []
    for one in records:  # a comprehension would be one more Python call
        found.append(as_numbers(one) if one and type(one[0]) is not float else one)  # noqa: PERF401
    return found


_shared = from_fields(Shared)


class Written:
    """Cache of the shared scalars that a step wrote, valid until a tensor's version changes."""

    def __init__(self) -> None:
        self._versions: list[int] | None = None
        self._numbers: Sequence[Any] = ()

    def before(self, shared: Any) -> Any:
        """Return the current shared scalars: cached floats if they are valid."""
        if self._versions is None or not isinstance(shared, Shared):
            return shared
        if list(map(version_of, chain.from_iterable(shared.stages))) != self._versions:
            return shared
        return _shared((shared.step, self._numbers, shared.opened))

    def after(self, shared: Any, numbers: Sequence[Any]) -> None:
        """Store the shared scalars that a step has written."""
        self._versions = None
        if not isinstance(shared, Shared) or shared.step.is_inference():
            return
        if {float}.issuperset(map(type, chain.from_iterable(numbers))):
            self._versions = list(map(version_of, chain.from_iterable(shared.stages)))
            self._numbers = tuple(numbers)


def as_number(value: Any) -> Any:
    """Return a 0-d tensor as a float, or unchanged if it carries a derivative."""
    if not isinstance(value, Tensor):
        return value
    own = _unwrapped(value)
    if carries_derivative(own):
        return value
    found = concrete(own)
    return value if found is None else found


def as_numbers_of(totals: Tensor) -> tuple[Any, ...]:
    """Return the elements of a vector as floats, or as tensors if they carry a derivative."""
    if type(totals) is not Tensor or carries_derivative(totals):
        return tuple(map(as_number, totals.unbind()))
    return tuple(totals.tolist())


def _unwrapped(value: Tensor) -> Tensor:
    """Return a tensor without the wrappers of torch.func.grad that do not differentiate it.

    Inside torch.func.grad, the result of every operation is wrapped. A scalar must have the same
    value with and without wrapper.
    """
    if torch.compiler.is_compiling():
        return value
    while is_gradtrackingtensor(value) and not (
        value.requires_grad or torch.autograd.forward_ad.unpack_dual(value).tangent is not None
    ):
        value = get_unwrapped(value)
    return value


def combined(
    stage: Stage, before: Any, totals: Sequence[Any], hyper: Any, given: Mapping[str, Any]
) -> Any:
    """Return the shared scalars of a stage for this step."""
    assert stage.combine is not None
    own = {}
    for name in stage.extra:
        if name not in given:
            raise TypeError(
                f"{stage.name} needs {name!r} at each step: give extra={{{name!r}: ...}}"
            )
        own[name] = given[name]
    try:
        made = stage.combine(before, tuple(totals), hyper, **own)
    except RuntimeError as error:
        if any(isinstance(one, Tensor) for one in (*before, *totals)):
            error.add_note(
                f"{stage.name} looks at numbers that torch.func hides, since they differ between "
                "the members of a population: step these one by one"
            )
        raise
    if type(made) is stage.shared and {float}.issuperset(map(type, made)):
        return made
    _check_record(stage, "combine", made)
    return made if not made else as_numbers(made)
