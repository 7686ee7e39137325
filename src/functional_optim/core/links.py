"""Links of a chain, and the names of their hyper-parameters.

``lr`` means the learning rate of all stages. A stage whose ``lr`` differs from the last one is also
available as ``stage.lr``. Any other name that several stages have is ``stage.name``. Names in a
part of a partition have its label in front: ``label.lr``.
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.constructor import has_parameters
from functional_optim.core.constructor_calls import prefix_links_error
from functional_optim.core.format import format_value
from functional_optim.core.hyper import INHERITED, are_unchanged, replace_fields
from functional_optim.core.on_global_step import has_global_schedule
from functional_optim.core.stage import Link, Rule, Stage, Transform

Links = tuple[Link, ...]

Change = tuple[int | str, str, Any]
"""(target, field, value): the target is the index of a link, or the label of links with the field.

The label is "" for links that are in no part of a partition.
"""


FREEZE = "freeze"
"""The name of the stage that marks frozen leaves."""


def rebuild(link: Link, **values: Any) -> Link:
    """Return the link with some hyper-parameters changed and checked."""
    stage = link.stage
    return link._replace(
        hyper=replace_fields(stage.name, stage.bounds, stage.check, link.hyper, values)
    )


def has_gates(links: Sequence[Link]) -> bool:
    """Return True if a stage is a gate."""
    return any(link.stage.gate is not None for link in links)


def run_order(links: Sequence[Link]) -> list[int]:
    """Return the indices of links in the order in which they run: leading links first."""
    return sorted(range(len(links)), key=lambda k: not is_leading(links[k].stage))


def join_links(links: Sequence[Link]) -> Links:
    """Return links in running order, checked. Links without ``lr`` get the last link's ``lr``."""
    is_frozen = links and all(link.stage.name == FREEZE for link in links)
    if not is_frozen and not any(is_gradient_rule(link.stage) for link in links):
        there = ", ".join(link.stage.name for link in links) or "nothing"
        raise TypeError(
            "a chain needs a rule that steps by the gradient (such as sgd() or adam()), got "
            f"{there}"
        )
    _require_effect(links)
    # Leading links that change nothing may be repeated: every optimizer has one.
    leading = [
        (link.stage, link.where) for link in links if is_leading(link.stage) and any(link.hyper)
    ]
    for index, (stage, where) in enumerate(leading):
        if (stage, where) in leading[:index]:
            raise ValueError(f"{stage.name} is given twice in one chain; give it once")
    _require_kinds(links)
    ordered = [links[i] for i in run_order(links)]
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


def is_gradient_rule(stage: Stage) -> bool:
    """Return True if the stage is a rule that steps by the gradient."""
    return isinstance(stage, Rule) and stage.uses_gradient


def _require_effect(links: Sequence[Link]) -> None:
    """Raise ValueError for a transform whose gradient is not read, or a gate without a rule."""
    is_read = has_rule = False
    for index in reversed(range(len(links))):
        stage = links[index].stage
        if stage.gate is not None and not has_rule:
            raise ValueError(
                f"{stage.name} decides if the rules after it run, but there is no such rule, so it "
                f"has no effect here: {_suggest_position(links, index)}"
            )
        is_read |= is_gradient_rule(stage) or stage.reduce is not None
        has_rule |= isinstance(stage, Rule)
        is_idle = isinstance(stage, Transform) and stage.gate is None and stage.view is None
        if is_idle and not is_leading(stage) and not is_read:
            raise ValueError(
                f"{stage.name} changes the gradient, and no stage after it reads the gradient, so "
                f"it has no effect here: {_suggest_position(links, index)}"
            )


def _suggest_position(links: Sequence[Link], index: int) -> str:
    before = [link.stage for link in links[:index] if is_gradient_rule(link.stage)]
    return f"put it before {before[-1].name}" if before else "put a rule after it"


