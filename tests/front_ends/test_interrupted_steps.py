"""Interrupted steps of TorchOptimizer: each leaf is either fully stepped, or not stepped at all."""

from typing import Any

import pytest
import torch

from functional_optim import TorchOptimizer, adamw
from functional_optim.kernels import chunks
from tests.choices import case
from tests.executors.support import broken_off

from .support import SHAPES, noise, run, same_bits


def _made() -> TorchOptimizer:
    params = [torch.nn.Parameter(noise(place, *shape)) for place, shape in enumerate(SHAPES)]
    return TorchOptimizer(params, adamw(0.1).using(executor="blocked"))


def test_between_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an error, the run continues as if the leaves not yet stepped had no gradient."""
    monkeypatch.setattr(chunks, "LARGE", 1)  # steps each leaf alone
    for at in range(1, len(SHAPES) + 1):
        broken, plain = _made(), _made()
        with case(at=at):
            for optimizer in (broken, plain):
                run(optimizer, 0, 1)
            with monkeypatch.context() as patch:
                broken_off(patch, at)
                with pytest.raises(MemoryError):
                    run(broken, 2)
            run(plain, 2, without=range(at - 1, len(SHAPES)))
            for optimizer in (broken, plain):
                run(optimizer, 3, 4)
            for ours, theirs in zip(_values(broken), _values(plain), strict=True):
                assert same_bits(ours, theirs)


def _values(optimizer: TorchOptimizer) -> list[Any]:
    found = []
    for param in optimizer.param_groups[0]["params"]:
        found += [param.detach(), *optimizer.state[param].values()]
    return [torch.as_tensor(one) for one in found]
