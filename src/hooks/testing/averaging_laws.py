"""Laws of averagers: functions of a subject and a training that Hypothesis draws.

A law raises AssertionError if it is broken. :data:`AVERAGING_LAWS` lists the laws by the names that
``check_averager`` reports.
"""

import io
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from functional_optim.testing.compare import require_same, snapshot
from hooks.testing.trainings import RATE, AveragerSubject, Replica, Training
from sharding.transport.local import LocalWorld

History = list[list[Tensor]]
"""The parameters of one rank after each step."""


def storages_stay(subject: AveragerSubject, training: Training) -> None:
    """Parameters stay the memory that they were, so that views of them stay views."""

    def run(group: Any) -> None:
        replica = Replica(subject, training, group)
        addresses = [param.data_ptr() for param in replica.params]
        for step in replica.train():
            flat = torch.cat([param.detach().reshape(-1) for param in replica.params])
            require_same(
                f"parameters and the buffer that they view, step {step}", replica.flat, flat
            )
            for place, param in enumerate(replica.params):
                assert param.data_ptr() == addresses[place], (
                    f"parameter {place} is in other memory after step {step}"
                )

    LocalWorld(training.ranks).run(run)


def one_call_is_one_step(subject: AveragerSubject, training: Training) -> None:
    """``average_parameters`` counts one step, however many parameter groups it is given."""

    def run(group: Any) -> None:
        replica = Replica(subject, training, group)
        groups = [{"params": replica.params[:1]}, {"params": replica.params[1:]}]
        for step in range(training.steps):
            replica.step(step)
            replica.averager.average_parameters(groups)
            count = replica.averager.step
            assert count == step + 1, f"after {step + 1} steps it has counted {count}"

    LocalWorld(training.ranks).run(run)


def written_when_due(subject: AveragerSubject, training: Training) -> None:
    """After a step that is not due, parameters are what the rank's own step made of them."""
    due = _due(subject, training)
    for seen in _train_steps(subject, training):
        for step, (before, after) in enumerate(seen):
            if not due(step):
                require_same(f"parameters after step {step}", after, before)


def ranks_agree(subject: AveragerSubject, training: Training) -> None:
    """After a step that is due, all ranks have the same parameters, bit for bit."""
    due = _due(subject, training)
    ranks = _train(subject, training)
    for step in filter(due, range(training.steps)):
        for rank, seen in enumerate(ranks):
            require_same(
                f"parameters of ranks {rank} and 0, step {step}", seen[step], ranks[0][step]
            )


def mean_of_float64(subject: AveragerSubject, training: Training) -> None:
    """After a step that is due, parameters are the mean over all ranks, within an ulp bound."""
    due, ranks = _due(subject, training), _train_steps(subject, training)
    eps, more = torch.finfo(training.dtype).eps, subject.ulps * training.ulp()
    for step in filter(due, range(training.steps)):
        for place in range(len(training.shapes)):
            terms = torch.stack([_wide(seen[step][0][place]) for seen in ranks])
            # W - 1 sums, a quotient, and of 16 bits one rounding more.
            bound = (training.ranks + 1) * eps * terms.abs().mean(0) + more
            for rank, seen in enumerate(ranks):
                label = f"parameter {place} of rank {rank} and the mean of float64, step {step}"
                _require_close(
                    label, seen[step][1][place], terms.mean(0), bound, dtype=training.dtype
                )


def same_as_oracle(subject: AveragerSubject, training: Training) -> None:
    """After each step, parameters are those of the oracle."""
    assert subject.oracle is not None
    found = _train(subject, training)
    want = _train(replace(subject, factory=subject.oracle), training)
    _require_near("parameters and the oracle's", found, want, subject.ulps * training.ulp())


def data_parallel(subject: AveragerSubject, training: Training) -> None:
    """SGD that is averaged after each step is SGD under DistributedDataParallel."""
    assert subject.every_step is not None
    chosen = replace(training, options=tuple(subject.every_step.items()))

    def parallel(group: Any) -> History:
        module = nn.ParameterList(nn.Parameter(one) for one in training.start())
        ddp = DistributedDataParallel(_Squares(module), process_group=group, init_sync=False)
        sgd = torch.optim.SGD(module.parameters(), lr=RATE)
        seen = []
        for step in range(training.steps):
            sgd.zero_grad()
            rank = 0 if step < subject.same_steps else group.rank()
            ddp(training.centers(rank, step)).backward()
            sgd.step()
            seen.append([param.detach().clone() for param in module])
        return seen

    want = LocalWorld(training.ranks).run(parallel)
    # Both round each step, in another order.
    ulps = 4.0 * training.steps + training.ranks + subject.ulps
    found = _train(subject, chosen)
    _require_near("parameters and those under DDP", found, want, ulps * training.ulp())


def resumed(subject: AveragerSubject, training: Training) -> None:
    """Stopped after any step and loaded from a file, it is as if it had never been stopped."""

    def run(group: Any) -> list[Tensor]:
        replica = Replica(subject, training, group)
        for _ in replica.train(stop=training.cut):
            pass
        file = io.BytesIO()
        torch.save(replica.saved(), file)
        file.seek(0)
        replica = Replica(subject, training, group)
        replica.load(torch.load(file))
        for _ in replica.train(training.cut):
            pass
        return replica.values()

    found = LocalWorld(training.ranks).run(run)
    want = [seen[-1] for seen in _train(subject, training)]
    require_same("parameters (rank, place) of a run that was stopped", found, want)


