"""Check of the tests: each fault is planted in a copy of src, and a test must fail.

``python -m tests.planted_faults [NAME ...] [--check] [--jobs N]`` reads
``tests/planted_faults.toml``::

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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

ROOT = Path(__file__).parents[1]
FAULTS = "tests/planted_faults.toml"
SOURCE = "src"
LIMIT_SECONDS = 1200.0
SEEN, PASSED = 1, 0
"""Exit codes of pytest if a test fails, and if all pass."""


@dataclass(frozen=True)
class Fault:
    """Replacement of one text in one file."""

    name: str
    file: str
    before: str
    after: str
    tests: Sequence[str]
    check: bool = False


def read(path: Path) -> list[Fault]:
    """Return the faults of a file.

    Raises:
        ValueError: a fault has missing or unknown fields, or no tests, or its name occurs twice.
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
    """Return the faults with these names, or all; with ``check``, only those of unit tests.

    Raises:
        ValueError: no fault has one of the names.
    """
    unknown = set(names) - {fault.name for fault in faults}
    if unknown:
        raise ValueError(f"there is no fault {min(unknown)!r}")
    named = [fault for fault in faults if not names or fault.name in names]
    return [fault for fault in named if fault.check or not check]


def plant(fault: Fault, copy: Path) -> None:
    """Put a fault into a copy of src.

    Raises:
        ValueError: the file is not in src, or does not have the text exactly once.
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
    """Copy src, including compiled Python files, until the block ends."""
    with tempfile.TemporaryDirectory(prefix="planted-") as name:
        yield shutil.copytree(root / SOURCE, Path(name) / SOURCE)


@dataclass(frozen=True)
class Outcome:
    """Exit code and output of a run of pytest."""

    code: int
    said: str

    @property
    def failed(self) -> list[str]:
        """The failed tests, in the order of the run."""
        return re.findall(r"^FAILED (.+?)(?: - .*)?$", self.said, flags=re.MULTILINE)

    @property
    def end(self) -> str:
        return "\n".join(self.said.strip().splitlines()[-15:])


def outcome(
    tests: Sequence[str], copy: Path, root: Path, *, check: bool, to_the_end: bool = False
) -> Outcome:
    """Run tests with the packages of a copy of src, by default until the first failure."""
    own = ("PYTEST_", "FUNCTIONAL_OPTIM_")  # variables of the process that may run this one
    variables = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *([] if to_the_end else ["-x"]), *(["-m", "unit"] if check else []), *tests],
        cwd=root,
        env={"OMP_NUM_THREADS": "1", **variables, "PYTHONPATH": str(copy)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=None if to_the_end else LIMIT_SECONDS,
        check=False,
    )
    return Outcome(done.returncode, done.stdout)


@dataclass(frozen=True)
class Verdict:
    """Result of planting a fault: the test that failed, or why there is no proof."""

    fault: Fault
    by: str
    """The test that failed."""
    wrong: str
    """The reason why there is no proof; empty if there is one."""
    seconds: float


def judged(
    faults: Sequence[Fault],
    root: Path,
    *,
    check: bool = False,
    jobs: int = 1,
    report: Callable[[Verdict], None] = lambda verdict: None,
) -> list[Verdict]:
    """Plant each fault in a separate copy, then run the failed tests once without faults.

    Args:
        faults: faults to plant.
        root: root of the project.
        check: True to run unit tests only.
        jobs: number of faults that run at the same time.
        report: called with each verdict at once, before the failed tests are run again.
    """
    found = []
    with ThreadPoolExecutor(jobs) as pool:
        running = [pool.submit(_planted, fault, root, check=check) for fault in faults]
        for one in as_completed(running):
            report(one.result())
        found = [one.result() for one in running]
    failing = _failing_without(sorted({one.by for one in found if not one.wrong}), root)
    return [
        replace(one, wrong=f"{one.by} fails without the fault too") if one.by in failing else one
        for one in found
    ]


def _planted(fault: Fault, root: Path, *, check: bool) -> Verdict:
    begin, by, wrong = time.monotonic(), "", ""
    try:
        with copied(root) as copy:
            plant(fault, copy)
            found = outcome(fault.tests, copy, root, check=check)
            by = next(iter(found.failed), "")
            if found.code != SEEN or not by:
                wrong = f"with the fault pytest exits with {found.code}:\n{found.end}"
    except (ValueError, subprocess.TimeoutExpired) as error:
        wrong = str(error)
    return Verdict(fault, by, wrong, time.monotonic() - begin)


def _failing_without(tests: Sequence[str], root: Path) -> list[str]:
    """Return the tests that fail in a copy without a fault."""
    if not tests:
        return []
    with copied(root) as copy:
        found = outcome(tests, copy, root, check=False, to_the_end=True)
    return list(tests) if found.code not in (SEEN, PASSED) else found.failed


@click.command()
@click.argument("names", nargs=-1)
@click.option("--check", is_flag=True, help="Only faults that unit tests see, by these alone.")
@click.option("--jobs", default=2, show_default=True, help="How many are planted at a time.")
def main(names: Sequence[str], *, check: bool, jobs: int) -> None:
    """Plant faults, all or those of these NAMES, and see whether tests fail."""
    console = Console()
    try:
        faults = chosen(read(ROOT / FAULTS), names, check=check)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    begin = time.monotonic()

    def report(verdict: Verdict) -> None:
        console.print(f"{verdict.fault.name}: {'NOT SEEN' if verdict.wrong else 'seen'}")

    verdicts = judged(faults, ROOT, check=check, jobs=jobs, report=report)
    missed = [one for one in verdicts if one.wrong]
    table = Table("fault", "seen by", "seconds", title=f"{len(faults)} planted faults")
    table.columns[1].overflow = "fold"
    table.columns[2].justify = "right"
    for one in verdicts:
        table.add_row(
            one.fault.name, "[red]NOT SEEN" if one.wrong else escape(one.by), f"{one.seconds:.1f}"
        )
    console.print(table)
    seen, minutes = len(verdicts) - len(missed), (time.monotonic() - begin) / 60
    console.print(f"{seen} of {len(verdicts)} were seen, in {minutes:.0f} minutes")
    for one in missed:
        console.print(f"\n{one.fault.name}: {one.wrong}", markup=False, highlight=False)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
