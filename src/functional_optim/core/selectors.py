"""Selectors of leaves: by the beginning of their paths, a predicate, a pattern or the shape."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from functional_optim.core.brief import brief, named
from functional_optim.core.tree import Path, path_name

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Selector:
    """Leaves meant, by path and shape; joined by ``&`` and ``|``, negated by ``~``.

    Made by :func:`matching`, :func:`with_shape` and :func:`if_any`.
    """

    def selects(self, path: Path, shape: Shape | None) -> bool:
        """Return True if the leaf at ``path`` is selected; ``shape`` is the whole parameter's."""
        raise NotImplementedError

    def __and__(self, other: "Where") -> "Selector":
        return _Both(self, other)

    def __or__(self, other: "Where") -> "Selector":
        return _Either(self, other)

    def __invert__(self) -> "Selector":
        return _Not(self)


Where = Path | Callable[[Path], bool] | Selector
"""Leaves meant: the beginning of their paths, a predicate on paths, or a selector."""


@dataclass(frozen=True)
class _Both(Selector):
    first: Where
    second: Where

    def selects(self, path: Path, shape: Shape | None) -> bool:
        return applies(self.first, path, shape) and applies(self.second, path, shape)

    def __repr__(self) -> str:
        return f"({_short(self.first)} & {_short(self.second)})"


@dataclass(frozen=True)
class _Either(Selector):
    first: Where
    second: Where

    def selects(self, path: Path, shape: Shape | None) -> bool:
        return applies(self.first, path, shape) or applies(self.second, path, shape)

    def __repr__(self) -> str:
        return f"({_short(self.first)} | {_short(self.second)})"


@dataclass(frozen=True)
class _Not(Selector):
    inner: Where

    def selects(self, path: Path, shape: Shape | None) -> bool:
        return not applies(self.inner, path, shape)

    def __repr__(self) -> str:
        return f"~{_short(self.inner)}"


@dataclass(frozen=True)
class _Matching(Selector):
    patterns: tuple[str, ...]

    def selects(self, path: Path, shape: Shape | None) -> bool:
        name = path_name(path)
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)

    def __repr__(self) -> str:
        return f"matching({', '.join(map(repr, self.patterns))})"


@dataclass(frozen=True)
class _WithShape(Selector):
    predicate: Callable[[Shape], bool] | None
    bounds: tuple[tuple[str, int], ...] = ()
    """Names of arguments of :func:`with_shape`, and their values."""

    def selects(self, path: Path, shape: Shape | None) -> bool:
        known = _known(path, shape)
        sizes = {"ndim": len(known), "numel": math.prod(known)}
        for name, bound in self.bounds:
            limit, _, of = name.rpartition("_")
            size = sizes[of]
            if not {"": size == bound, "min": size >= bound, "max": size <= bound}[limit]:
                return False
        return self.predicate is None or bool(self.predicate(known))

    def __repr__(self) -> str:
        given = [] if self.predicate is None else [_short(self.predicate)]
        return f"with_shape({', '.join([*given, *(f'{k}={v}' for k, v in self.bounds)])})"


@dataclass(frozen=True)
class IfAny(Selector):
    """Leaves meant, of which there may be none. Made by :func:`if_any`."""

    where: Where

    def selects(self, path: Path, shape: Shape | None) -> bool:
        return applies(self.where, path, shape)

    def __repr__(self) -> str:
        return f"if_any({_short(self.where)})"


@dataclass(frozen=True)
class Listed(Selector):
    """The leaves at these paths."""

    paths: frozenset[Path]

    def selects(self, path: Path, shape: Shape | None) -> bool:
        return path in self.paths

    def __repr__(self) -> str:
        return f"paths {sorted(map(path_name, self.paths))}"


@dataclass(frozen=True)
class HasLabel(Selector):
    """The leaves to which a function of path and shape gives a label."""

    label_of: Callable[[Path, Shape], str | None]
    label: str

    def selects(self, path: Path, shape: Shape | None) -> bool:
        return self.label_of(path, _known(path, shape)) == self.label

    def __repr__(self) -> str:
        return f"label {self.label!r}"


