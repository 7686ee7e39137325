"""Counts of messages, bytes and calls as ranks and parameters grow. No time is measured."""

import math
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from functional_optim import accumulate, chain, clip_by_global_norm, sgd
from sharding import ZeroRedundancyOptimizer
from sharding.resharding import RangeCopy
from sharding.transport.local import LocalTransport, LocalWorld
from sharding.transport.local_group import LocalGroup
from sharding.transport.packed import ALIGN, PackedTensors
from sharding.transport.protocol import TransportError
from sharding.zero import dissemination, range_exchange
from sharding.zero.collective import all_gather_bytes
from sharding.zero.tree_exchange import CHUNK_BYTES, plan_copies
from tests.choices import case
from tests.steady import calls_of

CPU = torch.device("cpu")


class Sent:
    """Counter of messages and bytes of exchanges between all ranks, by rank."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.messages: Counter[int] = Counter()
        self.bytes: Counter[int] = Counter()
        self._lock, before = threading.Lock(), dissemination.launch_message

        def launch_message(
            what: str,
            group: dist.ProcessGroup,
            direction: dissemination.Direction,
            rank: int,
            part: Tensor,
            *more: Any,
        ) -> Any:
            if direction is dissemination.Direction.TO:
                with self._lock:
                    self.messages[group.rank()] += 1
                    self.bytes[group.rank()] += part.numel()
            return before(what, group, direction, rank, part, *more)

        monkeypatch.setattr(dissemination, "launch_message", launch_message)

    def clear(self) -> None:
        self.messages.clear()
        self.bytes.clear()


@pytest.mark.parametrize("size", [2, 3, 4, 7, 16, 33, 64])
def test_an_exchange_takes_as_many_messages_as_the_logarithm_of_the_ranks(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exchange sends 2 log2(ranks) messages per rank, and each byte once to each other rank."""
    sent = Sent(monkeypatch)
    wanted = [bytes([rank]) * (rank % 5) for rank in range(size)]

    def of_rank(group: LocalGroup) -> list[bytes]:
        return all_gather_bytes(group, CPU, wanted[group.rank()], "count")

    assert all(found == wanted for found in LocalWorld(size).run(of_rank))
    rounds = math.ceil(math.log2(size))
    assert set(sent.messages.values()) == {2 * rounds}  # one for lengths, one for bytes
    length = sum(map(len, wanted))
    assert sum(sent.bytes.values()) == (size - 1) * (length + 8 * size + 2 * size)


@pytest.mark.parametrize("gone", [0, 3, 6])
def test_all_ranks_of_an_exchange_name_the_one_that_is_gone(gone: int) -> None:
    """All ranks name the rank that is gone, even those that wait for another waiting rank."""
    told = threading.Barrier(6)  # a rank that leaves early would be named instead

    def of_rank(group: LocalGroup) -> str:
        if group.rank() == gone:
            return ""
        with pytest.raises(TransportError) as found:
            all_gather_bytes(group, CPU, b"data", "count")
        told.wait(60.0)
        return str(found.value)

    for rank, text in enumerate(LocalWorld(7, seconds=5).run(of_rank)):
        with case(rank=rank):
            assert rank == gone or f"lost group rank {gone} (global rank {gone}) while" in text


