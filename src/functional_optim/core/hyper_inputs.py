"""Hyper-parameters as named inputs of a step program.

An exported step, or a step in a CUDA graph, runs no Python. So its hyper-parameters are inputs.

The name of an input is the name that ``replace`` and ``update`` take. A tuple has one input per
number (``betas[0]``). A value of an override is a separate input (``override_0.lr``): a new ``lr``
does not change the leaves of the override, as with ``update(lr=...)``.
"""

import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from functional_optim.core.hyper import NAME, Schedule, field_types, format_hyper, map_values
from functional_optim.core.links import Links, expand_changes, hyper_names
from functional_optim.core.overrides import Override
from functional_optim.core.scalars import concrete
from functional_optim.core.selectors import Shape, is_selected
from functional_optim.core.tree import Path


class HyperInput(NamedTuple):
    """Named number that can be passed to every step."""

    name: str
    value: float
    given: Any = None
    """The schedule or tensor that gave the value; None for a number."""

    @property
    def nonzero_value(self) -> float:
        """Nonzero stand-in used while tracing, so that branches on zero are not taken."""
        return self.value if self.given is None or self.value else 2.0**-10


First = Callable[[str, Schedule], float]
"""Function of the name and the schedule that returns the schedule's first value."""

InputHypers = tuple[Any, ...]
"""One Hyper per stage, with a :class:`HyperInput` in place of every number."""


def build_input_hypers(
    links: Links,
    overrides: Sequence[Override],
    leaves: Sequence[tuple[Path, Shape]],
    *,
    first: First | None = None,
) -> list[InputHypers]:
    """Return the hyper-parameters of every leaf as inputs; equal leaves share one tuple.

    ``first`` returns the first value of a schedule. Without it, schedules raise ValueError.
    """
    names = hyper_names(links)
    base = {
        position: _build_input(names[position], kind, value, first=first)
        for index, link in enumerate(links)
        for position, kind, value in _fields(index, link.hyper)
    }
    changes = [
        _override_inputs(links, names, number, one, first=first)
        for number, one in enumerate(overrides)
    ]
    shared: dict[tuple[bool, ...], InputHypers] = {}
    found = []
    for path, shape in leaves:
        key = tuple(is_selected(where, path, shape) for where, _ in overrides)
        if key not in shared:
            values = dict(base)
            for applied, change in zip(key, changes, strict=True):
                values.update(change if applied else {})
            shared[key] = tuple(
                type(link.hyper)(*(values[at] for at, _, _ in _fields(index, link.hyper)))
                for index, link in enumerate(links)
            )
        found.append(shared[key])
    return found


def _fields(index: int, hyper: Any) -> Iterator[tuple[tuple[int, str], Any, Any]]:
    """Yield ((link index, field), annotation, value) of every field."""
    hyper_class: Any = type(hyper)
    for (field, kind), value in zip(field_types(hyper_class).items(), hyper, strict=True):
        yield (index, field), kind, value


def _override_inputs(
    links: Links,
    names: Mapping[tuple[int, str], str],
    number: int,
    override: Override,
    *,
    first: First | None,
) -> dict[tuple[int, str], Any]:
    """Return the inputs of an override by (link index, field)."""
    inputs = {}
    for change in override[1]:
        target, field, value = change
        name = f"override_{number}.{field if isinstance(target, str) else names[target, field]}"
        for index, _ in expand_changes(links, [change]):
            kind = field_types(links[index].stage.hyper)[field]
            inputs[index, field] = _build_input(name, kind, value, first=first)
    return inputs


def _build_input(name: str, kind: Any, value: Any, *, first: First | None) -> Any:
    """Return an input for a number, inputs for a tuple, and any other value unchanged."""
    if callable(value) and not isinstance(value, Tensor):
        if first is not None:
            return HyperInput(name, first(name, value), value)
        raise ValueError(
            f"{name} is the schedule {format_hyper(value)}, and a program has no Python to ask: "
            f"export with its first value, replace({name.partition('[')[0]}=...), and feed the "
            "value of each step as an input"
        )
    if isinstance(value, tuple):
        kinds = typing.get_args(kind) or (kind,) * len(value)
        parts = enumerate(zip(kinds, value, strict=True))
        return tuple(
            _build_input(f"{name}[{k}]", one, item, first=first) for k, (one, item) in parts
        )
    if value is None or kind in (bool, int, NAME):
        return value
    number = concrete(value) if isinstance(value, Tensor) else float(value)
    if number is None:
        raise TypeError(
            f"{name} is a tensor whose number is hidden (by torch.func or a compiler): give a "
            "number, and feed others as an input"
        )
    return HyperInput(name, number, value if first and isinstance(value, Tensor) else None)


def iter_inputs(value: Any) -> Iterator[HyperInput]:
    """Yield every input in a Hyper, or in one value of a Hyper."""
    if isinstance(value, HyperInput):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from iter_inputs(item)


def fill_inputs(value: Any, number: Callable[[HyperInput], Any]) -> Any:
    """Return a Hyper, or one value of a Hyper, with ``number(input)`` in place of each input."""
    return map_values(HyperInput, number, value)


def collect_inputs(groups: Sequence[InputHypers]) -> dict[str, float]:
    """Return names and values of all inputs: ``lr`` first, inputs of overrides last."""
    found: dict[str, float] = {}
    for group in groups:
        for one in iter_inputs(group):
            known = found.setdefault(one.name, one.value)
            assert known == one.value, f"{one.name} stands for two numbers"
    order = sorted(found, key=lambda name: (name.startswith("override_"), name != "lr"))
    return {name: found[name] for name in order}


def static_options(links: Links, overrides: Sequence[Override]) -> dict[str, Any]:
    """Return names and values of flags, whole numbers and strings, which are not inputs."""
    names = hyper_names(links)
    found = {
        names[index, field]: value
        for index, link in enumerate(links)
        for field, value in link.hyper._asdict().items()
    }
    for number, one in enumerate(overrides):
        for target, field, value in one[1]:
            name = field if isinstance(target, str) else names[target, field]
            found[f"override_{number}.{name}"] = value
    return {name: value for name, value in found.items() if isinstance(value, (bool, int, str))}
