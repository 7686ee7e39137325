"""Hook that is dropped while parameters are in flight."""

import logging

import pytest

from hooks.zero.zero_hook import _finish_gathers


class Lost:
    """Gather whose other ranks are gone."""

    def wait(self) -> None:
        raise RuntimeError("lost group rank 1")


def test_parameters_that_do_not_arrive_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """The failure is logged, because a finalizer has no caller for an exception."""
    with caplog.at_level(logging.ERROR):
        _finish_gathers([Lost()], [])
    assert "did not arrive" in caplog.text and "lost group rank 1" in caplog.text
