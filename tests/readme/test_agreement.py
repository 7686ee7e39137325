"""Tests of the page of agreement: its table has the results of the laws, and executors are named.

``python -m tests.readme.test_agreement`` writes the table into the page.
"""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from functional_optim import (
    NoState,
    Optimizer,
    Rule,
    adahessian,
    algorithms,
    chain,
    prodigy,
    schedule_free_adamw,
    schedule_free_sgd,
    sophia,
)
from functional_optim.core.state import field_tensors
from functional_optim.kernels import ExecutorName
from functional_optim.testing import LawBroken, Subject, check_law
from functional_optim.testing.inputs import SCALE, fed
from tests.agreement.formulas_adaptive import ADAPTIVE_FORMULAS
from tests.agreement.formulas_first import FIRST_FORMULAS
from tests.agreement.formulas_layerwise import LAYERWISE_FORMULAS, MATRICES
from tests.agreement.formulas_muon import MUON_FORMULAS
from tests.agreement.formulas_shampoo import SHAMPOO_FORMULAS
from tests.cases import CASES, INPUT_CASES
from tests.choices import EVERYTHING
from tests.composition.second_order import adahessian_formula, sophia_formula

ALGORITHMS = {**CASES, **{k: v for k, v in INPUT_CASES.items() if k in algorithms.__all__}}

PAGE = Path(__file__).parents[2] / "docs" / "agreement.md"
TABLE = re.compile(r"<!-- parity -->\n(.*?)<!-- /parity -->", flags=re.DOTALL)
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
REFUSING = re.compile(r"^Only `(\w+)`, [^`]*refuses a chain", flags=re.MULTILINE)

EXAMPLES = 30 if EVERYTHING else 4
"""Number of examples; few, since ``tests/laws`` tests every law of every optimizer."""

Values = list[float]


def prodigy_formula(p: Values, grads: list[Values]) -> tuple[Values, Values]:
    """Compute Mishchenko & Defazio 2024, algorithm 4: d0 0.1, decay 0.01."""
    start, d, r = list(p), 0.1, 0.0
    s, m, v = ([0.0] * len(p) for _ in range(3))
    for g in grads:
        length, b3 = d, math.sqrt(0.999)
        r = b3 * r + d / 0.1 * d * sum(a * (x - y) for a, x, y in zip(g, start, p, strict=True))
        s = [b3 * b + d / 0.1 * d * a for a, b in zip(g, s, strict=True)]
        m = [0.9 * b + 0.1 * d * a for a, b in zip(g, m, strict=True)]
        v = [0.999 * b + 0.001 * (d * a) ** 2 for a, b in zip(g, v, strict=True)]
        d = max(d, r / math.fsum(map(abs, s)))
        p = [
            x - length * (0.01 * x + a / (math.sqrt(b) + d * 1e-8))
            for x, a, b in zip(p, m, v, strict=True)
        ]
    return p, s


def schedule_free_formula(
    p: Values, grads: list[Values], *, squares: bool
) -> tuple[Values, Values]:
    """Compute Defazio et al. 2024, eq. 9-11 and algorithm 1: lr 0.1, b 0.9, decay 0.01.

    All weights are equal, and AdamW has b2 = 0.99.
    """
    x, y, z, v = list(p), list(p), list(p), [0.0] * len(p)
    for t, g in enumerate(grads, start=1):
        u = g
        if squares:
            v = [0.99 * b + 0.01 * a * a for a, b in zip(g, v, strict=True)]
            u = [a / (math.sqrt(b / (1 - 0.99**t)) + 1e-8) for a, b in zip(g, v, strict=True)]
        z = [a - 0.1 * (b + 0.01 * c) for a, b, c in zip(z, u, y, strict=True)]
        x = [a + (b - a) / t for a, b in zip(x, z, strict=True)]
        y = [0.1 * a + 0.9 * b for a, b in zip(z, x, strict=True)]
    return y, z


SOPHIA = {"lr": 0.1, "betas": (0.9, 0.99), "gamma": 5.0, "eps": 0.1, "weight_decay": 0.01}
ADAHESSIAN = {
    "lr": 0.1,
    "betas": (0.9, 0.99),
    "eps": 1e-3,
    "weight_decay": 0.01,
    "hessian_power": 1.0,
    "maximize": False,
}


def given_formula(
    formula: Callable[..., tuple[float, ...]],
    hyper: dict[str, Any],
    p: Values,
    grads: list[Values],
) -> tuple[Values, Values]:
    """Compute a formula that needs estimates, which are scaled gradients, as in the laws."""
    columns = [[(g, SCALE * g) for g in column] for column in zip(*grads, strict=True)]
    made = [formula(one, own, hyper) for one, own in zip(p, columns, strict=True)]
    return [one[0] for one in made], [one[1] for one in made]


FORMULAS: dict[str, tuple[Callable[[], Optimizer], Callable[..., tuple[Values, Values]]]] = {
    "prodigy": (lambda: prodigy(d0=0.1, weight_decay=0.01), prodigy_formula),
    "schedule_free_sgd": (
        lambda: schedule_free_sgd(lr=0.1, weight_decay=0.01),
        partial(schedule_free_formula, squares=False),
    ),
    "schedule_free_adamw": (
        lambda: schedule_free_adamw(lr=0.1, betas=(0.9, 0.99), weight_decay=0.01),
        partial(schedule_free_formula, squares=True),
    ),
    "sophia": (lambda: sophia(**SOPHIA), partial(given_formula, sophia_formula, SOPHIA)),
    "adahessian": (
        lambda: adahessian(**ADAHESSIAN),
        partial(given_formula, adahessian_formula, ADAHESSIAN),
    ),
    **FIRST_FORMULAS,
    **LAYERWISE_FORMULAS,
    **SHAMPOO_FORMULAS,
    **MUON_FORMULAS,
    **ADAPTIVE_FORMULAS,
}
MATRIX = (5, 100)
"""Shape of a parameter that must be a matrix; algorithms rotate its shorter side."""
BOUND = 4
"""Bound in units in the last place of the largest value, after 5 steps."""
BOUNDS = {"galore_adamw": 32, "soap": 16}
"""Larger bounds, since rounded matrices have rotated eigenvectors."""


