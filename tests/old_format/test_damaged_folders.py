"""Tests that damaged or forged folders are refused before anything is changed."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sharding import read_state_dict
from tests.choices import EVERYTHING, case, examples
from tests.zero_local import saved

from . import forgery
from .forgery import SAVED, restored

ABSURD = 3_000_000_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a checkpoint of one rank after three steps."""
    shutil.copytree(SAVED / "one_rank", tmp_path / "saved")
    return tmp_path / "saved"


def is_refused(folder: Path, zero: Any, error: type[Exception] = ValueError) -> str:
    """Check that a load raises and changes nothing; return the error."""
    before = saved.state_of(zero)
    with pytest.raises(error) as raised:
        zero.load(folder)
    assert saved.same(saved.state_of(zero), before)
    return str(raised.value)


Tensors = dict[str, Any]
EDITS: dict[str, Callable[[Tensors], Any]] = {
    "a chunk is missing": lambda t: t["w/exp_avg"].__setitem__(2, []),
    "half a chunk": lambda t: t["w/exp_avg"][2][0].__setitem__(1, 3),
    "a chunk twice": lambda t: t["w/exp_avg"][2].append(t["w/exp_avg"][2][0]),
    "another's bytes": lambda t: t["w/exp_avg"].__setitem__(2, t["w/exp_avg_sq"][2]),
    "a negative offset": lambda t: t["w/exp_avg"][2][0].__setitem__(0, -1),
    "a negative length": lambda t: t["w/exp_avg"][2].append([6, -1, 0]),
    "a negative begin": lambda t: t["w/exp_avg"][2][0].__setitem__(2, -4),
    "a begin behind the file": lambda t: t["w/exp_avg"][2][0].__setitem__(2, 1 << 40),
    "a length that is no number": lambda t: t["w/exp_avg"][2][0].__setitem__(1, True),
    "a larger shape": lambda t: t["w/exp_avg"].__setitem__(1, [ABSURD]),
    "a shape with a negative size": lambda t: t["w/exp_avg"].__setitem__(1, [-2, -3]),
    "a shape that is none": lambda t: t["w/exp_avg"].__setitem__(1, "23"),
    "another dtype": lambda t: t["w/exp_avg"].__setitem__(0, "float64"),
    "a dtype that no state has": lambda t: t["w/exp_avg"].__setitem__(0, "quint8"),
    "a dtype that is none": lambda t: t["w/exp_avg"].__setitem__(0, "_dynamo"),
    "a dtype that is no name": lambda t: t["w/exp_avg"].__setitem__(0, [1]),
    "an unknown parameter": lambda t: t.__setitem__("x/exp_avg", t.pop("w/exp_avg")),
    "no step count": lambda t: (t.pop("b/step"), t["w/step"].__setitem__(1, [2])),
    "an entry of another kind": lambda t: t.__setitem__("w/exp_avg", None),
}


@pytest.mark.parametrize("version", [1, 2])
def test_tables_that_do_not_tile_are_refused(folder: Path, version: int) -> None:
    """The table is checked with valid checksums (version 2) and without checksums (version 1)."""
    if version == 1:
        forgery.as_version_1(folder)
    zero = saved.made(1)
    for what, edit in EDITS.items():
        with case(what=what), restored(folder):
            forgery.change(folder, edit)
            is_refused(folder, zero)
            with pytest.raises(ValueError, match=re_of_paths(folder)):
                read_state_dict(folder)


def re_of_paths(folder: Path) -> str:
    """Return a pattern that matches errors with the path of the file or the folder."""
    return str(folder)


def test_state_of_another_shape_is_refused(folder: Path) -> None:
    """A transposed buffer does not match the shape of the parameter."""
    for version in (2, 1):
        if version == 1:
            forgery.as_version_1(folder)
        for shape in ([3, 2], [6], [1, 2, 3]):
            with case(version=version, shape=shape), restored(folder):
                forgery.change(folder, lambda t, s=shape: t["w/exp_avg"].__setitem__(1, s))
                assert "exp_avg" in is_refused(folder, saved.made(1))


def test_each_flipped_bit_is_found(folder: Path) -> None:
    """`make test` tries one byte in 19 of every file, and `make test-all` tries every byte."""
    whole = read_state_dict(folder)
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        for place in range(0, len(content), 1 if EVERYTHING else 19):
            changed = bytearray(content)
            changed[place] ^= 1 << place % 8
            path.write_bytes(changed)
            with pytest.raises(ValueError, match=str(folder)):
                read_state_dict(folder)
        path.write_bytes(content)
    assert saved.same(read_state_dict(folder), whole)


@pytest.mark.parametrize("change", ["shorter", "longer", "gone", "link", "folder"])
@pytest.mark.parametrize("ending", ["bin", "json"])
def test_files_that_are_not_as_written(folder: Path, ending: str, change: str) -> None:
    """A file of another size or kind is refused.

    Fault 34: a missing table raised FileNotFoundError, as if no checkpoint existed.
    """
    path = forgery.table_path(folder).with_suffix(f".{ending}")
    content = path.read_bytes()
    path.unlink()
    if change == "shorter":
        path.write_bytes(content[:-1])
    elif change == "longer":
        path.write_bytes(content + b"\n")
    elif change == "link":
        (folder.parent / "elsewhere").write_bytes(content)
        path.symlink_to(folder.parent / "elsewhere")
    elif change == "folder":
        path.mkdir()
    assert path.name in is_refused(folder, saved.made(1))


