"""Large parameters in even slices, one for each rank; the others level the loads."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from functional_optim import adamw
from sharding import ParameterSpec, plan

from .support import MODELS, derandomized


@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
@pytest.mark.parametrize("model", MODELS)
def test_as_level_as_elements(model: str, ranks: int) -> None:
    optimizer = adamw()
    report = plan(MODELS[model], ranks, "sliced", optimizer).report(optimizer)
    for column in ("elements", "total_bytes", "state_bytes", "parameter_bytes"):
        assert report.imbalance(column) <= 1.001, column


@derandomized
@given(
    numels=st.lists(st.integers(0, 5000), min_size=1, max_size=12),
    ranks=st.integers(1, 9),
    least=st.integers(1, 600),
)
def test_every_rank_has_an_even_slice_of_what_is_large(
    numels: list[int], ranks: int, least: int
) -> None:
    specs = [ParameterSpec(str(place), (numel,)) for place, numel in enumerate(numels)]
    found = plan(specs, ranks, "sliced", least=least, align=1)
    for spec, numel in zip(specs, numels, strict=True):
        if numel < ranks * least:
            continue
        owners = found.owners(spec.path)
        lengths = [one.stop - one.start for one in owners]
        assert sorted(one.ranks[0] for one in owners) == list(range(ranks))
        assert max(lengths) - min(lengths) <= 1


def test_slices_fall_on_the_blocks_of_the_rule() -> None:
    found = plan([ParameterSpec("w", (1000,))], 3, "sliced", least=100, align=128)
    assert [(one.start, one.stop) for one in found.owners("w")] == [
        (0, 256),
        (256, 640),
        (640, 1000),
    ]


def test_the_first_slice_goes_round() -> None:
    specs = [ParameterSpec(name, (90,)) for name in "abc"]
    found = plan(specs, 3, "sliced", least=1, align=1)
    assert [found.owners(name)[0].ranks for name in "abc"] == [(0,), (1,), (2,)]


def test_matrices_are_refused_or_stay_whole() -> None:
    specs = [ParameterSpec("m", (8, 8), kind="per_matrix"), ParameterSpec("w", (64,))]
    with pytest.raises(ValueError, match="policy 'sliced' cuts parameters, but 'm' is per_matrix"):
        plan(specs, 2, "sliced")
    found = plan(specs, 2, "sliced", mixed=True)
    assert [one.whole for rank in (0, 1) for one in found.owned(rank) if one.path == "m"] == [True]


@pytest.mark.parametrize(("least", "error"), [(0, ValueError), (1.5, TypeError)])
def test_a_wrong_least_is_refused(least: float, error: type[Exception]) -> None:
    with pytest.raises(error, match="least must be a whole number"):
        plan([ParameterSpec("w", (64,))], 2, "sliced", least=least)