def distance(name: str, dtype: torch.dtype) -> float:
    """Return the largest distance of params and state from the formula, in ulps."""
    build, formula = FORMULAS[name]
    optimizer = fed(build())
    generator = torch.Generator().manual_seed(0)

    def drawn() -> Tensor:
        numbers = torch.randn(500, generator=generator, dtype=torch.float64).to(dtype)
        is_matrix = ALGORITHMS[name].matrices or name in MATRICES
        return numbers.reshape(MATRIX) if is_matrix else numbers

    param, grads = drawn(), [drawn() for _ in range(5)]
    want = formula(param.double().flatten().tolist(), _lists(grads))
    state = optimizer.init(param)
    for grad in grads:
        param, state = optimizer.update(param, grad, state)
    worst = 0.0
    fields = [field for stage in state.leaves.stages for field in stage]
    kept = field_tensors(fields[0])[0] if fields else param
    for got, expected in zip((param, kept), want, strict=True):
        exact = torch.tensor(expected, dtype=torch.float64).reshape(got.shape)
        unit = torch.finfo(dtype).eps * float(exact.abs().max())
        worst = max(worst, float((got.double() - exact).abs().max()) / unit)
    return worst


def _lists(tensors: list[Tensor]) -> list[Values]:
    return [one.double().flatten().tolist() for one in tensors]


def verdict(law: str, subject: Subject) -> str:
    try:
        check_law(law, subject, max_examples=EXAMPLES)
    except LawBroken as broken:
        return f"differs: {broken.law}"
    return "bit for bit"


HEAD = ["optimizer", "compared with", "float32", "float64", "bfloat16"]
HEAD += ["complex = its real view", "script = reference"]
MEASURED = HEAD[2:]


def cell(name: str, column: str) -> str:
    """Measure one cell of the table."""
    case = ALGORITHMS[name]
    subject = case.subject()
    if column == "script = reference":
        return verdict("script is reference", subject)
    if column == "complex = its real view":
        if case.takes_complex and not case.matrices:
            return verdict("complex is its real view", subject)
        return "real matrices only" if case.matrices else "real only"
    dtype = DTYPES[MEASURED.index(column)]
    if case.oracle is not None:
        return verdict("same as the oracle", replace(subject, dtypes=(dtype,)))
    bound = BOUNDS.get(name, BOUND)
    return f"within {bound} ulp" if distance(name, dtype) <= bound else "differs"


def parity_table(cells: Callable[[str, str], str] = cell) -> str:
    """Return the table. ``cells`` returns the cell of an algorithm and a column."""
    rows = [HEAD, ["---"] * len(HEAD)]
    for name, case in ALGORITHMS.items():
        oracle = "its formula in float64"
        if case.oracle is not None:
            oracle = f"torch.optim.{case.oracle.__name__}"
        rows.append([f"`{name}`", oracle, *(cells(name, column) for column in MEASURED)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


class Hyper(NamedTuple):
    lr: float


def by_data(param: Tensor, grad: Tensor, state: NoState, c: Hyper) -> tuple[Tensor, NoState]:
    """Branch on data, which no graph can, and import a module, which TorchScript cannot."""
    import math

    if math.isfinite(float(grad.sum())):
        return torch.add(param, grad, alpha=-c.lr), state
    return param, state


def test_who_takes_every_chain() -> None:
    """Only the executors that the page names refuse this chain."""
    stage = Rule(name="by_data", hyper=Hyper, rule=by_data, kind="per_matrix")
    refusing: list[tuple[str, bool]] = []
    for name in get_args(ExecutorName):
        optimizer = chain(stage(lr=0.5)).using(executor=name)
        try:
            new, _ = optimizer.update(torch.ones(2), torch.ones(2), optimizer.init(torch.ones(2)))
        except (TypeError, ValueError, RuntimeError) as error:
            refusing.append((name, "by_data" in str(error)))
        else:
            assert new.tolist() == [0.5, 0.5]
    told = REFUSING.search(PAGE.read_text())
    assert told is not None
    assert sorted(refusing) == [(name, True) for name in sorted(told.groups())]


def drawn_or_written(name: str, column: str, written: dict[str, dict[str, str]]) -> str:
    """Measure a sixth of the cells, of each column; the page has the other cells.

    The laws, and the formulas of ``tests/agreement``, measure every row.
    """
    row, place = list(ALGORITHMS).index(name), MEASURED.index(column)
    known = written.get(f"`{name}`")
    if EVERYTHING or known is None or (row + place) % 6 == 0:
        return cell(name, column)
    return known[column]


def test_table_is_the_measured_one() -> None:
    found = TABLE.search(PAGE.read_text())
    assert found is not None
    rows = [line.strip("| ").split(" | ") for line in found.group(1).splitlines()]
    written = {row[0]: dict(zip(HEAD, row, strict=True)) for row in rows}
    table = parity_table(partial(drawn_or_written, written=written))
    assert found.group(1) == table
    assert "differs" not in table
    assert all(f"`{name}`" in table for name in algorithms.__all__)


if __name__ == "__main__":
    text = PAGE.read_text()
    PAGE.write_text(TABLE.sub(lambda _: f"<!-- parity -->\n{parity_table()}<!-- /parity -->", text))
