"""Selectors of leaves: by path, name pattern, shape, or predicate."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from functional_optim.core.format import format_value, function_name
from functional_optim.core.tree import Path, path_name

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Selector:
    """Condition on the path and the shape of leaves. Combine selectors by ``&``, ``|`` and ``~``.

    Built by :func:`matching`, :func:`with_shape` and :func:`if_any`.
    """

    def selects(self, path: Path, shape: Shape | None) -> bool:
        """Return True for a selected leaf; ``shape`` is that of the whole tensor."""
        raise NotImplementedError

    def __and__(self, other: "Where") -> "Selector":
        return _Pair(self, other, "&")

    def __or__(self, other: "Where") -> "Selector":
        return _Pair(self, other, "|")

    def __invert__(self) -> "Selector":
        return _Not(self)


Where = Path | Callable[[Path], bool] | Selector
"""Selection of leaves: the start of their paths, a predicate on paths, or a selector."""


@dataclass(frozen=True)
class _Pair(Selector):
    first: Where
    second: Where
    operator: Literal["&", "|"]

    def selects(self, path: Path, shape: Shape | None) -> bool:
        combine = all if self.operator == "&" else any
        return combine(is_selected(one, path, shape) for one in (self.first, self.second))

    def __repr__(self) -> str:
        return f"({_format_short(self.first)} {self.operator} {_format_short(self.second)})"


@dataclass(frozen=True)
class _Not(Selector):
    inner: Where

    def selects(self, path: Path, shape: Shape | None) -> bool:
        return not is_selected(self.inner, path, shape)

    def __repr__(self) -> str:
        return f"~{_format_short(self.inner)}"


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
    """Names and values of the arguments of :func:`with_shape`."""

    def selects(self, path: Path, shape: Shape | None) -> bool:
        known = _require_shape(path, shape)
        sizes = {"ndim": len(known), "numel": math.prod(known)}
        for name, bound in self.bounds:
            limit, _, of = name.rpartition("_")
            size = sizes[of]
            if not {"": size == bound, "min": size >= bound, "max": size <= bound}[limit]:
                return False
        return self.predicate is None or bool(self.predicate(known))

    def __repr__(self) -> str:
        given = [] if self.predicate is None else [_format_short(self.predicate)]
        return f"with_shape({', '.join([*given, *(f'{k}={v}' for k, v in self.bounds)])})"


@dataclass(frozen=True)
class IfAny(Selector):
    """Selector that may match no leaf. Built by :func:`if_any`."""

    where: Where

    def selects(self, path: Path, shape: Shape | None) -> bool:
        return is_selected(self.where, path, shape)

    def __repr__(self) -> str:
        return f"if_any({_format_short(self.where)})"


@dataclass(frozen=True)
class Listed(Selector):
    """Selector of the leaves at some paths."""

    paths: frozenset[Path]

    def selects(self, path: Path, shape: Shape | None) -> bool:
        return path in self.paths

    def __repr__(self) -> str:
        return f"paths {sorted(map(path_name, self.paths))}"


@dataclass(frozen=True)
class HasLabel(Selector):
    """Selector of the leaves with one label of a function of path and shape."""

    label_of: Callable[[Path, Shape], str | None]
    label: str

    def selects(self, path: Path, shape: Shape | None) -> bool:
        return self.label_of(path, shape or _require_shape(path, shape)) == self.label

    def __repr__(self) -> str:
        return f"label {self.label!r}"


@dataclass(frozen=True)
class Labels:
    """Function that returns the label of the first selector that matches. See :func:`labels`."""

    pairs: tuple[tuple[str, Where], ...]
    default: str | None

    def __repr__(self) -> str:
        table = ", ".join(f"{label!r}: {_format_short(where)}" for label, where in self.pairs)
        return f"labels({{{table}}}, default={self.default!r})"

    def __call__(self, path: Path, shape: Shape) -> str | None:
        for label, where in self.pairs:
            if is_selected(where, path, shape):
                return label
        return self.default


def labels(table: Mapping[str, Where], *, default: str | None = None) -> Labels:
    """Return a function of path and shape for :func:`~functional_optim.partition`.

    Args:
        table: the leaves of each label. The first label that matches a leaf counts.
        default: the label of all other leaves. Without a default, other leaves are refused.

    Raises:
        TypeError: a value is not a tuple of keys, a predicate or a selector.
        ValueError: (from ``init`` of the partition) a path, pattern or predicate matches no leaf,
            perhaps since it is misspelt. See :func:`if_any`.

    Example::

        >>> label_of = labels({"bias": matching("*bias")}, default="rest")
        >>> label_of(("layer", "bias"), (3,)), label_of(("layer", "weight"), (3, 2))
        ('bias', 'rest')
    """
    for where in table.values():
        check_where(where)
    return Labels(tuple(table.items()), default)


def matching(*patterns: str) -> Selector:
    """Select leaves whose names match at least one pattern, like patterns of file names.

    Args:
        patterns: for names, which are the keys of a path joined by dots. ``*`` matches any text,
            ``?`` one character, and ``[ab]`` one of these characters.

    Returns:
        A selector for ``override``, ``masked``, ``freeze`` and ``labels``.

    Raises:
        TypeError: a pattern is not a string, or there is no pattern.

    Example::

        >>> from functional_optim import adamw
        >>> optimizer = adamw(weight_decay=0.1).override(
        ...     matching("*.bias", "*norm*"), weight_decay=0.0)
        >>> optimizer.hypers_at(("layer", "bias"))[1].weight_decay
        0.0
    """
    if not patterns or not all(isinstance(one, str) for one in patterns):
        raise TypeError(f"matching takes patterns such as '*.bias', got {format_value(patterns)}")
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
    """Select parameters whose shape satisfies all bounds and the predicate.

    An optimizer with bounds can be pickled, and its ``repr`` evaluates. A lambda cannot.

    Args:
        predicate: function of the shape of a whole parameter, a tuple of ints.
        ndim: number of dimensions.
        min_ndim: minimum number of dimensions.
        max_ndim: maximum number of dimensions.
        min_numel: minimum number of elements.
        max_numel: maximum number of elements.

    Returns:
        A selector for ``override``, ``masked``, ``freeze`` and ``labels``.

    Raises:
        TypeError: the predicate is not callable, a bound is not an int, or no argument is given.
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
            raise TypeError(f"with_shape: {name} must be a whole number, got {format_value(value)}")
        if value < 0:
            raise ValueError(f"with_shape: {name} must be >= 0, got {value}")
    if predicate is not None and not callable(predicate):
        raise TypeError(f"with_shape takes a function of a shape, got {format_value(predicate)}")
    if predicate is None and not given:
        raise TypeError(
            f"with_shape needs a function of a shape, or at least one of {', '.join(bounds)}"
        )
    return _WithShape(predicate, tuple(given.items()))


