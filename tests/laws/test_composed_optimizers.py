"""``check_optimizer`` on optimizers that users compose."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from functional_optim import (
    Optimizer,
    Rule,
    adamw,
    chain,
    clip_by_global_norm,
    cosine,
    decoupled_weight_decay,
    ema,
    freeze,
    labels,
    masked,
    matching,
    muon,
    partition,
    warmup,
    with_shape,
)
from functional_optim.testing import LawNotTried, check_optimizer


def test_a_total_is_added_up_in_the_order_of_the_leaves() -> None:
    """Totals are added in the order of the leaves, also with gates and partitions."""
    factory = lambda: chain(clip_by_global_norm(1.0), adamw(lr=1e-3))  # noqa: E731
    check_optimizer(factory, laws=("accumulation", "partition"), dtypes=(torch.float64,))


def test_a_partition_by_shape_obeys_every_law() -> None:
    """The partition by shape from the README, with Muon for matrices, obeys every law."""

    def made() -> Optimizer:
        lr = warmup(2, then=cosine(1e-3, steps=5))
        split = labels({"muon": with_shape(ndim=2)}, default="adamw")
        both = partition({"muon": muon(lr=0.02), "adamw": adamw(lr=lr)}, split)
        return chain(clip_by_global_norm(1.0), both, ema(0.9))

    check_optimizer(made, max_examples=5)


def test_a_rule_that_fails_on_complex_numbers_is_not_left_out() -> None:
    """A rule that fails on complex numbers in a step is reported, and not skipped."""

    class Hyper(NamedTuple):
        lr: float

    def rule(param: Tensor, grad: Tensor, state: Any, c: Hyper) -> tuple[Tensor, Any]:
        if param.dim() and param.shape[-1] == 2:
            raise RuntimeError("not for the real view")
        return param - c.lr * grad, state

    odd = Rule(name="odd", hyper=Hyper, rule=rule)
    with pytest.raises(LawNotTried, match="not for the real view"):
        check_optimizer(
            lambda: chain(odd(lr=0.1)), laws=["complex is its real view"], max_examples=5
        )


def test_an_optimizer_that_selects_by_name_is_checked_with_names() -> None:
    """``check_optimizer`` accepts selectors of names, also in runs that lack some of the names."""
    seen: set[str] = set()

    def is_bias(path: Any) -> bool:
        seen.add(path[0])
        return str(path[0]).endswith("bias")

    def made() -> Optimizer:
        decay = masked(decoupled_weight_decay(0.1), ~matching("*bias"))
        return chain(decay, freeze(is_bias), adamw(lr=1e-3))

    check_optimizer(
        made, names=("weight", "bias"), laws=("pure", "auto is reference"), max_examples=20
    )
    assert {"weight", "bias", "a"} <= seen
