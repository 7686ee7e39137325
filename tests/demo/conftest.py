"""Results as the ranks report them, and a function that plants faults in them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hooks.demo.result import Difference, RankResult, RunResult

SAME = Difference(same_bits=True, largest=0.0)
TITLES = {"A": "functional-optim, step-hook", "B": "torch.optim.AdamW", "C": "ZeRO"}


def _run(name: str) -> RunResult:
    return RunResult(
        name=name,
        title=TITLES[name],
        exact=True,
        spread=0.001,
        differs="",
        losses=[4.5, 4.0, 3.5, 3.0],
        validation=[(0, 4.6), (2, 3.8), (4, 2.9)],
        from_first=SAME,
        from_rank_zero=SAME,
        parameter_bytes=2**20,
        gradient_bytes=2**20,
        state_bytes=2**20 if name == "C" else 2**21,
        sent_bytes={"A": 2.0**22, "B": 2.0**22, "C": 2.0**20}[name],
    )


@pytest.fixture
def ranks() -> list[RankResult]:
    """Return the results of two ranks without faults."""
    return [
        RankResult(
            rank=rank,
            numel=2**18,
            runs=[_run(name) for name in TITLES],
            peak_rss_bytes=400 * 2**20,
            sample="The [bold] text" if rank == 0 else "",
        )
        for rank in range(2)
    ]


@pytest.fixture
def plant(ranks: list[RankResult]) -> Callable[..., None]:
    """Return a function that changes one run, on one rank, or on all ranks if it is None."""

    def change(rank: int | None, name: str, **changes: Any) -> None:
        for one in ranks if rank is None else [ranks[rank]]:
            one.runs[:] = [replace(run, **changes) if run.name == name else run for run in one.runs]

    return change
