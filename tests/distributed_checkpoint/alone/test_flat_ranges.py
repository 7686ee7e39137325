"""Tests, in one process, of ranges of the elements of a tensor and the boxes that cover them."""

import copy
import math
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from functional_optim import adamw
from sharding import ZeroRedundancyOptimizer
from sharding.checkpoint.boxes import boxes_of
from sharding.checkpoint.flat_ranges import FlatRanges, OnOtherRanks, elements_of, whole_of
from sharding.transport.local import LocalWorld
from sharding.transport.local_group import LocalGroup
from tests.choices import case
from tests.zero.towers import Halving, give, raised

SHAPES = ((), (5,), (1, 1), (2, 3), (3, 1, 4), (2, 3, 2, 2), (4, 1, 1))


def test_boxes_are_the_elements_in_their_order() -> None:
    for shape in SHAPES:
        numbers = torch.arange(math.prod(shape)).view(shape)
        for start in range(numbers.numel()):
            for stop in range(start + 1, numbers.numel() + 1):
                with case(shape=shape, start=start, stop=stop):
                    boxes = boxes_of(shape, start, stop)
                    found = []
                    for box in boxes:
                        assert [box.start, box.stop] == [
                            start + len(found),
                            start + len(found) + math.prod(box.sizes),
                        ]
                        slices = zip(box.offsets, box.sizes, strict=True)
                        cut = numbers[tuple(slice(at, at + size) for at, size in slices)]
                        assert cut.shape == box.sizes
                        found += cut.reshape(-1).tolist()
                    assert found == list(range(start, stop))
                    assert len(boxes) <= max(2 * (len(shape) - 1) + 1, 1)


def test_a_tensor_without_elements_is_one_box() -> None:
    assert boxes_of((0, 3), 0, 0) == [((0, 0), (0, 3), 0)]
    assert boxes_of((2, 3), 4, 4) == []


def ranges() -> FlatRanges:
    """Return elements 1 to 3 of a matrix."""
    return FlatRanges((2, 3), {1: torch.tensor([1.0, 2.0, 3.0])}, torch.float32, "cpu", "here")


def test_loading_writes_beside_the_ranges() -> None:
    one = ranges()
    kept = one.ranges[1]
    chunks = one.__create_chunk_list__()
    assert [tuple(chunk.offsets) for chunk in chunks] == [(0, 1), (1, 0)]
    one.__get_tensor_shard__(MetadataIndex("name", (1, 0))).fill_(9.0)
    assert kept.tolist() == [1.0, 2.0, 3.0]
    assert one.elements(1, 4).tolist() == [1.0, 2.0, 9.0]
    assert "name has no box at (1, 1)" in raised(
        one.__get_tensor_shard__, MetadataIndex("name", (1, 1))
    )


def test_elements_that_others_have_are_an_error() -> None:
    one = ranges()
    assert elements_of(one, 2, 4).tolist() == [2.0, 3.0]
    told = "wanted are elements [0, 6), of a tensor of shape (2, 3) this process has [1, 4)"
    assert told in raised(whole_of, one)
    assert whole_of(3) == 3
    assert elements_of(torch.arange(6).view(2, 3), 1, 3).tolist() == [1, 2]


def test_copies_have_memory_of_their_own() -> None:
    for copied in (
        ranges().clone(),
        copy.deepcopy(ranges()),
        ranges().detach().clone(),
        ranges().to(torch.float64),
        ForkingPickler.loads(ForkingPickler.dumps(ranges())),
    ):
        assert isinstance(copied, FlatRanges)
        assert copied.shape == (2, 3) and copied.origin == "here"
        assert copied.elements(1, 4).tolist() == [1.0, 2.0, 3.0]
        assert copied.dtype == copied.elements(1, 4).dtype
    assert ranges().detach().elements(1, 2).item() == 1.0


