"""Chains, storages and executors: the declared combinations are those that the code runs."""

import itertools
from typing import get_args

import pytest
import torch

from functional_optim import Optimizer
from functional_optim.kernels import ExecutorName
from functional_optim.kernels.passes import passes_of
from functional_optim.storage import PARAM_STORAGES, stored
from functional_optim.testing.inputs import fed
from tests.laws.combinations import STORAGES, storages_of, why_not

from ...choices import EVERYTHING, case
from ..support import TABLE, possible_storages, require_combination

COUNT = 512
QUICK: tuple[ExecutorName, ...] = ("reference", "blocked", "auto")
"""Executors that compile nothing and take several storages."""


def stepped(optimizer: Optimizer, storage: str, executor: ExecutorName, *, matrices: bool) -> str:
    """Step a parameter, and return the explanation of a plain chain; empty for other chains."""
    made = fed(stored(optimizer, **STORAGES[storage]).using(executor=executor))
    dtype = PARAM_STORAGES[STORAGES[storage].get("param", "float32")].dtype
    param = torch.linspace(-1, 1, COUNT).to(dtype)
    param = param.reshape(16, -1) if matrices else param
    made.update(param, param.clone(), made.init(param))
    return "" if made.is_composed else made.explain(param).partition(": ")[2]


def tried(name: str, executor: ExecutorName) -> list[str]:
    """Return the storages in which an executor is tested with a chain.

    Each chain has each storage of parameters and each storage of state once, with one of the
    executors, and each executor has each pair of storages with some chain. On the CPU, prefer_fused
    is the same as blocked.
    """
    possible = [] if executor == "prefer_fused" else possible_storages(name, executor)
    if EVERYTHING:
        return possible
    can = _possible(name)
    if executor not in can:
        return []
    row = [other for other in TABLE if _possible(other) == can].index(name)
    turn = row // len(PARAM_STORAGES) + list(can).index(executor)
    chosen = possible if len(possible) == 1 else storages_of(row)
    return [one for place, one in enumerate(chosen) if (place + turn) % len(can) == 0]


def _possible(name: str) -> dict[ExecutorName, list[str]]:
    """Return the storages of a chain, by executor."""
    found = {executor: possible_storages(name, executor) for executor in QUICK}
    return {executor: storages for executor, storages in found.items() if storages}


def is_handed_on(said: str, executor: ExecutorName) -> bool:
    """Return True if another executor steps the parameter."""
    return executor != "reference" and said.startswith(("reference", "one by one"))


@pytest.mark.parametrize("name", TABLE)
def test_what_is_declared_is_what_the_code_refuses(name: str) -> None:
    """The code refuses what is declared not to run, or hands it on to another executor.

    An executor is tried with each chain in float32, and in one other storage by turns.
    """
    optimizer, matrices = TABLE[name].factory(), TABLE[name].matrices
    row = list(TABLE).index(name)
    for column, executor in enumerate(get_args(ExecutorName)):
        turn = list(STORAGES)[(row + 5 * column) % len(STORAGES)]
        for storage in STORAGES if EVERYTHING else dict.fromkeys(("float32", turn)):
            if why_not(optimizer, storage, executor) is None:
                continue
            if executor == "auto" and passes_of(optimizer.stages) is not None:
                continue  # kernels step this chain only after its loops are compiled
            with case(storage=storage, executor=executor):
                try:
                    said = stepped(optimizer, storage, executor, matrices=matrices)
                except (TypeError, ValueError):
                    continue
                assert is_handed_on(said, executor), said


def test_each_chain_is_tried_in_each_storage_that_it_can_have() -> None:
    """Each chain has each storage of parameters and of state, and each executor has each pair."""
    with_executor: dict[str, set[str]] = {executor: set() for executor in QUICK}
    for name in TABLE:
        found = {executor: tried(name, executor) for executor in QUICK}
        possible = possible_storages(name, "reference")
        for field in ("param", "state"):
            have, can = (
                {STORAGES[storage].get(field, "float32") for storage in storages}
                for storages in (itertools.chain(*found.values()), possible)
            )
            assert have == can, name
        for executor in QUICK:
            with_executor[executor] |= {*found[executor]}
    assert all(storages == {*STORAGES} for storages in with_executor.values())


@pytest.mark.parametrize("name", TABLE)
def test_laws(name: str) -> None:
    """A chain that is declared to run is not handed on to another executor, and obeys the laws."""
    optimizer, matrices = TABLE[name].factory(), TABLE[name].matrices
    for executor in get_args(ExecutorName):
        for storage in tried(name, executor):
            with case(storage=storage, executor=executor):
                said = stepped(optimizer, storage, executor, matrices=matrices)
                assert not is_handed_on(said, executor), said
            if storage != "float32":  # other tests check the laws of what is not stored
                require_combination(name, storage, executor, 1)


def test_unknown_names_are_refused() -> None:
    for storage, executor in (("float16", "blocked"), ("float32", "fast")):
        with pytest.raises(ValueError, match=r"must be one of '.*got '(float16|fast)'"):
            why_not(TABLE["sgd"].factory(), storage, executor)
