"""Tests of dependencies: the core has few, the tests pin all of them, and types are shipped."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    table = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    found: dict[str, Any] = table["project"]
    return found


@pytest.fixture(scope="module")
def pins() -> dict[str, str]:
    found = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, version = line.split("==")
            found[canonicalize_name(name)] = version
    return found


def test_the_core_needs_torch_and_optree_only(project: dict[str, Any]) -> None:
    assert {Requirement(one).name for one in project["dependencies"]} == {"torch", "optree"}


def test_everything_asked_for_is_pinned_within_its_bounds(
    project: dict[str, Any], pins: dict[str, str]
) -> None:
    extras = project["optional-dependencies"].values()
    for text in [*project["dependencies"], *(one for extra in extras for one in extra)]:
        asked = Requirement(text)
        if asked.name != project["name"]:
            assert asked.specifier.contains(pins[canonicalize_name(asked.name)]), text


def test_torch_is_pinned_on_a_line_that_make_can_find() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert len([line for line in lines if line.startswith("torch==")]) == 1


def test_types_are_shipped() -> None:
    for package in ("functional_optim", "sharding", "hooks"):
        assert (ROOT / "src" / package / "py.typed").exists()
