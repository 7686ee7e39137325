"""Cache folder of compiled libraries: no other user affects the libraries that are loaded."""

import os
import shlex
import stat
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from functional_optim.native import cache, private_folder
from functional_optim.native.cache import BuildRecipe, CompileError, library
from functional_optim.native.private_folder import Folder, load_library, open_folder

from ..choices import case
from .compilers import FAILS, HANGS, Clock, Compiler, all_well, children
from .stranger import STRANGER, give_away

FLAGS = ("-shared", "-fPIC")
NUMBERS = range(4)


def text(number: int) -> str:
    """Return the source of a library that returns a number."""
    return f'extern "C" int number() {{ return {number}; }}'


def loaded(number: int) -> int:
    """Load a library, from the cache or compiled by this call, and return its number."""
    cache._LOADED.clear()
    return library(text(number), FLAGS).number()


def entry(folder: Path) -> Path:
    """Return the only entry."""
    [found] = folder.glob("*.so")
    return found


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile each text by g++ into a folder."""
    folder = tmp_path_factory.mktemp("libraries")
    for number in NUMBERS:
        source = folder / f"{number}.cpp"
        source.write_text(text(number))
        made = folder / f"{number}.so"
        subprocess.run(["g++", source, "-o", made, *FLAGS], check=True, timeout=900)
    return folder


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return an empty cache folder; no warning about it was given yet."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("FUNCTIONAL_OPTIM_CACHE", str(folder))
    monkeypatch.setattr(cache, "_LOADED", {})
    temporary = private_folder._Temporary()
    monkeypatch.setattr(private_folder, "_TEMPORARY", temporary)
    yield folder
    temporary.remove()


@pytest.fixture(autouse=True)
def compiler(
    libraries: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Compiler]:
    number = r"""$(sed -n 's/.*return \([0-9]*\);.*/\1/p' "$1")"""
    made = Compiler(tmp_path, f'cp "{libraries}/{number}.so" "$3"\n')
    monkeypatch.setenv("CXX", made.command)
    yield made
    made.close()


@pytest.fixture
def gcc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the real compiler."""
    monkeypatch.delenv("CXX")


def test_what_was_made_is_found(folder: Path, compiler: Compiler) -> None:
    assert [loaded(1), loaded(1), loaded(2), loaded(1)] == [1, 1, 2, 1]
    assert compiler.runs == 2
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(one.stat().st_mode) for one in folder.iterdir()} == {0o600}
    assert {one.suffix for one in folder.iterdir()} == {".so"}


def test_the_same_library_is_loaded_once() -> None:
    assert library(text(1), FLAGS) is library(text(1), [*FLAGS])


