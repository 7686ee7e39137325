"""Large flat buffers are in huge pages, where the system gives those on request."""

import mmap
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from functional_optim import Rule, adamw, chain, huge_pages
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

from ..choices import case
from .pages import all_asked, shown

COUNT = LEAST_BYTES // 4


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
    shared = torch.empty(COUNT).share_memory_()
    whole = torch.empty(2 * COUNT)
    view, detached = whole[:COUNT], whole[COUNT:].detach()
    gaps = torch.empty(2 * COUNT).as_strided((COUNT,), (2,))
    twin = torch.empty(COUNT)
    other, array = twin.detach(), torch.empty(COUNT).numpy()
    with torch.inference_mode():
        inference = torch.empty(COUNT)
    left = [of_file, of_private, shared, view, detached, gaps, inference]
    left += [twin, other, torch.from_numpy(array)]
    left += [torch.nn.Parameter(torch.empty(COUNT)), torch.empty(COUNT, device="meta")]
    before = [one.data_ptr() for one in left]
    move_to_huge_pages(left)
    assert [one.data_ptr() for one in left] == before


def test_nothing_is_moved_where_nobody_tells_who_else_holds_it(
    asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    tensor = torch.empty(COUNT)
    before = tensor.data_ptr()
    move_to_huge_pages([tensor])
    assert tensor.data_ptr() == before and asked == []


def is_away(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if why == "no such thing":
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    else:
        answer = None if why == "no function" else lambda *_: -1
        monkeypatch.setattr(huge_pages, "_madvise", lambda: answer)


def test_where_there_are_none_memory_is_as_it_comes() -> None:
    for why in ("no function", "it fails", "no such thing"):
        with case(why=why), pytest.MonkeyPatch.context() as monkeypatch:
            is_away(why, monkeypatch)
            made = huge_empty(COUNT, torch.float32, torch.device("cpu"))
            assert made.shape == (COUNT,)
            before = made.data_ptr()
            move_to_huge_pages([made])
            assert made.data_ptr() == before
            untouched = untouched_zeros(made)
            ask_for_huge_pages(untouched)
            assert untouched.shape == (COUNT,) and not untouched[::512].any()


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


def test_layouts_are_undone_as_ever() -> None:
    param = torch.arange(COUNT, dtype=torch.float32)
    values = param.clone()
    layout = FlatLayout([param], ["p"])
    assert torch.equal(layout.buffers[0].data, values)
    layout.undo()
    assert torch.equal(param, values)