def _require_kinds(links: Sequence[Link]) -> None:
    """Check that no name is an input of the step in one stage, and of each leaf in another."""
    numbers = {name: link.stage.name for link in links for name in link.stage.extra}
    for link in links:
        for one in link.stage.inputs:
            if one.name in numbers:
                raise ValueError(
                    f"the input {one.name!r} is one of the whole step of {numbers[one.name]}, and "
                    f"one of each leaf of {link.stage.name}: give one of them another name"
                )


def format_part_error(part: Any, place: int) -> str:
    """Return the error message for a value that cannot be part of a chain, and its index."""
    if isinstance(part, (list, tuple)):
        why = "parts are arguments of their own: write chain(*parts)"
    else:
        why = suggest_call(part) or "it is neither"
    return (
        "chain takes links such as clip_by_value(1.0), and optimizers such as adam(); got "
        f"{format_value(part)} at place {place}: {why}"
    )


def suggest_call(given: Any) -> str | None:
    """Return a hint how to convert a value to an optimizer, or None if that is impossible."""
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
    elif has_parameters(given):
        way = "parameters are the first argument"
    return way


def is_leading(stage: Stage) -> bool:
    """Return True if the stage runs before all stages that do not lead."""
    return isinstance(stage, Transform) and stage.leads


def stage_labels(stages: Iterable[Stage]) -> list[str]:
    """Return a unique label of each stage: its name, or ``name_2`` for the second one."""
    labels: list[str] = []
    for stage in stages:
        label, count = stage.name, 1
        while label in labels:
            count += 1
            label = f"{stage.name}_{count}"
        labels.append(label)
    return labels


def state_names(stages: Sequence[Stage]) -> list[tuple[str, ...]]:
    """Return for each stage the names of its state fields in state dicts and checkpoints.

    A name is that of the field, or ``label.field`` if several stages have a field of that name.
    """
    fields = [tuple(stage.state._fields) if stage.stateful else () for stage in stages]
    everything = [field for own in fields for field in own]
    return [
        tuple(field if everything.count(field) == 1 else f"{label}.{field}" for field in own)
        for label, own in zip(stage_labels(stages), fields, strict=True)
    ]


def gate_names(stages: Sequence[Stage]) -> list[tuple[str, str]]:
    """Return for each gate the names of its ``runs`` and ``held`` counts in state dicts."""
    return [
        (f"{label}.runs", f"{label}.held")
        for label, stage in zip(stage_labels(stages), stages, strict=True)
        if stage.gate is not None
    ]


def hyper_positions(links: Links) -> dict[str, list[tuple[int, str]]]:
    """Return every name of a hyper-parameter, and its positions (link index, field).

    Only ``lr`` has several positions. For names in several stages see the module's docstring.
    """
    parts: dict[str, list[int]] = {}
    for index, link in enumerate(links):
        parts.setdefault(link.label, []).append(index)
    found: dict[str, list[tuple[int, str]]] = {}
    for label, own in parts.items():
        front = f"{label}." if label else ""
        for name, places in _part_positions([links[index] for index in own]).items():
            found[front + name] = [(own[index], field) for index, field in places]
    return found


def hyper_names(links: Links) -> dict[tuple[int, str], str]:
    """Return the name of every hyper-parameter by its position (link index, field)."""
    return {at: name for name, found in hyper_positions(links).items() for at in found}


def _part_positions(links: Sequence[Link]) -> dict[str, list[tuple[int, str]]]:
    """Return the positions for the links of one part of a partition."""
    by_field: dict[str, list[int]] = {}
    for index, link in enumerate(links):
        for field in link.hyper._fields:
            by_field.setdefault(field, []).append(index)
    labels = stage_labels(link.stage for link in links)
    found: dict[str, list[tuple[int, str]]] = {}
    for field, indices in by_field.items():
        if field == "lr" or len(indices) == 1:
            found[field] = [(index, field) for index in indices]
        if len(indices) > 1:
            last = getattr(links[indices[-1]].hyper, field)
            for index in indices:
                if field != "lr" or _is_other(getattr(links[index].hyper, field), last):
                    found[f"{labels[index]}.{field}"] = [(index, field)]
    return found


