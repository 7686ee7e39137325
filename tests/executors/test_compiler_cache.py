"""The folder of compiled steps: wherever it is, and whatever has become of what it holds."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from functional_optim.executors import compile_request, compiler
from functional_optim.executors.compiler import Compiler

from .compiler_support import (
    OPTIMIZER,
    files,
    finish,
    fresh_compiler,
    one_warning,
    request_of,
    require_right,
    stepped,
)
from .support import assert_same


class TestFolders:
    """Wherever the cache is said to be."""

    @pytest.mark.parametrize("executor", ["compile", "auto"])
    @pytest.mark.parametrize("place", ["file", "below a file", "proc"])
    def test_it_cannot_be_written(
        self, executor: Any, place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        file = tmp_path / "file"
        file.write_text("not a folder")
        folder = {"file": file, "below a file": file / "cache", "proc": Path("/proc/cache")}[place]
        for made in fresh_compiler(monkeypatch, folder):
            with one_warning("steps are not compiled: "):
                got = stepped(executor)
                finish(made)
                stepped(executor)
            assert_same(got, stepped("blocked"))
            assert made.compilations == 0
        assert file.read_text() == "not a folder"

    def test_it_is_made(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fake: Any) -> None:
        fake("copy")
        for made in fresh_compiler(monkeypatch, tmp_path / "a" / "b"):
            require_right(stepped("compile"))
            assert made.compilations == 1
            assert all(file.exists() for file in files(tmp_path / "a" / "b"))

    @pytest.mark.parametrize("name", ["compile_worker.py", "compile_request.py", "lowering.py"])
    def test_a_step_that_other_code_compiled_is_another(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What is asked for is the same, but not what is made of it."""
        request = request_of(OPTIMIZER)
        before = request.key
        read_text = Path.read_text

        def edited(self: Path, *args: Any, **options: Any) -> str:
            return read_text(self, *args, **options) + ("# edited" if self.name == name else "")

        monkeypatch.setattr(Path, "read_text", edited)
        compile_request.environment.cache_clear()
        try:
            assert request.key != before
        finally:
            compile_request.environment.cache_clear()

    def test_the_places_it_may_be_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FUNCTIONAL_OPTIM_CACHE", "/some/where")
        assert compiler.cache_folder() == Path("/some/where")
        monkeypatch.delenv("FUNCTIONAL_OPTIM_CACHE")
        monkeypatch.setenv("XDG_CACHE_HOME", "/x")
        assert compiler.cache_folder() == Path("/x/functional_optim")
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", "/home/me")
        assert compiler.cache_folder() == Path("/home/me/.cache/functional_optim")


def truncated(library: Path, facts: Path) -> None:
    library.write_bytes(library.read_bytes()[:1000])


def emptied(library: Path, facts: Path) -> None:
    library.write_bytes(b"")


def without_library(library: Path, facts: Path) -> None:
    library.unlink()


def of_other_facts(library: Path, facts: Path) -> None:
    facts.write_text('{"sha256": "0"}')


def with_facts_that_are_garbage(library: Path, facts: Path) -> None:
    facts.write_bytes(b"\xff\x00{")


def with_facts_of_another_kind(library: Path, facts: Path) -> None:
    facts.write_text("[1, 2]")


def no_library_at_all(library: Path, facts: Path) -> None:
    library.write_bytes(b"no library")
    facts.write_text(json.dumps({"sha256": hashlib.sha256(b"no library").hexdigest()}))


BREAKS = (
    truncated,
    emptied,
    without_library,
    of_other_facts,
    with_facts_that_are_garbage,
    with_facts_of_another_kind,
    no_library_at_all,
)


class TestBrokenEntries:
    """Entries that something has spoilt are made anew."""

    @pytest.fixture
    def spoilt(self, fresh: Compiler, ready: Path) -> Path:
        folder = compiler.cache_folder()
        folder.mkdir()
        for file in files(ready):
            (folder / file.name).write_bytes(file.read_bytes())
        return folder

    @pytest.mark.parametrize("spoil", BREAKS)
    @pytest.mark.parametrize("executor", ["compile", "auto"])
    def test_they_are_made_anew(
        self, executor: Any, spoil: Any, spoilt: Path, fresh: Compiler, fake: Any
    ) -> None:
        spoil(*files(spoilt))
        fake("copy")
        with one_warning("was broken, and was made anew"):
            require_right(stepped(executor))
            finish(fresh)
            require_right(stepped(executor))
        assert fresh.compilations == 1
        assert fresh.status(request_of(OPTIMIZER))[0] == "ready"
        fresh.forget()
        stepped("compile")
        assert fresh.compilations == 1

    @pytest.mark.parametrize("spoil", BREAKS)
    def test_with_a_compiler_that_fails_they_are_one_warning(
        self, spoil: Any, spoilt: Path, fresh: Compiler, fake: Any
    ) -> None:
        spoil(*files(spoilt))
        fake("error")
        with one_warning("no such header"):
            got = stepped("compile")
        assert_same(got, stepped("blocked"))

    def test_a_library_without_facts_is_no_entry(
        self, spoilt: Path, fresh: Compiler, fake: Any
    ) -> None:
        files(spoilt)[1].unlink()
        fake("copy")
        require_right(stepped("compile"))
        assert fresh.compilations == 1

    def test_a_whole_one_is_used(self, spoilt: Path, fresh: Compiler, fake: Any) -> None:
        started = fake("error")
        require_right(stepped("compile"))
        require_right(stepped("auto"))
        assert fresh.compilations == 0
        assert started == []
