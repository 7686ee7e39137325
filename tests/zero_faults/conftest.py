"""Results of the ranks for all tests of this folder, and the option that writes the table."""

import pytest

from tests.ranks import Outcomes, run_ranks

from . import jobs


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-comparison",
        action="store_true",
        dest="write_comparison",
        help="write the comparison with torch's ZeroRedundancyOptimizer into docs/zero.md",
    )


@pytest.fixture(scope="session")
def on_two() -> Outcomes:
    """Return the results of each job on two ranks."""
    return run_ranks(jobs.ON_TWO, ranks=2, seconds=60)


@pytest.fixture(scope="session")
def on_four() -> Outcomes:
    """Return the results of each job on four ranks."""
    return run_ranks(jobs.ON_FOUR, ranks=4, seconds=90)
