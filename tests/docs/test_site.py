"""Tests that the site builds in strict mode, so that errors such as broken links stop it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.choices import case

ROOT = Path(__file__).parents[2]
QUICK = {
    **os.environ,
    "DOCS_EXECUTE": "false",
    "DOCS_SEARCH": "false",
    "NO_MKDOCS_2_WARNING": "1",
}
RAW = re.compile(r":(?:class|func|meth|data|attr|mod):`|Example::|``|&gt;&gt;&gt;|\]\[")
"""Markup of docstrings that must not appear on a page outside of code."""


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    return subprocess.run(
        [*command, "-f", str(config), "-d", str(site)],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        env=QUICK,
        cwd=ROOT,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the site, built without running notebooks, and without its search."""
    folder = tmp_path_factory.mktemp("documentation") / "site"
    finished = build(ROOT / "mkdocs.yml", folder)
    assert finished.returncode == 0, finished.stderr
    return folder


def test_docstrings_are_not_shown_raw(site: Path) -> None:
    pages = sorted((site / "reference").rglob("index.html"))
    assert len(pages) > 10
    for page in pages:
        text = page.read_text("utf-8")
        article = text[text.index("<article") : text.index("</article>")]
        prose = re.sub(r"<(pre|code)\b.*?</\1>", "", article, flags=re.DOTALL)
        assert RAW.findall(prose) == [], page


def test_the_reference_tells_the_whole_story_of_an_algorithm(site: Path) -> None:
    text = (site / "reference" / "algorithms" / "index.html").read_text("utf-8")
    start = text.index('id="functional_optim.adam"')
    adam = text[start : text.index('id="functional_optim.adamax"')]
    for part in ("Mathematics", "Parameters:", "Returns:", "Raises:", "Examples:", "Reference"):
        assert part in adam
    assert "m_t = b1 * m_{t-1} + (1 - b1) * g_t" in re.sub(r"<[^>]+>", "", adam)


def test_every_notebook_is_a_page(site: Path) -> None:
    """A notebook becomes a page by a link in docs/tutorials and a line in mkdocs.yml."""
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        assert (site / "tutorials" / notebook.stem / "index.html").exists()


def test_a_broken_link_stops_the_build(tmp_path: Path) -> None:
    options = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8").replace("!ENV", ""))
    kept = {"site_name": "t", "plugins": ["autorefs"], "validation": options["validation"]}
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(kept), "utf-8")
    (tmp_path / "docs").mkdir()
    assert options["strict"]
    broken = ("[a](absent.md)", "[a](index.md#absent)", "[a][absent.name]")
    for links in (("[a](index.md)",), broken):
        (tmp_path / "docs" / "index.md").write_text("# T\n\n" + "\n\n".join(links), "utf-8")
        finished = build(tmp_path / "mkdocs.yml", tmp_path / "site")
        with case(links=links):
            assert finished.returncode == int(links == broken), finished.stderr
            assert finished.stderr.count("WARNING") == len(broken) * int(links == broken)
