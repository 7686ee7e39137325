"""An optimizer as the expression that builds it: what its ``repr`` is."""

import math
from collections.abc import Iterable, Mapping, Sequence
from textwrap import indent
from typing import Any, NamedTuple

from functional_optim.core.brief import named
from functional_optim.core.hyper import INHERITED
from functional_optim.core.links import FREEZE, Change, Links, addresses, leads, under
from functional_optim.core.overrides import Override
from functional_optim.core.selectors import HasLabel, Labels, Where, layers_of
from functional_optim.core.spelling import keywords, spell_link, spell_optimizer
from functional_optim.core.stage import Link

_LONGEST = 6
"""The most links that a public constructor builds."""

AUTO = "auto"
"""The executor that an optimizer has unless told otherwise."""


def expression(links: Links, overrides: Sequence[Override], executor: str, namespace: str) -> str:
    """Return the expression that builds an optimizer, with all its values.

    It is made of public names, so that it evaluates after ``from functional_optim import *``. A
    stage of one's own stands by its name, a function by its name, and a tensor as ``tensor(...)``.
    A partition is written over several lines.

    Args:
        links: of an optimizer.
        overrides: of the same optimizer.
        executor: the name of the executor.
        namespace: of optree.

    Returns:
        A text such as ``chain(clip_by_value(clip_value=1.0), lion(lr=0.1, betas=(0.9, 0.99),
        weight_decay=0.0, maximize=False)).override(('b',), lr=0.2).using(executor='blocked')``.
    """
    text = _Writer().joined(
        [_Item(k, link, layers_of(link.where), link.label) for k, link in enumerate(links)]
    )
    for where, changes in overrides:
        text += f".override({', '.join([_where(where), *_changes(links, changes)])})"
    run = {"executor": executor, "namespace": namespace}
    usual = {"executor": AUTO, "namespace": ""}
    using = [f"{name}={value!r}" for name, value in run.items() if value != usual[name]]
    return f"{text}.using({', '.join(using)})" if using else text


class _Item(NamedTuple):
    """A link, and what of its surroundings is not written yet."""

    place: int
    link: Link
    layers: tuple[Where, ...]
    label: str

    @property
    def leads(self) -> bool:
        return leads(self.link.stage)

    def label_by(self, label_of: Any) -> str | None:
        """Its label in the partition that is outermost, if that is by this function."""
        outer = self.layers[0] if self.layers else None
        if isinstance(outer, HasLabel) and outer.label_of == label_of:
            return outer.label
        return None

    def inner(self) -> "_Item":
        """Return the item within its outermost mask or part."""
        label = self.label.partition(".")[2] if isinstance(self.layers[0], HasLabel) else self.label
        return self._replace(layers=self.layers[1:], label=label)


class _ChainLr(NamedTuple):
    """The ``lr`` that links of a chain have from the last one with an ``lr`` of its own."""

    giver: int = -1
    lr: Any = INHERITED

    @classmethod
    def of(cls, items: Sequence[_Item]) -> "_ChainLr":
        having = [one for one in items if hasattr(one.link.hyper, "lr")]
        if not having or having[-1].label:
            return cls()
        return cls(having[-1].place, having[-1].link.hyper.lr)

    def given_to(self, item: _Item) -> Any:
        return INHERITED if item.place == self.giver else self.lr


class _Part(NamedTuple):
    """A part of a chain as text."""

    text: str
    is_optimizer: bool
    lead: float = math.inf
    """The index of the first leading link that the part brings."""


