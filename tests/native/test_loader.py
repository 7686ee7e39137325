"""The loops are compiled once, by one process, and steps neither fail nor wait without them."""

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from functional_optim import sgd
from functional_optim.native import build, cache, private_folder
from functional_optim.native import loader as module
from functional_optim.native.loader import MANY, SWITCH, Loader
from functional_optim.native.private_folder import open_folder
from functional_optim.optimizer import bound
from functional_optim.plan import guard
from functional_optim.plan.list_layout import MemoryGuard

from .compilers import FAILS, HANGS, Clock, Compiler, all_well, children
from .stranger import give_away

LONG = 900.0
"""Seconds that suffice for a compilation, even on a busy machine."""


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loader]:
    """Return a loader that checks at each call if the compiler has finished."""
    monkeypatch.setattr(module, "POLL_SECONDS", 0.0)
    made = Loader()
    yield made
    made.reset()


@pytest.fixture
def made(tmp_path: Path, with_loops: None) -> Path:
    """Return a file with the compiled loops."""
    content = open_folder().read(build.recipe().key)
    assert content is not None
    file = tmp_path / "made.so"
    file.write_bytes(content)
    return file


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Path) -> Path:
    """Return an empty cache folder."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("FUNCTIONAL_OPTIM_CACHE", str(folder))
    return folder


@pytest.fixture
def held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Path, empty: Path
) -> Iterator[Compiler]:
    """Return a compiler whose runs wait until a test releases them."""
    compiler = Compiler(tmp_path, f'cp "{made}" "$3"\n', held=True)
    monkeypatch.setenv("CXX", compiler.command)
    yield compiler
    compiler.close()


@pytest.fixture
def compiler(held: Compiler) -> Compiler:
    """Return a compiler whose runs do not wait."""
    held.release()
    return held


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reset the temporary folder and its warnings."""
    made = private_folder._Temporary()
    monkeypatch.setattr(private_folder, "_TEMPORARY", made)
    yield
    made.remove()


@pytest.mark.usefixtures("with_loops")
def test_a_second_process_finds_them_on_disk(loader: Loader) -> None:
    assert loader.get(0) is not None


def test_nobody_waits_while_they_are_compiled(empty: Path, held: Compiler, loader: Loader) -> None:
    assert loader.get(MANY - 1) is None
    assert loader._build is None  # so few tensors start no compilation
    assert loader.get(MANY) is None
    assert not loader.wait(0)
    assert loader.get(MANY) is None
    held.release()
    assert loader.wait(LONG)
    assert loader.get(0) is not None
    assert held.runs == 1
    assert [one.suffix for one in empty.iterdir()] == [".so"]


def finds_them() -> bool:
    loader = Loader()
    return loader.wait(LONG) and loader.get(0) is not None


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # from Python 3.12 on
def test_ranks_of_one_machine_compile_once(empty: Path, held: Compiler) -> None:
    ranks = children(4, finds_them)
    held.release()
    assert all_well(ranks)
    assert held.runs == 1


def test_what_does_not_load_is_made_anew(empty: Path, compiler: Compiler, loader: Loader) -> None:
    """An intact file that cannot be loaded is compiled again, such as one for another torch."""
    assert loader.wait(LONG)
    [library] = empty.iterdir()
    whole = library.read_bytes()
    open_folder().keep(library.stem, b"no library")
    loader.reset()
    assert loader.wait(LONG)
    assert loader.get(0) is not None
    assert compiler.runs == 2
    assert library.read_bytes() == whole


