"""``sliced``: large parameters are cut evenly, so that every rank has a part of every bucket."""

from sharding.pieces import pieces_of
from sharding.policies.elements import alignments, cut_to_level, place_matrices
from sharding.problem import Assignment, Problem, check_int

LEAST = 1 << 19
"""The smallest slice by default, in elements. Smaller slices need too many messages and kernels."""


def sliced(
    problem: Problem, *, least: int = LEAST, align: int | None = None, mixed: bool = False
) -> Assignment:
    """Cut each large parameter into one even slice per rank; small parameters balance the loads.

    Ranks have the same costs as with ``elements``, up to the alignment. But a rank owns a slice of
    each large parameter instead of one range of the flat buffer. If parameters are stepped during
    backward, every rank works on every bucket, and no rank waits for another. If they are stepped
    after backward, ``elements`` needs fewer calls.

    Args:
        problem: the parameters, their costs and the ranks.
        least: the smallest slice, in elements. Parameters with smaller slices are concatenated and
            cut as in ``elements``.
        align: as for ``elements``; by default the widest alignment that ``elements`` tries.
        mixed: True to keep per_matrix parameters whole; they are assigned first. False to refuse
            such parameters.

    Returns:
        Ranges of parameters. The rank of the first slice differs from parameter to parameter.

    Raises:
        TypeError: ``least`` or ``align`` is not an integer.
        ValueError: a per_matrix parameter without ``mixed``, ``least`` below 1, or an alignment
            that the rule does not allow.

    Example::

        >>> from sharding import ParameterSpec, plan
        >>> specs = [ParameterSpec("a", (4,)), ParameterSpec("b", (4,))]
        >>> shares = plan(specs, 2, "sliced", least=2, align=1)
        >>> [(one.path, one.start, one.stop) for one in shares.owned(0)]
        [('a', 0, 2), ('b', 2, 4)]
    """
    check_int("least", least, 1)
    cut_at = alignments(problem, align)[0]
    rows, loads = place_matrices(problem, "sliced", mixed=mixed)
    ranks, small = problem.ranks, []
    turn = 0
    for index, spec in enumerate(problem.specs):
        if spec.kind == "per_matrix":
            continue
        if problem.numels[index] < ranks * max(least, cut_at):
            small.append(index)
            continue
        weight = problem.weights.kinds[problem.weights.kind[index]]
        for start, stop, rank in _slices(problem.numels[index], ranks, cut_at, turn):
            rows.append((index, start, stop, rank))
            loads[rank] += weight.of(stop - start)
        turn += 1
    return Assignment(pieces_of(rows + cut_to_level(problem, small, loads, align)))


def _slices(numel: int, ranks: int, align: int, turn: int) -> list[tuple[int, int, int]]:
    """Return (start, stop, rank) of each slice, from rank ``turn`` on.

    Aligned slices differ in size, and the turn distributes this difference over ranks.
    """
    cuts = [numel * part // ranks // align * align for part in range(ranks)] + [numel]
    return [(cuts[part], cuts[part + 1], (part + turn) % ranks) for part in range(ranks)]
