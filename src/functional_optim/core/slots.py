"""Hyper-parameters as inputs: which numbers are fed to a step, and under which names.

Steps that are programs (exported, or captured as a CUDA graph) have no Python to ask for a number.

A name is the one that ``replace`` and ``update`` take. A tuple is one input per number
(``betas[0]``), and what an override sets for some leaves is an input of its own
(``override_0.lr``): as with ``update(lr=...)``, a new ``lr`` then reaches all other leaves only.
"""

import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from functional_optim.core.hyper import NAME, Schedule, field_types, mapped, shown
from functional_optim.core.links import Links, addresses
from functional_optim.core.overrides import Override
from functional_optim.core.scalars import concrete
from functional_optim.core.selectors import Shape, applies
from functional_optim.core.tree import Path


class Slot(NamedTuple):
    """The place of a number that may be fed at every step."""

    name: str
    value: float
    given: Any = None
    """The schedule or tensor that its value was taken from."""

    @property
    def typical(self) -> float:
        """A value by which choices are made: what may be another number later is not nothing."""
        return self.value if self.given is None or self.value else 2.0**-10


First = Callable[[str, Schedule], float]
"""The first value of the schedule of this name."""

Slotted = tuple[Any, ...]
"""One Hyper per stage, with a :class:`Slot` in place of every number."""


def slotted(
    links: Links,
    overrides: Sequence[Override],
    leaves: Sequence[tuple[Path, Shape]],
    *,
    first: First | None = None,
) -> list[Slotted]:
    """The hyper-parameters of every leaf; leaves with the same ones share one tuple.

    Args:
        links: of the chain.
        overrides: for some leaves.
        leaves: the path and the shape of each.
        first: gives the first value of a schedule, which may then stand for a number.

    Raises:
        ValueError: a schedule, without ``first``.
        TypeError: a tensor whose number is hidden.
    """
    names = _names(links)
    base = {
        place: _slot(names[place], kind, value, first=first)
        for index, link in enumerate(links)
        for place, kind, value in _fields(index, link.hyper)
    }
    changes = [
        _changed(links, names, number, one, first=first) for number, one in enumerate(overrides)
    ]
    shared: dict[tuple[bool, ...], Slotted] = {}
    found = []
    for path, shape in leaves:
        key = tuple(applies(where, path, shape) for where, _ in overrides)
        if key not in shared:
            values = dict(base)
            for applied, change in zip(key, changes, strict=True):
                values.update(change if applied else {})
            shared[key] = tuple(
                type(link.hyper)(*(values[place] for place, _, _ in _fields(index, link.hyper)))
                for index, link in enumerate(links)
            )
        found.append(shared[key])
    return found


def _fields(index: int, hyper: Any) -> Iterator[tuple[tuple[int, str], Any, Any]]:
    """((link, field), annotation, value) of every field."""
    hyper_class: Any = type(hyper)
    for (field, kind), value in zip(field_types(hyper_class).items(), hyper, strict=True):
        yield (index, field), kind, value


def _names(links: Links) -> dict[tuple[int, str], str]:
    return {place: name for name, places in addresses(links).items() for place in places}


def _changed(
    links: Links,
    names: Mapping[tuple[int, str], str],
    number: int,
    override: Override,
    *,
    first: First | None,
) -> dict[tuple[int, str], Any]:
    """Return the values that an override changes, by their positions."""
    changed = {}
    for place, field, value in override[1]:
        for index, link in enumerate(links):
            hyper_class: Any = type(link.hyper)
            kinds = field_types(hyper_class)
            if field in kinds and place in ("", index):
                base = field if isinstance(place, str) else names[index, field]
                name = f"override_{number}.{base}"
                changed[index, field] = _slot(name, kinds[field], value, first=first)
    return changed


def _slot(name: str, kind: Any, value: Any, *, first: First | None) -> Any:
    if callable(value) and not isinstance(value, Tensor):
        if first is not None:
            return Slot(name, first(name, value), value)
        raise ValueError(
            f"{name} is the schedule {shown(value)}, and a program has no Python to ask: export "
            f"with its first value, replace({name.partition('[')[0]}=...), and feed the value of "
            "each step as an input"
        )
    if isinstance(value, tuple):
        kinds = typing.get_args(kind) or (kind,) * len(value)
        parts = enumerate(zip(kinds, value, strict=True))
        return tuple(
            _slot(f"{name}[{index}]", one, item, first=first) for index, (one, item) in parts
        )
    if value is None or kind in (bool, int, NAME):
        return value
    number = concrete(value) if isinstance(value, Tensor) else float(value)
    if number is None:
        raise TypeError(
            f"{name} is a tensor whose number is hidden (by torch.func or a compiler): give a "
            "number, and feed others as an input"
        )
    return Slot(name, number, value if first and isinstance(value, Tensor) else None)


def slots_in(value: Any) -> Iterator[Slot]:
    """Every slot in a Hyper (or in one value of it)."""
    if isinstance(value, Slot):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from slots_in(item)


def filled(value: Any, number: Callable[[Slot], Any]) -> Any:
    """A Hyper (or one value of it) with what ``number`` gives for each slot."""
    return mapped(Slot, number, value)


def all_slots(groups: Sequence[Slotted]) -> dict[str, float]:
    """Name and value of every number: ``lr`` first, those of overrides last."""
    found: dict[str, float] = {}
    for group in groups:
        for slot in slots_in(group):
            known = found.setdefault(slot.name, slot.value)
            assert known == slot.value, f"{slot.name} stands for two numbers"
    order = sorted(found, key=lambda name: (name.startswith("override_"), name != "lr"))
    return {name: found[name] for name in order}


def choices(links: Links, overrides: Sequence[Override]) -> dict[str, Any]:
    """Name and value of what is no number: flags, whole numbers and names."""
    names = _names(links)
    found = {
        names[index, field]: value
        for index, link in enumerate(links)
        for field, value in link.hyper._asdict().items()
    }
    for number, one in enumerate(overrides):
        for place, field, value in one[1]:
            name = field if isinstance(place, str) else names[place, field]
            found[f"override_{number}.{name}"] = value
    return {name: value for name, value in found.items() if isinstance(value, (bool, int, str))}
