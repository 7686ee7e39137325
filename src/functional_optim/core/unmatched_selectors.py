"""Report of selectors that match no parameter."""

from collections.abc import Sequence
from typing import Any

from functional_optim.core.format import format_names
from functional_optim.core.hyper import format_hyper
from functional_optim.core.links import Links
from functional_optim.core.overrides import Override, shape_of
from functional_optim.core.selectors import (
    IfAny,
    format_selector,
    has_names,
    is_selected,
    path_selectors,
)
from functional_optim.core.tree import Path, path_name

_SHOWN = 8
"""Maximum number of paths in an error."""


class UnmatchedSelectors:
    """Selectors of an optimizer that match none of the leaves added so far.

    Overrides, and selectors by path of masks, labels and ``freeze``, must match a leaf, unless they
    are in :func:`~functional_optim.if_any`. A selector by name cannot match the numbered leaves of
    ``model.parameters()``; the error says so.
    """

    def __init__(self, links: Links, overrides: Sequence[Override]) -> None:
        self.are_numbered = False
        """True if a leaf has a number in place of a name."""
        self._overrides = [one for one in overrides if not isinstance(one[0], IfAny)]
        wheres = [link.where for link in links if link.where is not None]
        wheres += [where for where, _ in self._overrides]
        self._parts = list(dict.fromkeys(one for where in wheres for one in path_selectors(where)))
        self._seen: list[Path] = []

    def add_leaf(self, path: Path, leaf: Any) -> None:
        """Remove the selectors that match a leaf."""
        if not (self._overrides or self._parts):
            return
        shape = shape_of(leaf)
        self._seen.append(path)
        self.are_numbered |= not any(isinstance(key, str) for key in path)
        self._overrides = [one for one in self._overrides if not is_selected(one[0], path, shape)]
        self._parts = [one for one in self._parts if not is_selected(one, path, shape)]

    def check(self) -> None:
        """Raise ValueError if a selector matched none of the leaves."""
        there = format_names(list(map(path_name, self._seen)), _SHOWN) or "none"
        for where in (*(where for where, _ in self._overrides), *self._parts):
            if self.are_numbered and any(map(has_names, path_selectors(where))):
                raise ValueError(
                    f"{format_selector(where)} selects parameters by their names, and these have "
                    f"none but numbers ({there}): give each with its name, as "
                    "model.named_parameters() does; or select by numbers, by a predicate on paths, "
                    "or by with_shape"
                )
        for where, changes in self._overrides:
            values = ", ".join(f"{name}={format_hyper(value)}" for _, name, value in changes)
            raise ValueError(
                f"override({format_selector(where)}, {values}) matches no parameter; the "
                f"parameters are {there}: correct it; or, where there may be none (such as in a "
                "part of the parameters), write override(functional_optim.if_any(where), ...)"
            )
        for where in self._parts:
            raise ValueError(
                f"{format_selector(where)} matches no parameter; the parameters are {there}: "
                "correct it; or, where there may be none (such as in a part of the parameters), "
                "write functional_optim.if_any(where) in its place"
            )
        self._parts, self._seen = [], []  # leaves that are added later may have names


def check_used(
    links: Links, overrides: Sequence[Override], paths: Sequence[Path], leaves: Sequence[Any]
) -> None:
    """Raise ValueError if a selector of an optimizer matches no leaf of a tree.

    A lone tensor has no path, so only overrides are checked for it.
    """
    unmatched = UnmatchedSelectors(links if any(paths) else (), overrides)
    for path, leaf in zip(paths, leaves, strict=True):
        unmatched.add_leaf(path, leaf)
    unmatched.check()
