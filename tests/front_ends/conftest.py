"""A registry that is after each test what it was before, and a world of one rank."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from functional_optim.frontends import registry


@pytest.fixture(autouse=True)
def registry_as_it_was() -> Iterator[None]:
    before = dict(registry._REGISTERED)
    yield
    registry._REGISTERED.clear()
    registry._REGISTERED.update(before)


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
