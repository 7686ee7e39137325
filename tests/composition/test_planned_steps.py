"""Planned steps of every front-end: the reference's bits, no new plan, and nothing kept alive."""

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from functional_optim import (
    Optimizer,
    accumulate,
    adagrad,
    adamw,
    apply_if_finite,
    chain,
    clip_by_global_norm,
    lookahead,
    partition,
    prodigy,
    rmsprop,
    schedule_free_adamw,
    sgd,
)
from functional_optim.plan import StepPlan, item_steps, tree_steps
from functional_optim.plan.decision import Decision

from ..choices import case, each, pairs
from ..steady import calls_of, noted_calls
from ..tensors import assert_same, normal, watched
from .front_ends import FRONT_ENDS, Groups, Pure
from .trees import COMPOSED, MASKS, PERIOD, grads_at, grads_without, lrs_at, params_of

KINDS: dict[str, Callable[[], Optimizer]] = {
    **COMPOSED,
    "schedule free": lambda: schedule_free_adamw(0.1),
    "prodigy": lambda: prodigy(1.0, d0=1e-2),
    "lookahead of parts": lambda: chain(COMPOSED["parts"](), lookahead(2)),
    "momentum": lambda: sgd(0.1, momentum=0.9),
    "adamw": lambda: adamw(0.1, amsgrad=True),
    "clipped": lambda: chain(clip_by_global_norm(0.1), adamw(0.1)),
    "overridden": lambda: rmsprop(0.1, momentum=0.9).override(("scale",), alpha=0.5),
    "adagrad": lambda: adagrad(0.1),
}
SOME = ("frozen", "adamw", "clip over parts", "batches of parts", "finite batches", "sam")
"""One name of each kind of composition."""
EXECUTORS = ("auto", "blocked", "reference")
RUNS = {
    # A pure step by another executor has no plan.
    (one["name"], one["front_end"], "auto" if one["front_end"] == "update" else one["executor"])
    for one in pairs(name=KINDS, front_end=FRONT_ENDS, executor=EXECUTORS)
}


@pytest.fixture(autouse=True)
def _no_plans_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_steps, "_PLANS", [])


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the calls of functions that a planned step does not need."""
    places = (
        (StepPlan, "__init__"),
        (item_steps, "update"),
        (item_steps, "prepare"),
        (Decision, "add_up"),
    )
    return noted_calls(monkeypatch, places)


@pytest.mark.parametrize(("name", "front_end", "executor"), sorted(RUNS))
def test_planned_steps_are_those_of_the_reference(
    name: str, front_end: str, executor: str, seen: list[str]
) -> None:
    """Gradients are missing in turn, and learning rates change at each step.

    After some periods, a step by kernels makes no plan, and steps no leaf alone.
    """
    optimizer = KINDS[name]()
    reference = optimizer.using(executor="reference")
    run = FRONT_ENDS[front_end](optimizer.using(executor=executor), params_of())
    want = params_of()
    state = reference.init(want)
    for step in range(4 * PERIOD):
        grads, lrs = grads_without(step, MASKS[step % PERIOD]), lrs_at(optimizer, step)
        seen.clear()
        run.step(grads, **lrs)
        assert step < 3 * PERIOD or executor == "reference" or seen == []
        with torch.no_grad():
            want, state = reference.update(want, grads, state, **lrs)
        with case(step=step):
            run.assert_same(want, state)


@pytest.mark.parametrize("name", SOME)
def test_a_tree_is_stepped_purely_and_in_place_by_turns(name: str) -> None:
    optimizer, run = KINDS[name](), FRONT_ENDS["update"](KINDS[name](), params_of())
    want = params_of()
    state = optimizer.init(want)
    for step in range(2 * PERIOD):
        grads = grads_without(step, MASKS[step % PERIOD])
        FRONT_ENDS["update" if step % 3 else "update_"].step(run, grads)
        with torch.no_grad():
            want, state = optimizer.using(executor="reference").update(want, grads, state)
        with case(step=step):
            run.assert_same(want, state)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("name", SOME)
def test_no_plan_and_no_step_holds_what_was_given(name: str, front_end: str) -> None:
    """Gradients are freed after each step, and trees when they are deleted, without a collector."""
    given: list[Any] = []
    gradients: list[Any] = []
    gc.disable()
    try:
        run = FRONT_ENDS[front_end](KINDS[name](), watched(params_of(), given))
        if front_end != "TorchOptimizer":
            run.state = watched(run.state, given)
        for step in range(8):
            run.step(watched(grads_at(step), gradients))
            assert [one() for one in gradients] == [None] * len(gradients)
            if front_end == "update":
                run.params, run.state = watched(run.params, given), watched(run.state, given)
        if front_end != "TorchOptimizer":  # torch's class is in a ring
            assert tree_steps._PLANS
            del run
            assert [one() for one in given] == [None] * len(given)
    finally:
        gc.enable()


def odd(path: Any, shape: Any) -> str:
    return "odd" if int(path[0]) % 2 else "even"


MANY: dict[str, Callable[[], Optimizer]] = {
    "parts": lambda: partition({"odd": sgd(0.1, momentum=0.9), "even": adamw(0.01)}, odd),
    "slow parts": lambda: chain(MANY["parts"](), lookahead(2)),
    "accumulate": lambda: chain(accumulate(3), adamw(0.01)),
    "lookahead": lambda: chain(adamw(0.1), lookahead(3)),
    "schedule free": schedule_free_adamw,
    "finite": lambda: chain(apply_if_finite(3), adamw(0.01)),
    "clipped": lambda: chain(clip_by_global_norm(0.1), adamw(0.01)),
    "clipped parts": lambda: chain(clip_by_global_norm(0.1), MANY["parts"]()),
}


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("name", MANY)
def test_python_is_called_as_often_for_many_leaves_as_for_few(name: str, front_end: str) -> None:
    counted = []
    for count in (4, 40):
        params = {str(k): normal(5, seed=k) for k in range(count)}
        grads = {str(k): normal(5, seed=100 + k) for k in range(count)}
        optimizer = MANY[name]()
        if front_end == "TorchOptimizer":
            groups = Groups(optimizer, params)
            for key, grad in grads.items():
                groups.trained[key].grad = grad
            step: Callable[[], Any] = groups.torch.step
        else:
            step = partial(getattr(optimizer, front_end), params, grads, optimizer.init(params))
        for _ in range(12):
            step()
        counted.append([calls_of(step) for _ in range(6)])
    # For separate tensors, torch's block operations need one more call per gradient.
    assert max(counted[1]) <= max(counted[0]) + 36


def moved(run: Pure, name: str) -> None:
    param = run.trained[name] if isinstance(run, Groups) else run.params[name]
    param.data = param.data.clone() * 2


def replaced(run: Pure, name: str) -> None:
    """Replace the parameter of a tree, or an entry of torch's state."""
    if isinstance(run, Groups):
        key = _matrix_of(run, name)
        run.entries(name)[key] = run.entries(name)[key].clone() * 2
    else:
        run.params[name] = run.params[name].clone() * 2


