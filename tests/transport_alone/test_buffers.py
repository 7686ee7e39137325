"""Tests of buffers and ranges that a transport refuses, of its memory, and of message tags."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from sharding.transport.buffers import ScratchPool, check_buffer, divide
from sharding.transport.messages import CHANNEL_BITS, NUMBER_BITS, PROBE, MessageTags
from tests.choices import case, examples


@examples(30)
@given(st.integers(1, 5), st.integers(0, 30), st.data())
def test_cut_without_overlap_is_taken_and_with_one_refused(
    size: int, numel: int, data: st.DataObject
) -> None:
    bounds = sorted(
        data.draw(st.lists(st.integers(0, numel), min_size=2 * size, max_size=2 * size))
    )
    ranges = data.draw(st.permutations([(bounds[2 * q], bounds[2 * q + 1]) for q in range(size)]))
    flat = torch.zeros(numel)
    check_buffer(flat, ranges, size)
    wide = [at for at, (start, stop) in enumerate(ranges) if stop > start]
    if wide:
        chosen = data.draw(st.sampled_from(wide))
        with pytest.raises(ValueError, match=f"overlap at element {ranges[chosen][0]}"):
            check_buffer(flat, [*ranges, ranges[chosen]], size + 1)


REFUSED: list[tuple[object, list[tuple[int, int]], type[Exception], str]] = [
    ([1.0], [(0, 1)], TypeError, "flat must be a tensor, got list"),
    (torch.zeros(2, 2), [(0, 1)], ValueError, "one dimension, got shape (2, 2)"),
    (torch.zeros(4)[::2], [(0, 1)], ValueError, "strides (2,)"),
    (torch.zeros(4).to_sparse(), [(0, 1)], ValueError, "sparse"),
    (torch.zeros(2, dtype=torch.complex64).conj(), [(0, 1)], ValueError, "lazy conjugate"),
    (torch.zeros(2), [(0, 1), (1, 2)], ValueError, "each of the 1 ranks of the group, got 2"),
    (torch.zeros(2), [(0, 3)], ValueError, "group rank 0 is [0, 3), which is not within"),
    (torch.zeros(2), [(-1, 1)], ValueError, "group rank 0 is [-1, 1)"),
    (torch.zeros(2), [(2, 1)], ValueError, "group rank 0 is [2, 1)"),
]


def test_refused() -> None:
    for flat, ranges, error, text in REFUSED:
        with case(says=text):
            with pytest.raises(error) as caught:
                check_buffer(flat, ranges, 1)
            assert text in str(caught.value)


class Divisions(TorchDispatchMode):
    """Mode that counts divisions in place."""

    count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += function.overloadpacket is torch.ops.aten.div_
        return function(*args, **kwargs or {})


def test_one_division_for_ranges_beside_one_another() -> None:
    """Fault 41: each rank's range was divided separately, one call after the other."""
    cases = {
        "side by side": ([(3 * rank, 3 * rank + 3) for rank in range(40)], 1),
        "in another order, some empty": ([(8, 20), (0, 0), (30, 30), (0, 8), (20, 31)], 1),
        "a gap": ([(20, 30), (0, 7), (7, 7), (7, 19)], 2),
        "nothing": ([(0, 0), (5, 5)], 0),
    }
    for what, (ranges, divisions) in cases.items():
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.complex64):
            flat = torch.randn(131, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
            flat = flat.to(dtype)
            expected = flat.clone()
            for start, stop in ranges:
                expected[start:stop] /= len(ranges)
            with case(what=what, dtype=dtype), Divisions() as counted:
                divide(flat, ranges)
            assert counted.count == divisions
            assert torch.equal(flat, expected)


@examples(30)
@given(st.lists(st.integers(-4, 50), max_size=40))
def test_scratch_is_bounded(wishes: list[int]) -> None:
    """A non-negative number acquires that many bytes; a negative number releases one buffer."""
    scratch = ScratchPool()
    used: list[torch.Tensor] = []
    most = 0
    for wish in wishes:
        if wish >= 0:
            used.append(scratch.acquire(wish))
            assert used[-1].numel() >= wish
            assert len({id(one) for one in used}) == len(used)
            most = max(most, len(used))
        elif used:
            scratch.release(used.pop(wish % len(used)))
    assert scratch.allocated_bytes <= most * max([0, *wishes])
    assert scratch.allocated_bytes >= sum(one.numel() for one in used)


class SimpleGroup:
    """Stand-in for a process group, which is only used as a key."""


def test_a_group_has_many_sequences_and_no_tag_twice() -> None:
    """Fault 40: the 1,025th sequence silently had the tags of the first one."""
    group: Any = SimpleGroup()
    other: Any = SimpleGroup()
    firsts = [MessageTags(group).next()[1] for _ in range(1 << CHANNEL_BITS)]
    assert len(set(firsts)) == len(firsts)
    assert min(firsts) > PROBE and max(firsts) < 1 << 31
    for _ in range(2):
        with pytest.raises(RuntimeError, match="65,536 sequences of messages.*new process group"):
            MessageTags(group)
    assert MessageTags(other).next()[1] == firsts[0]


def test_numbers_of_operations_start_again() -> None:
    """After an overflow, numbers start again within the tags of their own sequence."""
    group: Any = SimpleGroup()
    numbers, others = MessageTags(group), MessageTags(group)
    given = [numbers.next() for _ in range((1 << NUMBER_BITS) + 1)]
    assert given[-1] == (1 << NUMBER_BITS, given[0][1])
    assert others.next()[1] not in {tag for _, tag in given}
