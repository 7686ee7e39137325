"""DistributedOptimizer over Ray: what holds over every transport, and what is of actors alone."""

import functools
import itertools
import os
import signal
import threading
from typing import Any

import pytest
import ray
import torch

from functional_optim import DistributedOptimizer, adamw, sgd
from functional_optim.remote import RayTransport, WorkerError
from tests.choices import case

from ..laws import LAWS, Make, values
from ..support import SHAPES, assert_same, gradients, locally, noise, parameters, placement
from ..transports import WANTED, Shelf, tried

over_ray = DistributedOptimizer.over_ray


@pytest.fixture
def make(shared: RayTransport) -> Make:
    return functools.partial(over_ray, transport=shared)


def test_actors_place_call_and_fail(shared: RayTransport) -> None:
    assert tried(shared, "ps0") == WANTED
    closed = RayTransport()
    closed.close()
    with pytest.raises(RuntimeError, match="'one' is closed"):
        closed.place("one", Shelf, torch.ones(1))


@pytest.mark.parametrize("law", LAWS)
def test_laws_of_every_transport(law: str, make: Make) -> None:
    LAWS[law](make)
