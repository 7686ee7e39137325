"""The folder of what is compiled: nobody else has a say in what is loaded from it (fault 17)."""

import os
import shlex
import stat
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from functional_optim.native import cache, private_folder
from functional_optim.native.cache import CompileError, Recipe, library
from functional_optim.native.from_bytes import load
from functional_optim.native.private_folder import Folder, open_folder

from .stranger import STRANGER, give_away

FLAGS = ("-shared", "-fPIC")


def text(number: int) -> str:
    """Of a library that knows a number."""
    return f'extern "C" int number() {{ return {number}; }}'


def loaded(number: int) -> int:
    """What a library says, found or made anew by this call."""
    cache._LOADED.clear()
    return library(text(number), FLAGS).number()


def entry(folder: Path) -> Path:
    """The only one there is."""
    [found] = folder.glob("*.so")
    return found


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where entries are kept; nothing has been said so far."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("FUNCTIONAL_OPTIM_CACHE", str(folder))
    monkeypatch.setattr(cache, "_LOADED", {})
    temporary = private_folder._Temporary()
    monkeypatch.setattr(private_folder, "_TEMPORARY", temporary)
    yield folder
    temporary.remove()


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the compiler notes that it compiled."""
    noted, script = tmp_path / "runs", tmp_path / "compiler.py"
    noted.touch()
    script.write_text(
        "import subprocess, sys\n"
        "if '--version' not in sys.argv:\n"
        f"    with open({str(noted)!r}, 'a') as runs: runs.write('run ')\n"
        "sys.exit(subprocess.run(['g++', *sys.argv[1:]]).returncode)\n"
    )
    monkeypatch.setenv("CXX", shlex.join([sys.executable, str(script)]))
    return noted


def test_what_was_made_is_found(folder: Path, runs: Path) -> None:
    assert [loaded(1), loaded(1), loaded(2), loaded(1)] == [1, 1, 2, 1]
    assert runs.read_text() == "run run "
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(one.stat().st_mode) for one in folder.iterdir()} == {0o600}
    assert {one.suffix for one in folder.iterdir()} == {".so"}


def test_the_same_library_is_loaded_once(runs: Path) -> None:
    assert library(text(1), FLAGS) is library(text(1), list(FLAGS))


@pytest.mark.parametrize("place", ["folder", "entry"])
def test_what_belongs_to_another_user_is_not_loaded(
    place: str, folder: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert loaded(1) == 1
    planted = entry(folder)

    give_away(folder if place == "folder" else planted, monkeypatch)
    if place == "folder":
        with pytest.warns(RuntimeWarning, match=f"belongs to user {STRANGER}, and not to us"):
            assert loaded(1) == 1
    else:
        assert loaded(1) == 1
        assert entry(folder).stat().st_uid == os.geteuid()
    assert runs.read_text() == "run run "


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o720, 0o702, 0o1777])
def test_a_folder_that_others_can_write_to_is_no_cache(mode: int, folder: Path, runs: Path) -> None:
    folder.mkdir()
    folder.chmod(mode)
    with pytest.warns(RuntimeWarning, match="can be written by others") as said:
        assert [loaded(1), loaded(2)] == [1, 2]
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        assert loaded(1) == 1
    assert not list(folder.iterdir())
    assert runs.read_text() == "run run "  # it is found in the temporary folder
    [temporary] = {open_folder().path, open_folder().path}
    assert stat.S_IMODE(temporary.stat().st_mode) == 0o700
    private_folder._TEMPORARY.remove()
    assert not temporary.exists()


def test_a_folder_that_is_a_link_is_no_cache(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.warns(RuntimeWarning, match="not kept"):
        assert loaded(1) == 1
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_temporary_folder_does_not_outlive_its_process(folder: Path, tmp_path: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    program = (
        "import os, warnings; warnings.simplefilter('ignore')\n"
        "from functional_optim.native.cache import library\n"
        "from functional_optim.native.private_folder import open_folder\n"
        f"library({text(1)!r}, {FLAGS!r})\n"
        "child = os.fork()\n"
        "if not child: raise SystemExit  # what is its parent's it leaves there\n"
        "os.waitpid(child, 0)\n"
        "print(open_folder().path.exists())\n"
    )
    place = tmp_path / "temporary"
    place.mkdir()
    made = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "TMPDIR": str(place)},
        check=True,
        stdout=subprocess.PIPE,
        timeout=100,
    )
    assert made.stdout.split() == [b"True"]
    assert not list(place.iterdir())


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_an_entry_that_others_can_write_to_is_made_anew(
    mode: int, folder: Path, runs: Path
) -> None:
    assert loaded(1) == 1
    entry(folder).chmod(mode)
    assert loaded(1) == 1
    assert stat.S_IMODE(entry(folder).stat().st_mode) == 0o600
    assert runs.read_text() == "run run "


def test_a_link_in_the_place_of_an_entry_is_not_followed(
    folder: Path, runs: Path, tmp_path: Path
) -> None:
    assert loaded(1) == 1
    moved = tmp_path / "victim"
    entry(folder).rename(moved)
    before = moved.read_bytes()
    key = Recipe(text(1), FLAGS, cache.default_compiler()).key
    (folder / f"{key}.so").symlink_to(moved)
    assert loaded(1) == 1
    assert runs.read_text() == "run run "
    assert not entry(folder).is_symlink()
    assert moved.read_bytes() == before


def test_a_link_in_the_place_of_the_lock_is_not_followed(folder: Path, tmp_path: Path) -> None:
    folder.mkdir(mode=0o700)
    victim, missing = tmp_path / "victim", tmp_path / "missing"
    victim.write_text("precious")
    for number, target in enumerate([victim, missing]):
        key = Recipe(text(number), FLAGS, cache.default_compiler()).key
        (folder / f"{key}.lock").symlink_to(target)
        assert loaded(number) == number
    assert victim.read_text() == "precious"
    assert not missing.exists()


@pytest.mark.parametrize("where", ["first", "middle", "digest", "shortened", "empty", "other name"])
def test_what_is_not_as_it_was_written_is_made_anew(where: str, folder: Path, runs: Path) -> None:
    assert loaded(1) == 1
    file = entry(folder)
    whole = bytearray(file.read_bytes())
    place = {"first": 0, "middle": len(whole) // 2, "digest": len(whole) - 1}.get(where)
    if place is not None:
        whole[place] ^= 1
        file.write_bytes(whole)
    elif where == "other name":
        assert loaded(2) == 2
        [second] = set(folder.glob("*.so")) - {file}
        file.write_bytes(second.read_bytes())
    else:
        file.write_bytes(whole[: len(whole) // 2] if where == "shortened" else b"")
    before = runs.read_text()
    assert loaded(1) == 1
    assert runs.read_text() == before + "run "
    assert loaded(1) == 1
    assert runs.read_text() == before + "run "


def test_what_is_loaded_is_what_was_looked_at(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is another one between looking and loading; so is the whole folder."""
    assert [loaded(1), loaded(2)] == [1, 2]
    read = Folder.read

    def then_changed(self: Folder, key: str) -> bytes | None:
        content = read(self, key)
        mine = folder / f"{key}.so"
        [other] = [one for one in folder.glob("*.so") if one != mine]
        other.rename(mine)
        folder.rename(tmp_path / "moved")
        return content

    monkeypatch.setattr(Folder, "read", then_changed)
    assert loaded(1) == 1


