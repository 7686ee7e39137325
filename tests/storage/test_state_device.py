"""State on the CPU, parameters elsewhere."""

import pytest
import torch

from functional_optim import adamw
from functional_optim.storage import stored

from .support import assert_same, normal, steps

BFLOAT16 = torch.bfloat16


def test_on_the_cpu_it_changes_nothing() -> None:
    arguments = {"param": "bfloat16+kahan", "state": "int8+stochastic"}
    near, far = (stored(adamw(), **arguments, state_device=d) for d in (None, "cpu"))
    param, grads = normal(600).bfloat16(), [normal(600, seed=s).bfloat16() for s in range(3)]
    assert_same(steps(near, param, grads), steps(far, param, grads))
    assert {stage.state_device for stage in far.stages} == {"cpu"}


def test_state_elsewhere_is_refused() -> None:
    optimizer = stored(adamw(), state="bfloat16", state_device="cpu")
    param = torch.ones(3, device="meta")
    state = stored(adamw(), state="bfloat16").init(param)
    with pytest.raises(ValueError, match="its state belongs on cpu"):
        optimizer.update(param, param, state)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("state", ["float32", "int8+stochastic", "bfloat16+stochastic"])
def test_with_parameters_on_an_accelerator(state: str) -> None:
    optimizer = stored(adamw(), param="bfloat16+master", state=state, state_device="cpu")
    there = stored(adamw(), param="bfloat16+master", state=state)
    param = normal(600).bfloat16().cuda()
    grads = [normal(600, seed=s).bfloat16().cuda() for s in range(3)]
    got, kept = steps(optimizer, param, grads)
    want, wanted = steps(there, param, grads)
    assert got.device == param.device
    tensors = [t for v in kept.leaves.stages[-1] for t in (v if isinstance(v, list) else [v])]
    assert all(tensor.device.type == "cpu" for tensor in tensors)
    assert_same(got, want)
    assert_same(tensors[0], wanted.leaves.stages[-1][0].cpu())
    optimizer.update_(param, grads[0], optimizer.init(param))
