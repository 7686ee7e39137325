"""``stored`` over custom stages: state that is encoded, and stages that are refused."""

import copy
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from functional_optim import (
    Rule,
    Transform,
    adamw,
    chain,
    clip_by_global_norm,
    decoupled_weight_decay,
    lion,
    sgd,
    weight_decay,
)
from functional_optim.storage import stored

from ..choices import case
from ..tensors import assert_same, normal
from .support import steps


class SmoothHyper(NamedTuple):
    beta: float


class SmoothState(NamedTuple):
    average: Tensor


def smooth(grad: Tensor, param: Tensor, state: SmoothState, c: SmoothHyper) -> Any:
    average = torch.lerp(state.average, grad, 1 - c.beta)
    return average, SmoothState(average)


SMOOTH = Transform(
    name="smooth",
    hyper=SmoothHyper,
    state=SmoothState,
    init=lambda param, hyper: SmoothState(torch.zeros_like(param)),
    transform=smooth,
)


class Paced(NamedTuple):
    pace: Tensor  # 0-d
    counts: Tensor  # whole numbers, of the parameter's shape
    average: list[Tensor]


class RateHyper(NamedTuple):
    lr: float


def paced(param: Tensor, grad: Tensor, state: Paced, c: RateHyper) -> Any:
    average = state.average[0] * 0.5 + grad
    param = param - c.lr * state.pace * average
    return param, Paced(state.pace / 2, state.counts + 1, [average])


PACED = Rule(
    name="paced",
    hyper=RateHyper,
    state=Paced,
    init=lambda param, hyper: Paced(
        torch.ones(()), torch.zeros_like(param, dtype=torch.int32), [torch.zeros_like(param)]
    ),
    rule=paced,
)


def test_a_transform_with_state_in_front_of_a_measured_one_is_stored_too() -> None:
    optimizer = chain(SMOOTH(beta=0.5), clip_by_global_norm(1.0), lion())
    made = stored(optimizer, state="int8")
    names = [stage.name for stage in made.stages]
    assert names == [
        "stored_maximize",
        "stored_smooth",
        "stored_clip_by_global_norm",
        "stored_lion",
    ]
    param, state = steps(made, normal(300), [normal(300, seed=s) for s in range(3)])
    kept = state.leaves.stages[1]
    assert kept.average.dtype == torch.uint8 and kept.average_scale.shape == (2,)
    want, _ = steps(optimizer, normal(300), [normal(300, seed=s) for s in range(3)])
    # Lion steps by a sign. Encoding may lose the sign of a small average, but keeps most signs.
    assert float((param == want).double().mean()) > 0.9


def test_fields_that_are_no_float32_of_the_parameters_shape_stay() -> None:
    optimizer = chain(PACED(lr=0.1))
    made = stored(optimizer, state="bfloat16")
    _, state = steps(made, normal(5), [normal(5, seed=1)] * 2)
    kept = state.leaves.stages[0]
    assert float(kept.pace) == 0.25 and kept.pace.dtype == torch.float32
    assert kept.counts.tolist() == [2] * 5 and kept.counts.dtype == torch.int32
    assert kept.average[0].dtype == torch.bfloat16


def test_what_cannot_be_encoded_is_refused() -> None:
    refused: list[tuple[Any, str]] = [
        ({"pace": "int8"}, r"paced: pace has shape \(\)"),
        ({"counts": "bfloat16"}, "paced: counts has dtype torch.int32"),
        ({"speed": "int8"}, "no field of state 'speed'; its state has average, counts, pace"),
        ({"average": "int4"}, r"state\['average'\] must be one of 'float32', 'bfloat16'"),
        ("half", r"state\['\*'\] must be one of"),
    ]
    for state, match in refused:
        with pytest.raises(ValueError, match=match):
            stored(chain(PACED(lr=0.1)), state=state)


def test_fields_of_two_stages_are_told_apart() -> None:
    optimizer = chain(SMOOTH(beta=0.5), PACED(lr=0.1))
    with pytest.raises(ValueError, match=r"no field of state 'average'.*smooth\.average"):
        stored(optimizer, state={"average": "int8"})
    made = stored(optimizer, state={"smooth.average": "int8"})
    _, state = steps(made, normal(5), [normal(5, seed=1)])
    kept = state.leaves.stages[0]
    assert kept.smooth_average.dtype == torch.uint8
    assert kept.paced_average[0].dtype == torch.float32


def test_nothing_stored_is_the_same_optimizer() -> None:
    optimizer = adamw()
    assert stored(optimizer) is optimizer
    assert stored(optimizer, state={"exp_avg": "float32"}) is optimizer


