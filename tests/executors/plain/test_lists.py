"""Small separate leaves are stepped in lists if no loop is compiled."""

from typing import Any

import torch
from torch import Tensor

from functional_optim import TorchOptimizer, adamw, chain, clip_by_global_norm, lion, sgd
from tests.choices import each_value
from tests.tensors import assert_same, normal

CHAINS = {
    "adamw": adamw(0.1),
    "clipped": chain(clip_by_global_norm(0.5), sgd(0.1, momentum=0.9)),
    "lion": lion(0.1),
}
LAYOUTS: dict[str, Any] = {
    "as they are": lambda one: one,
    "turned": lambda one: one.t().contiguous().t(),
    "with gaps": lambda one: torch.stack([one, one], -1)[..., 0],
}


def trained(params: list[Tensor], name: str) -> TorchOptimizer:
    optimizer = CHAINS[name].using(executor="blocked")
    return TorchOptimizer([torch.nn.Parameter(one) for one in params], optimizer)


def step(optimizer: TorchOptimizer, seed: int, lay: Any = lambda one: one) -> None:
    for k, param in enumerate(optimizer.param_groups[0]["params"]):
        param.grad = lay(normal(*param.shape, seed=seed + k, dtype=param.dtype))
    optimizer.step()


@each_value(
    name=CHAINS.keys(), params=LAYOUTS, grads=LAYOUTS, dtype=[torch.float32, torch.bfloat16]
)
def test_in_any_layout_steps_are_the_reference_s(
    name: str, params: Any, grads: Any, dtype: torch.dtype
) -> None:
    start = [normal(4, 6, seed=k, dtype=dtype) for k in range(3)]
    own = [one.clone() for one in start]
    ours = trained([own[0], params(own[1]), own[2]], name)
    want, state = start, CHAINS[name].init(start)
    for seed in range(4):
        step(ours, 10 * seed, grads)
        given = [normal(4, 6, seed=10 * seed + k, dtype=dtype) for k in range(3)]
        want, state = CHAINS[name].update(want, given, state)
        got = [one.detach() for one in ours.param_groups[0]["params"]]
        assert_same([one.contiguous() for one in got], want)
