"""Laws of averagers, tested on our averagers."""

from typing import Any

import torch
from hypothesis import strategies as st

from functional_optim import sgd
from hooks import (
    AveragingSchedule,
    HierarchicalModelAverager,
    PeriodicModelAverager,
    ScheduledModelAverager,
)
from hooks.averaging import OuterModelAverager
from hooks.averaging.compression import Blocks, TopK
from hooks.averaging.contrib import GossipModelAverager, Statistical
from hooks.testing import (
    AVERAGING_LAWS,
    AveragerSubject,
    check_averager,
    check_averaging_law,
)
from tests.choices import EVERYTHING, case, examples

from .support import Exact

PERIODS = st.fixed_dictionaries({"period": st.integers(1, 4)})
WARM = st.fixed_dictionaries({"period": st.integers(1, 4), "warmup": st.integers(0, 3)})
REAL = (torch.float32, torch.float64, torch.bfloat16)
DILOCO = sgd(lr=0.7, momentum=0.9, nesterov=True)


def at_the_end(step: int, period: int, **_: Any) -> bool:
    return (step + 1) % period == 0


def after_warm_up(step: int, period: int, warmup: int) -> bool:
    return step >= warmup and (step - warmup) % period == 0


def raw(step: int, period: int, warmup: int) -> bool:
    return step >= warmup and step % period == 0


def periodic(params: Any, group: Any, period: int, warmup: int | None = None) -> Any:
    return PeriodicModelAverager(period, period - 1 if warmup is None else warmup, group)


def outer(rule: Any, **options: Any) -> Any:
    return lambda params, group, period: OuterModelAverager(
        params, rule, period, process_group=group, **options
    )


def in_fragments(**options: Any) -> Any:
    """Return a factory of averagers with two fragments, or one if there is one parameter."""
    return lambda params, group, period: outer(DILOCO, fragments=min(2, len(params)), **options)(
        params, group, period
    )


def scheduled(*of: Any, **options: Any) -> Any:
    return lambda params, group: ScheduledModelAverager(AveragingSchedule(*of), group, **options)


MEANS: dict[str, Any] = {"due": at_the_end, "mean": True, "oracle": periodic}
FOURS = st.just({"period": 4})
SUBJECTS = {
    "periodic": AveragerSubject(
        periodic, WARM, due=after_warm_up, mean=True, every_step={"period": 1, "warmup": 0}
    ),
    "in buckets": AveragerSubject(
        lambda params, group, period: ScheduledModelAverager(
            AveragingSchedule(period, warmup=period - 1), group, bucket_bytes=8
        ),
        PERIODS,
        **MEANS,
    ),
    "one level of hierarchy": AveragerSubject(
        lambda params, group, period, warmup: HierarchicalModelAverager(
            {period: group.size()}, period * warmup, group
        ),
        WARM,
        due=lambda step, period, warmup: raw(step, period, period * warmup),
        mean=True,
        oracle=lambda params, group, period, warmup: periodic(
            params, group, period, period * warmup
        ),
        every_step={"period": 1, "warmup": 0},
    ),
    "two levels of hierarchy": AveragerSubject(scheduled((2, 4), (1, None))),
    "delayed": AveragerSubject(scheduled(3, (None,), 1, delay=2)),
    "an outer SGD of rate 1": AveragerSubject(
        outer(sgd(lr=1.0)), PERIODS, REAL, every_step={"period": 1}, ulps=8.0, **MEANS
    ),
    "neutral SlowMo": AveragerSubject(
        outer(sgd(lr=1.0, momentum=0.0)), PERIODS, REAL, every_step={"period": 1}, ulps=8.0, **MEANS
    ),
    "sent exactly": AveragerSubject(
        outer(DILOCO, compression=Exact()),
        PERIODS,
        (torch.float32,),
        due=at_the_end,
        oracle=outer(DILOCO),
    ),
    "DiLoCo": AveragerSubject(outer(DILOCO), PERIODS, REAL, due=at_the_end),
    "streaming": AveragerSubject(outer(DILOCO, delay=3), FOURS, REAL),
    "in fragments": AveragerSubject(in_fragments(), FOURS, REAL),
    "in fragments, streaming": AveragerSubject(in_fragments(delay=3), FOURS, REAL),
    "in fragments, largest": AveragerSubject(
        in_fragments(compression=TopK(0.2)), FOURS, (torch.float32,)
    ),
    "mixing": AveragerSubject(outer(DILOCO, delay=1, mixing=0.5), FOURS, REAL),
    "8 bits": AveragerSubject(
        outer(DILOCO, compression=Blocks(8)), PERIODS, (torch.float32,), due=at_the_end
    ),
    "2 bits, delayed": AveragerSubject(
        outer(DILOCO, compression=Statistical(2), delay=1), FOURS, (torch.float32,)
    ),
    "largest": AveragerSubject(
        outer(DILOCO, compression=TopK(0.2)), PERIODS, (torch.float32,), due=at_the_end
    ),
    "in a warm-up": AveragerSubject(outer(DILOCO, warmup_steps=2), FOURS, REAL, same_steps=2),
    "gossip": AveragerSubject(
        lambda params, group, period: GossipModelAverager(
            params, period, process_group=group, seed=3
        ),
        PERIODS,
        REAL,
        due=at_the_end,
        agree=False,
    ),
    "gossip after a warm-up": AveragerSubject(
        lambda params, group, period: GossipModelAverager(
            params, period, warmup_steps=1, process_group=group, seed=3
        ),
        PERIODS,
        REAL,
        due=lambda step, period: step > 0 and step % period == 0,
        agree=False,
        same_steps=1,
    ),
}


def require_law(name: str) -> None:
    for subject, one in SUBJECTS.items():
        if AVERAGING_LAWS[name].applies(one):
            with case(subject=subject):
                drawn = examples(4).max_examples
                check_averaging_law(name, one, max_examples=drawn, derandomize=not EVERYTHING)


def test_parameters_stay_where_they_are() -> None:
    require_law("storages stay")


def test_one_call_is_one_step() -> None:
    require_law("one call is one step")


def test_parameters_are_written_when_that_is_due() -> None:
    require_law("written when it is due")


def test_ranks_agree_when_that_is_due() -> None:
    require_law("ranks agree when it is due")


def test_means_are_those_of_float64() -> None:
    require_law("mean of float64")


def test_hierarchy_of_one_level_neutral_slowmo_and_an_outer_sgd_of_rate_1_are_periodic() -> None:
    require_law("same as the oracle")


def test_sgd_averaged_after_each_step_is_data_parallel() -> None:
    require_law("every step is data parallel")


def test_stopped_at_any_moment_is_never_stopped() -> None:
    require_law("any moment")


def test_a_rank_that_joins_late_goes_on_with_the_others() -> None:
    require_law("joined late")


def test_all_laws_are_tried_of_what_is_said() -> None:
    subject = SUBJECTS["periodic"]
    check_averager(
        subject.factory, options=WARM, due=after_warm_up, mean=True, oracle=periodic,
        every_step=subject.every_step, max_examples=1,
    )  # fmt: skip
