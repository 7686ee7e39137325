"""An optimizer as the expression that made it: what its ``repr`` is."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from functional_optim.brief import named
from functional_optim.hyper import frozen, shown
from functional_optim.links import Change, Links, addresses
from functional_optim.overrides import IfAny, Where
from functional_optim.stage import Link

if TYPE_CHECKING:
    from functional_optim.optimizer import Optimizer


def expression(optimizer: "Optimizer") -> str:
    """The stages of a chain with all their values, what is set for some leaves, and how it is run.

    Stages stand by their names, in the order they run. An ``lr`` that a stage has from the rule at
    the end is not repeated; functions stand by their names.

    Args:
        optimizer: any.

    Returns:
        One line, such as
        ``chain(clip_by_value(clip_value=1.0), lion(lr=0.1, betas=(0.9, 0.99))).override(('b',),
        lr=0.2).using(executor='auto')``.
    """
    lr = getattr(optimizer.links[-1].hyper, "lr", None)
    stages = [_link(link, lr) for link in optimizer.links[:-1]] + [_link(optimizer.links[-1])]
    text = f"chain({', '.join(stages)})"
    for where, changes in optimizer.overrides:
        text += f".override({', '.join([_where(where), *_changes(optimizer.links, changes)])})"
    run = {"executor": optimizer.executor, "namespace": optimizer.namespace}
    usual = {"executor": "reference", "namespace": ""}
    using = [f"{name}={value!r}" for name, value in run.items() if value != usual[name]]
    return f"{text}.using({', '.join(using)})" if using else text


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
    if isinstance(where, IfAny):
        return f"if_any({_where(where.where)})"
    return named(where) if callable(where) else repr(where)


def _changes(links: Links, changes: Sequence[Change]) -> list[str]:
    """Values under the names that ``override`` takes."""
    names = {place: name for name, places in addresses(links).items() for place in places}
    return _keywords(
        {field if place is None else names[place, field]: value for place, field, value in changes}
    )
