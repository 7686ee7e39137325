"""Custom executors. The package asks an executor, and does not check its class or name."""

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import Optimizer, TorchOptimizer, adamw, chain, clip_by_global_norm, muon, sgd
from functional_optim.core.stage import Stage
from functional_optim.kernels import (
    EXECUTORS,
    Executor,
    KernelExecutor,
    Leaf,
    ReferenceExecutor,
    Scalars,
    Stepped,
    register_executor,
)

from ...choices import case, pairs
from ..support import assert_same, noise

SOURCE = Path(__file__).parents[3] / "src"
DOOR = "functional_optim/kernels/table.py"
"""Module that registers executors, the only one that checks their class."""
DECLARED = "functional_optim/testing/combinations.py"
"""Module that lists by name what each executor takes; a test checks the list."""


def parsed(words: set[str]) -> Iterator[tuple[str, ast.Module]]:
    """Yield the modules whose text contains one of these words."""
    for file in sorted(SOURCE.rglob("*.py")):
        text = file.read_text("utf-8")
        if any(word in text for word in words):
            yield str(file.relative_to(SOURCE)), ast.parse(text)


def kinds() -> set[str]:
    """Return the names of all classes of executors and kernels."""
    pattern = re.compile(r"^class (\w*(?:Executor|Kernel|Chunks))\b", re.MULTILINE)
    files = (SOURCE / "functional_optim" / "kernels").rglob("*.py")
    return {name for file in files for name in pattern.findall(file.read_text("utf-8"))}


def classes_looked_at(module: ast.Module, names: set[str]) -> list[str]:
    """Return the expressions that check one of these classes: isinstance, type(), or a pattern."""

    def named(node: ast.AST) -> bool:
        texts = (getattr(one, "id", getattr(one, "attr", "")) for one in ast.walk(node))
        return any(text in names for text in texts)

    found = []
    for node in ast.walk(module):
        if isinstance(node, ast.Call):
            function = getattr(node.func, "id", "")
            if function in {"isinstance", "issubclass"} and named(node.args[1]):
                found.append(ast.unparse(node))
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(named(side) and isinstance(side, ast.Name | ast.Attribute) for side in sides):
                found.append(ast.unparse(node))
        elif isinstance(node, ast.MatchClass) and named(node.cls):
            found.append(ast.unparse(node))
    return found


def names_looked_at(module: ast.Module) -> list[str]:
    """Return the comparisons of an executor with the name of an executor."""
    found = []
    for node in ast.walk(module):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            texts = {one.value for one in sides if isinstance(one, ast.Constant)}
            if texts & {*EXECUTORS} and "executor" in ast.unparse(node):
                found.append(ast.unparse(node))
    return found


def test_nobody_looks_at_the_class_of_an_executor_or_kernel() -> None:
    names = kinds()
    assert {"Executor", "KernelExecutor", "ReferenceExecutor", "ExactKernel", "Chunks"} <= names
    found = {name: seen for name, one in parsed(names) if (seen := classes_looked_at(one, names))}
    assert found == {DOOR: ["isinstance(executor, Executor)"]}


def test_nobody_looks_at_its_name() -> None:
    quoted = {f'"{name}"' for name in EXECUTORS}
    found = {name for name, module in parsed(quoted) if names_looked_at(module)}
    assert found <= {DECLARED}


@pytest.mark.parametrize(
    "text",
    [
        "isinstance(self._executor, KernelExecutor)",
        "isinstance(it, (int, executors.KernelExecutor))",
        "issubclass(type(it), KernelExecutor)",
        "type(it) is KernelExecutor",
        "match it:\n    case KernelExecutor():\n        pass",
    ],
)
def test_such_looks_are_seen(text: str) -> None:
    assert len(classes_looked_at(ast.parse(text), {"KernelExecutor"})) == 1


def test_comparisons_of_names_are_seen() -> None:
    assert names_looked_at(ast.parse("optimizer.executor != 'reference'"))
    assert not names_looked_at(ast.parse("name == 'reference'; executor is None"))


