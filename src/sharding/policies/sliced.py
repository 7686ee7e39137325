"""``sliced``: each large parameter cut evenly, so that every rank has a part of every bucket."""

from sharding.policies.elements import alignments, columns, levelled, whole_matrices
from sharding.problem import Assignment, Problem, checked_int

LEAST = 1 << 19
"""Elements: a slice of fewer is not worth a message and a kernel call of its own."""


def sliced(
    problem: Problem, *, least: int = LEAST, align: int | None = None, mixed: bool = False
) -> Assignment:
    """Each large parameter in as many even slices as there are ranks; the others level the loads.

    Shares cost the same as those of ``elements``, up to the alignment, but lie otherwise: a rank
    owns a slice of each large parameter, not neighbouring ones. Where parameters are stepped while
    backward goes on, every rank then works on every bucket, and none is waited for. Where they are
    stepped afterwards, ``elements`` makes fewer calls.

    Args:
        problem: the parameters, their costs and the ranks.
        least: elements of a slice, at least; parameters with smaller ones are laid end to end and
            cut as by ``elements``.
        align: as for ``elements``; by default the widest that is tried there.
        mixed: parameters that are per_matrix stay whole and are placed first. Without it, they are
            refused.

    Returns:
        Ranges of parameters. Which rank has the first slice changes from parameter to parameter.

    Raises:
        TypeError: ``least`` or ``align`` is no whole number.
        ValueError: a per_matrix parameter without ``mixed``, ``least`` below 1, or an alignment
            that the rule does not allow.

    Example::

        >>> from sharding import ParameterSpec, plan
        >>> specs = [ParameterSpec("a", (4,)), ParameterSpec("b", (4,))]
        >>> shares = plan(specs, 2, "sliced", least=2, align=1)
        >>> [(one.path, one.start, one.stop) for one in shares.owned(0)]
        [('a', 0, 2), ('b', 2, 4)]
    """
    checked_int("least", least, 1)
    cut_at = alignments(problem, align)[0]
    rows, loads = whole_matrices(problem, "sliced", mixed=mixed)
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
    return Assignment(columns(rows + levelled(problem, small, loads, align)))


def _slices(numel: int, ranks: int, align: int, turn: int) -> list[tuple[int, int, int]]:
    """(start, stop, rank) of each slice; what the alignment takes goes round with the ranks."""
    cuts = [numel * part // ranks // align * align for part in range(ranks)] + [numel]
    return [(cuts[part], cuts[part + 1], (part + turn) % ranks) for part in range(ranks)]