NAMES = ["../victim", "victim", "/victim", "0a1b2c3d-00000/../victim", "", "0a1b2c3d-00000\n"]


@pytest.mark.parametrize("version", [1, 2])
def test_a_manifest_from_elsewhere_names_no_other_files(folder: Path, version: int) -> None:
    if version == 1:
        forgery.as_version_1(folder)
    victims = [folder.parent / "victim", folder / "victim"]
    for victim, ending in ((v, e) for v in victims for e in ("bin", "json")):
        victim.with_suffix(f".{ending}").write_text("precious")

    def enter(content: dict[str, Any], name: str) -> None:
        if version == 1:
            content["shards"] = [name]
        else:
            content["shards"][0]["name"] = name

    zero = saved.made(1)
    for short in NAMES:
        name = short if short != "/victim" else str(victims[0])
        with case(name=name), restored(folder):
            forgery.change_manifest(folder, lambda content, name=name: enter(content, name))
            before = sorted(folder.parent.rglob("*"))
            assert "must have shards" in is_refused(folder, zero)
            assert sorted(folder.parent.rglob("*")) == before


MANIFESTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "options with parameters": lambda m: m["groups"][0]["options"].update(params=[1]),
    "an option that is a tree": lambda m: m["groups"][0]["options"].update(lr={"a": 1}),
    "a parameter twice": lambda m: m["groups"][0]["params"].append("w"),
    "a parameter in no group": lambda m: m["groups"][0]["params"].remove("w"),
    "no groups": lambda m: m.pop("groups"),
    "a shape that is none": lambda m: m["parameters"].update(w=[2, -3]),
    "a shard twice": lambda m: m["shards"].append(m["shards"][0]),
    "a form of something": lambda m: m["form"].update(options={"x": 1}),
    "fields that are no names": lambda m: m.update(fields=[1]),
    "another format": lambda m: m.update(format="else"),
    "a later version": lambda m: m.update(version=3),
    "a version that is no number": lambda m: m.update(version=True),
    "a size that is none": lambda m: m["shards"][0].update(data=[-1, 0]),
}


def test_a_manifest_of_another_form_is_refused(folder: Path) -> None:
    zero = saved.made(1)
    for what, edit in MANIFESTS.items():
        with case(what=what), restored(folder):
            forgery.change_manifest(folder, edit)
            before = sorted(folder.iterdir())
            is_refused(folder, zero)
            assert sorted(folder.iterdir()) == before


def test_json_that_cannot_be_read(folder: Path) -> None:
    """Examples are nesting that is too deep for Python's stack, and numbers that are too long."""
    for text in ("", "[]", "{", "1" * 5000, "[" * 200_000, "\x00", '"\\ud800"'):
        with case(text=text[:9]):
            (folder / forgery.MANIFEST).write_text(text)
            is_refused(folder, saved.made(1))


def test_a_manifest_that_is_a_pipe_is_not_waited_for(folder: Path) -> None:
    """A read of a pipe would wait forever."""
    (folder / forgery.MANIFEST).unlink()
    os.mkfifo(folder / forgery.MANIFEST)
    assert "is no regular file" in is_refused(folder, saved.made(1))


def test_absurd_shapes_allocate_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of a few bytes must not cause an allocation of gigabytes."""
    forgery.as_version_1(folder)
    forgery.change(folder, lambda t: t["w/exp_avg"].__setitem__(1, [ABSURD]))
    forgery.change_manifest(folder, lambda m: m["parameters"].update(w=[ABSURD]))
    asked = []
    empty = torch.empty

    def counted(*sizes: Any, **options: Any) -> Any:
        made = empty(*sizes, **{**options, "device": "meta"})
        asked.append(made.numel())
        assert made.numel() < ABSURD, "it asks for the memory"
        return empty(*sizes, **options)

    monkeypatch.setattr(torch, "empty", counted)
    with pytest.raises(ValueError, match="once"):
        read_state_dict(folder)
    assert max(asked, default=0) < ABSURD


def paths_in(tree: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all nodes of a JSON tree."""
    if isinstance(tree, list):
        tree = dict(enumerate(tree))
    inner = tree.items() if isinstance(tree, dict) else ()
    return [here, *(path for key, value in inner for path in paths_in(value, (*here, key)))]


NODES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 40),
    st.sampled_from([1 << 62, 1 << 63, 10**30, -1.5, 1e400, "", "w", "float32", "w/step"]),
    st.lists(st.integers(0, 7), max_size=3),
    st.just({}),
)


@examples(12)
@given(data=st.data(), version=st.sampled_from([1, 2]), of_table=st.booleans())
def test_whatever_stands_in_the_files_it_is_loaded_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, version: int, of_table: bool
) -> None:
    """A node of a file is replaced, with valid checksums; a refused load changes nothing."""
    folder = tmp_path_factory.mktemp("drawn")
    shutil.copytree(SAVED / "one_rank", folder, dirs_exist_ok=True)
    if version == 1:
        forgery.as_version_1(folder)
    path = forgery.table_path(folder) if of_table else folder / forgery.MANIFEST
    content = forgery.read(path)
    *before, last = data.draw(st.sampled_from([one for one in paths_in(content) if one]))
    node = content
    for key in before:
        node = node[key]
    node[last] = data.draw(NODES)
    path.write_text(json.dumps(content if of_table else forgery.with_crc32(content)))
    if of_table:
        forgery.reseal(folder)
    zero = saved.made(1)
    kept = saved.state_of(zero)
    try:
        zero.load(folder)
    except (ValueError, TypeError):
        assert saved.same(saved.state_of(zero), kept)
