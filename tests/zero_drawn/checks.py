"""Checks of the results of a case on all ranks."""

from typing import Any

from .cases import NODES, Case, refusals


def check(case: Case, every: list[Any]) -> None:
    """Check that a case is refused for a documented reason, or that its ranks equal one process."""
    assert [rank for rank, seen in enumerate(every) if seen is not None] == members_of(case)
    ranks = [seen for seen in every if seen is not None]
    reasons = refusals(case)
    if reasons:
        check_refused(reasons, ranks)
    else:
        check_same(case, ranks)


def members_of(case: Case) -> list[int]:
    return list(range(case.world) if case.members is None else case.members)


def check_refused(reasons: list[str], ranks: list[Any]) -> None:
    """Check that all ranks give the same reason, and that no rank has changed anything."""
    assert len({seen["refused"] for seen in ranks}) == 1
    for seen in ranks:
        said = seen["refused"] or "nothing"
        assert any(reason in said for reason in reasons), said
        assert not seen["changed"], seen["changed"]


def check_same(case: Case, ranks: list[Any]) -> None:
    """Check that all ranks match one process, and that each element is stepped once."""
    for seen in ranks:
        assert seen["refused"] is None, seen["refused"]
        assert not any(seen["differences"]), seen["differences"]
        assert not any(seen["gradients"]), seen["gradients"]
        assert all(seen["losses"]), seen["losses"]
        assert not seen["state"], seen["state"]
        assert seen["finite"]
    assert len({seen["digest"] for seen in ranks}) == 1
    for iteration in range(case.iterations):
        check_once(case, iteration, ranks)


def check_once(case: Case, iteration: int, ranks: list[Any]) -> None:
    """Check that the stepped ranges cover all used parameters, once in each replica."""
    sizes, used = ranks[0]["sizes"], ranks[0]["used"][iteration]
    found: dict[str, list[tuple[int, int]]] = {name: [] for name in used if sizes[name]}
    for seen in ranks:
        for path, start, stop in seen["stepped"][iteration]:
            if start < stop:
                found[path].append((start, stop))
    for path, ranges in found.items():
        copies = case.ranks // node_size(case)
        edges = sorted(set(ranges))
        assert sorted(ranges) == sorted(edges * copies), path
        assert [start for start, _ in edges] == [0, *(stop for _, stop in edges[:-1])], path
        assert edges[-1][1] == sizes[path], path


def node_size(case: Case) -> int:
    """Return the number of ranks in one replica."""
    sizes = (1, 2, max(1, case.ranks // 2))
    return dict(zip(NODES, sizes, strict=True)).get(case.policy, case.ranks)
