"""Schedules as data: values that can be compared, hashed, pickled, printed, and traced."""

import copy
import dataclasses
import itertools
import math
import pickle
from collections.abc import Callable
from decimal import Decimal, getcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import functional_optim
from functional_optim import (
    adamw,
    constant,
    cosine,
    exponential,
    inverse_sqrt,
    joined,
    linear,
    on_global_step,
    one_cycle,
    polynomial,
    schedules,
    warmup,
    warmup_stable_decay,
)
from functional_optim.core.schedule_value import ScheduleValue
from functional_optim.plan.device_numbers import first_value
from tests.choices import case, examples

from .schedule_twins import TWINS

EPS = torch.finfo(torch.float64).eps
TRACED_ULPS = 8.0
"""Distance between Python's functions and torch's."""

numbers = st.floats(-10.0, 10.0) | st.sampled_from([0.0, 0.1, 1e-3])
counts = st.integers(1, 300)
ways = st.sampled_from(["linear", "cos"])
one_cycles = st.builds(
    one_cycle,
    numbers,
    steps=st.integers(6, 300),
    pct_start=st.floats(0.2, 0.5),
    anneal_strategy=ways,
    div_factor=st.floats(0.5, 50.0),
    final_div_factor=st.floats(0.5, 1e5),
    three_phase=st.booleans(),
)
simple = st.one_of(
    st.builds(constant, numbers),
    st.builds(linear, numbers, to=numbers, steps=counts),
    st.builds(cosine, numbers, to=numbers, steps=counts),
    st.builds(polynomial, numbers, to=numbers, steps=counts, power=st.floats(0.1, 4.0)),
    st.builds(exponential, numbers, gamma=st.floats(0.9, 1.01)),
    st.builds(inverse_sqrt, numbers, steps=counts),
    st.builds(
        warmup_stable_decay,
        numbers,
        warmup=st.integers(0, 50),
        stable=st.integers(0, 50),
        decay=counts,
        start=numbers,
        to=numbers,
        anneal_strategy=ways,
    ),
    one_cycles,
)


def _joined(draw_from: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return a strategy for schedules that contain other schedules, in each possible way."""
    pairs = st.lists(st.tuples(draw_from, st.integers(1, 60)), min_size=1, max_size=4)
    return st.one_of(
        st.builds(warmup, st.integers(0, 60), then=draw_from, start=numbers),
        pairs.map(
            lambda some: joined(
                [one for one, _ in some],
                [sum(length for _, length in some[: i + 1]) for i in range(len(some) - 1)],
            )
        ),
        draw_from.map(on_global_step),
    )


every = simple | _joined(simple) | _joined(simple.map(lambda one: warmup(5, then=one)))
made_steps = st.integers(0, 700).map(float) | st.floats(0.0, 700.0)


@examples(60)
@given(every)
def test_a_schedule_is_what_its_repr_says_and_what_its_pickle_holds(one: ScheduleValue) -> None:
    """The copies are equal, have the same hash, and cannot be changed."""
    read = eval(repr(one), {name: getattr(schedules, name) for name in schedules.__all__})
    for other in (read, pickle.loads(pickle.dumps(one)), copy.deepcopy(one)):
        assert other == one
        assert hash(other) == hash(one)
        assert repr(other) == repr(one)
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.start = 1.0  # type: ignore[attr-defined]
    assert adamw(one).hyper["lr"] == one


def test_schedules_differ_in_every_part() -> None:
    one: dict[str, Any] = {
        "pct_start": 0.4,
        "anneal_strategy": "cos",
        "div_factor": 9.0,
        "three_phase": False,
    }
    other: dict[str, Any] = {
        "pct_start": 0.5,
        "anneal_strategy": "linear",
        "div_factor": 8.0,
        "three_phase": True,
    }
    found: list[ScheduleValue] = [
        constant(0.5),
        linear(0.5, to=0.0, steps=9),
        cosine(0.5, to=0.0, steps=9),
        cosine(0.4, to=0.0, steps=9),
        cosine(0.5, to=0.1, steps=9),
        cosine(0.5, to=0.0, steps=8),
        on_global_step(constant(0.5)),
        warmup(9, then=constant(0.5)),
        warmup(9, then=constant(0.5), start=0.1),
        joined([constant(0.5), constant(0.4)], [9]),
        joined([constant(0.5), constant(0.4)], [8]),
        joined([constant(0.4), constant(0.5)], [9]),
        *(one_cycle(0.5, steps=9, **{**one, name: other[name]}) for name in one),
        one_cycle(0.5, steps=9, **one),
    ]
    assert len(set(found)) == len(found) == len(set(map(repr, found)))
    assert constant(1) == constant(1.0)
    assert repr(constant(1)) == "constant(1.0)"


def test_every_schedule_is_exported_and_has_a_twin() -> None:
    for name in schedules.__all__:
        with case(name=name):
            assert getattr(functional_optim, name) is getattr(schedules, name)
            assert name in TWINS or name == "on_global_step"


def close(got: Any, want: float, one: ScheduleValue) -> bool:
    """Return True if a value is right up to rounding of the value or of the largest end."""
    return abs(float(got) - want) <= TRACED_ULPS * EPS * max(abs(want), *_ends(one))


def _ends(one: Any) -> list[float]:
    """Return the magnitudes of a schedule's numbers, including the schedules inside it."""
    found = [0.0]
    for name, value in vars(one).items():
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, ScheduleValue):
                found += _ends(part)
            elif name in ("value", "start", "to", "peak"):
                found.append(abs(part))
    return found


