"""Results as the ranks would report them, to be planted with faults."""

import pytest

from hooks.demo.result import Difference, RankResult, RunResult

SAME = Difference(same_bits=True, largest=0.0)


def _run() -> RunResult:
    return RunResult(
        losses=[4.5, 4.0, 3.5, 3.0],
        validation=[(0, 4.6), (2, 3.8), (4, 2.9)],
        from_rank_zero=SAME,
        parameter_bytes=2**20,
        gradient_bytes=2**20,
        state_bytes=2**21,
    )


@pytest.fixture
def ranks() -> list[RankResult]:
    """Two ranks, with nothing wrong."""
    return [
        RankResult(
            rank=rank,
            front_end="step-hook",
            numel=2**18,
            hook=_run(),
            torch=_run(),
            difference=SAME,
            peak_rss_bytes=400 * 2**20,
            sample="The [bold] text" if rank == 0 else "",
        )
        for rank in range(2)
    ]
