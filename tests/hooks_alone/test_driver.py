"""Driver of all hooks: jobs run in one order, and none runs after a failed one."""

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hooks.buckets import BucketPosition
from hooks.driver import BucketDriver
from hooks.work_queue import work_queue_of
from sharding.transport.local import LocalWorld

CPU = torch.device("cpu")


def driver_of(group: Any) -> BucketDriver:
    params = {name: nn.Parameter(torch.ones(2)) for name in ("a", "b")}
    driver = BucketDriver(group, params.values(), params, may_leave_unused=False)
    driver.expect(params)
    return driver


@pytest.mark.usefixtures("world_of_one")
def test_no_bucket_is_stepped_after_one_that_failed_and_the_next_iteration_is() -> None:
    driver = driver_of(dist.group.WORLD)
    done: list[str] = []

    def job(name: str) -> Tensor:
        if name == "bad":
            raise KeyError(name)
        done.append(name)
        return torch.ones(1)

    def iteration(*names: str) -> list[Any]:
        for number in (0, 1):
            place = BucketPosition(number, last=number == 1, backward=-1)
            driver.add_bucket(place, ["a" if number == 0 else "b"])
        return [
            driver.submit(number, lambda name=name: job(name), CPU)
            for number, name in enumerate(names)
        ]

    first, second = iteration("bad", "never")
    with pytest.raises(RuntimeError, match="KeyError: 'bad'"):
        first.wait()
    with pytest.raises(RuntimeError, match="bucket 1 was not stepped, because an earlier one"):
        second.wait()
    for future in iteration("c", "d"):
        future.wait()
    assert done == ["c", "d"]


@pytest.mark.usefixtures("world_of_one")
def test_all_groups_of_a_process_have_one_queue_and_each_rank_that_is_a_thread_its_own() -> None:
    other: Any = dist.new_group([0])
    assert work_queue_of(other) is work_queue_of(dist.group.WORLD)
    queues = LocalWorld(3).run(work_queue_of)
    assert len({id(one) for one in (*queues, work_queue_of(other))}) == 4
    assert all(work_queue_of(other) is not one for one in queues)


@pytest.mark.usefixtures("world_of_one")
def test_jobs_of_two_hooks_are_done_in_the_order_in_which_they_came() -> None:
    """Jobs run in the order of submission, even if the first one waits."""
    drivers = [driver_of(dist.group.WORLD), driver_of(dist.new_group([0]))]
    release, order = threading.Event(), []

    def job(number: int) -> Tensor:
        if number == 0:
            assert release.wait(60)
        order.append(number)
        return torch.ones(1)

    futures = [
        drivers[number % 2].submit(0, lambda number=number: job(number), CPU) for number in range(6)
    ]
    release.set()
    for future in futures:
        future.wait()
    assert order == list(range(6))
