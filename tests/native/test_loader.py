"""The loops are compiled once, by one process, and a step never fails or waits for want of them."""

import os
import shlex
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from functional_optim import bound, places, sgd
from functional_optim.native import build, cache, private_folder
from functional_optim.native import loader as module
from functional_optim.native.loader import MANY, SWITCH, Loader
from functional_optim.native.private_folder import open_folder
from functional_optim.places import Places

from .stranger import give_away


@pytest.fixture
def loader() -> Iterator[Loader]:
    made = Loader()
    yield made
    made.forget()


@pytest.fixture
def made(tmp_path: Path, with_loops: None) -> Path:
    """The loops, as the compiler leaves them."""
    content = open_folder().read(build.recipe().key)
    assert content is not None
    file = tmp_path / "made.so"
    file.write_bytes(content)
    return file


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Path) -> Path:
    """A cache of nothing."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("FUNCTIONAL_OPTIM_CACHE", str(folder))
    return folder


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Path, empty: Path) -> Path:
    """A compiler that notes that it was run, and is not done before there is a file ``go``."""
    noted, go = tmp_path / "runs", tmp_path / "go"
    script = tmp_path / "compiler.py"
    script.write_text(
        "import pathlib, sys, time\n"
        "if '--version' in sys.argv: sys.exit()\n"
        f"with open({str(noted)!r}, 'a') as runs: runs.write('run\\n')\n"
        f"while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.02)\n"
        "target = sys.argv[sys.argv.index('-o') + 1]\n"
        f"made = pathlib.Path({str(made)!r}).read_bytes()\n"
        "pathlib.Path(target).write_bytes(made)\n"
    )
    monkeypatch.setenv("CXX", shlex.join([sys.executable, str(script)]))
    return go


@pytest.fixture
def compiler(held: Path) -> Path:
    """The same, which does not wait; the file where it notes that it was run."""
    held.touch()
    return held.with_name("runs")


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing has been said of the folder so far."""
    made = private_folder._Temporary()
    monkeypatch.setattr(private_folder, "_TEMPORARY", made)
    yield
    made.remove()


@pytest.mark.usefixtures("with_loops")
def test_a_second_process_finds_them_on_disk(loader: Loader) -> None:
    assert loader.get(0) is not None


def test_nobody_waits_while_they_are_compiled(empty: Path, held: Path, loader: Loader) -> None:
    assert loader.get(MANY - 1) is None
    assert loader._run is None  # not for so few
    assert loader.get(MANY) is None
    assert not loader.wait(0.5)
    assert loader.get(MANY) is None
    held.touch()
    assert loader.wait(60)
    assert loader.get(0) is not None
    assert held.with_name("runs").read_text() == "run\n"
    assert [one.suffix for one in empty.iterdir()] == [".so"]


PROCESS = """
from functional_optim.native import LOOPS
assert LOOPS.wait(100) and LOOPS.get(0) is not None
"""


def test_ranks_of_one_machine_compile_once(empty: Path, compiler: Path) -> None:
    ranks = [subprocess.Popen([sys.executable, "-c", PROCESS]) for _ in range(4)]
    assert [rank.wait(120) for rank in ranks] == [0] * 4
    assert compiler.read_text() == "run\n"


