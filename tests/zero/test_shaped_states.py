"""Rules that keep other fields for other shapes, as Adafactor and Shampoo do."""

from pathlib import Path

import pytest

from tests.ranks import Job, Outcomes, run_ranks

from . import jobs_shaped
from .jobs_shaped import RULES


def launch(base: Path) -> Outcomes:
    jobs = {}
    for rule in RULES:
        for views in (False, True):
            folder = base / f"{rule} {views}"
            folder.mkdir()
            arguments = {"rule": rule, "views": views, "folder": str(folder)}
            jobs[f"{rule} {views}"] = Job(jobs_shaped.shaped, arguments)
    return run_ranks(jobs, ranks=3, seconds=90)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return launch(tmp_path_factory.mktemp("shaped"))


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_fields_that_depend_on_the_shape(outcomes: Outcomes, rule: str, views: bool) -> None:
    """Three ranks are one process: steps, state dict, checkpoint, and both loaded (fault 22)."""
    seen = [outcome.result() for outcome in outcomes[f"{rule} {views}"]]
    assert [one["wrong"] for one in seen] == [[]] * 3
    assert len({one["digest"] for one in seen}) == 1
