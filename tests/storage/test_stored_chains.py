"""``stored`` over chains: names, schedules, overrides, copies, front-ends, and what is refused."""

import copy
import io
import pickle
import subprocess
import sys
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from functional_optim import (
    Optimizer,
    Rule,
    TorchOptimizer,
    Transform,
    adamw,
    chain,
    clip_by_global_norm,
    clip_by_value,
    decoupled_weight_decay,
    lion,
    sgd,
    weight_decay,
)
from functional_optim.storage import stored

from .support import BASES, CHOICES, assert_same, dtype_of, normal, steps


def long() -> Optimizer:
    return chain(
        clip_by_value(3.0),
        clip_by_global_norm(1.0),
        clip_by_value(2.0),
        adamw(lr=0.1, weight_decay=0.2),
    )


def master(optimizer: Optimizer) -> Optimizer:
    return stored(optimizer, param="bfloat16+master")


def follows(optimizer: Optimizer, made: Optimizer, count: int = 4, **hyper: Any) -> None:
    """A master is the float32 run, so hyper-parameters that go wrong show in it."""
    param = {"a": normal(10).bfloat16(), "b": normal(3, seed=9).bfloat16()}
    grads = [
        {name: normal(*t.shape, seed=step).bfloat16() for name, t in param.items()}
        for step in range(count)
    ]
    _, state = steps(made, param, grads, **hyper)
    float_grads = [{name: t.float() for name, t in one.items()} for one in grads]
    wide = {name: t.float() for name, t in param.items()}
    want, _ = steps(optimizer, wide, float_grads, **hyper)
    assert_same({name: leaf.stages[-1].master for name, leaf in state.leaves.items()}, want)


def test_hyper_parameters_keep_their_names_and_values() -> None:
    assert master(long()).hyper == long().hyper
    assert "clip_by_value_2.clip_value" in long().hyper


@pytest.mark.parametrize(
    "hyper",
    [
        {"lr": 0.3},
        {"betas": (0.5, 0.7)},
        {"weight_decay": 0.0},
        {"clip_by_value_2.clip_value": 0.01},
        {"clip_by_value.clip_value": 0.5, "max_norm": 100.0},
        {"amsgrad": False},
        {"maximize": True},
    ],
)
def test_replace_and_update_take_them(hyper: dict[str, Any]) -> None:
    follows(long().replace(**hyper), master(long()).replace(**hyper))
    follows(long(), master(long()), **hyper)
    assert master(long()).replace(**hyper) == master(long().replace(**hyper))


@pytest.mark.parametrize(
    ("hyper", "error"),
    [
        ({"lr": -1.0}, ValueError),
        ({"betas": (1.0, 0.5)}, ValueError),
        ({"max_norm": float("nan")}, ValueError),
        ({"momentum": 0.5}, TypeError),
        ({"amsgrad": 1}, TypeError),
    ],
)
def test_what_the_chain_refuses_is_refused(hyper: dict[str, Any], error: Any) -> None:
    with pytest.raises(error):
        long().replace(**hyper)
    with pytest.raises(error):
        master(long()).replace(**hyper)


def test_contradictions_are_refused() -> None:
    made = master(sgd(momentum=0.9, nesterov=True))
    with pytest.raises(ValueError, match="nesterov needs momentum"):
        made.replace(dampening=0.5)


def test_schedules_and_tensors() -> None:
    def halved(made: float) -> float:
        return 0.1 / 2**made

    follows(adamw(lr=halved), master(adamw(lr=halved)))
    rate = torch.tensor(0.05, dtype=torch.float64)
    follows(adamw(lr=rate), master(adamw(lr=rate)))


def test_overrides_before_and_after() -> None:
    where = ("a",)
    plain = long().override(where, **{"clip_by_value_2.clip_value": 0.01, "lr": 0.01})
    plain = plain.override(lambda path: path == ("b",), weight_decay=0.0, max_norm=0.1)
    follows(plain, master(plain))
    after = master(long()).override(where, **{"clip_by_value_2.clip_value": 0.01, "lr": 0.01})
    after = after.override(lambda path: path == ("b",), weight_decay=0.0, max_norm=0.1)
    follows(plain, after)
    assert plain.hypers_at(("a",)) != plain.hypers_at(("b",))


def test_more_can_be_chained_in_front() -> None:
    made = chain(clip_by_value(0.5), stored(sgd(lr=1.0, maximize=True), state="bfloat16"))
    param = made.update(torch.zeros(1), torch.ones(1), made.init(torch.zeros(1)))[0]
    assert float(param) == 0.5
    assert made.stages[0].name == "stored_maximize"


@pytest.mark.parametrize("name", CHOICES)
def test_equal_hashable_and_picklable(name: str) -> None:
    base, arguments = CHOICES[name]
    one, two = (stored(BASES[base](), **arguments) for _ in range(2))
    assert one == two and hash(one) == hash(two)
    assert one.stages == two.stages and hash(one.stages) == hash(two.stages)
    for other in (pickle.loads(pickle.dumps(one)), copy.deepcopy(one), copy.copy(one)):
        assert other == one and other.stages == one.stages and other.hyper == one.hyper
    assert one != stored(BASES[base](), **{**arguments, "seed": 99})
    param = normal(300).to(dtype_of(arguments))
    state = one.init(param)
    assert_same(pickle.loads(pickle.dumps(state)), state)


