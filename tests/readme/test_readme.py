"""Tests of the README: its blocks run, its links work, and its figures are those of the pages.

``make test-install`` runs the blocks in a new environment, installed as the README says.
"""

import re
import runpy
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

import functional_optim
from docs._pages import algorithms as algorithms_page
from docs._pages.stages import DIRECTIONS
from functional_optim import algorithms, schedules, transforms
from tests.choices import case

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in TEXT.split("## Evidence")[1].split("\n## ")[0].strip().splitlines()[2:]
]


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


def rows(name: str, mark: str) -> list[str]:
    """Return the rows of a table between two marks of a page."""
    table = page(name).split(f"<!-- {mark} -->\n")[1].split(f"<!-- /{mark} -->")[0]
    return table.splitlines()[2:]


def test_it_is_short() -> None:
    assert len(TEXT.splitlines()) <= 160
    assert TEXT.count("![") == 1
    assert len(ROWS) == 5
    assert "MISSED" not in TEXT


def test_blocks_run_in_sequence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All blocks but the last run in one module; the law reports the mistake that a block shows."""
    script = tmp_path / "readme_blocks.py"
    script.write_text("\n".join(BLOCKS[:-1]))
    spec = spec_from_file_location("readme_blocks", script)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "readme_blocks", module)
    spec.loader.exec_module(module)
    said = capsys.readouterr().out
    assert "chain(sign_sgd(lr=0.1))" in said
    assert "'same as the oracle' is broken" in said and "smallest example:" in said


def test_the_program_for_ranks_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program runs on one rank, with the environment variables of torchrun."""
    given = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
    for name, value in given.items():
        monkeypatch.setenv(name, str(value))
    assert "init_process_group" in BLOCKS[-1]
    script = tmp_path / "train.py"
    script.write_text(BLOCKS[-1])
    runpy.run_path(str(script), run_name="__main__")


def test_links_lead_to_files() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", TEXT):
        file, _, anchor = target.partition("#")
        with case(target=target):
            assert (ROOT / file).exists()
            if anchor:
                titles = re.findall(r"^#+ (.+)$", (ROOT / file).read_text("utf-8"), re.MULTILINE)
                assert anchor in {one.lower().replace(" ", "-") for one in titles}


def test_each_figure_stands_on_the_page_that_it_links_to() -> None:
    for what, result, linked in ROWS:
        pages = "".join(page(name) for name in re.findall(r"\(docs/([\w-]+)\.md\)", linked))
        assert pages
        for figure in re.findall(r"\*\*(\d+\.\d+)\*\*", result):
            with case(what=what, figure=figure):
                assert re.search(rf"(?<![\d.]){re.escape(figure)}(?!\d)", pages)


def numbers(what: str) -> list[int]:
    """Return the whole numbers of the row with this beginning."""
    (row,) = [one for one in ROWS if one[0].startswith(what)]
    return [int(one) for one in re.findall(r"\*\*(\d+)\*\*", row[1])]


def test_counts_are_those_of_the_code_and_the_tables() -> None:
    names = ({*transforms.__all__, *DIRECTIONS}, algorithms.__all__, schedules.__all__)
    assert numbers("contents") == [len(names[1]), len(names[0]), len(names[2])]
    table = rows("agreement", "parity")
    equal = [row for row in table if "| torch.optim." in row]
    assert all(row.count("bit for bit") >= 4 for row in equal)
    bounds = {int(one) for row in table for one in re.findall(r"within (\d+) ulp", row)}
    assert numbers("correctness") == [len(equal), len(table) - len(equal), max(bounds)]
    faults = rows("zero", "zero")
    first = faults[0].split("|")[2]
    unmoved = re.match(r"(?: 0,)*", first)
    assert unmoved is not None
    assert numbers("behaviour") == [len(faults), unmoved[0].count("0")]


def test_every_class_of_torch_optim_has_an_equivalent() -> None:
    assert "every class of torch.optim has an equivalent" in TEXT
    assert algorithms_page.absent() == []


def test_selectors_and_doors_are_public() -> None:
    for name in re.findall(r"fo\.(\w+)", TEXT):
        with case(name=name):
            assert hasattr(functional_optim, name)
