"""Whatever a compiler does, no step is lost, and one warning says why it is slower."""

import os
import signal
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest

from functional_optim.executors import compiler
from functional_optim.executors.compiler import Compiler

from .compiler_support import (
    COUNT,
    OPTIMIZER,
    files,
    finish,
    one_warning,
    params,
    require_ended,
    require_right,
    stepped,
    until,
)
from .support import assert_same, noise


class TestFailures:
    """Whatever the compiler does, steps are made by the blocked executor."""

    @pytest.mark.parametrize("executor", ["compile", "auto"])
    @pytest.mark.parametrize(
        ("mode", "match"),
        [
            ("error", "no such header"),
            ("exit", "the compiling process ended with status 3"),
            ("nothing", "the compiler left nothing in"),
            ("half", "the compiler left nothing in"),
        ],
    )
    def test_it_fails(
        self, executor: Any, mode: str, match: str, fresh: Compiler, fake: Any
    ) -> None:
        started = fake(mode)
        with one_warning(match):
            first = stepped(executor)
            finish(fresh)
            again = stepped(executor)
        blocked = stepped("blocked")
        assert_same(first, blocked)
        assert_same(again, blocked)
        assert len(started) == fresh.compilations == 1

    def test_it_is_left_alone_once_it_has_failed(self, fresh: Compiler, fake: Any) -> None:
        fake("error")
        with one_warning("no such header"):
            for _ in range(3):
                stepped("compile")
        status, reason = fresh.status(next(iter(fresh._jobs)))
        assert (status, reason) == ("failed", "CppCompileError: no such header")

    def test_a_warning_that_is_an_error_comes_before_anything_is_written(
        self, fresh: Compiler, fake: Any
    ) -> None:
        fake("error")
        optimizer, param = OPTIMIZER.using(executor="compile"), params()
        state = optimizer.init(param)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(RuntimeWarning, match="no such header"):
                optimizer.update_(param, param, state)
            assert_same((param, state), (params(), optimizer.init(params())))
            optimizer.update_(param, params(), state)  # and none of the later ones
        assert int(state.leaves.step) == 1

    @pytest.mark.parametrize("executor", ["compile", "auto"])
    def test_it_takes_too_long(
        self, executor: Any, fresh: Compiler, fake: Any, monkeypatch: Any, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("FUNCTIONAL_OPTIM_COMPILE_TIMEOUT", "0.7")
        [started] = [fake("hang")]
        with one_warning("the compiler took longer than 0.7 s"):
            got = stepped(executor)
            finish(fresh)
            stepped(executor)
        assert_same(got, stepped("blocked"))
        assert started[0].returncode == -signal.SIGKILL
        require_ended(int((tmp_path / "child").read_text()))  # the compiler that it had started
        assert not list((tmp_path / "cache").glob("*-left"))

    def test_it_is_killed_in_the_middle(self, fresh: Compiler, fake: Any, tmp_path: Path) -> None:
        started = fake("hang")

        def kill() -> None:
            until(lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text() != "")
            os.kill(started[0].pid, signal.SIGKILL)

        thread = threading.Thread(target=kill)
        thread.start()
        with one_warning("the compiling process ended with status -9"):
            got = stepped("compile")
        thread.join()
        assert_same(got, stepped("blocked"))
        require_ended(int((tmp_path / "child").read_text()))

    def test_it_is_not_there(self, fresh: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CXX", "no-such-compiler -O2")
        with one_warning("there is no C++ compiler here (no-such-compiler -O2 is not found"):
            got = stepped("compile")
        assert_same(got, stepped("blocked"))
        assert fresh.compilations == 0
        assert fresh._process is None

    def test_a_process_that_died_while_idle_is_replaced(self, fresh: Compiler, fake: Any) -> None:
        started = fake("copy")
        stepped("compile")
        started[0].kill()
        started[0].wait()
        fresh.forget()
        for file in files(compiler.cache_folder()):
            file.unlink()
        require_right(stepped("compile"))
        assert len(started) == 2

    def test_a_timeout_that_is_no_number(
        self, fresh: Compiler, fake: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fake("copy")
        monkeypatch.setenv("FUNCTIONAL_OPTIM_COMPILE_TIMEOUT", "soon")
        with one_warning("soon"):
            got = stepped("compile")
        assert_same(got, stepped("blocked"))


class TestTheCompiler:
    """The process that does compile, with a compiler that does not."""

    @pytest.mark.parametrize("executor", ["compile", "auto"])
    def test_a_compiler_that_fails(
        self, executor: Any, fresh: Compiler, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CXX", "/bin/false")
        with one_warning("steps are not compiled: "):
            got = stepped(executor)
            finish(fresh)
            stepped(executor)
        assert_same(got, stepped("blocked"))
        assert fresh.compilations == 1
        assert not [one for one in compiler.cache_folder().iterdir() if one.suffix != ".lock"]

    def test_it_is_killed_while_it_works(self, fresh: Compiler) -> None:
        bound = OPTIMIZER.using(executor="auto").bind({"w": params()})
        bound.step({"w": noise(1, COUNT)})
        until(lambda: fresh._process is not None)
        assert fresh._process is not None
        os.kill(fresh._process.pid, signal.SIGKILL)
        assert bound.ready() is True
        with one_warning("the compiling process ended"):
            bound.step({"w": noise(2, COUNT)})
        bound.step({"w": noise(3, COUNT)})
        assert_same(bound.params["w"], stepped("blocked")[0])
        assert "the compiling process ended" in bound.explain()