def test_all_else_is_refused(tmp_path: Path) -> None:
    """Other operations raise an error that says what to do; ``torch.save`` writes no part."""
    elsewhere = OnOtherRanks("here")
    for function in (
        lambda: ranges().add(1),
        lambda: torch.equal(ranges(), ranges()),
        lambda: torch.stack([ranges()]),
        lambda: torch.zeros(2, 3).copy_(ranges()),
        lambda: torch.save({"state": ranges()}, tmp_path / "part"),
        lambda: torch.save({"state": elsewhere}, tmp_path / "part"),
    ):
        assert "call consolidate_state_dict() on all ranks" in raised(function)
    assert copy.deepcopy(elsewhere).origin == "here"
    sent = ForkingPickler.loads(ForkingPickler.dumps(elsewhere))
    assert type(sent) is OnOtherRanks and sent.origin == "here"
    assert "this process has [1, 4)" in repr(ranges())


def optimizer_of(group: LocalGroup, kind: Any, **options: Any) -> ZeroRedundancyOptimizer:
    params = [("a", nn.Parameter(torch.ones(2, 3))), ("b", nn.Parameter(torch.ones(2)))]
    return ZeroRedundancyOptimizer(params, kind, group, **options)


def test_each_rank_has_its_part_unless_the_state_was_collected() -> None:
    def law(group: LocalGroup) -> None:
        zero = optimizer_of(group, torch.optim.AdamW, lr=0.1)
        give(zero, 0)
        zero.step()
        part = zero.state_dict()
        kinds = [type(entries) is OnOtherRanks for entries in part["state"].values()]
        assert kinds == [[False, True], [True, False]][zero.rank]
        assert "param_names" not in part["param_groups"][0]
        zero.consolidate_state_dict(to=1)
        if zero.rank == 1:
            whole = zero.state_dict()
            assert all(type(one["exp_avg"]) is torch.Tensor for one in whole["state"].values())
            assert whole["param_groups"][0]["param_names"] == ["a", "b"]
        else:
            told = "was collected on rank 1 of the process group, and this is rank 0"
            assert told in raised(zero.state_dict)
        give(zero, 1)
        zero.step()
        assert type(zero.state_dict()["state"][1 - zero.rank]) is OnOtherRanks
        give(zero, 2)
        zero.consolidate_state_dict(to=0)
        if zero.rank == 0:
            zero.step_owned({"a": [(0, 6, torch.ones(6))]})
        assert zero.rank or type(zero.state_dict()["state"][1]) is OnOtherRanks

    LocalWorld(2).run(law)


def test_a_class_that_nobody_knows_has_to_be_collected() -> None:
    def law(group: LocalGroup) -> None:
        zero = optimizer_of(group, Halving)
        told = "nothing is known of the state of Halving"
        assert told in raised(zero.state_dict)
        known = optimizer_of(group, torch.optim.SGD, lr=0.1, momentum=0.9)
        before = zero.param_groups[0]["lr"]
        told = "was given a part of the state of 'a'"
        assert told in raised(zero.load_state_dict, known.state_dict())
        assert zero.param_groups[0]["lr"] == before

    LocalWorld(2).run(law)


def test_schedules_and_counts_of_groups_are_left_out() -> None:
    def law(group: LocalGroup) -> None:
        zero = optimizer_of(group, adamw(lr=lambda step: 0.1, betas=(lambda step: 0.5, 0.9)))
        written = zero.state_dict()["param_groups"][0]
        assert {"lr", "betas", "param_names", "step"} & {*written} == set()
        zero.load_state_dict(zero.state_dict())
        assert callable(zero.param_groups[0]["lr"])

    LocalWorld(1).run(law)


def test_no_step_is_made_before_there_is_state(world_of_one: None) -> None:
    """Without state, torch steps with zero gradients, which would change the parameters."""
    model = nn.Linear(3, 2)
    zero = ZeroRedundancyOptimizer(model.named_parameters(), torch.optim.AdamW, lr=0.1)
    state = get_optimizer_state_dict(model, zero)["state"]
    assert state["weight"]["step"].elements(0, 1).item() == 0.0
    assert state["weight"]["exp_avg"].elements(0, 6).tolist() == [0.0] * 6
    assert model.weight.grad is None
