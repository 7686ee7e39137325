"""Train: one optimizer on one problem, with one seed."""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.training import contestants
from benchmarks.training.tasks import TASKS, Instance, Params, Task
from functional_optim import Optimizer, hutchinson
from functional_optim.plan.leaf_inputs import input_names

SEEDS = (0, 1, 2)
"""Seeds of the runs that are judged."""
FIRST_RATE = 1e-2
"""Learning rate that a search tries first. The nearest other rates follow."""
CHOICE = 100
"""Seed of the runs that choose a learning rate."""
POINTS = 40
"""Number of scores that are taken during a run."""

Build = Callable[[float | None, Params], Optimizer]


class Run(NamedTuple):
    """Number of steps of a run, and the scores after them."""

    steps: list[int]
    scores: list[float]

    @property
    def last(self) -> float:
        """Return the last score; infinity if it is NaN."""
        return self.scores[-1]


class Result(NamedTuple):
    """Result of one algorithm on one problem."""

    rate: float | None
    runs: list[Run]


def train(optimizer: Optimizer, given: Instance, steps: int) -> Run:
    """Train by the pure function. Stop if a score is NaN."""
    params, state = given.params, optimizer.init(given.params)
    every = max(1, steps // POINTS)
    run = Run([0], [_score(given, params)])
    for step in range(1, steps + 1):
        grads, arguments = evaluated(optimizer, _loss_of(given, step), params)
        params, state = optimizer.update(params, grads, state, **arguments)
        if step % every == 0 or step == steps:
            seen = optimizer.view(params, state) if hasattr(optimizer, "view") else params
            run.steps.append(step)
            run.scores.append(_score(given, seen))
            if math.isinf(run.last):
                break
    return run


def _loss_of(given: Instance, step: int) -> Callable[[Params], torch.Tensor]:
    return lambda params: given.loss(params, step)


def evaluated(
    optimizer: Any, loss: Callable[[Params], torch.Tensor], params: Params
) -> tuple[Params | None, dict[str, Any]]:
    """Return the gradients, and the other arguments of the optimizer's step."""
    if "value_and_grad" in inspect.signature(optimizer.update).parameters:
        return None, {"value_and_grad": functools.partial(value_and_grad, loss)}
    inputs = input_names(optimizer.links)
    if "hessian" in inputs:
        with sdpa_kernel(SDPBackend.MATH):  # other kernels have no second derivative
            grads, hessian = hutchinson(loss, params)
        return grads, {"extra": {"hessian": hessian}}
    grads = value_and_grad(loss, params)[1]
    if any(one.stage.name in contestants.SPARSE for one in optimizer.links):
        grads = {name: one.to_sparse(1) for name, one in grads.items()}
    return grads, {}


def value_and_grad(
    loss: Callable[[Params], torch.Tensor], params: Params
) -> tuple[torch.Tensor, Params]:
    """Return the loss and its gradients."""
    leaves = {name: one.detach().requires_grad_() for name, one in params.items()}
    value = loss(leaves)
    grads = torch.autograd.grad(value, list(leaves.values()))
    return value.detach(), dict(zip(leaves, grads, strict=True))


def _score(given: Instance, params: Params) -> float:
    with torch.no_grad():
        score = given.score(params)
    return score if math.isfinite(score) else math.inf


def best_rate(build: Build, task: Task) -> float:
    """Return the rate with the least score after half the steps. Use a seed that is not judged."""

    def last(rate: float) -> float:
        torch.manual_seed(CHOICE)
        given = task.build(CHOICE)
        return train(build(rate, given.params), given, task.steps // 2).last

    return min(task.rates, key=last)


def judged(build: Build, task: Task, rate: float | None) -> Result:
    """Train with each seed."""
    return Result(rate, [_seeded(build, task, rate, seed) for seed in SEEDS])


def _seeded(build: Build, task: Task, rate: float | None, seed: int) -> Run:
    given = task.build(seed)
    torch.manual_seed(seed)
    return train(build(rate, given.params), given, task.steps)


def first_passing(build: Build, task: Task) -> Result:
    """Return the runs of the first learning rate with which all seeds pass.

    If there is none, return those of the rate whose first seed has the least score.
    """
    firsts: dict[float, Run] = {}
    for rate in sorted(task.rates, key=lambda rate: abs(math.log(rate / FIRST_RATE))):
        runs: list[Run] = []
        for seed in SEEDS:
            runs.append(_seeded(build, task, rate, seed))
            if runs[-1].last > task.threshold:
                break
        else:
            return Result(rate, runs)
        firsts[rate] = runs[0]
    best = min(firsts, key=lambda rate: firsts[rate].last)
    return Result(best, [firsts[best], *(_seeded(build, task, best, one) for one in SEEDS[1:])])


def results_of(name: str) -> dict[str, Result]:
    """Train one algorithm on all problems that it can take."""
    torch.set_num_threads(1)

    def build(rate: float | None, params: Params) -> Optimizer:
        return contestants.build(name, rate, params)

    found = {}
    for key, task in TASKS.items():
        shapes = [one.ndim for one in task.build(CHOICE).params.values()]
        if 2 in shapes or not contestants.takes_matrices_only(name):
            rate = best_rate(build, task) if contestants.has_rate(name) else None
            found[key] = judged(build, task, rate)
    return found


def searched(name: str, key: str) -> Result:
    """Train one algorithm on one problem at other learning rates, until all seeds pass."""
    torch.set_num_threads(1)

    def build(rate: float | None, params: Params) -> Optimizer:
        return contestants.build(name, rate, params)

    return first_passing(build, TASKS[key])