def _is_other(own: Any, last: Any) -> bool:
    """Return True if two values of ``lr`` differ; tensors differ unless they are one object."""
    if own is last:
        return False
    return isinstance(own, Tensor) or isinstance(last, Tensor) or bool(own != last)


def move_changes(
    changes: Sequence[Change], indices: Sequence[int], front: str = ""
) -> tuple[Change, ...]:
    """Return changes for links that have new indices and the new enclosing label ``front``."""
    return tuple(
        (prefix_label(front, at) if isinstance(at, str) else indices[at], field, value)
        for at, field, value in changes
    )


def prefix_label(front: str, label: str) -> str:
    """Prefix a label with the label of the enclosing partition."""
    return f"{front}.{label}" if front and label else front or label


def hyper_values(links: Links) -> dict[str, Any]:
    """Return all hyper-parameters of a chain by name, ``lr`` first.

    Setting them in this order builds the same chain.
    """
    named = {
        name: getattr(links[positions[-1][0]].hyper, positions[-1][1])
        for name, positions in hyper_positions(links).items()
    }
    return {key: named[key] for key in sorted(named, key=lambda key: key != "lr")}


def parse_changes(links: Links, named: Mapping[str, Any]) -> tuple[Change, ...]:
    """Convert named values to changes, which remain valid when links are added.

    Changes of the common ``lr`` come first, so that a stage's own ``lr`` wins. An unknown or
    ambiguous name raises TypeError.
    """
    known = hyper_positions(links)
    found: list[Change] = []
    for name, value in named.items():
        if name not in known:
            alike = [key for key in known if key.endswith(f".{name}")]
            hint = f"did you mean {' or '.join(alike)}?" if alike else f"it has {', '.join(known)}"
            raise TypeError(f"this chain has no hyper-parameter {name!r}; {hint}")
        index, field = known[name][0]
        label = links[index].label
        found.append((label if name == prefix_label(label, "lr") else index, field, value))
    return tuple(sorted(found, key=lambda change: not isinstance(change[0], str)))


def apply_changes(links: Links, changes: Sequence[Change]) -> Links:
    """Return the links with changes applied, and types and bounds checked."""
    per_link: dict[int, dict[str, Any]] = {}
    for (index, field), value in expand_changes(links, changes).items():
        if not are_unchanged([getattr(links[index].hyper, field)], [value]):
            per_link.setdefault(index, {})[field] = value
    changed = list(links)
    try:
        for index, values in per_link.items():
            changed[index] = rebuild(links[index], **values)
    except (TypeError, ValueError) as error:
        prefix_links_error(links, error)
        raise
    return tuple(changed)


def expand_changes(links: Links, changes: Sequence[Change]) -> dict[tuple[int, str], Any]:
    """Return the new values by (link index, field); later changes win."""
    found: dict[tuple[int, str], Any] = {}
    for target, field, value in changes:
        if isinstance(target, int):
            found[target, field] = value
            continue
        for index, link in enumerate(links):
            if target == link.label and field in link.hyper._fields:
                found[index, field] = value
    return found


def replace_values(links: Links, changes: Mapping[str, Any]) -> Links:
    """Return the links with other values of named hyper-parameters."""
    return apply_changes(links, parse_changes(links, changes)) if changes else links


def counts_steps(links: Links, overrides: Iterable[tuple[Any, Any]] = ()) -> bool:
    """Return True if the optimizer, or an override of it, has a schedule on the global step."""
    changed = [(value,) for _, changes in overrides for *_, value in changes]
    return has_global_schedule([*(link.hyper for link in links), *changed])


def has_shared_state(links: Links, overrides: Iterable[tuple[Any, Any]] = ()) -> bool:
    """Return True if the optimizer has shared scalars, or a count of its own steps."""
    has_scalars = any(link.stage.combine is not None for link in links)
    return has_scalars or counts_steps(links, overrides)


def is_composed(links: Links, overrides: Iterable[tuple[Any, Any]]) -> bool:
    """Return True if leaves have different stages or extra inputs, or there is shared state."""
    differs = any(link.where is not None or link.stage.inputs for link in links)
    return differs or has_shared_state(links, overrides)
