"""PowerSGD's memory by parameter; tests/averaging compares resumed runs."""

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future

from functional_optim import sgd
from hooks import OptimizerState
from hooks.averaging.bucket_history import SubBucket
from hooks.averaging.contrib import PowerSGDMemory, power_sgd
from tests.averaging.resumed import SMALL, STEPS, PowerSGDRun
from tests.choices import case

from .training import same


def run(**options: Any) -> PowerSGDRun:
    return PowerSGDRun(dist.group.WORLD, **options)


def test_errors_and_matrices_go_to_their_parameters_whatever_the_buckets(
    world_of_one: None,
) -> None:
    """With one rank, no sum depends on positions in a buffer."""
    for first_cap, second_cap in [(SMALL, 25.0), (25.0, SMALL), (12 * SMALL, SMALL)]:
        whole, first, second = (run(cap=cap) for cap in (first_cap, first_cap, second_cap))
        whole.steps(range(STEPS))
        first.steps(range(5))
        second.load(first.saved())
        second.steps(range(5, STEPS))
        with case(first=first_cap, second=second_cap):
            kept, changed = (one.memory.state_dict()["buckets"] for one in (whole, second))
            assert kept != changed
            assert same(whole.all(), second.all())


def test_it_may_be_saved_at_any_moment_without_a_trace(world_of_one: None) -> None:
    whole, saved = run(), run()
    for step in range(STEPS):
        whole.steps(range(step, step + 1))
        saved.saved()
        saved.steps(range(step, step + 1))
    assert same(whole.all(), saved.all())


def test_it_is_torchs_hook_in_a_run_that_goes_on(world_of_one: None) -> None:
    """A single bucket is used: with more on a CPU, torch's collectives can overtake each other."""
    for options in ({}, {"warm_start": False}, {"use_error_feedback": False}):
        ours, torchs = run(cap=25.0, **options), run(**options)
        state = PowerSGDState(
            None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1,
            **options,
        )  # fmt: skip
        torchs.ddp = nn.parallel.DistributedDataParallel(torchs.module)
        torchs.ddp.register_comm_hook(state, powerSGD_hook)
        ours.steps(range(STEPS))
        torchs.steps(range(STEPS))
        with case(**options):
            own = (list(one.module.parameters()) for one in (ours, torchs))
            assert same(*own)
            assert ours.memory.state.compression_stats() == state.compression_stats()


def test_the_last_bucket_is_complete_before_ddp_starts_collectives_of_its_own(
    world_of_one: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With find_unused_parameters, DDP reduces a map of used parameters after the last bucket."""
    done: list[bool] = []

    def late(state: PowerSGDState, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        future: Future[torch.Tensor] = Future()
        done.append(False)
        at = len(done) - 1

        def end() -> None:
            done[at] = True
            state.maybe_increase_iter(bucket)
            future.set_result(bucket.buffer())

        threading.Timer(0.05, end).start()
        return future

    monkeypatch.setattr(power_sgd, "powerSGD_hook", late)
    made = run(start_powerSGD_iter=2)
    made.memory.state.iter = 2
    params = list(made.module.parameters())
    for number, param in enumerate(params):
        last = number == len(params) - 1
        made.memory.reduce(SubBucket(number, torch.ones(param.numel()), [param], last=last))
        assert all(done[:-1]) and done[-1] == last


def test_other_ranks_begin_without_errors_and_with_the_same_matrices(world_of_one: None) -> None:
    first, second = run(), run()
    first.steps(range(5))
    _, saved = first.saved()
    (memory,) = saved["averaging"]["power_sgd"]
    memory["errors"] = {}
    second.optimizer.load_state_dict(saved)
    found = second.memory.state_dict()
    assert found["errors"] == {} and found["iteration"] == 5
    assert all(torch.equal(one, found["qs"][name]) for name, one in memory["qs"].items())
    second.steps(range(5, 6))
    assert (
        second.memory.state_dict()["errors"].keys() == dict(second.module.named_parameters()).keys()
    )


def test_what_it_cannot_go_on_from_is_refused(world_of_one: None) -> None:
    first = run()
    first.steps(range(4))
    _, saved = first.saved()
    other = run(matrix_approximation_rank=3)
    before = other.all()
    for entry, message in (("errors", "errors of PowerSGD"), ("qs", "qs of PowerSGD")):
        (memory,) = saved["averaging"]["power_sgd"]
        changed = {**memory, entry: {"0.weight": torch.ones(1)}}
        with case(entry=entry), pytest.raises(ValueError, match=message):
            first.memory.load_state_dict(changed)
    with pytest.raises(ValueError, match=r"'4.weight': \(6, 3\).*matrix_approximation_rank"):
        other.optimizer.load_state_dict(saved)
    assert same(before, other.all())
    del other.memory
    other.ddp = None
    with pytest.raises(ValueError, match=r"1 memories of PowerSGD had, and 0 serve"):
        other.optimizer.load_state_dict(saved)
    assert other.optimizer.averager.step == 0
    strange = SubBucket(0, torch.ones(2), [nn.Parameter(torch.ones(2))], last=True)
    with pytest.raises(ValueError, match=r"shape \(2,\) that is none of the module's"):
        first.memory.reduce(strange)
    for arguments, message in (
        ((OptimizerState(sgd(), first.ddp), first.ddp), "state must be torch's PowerSGDState"),
        ((first.memory.state, 3), "module must be a torch.nn.Module, got 3"),
    ):
        with case(message=message), pytest.raises(TypeError, match=message):
            PowerSGDMemory(*arguments)
