"""Tests of transports, hooks, ZeRO and averagers over NCCL, on several processes."""

import pytest
import torch

from tests.choices import case, pairs
from tests.transport.buffers import CUTS, DTYPES
from tests.zero_hooks.runs import KINDS

from . import over_nccl
from .outcomes import EXACT, outcomes_of

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_sums(ranks: int) -> None:
    cases = pairs(dtype=DTYPES, cut=list(CUTS), average=[False, True])
    cases = [one for one in cases if ranks > 1 or one["cut"] != "first owns nothing"]
    for _, seen in outcomes_of(over_nccl.sums, [{"cases": cases}], ranks):
        assert seen == [{}] * ranks


HOOKS = ("adamw", "sgd", "adagrad", "lion", "bucket views", "unused", "no_sync", "set_hyper")


@pytest.mark.parametrize("executor", ["reference", "blocked", "auto"])
def test_step_hook_is_torchs(executor: str) -> None:
    """The reference executor gives torch's bits; with all executors, the ranks stay equal."""
    cases = [{"name": name, "executor": executor, "members": None} for name in HOOKS]
    for one, seen in outcomes_of(over_nccl.hook_beside_torch, cases, 2):
        with case(**one):
            for rank in seen:
                for iteration in rank:
                    assert iteration["finite"] and iteration["moved"]
                    if executor == "reference":
                        assert iteration["differences"] == []
            assert seen[0][-1]["digest"] == seen[1][-1]["digest"]


ZERO = pairs(
    name=("tower", "unused", "max_norm", "mixed dtypes", "clip in the chain", "prodigy"),
    kind=KINDS,
    policy=("greedy", "elements"),
    members=(None, (1, 3)),
)


def test_zero_hooks_are_one_process() -> None:
    cases = [one for one in ZERO if one["name"] != "max_norm" or one["kind"] == "scatter"]
    wrong = []
    for one, seen in outcomes_of(over_nccl.zero_hook, cases, 4):
        with case(**one):
            assert len(seen) == (4 if one["members"] is None else 2)
            assert all(rank["finite"] and rank["moved"] for rank in seen)
            # The bits are equal if a sum has only one order, and no total over all gradients is
            # needed.
            exact = len(seen) == 2 and one["name"] in EXACT
            # NCCL rounds a bfloat16 sum after each rank that it adds.
            room = 0.0 if exact else 2.0**-7 if one["name"] == "mixed dtypes" else 1e-4
            if any(max(r["apart"]) > room for r in seen):
                wrong.append((one, [(r["apart"], r["losses"]) for r in seen]))
            assert len({rank["digest"] for rank in seen}) == 1
    assert not wrong, "\n".join(map(str, wrong))


def test_zero_as_its_user_steps_it() -> None:
    cases = pairs(
        name=("tower", "clip in the chain", "prodigy", "tied"),
        policy=("greedy", "elements"),
        backend=("nccl", "cpu:gloo,cuda:nccl"),
    )
    for one, seen in outcomes_of(over_nccl.zero_alone, cases, 2):
        with case(**one):
            assert all(rank["apart"] < 1e-5 for rank in seen)
            assert seen[0]["digest"] == seen[1]["digest"]
            assert seen[0]["saved"] == seen[0]["params"]


def test_averagers() -> None:
    cases = [{"kind": kind} for kind in over_nccl.AVERAGERS]
    for one, seen in outcomes_of(over_nccl.averaged, cases, 4):
        with case(**one):
            apart = [
                len(set(digests)) for digests in zip(*(r["digests"] for r in seen), strict=True)
            ]
            assert min(apart) == 1 and max(apart) == 4
