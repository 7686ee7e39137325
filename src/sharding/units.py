"""Units that a policy assigns to ranks: blocks, and parameters without blocks."""

from bisect import bisect_right
from typing import NamedTuple

from sharding.pieces import Pieces, Row, pieces_of
from sharding.spec import BlockSpec, ParameterSpec, Specs


class Units(NamedTuple):
    """Columns of one length, with an entry for each unit: a parameter or a block."""

    specs: Specs
    """The spec of a parameter, or a :class:`~sharding.spec.BlockSpec`."""
    parameter: tuple[int, ...]
    """The index of the unit's parameter."""
    start: tuple[int, ...]
    """The index of the unit's first element in the parameter."""

    @property
    def are_parameters(self) -> bool:
        """Return True if no parameter is divided."""
        return not self.parameter or len(self.parameter) == self.parameter[-1] + 1

    def after(self, count: int) -> "Units":
        """Return the units of the parameters after the first ``count``, numbered from 0."""
        first = sum(1 for index in self.parameter if index < count)
        numbers = tuple(index - count for index in self.parameter[first:])
        return Units(self.specs[first:], numbers, self.start[first:])


def units_of(specs: Specs) -> Units:
    if all(spec.blocks is None for spec in specs):
        return Units(specs, tuple(range(len(specs))), (0,) * len(specs))
    rows: list[tuple[ParameterSpec, int, int]] = []
    for index, spec in enumerate(specs):
        if spec.blocks is None or spec.numel == 0:
            rows.append((spec, index, 0))
            continue
        known: dict[tuple[int, ...], BlockSpec] = {}
        for shape, start in zip(spec.blocks.shapes(spec.shape), spec.bounds, strict=False):
            if shape not in known:
                options = (spec.dtype, spec.device, spec.requires_grad, spec.kind, spec.group)
                known[shape] = BlockSpec(spec.path, shape, *options, parameter=spec)
            rows.append((known[shape], index, start))
    return Units(*zip(*rows, strict=True))


def pieces_of_units(pieces: Pieces, units: Units) -> Pieces:
    """Convert pieces of parameters to pieces of units; ``parameter`` is the index of a unit."""
    if units.are_parameters:
        return pieces
    firsts: dict[int, int] = {}
    for unit, index in enumerate(units.parameter):
        firsts.setdefault(index, unit)
    rows: list[Row] = []
    for index, start, stop, rank in pieces.rows():
        unit = firsts[index]
        last = firsts.get(index + 1, len(units.start))
        unit = bisect_right(units.start, start, unit, last) - 1
        while True:
            begin, numel = units.start[unit], units.specs[unit].numel
            rows.append((unit, max(start - begin, 0), min(stop - begin, numel), rank))
            unit += 1
            if begin + numel >= stop:
                break
    return pieces_of(rows)


def pieces_of_parameters(pieces: Pieces, units: Units) -> Pieces:
    """Convert pieces of units to pieces of their parameters."""
    if units.are_parameters:
        return pieces
    return pieces_of(
        (units.parameter[unit], units.start[unit] + start, units.start[unit] + stop, rank)
        for unit, start, stop, rank in pieces.rows()
    )
