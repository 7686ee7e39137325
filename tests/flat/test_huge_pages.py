"""Large flat buffers are in huge pages, where the system gives those on request."""

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from functional_optim import Rule, adamw, chain, huge_pages, sgd
from functional_optim.flat_layout import FlatLayout
from functional_optim.huge_pages import (
    LEAST_BYTES,
    SWITCH,
    ask_for_huge_pages,
    huge_empty,
    move_to_huge_pages,
)
from functional_optim.state import state_tensors
from functional_optim.untouched import untouched_zeros

COUNT = LEAST_BYTES // 4
MAPPINGS = Path("/proc/self/smaps")
ASKED = "hg"  # how Linux marks a mapping for which huge pages were asked


def _flags() -> Iterator[tuple[int, int, list[str]]]:
    """Beginning, end and flags of every mapping of this process."""
    begin = end = 0
    for line in MAPPINGS.read_text().splitlines():
        first, _, rest = line.partition(" ")
        if first == "VmFlags:":
            yield begin, end, rest.split()
        elif not first.endswith(":"):
            begin, end = (int(one, 16) for one in first.split("-"))


def is_asked_for(address: int) -> bool:
    return any(begin <= address < end and ASKED in flags for begin, end, flags in _flags())


def all_asked(*tensors: torch.Tensor) -> bool:
    """Whether all but the ends of their memory, less than a page, was asked for."""
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        at = range(mmap.PAGESIZE, size - mmap.PAGESIZE, size // 5)
        if not all(is_asked_for(tensor.data_ptr() + offset) for offset in at):
            return False
    return True


def _shows_them() -> bool:
    if not MAPPINGS.exists() or not hasattr(mmap, "MADV_HUGEPAGE"):
        return False
    with mmap.mmap(-1, LEAST_BYTES) as pages:
        try:
            pages.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            return False
        return any(ASKED in flags for *_, flags in _flags())


shown = pytest.mark.skipif(not _shows_them(), reason="this system shows no huge pages")


@shown
def test_parameters_gradients_and_state_that_are_bound() -> None:
    params = [torch.ones(COUNT), torch.ones(3)]
    bound = adamw().bind(params)
    state = bound.state.leaves[0]
    assert all_asked(params[0], bound.gradients[0], *state_tensors(state.stages))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of what was asked for: memory may be where others asked before."""
    lengths: list[int] = []

    def advise(begin: int, length: int, what: int) -> int:
        lengths.append(length)
        return 0

    monkeypatch.setattr(huge_pages, "_madvise", lambda: advise)
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 14, raising=False)
    return lengths


def test_all_of_a_tensor_but_its_ends_is_asked_for(asked: list[int]) -> None:
    bound = adamw().bind([torch.ones(COUNT), torch.ones(3)])
    assert len(asked) == 3  # the parameters and two fields of state
    assert bound.gradients is not None
    assert len(asked) == 4
    assert all(LEAST_BYTES - mmap.PAGESIZE <= one <= LEAST_BYTES + 12 for one in asked)


def test_nothing_is_asked_where_it_is_switched_off(
    asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, "0")
    assert adamw().bind([torch.ones(COUNT)]).gradients is not None
    assert asked == []


def test_small_ones_are_as_they_come(asked: list[int]) -> None:
    huge_empty(COUNT - 1, torch.float32, torch.device("cpu"))
    ask_for_huge_pages(untouched_zeros(torch.ones(COUNT - 1)))
    move_to_huge_pages([torch.ones(COUNT - 1)])
    assert asked == []
    huge_empty(COUNT, torch.float32, torch.device("cpu"))
    assert len(asked) == 1


@shown
def test_a_tensor_that_moves_stays_the_same_object_with_the_same_values() -> None:
    tensor = torch.arange(COUNT + 7, dtype=torch.float32)
    values, before = tensor.clone(), tensor.data_ptr()
    move_to_huge_pages([tensor])
    assert all_asked(tensor) and tensor.data_ptr() != before
    assert torch.equal(tensor, values)


def test_what_others_may_see_stays_where_it_is(tmp_path: Path) -> None:
    of_file = torch.from_file(str(tmp_path / "file"), shared=True, size=COUNT)
    of_private = torch.from_file(str(tmp_path / "file"), shared=False, size=COUNT)
    shared = torch.zeros(COUNT).share_memory_()
    whole = torch.zeros(2 * COUNT)
    view, detached = whole[:COUNT], whole[COUNT:].detach()
    gaps = torch.zeros(2 * COUNT).as_strided((COUNT,), (2,))
    twin = torch.zeros(COUNT)
    other, array = twin.detach(), torch.zeros(COUNT).numpy()
    with torch.inference_mode():
        inference = torch.zeros(COUNT)
    left = [of_file, of_private, shared, view, detached, gaps, inference]
    left += [twin, other, torch.from_numpy(array)]
    left += [torch.nn.Parameter(torch.zeros(COUNT)), torch.empty(COUNT, device="meta")]
    before = [one.data_ptr() for one in left]
    move_to_huge_pages(left)
    assert [one.data_ptr() for one in left] == before


def test_nothing_is_moved_where_nobody_tells_who_else_holds_it(
    asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    tensor = torch.zeros(COUNT)
    before = tensor.data_ptr()
    move_to_huge_pages([tensor])
    assert tensor.data_ptr() == before and asked == []


@pytest.mark.parametrize("why", ["no function", "it fails", "no such thing"])
def test_where_there_are_none_memory_is_as_it_comes(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "no such thing":
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    else:
        answer = None if why == "no function" else lambda *_: -1
        monkeypatch.setattr(huge_pages, "_madvise", lambda: answer)
    made = huge_empty(COUNT, torch.float32, torch.device("cpu"))
    assert made.shape == (COUNT,)
    before = made.data_ptr()
    move_to_huge_pages([made])
    assert made.data_ptr() == before
    untouched = untouched_zeros(torch.ones(COUNT))
    ask_for_huge_pages(untouched)
    assert untouched.shape == (COUNT,) and not untouched.any()


class Start(NamedTuple):
    lr: float


class Kept(NamedTuple):
    start: torch.Tensor


def start_rule(
    param: torch.Tensor, grad: torch.Tensor, state: Kept, c: Start
) -> tuple[torch.Tensor, Kept]:
    return param - grad * c.lr, state


def test_state_that_is_the_parameter_itself_stays_it() -> None:
    rule = Rule(
        name="start",
        hyper=Start,
        state=Kept,
        init=lambda param, hyper: Kept(param.float()),  # no copy
        rule=start_rule,
    )
    for length in (100, COUNT):
        param = torch.zeros(length)
        bound = chain(rule(lr=0.5)).using(executor="blocked").bind([param])
        bound.gradients[0].fill_(1.0)
        bound.step(bound.gradients)
        assert param[0] == -0.5 and param[-1] == -0.5


def mixed() -> list[torch.Tensor]:
    """Long ones, read where their gradients lie, with short ones between them."""
    return [torch.ones(1 << 19) if k % 2 else torch.ones(512) for k in range(64)]


@shown
@pytest.mark.parametrize("use", ["step", "gradients", "attach", "zero"])
def test_gradients_are_in_huge_pages_where_all_of_the_buffer_is_used(use: str) -> None:
    params = [torch.nn.Parameter(one) for one in mixed()]
    for param in params:
        param.grad = torch.ones_like(param)
    bound = sgd(0.1).using(executor="auto").bind(params)
    bound.step()  # by gradients where they lie
    flat = bound.layout.gradient_buffers()[0]
    assert flat.numel() * 4 >= LEAST_BYTES
    if use == "gradients":
        assert bound.gradients is not None
    elif use == "attach":
        bound.layout.attach_gradients()
    elif use == "zero":
        bound.layout.zero_gradients()
    assert all_asked(flat) == (use != "step")
    assert is_asked_for(flat.data_ptr() + LEAST_BYTES // 2) == (use != "step")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux shows what is used")
def test_short_gradients_between_long_ones_take_no_more_memory_than_they_have() -> None:
    params = [torch.nn.Parameter(one) for one in mixed()]
    for param in params:
        param.grad = torch.ones_like(param)
    bound = sgd(0.1).using(executor="auto").bind(params)

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    before = resident()
    bound.step()
    assert resident() - before < LEAST_BYTES // 2


def test_layouts_are_undone_as_ever() -> None:
    param = torch.arange(COUNT, dtype=torch.float32)
    values = param.clone()
    layout = FlatLayout([param], ["p"])
    assert torch.equal(layout.buffers[0].data, values)
    layout.undo()
    assert torch.equal(param, values)
