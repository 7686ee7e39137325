"""Plans as values and as JSON: round trips, digests, and errors for invalid JSON."""

import copy
import json
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sharding import MatrixBlocks, ParameterSpec, ShardPlan, plan
from sharding.pieces import pieces_of
from tests.choices import case, examples

from .support import any_plan, of_sizes, specs


@examples(25)
@given(st.data())
def test_plans_are_values(data: st.DataObject) -> None:
    """Plans are equal after a copy, a pickle and a JSON round trip, and they are immutable."""
    made = data.draw(any_plan(data.draw(specs(matrices=True))))
    read = ShardPlan.from_json(made.to_json())
    assert read.to_json() == made.to_json()
    for twin in (read, pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
        assert twin == made and hash(twin) == hash(made) and twin.digest == made.digest
    with pytest.raises(FrozenInstanceError):
        made.world_size = 3


def test_every_path_survives() -> None:
    names = ["a.b", 'quote"s', "line\nbreak", "ünïcode", "🙂", "\\", "\ud800"]
    made = plan([ParameterSpec(name, (1,)) for name in names], 2)
    back = ShardPlan.from_json(made.to_json())
    assert [spec.path for spec in back.specs] == names
    assert len(made.digest) == 64


def test_the_digest_notices_a_change_in_a_spec() -> None:
    made = plan(of_sizes(6, 5), 2)
    changes: dict[str, Any] = {
        "path": "other",
        "shape": (2, 3),
        "dtype": torch.bfloat16,
        "device": "cuda",
        "requires_grad": False,
        "kind": "per_matrix",
        "group": 1,
        "blocks": MatrixBlocks(row_blocks=2),
    }
    assert set(changes) == set(ParameterSpec.__dataclass_fields__)
    for field, value in changes.items():
        with case(field=field):
            base = made
            if field == "blocks":
                both = [ParameterSpec(path, (6, 1), kind="per_matrix") for path in "ab"]
                base = plan(both, 2)
            first = replace(base.specs[0], **{field: value})
            changed = replace(base, specs=(first, base.specs[1]))
            assert changed.digest != base.digest
            assert changed.diff(base) and changed != base


@examples(15)
@given(st.data())
def test_the_digest_notices_a_change_of_owners(data: st.DataObject) -> None:
    made = data.draw(any_plan(data.draw(specs())).filter(lambda one: len(one.pieces) > 0))
    rows = list(made.pieces.rows())
    place = data.draw(st.integers(0, len(rows) - 1))
    parameter, start, stop, rank = rows[place]
    bigger = replace(made, world_size=made.world_size + made.replicas)
    rows[place] = (parameter, start, stop, (rank + 1) % bigger.shard_ranks)
    moved = replace(bigger, pieces=pieces_of(rows))
    assert len({made.digest, bigger.digest, moved.digest}) == 3
    assert bigger.diff(moved).moved
    assert not made.diff(made)


def test_the_digest_notices_policy_and_replicas() -> None:
    made = plan(of_sizes(6, 5), 2, "hierarchical", node_size=1)
    others = [replace(made, policy="other"), replace(made, replicas=1)]
    assert len({one.digest for one in (made, *others)}) == 3


Change = Callable[[dict[str, Any]], Any]


def changed(**fields: Any) -> Change:
    return lambda content: {**content, **fields}


def inside(part: str, **fields: Any) -> Change:
    return lambda content: {**content, part: {**content[part], **fields}}


def without(name: str) -> Change:
    return lambda content: {key: value for key, value in content.items() if key != name}


BAD: list[tuple[Change, str]] = [
    (lambda content: [content], "must have the format"),
    (changed(format="x"), "must have the format 'functional-optim shard plan'"),
    (changed(version=3), "has version 3, and versions 1 and 2 are read here"),
    (changed(version=True), "has version True"),
    (changed(version=2), "it lacks 'blocks'"),
    (without("version"), "has version None"),
    (without("pieces"), "it lacks 'pieces'"),
    (without("world_size"), "it lacks 'world_size'"),
    (changed(extra=1), "it has unknown 'extra'"),
    (inside("pieces", rank=None), "pieces: rank must be a list, got None"),
    (changed(pieces=[]), "pieces of a plan must be columns, got list"),
    (inside("parameters", color=[1, 2]), "it has unknown 'color'"),
    (inside("pieces", stop=[4]), "one length, stop has 1"),
    (inside("pieces", start=[0, 0.0]), "start must hold int, got 0.0 at place 1"),
    (inside("pieces", rank=[True, 0]), "rank must hold int, got True at place 0"),
    (changed(world_size="2"), "world_size of a plan must be int, got '2'"),
    (changed(world_size=0), "world_size must be a whole number >= 1, got 0"),
    (
        inside("pieces", parameter=[0, 0, 1], start=[0, 1, 0], stop=[4, 4, 3], rank=[0, 1, 0]),
        "'p0': element 1 has two owners, rank 0 and rank 1",
    ),
    (inside("pieces", stop=[3, 3]), r"'p0': elements \[3, 4\) have no owner"),
    (inside("pieces", rank=[5, 0]), "'p0' is given to rank 5"),
    (inside("parameters", dtype=["float32", "nn"]), "dtype .* got 'nn'"),
    (inside("parameters", kind=["x", "pointwise"]), "kind of 'p0'"),
    (inside("parameters", device=["cpu", "garbage"]), "device of 'p1' .* got 'garbage'"),
    (inside("parameters", shape=[[4], ["3"]]), "shape of 'p1' must be whole"),
    (inside("parameters", path=["p0", "p0"]), "have the path 'p0'"),
]


def test_what_is_no_plan_is_refused() -> None:
    text = plan(of_sizes(4, 3), 2).to_json()
    for change, message in BAD:
        with case(message=message), pytest.raises(ValueError, match=message):
            ShardPlan.from_json(json.dumps(change(json.loads(text))))


def test_what_is_no_json_is_refused() -> None:
    text = plan(of_sizes(4, 3), 2).to_json()
    for wrong in ("", "{", "not JSON", *(text[:end] for end in range(0, len(text), 7))):
        with case(text=wrong), pytest.raises(ValueError, match="a plan must be JSON"):
            ShardPlan.from_json(wrong)
