"""Tests that the reference has every public name, and that docstrings become Markdown."""

import dataclasses
import importlib
import re
from importlib.metadata import version

import pytest

import functional_optim
import sharding
from docs._hooks import docstrings, public_names
from functional_optim import Rule, Transform
from tests.choices import case


def test_the_reference_has_every_public_name_once() -> None:
    assert public_names.faults() == []


def test_public_names_are_those_that_can_be_imported() -> None:
    """The build reads public names from source text, so the test compares them with imports."""
    found = public_names.public_names()
    for package in public_names.PACKAGES:
        exported = importlib.import_module(package).__all__
        with case(package=package):
            assert {f"{package}.{name}" for name in exported} <= set(found)
    for name in found:
        module, _, short = name.rpartition(".")
        thing = getattr(importlib.import_module(module), short)
        module, _, short = public_names.definition(name).rpartition(".")
        with case(name=name):
            assert getattr(importlib.import_module(module), short) is thing


def test_a_public_name_that_the_reference_lacks_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    documented = public_names.documented_names()
    documented.pop("functional_optim.adam")
    documented["functional_optim.adamw"] += 1
    documented["functional_optim.core.stage.Stage"] = 1
    monkeypatch.setattr(public_names, "documented_names", lambda: documented)
    omitted, repeated, invented = public_names.faults()
    assert "functional_optim.adam is public and not in docs/reference" in omitted
    assert "adamw 2 times" in repeated
    assert "functional_optim.core.stage.Stage, which is not public" in invented


def test_blocks_and_examples_are_markdown() -> None:
    text = "Text::\n\n    code\n\nExample::\n\n    >>> 1\n    1"
    assert docstrings.as_markdown(text) == "Text:\n\n    code\n\nExamples:\n    >>> 1\n    1"


def test_what_is_returned_is_not_read_as_a_type() -> None:
    text = docstrings.as_markdown("Returns:\n    A pair: both.\n\nOver RPC::\n\n    code\n")
    assert text == "Returns:\n    : A pair: both.\n\nOver RPC:\n\n    code\n"


def test_rule_and_transform_document_every_argument() -> None:
    """``help`` shows the arguments of a class and of its base."""
    for kind in (Rule, Transform):
        for field in dataclasses.fields(kind):
            with case(kind=kind.__name__, argument=field.name):
                line = rf"^    {field.name}: "
                assert len(re.findall(line, kind.__doc__ or "", re.MULTILINE)) == 1


def test_help_leads_on() -> None:
    text = functional_optim.__doc__ or ""
    assert 40 <= len(text.splitlines()) <= 70
    for name in set(re.findall(r"``(\w+)``", text)) - {"help", "hooks", "sharding", "update"}:
        with case(name=name):
            assert hasattr(functional_optim, name) or hasattr(sharding, name)


def test_the_version_is_that_of_the_installed_package() -> None:
    assert functional_optim.__version__ == version("functional-optim")
