"""Loops of chains that work in blocks, for parameters that do not fill their last block."""

from ..choices import case
from .plain.test_bound_blocks import EIGHT_BITS, OPTIMIZERS
from .support import Twins, assert_same, noise


def test_a_parameter_of_any_length_is_compiled() -> None:
    """A parameter is compiled, whether or not it fills its last block."""
    for count in (5_001, 512, 300, 257, 90):
        twins = Twins(EIGHT_BITS, lambda count=count: {"w": noise(0, count)}, "compiled")
        with case(count=count):
            assert "exact; compiled" in twins.bound.explain()
            for step in range(2):
                twins.step({"w": noise(step + 1, count)})


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


def test_a_lone_element_does_not_stand_for_longer_leaves() -> None:
    """For a lone element, state per block looks like state per element."""
    given = [noise(k, size) for k, size in enumerate((1, 5000, 300))]
    plain = EIGHT_BITS.using(executor="reference")
    want, _ = plain.update(given, given, EIGHT_BITS.init(given))
    found = [one.clone() for one in given]
    EIGHT_BITS.using(executor="auto").update_(found, given, EIGHT_BITS.init(found))
    assert_same(found, want)
