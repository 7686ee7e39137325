"""Laws of every storage, for executors that compile nothing. See also tests/laws/compiled."""

import pytest

from functional_optim.storage import PARAM_STORAGES, STATE_STORAGES
from functional_optim.testing import CASES
from functional_optim.testing.combinations import STORAGES, why_not

from ..choices import EVERYTHING
from .support import TABLE, possible_storages, require_combination


@pytest.mark.parametrize("name", TABLE)
def test_laws(name: str) -> None:
    """Each chain obeys the laws in one storage by turns, or in all if everything is tested."""
    for executor in ("reference", "blocked"):
        storages = possible_storages(name, executor)
        turn = list(TABLE).index(name) % max(1, len(storages))
        chosen = storages if EVERYTHING else storages[turn : turn + 1]
        for storage in chosen:
            require_combination(name, storage, executor, 1)


def test_every_storage_is_in_some_combination() -> None:
    params = {one.get("param", "float32") for one in STORAGES.values()}
    assert params == set(PARAM_STORAGES)
    assert {one.get("state", "float32") for one in STORAGES.values()} == set(STATE_STORAGES)
    assert len(TABLE) >= len(STORAGES)  # otherwise some storage has no turn


def test_unknown_names_are_refused() -> None:
    for storage, executor in (("float16", "blocked"), ("float32", "fast")):
        with pytest.raises(ValueError, match=r"must be one of '.*got '(float16|fast)'"):
            why_not(CASES["sgd"].factory(), storage, executor)
