"""Chains, storages and executors: the declared combinations are those that the code runs."""

from typing import get_args

import pytest
import torch

from functional_optim import Optimizer
from functional_optim.kernels import ExecutorName
from functional_optim.kernels.passes import passes_of
from functional_optim.storage import PARAM_STORAGES, stored
from functional_optim.testing.combinations import STORAGES, why_not
from functional_optim.testing.inputs import fed

from ...choices import EVERYTHING, case
from ..support import TABLE, possible_storages, require_combination

COUNT = 512
QUICK: tuple[ExecutorName, ...] = ("reference", "blocked", "auto")
"""Executors that compile nothing and take several storages."""


def refusal(
    optimizer: Optimizer, storage: str, executor: ExecutorName, *, matrices: bool
) -> str | None:
    """Return the reason why the code refuses a combination, or None if the code runs it."""
    refused = TypeError if optimizer.is_composed else ValueError
    try:
        made = fed(stored(optimizer, **STORAGES[storage]).using(executor=executor))
    except refused as error:
        return str(error)
    dtype = PARAM_STORAGES[STORAGES[storage].get("param", "float32")].dtype
    param = torch.linspace(-1, 1, COUNT).to(dtype)
    param = param.reshape(16, -1) if matrices else param
    try:
        made.update(param, param.clone(), made.init(param))
        if made.is_composed:
            return None
        said = made.explain(param).partition(": ")[2]
    except (TypeError, ValueError) as error:
        return str(error)
    handed_on = executor != "reference" and said.startswith(("reference", "one by one"))
    return said if handed_on else None


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


@pytest.mark.parametrize("name", TABLE)
def test_what_is_declared_is_what_the_code_does(name: str) -> None:
    optimizer = TABLE[name].factory()
    for executor in get_args(ExecutorName):
        for storage in STORAGES:
            declared = why_not(optimizer, storage, executor)
            if declared is None and storage not in tried(name, executor):
                continue
            if executor == "auto" and passes_of(optimizer.stages) is not None:
                continue  # kernels step this chain only after its loops are compiled
            found = refusal(optimizer, storage, executor, matrices=TABLE[name].matrices)
            with case(storage=storage, executor=executor):
                assert (declared is None) == (found is None), f"{declared!r}, {found!r}"


def test_each_chain_is_tried_in_each_storage_that_it_can_have() -> None:
    for name in TABLE:
        found = {storage for executor in QUICK for storage in tried(name, executor)}
        assert found == set(possible_storages(name, "reference")), name


@pytest.mark.parametrize("name", TABLE)
def test_laws(name: str) -> None:
    for executor in get_args(ExecutorName):
        for storage in tried(name, executor):
            require_combination(name, storage, executor, 1)
