"""Outputs of a run: files in a folder, and the page of the documentation."""

from pathlib import Path

from benchmarks.averaging_picture import draw_averaging
from benchmarks.picture import draw
from benchmarks.process import ROOT
from benchmarks.records import Report
from benchmarks.sharded_picture import draw_sharded
from benchmarks.tables import details

LATEST = ROOT / "benchmarks" / "results" / "latest.json"
DETAILS = ROOT / "docs" / "benchmarks.md"
RESULTS = "bench.json"
"""Name of the file with the results of a run."""
PICTURE = ROOT / "docs" / "benchmarks.png"
SHARDED = "-sharded.png"
"""Suffix of the second picture's name, in place of the first one's ending."""
AVERAGING = "-averaging.png"
"""Suffix of the third picture's name."""


def latest() -> Report | None:
    """Return the run that the documentation shows, or None before the first one."""
    return Report.load(LATEST) if LATEST.exists() else None


def page(report: Report) -> str:
    """Return the text of ``docs/benchmarks.md``, with the pictures after the summary."""
    pictures = [f"![Time of a step in multiples of the floor]({PICTURE.name})"]
    if _trained(report):
        name = _beside(PICTURE, SHARDED).name
        pictures.append(f"![Time of an iteration on several ranks]({name})")
    if report.averaging_races:
        name = _beside(PICTURE, AVERAGING).name
        pictures.append(f"![Validation loss of training over a slow link]({name})")
    others = (
        "Composed optimizers compared with the same steps written by hand: "
        "[composed.md](composed.md). Muon on many matrices: [matrices.md](matrices.md). Pointwise "
        "algorithms compared with memory bandwidth: [pointwise.md](pointwise.md)."
    )
    return details(report, "\n\n".join([others, *pictures]) + "\n")


def _trained(report: Report) -> bool:
    return any(one.cell.heats for one in report.sharded)


def _beside(picture: Path, ending: str) -> Path:
    """Return the path of another picture, in the folder of the first one."""
    return picture.with_name(picture.stem + ending)


def _draw_others(report: Report, picture: Path) -> list[Path]:
    """Draw the other pictures of the results, and return their paths."""
    files = []
    if _trained(report):
        files.append(_beside(picture, SHARDED))
        draw_sharded(report, files[-1])
    if report.averaging_races:
        files.append(_beside(picture, AVERAGING))
        draw_averaging(report, files[-1])
    return files


def write_files(report: Report, folder: Path) -> list[Path]:
    """Write the results to a separate folder, so that no committed file changes."""
    files = [folder / RESULTS, folder / "bench.md"]
    report.save(files[0])
    # Use the saved times, which have four digits.
    kept = Report.load(files[0])
    files[1].write_text(details(kept), encoding="utf-8")
    if any(cell.device == "cpu" for cell in kept.cells):
        files.append(folder / "bench.png")
        draw(kept, files[-1])
    return files + _draw_others(kept, folder / "bench.png")


def publish(report: Report) -> list[Path]:
    """Make a report the published one in the documentation."""
    report.save(LATEST)
    kept = Report.load(LATEST)
    DETAILS.parent.mkdir(parents=True, exist_ok=True)
    DETAILS.write_text(page(kept), encoding="utf-8")
    draw(kept, PICTURE)
    return [LATEST, DETAILS, PICTURE, *_draw_others(kept, PICTURE)]
