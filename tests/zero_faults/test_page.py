"""Test that the comparison in docs/zero.md shows the results of the ranks.

``python -m pytest tests/zero_faults --write-comparison`` rewrites the comparison.
"""

import pytest

from tests.ranks import Outcomes

from . import jobs, table


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest, on_two: Outcomes, on_four: Outcomes) -> list[str]:
    found = table.lines(on_two, on_four)
    if request.config.getoption("write_comparison", default=False):
        if jobs.UNCOUNTED is not None:
            raise pytest.UsageError(f"the line about bytes cannot be written: {jobs.UNCOUNTED}")
        table.write(found)
    return found


def test_the_table_is_the_measured_one(measured: list[str]) -> None:
    lines = table.in_page().splitlines()
    if jobs.UNCOUNTED is not None:  # other machines check the last line
        assert lines.pop().startswith(f"| {table.BYTES} |")
    assert lines == [*table.head().splitlines(), *measured]
