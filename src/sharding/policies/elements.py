"""``elements``: flat buffers, cut at any element, so that loads are equal."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from sharding.makespan import largest_first_ranks, level
from sharding.pieces import Row, pieces_of
from sharding.problem import Assignment, Problem, check_int
from sharding.weights import Weight

WIDEST = 64
"""The widest alignment that is tried by default, in elements."""
CLOSE_ENOUGH = 2_000
"""With a wider alignment, the largest load can exceed the mean by 1 / 2,000 of the mean."""


def elements(problem: Problem, *, align: int | None = None, mixed: bool = False) -> Assignment:
    """Concatenate parameters, and cut them into ranges of equal cost, at any element.

    Parameters are concatenated by (dtype, device), in the order of the model. A rank owns one range
    of each flat buffer. Cuts are at multiples of ``align`` elements of a parameter. (In a buffer,
    parameters then start at such multiples.) The largest load is the smallest for the alignment.

    A cut does not change the result of a pointwise rule, except in the last bit for parameters of
    16 bits on the CPU: torch's ``add(alpha=)``, which ``sgd`` uses, rounds elements twice if they
    do not fill a vector register, and once otherwise.

    Args:
        problem: the parameters, their costs and the ranks.
        align: a multiple of the block size of the rule (1 for most rules). By default the widest
            power of two, up to 64, with the largest load within 0.05 % of the mean, or else the
            alignment with the smallest load.
        mixed: True to keep per_matrix parameters whole. They are assigned first, and the remaining
            parameters balance the loads. False to refuse such parameters.

    Returns:
        Ranges of parameters. A parameter without elements has one empty range.

    Raises:
        TypeError: the alignment is not an integer.
        ValueError: a per_matrix parameter without ``mixed``, or an alignment that the rule does
            not allow.

    Example::

        >>> from sharding import ParameterSpec, plan
        >>> shares = plan([ParameterSpec("a", (3,)), ParameterSpec("b", (7,))], 2, "elements")
        >>> [(one.path, one.start, one.stop) for one in shares.owned(1)]
        [('b', 2, 7)]
    """
    rows, loads = place_matrices(problem, "elements", mixed=mixed)
    places = [i for i, spec in enumerate(problem.specs) if spec.kind == "pointwise"]
    return Assignment(pieces_of(rows + cut_to_level(problem, places, loads, align)))


def place_matrices(problem: Problem, name: str, *, mixed: bool) -> tuple[list[Row], list[int]]:
    """Assign per_matrix parameters whole. Return their rows, and the loads of all ranks."""
    matrices = [i for i, spec in enumerate(problem.specs) if spec.kind == "per_matrix"]
    if matrices and not mixed:
        raise ValueError(
            f"the policy {name!r} cuts parameters, but {problem.specs[matrices[0]].path!r} is "
            "per_matrix: its rule needs it whole; give mixed=True to plan() (elsewhere, "
            f"policy=functools.partial(sharding.POLICIES[{name!r}], mixed=True)) to keep such "
            "parameters whole and cut the others, or take the policy 'largest_first'"
        )
    costs = problem.weights.whole(problem.numels)
    weights = [costs[index] for index in matrices]
    order = sorted(range(len(weights)), key=weights.__getitem__, reverse=True)
    ranks = largest_first_ranks(order, weights, problem.loads)
    loads = list(problem.loads)
    rows = []
    for index, weight, rank in zip(matrices, weights, ranks, strict=True):
        loads[rank] += weight
        rows.append((index, 0, problem.numels[index], rank))
    return rows, loads


def cut_to_level(
    problem: Problem, places: Sequence[int], loads: Sequence[int], align: int | None
) -> list[Row]:
    """Concatenate parameters, and cut them so that they balance the present loads."""
    buffers: dict[object, list[int]] = {}
    for index in places:
        spec = problem.specs[index]
        buffers.setdefault((spec.dtype, spec.device), []).append(index)
    flat = ElementLayout.of(problem, [index for buffer in buffers.values() for index in buffer])
    best: tuple[int, list[Row]] | None = None
    for one in alignments(problem, align):
        found = cut_at_lowest_level(flat, loads, one)
        if best is None or found[0] < best[0]:
            best = found
        mean = (flat.sums[-1] + sum(loads)) // len(loads)
        if CLOSE_ENOUGH * (best[0] - mean) <= mean:
            break
    assert best is not None
    return best[1]


def alignments(problem: Problem, align: int | None) -> list[int]:
    """Return the alignments to try, the widest first."""
    least = problem.unit
    if align is None:
        wide = [least]
        while wide[-1] * 2 <= WIDEST:
            wide.append(wide[-1] * 2)
        return wide[::-1]
    if check_int("align", align, 1) % least:
        raise ValueError(
            f"align must be a multiple of {least}, since the optimizer keeps its state in blocks "
            f"of {least} elements; got {align}"
        )
    return [align]


@dataclass(frozen=True, slots=True)
class ElementLayout:
    """Concatenated parameters."""

    order: list[int]
    """The indices of the parameters."""
    numels: list[int]
    weights: list[Weight]
    sums: list[int]
    """The cumulative costs: for each parameter, the cost of all parameters before it; at the end,
    the cost of all parameters."""

    @classmethod
    def of(cls, problem: Problem, order: Sequence[int]) -> "ElementLayout":
        """Return the layout of parameters with these indices, in this order."""
        numels = [problem.numels[index] for index in order]
        kinds, kind = problem.weights.kinds, problem.weights.kind
        sums = [0, *accumulate(problem.weights.of(order, numels))]
        return cls(list(order), numels, [kinds[kind[index]] for index in order], sums)

    def rest(self, place: int, offset: int) -> int:
        """Return the cost of all elements from an element on."""
        if offset == 0:
            return self.sums[-1] - self.sums[place]
        tail = self.weights[place].of(self.numels[place] - offset)
        return tail + self.sums[-1] - self.sums[place + 1]


def cut_at_lowest_level(
    flat: ElementLayout, loads: Sequence[int], align: int
) -> tuple[int, list[Row]]:
    """Return the lowest level to which ranks can be filled, found by bisection, and the rows."""
    low = max(level(flat.sums[-1], loads), 0)
    high, step = low, 1
    while _fill_ranks(flat, loads, high, align) is None:
        low, high, step = high + 1, high + step, step * 2
    while low < high:
        middle = (low + high) // 2
        if _fill_ranks(flat, loads, middle, align) is None:
            low = middle + 1
        else:
            high = middle
    spans = None
    if min(loads) == max(loads):
        # Ranks with equal loads get equal parts, so that the last rank is not nearly empty.
        spans = _fill_ranks(flat, loads, high, align, even=True)
    if spans is None:
        spans = _fill_ranks(flat, loads, high, align)
    assert spans is not None
    return high, _rows(flat, spans)


def _fill_ranks(
    flat: ElementLayout, loads: Sequence[int], height: int, align: int, *, even: bool = False
) -> list[tuple[int, int, int]] | None:
    """Fill ranks in turn up to a level. Return (rank, parameter, offset) of the end of each range.

    Return None if elements are left over. Bisection is correct, because a full rank ends as late as
    possible, and a range that starts later also ends later: all cuts are on one grid. With
    ``even``, a rank gets only its part of the remaining cost, which can fail.
    """
    spans: list[tuple[int, int, int]] = []
    place, offset, last = 0, 0, len(flat.order)
    for rank, load in enumerate(loads):
        room = height - load
        if room < 0:
            continue
        wanted = -(-flat.rest(place, offset) // (len(loads) - rank)) if even else room
        place, offset = _range_end(flat, place, offset, room, min(room, wanted), align)
        spans.append((rank, place, offset))
        if place == last:
            return spans
    return None


def _range_end(
    flat: ElementLayout, place: int, offset: int, room: int, wanted: int, align: int
) -> tuple[int, int]:
    """Return the end of a rank's range: the first cut that costs ``wanted``, at most ``room``."""
    if place == len(flat.order):
        return place, offset
    used = 0
    if offset:
        rest = flat.weights[place].of(flat.numels[place] - offset)
        if rest > wanted:
            offset += _elements_that_fit(flat, place, offset, room, wanted, align)
            return (place + 1, 0) if offset == flat.numels[place] else (place, offset)
        used, place, offset = rest, place + 1, 0
    end = bisect_right(flat.sums, flat.sums[place] + wanted - used) - 1
    used += flat.sums[end] - flat.sums[place]
    if end == len(flat.order):
        return end, 0
    part = _elements_that_fit(flat, end, 0, room - used, wanted - used, align)
    return (end + 1, 0) if part == flat.numels[end] else (end, part)


def _elements_that_fit(
    flat: ElementLayout, place: int, offset: int, room: int, wanted: int, align: int
) -> int:
    """Return how many elements of a parameter fit, from ``offset`` on."""
    a, b, once, block = flat.weights[place]
    of_one = a * align + b * (align // block)
    left = flat.numels[place] - offset
    if of_one == 0 or room < once + min(of_one, flat.weights[place].of(left) - once):
        return 0
    count = -(-max(wanted - once, 0) // of_one)
    while count:
        part = min(count * align, left)
        if flat.weights[place].of(part) <= room:
            return part
        count -= 1
    return 0


def _rows(flat: ElementLayout, spans: Sequence[tuple[int, int, int]]) -> list[Row]:
    rows: list[Row] = []
    place, offset = 0, 0
    for rank, end, end_offset in spans:
        while place < end:
            rows.append((flat.order[place], offset, flat.numels[place], rank))
            place, offset = place + 1, 0
        if end_offset > offset:
            rows.append((flat.order[place], offset, end_offset, rank))
            offset = end_offset
    return rows
