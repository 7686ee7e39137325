"""The page about a GPU: results are read from a pytest run and written to the page."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from benchmarks import gpu, gpu_steps
from benchmarks.gpu_steps import Result
from benchmarks.ratios import Spread

TESTS = """
import pytest

def test_passes():
    pass

def test_fails():
    assert 1 == 2, "one | two"

def test_skips():
    pytest.skip("no reason")
"""


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[gpu.Case]:
    folder = tmp_path_factory.mktemp("cases")
    (folder / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"]
    subprocess.run([*command, "--junitxml=it.xml"], cwd=folder, check=False, capture_output=True)
    return gpu.cases_in(folder / "it.xml")


def test_outcomes_are_read(cases: list[gpu.Case]) -> None:
    found = {case.name: case.outcome for case in cases}
    assert found == {"test_passes": "passed", "test_fails": "failed", "test_skips": "skipped"}


def test_a_run_that_was_cut_short_names_the_test_under_way() -> None:
    log = (
        "tests/a.py::test_one[a, b] PASSED   [ 5%]\n"
        "[gw1] [ 10%] PASSED tests/a.py::test_two[c] \n"
        "tests/a.py::test_three[1, 2] \n"
    )
    found = gpu.cases_until("ranks", log)
    assert [(one.name, one.outcome) for one in found] == [
        ("test_one[a, b]", "passed"),
        ("test_two[c]", "passed"),
        ("test_three[1, 2]", "failed"),
    ]
    assert [one.name for one in gpu.cases_until("ranks", "")] == [""]


def test_what_a_late_process_has_started_is_ended_with_it(tmp_path: Path) -> None:
    child = "import subprocess; subprocess.run(['sleep', '600'])"
    process = subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
    time.sleep(0.5)
    gpu.ended(process, 0.1)
    command = ["pgrep", "--runstates", "R,S,D", "-g", str(process.pid)]
    deadline = time.monotonic() + 60.0
    while subprocess.run(command, check=False, capture_output=True).stdout:
        assert time.monotonic() < deadline, "the process group is still running"
        time.sleep(0.05)  # a killed process may need some time to end


def test_a_run_takes_the_place_of_the_last(cases: list[gpu.Case], tmp_path: Path) -> None:
    page = tmp_path / "gpu.md"
    page.write_text(f"# Above\n\n{gpu.BEGIN}old\n{gpu.END}\nbelow\n")
    times = [Result("race", "ours", 1.5, Spread(0.5, 0.4, 0.6), 2.0)]
    text = gpu.results_text(["- device: some"], {"one process": (cases, 3.0)}, 2e12, times)
    for _ in range(2):
        gpu.write(text, page)
    written = page.read_text()
    assert written.startswith("# Above\n\n") and written.endswith("below\n")
    assert "old" not in written and written.count("- device: some") == 1
    assert "| one process | 1 | 1 | 1 | 3 s |" in written
    assert "test_fails`: AssertionError: one | two" in written
    assert "| race: ours | 1.500 ms | 0.50 (0.40 to 0.60) | 2.00 |" in written


def test_a_page_without_marks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "gpu.md").write_text("nothing\n")
    with pytest.raises(ValueError, match="needs the lines"):
        gpu.write("text", tmp_path / "gpu.md")
    assert (tmp_path / "gpu.md").read_text() == "nothing\n"


def test_the_page_has_its_marks() -> None:
    text = gpu.PAGE.read_text()
    assert text.count(gpu.BEGIN) == text.count(gpu.END) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_nothing_is_run() -> None:
    before = gpu.PAGE.read_text()
    done = CliRunner().invoke(gpu.main)
    assert done.exit_code == 0 and "no CUDA device" in done.output
    assert gpu.PAGE.read_text() == before


def test_the_paths_of_suites_are_there() -> None:
    for paths in gpu.SUITES.values():
        for one in paths:
            assert (gpu.ROOT / one.removeprefix("--ignore=")).exists(), one


def test_first_contestants_are_torchs_or_the_reference() -> None:
    for race in gpu_steps.RACES:
        first = next(iter(race.by))
        assert first.startswith("torch") or first.endswith("reference"), race.name
