"""TorchOptimizer's checkpoints: to and from itself and torch.optim, continued bit for bit."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import TorchOptimizer, adamw, as_functional_optim, chain, clip_by_global_norm

from .support import (
    CASES,
    Case,
    assert_same_entries,
    parameters,
    params_of,
    same_bits,
    set_grads,
    twins,
)
from .test_from_torch_groups import OTHER

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def grouped(case: Case) -> Callable[[list[Any]], Any]:
    """Two groups, the second with options of its own."""
    other = OTHER[case[0].__name__]
    return lambda params: [{"params": params[:1]}, {"params": params[1:], **other}]


def flat(value: Any) -> list[Any]:
    """Every dict, list and tensor inside a checkpoint."""
    found = [value]
    inside = value.values() if isinstance(value, dict) else value
    if isinstance(value, (dict, list, tuple)):
        for item in inside:
            found += flat(item)
    return [item for item in found if isinstance(item, (dict, list, Tensor))]


def assert_continued(
    one: torch.optim.Optimizer, two: torch.optim.Optimizer, without: Any = ()
) -> None:
    """From equal parameters, three steps of both are the same."""
    with torch.no_grad():
        for source, target in zip(params_of(one), params_of(two), strict=True):
            target.copy_(source)
    for seed in range(80, 83):
        for optimizer in (one, two):
            set_grads(params_of(optimizer), seed, without)
            optimizer.step()
        for a, b in zip(params_of(one), params_of(two), strict=True):
            assert same_bits(a, b), f"{a} is not {b}"


@every_case
@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("way", ["ours to ours", "torch to ours", "ours to torch"])
def test_a_round_trip(case: Case, steps: int, way: str) -> None:
    pair, fresh = twins(case, groups=grouped(case)), twins(case, groups=grouped(case))
    source = pair.theirs if way.startswith("torch") else pair.ours
    target: Any = fresh.theirs if way.endswith("torch") else fresh.ours
    for seed in range(steps):
        pair.step(seed, without={1} if steps < 3 else {seed})
    # torch's classes keep the tensors that they are given: without a copy, both would step them.
    target.load_state_dict(copy.deepcopy(source.state_dict()))
    for old, new in zip(source.param_groups, target.param_groups, strict=True):
        options = as_functional_optim(case[0]).hyper
        assert {key: new[key] for key in options} == {key: old[key] for key in options}
    assert_continued(source, target, without={2})


@every_case
def test_there_and_back_again(case: Case) -> None:
    # Each side makes steps: torch's SGD, for one, keeps our step count, and does not count on.
    pair = twins(case)
    for steps in (0, 1, 2):
        for seed in range(steps):
            set_grads(params_of(pair.ours), seed)
            pair.ours.step()
        assert_taken_over(pair.ours, pair.theirs)
        for seed in range(2):
            set_grads(params_of(pair.theirs), seed + 10)
            pair.theirs.step()
        assert_taken_over(pair.theirs, pair.ours)


def assert_taken_over(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    target.load_state_dict(copy.deepcopy(source.state_dict()))
    assert_continued(copy.deepcopy(source), copy.deepcopy(target))
    with torch.no_grad():
        for a, b in zip(params_of(source), params_of(target), strict=True):
            b.copy_(a)


@every_case
def test_what_it_writes_is_what_torch_writes(case: Case) -> None:
    pair = twins(case, groups=grouped(case))
    for seed in range(2):
        pair.step(seed)
    got, want = pair.ours.state_dict(), pair.theirs.state_dict()
    for number, entries in want["state"].items():
        assert_same_entries(got["state"][number], entries)
        if "step" in entries:
            assert got["state"][number]["step"].dtype == entries["step"].dtype
    for mine, theirs in zip(got["param_groups"], want["param_groups"], strict=True):
        assert mine["params"] == theirs["params"]
        shared = mine.keys() & theirs.keys()
        assert {key: mine[key] for key in shared} == {key: theirs[key] for key in shared}


@every_case
@pytest.mark.parametrize("way", ["ours to ours", "torch to ours", "ours to torch"])
def test_through_a_file_under_the_defaults_of_torch_load(
    case: Case, way: str, tmp_path: Path
) -> None:
    pair, fresh = twins(case), twins(case)
    source = pair.theirs if way.startswith("torch") else pair.ours
    target: Any = fresh.theirs if way.endswith("torch") else fresh.ours
    pair.step(0)
    torch.save(source.state_dict(), tmp_path / "checkpoint.pt")
    target.load_state_dict(torch.load(tmp_path / "checkpoint.pt"))
    assert_continued(source, target)


@every_case
@pytest.mark.parametrize("source", ["ours", "torch"])
def test_the_caller_s_dict_is_neither_changed_nor_kept(case: Case, source: str) -> None:
    pair, fresh = twins(case, groups=grouped(case)), twins(case, groups=grouped(case))
    pair.step(0)
    written = copy.deepcopy((pair.ours if source == "ours" else pair.theirs).state_dict())
    written["param_groups"][0]["lr"] = torch.tensor(0.1)
    written["param_groups"][0]["noted"] = [[1.0], {"nested": [2.0]}]
    before = copy.deepcopy(written)
    parts = {id(part) for part in flat(written)}
    pointers = {part.data_ptr() for part in flat(written) if isinstance(part, Tensor)}
    fresh.ours.load_state_dict(written)
    kept = flat(list(fresh.ours.param_groups))
    kept += flat(list(fresh.ours.state.values()))
    assert not [part for part in kept if id(part) in parts]
    tensors = [part for part in kept if isinstance(part, Tensor)]
    assert not {tensor.data_ptr() for tensor in tensors if tensor.numel()} & pointers
    fresh.step(3)
    fresh.ours.param_groups[0]["noted"][0].append(3.0)
    fresh.ours.param_groups[0]["lr"].fill_(9.0)
    assert repr(written) == repr(before)


def test_names_are_kept_and_do_not_matter() -> None:
    def named(params: list[Any]) -> Any:
        return [(f"p{i}", param) for i, param in enumerate(params)]

    case = CASES["AdamW"]
    pair, fresh = twins(case, groups=named), twins(case)
    pair.step(0)
    written = pair.ours.state_dict()
    assert written["param_groups"][0]["param_names"] == ["p0", "p1", "p2", "p3"]
    fresh.ours.load_state_dict(written)
    fresh.theirs.load_state_dict(pair.theirs.state_dict())
    names = [one.param_groups[0].get("param_names") for one in (fresh.ours, fresh.theirs)]
    assert names[0] == names[1]
    assert_continued(pair.ours, fresh.ours)


def test_dtypes_follow_the_parameters() -> None:
    case = CASES["AdamW"]
    wide, narrow = twins(case), twins(case, torch.bfloat16)
    wide.step(0)
    for one, other in ((wide.ours, narrow.ours), (wide.theirs, narrow.theirs)):
        other.load_state_dict(one.state_dict())
    for param in params_of(narrow.ours):
        assert narrow.ours.state[param]["exp_avg"].dtype == torch.bfloat16
        assert int(narrow.ours.state[param]["step"]) == 1
    narrow.step(1)
    narrow.assert_same()


def test_a_decay_that_torch_decouples_stays_decoupled() -> None:
    cls, options = CASES["Adam decoupled"]
    pair = twins((cls, options))
    pair.step(0)
    fresh = torch.optim.Adam(parameters(1), lr=0.5)
    fresh.load_state_dict(copy.deepcopy(pair.ours.state_dict()))  # torch keeps the tensors
    assert fresh.param_groups[0]["decoupled_weight_decay"] is True
    assert_continued(pair.ours, fresh)


@pytest.mark.parametrize(("source", "target"), [("AdamW", "Adam"), ("Adam", "AdamW")])
def test_a_decay_of_the_other_kind_is_not_taken_silently(source: str, target: str) -> None:
    # The dict says "decoupled_weight_decay"; the chain cannot do it.
    written = twins(CASES[source]).theirs.state_dict()
    ours = twins(CASES[target]).ours
    with pytest.raises(ValueError, match="decoupled"):
        ours.load_state_dict(written)


def test_a_chain_with_more_than_the_rule() -> None:
    optimizer = chain(clip_by_global_norm(1.0), adamw(0.1))
    one, two = (TorchOptimizer(parameters(1), optimizer) for _ in range(2))
    set_grads(params_of(one), 0)
    one.step()
    one.param_groups[0]["max_norm"] = 0.5
    two.load_state_dict(one.state_dict())
    assert two.param_groups[0]["max_norm"] == 0.5
    assert_continued(one, two)


def test_a_long_run_s_step_count_survives() -> None:
    ours, fresh = (TorchOptimizer(parameters(1), adamw(0.1)) for _ in range(2))
    for entries in ours.state.values():
        entries["step"].fill_(2**24 + 1)
    fresh.load_state_dict(ours.state_dict())
    assert {int(entries["step"]) for entries in fresh.state.values()} == {2**24 + 1}