@pytest.mark.usefixtures("temporary")
def test_loops_of_another_user_are_not_loaded(
    empty: Path, compiler: Compiler, loader: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user who can write the library could run code as the user who steps."""
    assert loader.wait(LONG)
    [library] = empty.iterdir()
    for runs, (place, is_said) in enumerate({library: False, empty: True}.items(), start=2):
        loader.reset()
        give_away(place, monkeypatch)
        assert loader.get(0) is None
        assert ("belongs to user" in loader.pending_warning) == is_said
        assert loader.wait(LONG)
        assert compiler.runs == runs


@pytest.mark.parametrize("what", FAILS)
def test_without_them_a_step_still_runs(
    what: str, empty: Path, monkeypatch: pytest.MonkeyPatch, loader: Loader
) -> None:
    command, said = FAILS[what]
    monkeypatch.setenv("CXX", command)
    monkeypatch.setattr(cache, "_WARNED", set())
    monkeypatch.setattr(guard, "LOOPS", loader)
    monkeypatch.setattr(bound, "LOOPS", loader)
    monkeypatch.setattr(module, "MANY", 0)
    params = [torch.ones(3), torch.ones(2)]
    zeros = [torch.zeros(3), torch.zeros(2)]

    def steps() -> None:
        stepped = sgd(0.5).bind(params)
        stepped.step(zeros)
        assert loader.wait(LONG)
        stepped.step(zeros)

    with pytest.warns(RuntimeWarning, match=said):
        steps()
    stepped = sgd(0.5).bind(params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the first warning is enough
        stepped.step([torch.ones(3), torch.ones(2)])
        MemoryGuard([torch.zeros(1)])
    assert params[0].tolist() == [0.5] * 3
    assert loader.get(0) is None
    assert not list(empty.glob("*/"))


@pytest.mark.usefixtures("temporary")
def test_without_a_cache_they_are_compiled_for_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: Compiler, loader: Loader
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("FUNCTIONAL_OPTIM_CACHE", str(tmp_path / "file" / "cache"))
    assert loader.wait(LONG)
    assert loader.get(0) is not None
    with pytest.warns(RuntimeWarning, match="not kept for other processes"):
        loader.warn_pending()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader.warn_pending()
        loader.reset()
        assert loader.wait(LONG)
        loader.warn_pending()
    assert compiler.runs == 1


@pytest.mark.usefixtures("empty")
def test_a_command_that_makes_no_sense(monkeypatch: pytest.MonkeyPatch, loader: Loader) -> None:
    for command in ('g++ "', " "):
        monkeypatch.setenv("CXX", command)
        monkeypatch.setattr(cache, "_WARNED", set())
        loader.reset()
        assert loader.wait(0)
        assert loader.get(MANY) is None
        assert "CXX is no command of a compiler" in loader.pending_warning


@pytest.mark.usefixtures("temporary")
def test_a_user_without_a_home(
    monkeypatch: pytest.MonkeyPatch, compiler: Compiler, loader: Loader
) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("FUNCTIONAL_OPTIM_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    assert loader.get(0) is None
    assert "home directory" in loader.pending_warning
    assert loader.wait(LONG)
    assert loader.get(0) is not None
    monkeypatch.setenv(SWITCH, "0")
    loader.reset()
    assert loader.get(0) is None
    assert not loader.pending_warning


@pytest.mark.parametrize("whose", ["mine", "another's"])
def test_a_compiler_that_hangs_is_not_waited_for(
    whose: str, empty: Path, monkeypatch: pytest.MonkeyPatch, loader: Loader, clock: Clock
) -> None:
    monkeypatch.setenv("CXX", HANGS)
    first = Loader()
    try:
        if whose == "another's":
            assert first.get(MANY) is None
        assert not loader.wait(0)
        clock.ahead += 601
        assert not loader.wait(0)
        assert "took longer than 600 s" in loader.pending_warning
    finally:
        first.reset()
    assert not list(empty.glob("*/"))


def test_giving_up_is_not_for_ever(held: Compiler, loader: Loader, clock: Clock) -> None:
    """A machine that is too busy for the compiler now may have time later."""
    assert not loader.wait(0)
    clock.ahead += 601
    assert not loader.wait(0)
    assert "it is tried again in 10 minutes" in loader.pending_warning
    assert loader.get(MANY) is None  # the loader pauses before it tries again
    held.release()
    clock.ahead += cache.RETRY_SECONDS
    assert loader.wait(None)
    assert loader.get(0) is not None


def test_the_switch(empty: Path, monkeypatch: pytest.MonkeyPatch, loader: Loader) -> None:
    monkeypatch.setenv(SWITCH, "0")
    assert loader.get(MANY) is None
    assert loader.wait(0)
    assert not empty.exists()


PROGRAM = """
import os, sys, warnings
warnings.simplefilter("ignore")
from functional_optim.native import LOOPS, private_folder
assert LOOPS.get(1000) is None and LOOPS._build is not None
os.environ["FUNCTIONAL_OPTIM_CACHE"] = sys.argv[1]
path = private_folder.open_folder().path
(path / "library.so").write_text("")
child = os.fork()
if not child: raise SystemExit  # what is its parent's it leaves there
os.waitpid(child, 0)
print((path / "library.so").exists())
"""


def test_a_process_leaves_neither_a_compiler_nor_its_turn_nor_a_temporary_folder(
    tmp_path: Path, empty: Path, held: Compiler, loader: Loader
) -> None:
    place, everybodys = tmp_path / "temporary", tmp_path / "everybody's"
    place.mkdir()
    everybodys.mkdir()
    everybodys.chmod(0o777)
    made = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(everybodys)],
        env={**os.environ, "TMPDIR": str(place)},
        check=True,
        stdout=subprocess.PIPE,
        timeout=LONG,
    )
    assert made.stdout.split() == [b"True"]
    assert not list(place.iterdir())
    assert not list(empty.glob("*.so"))
    assert not list(empty.glob("*/"))
    held.release()
    assert loader.wait(LONG)
    assert loader.get(0) is not None


def test_threads_that_look_at_once(compiler: Compiler, loader: Loader) -> None:
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(loader.wait, [LONG] * 4))
    assert loader.get(0) is not None
    assert compiler.runs == 1


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # from Python 3.12 on
def test_a_fork_leaves_the_compiler_to_its_parent(held: Compiler, loader: Loader) -> None:
    assert loader.get(MANY) is None

    def finds_them() -> bool:
        loader.reset()  # ends a compiler that this process started
        return loader.wait(LONG) and loader.get(0) is not None

    child = children(1, finds_them)
    held.release()
    assert loader.wait(LONG)
    assert loader.get(0) is not None
    assert all_well(child)
    assert held.runs == 1


def test_of_torchs_headers_few_are_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 35: compiling pybind11 takes 13 s, so it is skipped unless torch's tensors differ."""
    key = build.recipe().key
    assert "-DWHOLE_HEADER" not in build.recipe().flags
    whole, other = build._VARIABLE.read_text(), tmp_path / "python_variable.h"
    for changed in (
        whole.replace("at::Tensor cdata;", "c10::MaybeOwned<at::Tensor> cdata;"),
        whole.replace("PyObject_HEAD\n", "PyObject_HEAD\n  int more;\n"),
        whole.replace("THPVariable_Wrap(const at::TensorBase& var);", ""),
        whole.replace("extern PyObject* ParameterClass;", ""),
        None,
    ):
        assert changed != whole
        if changed is None:
            other.unlink()
        else:
            other.write_text(changed)
        monkeypatch.setattr(build, "_VARIABLE", other)
        assert "-DWHOLE_HEADER" in build.recipe().flags
        assert build.recipe().key != key


def test_few_parameters_do_not_wait_for_them(
    held: Compiler, monkeypatch: pytest.MonkeyPatch, loader: Loader
) -> None:
    """Fault 35: a step of few parameters uses the loops only if they are loaded already."""
    monkeypatch.setattr(bound, "LOOPS", loader)
    monkeypatch.setattr(guard, "LOOPS", loader)
    for count in (MANY - 1, MANY):
        params = [torch.ones(1) for _ in range(count)]
        stepped = sgd(0.5).bind(params)
        assert stepped.ready(0.0) is (count < MANY)
    held.release()
    assert stepped.ready(LONG)
    assert held.runs == 1
    assert loader.get(0) is not None


def test_loops_that_were_compiled_otherwise_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    before = build.recipe().key
    flags = build._flags()
    monkeypatch.setattr(build, "_flags", lambda: [*flags, "-g"])
    assert build.recipe().key != before


def test_all_of_their_text_is_in_the_recipe() -> None:
    """Included files also decide the compiled code, so the recipe contains their text."""
    source = build.recipe().source
    assert '#include "' not in source
    headers = sorted(build.SOURCE.parent.glob("*.hpp"))
    assert len(headers) == 5
    for header in headers:
        first, *_ = header.read_text().splitlines()
        last = header.read_text().split("#endif")[0].strip().splitlines()[-1]
        assert source.count(first) == 1 and last in source


def test_who_began_and_steps_no_more_keeps_nobody_waiting(
    empty: Path, held: Compiler, loader: Loader
) -> None:
    """A rank may stop stepping, such as to evaluate; other ranks use the library it compiled."""
    idle = Loader()
    assert idle.get(MANY) is None
    held.release()
    assert loader.wait(60)
    assert loader.get(0) is not None
    assert held.runs == 1
    idle.reset()
