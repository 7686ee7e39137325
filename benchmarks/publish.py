"""Where results go: files, and the part of the README between two marks."""

import re
from pathlib import Path

from benchmarks.averaging_picture import draw_averaging
from benchmarks.picture import draw
from benchmarks.process import ROOT
from benchmarks.records import Report
from benchmarks.sharded_picture import draw_sharded
from benchmarks.tables import details, summary

LATEST = ROOT / "benchmarks" / "results" / "latest.json"
README = ROOT / "README.md"
DETAILS = ROOT / "docs" / "benchmarks.md"
RESULTS = "bench.json"
"""The name of a run's results in its folder."""
PICTURE = ROOT / "docs" / "benchmarks.png"
SHARDED = "-sharded.png"
"""What the name of the second picture has in place of the first one's ending."""
AVERAGING = "-averaging.png"
"""The same of the third."""
MARKED = re.compile(r"(<!-- bench -->\n).*?(<!-- /bench -->)", flags=re.DOTALL)


def latest() -> Report | None:
    """The run that the README shows; None before the first one."""
    return Report.load(LATEST) if LATEST.exists() else None


def readme_with(text: str, report: Report | None) -> str:
    """The README's text with a report between its marks.

    Raises:
        ValueError: the marks are not there, or not once.
    """
    if len(MARKED.findall(text)) != 1:
        raise ValueError(
            f"{README.name} must hold <!-- bench --> and <!-- /bench --> once, on lines of their "
            f"own; found {len(MARKED.findall(text))} such places"
        )
    return MARKED.sub(lambda found: f"{found[1]}{_section(report)}{found[2]}", text)


def _section(report: Report | None) -> str:
    shown = summary(report)
    if report is None:
        return shown
    pictures = [f"![Time of a step in multiples of the floor](docs/{PICTURE.name})"]
    if _trained(report):
        name = _beside(PICTURE, SHARDED).name
        pictures.append(f"![Time of an iteration on several ranks](docs/{name})")
    if report.averaging_races:
        name = _beside(PICTURE, AVERAGING).name
        pictures.append(f"![Validation loss of training over a slow link](docs/{name})")
    shown += "\nEvery contestant: [docs/benchmarks.md](docs/benchmarks.md). "
    shown += "Composed optimizers beside what is written by hand: [docs/composed.md]"
    shown += "(docs/composed.md); Muon on many matrices: [docs/matrices.md](docs/matrices.md).\n\n"
    return shown + "\n\n".join(pictures) + "\n"


def _trained(report: Report) -> bool:
    return any(one.cell.heats for one in report.sharded)


def _beside(picture: Path, ending: str) -> Path:
    """Where another picture lies, beside the first one."""
    return picture.with_name(picture.stem + ending)


def _draw_others(report: Report, picture: Path) -> list[Path]:
    """The pictures beside the first one, of what was measured."""
    files = []
    if _trained(report):
        files.append(_beside(picture, SHARDED))
        draw_sharded(report, files[-1])
    if report.averaging_races:
        files.append(_beside(picture, AVERAGING))
        draw_averaging(report, files[-1])
    return files


def write_files(report: Report, folder: Path) -> list[Path]:
    """The results in a folder of their own: nothing that is committed changes."""
    files = [folder / RESULTS, folder / "bench.md"]
    report.save(files[0])
    # As it will be read again: times have four digits then.
    kept = Report.load(files[0])
    files[1].write_text(details(kept), encoding="utf-8")
    if any(cell.device == "cpu" for cell in kept.cells):
        files.append(folder / "bench.png")
        draw(kept, files[-1])
    return files + _draw_others(kept, folder / "bench.png")


def publish(report: Report) -> list[Path]:
    """Make a report the one that the README and the docs show."""
    text = readme_with(README.read_text(encoding="utf-8"), report)  # fails before a file changes
    report.save(LATEST)
    kept = Report.load(LATEST)
    DETAILS.parent.mkdir(parents=True, exist_ok=True)
    DETAILS.write_text(details(kept), encoding="utf-8")
    draw(kept, PICTURE)
    files = [LATEST, DETAILS, PICTURE, README, *_draw_others(kept, PICTURE)]
    text = readme_with(text, kept)
    README.write_text(text, encoding="utf-8")
    return files
