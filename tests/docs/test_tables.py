"""Tests that hand-written tables have a row for everything in the code."""

import re
from typing import get_args

from functional_optim.kernels import ExecutorName
from sharding import POLICIES

from .pages import DOCS

SRC = DOCS.parent / "src"


def first_column(page: str, heading: str) -> set[str]:
    """Return the code names in the first column of the first table under a heading."""
    text = (DOCS / page).read_text(encoding="utf-8").partition(f"## {heading}\n")[2]
    rows = text.partition("\n| ")[2].partition("\n\n")[0].splitlines()[2:]
    return {found[1] for row in rows if (found := re.search(r"`(.+?)`", row))}


def in_source(pattern: str) -> set[str]:
    """Return all matches of a pattern in the source code."""
    texts = (path.read_text(encoding="utf-8") for path in SRC.rglob("*.py"))
    return {found for text in texts for found in re.findall(pattern, text)}


def test_every_executor_has_a_row() -> None:
    assert first_column("concepts/step.md", "Executors") == set(get_args(ExecutorName))


def test_every_policy_has_a_row() -> None:
    assert first_column("concepts/sharding.md", "Policies") == set(POLICIES)


def test_every_environment_variable_has_a_row() -> None:
    written = first_column("concepts/step.md", "Environment variables")
    read = in_source(r"\bFUNCTIONAL_OPTIM_[A-Z_]+")
    assert {name.partition("=")[0] for name in written} == read


def test_every_profiler_range_has_a_row() -> None:
    written = first_column("how-to/debug-a-step.md", "Profile")
    ranges = in_source(r'(?m)^RANGE = "(.+)"')
    assert written == ranges | {"Optimizer.step#TorchOptimizer.step"}
