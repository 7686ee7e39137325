"""The raw gradient in executors that compile."""

from functional_optim import Optimizer
from functional_optim.kernels import ExecutorName
from tests.choices import each_value

from ..raw import CAUTIOUS, RAW, RawCase, assert_cautious, assert_raw

COMPILING: tuple[ExecutorName, ...] = ("compiled", "auto")


@each_value(one=RAW, executor=COMPILING)
def test_the_raw_gradient_is_what_came_in_or_what_the_gate_has_let_through(
    one: RawCase, executor: ExecutorName
) -> None:
    assert_raw(one, executor)


@each_value(optimizer=CAUTIOUS, executor=COMPILING)
def test_caution_is_the_same_in_every_executor(
    optimizer: Optimizer, executor: ExecutorName
) -> None:
    assert_cautious(optimizer, executor)
