"""Closed gates: stages after them do not run, and shared scalars are the same for all leaves."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from schedulefree import SGDScheduleFree
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from functional_optim import (
    DistributedOptimizer,
    Optimizer,
    Shared,
    State,
    TorchOptimizer,
    Transform,
    accumulate,
    apply_if_finite,
    chain,
    labels,
    linear,
    matching,
    on_global_step,
    partition,
    prodigy,
    sam,
    schedule_free_adamw,
    schedule_free_sgd,
    sgd,
)
from hooks import OptimizerState
from sharding import ZeroRedundancyOptimizer

from ..choices import case
from ..tensors import assert_same
from ..worlds import world_of_one

NAN = float("nan")


def by_update(optimizer: Optimizer, gradients: Sequence[float]) -> float:
    params, state = torch.ones(1), optimizer.init(torch.ones(1))
    for one in gradients:
        params, state = optimizer.update(params, torch.tensor([one]), state)
    return float(params)


def by_update_(optimizer: Optimizer, gradients: Sequence[float]) -> float:
    params = torch.ones(1)
    state = optimizer.init(params)
    for one in gradients:
        optimizer.update_(params, torch.tensor([one]), state)
    return float(params)


def by_grad(make: Callable[[Any], torch.optim.Optimizer], gradients: Sequence[float]) -> float:
    param = nn.Parameter(torch.ones(1))
    optimizer = make([param])
    for one in gradients:
        param.grad = torch.tensor([one])
        optimizer.step()
    return float(param.detach())


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.param = nn.Parameter(torch.ones(1))

    def forward(self, factor: torch.Tensor) -> torch.Tensor:
        return self.param * factor


def by_step_hook(optimizer: Optimizer, gradients: Sequence[float]) -> float:
    with world_of_one():
        state = OptimizerState(optimizer, DistributedDataParallel(One()))
        for one in gradients:
            state.step_some(list(state.params), [torch.tensor([one])])
        return float(next(iter(state.params.values())).detach())


def by_zero(optimizer: Optimizer, gradients: Sequence[float]) -> float:
    with world_of_one():
        return by_grad(lambda params: ZeroRedundancyOptimizer(params, optimizer), gradients)


def by_workers(optimizer: Optimizer, gradients: Sequence[float]) -> float:
    param = torch.ones(1)
    made = DistributedOptimizer.over_threads(optimizer, {"w": param}, {"w": "ps0"})
    for one in gradients:
        made.step({"w": torch.tensor([one])})
    made.close()
    return float(param)


DOORS: dict[str, Callable[[Optimizer, Sequence[float]], float]] = {
    "update": by_update,
    "update_": by_update_,
    "TorchOptimizer": lambda o, g: by_grad(lambda params: TorchOptimizer(params, o), g),
    "step_hook": by_step_hook,
    "ZeroRedundancyOptimizer": by_zero,
    "DistributedOptimizer": by_workers,
}

RIGHT: dict[str, tuple[Callable[[], Optimizer], Sequence[float], float]] = {
    # Schedule-Free on 4 means of two gradients each: z = 1 - 0.5 k, y = 0.9 x + 0.1 z.
    "batches of Schedule-Free": (
        lambda: chain(accumulate(2), schedule_free_sgd(lr=0.5)),
        [1.0] * 8,
        -0.325,
    ),
    "batches of SAM go up once": (
        lambda: chain(accumulate(2), sam(0.5), sgd(lr=0.1)),
        [1.0] * 2,
        1.5,
    ),
    "SAM does not see what is skipped": (
        lambda: chain(apply_if_finite(9), sam(0.5), sgd(lr=0.1)),
        [1.0, NAN, 1.0],
        0.9,
    ),
    "what is skipped is no part of a batch": (
        lambda: chain(apply_if_finite(9), accumulate(4), sgd(lr=1.0)),
        [1.0, NAN, 1.0, 1.0],
        1.0,
    ),
    "batches of batches": (
        lambda: chain(accumulate(2), accumulate(2), sgd(lr=1.0)),
        [1.0] * 4,
        0.0,
    ),
    "a schedule counts steps, and not calls": (
        lambda: chain(accumulate(4), sgd(lr=on_global_step(linear(1.0, to=0.0, steps=4)))),
        [1.0] * 12,
        1.0 - 1.0 - 0.75 - 0.5,
    ),
    "nor steps that are skipped": (
        lambda: chain(apply_if_finite(9), sgd(lr=on_global_step(linear(1.0, to=0.0, steps=4)))),
        [1.0, NAN, NAN, 1.0, NAN, 1.0],
        1.0 - 1.0 - 0.75 - 0.5,
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_in_every_door_stages_behind_a_closed_gate_do_not_run(name: str) -> None:
    """Every front-end skips the stages after a closed gate (faults 1 and 3)."""
    make, gradients, right = RIGHT[name]
    for door, run in DOORS.items():
        with case(door=door):
            assert run(make(), gradients) == pytest.approx(right, rel=1e-6)


def test_skipped_batches_are_counted_in_a_row() -> None:
    """A call that an earlier gate closes does not reset the count of skipped steps (fault 1)."""
    optimizer = chain(accumulate(2), apply_if_finite(2), sgd())
    with pytest.raises(FloatingPointError, match="3 steps in a row .* not finite"):
        by_update(optimizer, [NAN] * 6)


def test_what_a_closed_gate_hides_raises_nothing() -> None:
    """Prodigy refuses a distance only in a step that uses it, not after a closed gate (fault 1)."""
    optimizer = chain(accumulate(100), prodigy(d0=1e-6))
    assert by_update(optimizer, [1.0] * 99) == 1.0


class LossHyper(NamedTuple):
    pass


class LossShared(NamedTuple):
    loss: float


def loss_combine(shared: LossShared, totals: Any, hyper: LossHyper, *, loss: Any) -> LossShared:
    return LossShared(float(loss))


def loss_coefficients(step: float, hyper: LossHyper, shared: LossShared) -> LossHyper:
    return hyper


def loss_transform(grad: Any, param: Any, state: Any, c: Any) -> Any:
    return grad, state


LOSS = Transform(
    name="watch",
    hyper=LossHyper,
    transform=loss_transform,
    coefficients=loss_coefficients,
    shared=LossShared,
    init_shared=lambda hyper: LossShared(0.0),
    combine=loss_combine,
    extra=("loss",),
)


def test_an_input_is_asked_for_only_where_its_stage_runs() -> None:
    """A step needs an input only if its stage runs. A missing input changes nothing (fault 1)."""
    optimizer = chain(accumulate(2), LOSS(), sgd(lr=1.0))
    params, grad = torch.ones(1), torch.ones(1)
    state = optimizer.init(params)
    optimizer.update_(params, grad, state)
    before = [one.clone() for one in (params, state.leaves.stages[1].accumulated)]
    with pytest.raises(TypeError, match="watch needs 'loss'"):
        optimizer.update_(params, grad, state)
    assert_same([params, state.leaves.stages[1].accumulated], before)
    optimizer.update_(params, grad, state, extra={"loss": 3.0})
    assert optimizer.shared(state)["watch"].loss == 3.0
    assert float(params) == 0.0


def test_a_late_leaf_waits_again_at_a_second_gate() -> None:
    """A leaf without a gradient still steps when a second gate opens (fault 1).

    The leaf keeps the gradients that it had before.
    """
    optimizer = chain(accumulate(2), accumulate(2), sgd(lr=1.0))
    for executor in ("reference", "auto"):
        params: Any = {"a": torch.zeros(1), "b": torch.zeros(1)}
        own = optimizer.using(executor=executor)
        state = own.init(params)
        one = torch.ones(1)
        for grads in ({"a": one, "b": one}, {"a": None, "b": one}, *[{"a": None, "b": one}] * 2):
            params, state = own.update(params, grads, state)
        assert params["b"].item() == -1.0
        assert params["a"].item() == -0.25
        assert int(state.leaves["a"].step) == 1


def test_how_often_gates_have_opened_is_counted_and_kept() -> None:
    """Checkpoints store how often gates opened, and old checkpoints without it load (fault 3)."""
    optimizer = chain(accumulate(2), sgd(lr=on_global_step(linear(1.0, to=0.0, steps=4))))
    param = nn.Parameter(torch.ones(1))
    made = TorchOptimizer([param], optimizer)
    for _ in range(5):
        param.grad = torch.ones(1)
        made.step()
    saved = made.state_dict()
    assert saved["param_groups"][0]["accumulate.shared_opened"] == 2
    again = TorchOptimizer([nn.Parameter(param.detach().clone())], optimizer)
    again.load_state_dict(saved)
    assert again.state_dict()["param_groups"] == saved["param_groups"]
    del saved["param_groups"][0]["accumulate.shared_opened"]  # as in earlier versions
    again.load_state_dict(saved)
    assert again.state_dict()["param_groups"][0]["accumulate.shared_opened"] == 5


def test_a_state_of_an_earlier_version_goes_on_from_its_calls() -> None:
    """A state of an earlier version continues from its count of calls (fault 3)."""
    optimizer = chain(accumulate(2), sgd(lr=1.0))
    params = torch.ones(1)
    state = optimizer.init(params)
    old = State(state.leaves, Shared(torch.tensor(4), state.shared.stages))
    with pytest.raises(ValueError, match="make one step by update"):
        optimizer.update_(params, params, old)
    _, new = optimizer.update(params, params, old)
    assert [int(one) for one in new.shared.opened if one != ()] == [4]


def backbone(optimizer: Optimizer, **options: float) -> Optimizer:
    return optimizer.override(matching("backbone"), **options)


DIFFERENT: dict[str, tuple[Callable[[], Optimizer], dict[str, float]]] = {
    "lr of Schedule-Free SGD": (lambda: schedule_free_sgd(lr=0.5), {"lr": 0.0}),
    "warm-up of Schedule-Free AdamW": (
        lambda: schedule_free_adamw(lr=0.5, warmup_steps=3),
        {"warmup_steps": 5},
    ),
    "r of Schedule-Free SGD": (lambda: schedule_free_sgd(lr=0.5), {"r": 0.5}),
    "batches": (lambda: chain(accumulate(2), sgd()), {"every": 4}),
    "Prodigy": (prodigy, {"growth_rate": 1.02}),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_options_that_shared_numbers_depend_on_are_the_same_in_every_door(name: str) -> None:
    """Every front-end refuses different options where leaves share scalars (fault 2).

    The error says what to use instead, and nothing changes.
    """
    make, options = DIFFERENT[name]
    optimizer, (option,) = backbone(make(), **options), options
    params: Any = {"backbone": torch.zeros(2), "head": torch.zeros(2)}
    leaves = {k: nn.Parameter(v.clone()) for k, v in params.items()}
    groups = [{"params": [leaves["backbone"]], **options}, {"params": [leaves["head"]]}]

    def stepped(made: Any) -> None:
        for one in leaves.values():
            one.grad = torch.ones(2)
        made.step()

    def zero(given: Any, chosen: Optimizer) -> None:
        with world_of_one():
            stepped(ZeroRedundancyOptimizer(given, chosen))

    def hook() -> None:
        model = nn.Module()
        model.backbone, model.head = (nn.Parameter(torch.zeros(2)) for _ in range(2))
        with world_of_one():
            OptimizerState(optimizer, DistributedDataParallel(model))

    doors: dict[str, Callable[[], Any]] = {
        "init": lambda: optimizer.init(params),
        "TorchOptimizer, overrides": lambda: TorchOptimizer(leaves.items(), optimizer),
        "TorchOptimizer, groups": lambda: TorchOptimizer(groups, make()),
        "ZeRO, overrides": lambda: zero(leaves.items(), optimizer),
        "ZeRO, groups": lambda: zero(groups, make()),
        "step_hook": hook,
        "workers": lambda: DistributedOptimizer.over_threads(
            optimizer, params, dict.fromkeys(params, "ps0")
        ),
    }
    for door, run in doors.items():
        with case(door=door), pytest.raises(ValueError, match=f"{option} must be the same"):
            run()
    assert all(not bool(one.any()) for one in (*params.values(), *leaves.values()))


def test_groups_that_come_to_differ_are_refused_at_the_step() -> None:
    """A step refuses groups whose options became different, and changes nothing (fault 2)."""
    a, b = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    made = TorchOptimizer([{"params": [a]}, {"params": [b]}], schedule_free_sgd(lr=0.5))
    for one in (a, b):
        one.grad = torch.ones(1)
    made.step()
    kept = [a.clone(), b.clone()]
    made.param_groups[1]["lr"] = 0.1
    with pytest.raises(ValueError, match="lr must be the same"):
        made.step()
    assert_same([a, b], kept)


def test_parts_have_numbers_of_their_own_as_the_package_has_for_groups() -> None:
    """Parts of a partition have separate shared scalars, like groups in schedulefree (fault 2)."""
    labelled = labels({"few": matching("backbone")}, default="rest")
    parts = {"few": schedule_free_sgd(lr=0.1), "rest": schedule_free_sgd(lr=0.5)}
    params: Any = {"backbone": torch.ones(3), "head": torch.ones(3)}
    leaves = {k: nn.Parameter(v.clone()) for k, v in params.items()}
    groups = [{"params": [leaves["backbone"]], "lr": 0.1}, {"params": [leaves["head"]], "lr": 0.5}]
    package = SGDScheduleFree(groups, foreach=False)
    package.train()
    optimizer = partition(parts, labelled)
    state = optimizer.init(params)
    for step in range(20):
        grads = {k: v - step % 3 for k, v in params.items()}
        for k, one in leaves.items():
            one.grad = grads[k].clone()
        package.step()
        params, state = optimizer.update(params, grads, state)
        for k, one in leaves.items():
            torch.testing.assert_close(params[k], one.detach(), rtol=1e-5, atol=1e-6)


def test_numbers_are_made_by_the_options_of_the_leaves() -> None:
    """Shared scalars use the overridden option if an override covers all leaves (fault 2)."""
    for make, options in (
        (schedule_free_sgd, {"lr": 0.5}),
        (prodigy, {"d0": 0.1}),
        (lambda: chain(accumulate(3), sgd(lr=0.1)), {"every": 2}),
    ):
        params: Any = {"a": torch.ones(2), "b": torch.ones(1)}
        runs = []
        for optimizer in (make().override(matching("*"), **options), make().replace(**options)):
            own, state = params, optimizer.init(params)
            for _ in range(4):
                own, state = optimizer.update(own, {k: v - 3.0 for k, v in own.items()}, state)
            runs.append((own, state))
        assert_same(*runs)
        leaves = [nn.Parameter(one.clone()) for one in params.values()]
        made = TorchOptimizer([{"params": [one], **options} for one in leaves], make())
        for _ in range(4):
            for one in leaves:
                one.grad = one.detach() - 3.0
            made.step()
        assert_same([one.detach() for one in leaves], list(runs[1][0].values()))