def test_state_and_optimizer_are_read_by_another_process(tmp_path: Any) -> None:
    optimizer = stored(adamw(lr=0.1), param="bfloat16+kahan", state="int8+stochastic")
    param, grad = normal(300).bfloat16(), normal(300, seed=1).bfloat16()
    param, state = steps(optimizer, param, [grad])
    torch.save({"param": param, "grad": grad, "state": state}, tmp_path / "saved.pt")
    (tmp_path / "optimizer.pkl").write_bytes(pickle.dumps(optimizer))
    text = (
        "import pickle, sys, torch, pathlib\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "optimizer = pickle.loads((folder / 'optimizer.pkl').read_bytes())\n"
        "saved = torch.load(folder / 'saved.pt')\n"
        "made = optimizer.update(saved['param'], saved['grad'], saved['state'])\n"
        "torch.save(made, folder / 'made.pt')\n"
    )
    subprocess.run([sys.executable, "-c", text, str(tmp_path)], check=True, timeout=120)
    want = optimizer.update(param, grad, state)
    assert_same(torch.load(tmp_path / "made.pt"), want)


def test_the_torch_front_end_steps_it() -> None:
    optimizer = stored(long(), param="bfloat16+kahan", state={"exp_avg": "int8"})
    params = [normal(20).bfloat16().requires_grad_(), normal(5, seed=1).bfloat16()]
    params[1].requires_grad_()
    front = TorchOptimizer(
        [{"params": params[:1]}, {"params": params[1:], "lr": 0.01, "weight_decay": 0.0}],
        optimizer,
    )
    before = {"a": params[0].detach().clone(), "b": params[1].detach().clone()}
    pure = optimizer.override(("b",), lr=0.01, weight_decay=0.0)
    state = pure.init(before)
    for step in range(3):
        grads = {
            "a": normal(20, seed=step).bfloat16(),
            "b": normal(5, seed=step + 9).bfloat16(),
        }
        for param, name in zip(params, grads, strict=True):
            param.grad = grads[name]
        total = front_total(grads)
        front.step()
        before, state = pure.update(before, grads, state, measured=[total])
    assert_same({"a": params[0].detach(), "b": params[1].detach()}, before)
    assert front.state[params[0]]["exp_avg"].dtype == torch.uint8


def front_total(grads: dict[str, Tensor]) -> Tensor:
    clipped = [g.float().clamp(-3.0, 3.0).double() for g in grads.values()]
    total = torch.zeros((), dtype=torch.float64)
    for grad in clipped:
        total = total + torch.linalg.vector_norm(grad).square()
    return total


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
    # Lion steps by a sign, which a small average may lose; most do not.
    assert float((param == want).double().mean()) > 0.9


def test_fields_that_are_no_float32_of_the_parameters_shape_stay() -> None:
    optimizer = chain(PACED(lr=0.1))
    made = stored(optimizer, state="bfloat16")
    _, state = steps(made, normal(5), [normal(5, seed=1)] * 2)
    kept = state.leaves.stages[0]
    assert float(kept.pace) == 0.25 and kept.pace.dtype == torch.float32
    assert kept.counts.tolist() == [2] * 5 and kept.counts.dtype == torch.int32
    assert kept.average[0].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("state", "match"),
    [
        ({"pace": "int8"}, r"paced: pace has shape \(\)"),
        ({"counts": "bfloat16"}, "paced: counts has dtype torch.int32"),
        ({"speed": "int8"}, "no field of state 'speed'; its state has average, counts, pace"),
        ({"average": "int4"}, r"state\['average'\] must be one of 'float32', 'bfloat16'"),
        ("half", r"state\['\*'\] must be one of"),
    ],
)
def test_what_cannot_be_encoded_is_refused(state: Any, match: str) -> None:
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
        stored(stored(sgd(), state="bfloat16", param="bfloat16") and master(adamw()))
    with pytest.raises(ValueError, match="decoupled_weight_decay changes the parameter"):
        stored(chain(decoupled_weight_decay(0.1), clip_by_global_norm(1.0), sgd()), state="int8")


@pytest.mark.parametrize("param", ["bfloat16+master", "bfloat16+kahan"])
def test_a_transform_in_front_must_not_read_what_it_cannot_know(param: str) -> None:
    optimizer = chain(weight_decay(0.1), clip_by_global_norm(1.0), lion())
    made = stored(optimizer, param=param)
    params = {"w": normal(4).bfloat16()}
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


def test_torchscript_is_refused() -> None:
    optimizer = stored(sgd(), param="bfloat16").using(executor="script")
    param = torch.ones(3).bfloat16()
    with pytest.raises(TypeError, match="no plain function"):
        optimizer.update(param, param, optimizer.init(param))


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


def test_a_saved_state_needs_no_trust() -> None:
    optimizer = stored(long(), state="int8")
    state = optimizer.init(torch.ones(3))
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    assert_same(torch.load(file, weights_only=True), state)


class _Blocks(NamedTuple):
    lr: float


class _Kept(NamedTuple):
    last: Tensor


def _kept(param: Tensor, hyper: _Blocks) -> _Kept:
    return _Kept(torch.zeros_like(param))


def _in_blocks(p: Tensor, g: Tensor, s: _Kept, c: _Blocks) -> tuple[Tensor, _Kept]:
    return p - c.lr * g, _Kept(g)


@pytest.mark.parametrize("granularity", [6, 512])
def test_blocks_that_do_not_fit_those_of_the_state(granularity: int) -> None:
    """The state would have a scale for pieces of two blocks, or of a part of one."""
    rule = Rule(
        name="blocks",
        hyper=_Blocks,
        state=_Kept,
        init=_kept,
        rule=_in_blocks,
        granularity=granularity,
    )
    with pytest.raises(ValueError, match=rf"blocks of {granularity} elements.*float32 or bfloat16"):
        stored(chain(rule(lr=0.1)), state="int8")
    kept = stored(chain(rule(lr=0.1)), state="bfloat16")
    assert kept.stages[0].granularity == granularity
    fits = stored(chain(replace(rule, granularity=4)(lr=0.1)), state="int8")
    assert fits.stages[0].granularity == 256
