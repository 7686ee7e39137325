"""The links of a chain as one set of named hyper-parameters.

``lr`` is the chain's: one name for every stage that has it; a stage that was given another one than
the last has ``stage.lr`` too. Any other name that stands in more than one stage is addressed as
``stage.name``. Those of a part of a partition have its label in
front: ``label.lr``.
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.brief import brief
from functional_optim.core.constructor import holds_parameters
from functional_optim.core.global_step import has_global_schedule
from functional_optim.core.hyper import INHERITED, are_unchanged, replaced
from functional_optim.core.spelling import name_constructor_of
from functional_optim.core.stage import Link, Rule, Stage, Transform

Links = tuple[Link, ...]

Change = tuple[int | str, str, Any]
"""A hyper-parameter of one link (by its place), or of all that have it and a label, and its value.

The label is "" for what belongs to no part of a partition.
"""


FREEZE = "freeze"
"""The name of the stage that keeps leaves as they are."""


def rebuild(link: Link, **values: Any) -> Link:
    """The link with some hyper-parameters changed, and checked again."""
    stage = link.stage
    return link._replace(hyper=replaced(stage.name, stage.bounds, stage.check, link.hyper, values))


def has_gates(links: Sequence[Link]) -> bool:
    """Return True if a stage decides, by numbers, whether those behind it run."""
    return any(link.stage.gate is not None for link in links)


def order(links: Sequence[Link]) -> list[int]:
    """The places of links in the order they run: those that lead first."""
    places = range(len(links))
    return [i for i in places if leads(links[i].stage)] + [
        i for i in places if not leads(links[i].stage)
    ]


def join(links: Sequence[Link]) -> Links:
    """Links in the order they run; ``lr`` handed on to those without, from the last that has it.

    Raises:
        TypeError: no link is a rule that reads the gradient, or ``lr`` is wanted and none has it.
        ValueError: a leading stage given twice; a name that means inputs of two kinds; a transform
            or a gate that has no effect where it is.
    """
    is_frozen = links and all(link.stage.name == FREEZE for link in links)
    if not is_frozen and not any(reads_gradient(link.stage) for link in links):
        there = ", ".join(link.stage.name for link in links) or "nothing"
        raise TypeError(
            "a chain needs a rule that steps by the gradient (such as sgd() or adam()), got "
            f"{there}"
        )
    _require_effect(links)
    # One that changes nothing may stand there again: every optimizer brings its own.
    leading = [(link.stage, link.where) for link in links if leads(link.stage) and any(link.hyper)]
    for index, (stage, where) in enumerate(leading):
        if (stage, where) in leading[:index]:
            raise ValueError(f"{stage.name} is given twice in one chain; give it once")
    _require_kinds(links)
    ordered = [links[i] for i in order(links)]
    heirs = [link for link in ordered if getattr(link.hyper, "lr", None) is INHERITED]
    if not heirs:
        return tuple(ordered)
    having = [link for link in ordered if getattr(link.hyper, "lr", INHERITED) is not INHERITED]
    if not having or having[-1].label:
        whose = "each part has its own" if having else "none has one"
        raise TypeError(
            f"{heirs[0].stage.name} takes its lr from the last rule of the chain that has one, but "
            f"{whose}: give it lr=..."
        )
    lr = having[-1].hyper.lr
    return tuple(rebuild(link, lr=lr) if link in heirs else link for link in ordered)


def reads_gradient(stage: Stage) -> bool:
    """Return True if the stage is a rule that steps by the gradient."""
    return isinstance(stage, Rule) and stage.uses_gradient


def _require_effect(links: Sequence[Link]) -> None:
    """Refuse a transform whose gradient nothing reads, and a gate with nothing behind it.

    Raises:
        ValueError: names the stage, and says where to put it.
    """
    is_read = has_rule = False
    for place in reversed(range(len(links))):
        stage = links[place].stage
        if stage.gate is not None and not has_rule:
            raise ValueError(
                f"{stage.name} decides whether the rules behind it run, and there is none, so it "
                f"has no effect here: {_put_before(links, place)}"
            )
        is_read |= reads_gradient(stage) or stage.reduce is not None
        has_rule |= isinstance(stage, Rule)
        is_idle = isinstance(stage, Transform) and stage.gate is None and stage.view is None
        if is_idle and not leads(stage) and not is_read:
            raise ValueError(
                f"{stage.name} changes the gradient, and no stage behind it reads the gradient, so "
                f"it has no effect here: {_put_before(links, place)}"
            )


def _put_before(links: Sequence[Link], place: int) -> str:
    """Say before which rule a stage has an effect."""
    before = [link.stage for link in links[:place] if reads_gradient(link.stage)]
    return f"put it before {before[-1].name}" if before else "put a rule behind it"


def _require_kinds(links: Sequence[Link]) -> None:
    """A name means an input of the whole step or one of each leaf, in all stages."""
    numbers = {name: link.stage.name for link in links for name in link.stage.extra}
    for link in links:
        for one in link.stage.inputs:
            if one.name in numbers:
                raise ValueError(
                    f"the input {one.name!r} is one of the whole step of {numbers[one.name]}, and "
                    f"one of each leaf of {link.stage.name}: give one of them another name"
                )


def no_part(part: Any, place: int) -> str:
    """Return the error message for a value that cannot be part of a chain.

    Args:
        part: what was given.
        place: where, from 0.
    """
    if isinstance(part, (list, tuple)):
        why = "parts are arguments of their own: write chain(*parts)"
    else:
        why = way_to_optimizer(part) or "it is neither"
    return (
        "chain takes links such as clip_by_value(1.0), and optimizers such as adam(); got "
        f"{brief(part)} at place {place}: {why}"
    )


def way_to_optimizer(given: Any) -> str | None:
    """Return what to write to get an optimizer from a value, or None if there is no way."""
    name = getattr(given, "__name__", "it")
    way = None
    if isinstance(given, Stage):
        way = f"a {type(given).__name__.lower()} is called with its hyper-parameters first"
    elif isinstance(given, Link):
        way = "a link is a part of a chain: write chain(...) with it and a rule"
    elif isinstance(given, type) and issubclass(given, torch.optim.Optimizer):
        way = f"for a class of torch.optim write as_functional_optim({name}, ...)"
    elif isinstance(given, torch.optim.Optimizer):
        way = "for what continues it, see from_torch"
    elif inspect.isroutine(given):
        way = f"call it: {name}(...)"
    elif holds_parameters(given):
        way = "parameters are the first argument"
    return way


def leads(stage: Stage) -> bool:
    """Return True if the stage runs before all others, wherever it stands in the chain."""
    return isinstance(stage, Transform) and stage.leads


def stage_labels(stages: Iterable[Stage]) -> list[str]:
    """A label for each stage: its name, numbered from the second of that name on."""
    labels: list[str] = []
    for stage in stages:
        label, count = stage.name, 1
        while label in labels:
            count += 1
            label = f"{stage.name}_{count}"
        labels.append(label)
    return labels


def state_names(stages: Sequence[Stage]) -> list[tuple[str, ...]]:
    """For each stage, the names that the fields of its state have in dicts and checkpoints.

    The field's own name, or ``stage.field`` where two stages have a field of that name: with the
    label of the stage, so that a stage that stands twice in a chain has two names.
    """
    fields = [tuple(stage.state._fields) if stage.stateful else () for stage in stages]
    everything = [field for own in fields for field in own]
    return [
        tuple(field if everything.count(field) == 1 else f"{label}.{field}" for field in own)
        for label, own in zip(stage_labels(stages), fields, strict=True)
    ]


def gate_names(stages: Sequence[Stage]) -> list[tuple[str, str]]:
    """For each gate, the names that its counts of runs and of those held back have in dicts."""
    return [
        (f"{label}.runs", f"{label}.held")
        for label, stage in zip(stage_labels(stages), stages, strict=True)
        if stage.gate is not None
    ]


def addresses(links: Links) -> dict[str, list[tuple[int, str]]]:
    """Every name under which a hyper-parameter can be set, and the places (link, field) it means.

    A name that stands in several stages of a part is there only as ``stage.name``. But ``lr`` means
    all of them, and beside it those stages that have another than the last are there as
    ``stage.lr``.
    """
    parts: dict[str, list[int]] = {}
    for index, link in enumerate(links):
        parts.setdefault(link.label, []).append(index)
    found: dict[str, list[tuple[int, str]]] = {}
    for label, own in parts.items():
        front = f"{label}." if label else ""
        for name, places in _addresses([links[index] for index in own]).items():
            found[front + name] = [(own[index], field) for index, field in places]
    return found


def _addresses(links: Sequence[Link]) -> dict[str, list[tuple[int, str]]]:
    """Return the addresses of the links of one part."""
    places: dict[str, list[tuple[int, str]]] = {}
    for index, link in enumerate(links):
        for field in link.hyper._fields:
            places.setdefault(field, []).append((index, field))
    labels = stage_labels(link.stage for link in links)
    found: dict[str, list[tuple[int, str]]] = {}
    for field, where in places.items():
        apart = [place for place in where if field != "lr" or _of_its_own(links, where, place)]
        if field == "lr" or len(where) == 1:
            found[field] = where
        if len(where) > 1:
            found.update({f"{labels[index]}.{field}": [(index, field)] for index, _ in apart})
    return found


def _of_its_own(
    links: Sequence[Link], where: Sequence[tuple[int, str]], place: tuple[int, str]
) -> bool:
    """Return True if a stage has another value than the last of those that have the name."""
    own, last = (getattr(links[index].hyper, field) for index, field in (place, where[-1]))
    if own is last:
        return False
    return isinstance(own, Tensor) or isinstance(last, Tensor) or bool(own != last)


def moved(changes: Sequence[Change], places: Sequence[int], front: str = "") -> tuple[Change, ...]:
    """Changes for links that went to other places: link ``i`` is now at ``places[i]``.

    Args:
        changes: as they were.
        places: of each link, now.
        front: a label that all these links have now, before the one that they had.
    """
    return tuple(
        (under(front, place) if isinstance(place, str) else places[place], field, value)
        for place, field, value in changes
    )


def under(front: str, label: str) -> str:
    """The label of what has a label within a part."""
    return f"{front}.{label}" if front and label else front or label


def values(links: Links) -> dict[str, Any]:
    """All hyper-parameters of a chain, by name, the rule's ``lr`` first.

    Set in this order, they make the chain again.
    """
    named = {
        name: getattr(links[where[-1][0]].hyper, where[-1][1])
        for name, where in addresses(links).items()
    }
    return {key: named[key] for key in sorted(named, key=lambda key: key != "lr")}


def changes_of(links: Links, named: Mapping[str, Any]) -> tuple[Change, ...]:
    """Named values as changes by place, which still hold when the chain grows.

    What is for all that have an ``lr`` comes first, and what one of them has of its own after it.

    Raises:
        TypeError: a name that the chain does not have, or that stands in several of its stages.
    """
    known = addresses(links)
    found: list[Change] = []
    for name, value in named.items():
        if name not in known:
            alike = [key for key in known if key.endswith(f".{name}")]
            hint = f"did you mean {' or '.join(alike)}?" if alike else f"it has {', '.join(known)}"
            raise TypeError(f"this chain has no hyper-parameter {name!r}; {hint}")
        place, field = known[name][0]
        label = links[place].label
        found.append((label if name == under(label, "lr") else place, field, value))
    return tuple(sorted(found, key=lambda change: not isinstance(change[0], str)))


def apply(links: Links, changes: Sequence[Change]) -> Links:
    """The links with changes made, and checked again.

    Raises:
        TypeError: a value of a type that is no number.
        ValueError: a value out of bounds.
    """
    per_link: dict[int, dict[str, Any]] = {}
    for (index, field), value in meant(links, changes).items():
        if not are_unchanged([getattr(links[index].hyper, field)], [value]):
            per_link.setdefault(index, {})[field] = value
    changed = list(links)
    try:
        for index, values in per_link.items():
            changed[index] = rebuild(links[index], **values)
    except (TypeError, ValueError) as error:
        name_constructor_of(links, error)
        raise
    return tuple(changed)


def meant(links: Links, changes: Sequence[Change]) -> dict[tuple[int, str], Any]:
    """The values that changes give to each field, by the place of the link."""
    found: dict[tuple[int, str], Any] = {}
    for place, field, value in changes:
        if isinstance(place, int):
            found[place, field] = value
            continue
        for index, link in enumerate(links):
            if place == link.label and field in link.hyper._fields:
                found[index, field] = value
    return found


def with_values(links: Links, changes: Mapping[str, Any]) -> Links:
    """The links with some hyper-parameters changed.

    Raises:
        TypeError: a name that the chain does not have, or that stands in several of its stages.
        ValueError: a value out of bounds.
    """
    return apply(links, changes_of(links, changes)) if changes else links


def keeps_shared(links: Links) -> bool:
    """Return True if an optimizer keeps anything that belongs to no leaf."""
    numbers = any(link.stage.combine is not None for link in links)
    return numbers or has_global_schedule(link.hyper for link in links)


def is_composed(links: Links) -> bool:
    """Return True if a step is decided as a whole.

    So it is where leaves differ in their stages, or take more than gradients, and where something
    is kept that belongs to no leaf.
    """
    beyond = any(link.where is not None or link.stage.inputs for link in links)
    return beyond or keeps_shared(links)
