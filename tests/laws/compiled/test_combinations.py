"""Chains, storages and executors: the declared combinations are those that the code runs."""

from typing import get_args

import pytest
import torch

from functional_optim import Optimizer
from functional_optim.kernels import ExecutorName
from functional_optim.kernels.passes import passes_of
from functional_optim.storage import PARAM_STORAGES, STATE_STORAGES, stored
from functional_optim.testing.inputs import fed
from tests.laws.combinations import STORAGES, why_not

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

    Not all triples of chain, storage and executor are tested. But each pair is, if three executors
    run the chain. An executor that compiles is tested in one storage. On the CPU, prefer_fused is
    the same as blocked.
    """
    storages = [] if executor == "prefer_fused" else possible_storages(name, executor)
    if EVERYTHING:
        return storages
    row = list(TABLE).index(name)
    quick = [one for one in QUICK if possible_storages(name, one)]
    if executor in quick:
        turn = row + quick.index(executor)
        return [one for one in storages if (list(STORAGES).index(one) + turn) % len(quick) == 0]
    return storages[row % len(storages) :][:1] if storages else []


def is_handed_on(said: str, executor: ExecutorName) -> bool:
    """Return True if another executor steps the parameter."""
    return executor != "reference" and said.startswith(("reference", "one by one"))


@pytest.mark.parametrize("name", TABLE)
def test_what_is_declared_is_what_the_code_refuses(name: str) -> None:
    """The code refuses what is declared not to run, or hands it on to another executor.

    Every third pair of storage and executor is tried with a chain, the others with the next ones.
    """
    optimizer, matrices = TABLE[name].factory(), TABLE[name].matrices
    row = list(TABLE).index(name)
    for column, executor in enumerate(get_args(ExecutorName)):
        for place, storage in enumerate(STORAGES):
            has_turn = EVERYTHING or (row + column + place) % 3 == 0
            if not has_turn or why_not(optimizer, storage, executor) is None:
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
    for name in TABLE:
        found = {storage for executor in QUICK for storage in tried(name, executor)}
        assert found == set(possible_storages(name, "reference")), name


@pytest.mark.parametrize("name", TABLE)
def test_laws(name: str) -> None:
    """A chain that is declared to run is not handed on to another executor, and obeys the laws."""
    optimizer, matrices = TABLE[name].factory(), TABLE[name].matrices
    for executor in get_args(ExecutorName):
        for storage in tried(name, executor):
            with case(storage=storage, executor=executor):
                said = stepped(optimizer, storage, executor, matrices=matrices)
                assert not is_handed_on(said, executor), said
            require_combination(name, storage, executor, 1)


def test_every_storage_is_in_some_combination() -> None:
    params = {one.get("param", "float32") for one in STORAGES.values()}
    assert params == set(PARAM_STORAGES)
    assert {one.get("state", "float32") for one in STORAGES.values()} == set(STATE_STORAGES)
    assert len(TABLE) >= len(STORAGES)  # otherwise some storage has no turn


def test_unknown_names_are_refused() -> None:
    for storage, executor in (("float16", "blocked"), ("float32", "fast")):
        with pytest.raises(ValueError, match=r"must be one of '.*got '(float16|fast)'"):
            why_not(TABLE["sgd"].factory(), storage, executor)
