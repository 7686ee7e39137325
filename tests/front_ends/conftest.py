"""Fixture that restores the registry after each test."""

from collections.abc import Iterator

import pytest

from functional_optim.frontends import registry


@pytest.fixture(autouse=True)
def registry_as_it_was() -> Iterator[None]:
    before = dict(registry._REGISTERED)
    yield
    registry._REGISTERED.clear()
    registry._REGISTERED.update(before)
