"""The page's comparison is what the ranks saw.

``python -m pytest tests/zero_faults --write-comparison`` writes it anew.
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
    if jobs.UNCOUNTED is not None:  # the last line is then compared on other machines
        assert lines.pop().startswith(f"| {table.BYTES} |")
    assert lines == [*table.head().splitlines(), *measured]
