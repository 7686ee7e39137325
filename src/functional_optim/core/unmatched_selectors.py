"""Report of selectors that match no parameter."""

from collections.abc import Sequence
from typing import Any

from functional_optim.core.brief import some
from functional_optim.core.hyper import shown
from functional_optim.core.links import Links
from functional_optim.core.overrides import Override, shape_of
from functional_optim.core.selectors import IfAny, applies, by_path, names, written
from functional_optim.core.tree import Path, path_name

_SHOWN = 8
"""How many paths an error names."""


class UnmatchedSelectors:
    """Selectors that match no leaf seen so far.

    An override is to be meant for some leaf, and so is what a mask, a label or what is frozen says
    of paths; those of :func:`~functional_optim.if_any` need not be. Where leaves have no names but
    their numbers, as those of ``model.parameters()``, nothing that selects by name can be meant for
    one, and the error says so.

    Args:
        links: of an optimizer.
        overrides: likewise.
    """

    def __init__(self, links: Links, overrides: Sequence[Override]) -> None:
        self.are_numbered = False
        """Whether a leaf has no name."""
        self._overrides = [one for one in overrides if not isinstance(one[0], IfAny)]
        wheres = [link.where for link in links if link.where is not None]
        wheres += [where for where, _ in self._overrides]
        self._parts = list(dict.fromkeys(one for where in wheres for one in by_path(where)))
        self._seen: list[Path] = []

    def see(self, path: Path, leaf: Any) -> None:
        """See a leaf."""
        if not (self._overrides or self._parts):
            return
        shape = shape_of(leaf)
        self._seen.append(path)
        self.are_numbered |= not any(isinstance(key, str) for key in path)
        self._overrides = [one for one in self._overrides if not applies(one[0], path, shape)]
        self._parts = [one for one in self._parts if not applies(one, path, shape)]

    def check(self) -> None:
        """All leaves were seen.

        Raises:
            ValueError: names the first that is meant for none, and paths that there are.
        """
        there = some(list(map(path_name, self._seen)), _SHOWN) or "none"
        for where, changes in self._overrides:
            values = ", ".join(f"{name}={shown(value)}" for _, name, value in changes)
            raise ValueError(
                f"override({written(where)}, {values}) matches no parameter; the parameters are "
                f"{there}: correct it; or, where there may be none (such as in a part of the "
                "parameters), write override(functional_optim.if_any(where), ...)"
            )
        for where in self._parts:
            if self.are_numbered and names(where):
                raise ValueError(
                    f"{written(where)} selects parameters by their names, and these have none but "
                    f"numbers ({there}): give each with its name, as model.named_parameters() "
                    "does; or select by numbers, by a predicate on paths, or by with_shape"
                )
            raise ValueError(
                f"{written(where)} matches no parameter; the parameters are {there}: correct it; "
                "or, where there may be none (such as in a part of the parameters), write "
                "functional_optim.if_any(where) in its place"
            )
        self._parts, self._seen = [], []  # of what is added later, some may have names


def check_used(
    links: Links, overrides: Sequence[Override], paths: Sequence[Path], leaves: Sequence[Any]
) -> None:
    """Make sure that what an optimizer says of paths is meant for some leaf of a tree.

    A tensor that stands alone has no path: a rule is tried on it, whichever leaves it is for.

    Raises:
        ValueError: as of :meth:`UnmatchedSelectors.check`.
    """
    unmet = UnmatchedSelectors(links if any(paths) else (), overrides)
    for path, leaf in zip(paths, leaves, strict=True):
        unmet.see(path, leaf)
    unmet.check()