def joined_late(subject: AveragerSubject, training: Training) -> None:
    """A rank that joins with what rank 0 had goes on with the others, and agrees with them."""
    due, ranks = _due(subject, training), training.ranks

    def before(group: Any) -> Any:
        replica = Replica(subject, training, group)
        for _ in replica.train(stop=training.cut):
            pass
        return snapshot(replica.saved())

    saved = LocalWorld(ranks).run(before)

    def after(group: Any) -> tuple[History, int]:
        replica = Replica(subject, training, group)
        own = saved[group.rank() if group.rank() < ranks else 0]
        replica.load(own)
        require_same("parameters of a rank that has loaded", replica.values(), own[0])
        seen = [replica.values() for _ in replica.train(training.cut)]
        return seen, replica.averager.step

    found = LocalWorld(ranks + 1).run(after)
    for rank, (seen, count) in enumerate(found):
        assert count == training.steps, f"rank {rank} has counted {count} steps"
        for step in filter(due, range(training.cut, training.steps)):
            at = step - training.cut
            require_same(
                f"parameters of ranks {rank} and 0, step {step}", seen[at], found[0][0][at]
            )


def _require_near(label: str, found: list[History], want: list[History], bound: float) -> None:
    for rank, (own, others) in enumerate(zip(found, want, strict=True)):
        for step, (params, wanted) in enumerate(zip(own, others, strict=True)):
            for place, (one, other) in enumerate(zip(params, wanted, strict=True)):
                where = f"{label}: parameter {place} of rank {rank} after step {step}"
                if bound:
                    _require_close(where, one, other, torch.tensor(bound), dtype=other.dtype)
                else:
                    require_same(where, one, other)


def _require_close(
    label: str, found: Tensor, want: Tensor, bound: Tensor, *, dtype: torch.dtype
) -> None:
    """Check the dtype, shape and, within a bound, the values of a tensor."""
    if found.dtype != dtype or found.shape != want.shape:
        raise AssertionError(
            f"{label}: {found.dtype} of shape {tuple(found.shape)}, expected {dtype} of shape "
            f"{tuple(want.shape)}"
        )
    off = (_wide(found) - _wide(want)).abs()
    if not bool((off <= bound).all()):  # NaN is at no distance
        raise AssertionError(f"{label}: {off.max().item():.3g} apart, more than {bound.max():.3g}")


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128)


def _due(subject: AveragerSubject, training: Training) -> Callable[[int], bool]:
    asked = subject.due
    assert asked is not None
    return lambda step: asked(step, **training.kwargs)


def _train_steps(
    subject: AveragerSubject, training: Training
) -> list[list[tuple[list[Tensor], list[Tensor]]]]:
    """Return the parameters of each rank at each step, before and after averaging."""

    def run(group: Any) -> list[tuple[list[Tensor], list[Tensor]]]:
        replica = Replica(subject, training, group)
        seen = []
        for step in range(training.steps):
            replica.step(step)
            before = replica.values()
            replica.average()
            seen.append((before, replica.values()))
        return seen

    return LocalWorld(training.ranks).run(run)


def _train(subject: AveragerSubject, training: Training) -> list[History]:
    """Return the parameters of each rank after each step."""
    return [[after for _, after in seen] for seen in _train_steps(subject, training)]


class _Squares(nn.Module):
    """Half the sum of squares of ``x - c``, whose gradient is ``x - c``."""

    def __init__(self, own: nn.ParameterList) -> None:
        super().__init__()
        self.own = own

    def forward(self, centers: list[Tensor]) -> Tensor:
        squares = [(x - c).square().sum() for x, c in zip(self.own, centers, strict=True)]
        return torch.stack(squares).sum() / 2


@dataclass(frozen=True)
class AveragingLaw:
    """A law, and the subjects and trainings that it applies to."""

    check: Callable[[AveragerSubject, Training], None]
    needs: tuple[str, ...] = ()
    """Names of the fields of a subject that must be set."""
    real_only: bool = False
    """True for real dtypes of at least 32 bits only."""

    def applies(self, subject: AveragerSubject) -> bool:
        """Return True if all needed fields are set."""
        return all(bool(getattr(subject, name)) for name in self.needs)


AVERAGING_LAWS: dict[str, AveragingLaw] = {
    "storages stay": AveragingLaw(storages_stay),
    "one call is one step": AveragingLaw(one_call_is_one_step),
    "written when it is due": AveragingLaw(written_when_due, ("due",)),
    "ranks agree when it is due": AveragingLaw(ranks_agree, ("due", "agree")),
    "mean of float64": AveragingLaw(mean_of_float64, ("due", "mean")),
    "same as the oracle": AveragingLaw(same_as_oracle, ("oracle",)),
    "every step is data parallel": AveragingLaw(data_parallel, ("every_step",), real_only=True),
    "any moment": AveragingLaw(resumed),
    "joined late": AveragingLaw(joined_late, ("due", "agree")),
}
"""Every law, by name."""
