"""Exact loops across processes: compiled once, found on disk, forked, without a compiler."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from functional_optim import adamw, lion
from functional_optim.executors.exact import kernel, program
from functional_optim.native import cache

from ..rules import RULES
from ..support import copied, noise
from .processes import answer, compilations, noting_compiler, started
from .support import assert_equal, assert_steps_are_equal, explained

COUNT = 40_000
"""Elements that are worth a compiler, and several threads."""
CHAINS = 2
"""How many chains a process steps."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder for what is compiled, empty."""
    made = tmp_path / "cache"
    made.mkdir(mode=0o700)
    return made


@pytest.fixture
def wanted() -> str:
    """What these steps make of the parameter."""
    found: str = answer(started("reference", COUNT))["digest"]
    return found


@pytest.mark.parametrize("executor", ["compile", "auto"])
def test_a_second_process_compiles_nothing(
    executor: str, folder: Path, tmp_path: Path, wanted: str
) -> None:
    """It finds loops, and that they are right, on disk."""
    compiler, log = noting_compiler(tmp_path)
    environment = {"CXX": str(compiler), "FUNCTIONAL_OPTIM_CACHE": str(folder)}
    first = answer(started(executor, COUNT, **environment))
    made = compilations(log)
    second = answer(started(executor, COUNT, **environment))
    assert made == compilations(log) >= CHAINS
    for found in (first, second):
        assert found["digest"] == wanted and found["warnings"] == [] and not found["imported"]
        assert "exact; compiled" in found["explained"]


@pytest.mark.timeout(600)
def test_processes_that_want_the_same_compile_it_once(
    folder: Path, tmp_path: Path, wanted: str
) -> None:
    compiler, log = noting_compiler(tmp_path, seconds=0.3)
    environment = {"CXX": str(compiler), "FUNCTIONAL_OPTIM_CACHE": str(folder)}
    alone = answer(started("compile", COUNT, **environment))
    made = compilations(log)
    for entry in folder.iterdir():
        entry.unlink()
    several = [started(one, COUNT, **environment) for one in ("compile", "auto", "compile")]
    for found in (alone, *map(answer, several)):
        assert found["digest"] == wanted
        assert "exact; compiled" in found["explained"]
    assert compilations(log) == 2 * made


@pytest.mark.parametrize("executor", ["compile", "auto"])
@pytest.mark.parametrize("compiler", ["/nonexistent", "false", "true", 'g++ "', " "])
def test_without_a_compiler_there_is_one_warning_and_the_same_bits(
    executor: str, compiler: str, folder: Path, wanted: str
) -> None:
    """Also with what only says that it compiles, and with what is no command."""
    found = answer(started(executor, COUNT, CXX=compiler, FUNCTIONAL_OPTIM_CACHE=str(folder)))
    assert found["digest"] == wanted
    assert "blocked; nothing is compiled" in found["explained"]
    assert len(found["warnings"]) == 1, found["warnings"]
    assert found["warnings"][0].startswith("RuntimeWarning: no step is compiled: ")


def test_few_elements_start_no_compiler(folder: Path, tmp_path: Path) -> None:
    compiler, log = noting_compiler(tmp_path)
    environment = {"CXX": str(compiler), "FUNCTIONAL_OPTIM_CACHE": str(folder)}
    found = answer(started("auto", 100, **environment))
    assert compilations(log) == 0 and found["warnings"] == []
    assert "blocked" in found["explained"]


def test_what_is_known_to_be_wrong_is_not_compiled_again(
    monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path
) -> None:
    compiler, log = noting_compiler(tmp_path)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("FUNCTIONAL_OPTIM_CACHE", str(folder))
    monkeypatch.setattr(program, "is_exact", lambda *_: False)
    for once in range(2):
        monkeypatch.setattr(kernel, "_PROGRAMS", {})
        monkeypatch.setattr(cache, "_LOADED", {})
        said = explained(adamw(), noise(0, 300))
        assert said.startswith("blocked; no loop gives the bits")
        assert compilations(log) == len(program._variants()), once


def in_a_child(work: Any, seconds: int = 20) -> int:
    """Run it in a forked child; its exit code, or minus the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # no handler in Python would be called
            signal.alarm(seconds)
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.fixture
def two_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


FORKED = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # from Python 3.12 on


@FORKED
@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("executor", ["compile", "auto"])
@pytest.mark.parametrize("made", [adamw, lion])
def test_a_forked_child_steps_on(made: Any, executor: Any, bound: bool, two_threads: None) -> None:
    """Where its parent has computed in several threads, which the child has not.

    Numbers that change with the step, or do not: then a call is made once for many steps.
    """
    optimizer = made(0.1).using(executor=executor)
    params, grad = [noise(0, COUNT)], [noise(1, COUNT)]
    state = optimizer.init(params)
    held = optimizer.bind(params) if bound else None
    if held is not None:
        held.gradients[0].copy_(grad[0])

    def step() -> None:
        if held is None:
            optimizer.update_(params, grad, state)
        else:
            held.step(held.gradients)

    for _ in range(4):
        step()
    before = copied((params, state if held is None else held.state))
    want = optimizer.using(executor="blocked").update(before[0], grad, before[1])

    def child() -> None:
        step()
        torch.set_num_threads(1)  # torch itself would wait for threads that are not there
        assert_equal((params, state if held is None else held.state), want)

    assert in_a_child(child) == 0
    assert_equal((params, state if held is None else held.state), before)
    step()
    assert_equal((params, state if held is None else held.state), want)


@FORKED
def test_a_child_compiles_that_was_forked_while_another_thread_compiled(
    monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path
) -> None:
    """Whose turn it was, nobody ends in the child."""
    compiler, _ = noting_compiler(tmp_path, seconds=1.0)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("FUNCTIONAL_OPTIM_CACHE", str(folder))
    began = threading.Event()
    tried = program._tried

    def noted(*given: Any) -> Any:
        began.set()
        return tried(*given)

    monkeypatch.setattr(program, "_tried", noted)
    monkeypatch.setattr(kernel, "_PROGRAMS", {})
    optimizer = RULES["rotate"].using(executor="compile")
    other = threading.Thread(target=lambda: explained(optimizer, noise(0, COUNT)))
    other.start()
    assert began.wait(60)
    swap = RULES["swap"]
    code = in_a_child(
        lambda: assert_steps_are_equal(swap, noise(0, 300), lambda step: noise(step + 1, 300))
    )
    other.join()
    assert code == 0