@pytest.mark.parametrize("place", ["folder", "entry"])
def test_what_belongs_to_another_user_is_not_loaded(
    place: str, folder: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
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
    assert compiler.runs == 2


def test_a_folder_that_others_can_write_to_is_no_cache(
    folder: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir()
    for mode in (0o770, 0o720, 0o702, 0o1777, 0o777):
        folder.chmod(mode)
        monkeypatch.setattr(private_folder._TEMPORARY, "_warned", False)
        with case(mode=mode), pytest.warns(RuntimeWarning, match="can be written by others"):
            assert loaded(1) == 1
        assert not list(folder.iterdir())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the first warning is enough
        assert [loaded(1), loaded(2), loaded(1)] == [1, 2, 1]
    assert not list(folder.iterdir())
    assert compiler.runs == 2  # later loads find both libraries in the temporary folder
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


def test_an_entry_that_others_can_write_to_is_made_anew(folder: Path, compiler: Compiler) -> None:
    assert loaded(1) == 1
    for count, mode in enumerate((0o620, 0o602), start=2):
        entry(folder).chmod(mode)
        with case(mode=mode):
            assert loaded(1) == 1
            assert stat.S_IMODE(entry(folder).stat().st_mode) == 0o600
            assert compiler.runs == count


def test_a_link_in_the_place_of_an_entry_is_not_followed(
    folder: Path, compiler: Compiler, tmp_path: Path
) -> None:
    assert loaded(1) == 1
    moved = tmp_path / "victim"
    entry(folder).rename(moved)
    before = moved.read_bytes()
    key = BuildRecipe(text(1), FLAGS, cache.default_compiler()).key
    (folder / f"{key}.so").symlink_to(moved)
    assert loaded(1) == 1
    assert compiler.runs == 2
    assert not entry(folder).is_symlink()
    assert moved.read_bytes() == before


def test_a_link_in_the_place_of_the_lock_is_not_followed(folder: Path, tmp_path: Path) -> None:
    folder.mkdir(mode=0o700)
    victim, missing = tmp_path / "victim", tmp_path / "missing"
    victim.write_text("precious")
    for number, target in enumerate([victim, missing]):
        key = BuildRecipe(text(number), FLAGS, cache.default_compiler()).key
        (folder / f"{key}.lock").symlink_to(target)
        assert loaded(number) == number
    assert victim.read_text() == "precious"
    assert not missing.exists()


def test_what_is_not_as_it_was_written_is_made_anew(folder: Path, compiler: Compiler) -> None:
    assert loaded(1) == 1
    file = entry(folder)
    whole = file.read_bytes()
    assert loaded(2) == 2
    [second] = set(folder.glob("*.so")) - {file}

    def changed(place: int) -> bytes:
        return whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]

    harms = {
        "first": changed(0),
        "middle": changed(len(whole) // 2),
        "digest": changed(len(whole) - 1),
        "shortened": whole[: len(whole) // 2],
        "empty": b"",
        "other name": second.read_bytes(),
    }
    for where, content in harms.items():
        with case(where=where):
            file.write_bytes(content)
            before = compiler.runs
            assert [loaded(1), loaded(1)] == [1, 1]
            assert compiler.runs == before + 1


def test_what_is_loaded_is_what_was_looked_at(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checked bytes are loaded, even if the file and its folder change after the check."""
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
    key = BuildRecipe(text(1), FLAGS, cache.default_compiler()).key
    number = mine.lock(key)
    assert number is not None
    os.close(mine.create_build_folder(f"{key}-place", "text"))
    assert [one.name for one in folder.iterdir()] == ["theirs"]
    mine.remove_build_folders(key)
    mine.unlock(key, number)
    assert not list((tmp_path / "moved").iterdir())


def test_libraries_that_are_loaded_from_one_descriptor_are_not_mistaken() -> None:
    """The loader of libraries caches them by path, and a reused descriptor has the same path."""
    assert [loaded(number) for number in (*NUMBERS, *NUMBERS)] == [*NUMBERS, *NUMBERS]


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
    assert load_library(content, loader) == "loaded"
    assert not Path(asked[-1]).exists()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # from Python 3.12 on
def test_several_processes_compile_once(compiler: Compiler, folder: Path) -> None:
    assert all_well(children(3, lambda: loaded(1) == 1))
    assert compiler.runs == 1
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


def test_what_a_killed_process_has_left_is_removed(folder: Path, compiler: Compiler) -> None:
    key = BuildRecipe(text(1), FLAGS, cache.default_compiler()).key
    (folder / f"{key}-killed").mkdir(parents=True)
    (folder / f"{key}-killed" / "library.so").write_text("half")
    folder.chmod(0o700)
    assert loaded(1) == 1
    assert [one.name for one in folder.iterdir()] == [f"{key}.so"]


@pytest.mark.usefixtures("gcc")
def test_the_folder_where_the_user_stands_has_no_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "number.h").write_text("#define NUMBER 13\n")
    monkeypatch.chdir(tmp_path)
    source = '#if __has_include("number.h")\n#include "number.h"\n#else\n#define NUMBER 1\n#endif\n'
    assert library(source + text(0).replace("0", "NUMBER"), FLAGS).number() == 1


def test_what_cannot_be_compiled(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    for command, said in FAILS.values():
        monkeypatch.setenv("CXX", command)
        with pytest.raises(CompileError, match=said):
            library(text(1), FLAGS)
        assert not list(folder.glob("*")), command


@pytest.mark.usefixtures("gcc")
def test_a_text_that_does_not_compile() -> None:
    with pytest.raises(CompileError, match="ended with status 1: "):
        library("int number( {", FLAGS)


def test_a_compiler_that_hangs(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("FUNCTIONAL_OPTIM_COMPILE_TIMEOUT", "0.5")
    monkeypatch.setenv("CXX", HANGS)
    with pytest.raises(CompileError, match="took longer than 0.5 s"):
        library(text(1), FLAGS)
    assert not list(folder.glob("*"))


def test_a_compiler_that_does_not_say_its_version(
    monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path
) -> None:
    """Fault 42: the version query has a time limit, and runs once for all libraries."""
    os.mkfifo(tmp_path / "never")
    asked, script = tmp_path / "asked", tmp_path / "silent.sh"
    script.write_text(f"echo asked >> {asked}\n(read _ < {tmp_path / 'never'}; echo late)\n")
    clock = Clock()
    monkeypatch.setattr(cache, "time", clock)
    monkeypatch.setattr(cache, "_VERSION_TIMEOUTS", {})
    monkeypatch.setenv("CXX", shlex.join(["sh", str(script)]))
    for seconds, named in (("0.25", "0.25 s \\(FUNCTIONAL_OPTIM_COMPILE_TIMEOUT"), ("9", "1 s$")):
        with case(seconds=seconds):
            monkeypatch.setenv("FUNCTIONAL_OPTIM_COMPILE_TIMEOUT", seconds)
            monkeypatch.setattr(cache, "VERSION_SECONDS", 1.0)
            asked.write_text("")
            for number in (1, 2, 3):
                with pytest.raises(CompileError, match=f"does not say its version: .* {named}"):
                    library(text(number), FLAGS)
            assert asked.read_text().split() == ["asked"]
            clock.ahead += cache.RETRY_SECONDS
    script.write_text("echo version 1\n")
    assert BuildRecipe(text(1), FLAGS, ("sh", str(script))).key
    assert not list(folder.glob("*"))


def test_another_compiler_or_version_makes_another_library(tmp_path: Path) -> None:
    script = tmp_path / "versions.sh"
    command = ("sh", str(script))
    keys = set()
    for version in (1, 2):
        script.write_text(f"echo version {version}\n")
        cache._ask_version.cache_clear()
        keys.add(BuildRecipe(text(1), FLAGS, command).key)
    keys.add(BuildRecipe(text(2), FLAGS, command).key)
    keys.add(BuildRecipe(text(1), (*FLAGS, "-O3"), command).key)
    assert len(keys) == 4


def test_a_disk_that_takes_no_entry(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert loaded(1) == 1
    assert not list(folder.iterdir())
