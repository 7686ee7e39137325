"""Tests that generated pages are up to date; ``python -m docs.generate`` writes them."""

from pathlib import Path

import pytest

from docs import generate
from docs._pages import composes
from docs.generate import FOLDER, PAGES, main, text_of


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_current(name: str) -> None:
    """The text of composes-with.md comes from running the combination of each cell."""
    assert (FOLDER / name).read_text(encoding="utf-8") == text_of(name)


def test_an_error_has_one_short_reason() -> None:
    assert composes.reason("ValueError: x needs the gradients of all parameters before y") == (
        "all gradients"
    )
    with pytest.raises(AssertionError, match="fit this error"):
        composes.reason("ValueError: something else")


def test_a_page_that_is_not_current_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert main(["--check", "storage.md"]) == 0
    assert capsys.readouterr().out.startswith("current")
    monkeypatch.setattr(generate, "FOLDER", tmp_path)
    (tmp_path / "storage.md").write_text("old")
    assert main(["--check", "storage.md"]) == 1
    assert capsys.readouterr().out.startswith("changed")
    assert (tmp_path / "storage.md").read_text() == "old"
