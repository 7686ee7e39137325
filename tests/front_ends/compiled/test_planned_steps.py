"""Planned steps of TorchOptimizer: laws where kernels run them, and the number of plans."""

from itertools import product
from typing import Any

import pytest
import torch

from functional_optim import (
    TorchOptimizer,
    adamw,
    as_functional_optim,
    chain,
    clip_by_global_norm,
    stored,
)
from functional_optim.kernels import ExecutorName, chunks
from functional_optim.kernels.foreach import ForeachKernel
from functional_optim.native import LOOPS
from functional_optim.plan import StepPlan, engine
from tests.choices import case, each
from tests.steady import calls_of, noted_calls

from ..support import noise, params_of, run, set_grads, twins
from ..test_changes_between_steps import (  # noqa: F401  the same law, where kernels make the steps
    test_later_steps_are_those_of_torch_s_class,
)
from ..test_steps import (  # noqa: F401  the same laws, where kernels make the steps
    test_a_chain_clips_over_all_groups_at_once,
    test_a_group_added_later_is_stepped,
    test_a_list_that_is_changed_in_place_is_seen,
    test_a_parameter_without_gradient_is_left_alone_with_its_state,
    test_a_restart_by_clearing_the_state,
    test_a_second_optimizer_over_the_same_parameters,
    test_a_step_count_set_by_hand,
    test_a_tensor_lr_is_read_in_each_step,
    test_any_chain_is_what_update_gives,
    test_frozen_parameters_join_when_they_are_thawed,
    test_momentum_turned_on_and_off_again,
    test_one_parameter_twice_in_a_group_is_stepped_once,
    test_steps_are_those_of_torch_s_class,
)


@pytest.fixture(autouse=True)
def _every_step_is_worth_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("functional_optim.kernels.exact.kernel.WORTH_COMPILING", 1)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of leaves of each new plan."""
    made: list[int] = []
    before = StepPlan.__init__

    def counted(self: StepPlan, stages: Any, executor: Any, items: Any, *a: Any, **k: Any) -> None:
        made.append(len(items))
        before(self, stages, executor, items, *a, **k)

    monkeypatch.setattr(StepPlan, "__init__", counted)
    return made


@each(name=["SGD momentum", "AdamW"])
def test_a_steady_step_plans_nothing(name: str, planned: list[int]) -> None:
    """Steps reuse plans if the learning rate changes, or if two sets of gradients alternate."""
    planned.clear()
    pair = twins(name)
    for seed in range(8):
        pair.each(lambda one, lr=0.1 / (seed + 1): one.param_groups[0].update(lr=lr))
        pair.step(seed, without=())
    pair.assert_same()
    assert planned == [4]
    for seed in range(8):
        pair.step(seed, without={seed % 2})
    pair.assert_same()
    # Each set of gradients has a plan. The first set has two, because the step counts of its leaves
    # differ at its second step.
    assert planned == [4, 3, 3, 3]


class _Own(torch.Tensor):
    pass


def _strided(param: torch.Tensor) -> torch.Tensor:
    axes = tuple(reversed(range(param.dim())))
    return param.permute(axes).contiguous().permute(axes)


GRADIENTS = {
    "laid out otherwise": _strided,
    "a part of a larger tensor": lambda g: torch.stack([g, g])[1],
    "of a class of its own": lambda g: g.as_subclass(_Own),
}


@each(kind=GRADIENTS)
def test_gradients_of_any_kind_between_others(kind: str) -> None:
    pair = twins("AdamW")
    for seed in range(5):
        for optimizer in pair.both:
            set_grads(params_of(optimizer), seed)
            for param in params_of(optimizer) if seed in {2, 3} else ():
                assert param.grad is not None
                param.grad = GRADIENTS[kind](param.grad)
            optimizer.step()
        pair.assert_same()


def test_a_gradient_that_overlaps_its_parameter_is_read_before_that_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loops in C++ find the overlap, and Python finds it without the loops."""
    for loaded in (LOOPS.loaded, None):
        monkeypatch.setattr(LOOPS, "loaded", loaded)
        monkeypatch.setattr(LOOPS, "get", lambda count, loaded=loaded: loaded)
        memory = noise(1, 96)
        param = torch.nn.Parameter(memory[32:])
        optimizer = TorchOptimizer([param], as_functional_optim(torch.optim.SGD, lr=0.5))
        for seed in range(4):
            grad = memory[:64] if seed > 1 else noise(seed, 64)
            wanted = param.detach() - 0.5 * grad
            param.grad = grad
            optimizer.step()
            assert torch.equal(param, wanted)


def test_a_gradient_that_does_not_fit_is_refused_with_nothing_changed() -> None:
    pair = twins("AdamW")
    pair.step(0, 1)
    params = params_of(pair.ours)
    set_grads(params, 2)
    before = [param.detach().clone() for param in params]
    params[-1].data = params[-1].data.double()
    with pytest.raises(ValueError, match="float64"):
        pair.ours.step()
    for one, was in zip(params[:-1], before, strict=False):
        assert torch.equal(one, was)


