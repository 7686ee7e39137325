"""Every quick law, for every case of the table. No test names an algorithm."""

import inspect
import itertools
from dataclasses import replace

import pytest
import torch

import functional_optim
from functional_optim import Link, algorithms, export_step, transforms
from functional_optim.kernels.pieces import PIECE_VARIABLE
from functional_optim.storage import stored
from functional_optim.testing import LAWS, check_law, check_optimizer
from functional_optim.testing.runs import REAL_DTYPES, WIDE_SHAPE, Run, runs
from tests.cases import CASES

from ..choices import EVERYTHING, case
from . import support
from .support import COMPILED, QUICK, SLOW, TABLE, drawn, require_laws


@pytest.mark.parametrize("name", TABLE)
def test_laws(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each algorithm obeys the quick laws, with pieces so small that small tensors have several."""
    monkeypatch.setenv(PIECE_VARIABLE, "64")
    require_laws(name, 2)


def test_laws_of_small_tensors_are_tried_with_no_wide_matrix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Laws of small tensors get no wide matrix.

    Batched products of wide matrices round differently, and so do eigenvectors of equal values.
    """
    seen: list[tuple[int, ...]] = []
    name = "vmap is the loop"
    noted = replace(
        LAWS[name], check=lambda subject, run: seen.extend(leaf.shape for leaf in run.leaves)
    )
    monkeypatch.setitem(LAWS, name, noted)
    monkeypatch.setattr(support, "QUICK", (name,))
    check_law(name, CASES["soap"].subject(), max_examples=100)
    support.require_laws("soap", 100)
    assert len(seen) > 100
    assert WIDE_SHAPE not in seen


ORACLES = [name for name, one in CASES.items() if one.oracle is not None]


@pytest.mark.parametrize("name", ORACLES)
def test_it_is_torchs(name: str) -> None:
    """Each algorithm matches its oracle with all options, in one dtype after the other."""
    subject, dtypes = CASES[name].subject(), itertools.cycle(REAL_DTYPES)

    def same(run: Run) -> None:
        for dtype in REAL_DTYPES if EVERYTHING else (next(dtypes),):
            with case(dtype=dtype):
                LAWS["same as the oracle"].check(subject, replace(run, dtype=dtype))

    shapes, max_steps = subject.shapes(), subject.max_steps
    drawn(15, runs(subject.options, max_steps=max_steps, large=False, shapes=shapes), same)


def test_every_law_is_tried_here_or_in_the_folder_of_compiled_steps() -> None:
    assert {*QUICK, *SLOW, *COMPILED} == set(LAWS)
    assert {name for name, law in LAWS.items() if law.slow} <= set(COMPILED)


def test_every_algorithm_has_a_case() -> None:
    found = {name: one for name, one in TABLE.items() if name in {*CASES, *algorithms.__all__}}
    assert set(found) == set(algorithms.__all__)
    for name, one in found.items():  # the case of sparse_adam sets an option that all laws need
        assert inspect.unwrap(one.factory) is inspect.unwrap(getattr(algorithms, name))


def test_what_has_no_one_chain_is_refused_where_one_is_asked_for() -> None:
    params = {"w": torch.ones(3)}
    for name, one in TABLE.items():
        optimizer = one.factory()
        with case(name=name):
            assert one.one_chain == (not optimizer.is_composed)
        if one.one_chain:
            continue
        for what, way in {
            "bind": optimizer.bind,
            "script": optimizer.script,
            "export_step": lambda params, made=optimizer: export_step(made, params),
            "capturable": lambda params, made=optimizer: made.bind(params, capturable=True),
            "stored": lambda params, made=optimizer: stored(made, param="bfloat16"),
        }.items():
            with (
                case(name=name, what=what),
                pytest.raises(
                    TypeError, match=r"numbers that belong|acts on some|takes only gradients"
                ),
            ):
                way(params)
    assert params["w"].tolist() == [1.0, 1.0, 1.0]


def test_laws_of_one_chain_say_nothing_of_others() -> None:
    laws = ["script is reference", "bound is reference", "capturable is close"]
    factory = CASES["schedule_free_sgd"].factory
    check_optimizer(factory, laws=laws, max_examples=2)
    with pytest.warns(DeprecationWarning, match="leave it out"):
        check_optimizer(factory, laws=laws, one_chain=False, max_examples=2)


def test_every_transform_is_in_some_chain() -> None:
    used = {stage.name for one in TABLE.values() for stage in one.factory().stages}
    made = {name: getattr(functional_optim, name) for name in functional_optim.__all__}
    links = {
        name
        for name, one in made.items()
        if getattr(one, "__annotations__", {}).get("return") is Link
        and one.__module__.startswith((algorithms.__name__, transforms.__name__))
    }
    assert set(transforms.__all__) < links
    assert {"maximize" if name == "maximized" else name for name in links} <= used


def test_what_torch_refuses_is_refused() -> None:
    for name, one in CASES.items():
        for kwargs in one.refused:
            with case(name=name, **kwargs):
                if one.oracle is not None:
                    with pytest.raises(ValueError, match=r"."):
                        one.oracle([torch.zeros(1, 1)], **kwargs)
                with pytest.raises(ValueError, match=r"must|needs"):
                    one.factory(**kwargs)


def test_nan_and_the_like_are_refused() -> None:
    for name, one in CASES.items():
        for kwargs in one.refused_here:
            with case(name=name, **kwargs), pytest.raises(ValueError, match="must be"):
                one.factory(**kwargs)
