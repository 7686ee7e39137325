"""Global settings of torch that a program may have changed leave results and state alone."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch

from functional_optim import adam, sgd

from ..choices import case
from .support import EVERY, IN_PYTHON, assert_same, noise


@contextmanager
def double_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference mode": torch.inference_mode,
    "double by default": double_by_default,
    "deterministic": deterministic,
    "another default device": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_does_not_reach_into_a_step(setting: str) -> None:
    """Nor into ``init``, where a step count elsewhere could not be read."""
    starts = noise(0, 4, 4, dtype=torch.float32), noise(9, 3)
    grads = [(noise(i, 4, 4, dtype=torch.float32), noise(i + 20, 3)) for i in range(1, 4)]
    for executor in IN_PYTHON:
        for name, optimizer in EVERY.items():
            own = optimizer.using(executor=executor)
            wanted = starts, own.init(starts)
            for grad in grads:
                wanted = own.update(wanted[0], grad, wanted[1])
            with SETTINGS[setting]():
                params, state = starts, own.init(starts)
                for grad in grads:
                    params, state = own.update(params, grad, state)
            with case(executor=executor, name=name):
                assert_same((params, state), wanted)


def test_parameters_on_meta_give_shapes() -> None:
    """For planning: what a step would make, without memory."""
    param = torch.empty(3, 4, device="meta")
    for optimizer in (sgd(momentum=0.9), adam()):
        state = optimizer.init(param)
        new, new_state = optimizer.update(param, param, state)
        assert (new.device.type, new.shape) == ("meta", (3, 4))
        assert new_state.leaves.stages[-1][0] is not None
        assert state.leaves.step.device.type == "cpu"
        assert int(new_state.leaves.step) == 1
