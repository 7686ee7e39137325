"""Tests of plain/, repeated with executors that compile.

This module collects every test of plain/ that takes the fixture ``executors``.
"""

import inspect
from importlib import import_module
from pkgutil import iter_modules

from functional_optim import Optimizer, adamw
from functional_optim.testing import check_optimizer

from ..choices import case
from . import plain
from .plain.test_history import made
from .plain.test_interrupts import AtLine, AtOperation, Case, check, copies, params
from .plain.test_threads import require_some_order, start

for found in iter_modules(plain.__path__, f"{plain.__name__}."):
    for name, law in vars(import_module(found.name)).items():
        if name.startswith("test_") and "executors" in inspect.signature(law).parameters:
            assert name not in globals(), f"two laws are called {name}"
            globals()[name] = law


def program(optimizer: Optimizer) -> Case:
    given = params()
    made = optimizer.script(given)
    return Case(
        lambda grads: made.step([grads[key] for key in sorted(grads)]),
        lambda: copies(given, made.state),
    )


def test_a_program_is_stepped_as_a_whole_or_not() -> None:
    for where in (AtOperation, AtLine):
        with case(where=where):
            check(lambda: program(adamw(0.1)), where, 16)


def test_steps_of_one_program_are_those_of_some_order() -> None:
    given, optimizer = start(), adamw(lr=0.1)
    program = optimizer.script(given)
    require_some_order(
        optimizer, program, given, lambda grads: program.step([grads[key] for key in sorted(grads)])
    )


def test_a_rule_with_numbers_on_the_left_keeps_the_law_of_programs() -> None:
    check_optimizer(lambda: made("left"), laws=["script is reference"], max_examples=5)