def test_what_is_refused() -> None:
    with pytest.raises(TypeError, match="takes an Optimizer"):
        stored(torch.optim.AdamW)
    with pytest.raises(ValueError, match="param must be one of 'float32', 'bfloat16'"):
        stored(adamw(), param="float16")
    with pytest.raises(ValueError, match="seed must be a whole number"):
        stored(adamw(), param="bfloat16+stochastic", seed=-1)
    with pytest.raises(ValueError, match="state_device must be None or 'cpu'"):
        stored(adamw(), state_device="cuda")
    with pytest.raises(ValueError, match="stored_adam is stored already"):
        stored(stored(adamw(), param="bfloat16+master"))
    with pytest.raises(ValueError, match="decoupled_weight_decay changes the parameter"):
        stored(chain(decoupled_weight_decay(0.1), clip_by_global_norm(1.0), sgd()), state="int8")


def test_a_transform_in_front_must_not_read_what_it_cannot_know() -> None:
    optimizer = chain(weight_decay(0.1), clip_by_global_norm(1.0), lion())
    params = {"w": normal(4).bfloat16()}
    for param in ("bfloat16+master", "bfloat16+kahan"):
        with case(param=param):
            made = stored(optimizer, param=param)
            state = made.init(params)
            kept = copy.deepcopy((params, state))
            with pytest.raises(TypeError, match="weight_decay reads the parameter"):
                made.update_(params, params, state)
            assert_same((params, state), kept)
            made.update_(params, params, state, **{"weight_decay.weight_decay": 0.0})
    fine = stored(optimizer, param="bfloat16+stochastic")
    fine.update(params, params, fine.init(params))


def test_sparse_gradients_are_refused() -> None:
    optimizer = stored(sgd(), param="bfloat16")
    param = torch.ones(3, 2).bfloat16()
    with pytest.raises(RuntimeError, match="not taken by stored"):
        optimizer.update(param, param.to_sparse(), optimizer.init(param))


def test_there_is_no_derivative_to_be_wrong() -> None:
    optimizer = stored(sgd(momentum=0.9), state="int8")
    param = torch.ones(3, requires_grad=True)
    after, _ = optimizer.update(param, torch.ones(3), optimizer.init(param))
    assert not after.requires_grad
    assert all(not stage.differentiable for stage in optimizer.stages)


def test_a_state_of_another_storage_is_refused() -> None:
    param = torch.ones(3)
    state = stored(adamw(), state="int8").init(param)
    with pytest.raises(ValueError, match="of another optimizer"):
        stored(adamw(), state="bfloat16").update(param, param, state)
    other = stored(adamw(), state="bfloat16+stochastic").init(param)
    stored(adamw(), state="bfloat16").update(param, param, other)


def test_a_state_of_another_tree_is_refused() -> None:
    optimizer = stored(adamw(), state="int8")
    state = optimizer.init(torch.ones(300))
    with pytest.raises(ValueError, match="is of another tree"):
        optimizer.update(torch.ones(600), torch.ones(600), state)


def test_blocks_that_do_not_fit_those_of_the_state() -> None:
    """A scale would cover pieces of two blocks of the rule, or only a part of one block."""
    for granularity in (6, 512):
        coarse = chain(replace(PACED, granularity=granularity)(lr=0.1))
        said = rf"blocks of {granularity} elements.*float32 or bfloat16"
        with pytest.raises(ValueError, match=said):
            stored(coarse, state="int8")
        assert stored(coarse, state="bfloat16").stages[0].granularity == granularity
    fits = stored(chain(replace(PACED, granularity=4)(lr=0.1)), state="int8")
    assert fits.stages[0].granularity == 256


class _Option(NamedTuple):
    lr: float
    mean: bool = False


class _Means(NamedTuple):
    mean: list[Tensor]


def test_a_field_of_an_option_that_cannot_be_encoded_is_named_by_init() -> None:
    """The default state of the stage lacks the field, so only ``init`` can find the error."""
    rule = Rule(
        name="means",
        hyper=_Option,
        state=_Means,
        init=lambda param, hyper: _Means([param.mean()] if hyper.mean else []),
        rule=lambda p, g, s, c: (p - c.lr * g, s),
    )
    made = stored(chain(rule(lr=0.1)), state="int8")
    assert made.init(torch.ones(3)).leaves.stages[0].mean == []
    with pytest.raises(ValueError, match=r"means: mean has shape \(\), the parameter \(3,\)"):
        made.replace(mean=True).init(torch.ones(3))
