"""The table of differences in the documentation is the measured one."""

from docs._pages import differences as page
from functional_optim import algorithms
from tests.agreement.ours import built, steps
from tests.agreement.problem import DTYPES, STEPS, difference, problem
from tests.agreement.rows import comparisons, rows


def test_the_page_has_the_stored_results() -> None:
    results = page.stored()
    found = page.MARKS.search(page.PAGE.read_text(encoding="utf-8"))
    assert found is not None
    assert found.group(1) == page.text(results)
    assert page.unexplained(results) == []


def test_every_row_was_measured_with_its_cause() -> None:
    stored = page.stored()["rows"]
    declared = {key: one for key, one in rows().items() if one.algorithm in algorithms.__all__}
    assert set(declared) <= set(stored)
    for key, row in declared.items():
        cause = None if row.cause is None else row.cause.text
        assert stored[key].get("cause") == cause, key
    assert set(comparisons()) <= set(page.stored()["comparisons"])


def test_a_difference_needs_a_cause_that_an_experiment_shows() -> None:
    far, near = {str(DTYPES[0]): [0.5]}, {str(DTYPES[0]): [1e-15]}
    cases = {
        "far": {"differences": far},
        "near": {"differences": near},
        "shown": {"differences": far, "cause": "A cause.", "without": near},
        "guessed": {"differences": far, "cause": "A guess.", "without": far},
        "no difference": {"differences": near, "cause": "A cause.", "without": near},
        "fails": {"differences": {str(DTYPES[0]): "TypeError"}},
    }
    found = page.unexplained({"rows": cases})
    assert [one.partition(":")[0] for one in found] == ["far", "guessed", "no difference", "fails"]


def test_a_difference_is_relative_to_the_distance_moved() -> None:
    given = problem(DTYPES[0])
    one = steps(built("sgd", {"lr": 0.1}), given)
    other = steps(built("sgd", {"lr": 0.2}), given)
    for count in STEPS:
        assert difference(one[count], one[count], given.params) == 0.0
        assert abs(difference(one[count], other[count], given.params) - 0.5) < 1e-12
    assert difference(one[1], given.params, given.params) == float("inf")