def test_a_folder_is_looked_up_once(folder: Path, tmp_path: Path) -> None:
    mine = open_folder()
    folder.rename(tmp_path / "moved")
    folder.mkdir()
    (folder / "theirs").write_text("")
    key = Recipe(text(1), FLAGS, cache.default_compiler()).key
    number = mine.lock(key)
    assert number is not None
    os.close(mine.make_place(f"{key}-place", "text"))
    assert [one.name for one in folder.iterdir()] == ["theirs"]
    mine.clear_places(key)
    mine.unlock(key, number)
    assert not list((tmp_path / "moved").iterdir())


def test_libraries_that_are_loaded_from_one_descriptor_are_not_mistaken(folder: Path) -> None:
    """Descriptors are used again, and what loads libraries remembers them by their paths."""
    assert [loaded(number) for number in range(20)] == list(range(20))


def test_where_there_are_no_anonymous_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:
        raise PermissionError("no")

    monkeypatch.setattr(os, "memfd_create", refused)
    assert [loaded(number) for number in range(3)] == [0, 1, 2]
    monkeypatch.delattr(os, "memfd_create")
    assert loaded(3) == 3


def test_an_anonymous_file_that_may_not_be_run(folder: Path) -> None:
    assert loaded(1) == 1
    content = open_folder().read(entry(folder).stem)
    asked = []

    def loader(path: str) -> str:
        asked.append(path)
        if path.startswith("/proc"):
            raise OSError("failed to map segment from shared object")
        return "loaded"

    assert content is not None
    assert load(content, loader) == "loaded"
    assert not Path(asked[-1]).exists()


