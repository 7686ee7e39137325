"""An optimizer as the expression that made it: what its ``repr`` is."""

from collections.abc import Mapping, Sequence
from typing import Any

from functional_optim.core.brief import named
from functional_optim.core.hyper import frozen, shown
from functional_optim.core.links import FREEZE, Change, Links, addresses, under
from functional_optim.core.overrides import Override
from functional_optim.core.stage import Link
from functional_optim.core.where import HasLabel, Labels, Where


def expression(links: Links, overrides: Sequence[Override], executor: str, namespace: str) -> str:
    """The stages of a chain with all their values, what is set for some leaves, and how it is run.

    Stages stand by their names, in the order they run. An ``lr`` that a stage has from the rule at
    the end is not repeated; functions stand by their names.

    Args:
        links: of an optimizer.
        overrides: likewise.
        executor: the name of the one that it is run by.
        namespace: of optree.

    Returns:
        One line, such as
        ``chain(clip_by_value(clip_value=1.0), lion(lr=0.1, betas=(0.9, 0.99))).override(('b',),
        lr=0.2).using(executor='auto')``.
    """
    text = _joined(links)
    for where, changes in overrides:
        text += f".override({', '.join([_where(where), *_changes(links, changes)])})"
    run = {"executor": executor, "namespace": namespace}
    usual = {"executor": "reference", "namespace": ""}
    using = [f"{name}={value!r}" for name, value in run.items() if value != usual[name]]
    return f"{text}.using({', '.join(using)})" if using else text


def _joined(links: Links) -> str:
    """Links as a chain; those of parts as a partition, where the last of them stands."""
    giving = _giving(links)
    lr = None if giving is None else links[giving].hyper.lr
    last = max((place for place, link in enumerate(links) if link.label), default=None)
    shown = []
    made: list[Link] = []
    for place, link in enumerate(links):
        if link.label:
            if place == last:
                shown.append(_partition([one for one in links if one.label]))
            continue
        if link.where is None and link.stage.made_of(link.hyper) is not None:
            made.append(link)
            continue
        if made:
            shown.append(_made(made))
            made = []
        own = _link(link, None if place == giving else lr)
        shown.append(own if link.where is None else _masked(own, link))
    is_whole = not shown or last is not None
    if made:
        shown.append(_made(made))
    return shown[0] if is_whole and len(shown) == 1 else f"chain({', '.join(shown)})"


def _made(links: Sequence[Link]) -> str:
    """Links that one call made of others, as that call."""
    name = ""
    inner: list[Link] = []
    told: dict[str, Any] = {}
    for link in links:
        made = link.stage.made_of(link.hyper)
        assert made is not None, "it was asked for"
        name, own, options = made
        inner += own
        for key, value in options.items():
            told[key] = {**told.get(key, {}), **value} if isinstance(value, dict) else value
    return f"{name}({', '.join([_joined(tuple(inner)), *_keywords(told)])})"


def _giving(links: Links) -> int | None:
    """The link whose ``lr`` others have that were given none: the last with one of its own."""
    having = [place for place, link in enumerate(links) if hasattr(link.hyper, "lr")]
    return having[-1] if having and not links[having[-1]].label else None


def _masked(own: str, link: Link) -> str:
    if link.stage.name == FREEZE:
        return f"freeze({_where(link.where)})"
    return f"masked({own}, {_where(link.where)})"


def _partition(links: Sequence[Link]) -> str:
    """Parts of optimizers by label; of parts within parts, the whole label is shown."""
    parts: dict[str, list[Link]] = {}
    for link in links:
        parts.setdefault(link.label, []).append(link._replace(label="", where=None))
    each = (f"{label!r}: {_joined(tuple(own))}" for label, own in parts.items())
    return f"partition({{{', '.join(each)}}}, {_label_of(links[0].where)})"


def _label_of(where: Any) -> str:
    """The function that gives labels, by its name."""
    while not isinstance(where, HasLabel):
        where = getattr(where, "first", None)
        if where is None:
            return "..."
    return repr(where.label_of) if isinstance(where.label_of, Labels) else named(where.label_of)


def _link(link: Link, lr: Any = None) -> str:
    """A link; ``lr`` is what it need not say, as it is the chain's."""
    values = link.hyper._asdict()
    if lr is not None and frozen(values.get("lr")) == frozen(lr):
        del values["lr"]
    return f"{link.stage.name}({', '.join(_keywords(values))})"


def _keywords(values: Mapping[str, Any]) -> list[str]:
    """Values by name; a name with a dot is no keyword."""
    return [
        f"{name}={shown(value)}" if name.isidentifier() else f"**{{{name!r}: {shown(value)}}}"
        for name, value in values.items()
    ]


def _where(where: Where) -> str:
    """A tuple of keys, or a predicate by its name."""
    return named(where) if callable(where) else repr(where)


def _changes(links: Links, changes: Sequence[Change]) -> list[str]:
    """Values under the names that ``override`` takes."""
    names = {place: name for name, places in addresses(links).items() for place in places}
    return _keywords(
        {
            under(place, field) if isinstance(place, str) else names[place, field]: value
            for place, field, value in changes
        }
    )
