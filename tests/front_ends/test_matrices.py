"""Equal steps and state dicts of our Muon and torch.optim.Muon, whose parameters are matrices."""

from typing import Any

import pytest
import torch
from torch import nn

from functional_optim import TorchOptimizer, from_torch, muon, to_torch_state_dict

from ..choices import each
from .support import assert_same_tensors

SHAPES = ((3, 4), (5, 2), (3, 4), (3, 4), (1, 1))
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "no nesterov": {"lr": 0.1, "nesterov": False, "weight_decay": 0.3},
    "as AdamW": {"lr": 0.1, "adjust_lr_fn": "match_rms_adamw", "momentum": 0.5},
    "fewer steps": {"ns_steps": 2, "ns_coefficients": (2.0, -1.5, 0.5), "eps": 0.5},
}


def _params(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    draws = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=draws).to(dtype)) for shape in SHAPES]


def _set_grads(params: list[nn.Parameter], step: int) -> None:
    draws = torch.Generator().manual_seed(100 + step)
    for place, param in enumerate(params):
        grad = torch.randn(param.shape, generator=draws).to(param.dtype)
        param.grad = None if place == 1 and step == 1 else grad


def _run(
    optimizer: torch.optim.Optimizer, params: list[nn.Parameter], start: int, stop: int
) -> None:
    for step in range(start, stop):
        _set_grads(params, step)
        optimizer.step()


@each(options=OPTIONS)
def test_a_torch_optimizer_is_torchs_and_goes_on_with_its_state_dict(options: str) -> None:
    hyper = OPTIONS[options]
    params, theirs = _params(), _params()
    ours = TorchOptimizer(params, muon(**hyper))
    twin = torch.optim.Muon(theirs, **hyper)
    _run(ours, params, 0, 3)
    _run(twin, theirs, 0, 3)
    assert_same_tensors(params, theirs)
    saved, kept = ours.state_dict(), twin.state_dict()
    twin.load_state_dict(saved)
    ours.load_state_dict(kept)
    _run(ours, params, 3, 5)
    _run(twin, theirs, 3, 5)
    assert_same_tensors(params, theirs)


@each(
    dtype=[torch.float64, torch.float32],
    lr_dtype=[torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64],
    adjust=[None, "match_rms_adamw"],
)
def test_a_tensor_lr_is_multiplied_in_its_dtype(
    dtype: torch.dtype, lr_dtype: torch.dtype, adjust: str | None
) -> None:
    """Fault 14: the shape factor is multiplied in the dtype of ``lr``, even for subnormal halfs."""
    for number in (0.3, 1e-5) if lr_dtype.is_floating_point else (2,):
        lr = torch.tensor(number, dtype=lr_dtype)
        params, theirs = _params(dtype), _params(dtype)
        _run(TorchOptimizer(params, muon(lr, adjust_lr_fn=adjust)), params, 0, 2)
        _run(torch.optim.Muon(theirs, lr, adjust_lr_fn=adjust), theirs, 0, 2)
        assert_same_tensors(params, theirs)


@each(options=OPTIONS)
def test_a_live_one_is_continued_here_and_goes_back(options: str) -> None:
    theirs = _params()
    twin = torch.optim.Muon(theirs, **OPTIONS[options])
    _run(twin, theirs, 0, 3)
    optimizer, params, state = from_torch(twin)
    params = ({name: one.detach().clone() for name, one in params[0].items()},)
    for step in range(3, 5):
        _run(twin, theirs, step, step + 1)
        grads = ({str(place): one.grad for place, one in enumerate(theirs)},)
        params, state = optimizer.update(params, grads, state)
    assert_same_tensors(list(params[0].values()), theirs)
    back = to_torch_state_dict(optimizer, params, state)
    want = twin.state_dict()
    assert back["param_groups"] == want["param_groups"]
    assert back["state"].keys() == want["state"].keys()
    for place, one in want["state"].items():
        assert back["state"][place].keys() == one.keys()
        assert torch.equal(back["state"][place]["momentum_buffer"], one["momentum_buffer"])


def test_torchs_class_does_not_count_on_from_a_loaded_count_of_0() -> None:
    """torch.optim.Muon keeps the count 0 of a state dict that was saved before the first step."""
    params = _params()
    ours, twin = TorchOptimizer(params, muon(0.1)), torch.optim.Muon(params, 0.1)
    twin.load_state_dict(ours.state_dict())
    _run(twin, params, 1, 2)  # one parameter has no gradient
    theirs = [nn.Parameter(one.detach().clone()) for one in params]
    again = torch.optim.Muon(theirs, 0.1)
    again.load_state_dict(twin.state_dict())
    _, others, state = from_torch(twin)
    assert all(torch.equal(others[0][str(k)], one) for k, one in enumerate(theirs))
    assert {int(one.step) for one in state.leaves[0].values()} == {0, 1}
    ours.load_state_dict(twin.state_dict())
    _run(ours, params, 2, 4)
    _run(again, theirs, 2, 4)
    assert_same_tensors(params, theirs)


def test_a_name_that_is_none_of_those_is_refused_wherever_it_is_set() -> None:
    optimizer = muon()
    for bad in ("other", ""):
        with pytest.raises(ValueError, match=r"adjust_lr_fn must be one of None, 'original'"):
            optimizer.replace(adjust_lr_fn=bad)
    for wrong in (1, True, 0.5):
        with pytest.raises(TypeError, match="adjust_lr_fn must be a name or None"):
            muon(adjust_lr_fn=wrong)  # type: ignore[arg-type]
    front = TorchOptimizer(_params(), optimizer)
    front.param_groups[0]["adjust_lr_fn"] = "other"
    _set_grads(front.param_groups[0]["params"], 0)
    with pytest.raises(ValueError, match="adjust_lr_fn must be one of"):
        front.step()
