"""Differences between two plans, or between the parameters that they are for."""

from dataclasses import dataclass

from sharding.ownership import Owner, Ownership
from sharding.resharding import overlaps
from sharding.spec import Specs
from sharding.text import escape_name

FIELDS = ("path", "shape", "dtype", "kind", "group", "blocks")
"""Fields of a spec that an owner's step depends on."""
LINES = 20


@dataclass(frozen=True)
class PlanDiff:
    """Differences from another plan. An object without differences is false.

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
    """Paths of parameters that only this plan has."""
    added: tuple[str, ...]
    """Paths of parameters that only the other plan has."""
    changed: tuple[tuple[str, str, object, object], ...]
    """(path, field, before, after) of parameters that both plans have."""
    reordered: bool
    """True if the parameters that both plans have are in another order."""
    moved: tuple[tuple[str, Owner, Owner], ...]
    """(path, before, after) of ranges of elements with other owners; both ranges are equal."""

    def __bool__(self) -> bool:
        return any(
            (self.header, self.removed, self.added, self.changed, self.reordered, self.moved)
        )

    def __str__(self) -> str:
        lines = [f"{name}: {before!r} -> {after!r}" for name, before, after in self.header]
        lines += [f"{escape_name(path)}: only in the first plan" for path in self.removed]
        lines += [f"{escape_name(path)}: only in the second plan" for path in self.added]
        lines += [
            f"{escape_name(path)}: {name} {before!r} -> {after!r}"
            for path, name, before, after in self.changed
        ]
        lines += ["parameters stand in another order"] if self.reordered else []
        lines += [
            f"{escape_name(path)} [{old.start}, {old.stop}): rank {_ranks(old)} -> {_ranks(new)}"
            for path, old, new in self.moved
        ]
        if len(lines) > LINES:
            lines[LINES - 1 :] = [f"and {len(lines) - LINES + 1:,} more differences"]
        return "\n".join(lines) or "no difference"


def _ranks(owner: Owner) -> str:
    return ", ".join(map(str, owner.ranks))


def diff(before: Ownership, after: Ownership) -> PlanDiff:
    """Return the differences between two plans. Parameters are matched by path."""
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
    """Raise ValueError with the first difference between a plan's parameters and other ones."""
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
        longer, who = (theirs, "the model given") if len(theirs) > len(ours) else (ours, "the plan")
        extra = longer[min(len(ours), len(theirs))].path
        raise ValueError(
            f"this plan is for another model: {who} has {extra!r} and "
            f"the other does not; the plan has {len(ours)} parameters, the model {len(theirs)}"
        )
