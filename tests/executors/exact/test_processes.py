"""Exact loops in several processes: one compilation, loading from disk, and no compiler."""

from pathlib import Path

import pytest
import torch

from functional_optim import adamw
from functional_optim.kernels.cache import Cache
from functional_optim.kernels.exact import kernel, program
from functional_optim.kernels.exact.library import table
from functional_optim.native import cache

from ...choices import case, pairs
from ..support import noise
from .processes import CHAINS, answer, compilations, noting_compiler, started, stepped
from .support import explained

COUNT = 40_000
"""Number of elements that is worth a compiler and several threads."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder for compiled code, and forget all compiled programs."""
    made = tmp_path / "cache"
    made.mkdir(mode=0o700)
    monkeypatch.setenv("FUNCTIONAL_OPTIM_CACHE", str(made))
    monkeypatch.setattr(kernel, "_PROGRAMS", Cache())
    monkeypatch.setattr(kernel, "_WARNED", [])
    monkeypatch.setattr(cache, "_LOADED", {})
    monkeypatch.setattr(cache, "_WARNED", set())
    return made


@pytest.mark.timeout(1200)
def test_processes_that_want_the_same_compile_it_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Concurrent processes compile a loop once. A later process loads loops and their verdicts."""
    there = tmp_path / "there"
    there.mkdir()
    compiler, log = noting_compiler(tmp_path, after=f"(set -- '{there}'/*; [ $# -ge 2 ])")
    environment = {"CXX": str(compiler), "STEPS": str(there)}
    several = [started(one, COUNT, **environment) for one in ("compiled", "auto")]
    answers = [answer(one) for one in several]
    made = compilations(log)
    assert len(made) >= CHAINS and len({*made}) == len(made)
    assert not any(one["imported"] for one in answers)
    monkeypatch.setenv("CXX", environment["CXX"])
    answers.append(stepped("auto", COUNT))  # in this process, which has no loops so far
    assert compilations(log) == made
    wanted = stepped("reference", COUNT)["digest"]
    for found in answers:
        assert found["digest"] == wanted and found["warnings"] == []
        assert "exact; compiled" in found["explained"]


def test_without_a_compiler_there_is_one_warning_and_the_same_bits(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing, failing, or fake compiler gives one warning and the blocked executor."""
    wanted = stepped("reference", COUNT)["digest"]
    for one in pairs(
        compiler=["/nonexistent", "false", "true", 'g++ "', " "], executor=["compiled", "auto"]
    ):
        monkeypatch.setenv("CXX", one["compiler"])
        for forgotten in (kernel._PROGRAMS, kernel._WARNED, cache._WARNED):
            forgotten.clear()
        found = stepped(one["executor"], COUNT)
        with case(**one):
            assert found["digest"] == wanted
            assert "blocked; nothing is compiled" in found["explained"]
            (warning,) = found["warnings"]
            assert warning.startswith("RuntimeWarning: no step is compiled: ")


def test_few_elements_start_no_compiler(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, log = noting_compiler(tmp_path)
    monkeypatch.setenv("CXX", str(compiler))
    found = stepped("auto", 100)
    assert compilations(log) == [] and found["warnings"] == []
    assert "blocked" in found["explained"]


def test_what_is_known_to_be_wrong_is_not_compiled_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table(("Sqrt",), torch.float32)  # compiles its trial of roots once in a process
    compiler, log = noting_compiler(tmp_path)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(program, "is_exact", lambda *_: False)
    for once in range(2):
        kernel._PROGRAMS.clear()
        cache._LOADED.clear()
        said = explained(adamw(), noise(0, 300))
        assert said.startswith("blocked; no loop gives the bits")
        assert len(compilations(log)) == len(program._variants()), once