PROCESS = """
import sys
from functional_optim.native.cache import library
assert library(sys.argv[1], sys.argv[2:]).number() == 1
"""


def test_several_processes_compile_once(runs: Path, folder: Path) -> None:
    command = [sys.executable, "-c", PROCESS, text(1), *FLAGS]
    ranks = [subprocess.Popen(command) for _ in range(3)]
    assert [rank.wait(120) for rank in ranks] == [0] * 3
    assert runs.read_text() == "run "
    assert [one.suffix for one in folder.iterdir()] == [".so"]


def test_who_has_waited_for_a_turn_that_is_over_takes_no_other(folder: Path) -> None:
    ours = open_folder()
    number = ours.lock("key")
    assert number is not None
    with pytest.raises(BlockingIOError):
        ours.lock("key")
    late = os.open(folder / "key.lock", os.O_RDWR)
    ours.unlock("key", number)
    again = ours.lock("key")
    assert again is not None
    assert os.fstat(late).st_nlink == 0
    os.close(late)
    ours.unlock("key", again)


def test_what_a_killed_process_has_left_is_removed(folder: Path, runs: Path) -> None:
    key = Recipe(text(1), FLAGS, cache.default_compiler()).key
    (folder / f"{key}-killed").mkdir(parents=True)
    (folder / f"{key}-killed" / "library.so").write_text("half")
    folder.chmod(0o700)
    assert loaded(1) == 1
    assert [one.name for one in folder.iterdir()] == [f"{key}.so"]


def test_the_folder_where_the_user_stands_has_no_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "number.h").write_text("#define NUMBER 13\n")
    monkeypatch.chdir(tmp_path)
    source = '#if __has_include("number.h")\n#include "number.h"\n#else\n#define NUMBER 1\n#endif\n'
    assert library(source + text(0).replace("0", "NUMBER"), FLAGS).number() == 1


@pytest.mark.parametrize(
    ("compiler", "said"),
    [
        ("no_such_compiler", "there is no C\\+\\+ compiler here \\(no_such_compiler is not found"),
        (f"{sys.executable} -c 'raise SystemExit(\"out of luck\")'", "status 1: out of luck"),
        ("true", "left nothing"),
    ],
)
def test_what_cannot_be_compiled(compiler: str, said: str, folder: Path) -> None:
    with pytest.raises(CompileError, match=said):
        library(text(1), FLAGS, shlex.split(compiler))
    assert not list(folder.glob("*"))


def test_a_text_that_does_not_compile() -> None:
    with pytest.raises(CompileError, match="ended with status 1: "):
        library("int number( {", FLAGS)


def test_a_compiler_that_hangs(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    program = "import sys, time; '--version' in sys.argv or time.sleep(1000)"
    monkeypatch.setenv("FUNCTIONAL_OPTIM_COMPILE_TIMEOUT", "0.5")
    with pytest.raises(CompileError, match="took longer than 0.5 s"):
        library(text(1), FLAGS, [sys.executable, "-c", program])
    assert not list(folder.iterdir())


def test_another_compiler_or_version_makes_another_library(tmp_path: Path) -> None:
    script = tmp_path / "compiler.py"
    command = (sys.executable, str(script))
    keys = set()
    for version in (1, 2):
        script.write_text(f"print('version {version}')")
        cache._version.cache_clear()
        keys.add(Recipe(text(1), FLAGS, command).key)
    keys.add(Recipe(text(2), FLAGS, command).key)
    keys.add(Recipe(text(1), (*FLAGS, "-O3"), command).key)
    assert len(keys) == 4


def test_a_disk_that_takes_no_entry(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert loaded(1) == 1
    assert not list(folder.iterdir())
