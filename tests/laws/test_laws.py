"""Every law that compiles nothing, over every case of the table. No test names an algorithm."""

import pytest
import torch

from functional_optim import algorithms, transforms
from functional_optim.testing import CASES, LAWS

from ..choices import case
from .support import COMPILED, PURE, TABLE, require_laws


@pytest.mark.parametrize("name", TABLE)
def test_laws(name: str) -> None:
    require_laws(name, PURE, 3)


@pytest.mark.parametrize("name", [name for name, one in CASES.items() if one.oracle is not None])
def test_it_is_torchs(name: str) -> None:
    """With all of its options."""
    for turn in range(3):
        require_laws(name, ["same as the oracle"], 15, turn=turn)


def test_every_law_is_tried_here_or_where_things_are_compiled() -> None:
    assert {*PURE, *COMPILED} == set(LAWS)
    assert {name for name, law in LAWS.items() if law.slow} <= set(COMPILED)


def test_every_algorithm_has_a_case() -> None:
    assert set(CASES) == set(algorithms.__all__)
    assert all(one.factory is getattr(algorithms, name) for name, one in CASES.items())


def test_every_transform_is_in_some_chain() -> None:
    used = {stage.name for one in TABLE.values() for stage in one.factory().stages}
    names = {"maximize" if name == "maximized" else name for name in transforms.__all__}
    assert names <= used


def test_what_torch_refuses_is_refused() -> None:
    for name, one in CASES.items():
        for kwargs in one.refused:
            with case(name=name, **kwargs):
                if one.oracle is not None:
                    with pytest.raises(ValueError, match=r"."):
                        one.oracle([torch.zeros(1)], **kwargs)
                with pytest.raises(ValueError, match=r"must|needs"):
                    one.factory(**kwargs)


def test_nan_and_the_like_are_refused() -> None:
    for name, one in CASES.items():
        for kwargs in one.refused_here:
            with case(name=name, **kwargs), pytest.raises(ValueError, match="must be"):
                one.factory(**kwargs)