@dataclass(frozen=True)
class Labels:
    """The first selector that means a leaf says its label. Made by :func:`labels`."""

    pairs: tuple[tuple[str, Where], ...]
    default: str | None

    def __repr__(self) -> str:
        table = ", ".join(f"{label!r}: {_short(where)}" for label, where in self.pairs)
        return f"labels({{{table}}}, default={self.default!r})"

    def __call__(self, path: Path, shape: Shape) -> str | None:
        for label, where in self.pairs:
            if applies(where, path, shape):
                return label
        return self.default


def labels(table: Mapping[str, Where], *, default: str | None = None) -> Labels:
    """A function of path and shape for :func:`~functional_optim.partition`.

    Args:
        table: for each label the leaves meant; the first that means a leaf counts.
        default: the label of all other leaves; without one, they are refused.

    Raises:
        TypeError: one that means no leaves: neither a tuple of keys, a predicate nor a selector.
        ValueError: from ``init`` of the partition: one says something of paths that is true of no
            leaf; it may be misspelt. See :func:`if_any`.

    Example::

        >>> label_of = labels({"bias": matching("*bias")}, default="rest")
        >>> label_of(("layer", "bias"), (3,)), label_of(("layer", "weight"), (3, 2))
        ('bias', 'rest')
    """
    for where in table.values():
        check_where(where)
    return Labels(tuple(table.items()), default)


def matching(*patterns: str) -> Selector:
    """The leaves whose names match one of some patterns, as file names do.

    Args:
        patterns: of names as errors show them, the keys of a path joined by points: ``*`` stands
            for anything, ``?`` for one character, ``[ab]`` for one of some.

    Returns:
        A selector for ``override``, ``masked``, ``freeze`` and ``labels``.

    Raises:
        TypeError: something else than strings, or none.

    Example::

        >>> from functional_optim import adamw
        >>> optimizer = adamw(weight_decay=0.1).override(
        ...     matching("*.bias", "*norm*"), weight_decay=0.0)
        >>> optimizer.hypers_at(("layer", "bias"))[1].weight_decay
        0.0
    """
    if not patterns or not all(isinstance(one, str) for one in patterns):
        raise TypeError(f"matching takes patterns such as '*.bias', got {brief(patterns)}")
    return _Matching(patterns)


def with_shape(
    predicate: Callable[[Shape], bool] | None = None,
    *,
    ndim: int | None = None,
    min_ndim: int | None = None,
    max_ndim: int | None = None,
    min_numel: int | None = None,
    max_numel: int | None = None,
) -> Selector:
    """Select parameters by their shape: by bounds that all hold, or by a predicate.

    An optimizer with bounds can be pickled, and its ``repr`` evaluates. A lambda cannot.

    Args:
        predicate: a function of the shape of a whole parameter, which is a tuple of numbers.
        ndim: the number of dimensions.
        min_ndim: the least number of dimensions.
        max_ndim: the largest number of dimensions.
        min_numel: the least number of elements.
        max_numel: the largest number of elements.

    Returns:
        A selector for ``override``, ``masked``, ``freeze`` and ``labels``.

    Raises:
        TypeError: the predicate is no function, a bound is no whole number, or nothing is given.
        ValueError: a bound is negative.

    Example::

        >>> matrices = with_shape(ndim=2)
        >>> (matrices & ~matching("embed*")).selects(("layer", "weight"), (3, 2))
        True
        >>> with_shape(lambda shape: shape[0] == 3).selects(("layer", "weight"), (3, 2))
        True
    """
    bounds = {
        "ndim": ndim,
        "min_ndim": min_ndim,
        "max_ndim": max_ndim,
        "min_numel": min_numel,
        "max_numel": max_numel,
    }
    given = {name: value for name, value in bounds.items() if value is not None}
    for name, value in given.items():
        if type(value) is not int:
            raise TypeError(f"with_shape: {name} must be a whole number, got {brief(value)}")
        if value < 0:
            raise ValueError(f"with_shape: {name} must be >= 0, got {value}")
    if predicate is not None and not callable(predicate):
        raise TypeError(f"with_shape takes a function of a shape, got {brief(predicate)}")
    if predicate is None and not given:
        raise TypeError(
            f"with_shape needs a function of a shape, or at least one of {', '.join(bounds)}"
        )
    return _WithShape(predicate, tuple(given.items()))