@examples(60)
@given(every, made_steps)
def test_a_step_count_in_a_tensor_gives_the_same(one: ScheduleValue, made: float) -> None:
    """The result is in double precision for any dtype, even if torch.func hides the number."""
    want = one(made)
    assert isinstance(want, float)
    kinds = [torch.float64, torch.int64] if made.is_integer() else [torch.float64]
    for dtype in kinds:
        got = one(torch.tensor(made, dtype=dtype))
        assert not isinstance(got, torch.Tensor) or (got.dim(), got.dtype) == (0, torch.float64)
        assert close(got, want, one)
    several = torch.tensor([0.0, made, 2.0 * made], dtype=torch.float64)
    traced = torch.func.vmap(lambda count: torch.zeros_like(count) + one(count))(several)
    for got, count in zip(traced, several.tolist(), strict=True):
        assert close(got, one(count), one)


def test_each_is_computed_on_a_device_without_a_look_at_the_count() -> None:
    for name, twin in TWINS.items():
        with case(name=name):
            assert first_value("lr", twin.schedule) == pytest.approx(twin.schedule(0.0))


ENDED: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (linear, {}),
    (cosine, {}),
    (polynomial, {"power": 0.7}),
    (polynomial, {"power": 3.0}),
]


@examples(60)
@given(numbers, numbers, counts, st.sampled_from(ENDED), st.lists(st.floats(0.0, 1.0)))
def test_a_way_between_two_numbers_stays_between_them_and_never_turns(
    start: float, to: float, steps: int, way: Any, shares: list[float]
) -> None:
    """The value is exact at both ends, constant after the end, and turns back only by rounding."""
    make, extra = way
    one = make(start, to=to, steps=steps, **extra)
    assert (one(0.0), one(float(steps)), one(steps + 7.5)) == (start, to, to)
    found = [one(steps * share) for share in sorted(shares)]
    assert all(min(start, to) <= value <= max(start, to) for value in found)
    slack = TRACED_ULPS * EPS * max(abs(start), abs(to))
    direction = math.copysign(1.0, to - start)
    assert all((b - a) * direction >= -slack for a, b in itertools.pairwise(found))


@examples(60)
@given(st.floats(0.001, 10.0), st.floats(0.5, 0.999), counts, made_steps)
def test_a_fall_without_an_end_falls(start: float, gamma: float, steps: int, made: float) -> None:
    for one in (exponential(start, gamma=gamma), inverse_sqrt(start, steps=steps)):
        assert one(0.0) == start
        assert 0.0 <= one(made + 1.0) < one(made) <= start or one(made) < 1e-300


def _jump(one: Any, boundary: float) -> float:
    """Return the change of a value within one unit in the last place of the step count."""
    return abs(one(boundary) - one(math.nextafter(boundary, 0.0)))


@examples(60)
@given(simple, numbers, st.integers(1, 60))
def test_a_warmup_meets_what_follows(then: ScheduleValue, start: float, steps: int) -> None:
    one = warmup(steps, then=then, start=start)
    peak = then(0.0)
    assert one(0.0) == start
    assert one(float(steps)) == peak
    assert _jump(one, float(steps)) <= TRACED_ULPS * EPS * max(abs(start), abs(peak))
    assert all(one(steps + count) == then(count) for count in (1.0, 9.0, 400.0))
    assert warmup(0, then=then, start=start)(3.0) == then(3.0)


