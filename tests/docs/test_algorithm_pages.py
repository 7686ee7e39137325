"""Tests that each algorithm has a page, and that the site includes all of these pages."""

from pathlib import Path
from types import ModuleType

import pytest

from docs._pages import algorithm, convergence
from docs._pages.advice import ADVICE
from functional_optim import algorithms

from .pages import DOCS


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the hook of the build, which mkdocs loads from its file."""
    import importlib.util

    monkeypatch.syspath_prepend(str(DOCS / "_hooks"))
    spec = importlib.util.spec_from_file_location("site_hook", DOCS / "_hooks" / "site.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_folder_in_nav_is_its_pages(hook: ModuleType, tmp_path: Path) -> None:
    from mkdocs.exceptions import PluginError

    (tmp_path / "some").mkdir()
    with pytest.raises(PluginError, match="no page"):
        hook.expanded(["some/*"], tmp_path)
    for name in ("b.md", "a.md", "c.txt"):
        (tmp_path / "some" / name).touch()
    nav = [{"All": "some/*"}, "one.md"]
    assert hook.expanded(nav, tmp_path) == [{"All": ["some/a.md", "some/b.md"]}, "one.md"]


def test_every_algorithm_has_a_page_and_no_other_has_one() -> None:
    files = {path.stem for path in (DOCS / "algorithms").glob("*.md")}
    assert files == set(algorithms.__all__)


def test_a_page_has_what_a_reader_needs() -> None:
    text = algorithm.page("adamw")
    for part in (
        "## Formula",
        "## When to use it",
        "## When not to",
        "| `weight_decay` | `0.01` |",
        "The defaults are those of `torch.optim.AdamW`.",
        "| `exp_avg_sq` | 4 |",
        "Pointwise",
        "`optax.adamw`",
        "## Reference",
    ):
        assert part in text, part
    assert "Per matrix" in algorithm.page("muon")
    assert "Global" in algorithm.page("prodigy")


def test_advice_is_about_algorithms_that_say_when_not() -> None:
    for name, advice in ADVICE.items():
        assert advice.use.endswith("."), name
        assert advice.avoid[0].islower(), name


def test_scores_that_are_no_numbers_do_not_pass() -> None:
    task = convergence.TASKS["quadratic"]
    assert convergence._passes([0.0, float("inf"), float("nan")], task) == "1 of 3"