class Counting(Executor):
    """Reference executor that counts the leaves it steps, and does not explain itself."""

    def __init__(self) -> None:
        self._reference = ReferenceExecutor()
        self.leaves = 0

    def update(
        self, stages: Sequence[Stage], leaves: Sequence[Leaf], measured: Sequence[Tensor]
    ) -> list[Stepped]:
        self.leaves += len(leaves)
        return self._reference.update(stages, leaves, measured)

    def update_(
        self, stages: Sequence[Stage], leaves: Sequence[Leaf], measured: Sequence[Tensor]
    ) -> None:
        self.leaves += len(leaves)
        self._reference.update_(stages, leaves, measured)

    def measure(
        self, stages: Sequence[Stage], leaves: Sequence[Leaf], measured: Sequence[Tensor]
    ) -> Tensor:
        return self._reference.measure(stages, leaves, measured)

    def require(self, stages: Sequence[Stage], leaves: Sequence[Leaf]) -> None:
        self._reference.require(stages, leaves)


@pytest.fixture
def counting() -> Iterator[Counting]:
    """Register a custom executor as "counting"."""
    made = Counting()
    register_executor("counting", made)
    yield made
    del EXECUTORS["counting"]


CHAINS = {
    "adamw": adamw(0.1),
    "clipped": chain(clip_by_global_norm(0.5), sgd(0.1, momentum=0.9)),
}


def trained(optimizer: Optimizer, way: str) -> Any:
    params = [torch.nn.Parameter(noise(k, 3, k + 2)) for k in range(2)]
    state = optimizer.init(params)
    bound = optimizer.bind(params) if way == "bind" else None
    front_end: Any = TorchOptimizer(params, optimizer) if way == "TorchOptimizer" else None
    for step in range(3):
        grads = [noise(10 * step + k, 3, k + 2) for k in range(2)]
        if way == "update":
            params, state = optimizer.update(params, grads, state)
        elif way == "update_":
            optimizer.update_(params, grads, state)
        elif bound is not None:
            bound.step(grads)
        else:
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
            front_end.step()
    return [param.detach() for param in params]


def test_an_executor_of_a_user_s_steps_every_front_end(counting: Counting) -> None:
    for one in pairs(name=list(CHAINS), way=["update", "update_", "bind", "TorchOptimizer"]):
        optimizer = CHAINS[one["name"]]
        with case(**one):
            before = counting.leaves
            got = trained(optimizer.using(executor="counting"), one["way"])
            assert counting.leaves == before + 6, "each leaf, whole, at each of three steps"
            assert_same(got, trained(optimizer, one["way"]))


def test_what_it_does_not_say_is_said_of_it(counting: Counting) -> None:
    optimizer, params = adamw(0.1).using(executor="counting"), [noise(0, 3)]
    assert optimizer.explain(params).endswith(": counting, leaf by leaf")
    assert optimizer.bind([noise(0, 3)]).explain().endswith(": counting, leaf by leaf")
    with pytest.raises(ValueError, match="got executor='counting', which takes coefficients as P"):
        optimizer.bind(params, capturable=True)


def test_a_name_is_given_once() -> None:
    with pytest.raises(ValueError, match="there is an executor 'auto' already; give another name"):
        register_executor("auto", Counting())
    with pytest.raises(TypeError, match="must be a str, got 3"):
        register_executor(3, Counting())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="derived from functional_optim.kernels.Executor, got"):
        register_executor("bare", object())  # type: ignore[arg-type]
    assert type(EXECUTORS["auto"]) is KernelExecutor


def test_executors_say_who_they_are() -> None:
    said = {
        name: (one.exact, one.in_chunks(adamw().stages) is not None, one.takes_dtensors)
        for name, one in EXECUTORS.items()
    }
    by_chunks = ("auto", "blocked", "compiled", "fused", "prefer_fused")
    chunks = dict.fromkeys(by_chunks, (True, True, False))
    assert said == {**chunks, "reference": (True, False, True)}
    assert not any(one.in_chunks(muon().stages) for one in EXECUTORS.values())
    able = {name for name, one in EXECUTORS.items() if one.taking(Scalars.DEVICE)}
    assert able == {"auto", "compiled", "reference"}
    assert all(one.taking(Scalars.HOST) is one for one in EXECUTORS.values())
