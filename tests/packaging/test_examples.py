"""How the tests of this project draw examples."""

from hypothesis import settings


def test_no_example_has_a_deadline() -> None:
    assert settings().deadline is None
