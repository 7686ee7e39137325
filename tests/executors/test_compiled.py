"""Compiled steps: near the reference, compiled once, found again by other processes."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import Optimizer, adam, adamw, chain, clip_by_global_norm, lion, rprop
from functional_optim.executors import compiled
from functional_optim.executors.compiler import compilations
from functional_optim.executors.leaf import Leaf
from functional_optim.testing import check_law
from functional_optim.testing.subject import Subject

from .rules import RULES
from .support import assert_same, bound_steps, copied, gradients, noise, steps_in_place, tree

COMPILED = ("keep_old_param", "selects", "swap")
"""Rules that are compiled here; each takes seconds."""

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("name", COMPILED)
def test_rules_are_near_the_reference(name: str) -> None:
    check_law("compiled is reference", Subject(lambda: RULES[name], dtypes=(torch.float32,)))
    for run in (steps_in_place, bound_steps):
        got = run(RULES[name].using(executor="compile"), tree(0), gradients)
        want = run(RULES[name], tree(0), gradients)
        torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-5)
        for key, leaf in got[1].leaves.items():
            for a, b in zip(leaf.stages, want[1].leaves[key].stages, strict=True):
                torch.testing.assert_close(tuple(a), tuple(b), rtol=1e-5, atol=1e-5)


SPECIAL = (NAN, INF, -INF, 0.0, -0.0, 1e-45, -1e-38, 3e38, -3e38, 1e20, -1e20, 1.0, 2e19, 5e-20)


@pytest.mark.parametrize(
    "optimizer", [adamw(), lion(), rprop(), RULES["selects"]], ids=lambda one: one.stages[-1].name
)
def test_values_that_are_not_finite_stay_so(optimizer: Optimizer) -> None:
    """What overflows, vanishes or is no number does so in every executor."""
    special = torch.tensor(SPECIAL)
    count = len(special)
    params = special.repeat(count)
    grads = special.repeat_interleave(count)
    state, compiled = optimizer.init(params), optimizer.using(executor="compile")
    for _ in range(3):
        want, next_state = optimizer.update(params, grads, state)
        got, got_state = compiled.update(params, grads, state)
        pairs = [(got, want)]
        for a, b in zip(got_state.leaves.stages, next_state.leaves.stages, strict=True):
            pairs += [(x, y) for x, y in zip(a, b, strict=True) if isinstance(x, Tensor)]
        for a, b in pairs:
            assert torch.equal(a.isnan(), b.isnan())
            assert torch.equal(a.isinf(), b.isinf())
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-37, equal_nan=True)
        params, state = want, next_state


def test_compiled_once_for_all_numbers_and_sizes() -> None:
    optimizer = adamw().using(executor="compile")
    params = {"w": noise(0, 100)}
    optimizer.update_(params, {"w": noise(1, 100)}, optimizer.init(params))
    before = compilations()
    for lr in (0.0, 1e-3, torch.tensor(0.1), lambda made: 0.1 / (made + 1)):
        one = optimizer.replace(lr=lr, eps=1e-3, betas=(0.5, 0.75))
        for sizes in ((2,), (3, 5), (70_001,), (64, 1 << 17, 9, 1)):
            params = {str(k): noise(k, size) for k, size in enumerate(sizes)}
            state = one.init(params)
            bound = one.bind(copied(params))
            for step in range(3):
                grads = {key: noise(step, *p.shape) for key, p in params.items()}
                one.update_(params, grads, state)
                bound.step(grads, weight_decay=0.1 * (step + 1))
    assert compilations() == before


def test_one_element_and_none_are_stepped_without_a_compiler() -> None:
    optimizer = chain(clip_by_global_norm(1.0), adam()).using(executor="compile")
    before = compilations()
    for shape in ((), (1,), (0,), (2, 0)):
        param = torch.ones(shape)
        want = optimizer.using(executor="reference").update(param, param, optimizer.init(param))
        assert_same(optimizer.update(param, param, optimizer.init(param)), want)
    assert compilations() == before


def test_float16_is_not_compiled() -> None:
    """Where eps rounds to zero, the reference divides by zero; a program that keeps it does not."""
    optimizer, before = adamw().using(executor="compile"), compilations()
    param, grad = torch.ones(50, dtype=torch.float16), torch.zeros(50, dtype=torch.float16)
    state = optimizer.init(param)
    want = optimizer.using(executor="reference").update(param, grad, state)
    assert bool(want[0].isnan().all())
    torch.testing.assert_close(
        optimizer.update(param, grad, state), want, rtol=0.0, atol=0.0, equal_nan=True
    )
    assert compilations() == before


def test_a_default_device_or_dtype_changes_nothing() -> None:
    optimizer, param = RULES["swap"].using(executor="compile"), noise(0, 50_000)
    state, grad = optimizer.init(param), noise(1, 50_000)
    want = optimizer.update(param, grad, state)
    with torch.device("meta"):
        assert_same(optimizer.update(param, grad, state), want)
    torch.set_default_dtype(torch.float64)
    try:
        assert_same(optimizer.update(param, grad, state), want)
    finally:
        torch.set_default_dtype(torch.float32)


def test_memory_does_not_grow() -> None:
    """Handles that are given to a library belong to it: none is left."""
    optimizer = RULES["swap"].using(executor="compile")
    bounds = [optimizer.bind({"w": noise(0, count)}) for count in (1000, 1 << 15)]
    grads = [{"w": noise(1, count)} for count in (1000, 1 << 15)]

    def steps(count: int) -> int:
        for _ in range(count):
            for bound, given in zip(bounds, grads, strict=True):
                bound.step(given)
        return resident()

    first = steps(500)
    assert steps(3000) - first < 1 << 21


def test_small_numbers_stay_small_numbers() -> None:
    """Some compilers make a library set all of its process to take them for zero."""
    optimizer = RULES["swap"].using(executor="compile")
    for count in (9, 1 << 16):
        param = torch.ones(count)
        optimizer.update(param, param, optimizer.init(param))
        assert bool((torch.full((64,), 1e-40) * 0.5 > 0).all())


def resident() -> int:
    """Bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