def state_moved(run: Pure, name: str) -> None:
    field = run.entries(name)[_matrix_of(run, name)]
    field.set_(field.clone() * 2)


def counted_on(run: Pure, name: str) -> None:
    run.entries(name)["step"].fill_(9)
    for key, value in run.entries(name).items():
        if key.endswith(".held") and int(value):
            value.fill_(5)
    if not isinstance(run, Groups):
        for gate in run.state.leaves[name].gates:
            gate.runs.fill_(4)


def cleared(run: Pure, name: str) -> None:
    if isinstance(run, Groups):
        run.entries(name).clear()
    else:
        run.state = run.optimizer.init(run.params)


def _matrix_of(run: Pure, name: str) -> str:
    entries = run.entries(name).items()
    return next(k for k, v in entries if isinstance(v, torch.Tensor) and v.dim() == 2)


@each(
    change=[moved, replaced, state_moved, counted_on, cleared], front_end=FRONT_ENDS, name=SOME[1:]
)
def test_what_somebody_changed_between_steps_is_seen(
    change: Callable[[Pure, str], None], front_end: str, name: str
) -> None:
    def program(*, plans: bool) -> Any:
        run = FRONT_ENDS[front_end](KINDS[name](), params_of())
        for step in range(9):
            if step == 5:
                change(run, "head.weight")
            if not plans:
                run.forget()
            run.step(grads_at(step))
        if isinstance(run, Groups):
            return [run.torch.state_dict()["state"], list(run.trained.values())]
        return [run.params, run.state]

    assert_same(program(plans=True), program(plans=False))


@pytest.mark.parametrize("front_end", ["update", "update_"])
@pytest.mark.parametrize("name", ["batches of parts", "clip over parts", "gates in gates", "adamw"])
def test_trees_of_one_form_have_plans_in_common(name: str, front_end: str, seen: list[str]) -> None:
    """Trees with the same structure share one plan, also if one of them lacks some gradients."""
    reference = KINDS[name]().using(executor="reference")
    runs = [FRONT_ENDS[front_end](KINDS[name](), params_of()) for _ in range(3)]
    wanted = [[params_of(), reference.init(params_of())] for _ in range(3)]
    for step in range(4 * PERIOD):
        number = step % 3 if step else 2
        missing = MASKS[step % PERIOD] if step % 3 == 1 and step < 3 * PERIOD else set()
        grads = grads_without(step, missing)
        seen.clear()
        runs[number].step(grads)
        assert step < 3 * PERIOD or seen == []
        with torch.no_grad():
            wanted[number][:] = reference.update(wanted[number][0], grads, wanted[number][1])
        with case(step=step):
            runs[number].assert_same(*wanted[number])
    assert len(tree_steps._PLANS) == 1