def test_plans_that_differ_travel_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Differing plans are sent once each, not once for each rank that has them."""
    sent = Sent(monkeypatch)
    count = 60

    def of_rank(group: LocalGroup) -> str:
        names = [f"{'other' if group.rank() == 2 else 'layer'}.{k}" for k in range(count)]
        params = [(name, nn.Parameter(torch.ones(3))) for name in names]
        with pytest.raises(ValueError, match="different parameters or plans") as found:
            ZeroRedundancyOptimizer(params, torch.optim.SGD, group)
        return str(found.value)

    for_each = []
    for size in (4, 8, 32):
        sent.clear()
        texts = LocalWorld(size).run(of_rank)
        assert all("group rank 2 (global rank 2) against group rank 0" in one for one in texts)
        for_each.append(sum(sent.bytes.values()) / size)
    # Each rank also sends a few bytes of digests, lengths and marks.
    assert for_each[2] - for_each[0] < 28 * 400
    assert for_each[2] < 3 * for_each[0]


def test_a_total_takes_a_number_for_each_parameter_on_any_number_of_ranks() -> None:
    """Ranges are of equal length, so there is less than one number more for each rank."""
    before = LocalTransport.reduce_scatter

    def of_rank(group: LocalGroup) -> int:
        params = [nn.Parameter(torch.ones(2)) for _ in range(40)]
        optimizer = chain(clip_by_global_norm(1.0), sgd(lr=0.1))
        zero = ZeroRedundancyOptimizer(params, optimizer, group)
        for one in params:
            one.grad = torch.ones(2)
        zero.step()
        return len(zero.owned)

    for size in (2, 8, 32):
        seen: list[int] = []

        def noted(self: Any, flat: Tensor, *more: Any, seen: list[int] = seen, **given: Any) -> Any:
            seen.append(flat.numel())
            return before(self, flat, *more, **given)

        with mock.patch.object(LocalTransport, "reduce_scatter", noted):
            assert sum(LocalWorld(size).run(of_rank)) == 40
        assert len(seen) == size
        assert all(40 <= one < 40 + size for one in seen)


def test_the_state_of_many_parameters_is_collected_in_few_messages() -> None:
    for count in (1, 100, 1000):
        assert len(list(plan_copies(0, 1, [100] * count))) == 1
    parts = plan_copies(0, 1, [CHUNK_BYTES + 1, 0, 12])
    assert [[(one.path, one.start, one.length) for one in copies] for copies in parts] == [
        [("0", 0, CHUNK_BYTES)],
        [("0", CHUNK_BYTES, 1), ("2", 0, 12)],
    ]


def test_tensors_of_two_devices_travel_in_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of two devices share one message, on the device of the process group.

    An example is a step count on the CPU with state on a GPU.
    """
    sent: list[PackedTensors] = []
    monkeypatch.setattr(range_exchange, "exchange_packed", lambda *given: sent.append(given[2]))
    device, group = torch.device("meta"), LocalWorld(1).groups[0]
    tensors = {"step": torch.ones(1), "exp_avg": torch.ones(3, device=device)}
    copies = [RangeCopy(path, 0, 0, 0, 0, len(one), 0) for path, one in tensors.items()]
    after = {path: one.to(device) for path, one in tensors.items()}
    range_exchange.make_copies(copies, tensors, after, group, device, "copy")
    assert [one.bytes.device for one in sent] == [device]
    assert [len(part) for part in sent[0].parts] == [2 * ALIGN]


def stepped(count: int, optimizer: Callable[[], Any]) -> ZeroRedundancyOptimizer:
    """Return an optimizer that already has step plans."""
    params = [nn.Parameter(torch.ones(3)) for _ in range(count)]
    zero = ZeroRedundancyOptimizer(params, optimizer(), LocalWorld(1).groups[0])
    for one in params:
        one.grad = torch.ones(3)
    for _ in range(4):
        zero.step()
    return zero


STEPPED: dict[str, Callable[[], Any]] = {
    "plain": lambda: sgd(lr=0.1, momentum=0.9),
    "clipped": lambda: chain(clip_by_global_norm(1.0), sgd(lr=0.1)),
    "accumulated": lambda: chain(accumulate(2), sgd(lr=0.1)),
}


@pytest.mark.parametrize("package", ["sharding", "functional_optim"])
@pytest.mark.parametrize("name", STEPPED)
def test_a_step_takes_as_many_calls_for_many_parameters_as_for_few(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step runs no Python call for each parameter, even before a loop is compiled."""
    monkeypatch.setattr("functional_optim.kernels.exact.kernel.WORTH_COMPILING", 1 << 60)
    few, many = (stepped(count, STEPPED[name]) for count in (10, 300))
    assert calls_of(few.step, package) == calls_of(many.step, package)
