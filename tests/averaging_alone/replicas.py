"""Inner rules and averagers of all kinds."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import Optimizer, Rule, adamw, chain, lion, sgd
from hooks import AveragingSchedule, HierarchicalModelAverager, ScheduledModelAverager
from hooks.averaging import OuterModelAverager
from hooks.averaging.compression import BFloat16, Blocks, TopK
from hooks.averaging.contrib import Statistical

STEPS = 9


class Normed(NamedTuple):
    lr: float


def by_its_norm(param: Tensor, grad: Tensor, state: tuple[()], c: Normed) -> Any:
    return param - c.lr * grad / (torch.linalg.vector_norm(grad) + 1e-3), state


NORMED = Rule(
    name="normed",
    hyper=Normed,
    rule=by_its_norm,
    kind="per_matrix",
)
"""Inner rule that sees the tensor of each replica alone, not the stack."""

INNER: dict[str, Optimizer] = {
    "AdamW": adamw(lr=0.05, amsgrad=True),
    "SGD": sgd(lr=lambda made: 0.1 / (1 + made), momentum=0.9, nesterov=True),
    "Lion": lion(lr=0.03, weight_decay=0.1),
    "of whole tensors": chain(NORMED(lr=0.1)),
}
DILOCO = sgd(lr=0.7, momentum=0.9, nesterov=True)


def outer(rule: Optimizer = DILOCO, period: int = 4, **options: Any) -> Callable[..., Any]:
    return lambda params, group: OuterModelAverager(
        params, rule, period, process_group=group, **options
    )


def scheduled(*of: Any, **options: Any) -> Callable[..., Any]:
    return lambda _, group: ScheduledModelAverager(AveragingSchedule(*of), group, **options)


AVERAGERS: dict[str, Callable[..., Any]] = {
    "periodic": scheduled(3),
    "periodic, delayed": scheduled(3, (None,), 2, delay=2, bucket_bytes=8),
    "hierarchical": scheduled((2, 4), (2, None)),
    "hierarchical, as torch's": lambda _, group: HierarchicalModelAverager(
        {2: 2, 4: group.size()} if group.size() > 2 else {4: 2}, 1, group
    ),
    "DiLoCo": outer(warmup_steps=1),
    "SlowMo, fragments": outer(sgd(lr=1.0, momentum=0.6), 3, fragments=3),
    "DiLoCo, streaming": outer(fragments=4, delay=3),
    "DiLoCo, mixing": outer(period=3, fragments=2, delay=1, mixing=0.5),
    "BFloat16": outer(compression=BFloat16(), fragments=2),
    "8 bits": outer(compression=Blocks(8), delay=2),
    "4 bits": outer(compression=Blocks(4, block=7)),
    "2 bits": outer(compression=Statistical(2), fragments=2, delay=1),
    "2 bits, forgetful": outer(compression=Statistical(2), error_feedback=False),
    "largest": outer(compression=TopK(0.1)),
}


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