SCRIPT = textwrap.dedent(
    """
    import hashlib, json, sys
    import torch
    from tests_executors.rules import RULES
    from functional_optim.executors import compiler

    name, executor = sys.argv[1], sys.argv[2]
    optimizer = RULES[name].using(executor=executor)
    param = torch.linspace(-1, 1, 1 << 15)
    bound = optimizer.bind({"w": param})
    for step in range(3):
        bound.step({"w": torch.linspace(-2, 1, 1 << 15) * (step + 1)})
    if executor == "auto" and len(sys.argv) == 3:
        assert bound.ready(120)
    print(json.dumps({
        "compilations": compiler.compilations(),
        "thread": compiler.COMPILER._thread is not None,
        "process": compiler.COMPILER._process is not None,
        "imported": "torch._inductor" in sys.modules,
        "explain": bound.explain(),
        "digest": hashlib.sha256(param.numpy().tobytes()).hexdigest(),
    }))
    """
)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder from which another process can import the rules of these tests."""
    (tmp_path / "tests_executors").symlink_to(Path(__file__).parent, target_is_directory=True)
    return tmp_path


def started(package: Path, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", SCRIPT, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(package), "OMP_NUM_THREADS": "1", **environment},
    )


def answer(process: "subprocess.Popen[str]") -> dict[str, Any]:
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    assert errors == ""
    found: dict[str, Any] = json.loads(output)
    return found


@pytest.mark.parametrize("executor", ["compile", "auto"])
def test_another_process_finds_it_on_disk(executor: str, package: Path) -> None:
    optimizer = RULES["swap"].using(executor="compile")
    optimizer.update(noise(0, 9), noise(1, 9), optimizer.init(noise(0, 9)))
    found = answer(started(package, "swap", executor))
    assert found["compilations"] == 0
    assert not found["thread"] and not found["process"] and not found["imported"]
    assert "compile" in found["explain"]


@pytest.mark.timeout(600)
def test_processes_that_want_the_same_compile_it_once(package: Path, tmp_path: Path) -> None:
    cache = {"FUNCTIONAL_OPTIM_CACHE": str(tmp_path / "cache")}
    both = [started(package, "swap", executor, **cache) for executor in ("compile", "auto")]
    found = [answer(one) for one in both]
    assert sum(one["compilations"] for one in found) == 1
    third = answer(started(package, "swap", "compile", **cache))
    assert third["compilations"] == 0
    assert found[0]["digest"] == third["digest"]


def test_a_process_may_end_while_it_compiles(package: Path, tmp_path: Path) -> None:
    cache = {"FUNCTIONAL_OPTIM_CACHE": str(tmp_path / "cache")}
    found = answer(started(package, "swap", "auto", "at once", **cache))
    assert found["thread"]
    assert "blocked; it is being compiled" in found["explain"]
    assert not found["imported"]  # in this process, that is
    assert not [file for file in (tmp_path / "cache").iterdir() if file.suffix == ".json"]


@pytest.mark.parametrize("count", [2, 15, 16, 33, 300])
def test_a_gradient_is_not_written_to(count: int) -> None:
    """Nor is it where the end of a lane goes through the program as a copy."""
    optimizer = RULES["swap"].using(executor="compile")
    param, grad = noise(0, count), noise(1, count)
    version = grad._version
    optimizer.update_(param, grad, optimizer.init(param))
    optimizer.update(param, grad, optimizer.init(param))
    assert grad._version == version


def test_on_an_accelerator_lanes_begin_where_compiled_programs_can_read() -> None:
    """Or the program would step a copy, and the step would be lost."""

    class Lying:
        """A tensor of an accelerator, as far as it is looked at."""

        dtype = torch.float32
        device = torch.device("cuda")

        def __init__(self, address: int) -> None:
            self.data_ptr = lambda: address

        def numel(self) -> int:
            return 1 << 20

    for address, refused in ((64, False), (68, True)):
        lane: Any = Leaf(Lying(64), Lying(address), (), (), "w")  # type: ignore[arg-type]
        assert ("begins at 16 bytes" in (compiled._unfit((), lane) or "")) == refused