def if_any(where: Where) -> IfAny:
    """Return a selector that may match no leaf.

    Without it, what is meant for no leaf of a tree is refused, since its name may be misspelt: an
    override, and a name, a pattern or a predicate in ``freeze``, ``masked`` and ``labels``. With
    it, one optimizer serves trees of which some have such leaves and some have not: the parts of a
    model, say, or the parameters that each rank owns.

    Args:
        where: as for :meth:`~functional_optim.Optimizer.override`.

    Returns:
        A selector.

    Raises:
        TypeError: ``where`` is neither a tuple, a function nor a selector.

    Example::

        >>> import torch
        >>> from functional_optim import if_any, sgd
        >>> optimizer = sgd(0.1).override(if_any(("head",)), lr=0.2)
        >>> states = [optimizer.init({name: torch.ones(2)}) for name in ("body", "head")]
        >>> optimizer.hypers_at(("head",))[-1].lr
        0.2
    """
    check_where(where)
    return where if isinstance(where, IfAny) else IfAny(where)


def both(outer: Where | None, inner: Where | None) -> Where | None:
    """The leaves that both mean; None means all."""
    if outer is None or inner is None:
        return inner if outer is None else outer
    return _Both(outer, inner)


def implies(inner: Where | None, outer: Where | None) -> bool:
    """Return True if a leaf that ``inner`` selects is selected by ``outer`` too, as written.

    Predicates are not called: False means that it is not known.
    """
    own = layers_of(inner)
    return all(one in own for one in layers_of(outer))


def layers_of(where: Where | None) -> tuple[Where, ...]:
    """Return the selectors that :func:`both` joined, the outermost first."""
    if where is None:
        return ()
    if isinstance(where, _Both):
        return (where.first, *layers_of(where.second))
    return (where,)


def check_where(where: Any) -> None:
    """Make sure that it can be meant for leaves: a list, or a name, would equal no path.

    Raises:
        TypeError: it is neither a tuple, a function nor a selector.
    """
    if not (isinstance(where, (tuple, Selector)) or callable(where)):
        raise TypeError(
            "where must be a tuple of keys, such as ('layer', 0), a function of a path, or a "
            f"selector such as matching('*.bias'), got {brief(where)}"
        )


def applies(where: Where, path: Path, shape: Shape | None = None) -> bool:
    """Return True if the leaf at ``path`` is meant."""
    if isinstance(where, Selector):
        return where.selects(path, shape)
    return where(path) if callable(where) else path[: len(where)] == where


def by_path(where: Where) -> Iterator[Where]:
    """The parts of it that select by paths: their beginnings, patterns and predicates.

    Not those of which there may be none.
    """
    if isinstance(where, (_Both, _Either)):
        yield from by_path(where.first)
        yield from by_path(where.second)
    elif isinstance(where, _Not):
        yield from by_path(where.inner)
    elif isinstance(where, HasLabel) and isinstance(where.label_of, Labels):
        for _, one in where.label_of.pairs:
            yield from by_path(one)
    elif isinstance(where, _Matching) or not isinstance(where, Selector):
        yield where


def names(where: Where) -> bool:
    """Return True if what a part selects by is written of names: a path with text, or a pattern."""
    if isinstance(where, tuple):
        return any(isinstance(key, str) for key in where)
    return isinstance(where, _Matching)


def written(where: Where) -> str:
    """A tuple of keys, a selector, or a predicate by its name and where it was written."""
    if isinstance(where, (tuple, Selector)):
        return repr(where)
    code = getattr(where, "__code__", None)
    name = getattr(where, "__qualname__", None) or repr(where)
    return name if code is None else f"{name} at {code.co_filename}:{code.co_firstlineno}"


def _short(where: Any) -> str:
    """Return the text of a selector within a ``repr``: a predicate by its name alone."""
    return repr(where) if isinstance(where, (tuple, Selector)) else named(where)


def _known(path: Path, shape: Shape | None) -> Shape:
    if shape is None:
        raise ValueError(
            f"the leaf at {path_name(path)!r} is asked for by its path alone, and this optimizer "
            "tells leaves apart by their shapes: give the shape too, hypers_at(path, shape)"
        )
    return shape