def if_any(where: Where) -> IfAny:
    """Return a selector that may match no leaf.

    Otherwise, a selector in ``override``, ``freeze``, ``masked`` or ``labels`` that matches no leaf
    of a tree is an error, since it may be misspelt. With ``if_any``, one optimizer can step trees
    with and without such leaves, such as parts of a model, or the parameters of each rank.

    Args:
        where: as for :meth:`~functional_optim.Optimizer.override`.

    Returns:
        A selector.

    Raises:
        TypeError: ``where`` is not a tuple, a function or a selector.

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


def intersect(outer: Where | None, inner: Where | None) -> Where | None:
    """Return a selector of the leaves that both arguments select; None selects all leaves."""
    if outer is None or inner is None:
        return inner if outer is None else outer
    return _Pair(outer, inner, "&")


def implies(inner: Where | None, outer: Where | None) -> bool:
    """Return True if ``outer`` certainly selects all leaves that ``inner`` selects.

    Only the structure of the selectors is compared: False means unknown.
    """
    own = layers_of(inner)
    return all(one in own for one in layers_of(outer))


def layers_of(where: Where | None) -> tuple[Where, ...]:
    """Return the selectors that :func:`intersect` joined, the outermost first."""
    if where is None:
        return ()
    if isinstance(where, _Pair) and where.operator == "&":
        return (where.first, *layers_of(where.second))
    return (where,)


def check_where(where: Any) -> None:
    """Raise TypeError for other types than :data:`Where`: a list or string would equal no path."""
    if not (isinstance(where, (tuple, Selector)) or callable(where)):
        raise TypeError(
            "where must be a tuple of keys, such as ('layer', 0), a function of a path, or a "
            f"selector such as matching('*.bias'), got {format_value(where)}"
        )


def is_selected(where: Where, path: Path, shape: Shape | None = None) -> bool:
    """Return True if ``where`` selects the leaf at ``path``."""
    if isinstance(where, Selector):
        return where.selects(path, shape)
    return where(path) if callable(where) else path[: len(where)] == where


def path_selectors(where: Where) -> Iterator[Where]:
    """Yield the parts of a selector that select by path: tuples, patterns and predicates.

    Parts in :func:`if_any` are left out.
    """
    if isinstance(where, _Pair):
        yield from path_selectors(where.first)
        yield from path_selectors(where.second)
    elif isinstance(where, _Not):
        yield from path_selectors(where.inner)
    elif isinstance(where, HasLabel) and isinstance(where.label_of, Labels):
        for _, one in where.label_of.pairs:
            yield from path_selectors(one)
    elif isinstance(where, _Matching) or not isinstance(where, Selector):
        yield where


def has_names(where: Where) -> bool:
    """Return True for a pattern, and for a path with a string."""
    if isinstance(where, tuple):
        return any(isinstance(key, str) for key in where)
    return isinstance(where, _Matching)


def format_selector(where: Where) -> str:
    """Format a selector: a predicate by its name, file and line."""
    if isinstance(where, (tuple, Selector)):
        return repr(where)
    code = getattr(where, "__code__", None)
    name = getattr(where, "__qualname__", None) or repr(where)
    return name if code is None else f"{name} at {code.co_filename}:{code.co_firstlineno}"


def _format_short(where: Any) -> str:
    """Format a selector within a ``repr``: a predicate by its name only."""
    return repr(where) if isinstance(where, (tuple, Selector)) else function_name(where)


def _require_shape(path: Path, shape: Shape | None) -> Shape:
    if shape is None:
        raise ValueError(
            f"only the path of {path_name(path)!r} is given, but this optimizer has a selector by "
            "shape: pass the shape too, hypers_at(path, shape)"
        )
    return shape
