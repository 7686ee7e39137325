"""Tests that every Python block of a page runs, in order, and that pictures are readable."""

import re
import runpy
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import torch

from functional_optim.frontends import registry

from .pages import DOCS, Block, blocks_of, pages, script_of

PAGES = pages()
SCRIPTS = [
    (name, block) for name, page in PAGES.items() for block in blocks_of(page) if block.value
]
PICTURES = sorted((DOCS / "pictures").glob("*.svg"))
PHONE = 360
"""Width of a phone's screen in CSS pixels."""
ROW = re.compile(r"^\| \*\*(.+?)\*\* \|", flags=re.MULTILINE)


@pytest.mark.filterwarnings("ignore")  # for warnings of other libraries
@pytest.mark.parametrize("name", PAGES)
def test_blocks_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page run in one namespace, and in an empty folder."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    module = "page_" + re.sub(r"\W", "_", name.removesuffix(".md"))
    script = tmp_path / f"{module}.py"
    script.write_text(script_of(blocks_of(PAGES[name])), encoding="utf-8")
    before = dict(registry._REGISTERED)
    try:
        runpy.run_path(str(script), run_name=module)
    finally:
        for key in registry._REGISTERED.keys() - before:  # other pages must not see these names
            del registry._REGISTERED[key]
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("name", "block"), [one for one in SCRIPTS if one[1].mark == "torchrun"])
def test_scripts_run_on_several_processes(name: str, block: Block, tmp_path: Path) -> None:
    """The test starts a block with torchrun, as the page says."""
    (tmp_path / "train.py").write_text(block.code, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, f"--nproc-per-node={int(block.value)}", "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, f"{name}: {done.stderr}"


def test_marks_say_why() -> None:
    """A comment before a block that does not run gives the reason."""
    short = [name for name, block in SCRIPTS if block.mark == "not run" and len(block.value) < 10]
    assert not short
    for page in DOCS.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        marks = re.findall(r"^<!-- (?:not run|needs|torchrun)\b.*$", text, flags=re.MULTILINE)
        read = [block for block in blocks_of(page) if block.mark]
        assert len(marks) == len(read), f"{page}: a mark must stand in the line before a block"


def test_at_most_25_words_are_ours() -> None:
    text = (DOCS / "concepts" / "words.md").read_text(encoding="utf-8")
    words = ROW.findall(text)
    assert 10 < len(words) <= 25
    assert words == sorted(set(words), key=str.lower)


@pytest.mark.parametrize("picture", PICTURES, ids=lambda one: one.stem)
def test_pictures_are_readable_on_a_phone(picture: Path) -> None:
    """Pictures fit a phone screen, have letters of at least 11 pixels, and are used by a page."""
    root = ET.parse(picture).getroot()
    _, _, width, _ = map(float, root.attrib["viewBox"].split())
    assert width <= PHONE
    sizes = re.findall(r"font-size:\s*([\d.]+)px", picture.read_text(encoding="utf-8"))
    assert sizes and min(map(float, sizes)) >= 11
    assert root.find("{http://www.w3.org/2000/svg}title") is not None
    texts = (page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md"))
    assert any(f"pictures/{picture.name}" in text for text in texts)


@pytest.mark.parametrize("picture", PICTURES, ids=lambda one: one.stem)
def test_letters_stay_inside_pictures(picture: Path) -> None:
    """No text is cut off, if a letter is 0.62 of the font size wide."""
    root = ET.parse(picture).getroot()
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        x, y = float(text.attrib["x"]), float(text.attrib["y"])
        long = 0.62 * 13 * len("".join(text.itertext()))
        anchor = text.attrib.get("text-anchor", "start")
        left = x - {"start": 0.0, "middle": long / 2, "end": long}[anchor]
        assert left >= 0 and left + long <= width, "".join(text.itertext())
        assert 0 < y < height
