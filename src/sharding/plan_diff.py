"""Differences between two plans, or between the parameters that they are for."""

from collections.abc import Sequence
from dataclasses import dataclass

from sharding.ownership import Owner, Ownership
from sharding.readable import readable_name
from sharding.resharding import overlaps
from sharding.spec import ParameterSpec, Specs

FIELDS = ("path", "shape", "dtype", "kind", "group", "blocks")
"""What an owner's work depends on."""
LINES = 20


@dataclass(frozen=True)
class PlanDiff:
    """Differences from another plan. False if there are none.

    Example::

        >>> from sharding import ParameterSpec, plan
        >>> specs = [ParameterSpec("a", (4,)), ParameterSpec("b", (6,))]
        >>> print(plan(specs, 2, "greedy").diff(plan(specs, 2, "elements")))
        policy: 'greedy' -> 'elements'
        a [0, 4): rank 1 -> 0
        b [1, 6): rank 0 -> 1
    """

    header: tuple[tuple[str, object, object], ...]
    """(field, before, after) of policy, world_size and replicas."""
    removed: tuple[str, ...]
    """Paths of parameters that the other plan does not have."""
    added: tuple[str, ...]
    """Paths of parameters that only the other plan has."""
    changed: tuple[tuple[str, str, object, object], ...]
    """(path, field, before, after) of parameters that both have."""
    reordered: bool
    """Whether the parameters that both have stand in another order."""
    moved: tuple[tuple[str, Owner, Owner], ...]
    """(path, before, after) of elements with other owners; both have the same elements."""

    def __bool__(self) -> bool:
        return any(
            (self.header, self.removed, self.added, self.changed, self.reordered, self.moved)
        )

    def __str__(self) -> str:
        lines = [f"{name}: {before!r} -> {after!r}" for name, before, after in self.header]
        lines += [f"{readable_name(path)}: only in the first plan" for path in self.removed]
        lines += [f"{readable_name(path)}: only in the second plan" for path in self.added]
        lines += [
            f"{readable_name(path)}: {name} {before!r} -> {after!r}"
            for path, name, before, after in self.changed
        ]
        lines += ["parameters stand in another order"] if self.reordered else []
        lines += [
            f"{readable_name(path)} [{old.start}, {old.stop}): rank {_ranks(old)} -> {_ranks(new)}"
            for path, old, new in self.moved
        ]
        if len(lines) > LINES:
            lines[LINES - 1 :] = [f"and {len(lines) - LINES + 1:,} more differences"]
        return "\n".join(lines) or "no difference"


def _ranks(owner: Owner) -> str:
    return ", ".join(map(str, owner.ranks))


def diff(before: Ownership, after: Ownership) -> PlanDiff:
    """The differences between two plans; parameters are matched by path."""
    ours = {spec.path: spec for spec in before.specs}
    theirs = {spec.path: spec for spec in after.specs}
    both = [path for path in ours if path in theirs]
    names = (*FIELDS[1:], "device", "requires_grad")
    return PlanDiff(
        header=tuple(
            (name, getattr(before, name), getattr(after, name))
            for name in ("policy", "world_size", "replicas")
            if getattr(before, name) != getattr(after, name)
        ),
        removed=tuple(path for path in ours if path not in theirs),
        added=tuple(path for path in theirs if path not in ours),
        changed=tuple(
            (path, name, getattr(ours[path], name), getattr(theirs[path], name))
            for path in both
            if ours[path] != theirs[path]
            for name in names
            if getattr(ours[path], name) != getattr(theirs[path], name)
        ),
        reordered=both != [path for path in theirs if path in ours],
        moved=tuple(
            move
            for path in both
            if ours[path].shape == theirs[path].shape
            for move in _moved(before, after, path)
        ),
    )


def _moved(before: Ownership, after: Ownership, path: str) -> list[tuple[str, Owner, Owner]]:
    found: list[tuple[str, Owner, Owner]] = []
    for old, new in overlaps(before, after, path):
        start = max(before.pieces.start[old], after.pieces.start[new])
        stop = min(before.pieces.stop[old], after.pieces.stop[new])
        ranks = before.ranks_of(old), after.ranks_of(new)
        if ranks[0] != ranks[1]:
            found.append((path, Owner(ranks[0], start, stop), Owner(ranks[1], start, stop)))
    return found


def check_same(ours: Specs, theirs: Specs, *, shapes_only: bool) -> None:
    """Parameters that a plan is for, and others.

    Raises:
        ValueError: names the first difference.
    """
    names = FIELDS[:3] if shapes_only else FIELDS
    for place, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        if mine == other:
            continue
        for name in names:
            want, found = getattr(mine, name), getattr(other, name)
            if want != found:
                at = f"parameter {place}" + ("" if name == "path" else f", {mine.path!r},")
                raise ValueError(
                    f"this plan is for another model: its {at} has {name} {want!r}, the one "
                    f"given has {found!r}; make a plan for this model"
                )
    if len(ours) != len(theirs):
        extra, who = (theirs, "the model given") if len(theirs) > len(ours) else (ours, "the plan")
        raise ValueError(
            f"this plan is for another model: {who} has {_first_extra(ours, theirs, extra)!r} and "
            f"the other does not; the plan has {len(ours)} parameters, the model {len(theirs)}"
        )


def _first_extra(
    ours: Sequence[ParameterSpec], theirs: Sequence[ParameterSpec], longer: Specs
) -> str:
    return longer[min(len(ours), len(theirs))].path
