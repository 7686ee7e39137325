"""``elements``: flat buffers cut at any element, so that loads are equal."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from sharding.makespan import largest_first_ranks, level
from sharding.pieces import Pieces, Row
from sharding.problem import Assignment, Problem, checked_int
from sharding.weights import Weight

WIDEST = 64
"""Elements; the widest alignment that is tried by itself."""
CLOSE_ENOUGH = 1_000
"""The largest load may be this part of the mean above it for the sake of a wider alignment."""


def elements(problem: Problem, *, align: int | None = None, mixed: bool = False) -> Assignment:
    """Parameters laid end to end and cut into shares that cost the same, wherever the cut falls.

    They are laid out by (dtype, device), in the order of the model, so a rank owns one range of
    each flat buffer. Cuts fall at multiples of ``align`` elements of a parameter (which is its
    place in a buffer whose parameters start at such multiples). The largest load is the smallest
    that the alignment allows.

    A cut does not change what a pointwise rule computes, but for parameters of 16 bits on the CPU,
    where it may show in the last place: torch's ``add(alpha=)``, which ``sgd`` is made of, rounds
    twice the elements that do not fill a vector, and the others once.

    Args:
        problem: the parameters, their costs and the ranks.
        align: a multiple of the elements between which the rule allows cuts (1 for most). By
            default the widest power of two, up to 64, with the largest load within 0.05 % of the
            mean, or else the one with the smallest load.
        mixed: parameters that are per_matrix stay whole and are placed first; the others level
            the loads. Without it, such parameters are refused.

    Returns:
        Ranges of parameters. A parameter without elements has one empty range.

    Raises:
        TypeError: an alignment that is no whole number.
        ValueError: a per_matrix parameter without ``mixed``, or an alignment that the rule does
            not allow.

    Example::

        >>> from sharding import ParameterSpec, plan
        >>> shares = plan([ParameterSpec("a", (3,)), ParameterSpec("b", (7,))], 2, "elements")
        >>> [(one.path, one.start, one.stop) for one in shares.owned(1)]
        [('b', 2, 7)]
    """
    rows, loads = whole_matrices(problem, "elements", mixed=mixed)
    places = [i for i, spec in enumerate(problem.specs) if spec.kind == "pointwise"]
    return Assignment(columns(rows + levelled(problem, places, loads, align)))


def whole_matrices(problem: Problem, name: str, *, mixed: bool) -> tuple[list[Row], list[int]]:
    """Parameters that must stay whole, placed first, and the loads with them.

    Args:
        problem: the parameters, their costs and the ranks.
        name: of the policy, for errors.
        mixed: whether there may be any.

    Raises:
        ValueError: there is one that may not be.
    """
    matrices = [i for i, spec in enumerate(problem.specs) if spec.kind == "per_matrix"]
    if matrices and not mixed:
        raise ValueError(
            f"the policy {name!r} cuts parameters, but {problem.specs[matrices[0]].path!r} is "
            "per_matrix: its rule needs it whole; give mixed=True to plan() (elsewhere, "
            f"policy=functools.partial(sharding.POLICIES[{name!r}], mixed=True)) to keep such "
            "parameters whole and cut the others, or take the policy 'largest_first'"
        )
    return _whole(problem, matrices)


def levelled(
    problem: Problem, places: Sequence[int], loads: Sequence[int], align: int | None
) -> list[Row]:
    """Parameters end to end, cut so that they level the loads that there are."""
    buffers: dict[object, list[int]] = {}
    for index in places:
        spec = problem.specs[index]
        buffers.setdefault((spec.dtype, spec.device), []).append(index)
    flat = EndToEnd.of(problem, [index for buffer in buffers.values() for index in buffer])
    best: tuple[int, list[Row]] | None = None
    for one in alignments(problem, align):
        found = cut(flat, loads, one)
        if best is None or found[0] < best[0]:
            best = found
        mean = (flat.sums[-1] + sum(loads)) // len(loads)
        if CLOSE_ENOUGH * 2 * (best[0] - mean) <= mean:
            break
    assert best is not None
    return best[1]


def columns(rows: list[Row]) -> Pieces:
    """Rows as a plan has them."""
    rows.sort()
    return Pieces(*zip(*rows, strict=True)) if rows else Pieces((), (), (), ())


def alignments(problem: Problem, align: int | None) -> list[int]:
    """The alignments to try, the widest first."""
    least = problem.unit
    if align is None:
        wide = [least]
        while wide[-1] * 2 <= WIDEST:
            wide.append(wide[-1] * 2)
        return wide[::-1]
    if checked_int("align", align, 1) % least:
        raise ValueError(
            f"align must be a multiple of {least}, since the optimizer keeps its state in blocks "
            f"of {least} elements; got {align}"
        )
    return [align]


def _whole(problem: Problem, matrices: list[int]) -> tuple[list[Row], list[int]]:
    """Parameters that stay whole, and the loads with them."""
    every = problem.weights.whole(problem.numels)
    weights = [every[index] for index in matrices]
    order = sorted(range(len(weights)), key=weights.__getitem__, reverse=True)
    ranks = largest_first_ranks(order, weights, problem.loads)
    loads = list(problem.loads)
    rows = []
    for index, weight, rank in zip(matrices, weights, ranks, strict=True):
        loads[rank] += weight
        rows.append((index, 0, problem.numels[index], rank))
    return rows, loads


@dataclass(frozen=True, slots=True)
class EndToEnd:
    """Parameters end to end."""

    order: list[int]
    """Their indices."""
    numels: list[int]
    weights: list[Weight]
    sums: list[int]
    """Before each, the cost of all before it; at the end, of all."""

    @classmethod
    def of(cls, problem: Problem, order: Sequence[int]) -> "EndToEnd":
        """These parameters, in this order."""
        numels = [problem.numels[index] for index in order]
        kinds, kind = problem.weights.kinds, problem.weights.kind
        sums = [0, *accumulate(problem.weights.of(order, numels))]
        return cls(list(order), numels, [kinds[kind[index]] for index in order], sums)

    def rest(self, place: int, offset: int) -> int:
        """The cost of everything from an element on."""
        if offset == 0:
            return self.sums[-1] - self.sums[place]
        tail = self.weights[place].of(self.numels[place] - offset)
        return tail + self.sums[-1] - self.sums[place + 1]


def cut(flat: EndToEnd, loads: Sequence[int], align: int) -> tuple[int, list[Row]]:
    """(height, rows): the lowest height up to which ranks have to be filled, found by halving."""
    low = max(level(flat.sums[-1], loads), 0)
    high, step = low, 1
    while _filled(flat, loads, high, align) is None:
        low, high, step = high + 1, high + step, step * 2
    while low < high:
        middle = (low + high) // 2
        if _filled(flat, loads, middle, align) is None:
            low = middle + 1
        else:
            high = middle
    spans = None
    if min(loads) == max(loads):
        # No rank is left emptier than need be; beside earlier loads, the height says it all.
        spans = _filled(flat, loads, high, align, even=True)
    if spans is None:
        spans = _filled(flat, loads, high, align)
    assert spans is not None
    return high, _rows(flat, spans)


def _filled(
    flat: EndToEnd, loads: Sequence[int], height: int, align: int, *, even: bool = False
) -> list[tuple[int, int, int]] | None:
    """Return (rank, place, offset) of the end of each share; None if something is left over.

    Ranks are filled in turn up to a height.
    Filling to the full reaches farthest for a height, so that halving on it is right: whatever
    starts farther on also ends farther on, since cuts fall on one grid. With ``even``, a rank
    takes only its part of what is left, which may fail.
    """
    spans: list[tuple[int, int, int]] = []
    place, offset, last = 0, 0, len(flat.order)
    for rank, load in enumerate(loads):
        room = height - load
        if room < 0:
            continue
        least = -(-flat.rest(place, offset) // (len(loads) - rank)) if even else room
        place, offset = _reached(flat, place, offset, room, min(room, least), align)
        spans.append((rank, place, offset))
        if place == last:
            return spans
    return None


def _reached(
    flat: EndToEnd, place: int, offset: int, room: int, wanted: int, align: int
) -> tuple[int, int]:
    """Return how far a rank reaches: least above ``wanted`` on the grid, never above ``room``."""
    if place == len(flat.order):
        return place, offset
    used = 0
    if offset:
        rest = flat.weights[place].of(flat.numels[place] - offset)
        if rest > wanted:
            offset += _part(flat, place, offset, room, wanted, align)
            return (place + 1, 0) if offset == flat.numels[place] else (place, offset)
        used, place, offset = rest, place + 1, 0
    end = bisect_right(flat.sums, flat.sums[place] + wanted - used) - 1
    used += flat.sums[end] - flat.sums[place]
    if end == len(flat.order):
        return end, 0
    part = _part(flat, end, 0, room - used, wanted - used, align)
    return (end + 1, 0) if part == flat.numels[end] else (end, part)


def _part(flat: EndToEnd, place: int, offset: int, room: int, wanted: int, align: int) -> int:
    """Return how many elements of a parameter, from ``offset`` on, fit."""
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


def _rows(flat: EndToEnd, spans: Sequence[tuple[int, int, int]]) -> list[Row]:
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
