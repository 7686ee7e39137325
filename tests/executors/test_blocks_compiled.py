"""Loops of chains that work in blocks, for parameters that do not fill their last block."""

from typing import Any

import pytest

from functional_optim.kernels import KernelExecutor
from functional_optim.kernels.chunks import Table
from functional_optim.kernels.exact.program import LoopProgram

from ..choices import case
from .plain.test_bound_blocks import EIGHT_BITS, OPTIMIZERS
from .support import Twins, assert_same, noise


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Record the number of elements of each chunk, for each call of an exact loop."""
    seen: list[tuple[int, ...]] = []
    bound = LoopProgram.bound

    def noted(self: LoopProgram, table: Table, scalar_args: Any) -> Any:
        seen.append(tuple(table.lengths))
        return bound(self, table, scalar_args)

    monkeypatch.setattr(LoopProgram, "bound", noted)
    return seen


def test_a_parameter_of_any_length_is_compiled() -> None:
    """A parameter is compiled, whether or not it fills its last block."""
    for count in (5_001, 512, 300, 257, 90):
        twins = Twins(EIGHT_BITS, lambda count=count: {"w": noise(0, count)}, "compiled")
        with case(count=count):
            assert "exact; compiled" in twins.bound.explain()
            for step in range(2):
                twins.step({"w": noise(step + 1, count)})


def test_several_that_do_not_fill_a_block_are_stepped_by_one_call(
    counted: list[tuple[int, ...]],
) -> None:
    bound = EIGHT_BITS.using(executor="compiled").bind([noise(0, 300), noise(1, 256), noise(2, 90)])
    counted.clear()  # calls of the self-check
    bound.step([noise(3, 300), noise(4, 256), noise(5, 90)])
    assert counted == [(300, 256, 90)]
    assert bound.explain().startswith("0 and 2 more: 646 elements")


def test_auto_compiles_it_where_it_lies_and_says_so(counted: list[tuple[int, ...]]) -> None:
    bound = EIGHT_BITS.using(executor="auto").bind({"w": noise(0, 5_001)})
    bound.step({"w": noise(1, 5_001)})
    counted.clear()
    bound.step({"w": noise(2, 5_001)})
    assert counted == [(5_001,)]  # its last block is not full
    assert bound.explain().startswith("w: 5,001 elements") and ": exact; " in bound.explain()


def test_of_leaves_that_are_not_bound_it_is_said_how_long_their_chunk_is() -> None:
    """Small leaves are explained as one chunk, which is large enough to compile."""
    leaves = [noise(k, 100) for k in range(200)]
    said = EIGHT_BITS.using(executor="auto").explain(leaves)
    assert said.startswith("200 parameters, 20,000 elements of torch.float32 on cpu, together")
    assert "no loop is compiled for so few elements" not in said


def test_the_end_of_a_chunk_is_not_a_block_of_something_else() -> None:
    """The rule gets the end of a chunk as a block that is not full."""
    for count in (16, 35, 61):
        with case(count=count):
            Twins(OPTIMIZERS["own"], lambda count=count: noise(0, count), "compiled").step(
                noise(1, count)
            )


def test_a_lone_element_does_not_stand_for_longer_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a lone element, state per block looks like state per element."""
    asked: list[tuple[int, int]] = []
    bind_table = KernelExecutor.bind_table

    def noted(self: KernelExecutor, stages: Any, like: Any, elements: int) -> Any:
        asked.append((like.param.numel(), elements))
        return bind_table(self, stages, like, elements)

    monkeypatch.setattr(KernelExecutor, "bind_table", noted)
    given = [noise(k, size) for k, size in enumerate((1, 5000, 300))]
    plain = EIGHT_BITS.using(executor="reference")
    want, _ = plain.update(given, given, EIGHT_BITS.init(given))
    found = [one.clone() for one in given]
    EIGHT_BITS.using(executor="auto").update_(found, given, EIGHT_BITS.init(found))
    assert asked[0] == (5000, 5301)
    assert_same(found, want)
