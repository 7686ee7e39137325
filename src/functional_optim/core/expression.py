"""Expression that builds an optimizer, for its ``repr``."""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from textwrap import indent
from typing import Any, NamedTuple

from functional_optim.core.constructor_calls import format_link, format_optimizer, keywords
from functional_optim.core.format import function_name
from functional_optim.core.hyper import INHERITED
from functional_optim.core.links import (
    FREEZE,
    Change,
    Links,
    hyper_names,
    is_leading,
    prefix_label,
)
from functional_optim.core.overrides import Override
from functional_optim.core.selectors import HasLabel, Labels, Where, layers_of
from functional_optim.core.stage import Link

_LONGEST = 6
"""Maximum number of links that a public constructor builds."""

AUTO = "auto"
"""The default executor."""


def format_expression(
    links: Links, overrides: Sequence[Override], executor: str, namespace: str
) -> str:
    """Return the expression that builds an optimizer, with all its values.

    It has only public names, so that it evaluates after ``from functional_optim import *``. Your
    own stages and functions appear by name, a tensor as ``tensor(...)``. A partition takes several
    lines.
    """
    text = _write_chain(
        [_Item(k, link, layers_of(link.where), link.label) for k, link in enumerate(links)]
    )
    for where, changes in overrides:
        text += f".override({', '.join([_where(where), *_changes(links, changes)])})"
    run = {"executor": executor, "namespace": namespace}
    usual = {"executor": AUTO, "namespace": ""}
    using = [f"{name}={value!r}" for name, value in run.items() if value != usual[name]]
    return f"{text}.using({', '.join(using)})" if using else text


class _Item(NamedTuple):
    """Link that is still to be written, with the enclosing masks and partitions."""

    place: int
    """The index of the link."""
    link: Link
    layers: tuple[Where, ...]
    """The selectors of enclosing masks and partitions that are not written yet, outermost first."""
    label: str

    @property
    def is_leading(self) -> bool:
        return is_leading(self.link.stage)

    def label_by(self, label_of: Any) -> str | None:
        """Return the label in the outermost partition, if the partition is by this function."""
        outer = self.layers[0] if self.layers else None
        if isinstance(outer, HasLabel) and outer.label_of == label_of:
            return outer.label
        return None

    def inner(self) -> "_Item":
        """Return the item without its outermost mask or partition."""
        label = self.label.partition(".")[2] if isinstance(self.layers[0], HasLabel) else self.label
        return self._replace(layers=self.layers[1:], label=label)


def _giver_of(items: Sequence[_Item]) -> _Item | None:
    """Return the last link whose call gives an ``lr``, which the other links of a chain inherit."""
    having = [one for one in items if hasattr(one.link.hyper, "lr")]
    if not having or having[-1].label:
        return None
    giving = [one for one in having if not _only_inherits(one.link)]
    return giving[-1] if giving else having[-1]


def _only_inherits(link: Link) -> bool:
    """Return True if the call of a link takes no ``lr``, as that of ``decoupled_weight_decay``."""
    alone, inheriting = format_link(link, INHERITED), format_link(link, link.hyper.lr)
    return ".links[" in alone and ".links[" not in inheriting


class _Part(NamedTuple):
    """Text of some links of a chain."""

    text: str
    is_optimizer: bool
    lead: float = math.inf
    """The index of the first leading link in the part."""


def _write_chain(items: Sequence[_Item]) -> str:
    """Return one expression for the links of a chain."""
    parts = _write_parts(items)
    if len(parts) == 1 and parts[0].is_optimizer:
        return parts[0].text
    return _call("chain", [part.text for part in parts])


def _write_parts(items: Sequence[_Item]) -> list[_Part]:
    """Return the parts of a chain; leading links are inserted so that their order is kept."""
    giver = _giver_of(items)
    leading = [one for one in items if one.is_leading]
    left = [one for one in items if not one.is_leading]
    parts: list[_Part] = []
    while left:
        written, part = _write_next(left, leading, giver)
        parts.append(part)
        left = [one for one in left if one not in written]
        leading = [one for one in leading if one not in written]
    for one in leading:
        part = _write_link(one, giver)
        place = next((k for k, other in enumerate(parts) if other.lead > one.place), len(parts))
        parts.insert(place, part)
    return parts


def _write_next(
    left: list[_Item], leading: list[_Item], giver: _Item | None
) -> tuple[Sequence[_Item], _Part]:
    """Return the links of the next part, and the part."""
    first = left[0]
    if first.layers:
        return _write_layer(left, leading, giver)
    if _wrapper_call(first) is not None:
        written = [one for one in (*leading, *left) if _wrapper_call(one) is not None]
        return written, _Part(_write_wrapper(written), is_optimizer=True)
    plain = _take_while(left, lambda one: not one.layers and _wrapper_call(one) is None)
    heads = [one for one in leading if not one.layers and _wrapper_call(one) is None]
    for count in range(min(_LONGEST, len(plain)), 0, -1):
        for head in [*([one] for one in heads), []]:
            items = [*head, *plain[:count]]
            call = format_optimizer([one.link for one in items])
            if call is not None:
                return items, _Part(call, is_optimizer=True, lead=_first_lead(items))
    return [first], _write_link(first, giver)