CHAINS = {
    "sgd": as_functional_optim(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": adamw(0.1),
    "clipped": chain(clip_by_global_norm(1.0), adamw(0.1)),
}


@each(name=CHAINS, without=[(), (1,)], executor=["auto", "blocked"])
def test_a_step_of_three_tensors_makes_few_calls(
    name: str, without: tuple[int, ...], executor: ExecutorName
) -> None:
    """A step of three tensors makes few Python calls, with either executor.

    Without compiled loops, Python looks at the gradients, which takes some more calls.
    """
    optimizer = TorchOptimizer(
        [torch.nn.Parameter(torch.ones(50)) for _ in range(3)],
        CHAINS[name].using(executor=executor),
    )
    run(optimizer, 0, 1, 2)
    run(optimizer, 3, 4, 5, without=without)
    set_grads(params_of(optimizer), 6, without=without)
    most = 60 if executor == "auto" else 78 if name == "clipped" else 66
    assert calls_of(optimizer.step) <= most


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_another_learning_rate_adds_few_calls(name: str) -> None:
    """A new learning rate adds few calls, because only changed values are checked again."""
    optimizer = TorchOptimizer([torch.nn.Parameter(torch.ones(50)) for _ in range(3)], CHAINS[name])
    run(optimizer, *range(6))
    counted = []
    for lr in (0.1, 0.2, 0.3):
        set_grads(params_of(optimizer), 6)
        optimizer.param_groups[0]["lr"] = lr
        counted.append(calls_of(optimizer.step))
    assert max(counted[1:]) <= counted[0] + 40


@pytest.mark.parametrize("executor", ["auto", "blocked"])
def test_one_gradient_of_two_parameters_is_two_at_the_next_step(executor: ExecutorName) -> None:
    optimizer = adamw(0.1).using(executor=executor)
    params = [torch.nn.Parameter(noise(seed, 40)) for seed in range(2)]
    tree = [one.detach().clone() for one in params]
    state, ours = optimizer.init(tree), TorchOptimizer(params, optimizer)
    for seed in range(4):
        first = noise(10 + seed, 40)
        grads = [first, first if seed < 2 else noise(20 + seed, 40)]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        ours.step()
        tree, state = optimizer.using(executor="reference").update(tree, grads, state)
    for param, one in zip(params, tree, strict=True):
        assert torch.equal(param, one)


def _mixed(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """Return adjacent, separate, transposed, 0-d, empty and large parameters."""
    memory = noise(1, 96).to(dtype)
    made = [
        *memory.split(32),
        noise(2, 4, 6).to(dtype).t(),
        noise(3).to(dtype),
        torch.ones(0, dtype=dtype),
        noise(4, 16, 64).to(dtype),
    ]
    return [torch.nn.Parameter(one) for one in made]


def test_an_executor_without_a_table_steps_small_leaves_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Small leaves are stepped in one list, with the same bits as each leaf alone."""
    monkeypatch.setattr(chunks, "LARGE", 1000)
    listed: list[int] = []
    before = ForeachKernel.bind_lists

    def noted(self: Any, stages: Any, like: Any, columns: Any) -> Any:
        listed.append(len(columns[0]))
        return before(self, stages, like, columns)

    monkeypatch.setattr(ForeachKernel, "bind_lists", noted)
    chains = {**CHAINS, "eight bits": stored(adamw(0.1), state="int8")}
    blocked = product(chains, ["blocked"], [torch.float32])
    sixteen_bits = product(CHAINS, ["blocked"], [torch.bfloat16])
    for name, executor, dtype in [*blocked, *sixteen_bits]:
        with case(name=name, executor=executor, dtype=dtype):
            listed.clear()
            ways = [chains[name].using(executor=one) for one in ("auto", executor)]  # type: ignore[arg-type]  # names of executors
            alone, together = (TorchOptimizer(_mixed(dtype), one) for one in ways)
            for seed in range(5):
                for optimizer in (alone, together):
                    optimizer.param_groups[0]["lr"] = 0.1 / (seed + 1)
                    run(optimizer, seed)
            for one, other in zip(params_of(together), params_of(alone), strict=True):
                assert torch.equal(one, other)
            # A block of int8 state belongs to one leaf, so there are no lists. A large leaf, or a
            # leaf whose gradient has other strides, is stepped alone.
            assert set(listed) == (set() if name == "eight bits" else {4})


@each(executor=["auto", "blocked", "compiled"])
def test_what_is_clipped_together_is_planned_with_every_executor(
    executor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every executor plans a clipped step, steps no leaf alone, and agrees with ``update_``."""
    chosen = CHAINS["clipped"].using(executor=executor)  # type: ignore[arg-type]  # its name
    params = [torch.nn.Parameter(noise(seed, size)) for seed, size in enumerate((3, 100, 70_000))]
    tree = {str(place): param.detach().clone() for place, param in enumerate(params)}
    state = chosen.init(tree)
    optimizer = TorchOptimizer(params, chosen)
    for seed in range(5):
        set_grads(params, seed)
        grads = {str(place): param.grad.clone() for place, param in enumerate(params)}  # type: ignore[union-attr]  # all have one
        with monkeypatch.context() as patch:
            alone = noted_calls(patch, ((engine, "prepare"),))
            optimizer.step()
        assert alone == []
        chosen.update_(tree, grads, state)
        for one, other in zip(params, tree.values(), strict=True):
            assert torch.equal(one, other)
