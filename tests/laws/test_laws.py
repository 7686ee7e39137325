"""Every law over every case of the table. No test here names an algorithm."""

import pytest
import torch

from functional_optim import algorithms, transforms
from functional_optim.testing import CASES, CHAINS, LAWS, Case, check_law

TABLE = {**CASES, **CHAINS}


@pytest.mark.parametrize("law", [name for name, law in LAWS.items() if not law.slow])
@pytest.mark.parametrize("name", TABLE)
def test_law(name: str, law: str) -> None:
    check_law(law, TABLE[name].subject())


def test_every_algorithm_has_a_case() -> None:
    assert set(CASES) == set(algorithms.__all__)
    assert all(case.factory is getattr(algorithms, name) for name, case in CASES.items())


def test_every_transform_is_in_some_chain() -> None:
    used = set()
    for case in TABLE.values():
        used |= {stage.name for stage in case.factory().stages}
    names = {"maximize" if name == "maximized" else name for name in transforms.__all__}
    assert names <= used


@pytest.mark.parametrize(
    ("case", "kwargs"),
    [(case, kwargs) for case in CASES.values() for kwargs in case.refused],
)
def test_what_torch_refuses_is_refused(case: Case, kwargs: dict[str, object]) -> None:
    if case.oracle is not None:
        with pytest.raises(ValueError, match=r"."):
            case.oracle([torch.zeros(1)], **kwargs)
    with pytest.raises(ValueError, match=r"must|needs"):
        case.factory(**kwargs)


@pytest.mark.parametrize(
    ("case", "kwargs"),
    [(case, kwargs) for case in CASES.values() for kwargs in case.refused_here],
)
def test_nan_and_the_like_are_refused(case: Case, kwargs: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="must be"):
        case.factory(**kwargs)