def _write_link(item: _Item, giver: _Item | None = None) -> _Part:
    """Write one link, with its masks. It inherits the ``lr`` of ``giver``."""
    lead = _first_lead([item])
    if item.layers and item.link.stage.name == FREEZE:
        text = f"freeze({_where(item.layers[-1])})"
        item = item._replace(layers=item.layers[:-1])
    elif item.link.stage.name == FREEZE:
        text = "freeze()"
    else:
        lr = INHERITED
        if giver is not None and giver.place != item.place:
            lr = giver.link.hyper.lr
        text = format_link(item.link, lr)
    for layer in reversed(item.layers):
        text = _call("masked", [text, _where(layer)])
    return _Part(text, is_optimizer=False, lead=lead)


def _write_layer(
    left: list[_Item], leading: list[_Item], giver: _Item | None
) -> tuple[Sequence[_Item], _Part]:
    """Write the next links that are in a common partition or mask."""
    outer = left[0].layers[0]
    if isinstance(outer, HasLabel):
        return _write_partition(left, leading, outer)
    own = _take_while(left, lambda one: one.layers[:1] == (outer,))
    if own[0].link.stage.name == FREEZE:
        return own[:1], _write_link(own[0])
    heads = [one for one in leading if one.layers[:1] == (outer,)]
    parts = _write_parts([one.inner() for one in (*heads, *own)])
    if len(parts) > 1 or (
        giver is not None and not parts[0].is_optimizer
    ):  # masked() takes one argument, so each link is written alone
        return own[:1], _write_link(own[0], giver)
    text = _call("masked", [parts[0].text, _where(outer)])
    return [*heads, *own], _Part(text, parts[0].is_optimizer, _first_lead(heads))


def _write_partition(
    left: list[_Item], leading: list[_Item], outer: HasLabel
) -> tuple[Sequence[_Item], _Part]:
    """Write the next links that are in a common partition."""
    label_of = outer.label_of
    by_label: dict[str, list[_Item]] = {}
    for one in left:
        label = one.label_by(label_of)
        if label is None or (label in by_label and label != [*by_label][-1]):
            break  # another partition, perhaps by the same labels
        by_label.setdefault(label, []).append(one)
    written: list[_Item] = []
    texts = []
    for label, own in by_label.items():
        heads = [one for one in leading if one.label_by(label_of) == label]
        later = [one for one in left if one.label_by(label_of) == label and one not in own]
        # If another partition has the same labels, the leading links are shared between both:
        # the first gets the number for which its optimizers have the simplest text.
        counts = range(len(heads) + 1) if later else [len(heads)]
        tried = [(_write_label([*heads[:k], *own]), k) for k in counts]
        text, count = min(tried, key=lambda one: (one[0].count(".links["), one[1]))
        written += [*heads[:count], *own]
        texts.append(indent(f"{label!r}: {text},\n", " " * 4))
    chosen = repr(label_of) if isinstance(label_of, Labels) else function_name(label_of)
    text = _call("partition", [f"{{\n{''.join(texts)}}}", chosen])
    return written, _Part(text, is_optimizer=True, lead=_first_lead(written))


def _write_label(items: Sequence[_Item]) -> str:
    """Write the optimizer of one label."""
    if len(items) == 1 and items[0].link.stage.name == FREEZE and not items[0].layers[1:]:
        return "freeze()"
    return _write_chain([one.inner() for one in items])


def _write_wrapper(items: Iterable[_Item]) -> str:
    """Write links that one call built of other links."""
    name = ""
    inner: list[Link] = []
    arguments: dict[str, Any] = {}
    for item in items:
        call = _wrapper_call(item)
        assert call is not None, "the caller checked it"
        name, own, options = call
        inner += own
        for key, value in options.items():
            is_dict = isinstance(value, dict)
            arguments[key] = {**arguments.get(key, {}), **value} if is_dict else value
    within = [_Item(k, one, layers_of(one.where), one.label) for k, one in enumerate(inner)]
    return _call(name, [_write_chain(within), *keywords(arguments)])


def _wrapper_call(item: _Item) -> tuple[str, tuple[Link, ...], dict[str, Any]] | None:
    """Return the call that built a link of other links, or None; None in a mask or partition."""
    return None if item.layers else item.link.stage.made_of(item.link.hyper)


def _take_while(items: Sequence[_Item], condition: Callable[[_Item], bool]) -> list[_Item]:
    return list(itertools.takewhile(condition, items))


def _first_lead(items: Iterable[_Item]) -> float:
    return min((one.place for one in items if one.is_leading), default=math.inf)


def _call(name: str, arguments: Sequence[str]) -> str:
    """Format a call in one line, or with a line for each argument if an argument has lines."""
    if not any("\n" in one for one in arguments):
        return f"{name}({', '.join(arguments)})"
    lines = "".join(indent(f"{one},\n", " " * 4) for one in arguments)
    return f"{name}(\n{lines})"


def _where(where: Where) -> str:
    """Format a selector: a tuple of keys, or a predicate by its name."""
    return function_name(where) if callable(where) else repr(where)


def _changes(links: Links, changes: Sequence[Change]) -> list[str]:
    """Format changes as keyword arguments of ``override``."""
    names = hyper_names(links)
    values: Mapping[str, Any] = {
        prefix_label(target, field) if isinstance(target, str) else names[target, field]: value
        for target, field, value in changes
    }
    return keywords(values)
