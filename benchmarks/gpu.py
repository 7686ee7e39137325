"""``make gpu``: run the tests that need a CUDA device, time steps, and write a page.

The run takes eight minutes on one device. Several ranks share the device. Each rank pretends to be
another host, because NCCL refuses two ranks on one device of a host. Without a device the command
says so and does not fail.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import click
import torch

from benchmarks.gpu_steps import Result, run
from benchmarks.markdown import table
from benchmarks.process import ROOT
from benchmarks.ratios import short

PAGE = ROOT / "docs" / "gpu.md"
BEGIN = "<!-- begin: written by make gpu -->\n"
END = "<!-- end -->\n"

SUITES = {
    "one process": [
        "tests/cuda",
        "tests/storage/test_stored_params.py",
        "tests/core/test_graph_capture.py",
        "tests/executors/plain/test_foreach.py",
        "--ignore=tests/cuda/ranks",
    ],
    "several ranks over NCCL": ["tests/cuda/ranks"],
}
"""Arguments of pytest for each suite."""
OFF = ("no:cacheprovider", "no:benchmark")
"""Plugins that are turned off. pytest-benchmark warns under pytest-xdist, and warnings are
errors."""

TEST_IN_LINE = re.compile(r"(\S+\.py::.*?)(?: (?:PASSED|FAILED|SKIPPED|ERROR).*)?$")
"""Name of a test in a line of ``pytest -v``."""


class Case(NamedTuple):
    """Test."""

    file: str
    name: str
    outcome: str
    """``passed``, ``failed`` or ``skipped``."""
    text: str
    """The last line of a failure."""


def cases_in(path: Path) -> list[Case]:
    """Return the tests of a run from the XML of pytest."""
    found = []
    for one in ET.parse(path).iter("testcase"):  # noqa: S314  pytest has just written it
        outcome, text = "passed", ""
        for kind in one:
            if kind.tag in {"failure", "error", "skipped"}:
                outcome = "skipped" if kind.tag == "skipped" else "failed"
                text = kind.get("message", "").strip().splitlines()[0][:160]
        found.append(Case(one.get("classname", ""), one.get("name", ""), outcome, text))
    return found


def tested(processes: int, seconds: float) -> dict[str, tuple[list[Case], float]]:
    """Run both suites side by side. Return the tests of each suite, and the time that it took."""
    found: dict[str, tuple[list[Case], float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        begun = time.monotonic()
        running = {}
        for number, (name, what) in enumerate(SUITES.items()):
            report, log = Path(folder) / f"{number}.xml", Path(folder) / f"{number}.txt"
            many = ["-n", str(processes)] if number == 0 and processes > 1 else []
            command = [sys.executable, "-m", "pytest", "-v", "--tb=short", *many, *what]
            command += [f"--junitxml={report}", *(part for one in OFF for part in ("-p", one))]
            with log.open("w") as into:
                running[name] = (
                    report,
                    log,
                    subprocess.Popen(command, cwd=ROOT, stdout=into, start_new_session=True),
                )
        for name, (report, log, process) in running.items():
            left = max(1.0, seconds - (time.monotonic() - begun))
            ended(process, left)
            took = time.monotonic() - begun
            lines = log.read_text(encoding="utf-8")
            click.echo(lines)
            found[name] = (cases_in(report) if report.exists() else cases_until(name, lines)), took
    return found


def ended(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait for a process. After the time limit, kill it and all processes that it has started.

    Otherwise ranks that wait for each other would slow down the steps that are timed later.
    """
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def cases_until(suite: str, log: str) -> list[Case]:
    """Return the tests of an interrupted run from its output. The last test counts as failed."""
    found, last = [], suite
    for line in log.splitlines():
        test = TEST_IN_LINE.search(line)
        if test is not None:
            last = test[1].rstrip()
            if " PASSED" in line:
                found.append(_case(last, "passed", ""))
    return [*found, _case(last, "failed", "it did not end in time")]


def _case(test: str, outcome: str, text: str) -> Case:
    file, _, name = test.partition("::")
    return Case(file, name, outcome, text)


def _machine() -> list[str]:
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return [
        f"- device: {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, NCCL {nccl}",
        f"- torch {torch.__version__}, Python {sys.version.split()[0]}",
        f"- date: {time.strftime('%Y-%m-%d')}",
    ]


def results_text(
    machine: list[str],
    suites: dict[str, tuple[list[Case], float]],
    bandwidth: float,
    times: list[Result],
) -> str:
    """Return the part of the page that a run writes."""
    rows, failed = [], []
    for name, (cases, took) in suites.items():
        count = Counter(case.outcome for case in cases)
        outcomes = [str(count[one]) for one in ("passed", "failed", "skipped")]
        rows.append([name, *outcomes, f"{took:.0f} s"])
        failed += [case for case in cases if case.outcome == "failed"]
    lines = ["## The last run\n", *machine, "", table(SUITE_HEAD, rows)]
    if failed:
        lines += ["Failed:\n", *[f"- `{one.file}::{one.name}`: {one.text}" for one in failed], ""]
    explained = (
        f"A copy on the device moves {bandwidth / 1e12:.2f} TB/s, bytes read and bytes written. "
        "Times are medians of interleaved turns; a ratio below 1 is faster than the first "
        "contestant of a race. The last column is the time as a multiple of what the copy's "
        "bandwidth allows, for as many passes over the elements as the rule needs.\n"
    )
    lines += [
        explained,
        table(
            TIME_HEAD,
            [
                [
                    f"{one.race}: {one.contestant}",
                    f"{one.milliseconds:.3f} ms",
                    str(one.ratio),
                    short(one.of_copy),
                ]
                for one in times
            ],
        ),
    ]
    return "\n".join(lines)


SUITE_HEAD = ("tests", "passed", "failed", "skipped", "took")
TIME_HEAD = ("step", "time", "ratio to the first (least to greatest)", "multiple of a copy")


def write(text: str, page: Path = PAGE) -> None:
    """Replace the text between the marks of the page.

    Raises:
        ValueError: the page lacks the marks.
    """
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} needs the lines {BEGIN.strip()!r} and {END.strip()!r}")
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


@click.command()
@click.option("--processes", default=8, show_default=True, help="of pytest, for one suite")
@click.option("--seconds", default=360.0, show_default=True, help="for the tests, at most")
def main(processes: int, seconds: float) -> None:
    """Run the tests that need a CUDA device, time steps, and write docs/gpu.md."""
    if not torch.cuda.is_available():
        click.echo("There is no CUDA device here: nothing was run, and docs/gpu.md stays as it is.")
        return
    suites = tested(processes, seconds)
    bandwidth, times = run()
    text = results_text(_machine(), suites, bandwidth, times)
    write(text)
    click.echo(text)
    if any(case.outcome == "failed" for cases, _ in suites.values() for case in cases):
        sys.exit(1)


if __name__ == "__main__":
    main()
