"""Pieces: ranges of elements and their owners, and the check that each element has one owner."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from sharding.spec import ParameterSpec

Row = tuple[int, int, int, int]
"""(index of the parameter, first element, element after the last, rank)."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """Ranges of elements and their ranks, as four columns of one length.

    A plan can have a million pieces, so there is no object for each. Pieces are sorted by parameter
    and first element; adjacent pieces of one rank are joined. A parameter without elements has one
    empty piece, because its state needs an owner.

    Example::

        >>> list(Pieces((0, 0), (0, 3), (3, 5), (1, 0)).rows())
        [(0, 0, 3, 1), (0, 3, 5, 0)]
    """

    parameter: tuple[int, ...]
    """Index of the parameter among the specs."""
    start: tuple[int, ...]
    """First element."""
    stop: tuple[int, ...]
    """One past the last element."""
    rank: tuple[int, ...]
    """The owner."""

    def __len__(self) -> int:
        return len(self.parameter)

    def rows(self) -> Iterator[Row]:
        """Return an iterator over the pieces."""
        return zip(self.parameter, self.start, self.stop, self.rank, strict=True)

    @property
    def lengths(self) -> list[int]:
        """The number of elements of each piece."""
        return [stop - start for start, stop in zip(self.start, self.stop, strict=True)]

    def sum_by_rank(self, numbers: Sequence[int], ranks: int) -> tuple[int, ...]:
        """Sum numbers, one for each piece, over the pieces of each rank."""
        sums = [0] * ranks
        for number, rank in zip(numbers, self.rank, strict=True):
            sums[rank] += number
        return tuple(sums)


NO_PIECES = Pieces((), (), (), ())


def whole_pieces(numels: Sequence[int], ranks: Sequence[int]) -> Pieces:
    """Return a piece for each whole parameter, on the given ranks."""
    return Pieces(tuple(range(len(numels))), (0,) * len(numels), tuple(numels), tuple(ranks))


def pieces_of(rows: Iterable[Row]) -> Pieces:
    """Return rows as sorted columns, with adjacent pieces of one rank joined."""
    joined: list[Row] = []
    for row in sorted(rows):
        if joined:
            parameter, start, stop, rank = joined[-1]
            joins = row[0] == parameter and row[3] == rank
            if joins and start < stop == row[1] < row[2]:
                joined[-1] = (parameter, start, row[2], rank)
                continue
        joined.append(row)
    return Pieces(*zip(*joined, strict=True)) if joined else NO_PIECES


def sort_and_check(pieces: Pieces, specs: Sequence[ParameterSpec], ranks: int) -> Pieces:
    """Return sorted pieces. Check that every element has exactly one owner."""
    lengths = [len(pieces.start), len(pieces.stop), len(pieces.rank)]
    if any(length != len(pieces) for length in lengths):
        raise ValueError(
            f"the columns of pieces must have one length, got {[len(pieces), *lengths]}"
        )
    numels = [spec.numel for spec in specs]
    pieces = pieces_of(pieces.rows())
    _check_cover(pieces, specs, numels, ranks)
    return pieces


def _check_cover(
    pieces: Pieces, specs: Sequence[ParameterSpec], numels: Sequence[int], ranks: int
) -> None:
    current, at, owner, count = -1, 0, -1, 0
    cuts: set[int] = set()
    for parameter, start, stop, rank in pieces.rows():
        if not 0 <= parameter < len(specs):
            raise ValueError(f"a piece is of parameter {parameter}, but there are {len(specs)}")
        path = specs[parameter].path
        if not 0 <= rank < ranks:
            raise ValueError(f"{path!r} is given to rank {rank}, but ranks are 0 to {ranks - 1}")
        if parameter != current:
            _check_end(specs, numels, current, at)
            _check_not_skipped(specs, current, parameter)
            current, at, count = parameter, 0, 0
            is_matrix = specs[parameter].kind == "per_matrix"
            cuts = set(specs[parameter].bounds) if is_matrix else set()
        if start < at or (count and not numels[parameter]):
            what = f"element {start}" if numels[parameter] else "its one, empty range"
            raise ValueError(f"{path!r}: {what} has two owners, rank {owner} and rank {rank}")
        if start > at:
            raise ValueError(f"{path!r}: elements [{at}, {start}) have no owner")
        if stop > numels[parameter] or (stop <= start and numels[parameter]):
            raise ValueError(
                f"{path!r}: [{start}, {stop}) is no range of its {numels[parameter]} elements"
            )
        at, owner, count = stop, rank, count + 1
        if cuts and start not in cuts:
            what = "it" if len(cuts) == 2 else "each block of it"
            raise ValueError(
                f"{path!r} is cut at element {start}, but its rule is per_matrix and needs {what} "
                "whole"
            )
    _check_end(specs, numels, current, at)
    _check_not_skipped(specs, current, len(specs))


def _check_end(
    specs: Sequence[ParameterSpec], numels: Sequence[int], parameter: int, at: int
) -> None:
    if parameter >= 0 and at != numels[parameter]:
        raise ValueError(
            f"{specs[parameter].path!r}: elements [{at}, {numels[parameter]}) have no owner; give "
            "each element to one rank"
        )


def _check_not_skipped(specs: Sequence[ParameterSpec], before: int, parameter: int) -> None:
    if parameter > before + 1:
        raise ValueError(
            f"{specs[before + 1].path!r} has no owner; list the pieces in the order of the "
            "parameters, with at least one piece of each"
        )
