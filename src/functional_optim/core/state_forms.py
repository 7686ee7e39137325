"""Whether other hyper-parameters ask for the same state, without asking ``init`` at each step."""

from collections.abc import Collection, Sequence
from functools import cache
from typing import Any

import torch

from functional_optim.core.hyper import are_unchanged
from functional_optim.core.initial import Field, fields_of_any
from functional_optim.core.stage import Stage

Kind = tuple[Sequence[int], torch.dtype]
"""The shape and the dtype of a parameter."""


class StateForms:
    """The fields of the state of some parameters.

    A learning rate is another one at each step, and no ``init`` looks at it. So ``init`` is given
    hyper-parameters that note what is read of them, and is asked again only where one of these has
    changed: as long as it reads the same values, it makes the same.

    Args:
        stages: of the chain.
        hypers: of each stage.
        kinds: of the parameters.

    Example::

        >>> import torch
        >>> from functional_optim import sgd
        >>> optimizer = sgd(lr=0.1, momentum=0.9)
        >>> hypers = [link.hyper for link in optimizer.links]
        >>> forms = StateForms(optimizer.stages, hypers, [((3,), torch.float32)])
        >>> forms.hold([one._replace(lr=0.2) if "lr" in one._fields else one for one in hypers])
        True
        >>> forms.hold([link.hyper for link in sgd(lr=0.1).links])
        False
    """

    def __init__(
        self, stages: Sequence[Stage], hypers: Sequence[Any], kinds: Collection[Kind]
    ) -> None:
        self._stages, self._kinds = tuple(stages), list(kinds)
        self._fields, self._read, self._values = self._asked(hypers)

    def hold(self, hypers: Sequence[Any]) -> bool:
        """Whether they ask for these fields."""
        now = [getattr(hypers[place], name) for place, name in self._read]
        if are_unchanged(self._values, now):
            return True
        fields, read, values = self._asked(hypers)
        if fields != self._fields:
            return False
        self._read, self._values = read, values
        return True

    def _asked(
        self, hypers: Sequence[Any]
    ) -> tuple[list[tuple[tuple[Field, ...], ...]], list[tuple[int, str]], list[Any]]:
        """The fields that these ask for, what is read of them, and what that is."""
        read: list[set[str]] = [set() for _ in hypers]
        noting = tuple(map(_noting, hypers, read))
        found = [fields_of_any(self._stages, noting, tuple(shape), d) for shape, d in self._kinds]
        names = [(place, name) for place, own in enumerate(read) for name in sorted(own)]
        return found, names, [getattr(hypers[place], name) for place, name in names]


def _noting(hyper: Any, read: set[str]) -> Any:
    """Hyper-parameters that note the names of those that are read."""
    kind: Any = type(hyper)
    made = tuple.__new__(_noting_class(kind), hyper)
    vars(made)["_read"] = read
    return made


@cache
def _noting_class(kind: Any) -> Any:
    places = {name: place for place, name in enumerate(kind._fields)}

    def noted_in(self: Any) -> set[str]:
        """Of one that was made of another's values, none: those were read for it."""
        found: set[str] = kind.__getattribute__(self, "__dict__").get("_read", set())
        return found

    def one(self: Any, name: str) -> Any:
        if name in places:
            noted_in(self).add(name)
            return tuple.__getitem__(self, places[name])
        return kind.__getattribute__(self, name)

    def every(method: str) -> Any:
        """A method of tuples, which looks at all."""

        def noted(self: Any, *given: Any) -> Any:
            noted_in(self).update(places)
            return getattr(tuple, method)(self, *given)

        return noted

    methods = ("__iter__", "__getitem__", "__contains__", "__add__", "__eq__", "__ne__", "__hash__")
    body = {method: every(method) for method in methods}
    return type(kind.__name__, (kind,), {**body, "__getattribute__": one})
