"""Exact compiled loops over storages: each kind of storage, with at least one rule."""

import pytest
import torch

from functional_optim import Optimizer, chain, clip_by_value, lion
from functional_optim.kernels.exact import kernel as exact_kernel
from functional_optim.storage import stored
from functional_optim.testing.compare import require_same, snapshot
from tests.cases import CASES
from tests.laws.combinations import STORAGES, why_not

from ...tensors import normal

CHOSEN = (
    ("adamw", "bfloat16+kahan", False),
    ("rmsprop", "bfloat16+master", True),
    ("lion", "state int8", False),
    ("adagrad", "state int8+stochastic", True),
    ("adam", "bfloat16+stochastic", False),
    ("qhm", "state bfloat16", True),
    ("sgd", "bfloat16+kahan, state int8+stochastic", True),
)
"""Rule, storage, and True if the chain clips before the rule. Some storages round at random."""
LENGTHS = (1, 3, 256, 300, 4_097, 70_001)


@pytest.mark.parametrize(("name", "storage", "clipped"), CHOSEN)
def test_it_is_compiled_and_the_reference_bit_for_bit(
    name: str, storage: str, clipped: bool
) -> None:
    rule = CASES[name].factory()
    plain: Optimizer = chain(clip_by_value(0.9), rule) if clipped else rule
    assert why_not(plain, storage, "compiled") is None
    optimizer = stored(plain, **STORAGES[storage])
    dtype = next((stage.dtypes[0] for stage in optimizer.stages if stage.dtypes), torch.float32)
    params = {str(count): normal(count, seed=count, dtype=dtype) for count in LENGTHS}
    compiled = optimizer.using(executor="compiled")
    assert ": exact; compiled" in compiled.explain(params)
    ours, want = snapshot(params), snapshot(params)
    own, state = compiled.init(ours), optimizer.init(want)
    for step in range(3):
        grads = {key: normal(len(one), seed=step, dtype=dtype) for key, one in params.items()}
        compiled.update_(ours, grads, own)
        want, state = optimizer.using(executor="reference").update(want, grads, state)
    require_same("compiled and reference", (ours, own), (want, state))


def test_a_first_leaf_that_ends_within_a_block_is_no_reason_against_a_loop() -> None:
    """The loop compiled for one leaf serves leaves of any length.

    The first leaf does not have to fill whole blocks.
    """
    optimizer = stored(lion(lr=0.1), state="int8").using(executor="compiled")
    for count in (300, 5, 700):
        exact_kernel._PROGRAMS.clear()
        params, state = {"w": normal(count)}, optimizer.init({"w": normal(count)})
        for step in range(4):
            optimizer.update_(params, {"w": normal(count, seed=step)}, state)
        assert ": exact; compiled" in optimizer.explain({"w": normal(4_096)})
