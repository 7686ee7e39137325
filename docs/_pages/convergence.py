"""The page of convergence, from the results that ``make convergence`` has stored."""

import json
import statistics
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.training import contestants
from benchmarks.training.run import CHOICE, FIRST_RATE, SEEDS
from benchmarks.training.stack import STEPS, TASK
from benchmarks.training.tasks import TASKS, Task
from docs._pages.markdown import table
from functional_optim import algorithms

DATA = Path(__file__).parents[1] / "_data" / "convergence.json"

HEAD = """# Does it train?

`make convergence` trains every algorithm on five small problems. A run passes if its last score is
at most the threshold of the problem. The threshold is the same for all algorithms. It was set after
short trials of `adam`, `sgd` and `muon`, before the others ran. This is a test that an algorithm
descends, and not a ranking: a small problem says little about a large model.

- Each algorithm has its default options ({options}) and a constant learning rate.
- The rate is the best of {rates} by the score after half the steps with seed {choice}. Where a seed
  fails at that rate, the others are tried from {first} outwards, until all seeds ({seeds}) pass
  at one of them. So a smaller score is often possible.
- The tables have the number of seeds that pass, the median of the last scores, and their spread
  (largest less smallest).
- An algorithm for matrices steps the matrices of the transformer's block, and AdamW with rate
  {rest:g} steps all other parameters. It does not run on problems without a matrix.
- Curves are medians of three seeds, and the band is their range. The dashed line is the threshold.
"""

STACK = """## A stack as one chain

The optimizer track of the NanoGPT speedrun combines SOAP or NorMuon with a control of the norms of
rows, cautious weight decay and an average over the tail of the run. Here the combination is one
`chain` (`benchmarks/training/stack.py`). It trains the demo's transformer (two blocks of width 64,
{steps} steps, warm-up and cosine) beside AdamW and Muon, each with the best of the learning rates
{rates}, by the score after half the steps with another seed ({choice}). Scores are losses on
held-out text, in nats a character.

{table}
![Held-out losses of the stacks](pictures/convergence/stack.svg)
"""


@cache
def stored() -> dict[str, dict[str, Any]]:
    """Return the results of the last ``make convergence``, by problem and algorithm."""
    found: dict[str, dict[str, Any]] = {}
    if DATA.exists():
        found = json.loads(DATA.read_text(encoding="utf-8"))
    return found


def page() -> str:
    """Return the page."""
    some = next(iter(TASKS.values()))
    options = "; ".join(
        f"`{name}` with " + ", ".join(f"`{key}={value!r}`" for key, value in given.items())
        for name, given in contestants.OPTIONS.items()
        if name in contestants.names()
    )
    parts = [
        HEAD.format(
            options=f"but {options}",
            rates=", ".join(f"{one:g}" for one in some.rates),
            choice=CHOICE,
            first=f"{FIRST_RATE:g}",
            seeds=", ".join(map(str, SEEDS)),
            rest=contestants.REST_RATE,
        )
    ]
    for key, task in TASKS.items():
        parts += [f"## {task.title}\n", _words(task), table(_HEAD, _rows(key, task))]
        picture = f"pictures/convergence/{key}.svg"
        parts.append(f"![{task.title}: scores by step, five algorithms a panel]({picture})\n")
    if "stack" in stored():
        parts.append(_stack())
    return "\n".join(parts)


_HEAD = ["algorithm", "passes", "median", "spread", "learning rate"]


def _words(task: Task) -> str:
    first, rest = task.words[0].upper(), task.words[1:]
    return f"{first}{rest}. {task.steps} steps; threshold {task.threshold:g}.\n"


def _rows(key: str, task: Task) -> list[list[str]]:
    rows = []
    for name, entry in stored().get(key, {}).items():
        if name in contestants.names():
            has_page = name in algorithms.__all__
            shown = f"[`{name}`](algorithms/{name}.md)" if has_page else f"`{name}`"
            rows.append([shown, _passes(scores(entry), task), *_spread(entry)])
    return rows


def _stack() -> str:
    rows = [[name, *_spread(entry)] for name, entry in stored()["stack"].items()]
    return STACK.format(
        steps=STEPS,
        rates=", ".join(f"{one:g}" for one in TASK.rates),
        choice=CHOICE,
        table=table(["optimizer", "median", "spread", "learning rate"], rows),
    )


def _spread(entry: dict[str, Any]) -> list[str]:
    last = scores(entry)
    rate = "none" if entry["rate"] is None else f"{entry['rate']:g}"
    return [f"{statistics.median(last):.3g}", f"{max(last) - min(last):.1g}", rate]


def scores(entry: dict[str, Any]) -> list[float]:
    """Return the last score of each seed."""
    return [curve[-1][1] for curve in entry["curves"]]


def _passes(last: list[float], task: Task) -> str:
    passed = sum(one <= task.threshold for one in last)
    return f"{passed} of {len(last)}"


def rows_of(name: str) -> list[list[str]]:
    """Return one row for each problem that an algorithm ran on."""
    rows = []
    for key, task in TASKS.items():
        entry = stored().get(key, {}).get(name)
        if entry is not None:
            last = scores(entry)
            shown = ", ".join(f"{one:.3g}" for one in last)
            rate = "none" if entry["rate"] is None else f"{entry['rate']:g}"
            rows.append([task.title, _passes(last, task), shown, f"{task.threshold:g}", rate])
    return rows
