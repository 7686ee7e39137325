"""Test that the table of schedules agrees with the code and with the measurements.

``python -m tests.readme.test_schedules`` writes the table into the page.
"""

import inspect
import re
from pathlib import Path

from functional_optim import schedules
from tests.core.schedule_twins import TWINS, closed, distance, stepped, values
from tests.core.test_schedule_twins import CLOSED_ULPS, STEPPED_ULPS

PAGE = Path(__file__).parents[2] / "docs" / "agreement.md"
TABLE = re.compile(r"<!-- schedules -->\n(.*?)<!-- /schedules -->", flags=re.DOTALL)


def call(name: str) -> str:
    """Return a constructor call with all arguments and defaults."""
    made = inspect.signature(getattr(schedules, name))
    plain = [one.replace(annotation=one.empty) for one in made.parameters.values()]
    return f"{name}{inspect.Signature(plain)}"


def compared(name: str) -> str:
    """Return the scheduler that a schedule is compared with, and the largest distance."""
    twins = [twin for full, twin in TWINS.items() if full.split()[0] == name]
    if not twins:
        return "the schedule that it marks"
    formulas = [closed(twin) for twin in twins]
    by_step = any(one is None for one in formulas) and twins[0].scheduler == "SequentialLR"
    bound = STEPPED_ULPS if by_step else CLOSED_ULPS
    worst = max(
        distance(values(twin), formula or stepped(twin))
        for twin, formula in zip(twins, formulas, strict=True)
    )
    said = f"within {bound:g} ulp" if worst <= bound else "differs"
    return f"`{twins[0].scheduler}`, {said}{' after 1000 steps' if by_step else ''}"


def schedule_table() -> str:
    rows = [["schedule", "what it is", "compared with, at every step"], ["---"] * 3]
    for name in schedules.__all__:
        story = inspect.getdoc(getattr(schedules, name)) or ""
        rows.append([f"`{call(name)}`", story.splitlines()[0].replace("``", "`"), compared(name)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def test_the_table_of_schedules_is_the_measured_one() -> None:
    found = TABLE.search(PAGE.read_text())
    assert found is not None
    table = schedule_table()
    assert found.group(1) == table
    assert "differs" not in table


if __name__ == "__main__":
    text = PAGE.read_text()
    PAGE.write_text(
        TABLE.sub(lambda _: f"<!-- schedules -->\n{schedule_table()}<!-- /schedules -->", text)
    )
