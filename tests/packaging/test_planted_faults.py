"""Tests of the script that plants faults, and reports faults that no test detects."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests import planted_faults
from tests.choices import case
from tests.planted_faults import FAULTS, ROOT, Fault, chosen, judged, plant, read

SMALLER = Fault(
    "smaller", "src/tiny_sum/__init__.py", "a + b", "a - b", ["tests/test_sum.py"], check=True
)
UNSEEN = Fault("the same in all", "src/tiny_sum/__init__.py", "a + b", "b + a", SMALLER.tests)
BROKEN = Fault("broken", "src/tiny_sum/__init__.py", "a + b", "a +", SMALLER.tests)


NO_PLUGINS = "".join(
    f" -p no:{name}" for name in ("hypothesispytest", "xdist", "xdist.looponfail", "timeout")
)
"""Options that disable plugins, since importing them takes longer than the test itself."""


def written(fault: Fault) -> str:
    """Return a fault in the format of the table."""
    fields = asdict(fault)
    return "\n".join(
        ["[[fault]]", *(f"{name} = {json.dumps(fields[name])}" for name in fields), ""]
    )


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a project with one function, one test of it, and two faults."""
    files = {
        "src/tiny_sum/__init__.py": "def total(a, b):\n    return a + b\n",
        "tests/test_sum.py": (
            "import pytest\nimport tiny_sum\n\n\n@pytest.mark.unit\n"
            "def test_sum():\n    assert tiny_sum.total(2, 3) == 5\n"
        ),
        "tests/test_wrong.py": "def test_wrong():\n    assert False\n",
        "pytest.ini": f"[pytest]\nmarkers = unit\naddopts = {NO_PLUGINS}\n",
        "tests/planted_faults.toml": written(SMALLER) + written(UNSEEN),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(planted_faults, "ROOT", tmp_path)
    return tmp_path


def test_a_fault_is_seen_where_a_test_fails_and_passes_without_it(root: Path) -> None:
    wrong = Fault("seen by a wrong test", SMALLER.file, "a + b", "0", ["tests/test_wrong.py"])
    none = Fault("seen by none", SMALLER.file, "a + b", "0", ["tests/none.py"])
    found = {
        one.fault.name: one for one in judged([SMALLER, UNSEEN, BROKEN, wrong, none], root, jobs=2)
    }
    assert found["smaller"].by == "tests/test_sum.py::test_sum" and not found["smaller"].wrong
    for name, message in (
        ("the same in all", "with the fault pytest exits with 0"),
        ("broken", "with the fault pytest exits with 2"),  # no test was collected
        ("seen by a wrong test", "tests/test_wrong.py::test_wrong fails without the fault too"),
        ("seen by none", "with the fault pytest exits with 4"),
    ):
        with case(name=name):
            assert found[name].wrong.startswith(message)
    assert (root / SMALLER.file).read_text() == "def total(a, b):\n    return a + b\n"


def test_the_command_exits_by_what_was_not_seen(root: Path) -> None:
    result = CliRunner().invoke(planted_faults.main, ["--check"])
    assert result.exit_code == 0, result.output
    assert "1 planted faults" in result.output and "test_sum" in result.output
    result = CliRunner().invoke(planted_faults.main, [UNSEEN.name])
    assert result.exit_code == 1
    assert "NOT SEEN" in result.output and "pytest exits with 0" in result.output
    result = CliRunner().invoke(planted_faults.main, ["unheard of"])
    assert result.exit_code == 1 and "there is no fault 'unheard of'" in result.output


def test_a_fault_that_cannot_be_planted_is_refused(root: Path) -> None:
    for file, before, after, message in (
        (SMALLER.file, "a * b", "a", "has `before` 0 times, not once"),
        (SMALLER.file, "a", "b", "has `before` 3 times, not once"),
        (SMALLER.file, "a + b", "a + b", "`before` and `after` are the same"),
        ("src/tiny_sum/other.py", "a", "b", "is no file of src"),
        ("tests/test_sum.py", "2", "3", "is no file of src"),
    ):
        fault = Fault("x", file, before, after, ["tests"])
        with case(file=file, before=before), pytest.raises(ValueError, match=message):
            plant(fault, root / "src")


def test_a_table_of_faults_is_read_and_chosen_from(root: Path) -> None:
    path = root / "tests" / "planted_faults.toml"
    found = read(path)
    assert found == [SMALLER, UNSEEN]
    assert chosen(found, [], check=True) == [SMALLER]
    assert chosen(found, [UNSEEN.name], check=False) == [UNSEEN]
    whole = path.read_text()
    for text, message in (
        (whole + whole, "'smaller' stands twice"),
        (whole.replace("check =", "unit ="), "unexpected keyword argument 'unit'"),
        (whole.replace("before =", "# "), "missing 1 required positional argument: 'before'"),
        (whole.replace(json.dumps(SMALLER.tests), "[]"), "must name the tests that see it"),
    ):
        path.write_text(text)
        with case(message=message), pytest.raises(ValueError, match=message):
            read(path)


def test_every_fault_that_is_kept_can_be_planted() -> None:
    for fault in read(ROOT / FAULTS):
        with case(fault=fault.name):
            assert (ROOT / fault.file).read_text(encoding="utf-8").count(fault.before) == 1
            assert all((ROOT / test.partition("::")[0]).exists() for test in fault.tests)