@pytest.mark.parametrize("harm", ["shortened", "changed", "no library", "does not load"])
def test_a_broken_file_is_made_anew(
    harm: str, empty: Path, compiler: Path, made: Path, loader: Loader
) -> None:
    assert loader.wait(60)
    [library] = empty.iterdir()
    whole = library.read_bytes()
    if harm == "shortened":
        library.write_bytes(whole[: len(whole) // 2])
    elif harm == "changed":
        library.write_bytes(whole[:5000] + b"\0\1\2\3" + whole[5004:])
    elif harm == "no library":
        library.unlink()
    else:
        content = b"no library"
        digest = private_folder._digest(library.stem, content)
        library.write_bytes(content + private_folder._MARK + digest)
    compiler.unlink()
    loader.forget()
    assert loader.wait(60)
    assert loader.get(0) is not None
    assert compiler.read_text() == "run\n"
    assert library.read_bytes() == whole


@pytest.mark.parametrize("place", ["folder", "entry"])
@pytest.mark.usefixtures("temporary")
def test_loops_of_another_user_are_not_loaded(
    place: str, empty: Path, compiler: Path, loader: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever can write there could run code as whoever steps (fault 17)."""
    assert loader.wait(60)
    [library] = empty.iterdir()
    loader.forget()
    give_away(empty if place == "folder" else library, monkeypatch)
    assert loader.get(0) is None
    assert ("belongs to user" in loader.unsaid) == (place == "folder")
    assert loader.wait(60)
    assert compiler.read_text() == "run\nrun\n"


@pytest.mark.usefixtures("compiler")
def test_the_loops_lock_is_no_link(empty: Path, tmp_path: Path, loader: Loader) -> None:
    """What is planted in its place is neither followed nor shortened (fault 17)."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    empty.mkdir(mode=0o700)
    (empty / f"{build.recipe().key}.lock").symlink_to(victim)
    assert loader.wait(60)
    assert loader.get(0) is not None
    assert victim.read_text() == "precious"


FAILURES = {
    "no compiler": ("no_such_compiler", "there is no C\\+\\+ compiler here"),
    "fails": (f"{sys.executable} -c 'raise SystemExit(\"out of luck\")'", "status 1: out of luck"),
    "makes nothing": ("true", "left nothing: .*No such file"),
}


@pytest.mark.parametrize("what", FAILURES)
def test_without_them_a_step_still_runs(
    what: str, empty: Path, monkeypatch: pytest.MonkeyPatch, loader: Loader
) -> None:
    command, said = FAILURES[what]
    monkeypatch.setenv("CXX", command)
    monkeypatch.setattr(places, "LOOPS", loader)
    monkeypatch.setattr(bound, "LOOPS", loader)
    monkeypatch.setattr(module, "MANY", 0)
    params = [torch.ones(3), torch.ones(2)]

    def steps() -> None:
        stepped = sgd(0.5).bind(params)
        until = time.monotonic() + 20.0
        while not loader.wait(0) and time.monotonic() < until:
            stepped.step([torch.zeros(3), torch.zeros(2)])
        stepped.step([torch.zeros(3), torch.zeros(2)])

    with pytest.warns(RuntimeWarning, match=said):
        steps()
    stepped = sgd(0.5).bind(params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        stepped.step([torch.ones(3), torch.ones(2)])
        Places([torch.zeros(1)])
    assert params[0].tolist() == [0.5] * 3
    assert loader.get(0) is None
    assert not list(empty.glob("*/"))


@pytest.mark.usefixtures("temporary")
def test_without_a_cache_they_are_compiled_for_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: Path, loader: Loader
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("FUNCTIONAL_OPTIM_CACHE", str(tmp_path / "file" / "cache"))
    assert loader.wait(60)
    assert loader.get(0) is not None
    with pytest.warns(RuntimeWarning, match="not kept for other processes"):
        loader.say()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader.say()
        loader.forget()
        assert loader.wait(60)
        loader.say()
    assert compiler.read_text() == "run\n"


@pytest.mark.parametrize("command", ['g++ "', " "])
@pytest.mark.usefixtures("empty")
def test_a_command_that_makes_no_sense(
    command: str, monkeypatch: pytest.MonkeyPatch, loader: Loader
) -> None:
    monkeypatch.setenv("CXX", command)
    monkeypatch.setattr(cache, "_LACKING", set())
    assert loader.wait(1)
    assert loader.get(MANY) is None
    assert "CXX is no command of a compiler" in loader.unsaid


@pytest.mark.usefixtures("temporary")
def test_a_user_without_a_home(
    monkeypatch: pytest.MonkeyPatch, compiler: Path, loader: Loader
) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("FUNCTIONAL_OPTIM_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    assert loader.get(0) is None
    assert "home directory" in loader.unsaid
    assert loader.wait(60)
    assert loader.get(0) is not None
    monkeypatch.setenv(SWITCH, "0")
    loader.forget()
    assert loader.get(0) is None
    assert not loader.unsaid


HANGS = "import sys, time; '--version' in sys.argv or time.sleep(1000)"


@pytest.mark.parametrize("whose", ["mine", "another's"])
def test_a_compiler_that_hangs_is_not_waited_for(
    whose: str, empty: Path, monkeypatch: pytest.MonkeyPatch, loader: Loader
) -> None:
    monkeypatch.setenv("CXX", f'{sys.executable} -c "{HANGS}"')
    monkeypatch.setenv("FUNCTIONAL_OPTIM_COMPILE_TIMEOUT", "1")
    first = Loader()
    try:
        if whose == "another's":
            assert first.get(MANY) is None
        assert not loader.wait(100)
        assert "took longer than 1 s" in loader.unsaid
    finally:
        first.forget()
    assert not list(empty.glob("*/"))


def test_giving_up_is_not_for_ever(
    held: Path, monkeypatch: pytest.MonkeyPatch, loader: Loader
) -> None:
    """A machine that was too busy for a compiler may be less busy later (fault 26)."""
    monkeypatch.setenv("FUNCTIONAL_OPTIM_COMPILE_TIMEOUT", "0.3")
    assert not loader.wait(100)
    assert "it is tried again in 10 minutes" in loader.unsaid
    assert loader.get(MANY) is None  # it rests
    held.touch()
    monkeypatch.delenv("FUNCTIONAL_OPTIM_COMPILE_TIMEOUT")
    clock = time.monotonic
    monkeypatch.setattr(module.time, "monotonic", lambda: clock() + module.REST_SECONDS)
    assert loader.wait(None)
    assert loader.get(0) is not None


def test_the_switch(empty: Path, monkeypatch: pytest.MonkeyPatch, loader: Loader) -> None:
    monkeypatch.setenv(SWITCH, "0")
    assert loader.get(MANY) is None
    assert loader.wait(0)
    assert not empty.exists()


def test_a_process_that_ends_ends_its_compiler(empty: Path, held: Path) -> None:
    """And leaves its turn to others."""
    program = "from functional_optim.native import LOOPS; LOOPS.get(1000)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    assert not list(empty.glob("*.so"))
    assert not list(empty.glob("*/"))
    held.touch()
    subprocess.run([sys.executable, "-c", PROCESS], check=True, timeout=100)


def test_what_a_killed_process_has_left_is_cleared(
    empty: Path, compiler: Path, loader: Loader
) -> None:
    key = build.recipe().key
    empty.mkdir(mode=0o700)
    (empty / f"{key}-killed").mkdir()
    (empty / f"{key}-killed" / "library.so").write_text("half")
    (empty / "of-another-torch-at-work").mkdir()
    assert loader.wait(60)
    assert loader.get(0) is not None
    assert [one.name for one in empty.glob("*/")] == ["of-another-torch-at-work"]


def test_threads_that_look_at_once(empty: Path, compiler: Path, loader: Loader) -> None:
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(loader.wait, [60.0] * 4))
    assert loader.get(0) is not None
    assert compiler.read_text() == "run\n"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # from Python 3.12 on
def test_a_fork_leaves_the_compiler_to_its_parent(empty: Path, held: Path, loader: Loader) -> None:
    assert loader.get(MANY) is None
    pid = os.fork()
    if pid == 0:
        try:
            loader.forget()  # what would end a compiler of its own
            found = loader.wait(60) and loader.get(0) is not None
            os._exit(0 if found else 1)
        finally:
            os._exit(2)
    held.touch()
    assert loader.wait(60)
    assert loader.get(0) is not None
    assert os.waitpid(pid, 0)[1] == 0
    assert held.with_name("runs").read_text() == "run\n"


def test_loops_that_were_compiled_otherwise_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    before = build.recipe().key
    flags = build._flags()
    monkeypatch.setattr(build, "_flags", lambda: [*flags, "-g"])
    assert build.recipe().key != before


def test_all_of_their_text_is_in_the_recipe() -> None:
    """The files that the source includes decide what it is compiled to (fault 17)."""
    source = build.recipe().source
    assert '#include "' not in source
    headers = sorted(build.SOURCE.parent.glob("*.hpp"))
    assert len(headers) == 4
    for header in headers:
        last = header.read_text().split("namespace {")[1].strip().splitlines()[0]
        assert source.count(last) >= 1
        assert source.count(header.read_text().splitlines()[0]) == 1


@pytest.mark.usefixtures("with_loops")
def test_copying_is_shared_among_torchs_own_threads() -> None:
    """One library of threads: another would keep the processors from torch's, and they it."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("only Linux says what is loaded")
    target, grads = torch.zeros(64, 4096), list(torch.ones(64, 4096))
    loops = module.LOOPS.get(0)
    assert loops is not None
    assert loops.copy(loops.remember(list(target)), grads, 2) and target.all()
    loaded = {line.split()[-1] for line in maps.read_text().splitlines() if "libgomp" in line}
    assert len(loaded) == 1
