"""FLOPs of a step: declared ones are compared with torch's count, others are per element."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from functional_optim import (
    Optimizer,
    adamw,
    chain,
    dion,
    galore_adamw,
    kl_soap,
    kron,
    lamb,
    muon,
    normuon,
    scion,
    sgd,
    shampoo,
    soap,
    stored,
)
from functional_optim.core.matrices import eigen_flops, qr_flops, solve_flops, svd_flops
from functional_optim.core.stage import Rule
from functional_optim.optimizer.flops import step_flops
from tests.cases import CASES
from tests.choices import case

RULES: dict[str, Optimizer] = {
    "muon": muon(ns_steps=3),
    "muon, heads": muon(row_blocks=2),
    "muon, QKV": muon(split_sizes=(4, 2)),
    "muon, cubic": muon(polar=[(1.5, -0.5, 0.0)] * 4),
    "normuon": normuon(),
    "scion": scion(),
    "dion": dion(rank=3),
    "galore": galore_adamw(rank=3, update_proj_gap=1),
    "soap": soap(precondition_frequency=1),
    "soap, one side": soap(precondition_frequency=1, max_precond_dim=7),
    "kl_soap": kl_soap(precondition_frequency=1),
    "shampoo": shampoo(precondition_frequency=1),
    "shampoo, blocks": shampoo(precondition_frequency=1, block_size=4),
    "kron": kron(min_update_probability=1.0),
}
"""Rules that decompose at every step, so that every step is an average step."""


def counted(optimizer: Optimizer, shape: Sequence[int]) -> int:
    """Return the FLOPs that torch counts in a third step, including its decompositions."""
    param, grad = torch.ones(shape), torch.randn(shape, generator=torch.Generator().manual_seed(0))
    optimizer = optimizer.using(executor="reference")
    state = optimizer.init(param)
    for _ in range(2):
        param, state = optimizer.update(param, grad, state)
    with FlopCounterMode(display=False) as products, Decompositions() as others:
        optimizer.update(param, grad, state)
    return products.get_total_flops() + others.flops


DECOMPOSITIONS: dict[str, Any] = {
    "linalg_eigh": lambda shape: eigen_flops(shape[-1]),
    "linalg_qr": lambda shape: qr_flops(*shape[-2:]),
    "linalg_svd": lambda shape: svd_flops(*shape[-2:]),
    "linalg_solve_triangular": lambda shape, other: solve_flops(shape[-1], other[-1]),
}


class Decompositions(torch.overrides.TorchFunctionMode):
    """Counter of the FLOPs of decompositions, by the table of this project."""

    flops = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = DECOMPOSITIONS.get(getattr(func, "__name__", ""))
        if found is not None:
            self.flops += found(*(one.shape for one in args if isinstance(one, Tensor)))
        return func(*args, **(kwargs or {}))


def declared(optimizer: Optimizer, shape: Sequence[int]) -> int:
    """Return the FLOPs that the rules of a chain declare, without other stages."""
    links = [link for link in optimizer.links if link.stage.flops is not None]
    assert links, "it declares FLOPs"
    return step_flops([one.stage for one in links], [one.hyper for one in links], shape)


@pytest.mark.parametrize("name", RULES)
def test_declared_flops_are_the_products_that_torch_counts(name: str) -> None:
    for shape in ((6, 10), (10, 6)) if name != "muon, QKV" else ((6, 10), (6, 3)):
        with case(shape=shape):
            assert declared(RULES[name], shape) == pytest.approx(
                counted(RULES[name], shape), rel=0.001
            )


def test_decompositions_count_by_their_frequency() -> None:
    for build, option in ((soap, "precondition_frequency"), (shampoo, "precondition_frequency")):
        often, seldom = (declared(build(**{option: k}), (6, 10)) for k in (1, 10))
        never = declared(build(**{option: 10**9}), (6, 10))
        assert seldom - never == pytest.approx((often - never) / 10, rel=0.01)
    rare = kron(min_update_probability=0.0)
    assert declared(rare, (6, 10)) == 2 * 2 * (6 * 6 * 10 + 10 * 10 * 6)


def operations(optimizer: Optimizer, *shape: int) -> int:
    return step_flops(optimizer.stages, [link.hyper for link in optimizer.links], shape)


def test_pointwise_operations_are_counted_by_element() -> None:
    assert operations(sgd(0.1), 1000) == 2 * 1000  # p - lr * g
    assert operations(adamw(), 1000) == 10 * operations(adamw(), 100)
    assert 10 <= operations(adamw(), 10, 10) / 100 <= 20
    assert operations(lamb(), 10, 10) > operations(adamw(), 10, 10)
    assert operations(stored(adamw(), state="int8"), 640) == operations(adamw(), 640)
    assert operations(chain(sgd(0.1), sgd(0.1)), 50) == 2 * operations(sgd(0.1), 50)
    assert operations(sgd(lambda step: 0.1), 1000) == 2 * 1000  # with a schedule
    assert operations(adamw(), 0) == 0


def test_every_registered_algorithm_has_flops() -> None:
    for name, one in CASES.items():
        with case(name=name):
            assert operations(one.factory(), 6, 6) > 0


def test_a_rule_that_multiplies_matrices_declares_its_flops() -> None:
    with pytest.raises(ValueError, match="squared multiplies matrices .* give its Rule flops="):
        operations(chain(_squared()), 4, 4)


def _squared() -> Any:
    from typing import NamedTuple

    class Hyper(NamedTuple):
        lr: float

    def rule(param: Tensor, grad: Tensor, state: Any, c: Hyper) -> tuple[Tensor, Any]:
        return param - grad @ grad.mT, state

    return Rule(name="squared", hyper=Hyper, rule=rule, kind="per_matrix")(lr=0.1)
