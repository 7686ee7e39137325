"""Fixtures of the benchmark: parts in this process, scripted ranks, and a folder to publish to."""

import json
import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import child, publish, sharded_launch, sharded_rank
from benchmarks import run as running
from functional_optim.native.loader import SWITCH

collect_ignore = ["troubled_rank.py"]  # a program that takes over standard output

PATIENCE = 600.0
"""Seconds after which a test fails if a process says nothing."""


@pytest.fixture(autouse=True)
def compiled_little(without_loops: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check tensors in Python instead of compiled loops, here and in child processes."""
    monkeypatch.setenv(SWITCH, "0")


@pytest.fixture(autouse=True, scope="session")
def answers_are_closed() -> Iterator[None]:
    """Close the files that imported programs answer to, after all tests."""
    yield
    for program in (child, sharded_rank):
        program.ANSWERS.close()


@pytest.fixture
def parts_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run parts of a benchmark in this process. Arguments and results still pass through JSON."""

    def run_part(part: str, given: Any, *, tell: Callable[[str], object] = print, **_: Any) -> Any:
        monkeypatch.setattr(child, "_tell", tell)
        return json.loads(json.dumps(child.PARTS[part](**json.loads(json.dumps(given)))))

    monkeypatch.setattr(running, "run_part", run_part)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty repository to publish to."""
    monkeypatch.setattr(publish, "LATEST", tmp_path / "results" / "latest.json")
    monkeypatch.setattr(publish, "DETAILS", tmp_path / "docs" / "benchmarks.md")
    monkeypatch.setattr(publish, "PICTURE", tmp_path / "docs" / "benchmarks.png")
    for name in ("draw", "draw_sharded", "draw_averaging"):  # other tests draw these pictures
        monkeypatch.setattr(publish, name, lambda report, path: path.touch())
    return tmp_path


SPEAK = """
import json, os, sys
order = json.loads(sys.stdin.readline())
rank = order["rank"]
def say(**line):
    print(json.dumps(line), flush=True)
def hang():
    say(silent=True)
    sys.stdin.read()
"""


class Silence(queue.Queue[Any]):
    """Queue of the ranks' lines. It is empty once every rank has said that it hangs."""

    ranks = 2

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Return the next line."""
        while self.ranks:
            rank, said = super().get(timeout=PATIENCE)
            if said != {"silent": True}:
                return rank, said
            self.ranks -= 1
        raise queue.Empty


@pytest.fixture
def speaking(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that replaces the program of the ranks with a script."""
    monkeypatch.setattr(sharded_launch, "queue", SimpleNamespace(Queue=Silence, Empty=queue.Empty))
    return lambda script: monkeypatch.setattr(sharded_launch, "COMMAND", ("-c", SPEAK + script))
