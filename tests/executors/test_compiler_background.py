"""Steps go on while the compiler is at work, in threads and in forked processes."""

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

from functional_optim.executors import compiler
from functional_optim.executors.compiler import Compiler
from functional_optim.state import State

from .compiler_support import (
    COUNT,
    OPTIMIZER,
    files,
    params,
    request_of,
    require_right,
    stepped,
    until,
)
from .support import assert_same, noise


class TestBackground:
    """With auto, steps go on while the compiler is at work."""

    def test_steps_before_and_after(self, fresh: Compiler, fake: Any) -> None:
        fake("slow")
        optimizer, param = OPTIMIZER.using(executor="auto"), params()
        bound = optimizer.bind({"w": param})
        assert "blocked; it is being compiled" in bound.explain()
        for step in range(2):
            bound.step({"w": noise(step + 1, COUNT)})
        before = fresh.status(request_of(OPTIMIZER))[0]
        assert bound.ready(0.0) is (before == "ready")
        assert bound.ready() is True
        assert "compile; compiled" in bound.explain()
        bound.step({"w": noise(3, COUNT)})
        require_right((param, State(bound.state.leaves["w"])))
        assert fresh.compilations == 1

    def test_it_waits_no_longer_than_it_is_told(self, fresh: Compiler, fake: Any) -> None:
        fake("hang")
        bound = OPTIMIZER.using(executor="auto").bind({"w": params()})
        bound.step({"w": params()})
        assert bound.ready(0.05) is False
        bound.step({"w": params()})
        assert "it is being compiled" in bound.explain()
        assert bound.ready(0.0) is False

    def test_nothing_is_compiled_for_little(self, fresh: Compiler, fake: Any) -> None:
        started = fake("copy")
        bound = OPTIMIZER.using(executor="auto").bind({"w": noise(0, COUNT - 1)})
        bound.step({"w": noise(1, COUNT - 1)})
        assert bound.ready() is True
        assert "not worth starting the compiler" in bound.explain()
        assert started == []

    def test_two_threads_want_the_same(self, fresh: Compiler, fake: Any) -> None:
        started = fake("slow")
        got: list[Any] = []
        threads = [
            threading.Thread(target=lambda: got.append(stepped("compile"))) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(got) == 4
        for one in got:
            assert_same(one, got[0])
        require_right(got[0])
        assert len(started) == fresh.compilations == 1

    def test_idle_it_ends(
        self, fresh: Compiler, fake: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(compiler, "IDLE_SECONDS", 0.1)
        started = fake("copy")
        stepped("compile")
        until(lambda: fresh._thread is None)
        assert started[0].returncode is not None
        fresh.forget()
        for file in files(compiler.cache_folder()):
            file.unlink()
        require_right(stepped("compile"))
        assert len(started) == 2


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # from Python 3.12 on
class TestForks:
    """A forked process has a compiler of its own."""

    def run_in_child(self, work: Callable[[], bool]) -> None:
        pid = os.fork()
        if pid == 0:
            try:
                os._exit(0 if work() else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

    def test_while_the_parent_compiles(self, fresh: Compiler, fake: Any) -> None:
        started = fake("hang")
        bound = OPTIMIZER.using(executor="auto").bind({"w": params()})
        bound.step({"w": params()})
        until(lambda: started)

        def work() -> bool:
            fake("copy")
            # The parent holds the lock of the folder that it compiles for.
            os.environ["FUNCTIONAL_OPTIM_CACHE"] += "_of_child"
            require_right(stepped("compile"))
            return fresh.compilations == 2 and bound.ready(0.0) is True

        self.run_in_child(work)
        assert fresh._process is started[0]
        assert started[0].poll() is None  # the child has left it alone
        assert bound.ready(0.0) is False

    def test_after_the_parent_has_compiled(self, fresh: Compiler, fake: Any) -> None:
        started = fake("copy")
        stepped("compile")

        def work() -> bool:
            fake("error")
            require_right(stepped("compile"))
            return fresh.compilations == 1

        self.run_in_child(work)
        assert started[0].poll() is None
