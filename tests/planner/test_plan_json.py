"""Plans as JSON: there and back, digests that notice everything, and text that is no plan."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sharding import ParameterSpec, ShardPlan, plan
from sharding.pieces import pieces_of

from .support import any_plan, derandomized, of_sizes, specs


@derandomized
@given(st.data())
def test_there_and_back(data: st.DataObject) -> None:
    made = data.draw(any_plan(data.draw(specs(matrices=True))))
    back = ShardPlan.from_json(made.to_json())
    assert back == made and back.to_json() == made.to_json() and back.digest == made.digest


def test_every_path_survives() -> None:
    names = ["a.b", 'quote"s', "line\nbreak", "ünïcode", "🙂", "\\", "\ud800"]
    made = plan([ParameterSpec(name, (1,)) for name in names], 2)
    back = ShardPlan.from_json(made.to_json())
    assert [spec.path for spec in back.specs] == names
    assert len(made.digest) == 64


SPEC_CHANGES: dict[str, Any] = {
    "path": "other",
    "shape": (2, 3),
    "dtype": torch.bfloat16,
    "device": "cuda",
    "requires_grad": False,
    "kind": "per_matrix",
    "group": 1,
}


@pytest.mark.parametrize("field", SPEC_CHANGES)
def test_the_digest_notices_a_change_in_a_spec(field: str) -> None:
    made = plan(of_sizes(6, 5), 2)
    first = replace(made.specs[0], **{field: SPEC_CHANGES[field]})
    changed = replace(made, specs=(first, made.specs[1]))
    assert changed.digest != made.digest
    assert changed.diff(made) and changed != made


@derandomized
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


def changed(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda content: {**content, **fields}


def inside(part: str, **fields: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda content: {**content, part: {**content[part], **fields}}


def without(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda content: {key: value for key, value in content.items() if key != name}


BAD: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a list": (lambda content: [content], "must have the format"),
    "another format": (changed(format="x"), "must have the format 'functional-optim shard plan'"),
    "another version": (changed(version=2), "has version 2, and version 1 is read here"),
    "no version": (without("version"), "has version None"),
    "no pieces": (without("pieces"), "it lacks 'pieces'"),
    "no world": (without("world_size"), "it lacks 'world_size'"),
    "more": (changed(extra=1), "it has unknown 'extra'"),
    "no column": (inside("pieces", rank=None), "pieces: rank must be a list, got None"),
    "pieces are a list": (changed(pieces=[]), "pieces of a plan must be columns, got list"),
    "an unknown column": (inside("parameters", color=[1, 2]), "it has unknown 'color'"),
    "a short column": (inside("pieces", stop=[4]), "one length, stop has 1"),
    "a float": (inside("pieces", start=[0, 0.0]), "start must hold int, got 0.0 at place 1"),
    "a bool": (inside("pieces", rank=[True, 0]), "rank must hold int, got True at place 0"),
    "a world in words": (changed(world_size="2"), "world_size of a plan must be int, got '2'"),
    "no ranks": (changed(world_size=0), "world_size must be a whole number >= 1, got 0"),
    "an overlap": (
        inside("pieces", parameter=[0, 0, 1], start=[0, 1, 0], stop=[4, 4, 3], rank=[0, 1, 0]),
        "'p0': element 1 has two owners, rank 0 and rank 1",
    ),
    "a gap": (inside("pieces", stop=[3, 3]), r"'p0': elements \[3, 4\) have no owner"),
    "no owner": (inside("pieces", rank=[5, 0]), "'p0' is given to rank 5"),
    "an unknown dtype": (inside("parameters", dtype=["float32", "nn"]), "dtype .* got 'nn'"),
    "an unknown kind": (inside("parameters", kind=["x", "pointwise"]), "kind of 'p0'"),
    "a bad shape": (inside("parameters", shape=[[4], ["3"]]), "shape of 'p1' must be whole"),
    "a path twice": (inside("parameters", path=["p0", "p0"]), "'p0' stands twice"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_plan_is_refused(name: str) -> None:
    change, message = BAD[name]
    text = plan(of_sizes(4, 3), 2).to_json()
    with pytest.raises(ValueError, match=message):
        ShardPlan.from_json(json.dumps(change(json.loads(text))))


@pytest.mark.parametrize("text", ["", "{", "not JSON"])
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a plan must be JSON"):
        ShardPlan.from_json(text)


def test_a_cut_off_plan_is_refused() -> None:
    text = plan(of_sizes(4, 3), 2).to_json()
    for end in range(0, len(text), 7):
        with pytest.raises(ValueError, match="a plan must be JSON"):
            ShardPlan.from_json(text[:end])
