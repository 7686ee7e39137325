"""A law: ``explain`` names the kernels that run."""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from functional_optim import (
    Optimizer,
    TorchOptimizer,
    accumulate,
    adamw,
    chain,
    clip_by_global_norm,
    freeze,
    if_any,
    lamb,
    muon,
    partition,
    sgd,
    with_shape,
)
from functional_optim.kernels.exact.program import LoopProgram
from functional_optim.kernels.foreach import ForeachKernel
from functional_optim.kernels.leaf_program import LeafProgram
from functional_optim.kernels.reference import ReferenceExecutor
from functional_optim.storage import stored

from ..choices import case, each
from .support import noise

OPTIMIZERS: dict[str, Callable[[], Optimizer]] = {
    "sgd": lambda: sgd(0.1),
    "adamw": lambda: adamw(0.1),
    "clipped": lambda: chain(clip_by_global_norm(0.5), adamw(0.1)),
    "accumulated": lambda: chain(accumulate(1), adamw(0.1)),
    "lamb": lambda: lamb(0.1),
    "divided": lambda: partition(
        {"matrices": muon(0.1), "rest": adamw(0.1)},
        lambda path, shape: "matrices" if len(shape) == 2 else "rest",
    ),
    "overridden": lambda: adamw(0.1).override(if_any(with_shape(ndim=1)), lr=0.2),
    "8 bits": lambda: stored(adamw(0.1), state="int8"),
}
SHAPES: dict[str, list[tuple[int, ...]]] = {
    "one small": [(5, 3)],
    "small": [(5, 3), (4,), (7, 2)],
    "small and large": [(5, 3), (4,), (300, 300)],
    "large": [(300, 300), (70_000,)],
}
RAN: dict[str, tuple[Any, str]] = {
    "exact": (LoopProgram, "bound"),
    "blocked": (ForeachKernel, "bind"),
    "foreach": (ForeachKernel, "bind_lists"),
    "reference": (ReferenceExecutor, "update_"),
    "one by one": (LeafProgram, "arguments"),
}


@contextmanager
def kernels_seen() -> Iterator[set[str]]:
    """Record the names of the kernels that run."""
    seen: set[str] = set()

    def noting(name: str, before: Any) -> Any:
        def called(*given: Any, **options: Any) -> Any:
            found = before(*given, **options)
            if not isinstance(found, str):  # a string says why the kernel does not run
                seen.add(name)
            return found

        return called

    with ExitStack() as stack:
        for name, (owner, attribute) in RAN.items():
            before = getattr(owner, attribute)
            stack.enter_context(mock.patch.object(owner, attribute, noting(name, before)))
        yield seen


def said_by(text: str) -> set[str]:
    """Return the kernels that an explanation names, one in each line."""
    lines = [re.sub(r"^(param_groups\[\d+\]: |  )", "", line) for line in text.splitlines()]
    lines = [line for line in lines if line[0].isdigit()]  # the other lines are chains
    found = [re.split(r"[;,]", line.partition(": ")[2])[0] for line in lines]
    return {one for one in found if one != "frozen"}


@each(
    name=OPTIMIZERS,
    shapes=SHAPES,
    executor=["auto", "reference", "blocked"],
    dtype=[torch.float32, torch.bfloat16],
    steps=[2, 400],
)
def test_it_is_what_runs(
    name: str, shapes: str, executor: Any, dtype: torch.dtype, steps: int
) -> None:
    """``explain`` is right after two steps, and after enough steps to compile a small loop."""
    if name == "8 bits" and dtype != torch.float32:
        return  # refused
    if steps > 2 and "large" in shapes:
        steps = 3
    params = [torch.nn.Parameter(noise(k, *one).to(dtype)) for k, one in enumerate(SHAPES[shapes])]
    optimizer = TorchOptimizer(params, OPTIMIZERS[name]().using(executor=executor))
    for k, param in enumerate(params):
        param.grad = noise(10 + k, *param.shape).to(dtype)
    for _ in range(steps):
        optimizer.step()
    said = optimizer.explain()
    with kernels_seen() as seen:
        optimizer.step()
    with case(said=said):
        assert seen == said_by(said)


def require_explained(optimizer: Optimizer, params: dict[str, torch.Tensor]) -> set[str]:
    """Require that ``explain`` names the kernels of a second step of a tree, and return them."""
    grads = {key: noise(10, *one.shape) for key, one in params.items()}
    state = optimizer.init(params)
    optimizer.update_(params, grads, state)
    said = optimizer.explain(params)
    with kernels_seen() as seen:
        optimizer.update_(params, grads, state)
    with case(said=said):
        assert seen == said_by(said)
    return seen


@each(name=OPTIMIZERS, shapes=SHAPES, executor=["auto", "reference", "blocked"])
def test_it_is_what_runs_in_a_step_of_a_tree(name: str, shapes: str, executor: Any) -> None:
    """``explain`` is right for a step of a tree, also if parameters have different chains."""
    optimizer = OPTIMIZERS[name]().using(executor=executor)
    params = {str(k): noise(k, *one) for k, one in enumerate(SHAPES[shapes])}
    require_explained(optimizer, params)


@each(name=["sgd", "adamw", "clipped"], executor=["auto", "reference", "blocked"])
def test_it_is_what_runs_on_parameters_with_gaps(name: str, executor: Any) -> None:
    """No kernel steps a part of a larger tensor."""
    optimizer = OPTIMIZERS[name]().using(executor=executor)
    params = {"gaps": noise(0, 4, 6)[:, ::2], "b": noise(1, 4), "c": noise(2, 5)}
    assert "reference" in require_explained(optimizer, params)


def test_parameters_that_differ_in_their_stages_are_explained_by_chain() -> None:
    optimizer = chain(
        accumulate(2),
        partition(
            {"matrices": muon(0.1), "rest": sgd(0.1)},
            lambda path, shape: "matrices" if len(shape) == 2 else "rest",
        ),
        freeze(("still",)),
    )
    params = {"w": torch.ones(3, 3), "b": torch.ones(3), "still": torch.ones(2)}
    *lines, last = optimizer.explain(params).splitlines()
    assert last.startswith("a step waits at accumulate: it is a gate")
    assert [line.startswith("  ") for line in lines] == [False, True] * 3
    assert lines[0].startswith("chain(accumulate(every=2), sgd(lr=0.1")
    assert lines[2] == "freeze()" and lines[3].endswith("frozen")
    assert lines[4].startswith("chain(accumulate(every=2), muon(lr=0.1")
