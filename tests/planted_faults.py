"""Whether the tests see faults: each is planted in a copy of src, and a test must fail.

``python -m tests.planted_faults [NAME ...] [--check]`` reads ``tests/planted_faults.toml``::

    [[fault]]
    name = "bias correction counts from zero"
    file = "src/functional_optim/algorithms/adamw.py"
    before = "a text that stands once in the file"
    after = "the text with the fault"
    tests = ["tests/core/test_x.py"]
    check = true  # a unit test, and so `make check`, sees it
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
FAULTS = "tests/planted_faults.toml"
SOURCE = "src"
LIMIT_SECONDS = 1200.0
SEEN, PASSED = 1, 0
"""What pytest exits with where a test fails, and where all pass."""


@dataclass(frozen=True)
class Fault:
    """One text of one file, replaced."""

    name: str
    file: str
    before: str
    after: str
    tests: Sequence[str]
    check: bool = False


def read(path: Path) -> list[Fault]:
    """The faults of a file.

    Raises:
        ValueError: one that has too few or too many fields, or no tests; a name that stands twice.
    """
    found: list[Fault] = []
    for place, fields in enumerate(tomllib.loads(path.read_text(encoding="utf-8"))["fault"]):
        name = fields.get("name", f"number {place + 1}")
        try:
            fault = Fault(**fields)
        except TypeError as error:
            raise ValueError(f"fault {name!r}: {error}") from error
        if not fault.tests:
            raise ValueError(f"fault {name!r} must name the tests that see it")
        if any(fault.name == other.name for other in found):
            raise ValueError(f"fault {name!r} stands twice")
        found.append(fault)
    return found


def chosen(faults: Sequence[Fault], names: Sequence[str], *, check: bool) -> list[Fault]:
    """Those that are asked for: by name, or all; and of these perhaps only the unit tests'.

    Raises:
        ValueError: a name that none has.
    """
    unknown = set(names) - {fault.name for fault in faults}
    if unknown:
        raise ValueError(f"there is no fault {min(unknown)!r}")
    named = [fault for fault in faults if not names or fault.name in names]
    return [fault for fault in named if fault.check or not check]


def plant(fault: Fault, copy: Path) -> None:
    """Put a fault into a copy of src.

    Raises:
        ValueError: its file is none of src, or has the text not exactly once.
    """
    place = Path(fault.file)
    if place.parts[0] != SOURCE or not (copy / place.relative_to(SOURCE)).is_file():
        raise ValueError(f"fault {fault.name!r}: {fault.file} is no file of {SOURCE}")
    file = copy / place.relative_to(SOURCE)
    text = file.read_text(encoding="utf-8")
    if (count := text.count(fault.before)) != 1:
        raise ValueError(f"fault {fault.name!r}: {fault.file} has `before` {count} times, not once")
    if fault.after == fault.before:
        raise ValueError(f"fault {fault.name!r}: `before` and `after` are the same")
    file.write_text(text.replace(fault.before, fault.after), encoding="utf-8")


@contextmanager
def copied(root: Path) -> Iterator[Path]:
    """A copy of src, what Python compiled of it included, until the block ends."""
    with tempfile.TemporaryDirectory(prefix="planted-") as name:
        yield shutil.copytree(root / SOURCE, Path(name) / SOURCE)


@dataclass(frozen=True)
class Outcome:
    """What became of the tests."""

    code: int
    said: str

    @property
    def failed(self) -> str:
        """The first test that failed."""
        found = re.search(r"^FAILED (\S+)", self.said, flags=re.MULTILINE)
        return found.group(1) if found else ""

    @property
    def end(self) -> str:
        """The end of what pytest said."""
        return "\n".join(self.said.strip().splitlines()[-15:])


def outcome(tests: Sequence[str], copy: Path, root: Path, *, check: bool) -> Outcome:
    """Run tests with the packages of a copy of src, to the first one that fails."""
    own = ("PYTEST_", "FUNCTIONAL_OPTIM_")  # of the process that this one may be a part of
    variables = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=short", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *(["-m", "unit"] if check else []), *tests],
        cwd=root,
        env={"OMP_NUM_THREADS": "1", **variables, "PYTHONPATH": str(copy)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    return Outcome(done.returncode, done.stdout)


def passing(tests: Sequence[str], root: Path, *, check: bool) -> str:
    """What is wrong with tests where nothing is planted; nothing, if all pass."""
    with copied(root) as copy:
        found = outcome(tests, copy, root, check=check)
    if found.code == PASSED:
        return ""
    return f"without the fault pytest exits with {found.code}:\n{found.end}"


@dataclass(frozen=True)
class Verdict:
    """Whether a fault was seen."""

    fault: Fault
    by: str
    """The test that failed."""
    wrong: str
    """Why that is no proof; empty if it is."""
    seconds: float


def judged(faults: Sequence[Fault], root: Path, *, check: bool = False) -> Iterator[Verdict]:
    """Plant them one after the other.

    Tests that several faults name are run once without a fault, before the first of these.
    """
    clean: dict[tuple[str, ...], str] = {}
    for fault in faults:
        begin, by, tests = time.monotonic(), "", tuple(fault.tests)
        try:
            with copied(root) as copy:
                plant(fault, copy)
                if tests not in clean:
                    clean[tests] = passing(tests, root, check=check)
                wrong = clean[tests]
                if not wrong:
                    found = outcome(tests, copy, root, check=check)
                    by = found.failed
                    if found.code != SEEN or not by:
                        wrong = f"with the fault pytest exits with {found.code}:\n{found.end}"
        except (ValueError, subprocess.TimeoutExpired) as error:
            wrong = str(error)
        yield Verdict(fault, by, wrong, time.monotonic() - begin)


@click.command()
@click.argument("names", nargs=-1)
@click.option("--check", is_flag=True, help="Only faults that unit tests see, by these alone.")
def main(names: Sequence[str], *, check: bool) -> None:
    """Plant faults, all or those of these NAMES, and see whether tests fail."""
    console = Console()
    try:
        faults = chosen(read(ROOT / FAULTS), names, check=check)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    table = Table("fault", "seen by", "seconds", title=f"{len(faults)} planted faults")
    table.columns[1].overflow = "fold"
    table.columns[2].justify = "right"
    missed = []
    for verdict in judged(faults, ROOT, check=check):
        seen = "[red]NOT SEEN" if verdict.wrong else verdict.by
        table.add_row(verdict.fault.name, seen, f"{verdict.seconds:.1f}")
        console.print(f"{verdict.fault.name}: {'NOT SEEN' if verdict.wrong else 'seen'}")
        missed += [verdict] if verdict.wrong else []
    console.print(table)
    for verdict in missed:
        console.print(f"\n{verdict.fault.name}: {verdict.wrong}", markup=False, highlight=False)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
