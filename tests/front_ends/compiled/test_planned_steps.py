"""Planned steps of TorchOptimizer: laws where kernels run them, and the number of calls."""

from collections.abc import Callable

import pytest
import torch

from functional_optim import (
    Optimizer,
    TorchOptimizer,
    accumulate,
    adamw,
    as_functional_optim,
    chain,
    clip_by_global_norm,
    lookahead,
    sgd,
)
from functional_optim.kernels import ExecutorName
from functional_optim.native import LOOPS
from tests.choices import each
from tests.steady import calls_of

from ..support import noise, params_of, set_grads, twins
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
    test_a_tensor_lr_is_read_in_each_step,
    test_frozen_parameters_join_when_they_are_thawed,
    test_momentum_turned_on_and_off_again,
    test_one_parameter_twice_in_a_group_is_stepped_once,
    test_steps_are_those_of_torch_s_class,
)

STEADY: dict[str, Callable[[], Optimizer]] = {
    "momentum": lambda: sgd(0.1, momentum=0.9),
    "clipped": lambda: chain(clip_by_global_norm(1.0), adamw(0.1)),
    "groups": lambda: adamw(0.1).override((0,), weight_decay=0.5),
    "accumulated": lambda: chain(accumulate(3), adamw(0.1)),
    "slow weights": lambda: chain(sgd(0.1, momentum=0.9), lookahead(3)),
}


@pytest.mark.usefixtures("with_loops")
@pytest.mark.parametrize("name", STEADY)
def test_a_steady_step_calls_as_much_python_for_many_leaves_as_for_few(name: str) -> None:
    counted = []
    for count in (4, 40):
        params = [torch.nn.Parameter(noise(place, 5)) for place in range(count)]
        set_grads(params, 100)
        optimizer = TorchOptimizer(params, STEADY[name]())
        for _ in range(12):
            optimizer.step()
        counted.append([calls_of(optimizer.step) for _ in range(6)])
    assert counted[1] == counted[0]


@pytest.fixture(autouse=True)
def _every_step_is_worth_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("functional_optim.kernels.exact.kernel.WORTH_COMPILING", 1)


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