class _Writer:
    """Writes links scope by scope: a chain, what is masked in it, and the parts of a partition."""

    def joined(self, items: Sequence[_Item]) -> str:
        """The links of a chain as one expression."""
        parts = self._parts(items)
        if len(parts) == 1 and parts[0].is_optimizer:
            return parts[0].text
        return _call("chain", [part.text for part in parts])

    def _parts(self, items: Sequence[_Item]) -> list[_Part]:
        """The links of a chain part by part; a leading link stands where it keeps its place."""
        lr = _ChainLr.of(items)
        waiting = [one for one in items if one.leads]
        left = [one for one in items if not one.leads]
        parts: list[_Part] = []
        while left:
            taken, part = self._next(left, waiting, lr)
            parts.append(part)
            left = [one for one in left if one not in taken]
            waiting = [one for one in waiting if one not in taken]
        for one in waiting:
            alone = self._alone(one, lr)
            place = next((k for k, part in enumerate(parts) if part.lead > one.place), len(parts))
            parts.insert(place, alone)
        return parts

    def _next(
        self, left: list[_Item], waiting: list[_Item], lr: _ChainLr
    ) -> tuple[Sequence[_Item], _Part]:
        """The links of the next part, and the part."""
        first = left[0]
        if first.layers:
            return self._layer(left, waiting)
        if _made_of(first) is not None:
            taken = [one for one in (*waiting, *left) if _made_of(one) is not None]
            return taken, _Part(self._made(taken), is_optimizer=True)
        plain = _leading_run(left, lambda one: not one.layers and _made_of(one) is None)
        heads = [one for one in waiting if not one.layers and _made_of(one) is None]
        for count in range(min(_LONGEST, len(plain)), 0, -1):
            for head in ([one] for one in heads):
                found = self._optimizer([*head, *plain[:count]])
                if found is not None:
                    return found
            found = self._optimizer(plain[:count])
            if found is not None:
                return found
        return [first], self._alone(first, lr)

    def _optimizer(self, items: list[_Item]) -> tuple[Sequence[_Item], _Part] | None:
        """Links that are all of an optimizer, as a call of its constructor."""
        spelled = spell_optimizer([one.link for one in items])
        if spelled is None:
            return None
        return items, _Part(spelled, is_optimizer=True, lead=_first_lead(items))

    def _alone(self, item: _Item, lr: _ChainLr) -> _Part:
        """Write one link, with its masks."""
        lead = _first_lead([item])
        if item.layers and item.link.stage.name == FREEZE:
            text = f"freeze({_where(item.layers[-1])})"
            item = item._replace(layers=item.layers[:-1])
        elif item.link.stage.name == FREEZE:
            text = "freeze()"
        else:
            text = spell_link(item.link, lr.given_to(item))
        for layer in reversed(item.layers):
            text = _call("masked", [text, _where(layer)])
        return _Part(text, is_optimizer=False, lead=lead)

    def _layer(self, left: list[_Item], waiting: list[_Item]) -> tuple[Sequence[_Item], _Part]:
        """The next links that a partition, or a mask, is around."""
        outer = left[0].layers[0]
        if isinstance(outer, HasLabel):
            return self._partition(left, waiting, outer)
        own = _leading_run(left, lambda one: one.layers[:1] == (outer,))
        if own[0].link.stage.name == FREEZE:
            return own[:1], self._alone(own[0], _ChainLr())
        heads = [one for one in waiting if one.layers[:1] == (outer,)]
        parts = self._parts([one.inner() for one in (*heads, *own)])
        if len(parts) > 1:  # each link by itself, since a mask is around one thing
            return own[:1], self._alone(own[0], _ChainLr())
        text = _call("masked", [parts[0].text, _where(outer)])
        return [*heads, *own], _Part(text, parts[0].is_optimizer, _first_lead(heads))

    def _partition(
        self, left: list[_Item], waiting: list[_Item], outer: HasLabel
    ) -> tuple[Sequence[_Item], _Part]:
        """Parts of optimizers by label."""
        label_of = outer.label_of
        by_label: dict[str, list[_Item]] = {}
        for one in left:
            label = one.label_by(label_of)
            if label is None or (label in by_label and label != [*by_label][-1]):
                break  # another partition, perhaps by the same labels
            by_label.setdefault(label, []).append(one)
        taken: list[_Item] = []
        texts = []
        for label, own in by_label.items():
            heads = [one for one in waiting if one.label_by(label_of) == label]
            later = [one for one in left if one.label_by(label_of) == label and one not in own]
            # Of two partitions by the same labels, the first has as many as its optimizers bring.
            counts = range(len(heads) + 1) if later else [len(heads)]
            tried = [(self._labelled([*heads[:k], *own]), k) for k in counts]
            text, count = min(tried, key=lambda one: (one[0].count(".links["), one[1]))
            taken += [*heads[:count], *own]
            texts.append(indent(f"{label!r}: {text},\n", " " * 4))
        chosen = repr(label_of) if isinstance(label_of, Labels) else named(label_of)
        text = _call("partition", [f"{{\n{''.join(texts)}}}", chosen])
        return taken, _Part(text, is_optimizer=True, lead=_first_lead(taken))

    def _labelled(self, items: Sequence[_Item]) -> str:
        """The optimizer of one label."""
        if len(items) == 1 and items[0].link.stage.name == FREEZE and not items[0].layers[1:]:
            return "freeze()"
        return self.joined([one.inner() for one in items])

    def _made(self, items: Iterable[_Item]) -> str:
        """Links that one call made of others, as that call."""
        name = ""
        inner: list[Link] = []
        told: dict[str, Any] = {}
        for item in items:
            made = _made_of(item)
            assert made is not None, "it was asked for"
            name, own, options = made
            inner += own
            for key, value in options.items():
                told[key] = {**told.get(key, {}), **value} if isinstance(value, dict) else value
        within = [_Item(k, one, layers_of(one.where), one.label) for k, one in enumerate(inner)]
        return _call(name, [_Writer().joined(within), *keywords(told)])


def _made_of(item: _Item) -> tuple[str, tuple[Link, ...], dict[str, Any]] | None:
    """The call that made a link of others; None of a link in a mask or part."""
    return None if item.layers else item.link.stage.made_of(item.link.hyper)


def _leading_run(items: Sequence[_Item], holds: Any) -> list[_Item]:
    """The first items, up to one for which something does not hold."""
    count = next((k for k, one in enumerate(items) if not holds(one)), len(items))
    return list(items[:count])


def _first_lead(items: Iterable[_Item]) -> float:
    return min((one.place for one in items if one.leads), default=math.inf)


def _call(name: str, arguments: Sequence[str]) -> str:
    """A call in one line, or, around a partition, with a line for each argument."""
    if not any("\n" in one for one in arguments):
        return f"{name}({', '.join(arguments)})"
    lines = "".join(indent(f"{one},\n", " " * 4) for one in arguments)
    return f"{name}(\n{lines})"


def _where(where: Where) -> str:
    """A tuple of keys, or a predicate by its name."""
    return named(where) if callable(where) else repr(where)


def _changes(links: Links, changes: Sequence[Change]) -> list[str]:
    """Values under the names that ``override`` takes."""
    names = {place: name for name, places in addresses(links).items() for place in places}
    values: Mapping[str, Any] = {
        under(place, field) if isinstance(place, str) else names[place, field]: value
        for place, field, value in changes
    }
    return keywords(values)
