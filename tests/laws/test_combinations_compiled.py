"""Exact loops over storages: each kind of storage is compiled with one rule or another."""

import pytest
import torch
from torch import Tensor

from functional_optim import Optimizer, chain, clip_by_value
from functional_optim.storage import stored
from functional_optim.testing import CASES
from functional_optim.testing.combinations import STORAGES, why_not
from functional_optim.testing.compare import require_same, snapshot

CHOSEN = (
    ("adamw", "bfloat16+kahan"),
    ("rmsprop", "bfloat16+master"),
    ("lion", "state int8"),
    ("adagrad", "state int8+stochastic"),
    ("adam", "bfloat16+stochastic"),
    ("qhm", "state bfloat16"),
    ("sgd", "bfloat16+kahan, state int8+stochastic"),
)
"""With rounding to nearest and by chance."""
LENGTHS = (1, 3, 256, 300, 4_097, 70_001)


def noise(seed: int, count: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("name", "storage"), CHOSEN)
@pytest.mark.parametrize("clipped", [False, True])
def test_it_is_compiled_and_the_reference_bit_for_bit(
    name: str, storage: str, clipped: bool
) -> None:
    rule = CASES[name].factory()
    plain: Optimizer = chain(clip_by_value(0.9), rule) if clipped else rule
    assert why_not(plain, storage, "compile") is None
    optimizer = stored(plain, **STORAGES[storage])
    dtype = next((stage.dtypes[0] for stage in optimizer.stages if stage.dtypes), torch.float32)
    params = {str(count): noise(count, count).to(dtype) for count in LENGTHS}
    compiled = optimizer.using(executor="compile")
    assert ": exact; compiled" in compiled.explain(params)
    ours, want = snapshot(params), snapshot(params)
    own, state = compiled.init(ours), optimizer.init(want)
    for step in range(4):
        grads = {key: noise(9 + step, one.numel()).to(dtype) for key, one in params.items()}
        compiled.update_(ours, grads, own)
        want, state = optimizer.using(executor="reference").update(want, grads, state)
    require_same("compiled and reference", (ours, own), (want, state))
