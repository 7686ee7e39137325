"""Global settings of torch, which change neither results nor state."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch

from functional_optim import adam, algorithms, sgd
from functional_optim.kernels import ExecutorName
from tests.choices import each, has_turn

from .support import EVERY, IN_PYTHON, assert_same, noise, steps


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


@each("setting", setting=SETTINGS, executor=IN_PYTHON, name=EVERY)
def test_a_setting_does_not_reach_into_a_step(
    setting: str, executor: ExecutorName, name: str
) -> None:
    """``init`` also runs under the setting, and must make step counts that can be read.

    Each optimizer has every third setting, by turns.
    """
    if not has_turn(3, list(SETTINGS).index(setting), list(EVERY).index(name)):
        return
    optimizer = EVERY[name].using(executor=executor)
    if setting == "double by default" and optimizer.stages[-1].name in ("asgd", "nadam"):
        return  # as in torch, numbers of a tensor have the default dtype
    start = noise(0, 4, 4, dtype=torch.float32), noise(9, 3)
    grads = [(noise(i, 4, 4, dtype=torch.float32), noise(i + 20, 3)) for i in range(1, 4)]
    wanted = steps(optimizer, start, lambda index: grads[index], 3)
    with SETTINGS[setting]():
        made = steps(optimizer, start, lambda index: grads[index], 3)
    assert_same(made, wanted)


def test_parameters_on_meta_give_shapes() -> None:
    """Meta parameters show the result of a step without memory, for planning."""
    param = torch.empty(3, 4, device="meta")
    for optimizer in (sgd(momentum=0.9), adam()):
        state = optimizer.init(param)
        new, new_state = optimizer.update(param, param, state)
        assert (new.device.type, new.shape) == ("meta", (3, 4))
        assert new_state.leaves.stages[-1][0] is not None
        assert state.leaves.step.device.type == "cpu"
        assert int(new_state.leaves.step) == 1


@pytest.mark.parametrize("name", ["dadapt_sgd", "dadapt_adam", "prodigy", "dog"])
def test_a_default_device_does_not_reach_into_a_population(name: str) -> None:
    """The numbers differ between members, and are tensors."""
    optimizer = getattr(algorithms, name)()
    params, grads = noise(0, 3, 4), noise(1, 3, 4)
    found = []
    for device in ("cpu", "meta"):
        state = torch.vmap(optimizer.init)(params)
        with torch.device(device):
            found.append(torch.vmap(optimizer.update)(params, grads, state)[0])
    assert_same(*found)