@examples(60)
@given(one_cycles)
def test_the_phases_of_one_cycle_meet(one: Any) -> None:
    initial = one.peak / one.div_factor
    top = one.pct_start * one.steps - 1
    ends = [one.peak, initial, initial / one.final_div_factor]
    slack = TRACED_ULPS * EPS * max(map(abs, ends))
    assert one(0.0) == initial
    assert abs(one(top) - one.peak) <= slack
    boundaries = [top, 2 * top] if one.three_phase else [top]
    assert all(_jump(one, boundary) <= slack for boundary in boundaries)
    assert one(one.steps - 1.0) == one(one.steps * 2.0) == ends[-1]
    assert all(min(ends) <= one(float(n)) <= max(ends) for n in range(one.steps + 1))


@examples(40)
@given(numbers, numbers, numbers, *(st.integers(1, 50) for _ in range(3)), ways)
def test_a_stable_time_is_at_the_peak(
    peak: float, start: float, to: float, rise: int, stable: int, decay: int, way: Any
) -> None:
    one = warmup_stable_decay(
        peak, warmup=rise, stable=stable, decay=decay, start=start, to=to, anneal_strategy=way
    )
    assert one(0.0) == start
    assert {one(float(n)) for n in range(rise, rise + stable + 1)} == {peak}
    assert one(float(rise + stable + decay)) == one(1e6) == to
    fall = (cosine if way == "cos" else linear)(peak, to=to, steps=decay)
    assert all(one(float(rise + stable + n)) == fall(float(n)) for n in range(decay))
    slack = TRACED_ULPS * EPS * max(abs(peak), abs(start))
    assert _jump(one, float(rise)) <= slack
    at_once = warmup_stable_decay(peak, warmup=0, stable=0, decay=decay, to=to)
    assert (at_once(0.0), at_once(float(decay))) == (peak, to)


def test_each_part_of_a_joined_schedule_counts_from_where_it_begins() -> None:
    asked: list[tuple[str, float]] = []

    def noting(name: str) -> Callable[[Any], float]:
        return lambda made: asked.append((name, made)) or 0.5

    one = joined([noting("a"), noting("b"), noting("c")], [2, 3])
    for made in (0, 1.0, 1.5, 2.0, 3.0, 4.0):
        assert one(made) == 0.5
    assert asked == [("a", 0.0), ("a", 1.0), ("a", 1.5), ("b", 0.0), ("c", 0.0), ("c", 1.0)]
    jumps = joined([constant(0.1), constant(0.2), linear(0.3, to=0.5, steps=2)], [2, 3])
    wanted = [0.1, 0.1, 0.2, 0.3, 0.4, 0.5, 0.5]
    assert [jumps(made) for made in range(7)] == wanted
    assert [jumps(torch.tensor(made)).item() for made in range(7)] == wanted


def test_a_function_among_schedules_is_shown_by_its_name() -> None:
    one = warmup(5, then=joined([lambda made: 0.1, constant(0.2)], [3]))
    text = "warmup(5, then=joined([<lambda>, constant(0.2)], [3]), start=0.0)"
    assert repr(one) == text
    assert repr(on_global_step(math.sqrt)) == "on_global_step(sqrt)"


def test_a_mark_of_the_global_step_hands_the_count_on() -> None:
    own = linear(0.1, to=0.5, steps=10)
    marked = on_global_step(own)
    assert marked.schedule is own
    assert [marked(float(n)) for n in range(12)] == [own(float(n)) for n in range(12)]
    assert marked != own


ULPS = 8
"""Bound relative to the exact value, however small."""


def _exact_sine(x: Decimal) -> Decimal:
    term = total = x
    for k in range(1, 40):
        term = -term * x * x / ((2 * k) * (2 * k + 1))
        total += term
    return total


PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459")


@examples(60)
@given(
    st.floats(0.001, 10.0),
    st.just(0.0) | st.floats(0.001, 10.0),
    st.integers(1, 10**7),
    st.integers(0, 20) | st.integers(0, 10**7),
)
def test_values_close_to_0_are_as_exact_as_others(
    start: float, to: float, steps: int, before_end: int
) -> None:
    """Decimal arithmetic in 50 digits shows that the tail of a decay has all its digits."""
    getcontext().prec = 50
    made = float(max(steps - before_end, 0))
    left = (Decimal(steps) - Decimal(made)) / Decimal(steps)
    wave = _exact_sine(PI / 2 * left) ** 2
    for one, rest in ((linear, left), (cosine, wave)):
        exact = Decimal(start) * rest + Decimal(to) * (1 - rest)
        got = Decimal(one(start, to=to, steps=steps)(made))
        assert abs(got - exact) <= ULPS * Decimal(EPS) * abs(exact)
